"""Local bounds on a ball around an input: attacked from below, proved from above."""

from equipoise.lipschitz.local.measure import Effort, attacked, certified, local_lipschitz, project, stretch, unit
from equipoise.lipschitz.local.radius import Radii, certified_radius

__all__ = [
    "Effort",
    "Radii",
    "attacked",
    "certified",
    "certified_radius",
    "local_lipschitz",
    "project",
    "stretch",
    "unit",
]
