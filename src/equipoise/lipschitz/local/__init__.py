"""Local bounds on a ball around an input: attacked from below, proved from above."""

from equipoise.lipschitz.local.measure import attacked, certified, local_lipschitz, project, stretch, unit
from equipoise.lipschitz.local.radius import Radii, certified_radius

__all__ = [
    "Radii",
    "attacked",
    "certified",
    "certified_radius",
    "local_lipschitz",
    "project",
    "stretch",
    "unit",
]
