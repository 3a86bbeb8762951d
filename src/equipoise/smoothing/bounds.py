"""From statistics to radii: the bounds shared by all procedures, for hard votes (counts) and soft ones (moments).

A plan says how the risk is spent: `top` for the lower bound of the selected class, `rival` for the upper bound of each
other bucket. `Gaussian` says what is known of the noise: its level, and how far the law that was drawn may be from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core import InputError
from equipoise.smoothing.betting import betting
from equipoise.smoothing.intervals import clopper_pearson, empirical_bernstein, randomized_binomial
from equipoise.smoothing.moments import Moments
from equipoise.smoothing.partitions import Partition
from equipoise.smoothing.radii import positive, radius_mono, radius_mono_lipschitz, radius_multi, radius_multi_lipschitz
from equipoise.smoothing.ramp import Floats


@dataclass(frozen=True)
class Smoothness:
    """Lipschitz constants of the scores before smoothing: of one component, and of the difference of two; ∞ if
    unknown."""

    component: Any = np.inf
    pair: Any = np.inf


UNKNOWN = Smoothness()


@dataclass(frozen=True)
class Gaussian:
    """The noise N(0, σ²I) of the theorem, and `variation`: the total variation between it and what was drawn.

    The mean of a score in [0, 1] under the drawn law differs from that under the Gaussian by at most the variation: it
    is subtracted from lower bounds and added to upper ones.
    """

    sigma: Any
    variation: Any = 0.0

    def __post_init__(self) -> None:
        positive(self.sigma, "sigma")
        if not bool(np.all(np.asarray(self.variation, dtype=np.float64) >= 0)):
            raise InputError(f"a total variation is a non-negative number, got {self.variation!r}")

    def below(self, lower: Floats) -> Floats:
        """A lower bound under the drawn law → one under the Gaussian."""
        moved = np.maximum(np.nextafter(lower - self.variation, -1.0), 0.0)
        return np.where(np.asarray(self.variation) > 0, moved, lower)

    def above(self, upper: Floats) -> Floats:
        """The same for an upper bound."""
        moved = np.minimum(np.nextafter(upper + self.variation, 2.0), 1.0)
        return np.where(np.asarray(self.variation) > 0, moved, upper)


@dataclass(frozen=True)
class Bounds:
    """`p_lower ≤` score of the selected class, every other score `≤ p_upper`, and the radius they certify."""

    p_lower: Floats
    p_upper: Floats
    radius: Floats

    def where(self, mask: NDArray[np.bool_], other: Bounds) -> Bounds:
        """These bounds where `mask` holds, the other ones elsewhere."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Bounds(*(np.where(mask, a, b) for a, b in pairs))


def count_bounds(
    counts: Floats,
    n: Floats,
    partition: Partition,
    noise: Gaussian,
    top: Floats,
    rival: Floats,
    ties: Floats | None = None,
) -> Bounds:
    """Clopper–Pearson at risk `top` for the selected class and at `rival` for every other bucket, then `radius_multi`.

    The upper bound grows with the count, so the largest bucket decides; `p̄ ≤ 1 − p̲` comes free on the same event.
    Rows without a draw certify nothing. `ties` (N, 2) are uniform numbers drawn before the sample: randomized bounds.
    """
    hits = partition.gather(counts.astype(np.float64))
    n = np.maximum(n, 1.0)
    lower = noise.below(_binomial(hits[:, 0], n, top, None if ties is None else ties[:, 0]))
    upper = _cap(lower)
    several = partition.buckets > 2
    if several.any():
        most = hits[several, 1:].max(axis=1)
        u = None if ties is None else ties[several, 1]
        bound = 1 - _binomial(n[several] - most, n[several], np.broadcast_to(rival, n.shape)[several], u)
        bound = np.where(bound < 1, np.minimum(np.nextafter(bound, 2.0), 1.0), 1.0)
        spread = np.broadcast_to(np.asarray(noise.variation, dtype=np.float64), n.shape)[several]
        upper[several] = np.minimum(upper[several], Gaussian(noise.sigma, spread).above(bound))
    return Bounds(lower, upper, radius_multi(lower, upper, noise.sigma))


