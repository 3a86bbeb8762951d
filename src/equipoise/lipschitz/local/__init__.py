"""Local bounds on a ball around an input: attacked from below, proved from above."""

from equipoise.lipschitz.attack import attacked, project, stretch, unit
from equipoise.lipschitz.local.measure import Effort, certified, local_lipschitz
from equipoise.lipschitz.local.radius import Radii, certified_radius

__all__ = [
    "Effort", "Radii", "attacked", "certified", "certified_radius", "local_lipschitz", "project", "stretch", "unit",
]  # fmt: skip
