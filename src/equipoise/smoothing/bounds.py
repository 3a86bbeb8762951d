"""From statistics to radii: counts of hard votes and moments of soft ones, the bounds of both, and the radius they certify.

The risk is spent by a plan: `top` for the lower bound of the selected class, `rival` for the upper bound of each other
bucket. `Gaussian` is the noise of the theorem, with the distance of the law that was sampled from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.core import Floats, InputError, Mask, as_upper, floats
from equipoise.smoothing.intervals import (
    OneSide,
    betting,
    clopper_pearson,
    complement,
    empirical_bernstein,
    lipschitz_interval,
)
from equipoise.smoothing.procedures import Partition
from equipoise.smoothing.radii import (
    positive,
    radius_mono,
    radius_mono_lipschitz,
    radius_multi,
    radius_multi_lipschitz,
)


@dataclass(frozen=True)
class Moments:
    """For N inputs and B buckets (bucket 0 is the selected class), over n draws with scores `Z ∈ [0, 1]`:

    `first = Σ(Z_b − shift_b)`, `second = Σ(Z_b − shift_b)²`, `cross = Σ(Z_0 − shift_0)(Z_b − shift_b)`. The shift is
    fixed before the sample (the selection mean), so that nothing cancels; statistics with the same shift add up.

    >>> m = Moments.of(np.array([[[0.9, 0.1], [0.7, 0.3]]]))
    >>> m.mean.round(3).tolist(), m.var.round(3).tolist()
    ([[0.8, 0.2]], [[0.02, 0.02]])
    """

    n: Floats
    shift: Floats
    first: Floats
    second: Floats
    cross: Floats

    @classmethod
    def of(cls, scores: Floats, shift: Floats | None = None) -> Moments:
        """Statistics of bucket scores (N, n, B).

        Args:
            scores: bucket or class scores (N, n, …).
            shift: what is subtracted from the scores, fixed before the sample; default: their mean.
        """
        centre = scores.mean(axis=1) if shift is None else shift
        z = scores - centre[:, None, :]
        n = np.full(len(scores), float(scores.shape[1]))
        return cls(n, centre, z.sum(axis=1), (z * z).sum(axis=1), (z * z[:, :, :1]).sum(axis=1))

    @classmethod
    def of_counts(cls, counts: Floats, n: Floats) -> Moments:
        """Statistics of hard votes from counts per bucket (N, B): a vote is 0 or 1, and never for two buckets at once.

        Args:
            counts: votes, (N, c) or per bucket (N, B).
            n: draws (N,).
        """
        counts = counts.astype(np.float64)
        cross = np.zeros_like(counts)
        cross[:, 0] = counts[:, 0]
        return cls(n.astype(np.float64), np.zeros_like(counts), counts, counts, cross)

    def scaled(self, n: int) -> Moments:
        """The statistics a sample of n draws with the same mean and variance would have: to plan, never to certify."""
        more = (n - 1) / np.maximum(self.n - 1, 1)[:, None]
        return Moments(
            n=np.full_like(self.n, float(n)),
            shift=self.mean,
            first=np.zeros_like(self.first),
            second=self._centred(self.second) * more,
            cross=self._centred(self.cross) * more,
        )

    def _centred(self, sums: Floats) -> Floats:
        top = self.first[:, :1] if sums is self.cross else self.first
        return sums - top * self.first / self.n[:, None]

    @property
    def mean(self) -> Floats:
        """Mean score per bucket."""
        return self.shift + self.first / self.n[:, None]

    @property
    def rounding(self) -> Floats:
        """(N, 1): bound of the rounding in a mean, however the n terms were added."""
        return (2.0**-51 * (self.n + 16))[:, None]

    @property
    def var(self) -> Floats:
        """Unbiased variance per bucket, rounded up."""
        return self._var(self.second, self._centred(self.second))

    @property
    def gap(self) -> tuple[Floats, Floats]:
        """Mean and unbiased variance (rounded up) of the direct margin `h_b = (1 + Z_0 − Z_b)/2` for every b."""
        mean = self.mean
        total = (
            self._centred(self.second)[:, :1]
            + self._centred(self.second)
            - 2 * self._centred(self.cross)
        ) / 4
        return (1 + mean[:, :1] - mean) / 2, self._var(self.second + self.second[:, :1], total)

    def _var(self, size: Floats, centred: Floats) -> Floats:
        spare = np.maximum(self.n - 1, 1)[:, None]
        return (np.maximum(centred, 0) + self.rounding * np.abs(size)) / spare


def bucket_scores(scores: Floats, partition: Partition) -> Floats:
    """(N, n, c) class scores → (N, n, B) bucket scores; where rounding carries a sum beyond 1 it is 1.

    Args:
        scores: bucket or class scores (N, n, …).
        partition: the buckets.
    """
    inputs, draws, classes = scores.shape
    flat = scores.reshape(inputs * draws, classes)
    order = np.repeat(partition.order, draws, axis=0)
    singles = np.repeat(partition.singles, draws)
    return np.minimum(Partition(order, singles).gather(flat), 1.0).reshape(inputs, draws, -1)


@dataclass(frozen=True)
class Smoothness:
    """Lipschitz constants of the scores before smoothing: of one component, and of the difference of two; ∞ if unknown."""

    component: float = np.inf
    pair: float = np.inf

    @classmethod
    def of(cls, lipschitz: Any, pair: Any = None) -> Smoothness:
        """Read constants: only upper bounds are let through; that of a pair defaults to twice the component's.

        Args:
            lipschitz: upper bound of one component, or None.
            pair: upper bound of a difference of two.
        """
        if lipschitz is None:
            return cls()
        constant = as_upper(lipschitz)
        return cls(constant, 2 * constant if pair is None else as_upper(pair))


UNKNOWN = Smoothness()


@dataclass(frozen=True)
class Gaussian:
    """The noise N(0, σ²I) of the theorem, and `variation`: the total variation between it and what was drawn.

    The mean of a score in [0, 1] under the drawn law differs from that under the Gaussian by at most the variation: it
    is subtracted from lower bounds and added to upper ones.
    """

    sigma: float
    variation: float = 0.0

    def __post_init__(self) -> None:
        positive(self.sigma, "sigma")
        if not self.variation >= 0:
            raise InputError(f"a total variation is a non-negative number, got {self.variation!r}")

    def below(self, lower: Floats) -> Floats:
        """A lower bound under the drawn law → one under the Gaussian."""
        if not self.variation:
            return lower
        return np.maximum(np.nextafter(lower - self.variation, -1.0), 0.0)

    def above(self, upper: Floats) -> Floats:
        """The same for an upper bound."""
        if not self.variation:
            return upper
        return np.minimum(np.nextafter(upper + self.variation, 2.0), 1.0)


@dataclass(frozen=True)
class Bounds:
    """`p_lower ≤` score of the selected class, every other score `≤ p_upper`, and the radius they certify."""

    p_lower: Floats
    p_upper: Floats
    radius: Floats

    def where(self, mask: Mask, other: Bounds) -> Bounds:
        """These bounds where `mask` holds, the other ones elsewhere.

        Args:
            mask: where to keep these bounds.
            other: the bounds elsewhere.
        """
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Bounds(*(np.where(mask, a, b) for a, b in pairs))


def count_bounds(
    counts: Floats, n: Floats, partition: Partition, noise: Gaussian, top: Floats, rival: Floats
) -> Bounds:
    """Clopper–Pearson at risk `top` for the selected class and at `rival` for every other bucket, then `radius_multi`.

    The upper bound grows with the count, so the largest bucket decides; `p̄ ≤ 1 − p̲` comes free on the same event.
    Rows without a draw certify nothing.

    Args:
        counts: votes, (N, c) or per bucket (N, B).
        n: draws (N,).
        partition: the buckets.
        noise: its level and variation.
        top: risk (N,) of the lower bound of the class.
        rival: risk (N,) of the upper bound of each other bucket.
    """
    hits = partition.gather(counts.astype(np.float64))
    n = np.maximum(n, 1.0)
    lower = noise.below(clopper_pearson(hits[:, 0], n, top, "lower"))
    upper = complement(lower)
    if hits.shape[1] > 2:
        worst = noise.above(clopper_pearson(hits[:, 1:].max(axis=1), n, rival, "upper"))
        upper = np.where(partition.buckets > 2, np.minimum(upper, worst), upper)
    return Bounds(lower, upper, radius_multi(lower, upper, noise.sigma))


def moment_bounds(
    moments: Moments,
    partition: Partition,
    noise: Gaussian,
    top: Any,
    rival: Any,
    smoothness: Smoothness = UNKNOWN,
) -> Bounds:
    """Bounds of every bucket's mean score, then the radius with or without a Lipschitz constant.

    Args:
        moments: of the bucket scores.
        partition: the buckets.
        noise: its level and variation.
        top: risk (N,) of the lower bound of the class.
        rival: risk (N,) of the upper bound of each other bucket.
        smoothness: Lipschitz constants of the scores.
    """
    mean = moments.mean
    var = moments.var
    n = moments.n[:, None]
    scale = _single_scales(partition, noise, smoothness.component)
    low_mean = np.clip(mean[:, :1] - moments.rounding, 0, 1)
    lower = _mean_bound(low_mean, var[:, :1], n, _column(top), scale[:, :1], "lower")
    others = np.clip(mean[:, 1:] + moments.rounding, 0, 1)
    upper = _mean_bound(others, var[:, 1:], n, _column(rival), scale[:, 1:], "upper")
    return two_sided(lower[:, 0], upper, partition, noise, smoothness)


def _single_scales(partition: Partition, noise: Gaussian, constant: float) -> Floats:
    """(N, B): `σ·L` of the buckets that hold one class, ∞ for the pooled one, whose sum may be steeper than its classes."""
    bucket = np.arange(int(partition.buckets.max(initial=1)))
    return np.where(bucket <= partition.singles[:, None], noise.sigma * constant, np.inf)


def _mean_bound(
    mean: Floats, var: Floats, n: Floats, risk: Floats, scale: Floats, side: OneSide
) -> Floats:
    """Empirical Bernstein, or the Lipschitz interval where that is shorter whatever the sample.

    The choice looks at n, the risk and the constant only: choosing by the sample's variance would spend the risk twice.
    """
    bernstein = empirical_bernstein(mean, var, n, risk, side)
    shortest = 7 * np.log(2 / risk) / (3 * (n - 1))  # of Bernstein's, at variance 0
    shorter = scale * np.sqrt(2 * np.log(1 / risk) / n) < shortest
    short = lipschitz_interval(mean, n, risk, np.where(shorter, scale, 0.0), side)
    return np.where(shorter, short, bernstein)


def sample_bounds(
    scores: Floats,
    partition: Partition,
    noise: Gaussian,
    top: Any,
    rival: Any,
    smoothness: Smoothness = UNKNOWN,
) -> Bounds:
    """The same with betting intervals, which need the bucket scores (N, n, B) themselves.

    Args:
        scores: bucket or class scores (N, n, …).
        partition: the buckets.
        noise: its level and variation.
        top: risk (N,) of the lower bound of the class.
        rival: risk (N,) of the upper bound of each other bucket.
        smoothness: Lipschitz constants of the scores.
    """
    lower = betting(scores[:, :, 0], top, "lower")
    others = np.moveaxis(scores[:, :, 1:], 2, 1)
    upper = betting(others, np.broadcast_to(_column(rival), others.shape[:2]), "upper")
    return two_sided(lower, upper, partition, noise, smoothness)


def two_sided(
    lower: Floats, upper: Floats, partition: Partition, noise: Gaussian, smoothness: Smoothness
) -> Bounds:
    """One lower bound (N,), upper bounds (N, B − 1) of the other buckets → the largest of those, capped, and the radius.

    Args:
        lower: lower bounds (N,) of the class.
        upper: upper bounds (N, B − 1) of the other buckets.
        partition: the buckets.
        noise: its level and variation.
        smoothness: Lipschitz constants of the scores.
    """
    lower = noise.below(lower)
    # soft scores sum to 1 up to rounding (checked where they come in)
    cap = np.minimum(complement(lower) + 1e-9, 1.0)
    worst = noise.above(np.where(partition.present()[:, 1:], upper, 0.0).max(axis=1))
    top = np.where(partition.buckets > 2, np.minimum(worst, cap), cap)
    return Bounds(lower, top, radius_multi_lipschitz(lower, top, noise.sigma, smoothness.component))


def margin_bounds(
    moments: Moments,
    partition: Partition,
    noise: Gaussian,
    risk: Any,
    smoothness: Smoothness = UNKNOWN,
) -> Bounds:
    """Direct margin: a Bernstein lower bound of `h_b = (1 + Z_0 − Z_b)/2` for every other bucket, each at the full risk.

    `h̃` crosses ½ where class b overtakes, so `R_b = ψ_h(h̲_b) − ψ_h(½)` with `L_h = Lip(F_y − F_k)/2`; the smallest
    counts. One of the buckets holds the true worst rival, whose margin is at least the bucket's: if the bound of that
    bucket holds, so does the smallest of all.

    Args:
        moments: of the bucket scores.
        partition: the buckets.
        noise: its level and variation.
        risk: full risk (N,).
        smoothness: Lipschitz constants of the scores.
    """
    mean, var = moments.gap
    low_mean = np.clip(mean[:, 1:] - moments.rounding, 0, 1)
    scale = _single_scales(partition, noise, smoothness.pair * 0.5)[:, 1:]
    lower = _mean_bound(low_mean, var[:, 1:], moments.n[:, None], _column(risk), scale, "lower")
    h = noise.below(np.where(partition.present()[:, 1:], lower, 1.0).min(axis=1))
    radius = radius_mono(h, noise.sigma)
    if smoothness.pair < np.inf:
        radius = radius_mono_lipschitz(h, noise.sigma, smoothness.pair * 0.5)
    return Bounds(h, complement(h), radius)


def _column(risk: Any) -> Floats:
    return floats(risk)[..., None]
