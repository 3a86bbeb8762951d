"""Counting: how many operators, how close the bracket came to the truth, how often it was wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: the reference is an SVD in float64, which rounds too: a bracket end counts as wrong only beyond this relative distance.
#: LAPACK's error is a modest multiple of n·2⁻⁵³, about 1e-14 for the sizes used here.
REFERENCE_ROUNDING = 1e-12


@dataclass
class Tally:
    """What one check has seen.

    `closest_upper` is the smallest `upper/truth − 1` and `closest_lower` the largest `lower/truth`: the nearer to 0 and 1,
    the harder the test was. `comparisons` counts brackets: one operator may be bounded in several ways (size known and unknown,
    two arithmetics). `refused` counts batches in which the library declined to give a bound, which is not a violation.
    `scripts` are programs that show a violation by themselves.
    """

    name: str
    operators: int = 0
    comparisons: int = 0
    violations: int = 0
    refused: int = 0
    closest_upper: float = math.inf
    closest_lower: float = 0.0
    seconds: float = 0.0
    examples: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)

    def record(self, lower: Any, upper: Any, truth: Any, what: str, *, again: bool = False) -> None:
        """Compare brackets with the truth (numbers or tensors of one shape); `what` describes the batch and its seed.

        `lower` may be None, and `upper` infinite, where that end says nothing about this operator. `again`: the same operators
        were recorded before, bounded in another way; they are compared but not counted twice.
        """
        truth, upper = _flat(truth), _flat(upper)
        lower = torch.zeros_like(truth) if lower is None else _flat(lower)
        self.comparisons += truth.numel()
        self.operators += 0 if again else truth.numel()
        too_low = ~(upper >= truth * (1 - REFERENCE_ROUNDING))  # NaN counts as wrong
        too_high = ~(lower <= truth * (1 + REFERENCE_ROUNDING))
        for side, wrong, value in (("upper", too_low, upper), ("lower", too_high, lower)):
            for i in wrong.nonzero().flatten().tolist():
                self.violations += 1
                if len(self.examples) < 5:
                    self.examples.append(f"{what}: {side} {float(value[i])!r}, truth {float(truth[i])!r} (number {i})")
        positive = truth > 0
        if bool(positive.any()):
            above, below = upper[positive] / truth[positive] - 1, lower[positive] / truth[positive]
            self.closest_upper = min(self.closest_upper, float(above.min()))
            self.closest_lower = max(self.closest_lower, float(below.max()))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dict(vars(self))


def _flat(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64).flatten()
    return torch.tensor([float(value)], dtype=torch.float64)  # as_tensor would round a Python float to float32
