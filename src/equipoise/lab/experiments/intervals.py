"""Means over seeds with intervals, for verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Mean:
    """A mean over independent seeds with the half width of its 95 % Student interval (∞ for one seed)."""

    value: float
    half: float
    seeds: int

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.value - self.half

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.value + self.half

    def show(self, digits: int = 2) -> str:
        """`12.30 ± 0.40 (5 seeds)`."""
        if self.seeds < 2:
            return f"{self.value:.{digits}f} (1 seed)"
        return f"{self.value:.{digits}f} ± {self.half:.{digits}f} ({self.seeds} seeds)"


def mean_of(values: Sequence[float], level: float = 0.95) -> Mean:
    """Mean and Student interval; pass paired differences to compare two methods on the same seeds.

    >>> mean_of([1.0, 2.0, 3.0]).show()
    '2.00 ± 2.48 (3 seeds)'
    """
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Mean(mean, math.inf, n)
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return Mean(mean, float(stats.t.ppf(0.5 + level / 2, n - 1)) * math.sqrt(variance / n), n)
