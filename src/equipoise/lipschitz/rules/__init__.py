"""One rule per operation: what it does to distances, attacked by the tests one by one."""

from equipoise.lipschitz.rules import affine, fourier, pointwise, products, reduce, shapes
from equipoise.lipschitz.rules.registry import (
    Call,
    Signal,
    Step,
    find_rule,
    known_operations,
    register_rule,
    rule,
)

__all__ = [
    "Call", "Signal", "Step", "affine", "find_rule", "fourier", "known_operations", "pointwise", "products", "reduce",
    "register_rule", "rule", "shapes",
]  # fmt: skip