def _binomial(k: Floats, n: Floats, risk: Any, ties: Floats | None) -> Floats:
    if ties is None:
        return clopper_pearson(k, n, risk, "lower")
    return randomized_binomial(k, n, risk, ties)


def moment_bounds(
    moments: Moments, partition: Partition, noise: Gaussian, top: Any, rival: Any, smoothness: Smoothness = UNKNOWN
) -> Bounds:
    """Empirical Bernstein for every bucket, then the radius with or without a Lipschitz constant."""
    mean, var, n = moments.mean, moments.var, moments.n
    low_mean = np.clip(mean[:, 0] - moments.rounding[:, 0], 0, 1)
    lower = empirical_bernstein(low_mean, var[:, 0], n, top, "lower")
    others = np.clip(mean[:, 1:] + moments.rounding, 0, 1)
    upper = empirical_bernstein(others, var[:, 1:], n[:, None], _column(rival), "upper")
    return two_sided(lower, upper, partition, noise, smoothness)


def sample_bounds(
    scores: Floats, partition: Partition, noise: Gaussian, top: Any, rival: Any, smoothness: Smoothness = UNKNOWN
) -> Bounds:
    """The same with betting intervals, which need the bucket scores (N, n, B) themselves."""
    lower = betting(scores[:, :, 0], top, "lower")
    others = np.moveaxis(scores[:, :, 1:], 2, 1)
    upper = betting(others, np.broadcast_to(_column(rival), others.shape[:2]), "upper")
    return two_sided(lower, upper, partition, noise, smoothness)


def two_sided(lower: Floats, upper: Floats, partition: Partition, noise: Gaussian, smoothness: Smoothness) -> Bounds:
    """One lower bound (N,), upper bounds (N, B − 1) of the other buckets → the largest of those, capped, and the
    radius."""
    lower = noise.below(lower)
    cap = np.minimum(_cap(lower) + 1e-9, 1.0)  # soft scores sum to 1 up to rounding (checked where they come in)
    worst = noise.above(np.where(partition.present()[:, 1:], upper, 0.0).max(axis=1))
    top = np.where(partition.buckets > 2, np.minimum(worst, cap), cap)
    return Bounds(lower, top, radius_multi_lipschitz(lower, top, noise.sigma, smoothness.component))


def margin_bounds(
    moments: Moments, partition: Partition, noise: Gaussian, risk: Any, smoothness: Smoothness = UNKNOWN
) -> Bounds:
    """Direct margin: a Bernstein lower bound of `h_b = (1 + Z_0 − Z_b)/2` for every other bucket, each at the full risk.

    `h̃` crosses ½ where class b overtakes, so `R_b = ψ_h(h̲_b) − ψ_h(½)` with `L_h = Lip(F_y − F_k)/2`; the smallest
    counts. One of the buckets holds the true worst rival, whose margin is at least the bucket's: if the bound of that
    bucket holds, so does the smallest of all.
    """
    mean, var = moments.gap
    low_mean = np.clip(mean[:, 1:] - moments.rounding, 0, 1)
    lower = empirical_bernstein(low_mean, var[:, 1:], moments.n[:, None], _column(risk), "lower")
    h = noise.below(np.where(partition.present()[:, 1:], lower, 1.0).min(axis=1))
    return Bounds(h, _cap(h), _margin_radius(h, noise.sigma, smoothness))


def _margin_radius(h: Floats, sigma: Any, smoothness: Smoothness) -> Floats:
    if bool(np.all(np.isinf(smoothness.pair))):
        return radius_mono(h, sigma)
    return radius_mono_lipschitz(h, sigma, smoothness.pair * 0.5)


def _column(risk: Any) -> Floats:
    return np.asarray(risk, dtype=np.float64)[..., None]


def _cap(lower: Floats) -> Floats:
    """`1 − p̲`, rounded up."""
    return np.asarray(np.minimum(np.nextafter(1 - lower, 2.0), 1.0))
