"""Local bounds on a ball around an input, and certified radii."""

from equipoise.lipschitz.local.measure import Effort, local_lipschitz
from equipoise.lipschitz.local.radius import Certifier, Radii, certified_radius

__all__ = ["Certifier", "Effort", "Radii", "certified_radius", "local_lipschitz"]
