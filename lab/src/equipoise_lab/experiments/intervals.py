"""Means over seeds with intervals, the rules by which they decide a claim, and what a design can detect."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from equipoise_lab.experiments.experiment import MOST, Label, Power, graded


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

    @property
    def signed(self) -> str:
        """`+1.50 ± 0.40`."""
        return f"{self.value:+.2f} ± {self.half:.2f}"

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


def gain_label(effect: Mean, published: float | None = None, share: float = 0.5) -> Label:
    """The verdict on a claimed gain, by its interval and never by the sign of its mean.

    Open where the interval holds both 0 and the published gain (0 alone where no number was published); reproduced
    where it lies above 0 and the mean is at least `share` of the published gain, in direction where it is less; refuted
    where it excludes the published gain and does not lie above 0.

    >>> [gain_label(Mean(v, h, 5), 2.0).value for v, h in ((2.1, 0.5), (0.4, 0.2), (0.4, 0.9), (1.0, 1.5))]
    ['reproduced', 'reproduced in direction', 'refuted', 'open']
    """
    none = effect.low <= 0 <= effect.high
    if none and (published is None or effect.low <= published <= effect.high):
        return Label.OPEN
    return graded(effect.low > 0 and effect.value >= share * (published or 0.0), effect.low > 0)


def combined(labels: Sequence[Label]) -> Label:
    """The verdict on «at every …»: one failure refutes it, one open case leaves it open."""
    for label in (Label.REFUTED, Label.OPEN, Label.DIRECTION):
        if label in labels:
            return label
    return Label.REPRODUCED


def parity_label(difference: Mean, margin: float) -> Label:
    """The verdict on «equal»: the interval inside ±margin, wholly outside it, or open.

    >>> [parity_label(Mean(0.1, h, 5), 1.0).value for h in (0.5, 2.0)]
    ['reproduced', 'open']
    """
    if difference.low > -margin and difference.high < margin:
        return Label.REPRODUCED
    return Label.REFUTED if difference.low > margin or difference.high < -margin else Label.OPEN


def power_of(
    differences: Sequence[float], published: float, unit: str = "points", over: str = "seeds"
) -> Power:
    """The smallest effect that paired differences of this spread detect at the 5 % level with probability 0.8.

    `(t_{n−1}(0.975) + t_{n−1}(0.8))·s/√n`, and the least n for which that is the published effect.

    >>> power_of([1.0, 2.0, 3.0], 2.63).needed
    4
    """
    return power_of_mean(mean_of(differences), published, unit, over)


def power_of_mean(
    effect: Mean, published: float, unit: str = "points", over: str = "seeds"
) -> Power:
    """The same from a mean with its 95 % interval, whose half width is `t_{n−1}(0.975)·s/√n`."""
    n = effect.seeds
    if n < 2 or not math.isfinite(effect.half):
        return Power(published, math.inf, n, 0, unit, over)
    spread = effect.half * math.sqrt(n) / float(stats.t.ppf(0.975, n - 1))

    def detectable(pairs: int) -> float:
        factor = stats.t.ppf(0.975, pairs - 1) + stats.t.ppf(0.8, pairs - 1)
        return float(factor) * spread / math.sqrt(pairs)

    least, most = 1, 2
    while most < MOST and detectable(most) > abs(published):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if detectable(middle) > abs(published) else (least, middle)
    return Power(published, detectable(n), n, min(most, MOST), unit, over)
