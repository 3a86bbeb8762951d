"""Lipschitz bounds of whole networks: rigorous upper bounds from the exported graph; unsupported graphs raise `Refused`."""

from equipoise.lipschitz.bound import lipschitz_bound
from equipoise.lipschitz.capture import Program, capture
from equipoise.lipschitz.chains import chain_bound
from equipoise.lipschitz.induced import induced_bound
from equipoise.lipschitz.local import Radii, certified_radius, local_lipschitz
from equipoise.lipschitz.report import Report, Row
from equipoise.lipschitz.rules import Call, Signal, Step, known_operations, register_rule
from equipoise.lipschitz.substitutions import proved_substitutions
from equipoise.norms.induced import induced_norm

__all__ = [
    "Call", "Program", "Radii", "Report", "Row", "Signal", "Step", "capture", "certified_radius", "chain_bound",
    "induced_bound", "induced_norm", "known_operations", "lipschitz_bound", "local_lipschitz", "proved_substitutions",
    "register_rule",
]  # fmt: skip
