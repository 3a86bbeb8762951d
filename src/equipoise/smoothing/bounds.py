"""From statistics to radii: the bounds shared by all procedures, for hard votes (counts) and soft ones (moments)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.smoothing.betting import betting
from equipoise.smoothing.intervals import clopper_pearson, empirical_bernstein
from equipoise.smoothing.moments import Moments
from equipoise.smoothing.partitions import Partition
from equipoise.smoothing.radii import radius_mono, radius_mono_lipschitz, radius_multi, radius_multi_lipschitz
from equipoise.smoothing.ramp import Floats


@dataclass(frozen=True)
class Smoothness:
    """Lipschitz constants of the scores before smoothing: of one component, and of the difference of two; ∞ if
    unknown."""

    component: Any = np.inf
    pair: Any = np.inf

    def take(self, rows: NDArray[np.int64]) -> Smoothness:
        """The constants of some of the inputs."""
        return Smoothness(
            *(v[rows] if isinstance(v, np.ndarray) and v.ndim else v for v in (self.component, self.pair))
        )


UNKNOWN = Smoothness()


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


def count_bounds(counts: Floats, n: Floats, partition: Partition, sigma: Any, alpha: Any) -> Bounds:
    """Clopper–Pearson at α/intervals for the selected class and every other bucket, then `radius_multi`.

    The upper bound grows with the count, so the largest bucket decides; `p̄ ≤ 1 − p̲` comes free on the same event.
    Rows without a draw certify nothing.
    """
    hits = partition.gather(counts.astype(np.float64))
    n = np.maximum(n, 1.0)
    risk = alpha / partition.intervals
    lower = clopper_pearson(hits[:, 0], n, risk, "lower")
    upper = _cap(lower)
    several = partition.intervals > 1
    if several.any():
        most = hits[several, 1:].max(axis=1)
        bound = clopper_pearson(most, n[several], risk[several], "upper")
        upper[several] = np.minimum(upper[several], bound)
    return Bounds(lower, upper, radius_multi(lower, upper, sigma))


def moment_bounds(
    moments: Moments, partition: Partition, sigma: Any, alpha: Any, smoothness: Smoothness = UNKNOWN
) -> Bounds:
    """Empirical Bernstein at α/intervals for every bucket, then the radius with or without a Lipschitz constant."""
    risk = np.asarray(alpha / partition.intervals)
    mean, var, n = moments.mean, moments.var, moments.n
    low_mean = np.clip(mean[:, 0] - moments.rounding[:, 0], 0, 1)
    lower = empirical_bernstein(low_mean, var[:, 0], n, risk, "lower")
    others = np.clip(mean[:, 1:] + moments.rounding, 0, 1)
    upper = empirical_bernstein(others, var[:, 1:], n[:, None], risk[:, None], "upper")
    return two_sided(lower, upper, partition, sigma, smoothness)


def sample_bounds(
    scores: Floats, partition: Partition, sigma: Any, alpha: Any, smoothness: Smoothness = UNKNOWN
) -> Bounds:
    """The same with betting intervals, which need the bucket scores (N, n, B) themselves."""
    risk = np.asarray(alpha / partition.intervals)
    lower = betting(scores[:, :, 0], risk, "lower")
    others = np.moveaxis(scores[:, :, 1:], 2, 1)
    upper = betting(others, np.broadcast_to(risk[:, None], others.shape[:2]), "upper")
    return two_sided(lower, upper, partition, sigma, smoothness)


def two_sided(lower: Floats, upper: Floats, partition: Partition, sigma: Any, smoothness: Smoothness) -> Bounds:
    """One lower bound (N,), upper bounds (N, B − 1) of the other buckets → the largest of those, capped, and the
    radius."""
    cap = np.minimum(_cap(lower) + 1e-9, 1.0)  # soft scores sum to 1 up to rounding (checked where they come in)
    worst = np.where(partition.present()[:, 1:], upper, 0.0).max(axis=1)
    top = np.where(partition.intervals > 1, np.minimum(worst, cap), cap)
    return Bounds(lower, top, radius_multi_lipschitz(lower, top, sigma, smoothness.component))


def margin_bounds(
    moments: Moments, partition: Partition, sigma: Any, alpha: Any, smoothness: Smoothness = UNKNOWN
) -> Bounds:
    """Direct margin: one Bernstein lower bound of `h_b = (1 + Z_0 − Z_b)/2` per other bucket, risk α over their number.

    `h̃` crosses ½ where class b overtakes, so `R_b = ψ_h(h̲_b) − ψ_h(½)` with `L_h = Lip(F_y − F_k)/2`; the smallest
    counts.
    A class inside a bucket has a larger h than the bucket, hence its radius is covered.
    """
    mean, var = moments.gap
    risk = np.asarray(alpha / np.maximum(partition.buckets - 1, 1))
    low_mean = np.clip(mean[:, 1:] - moments.rounding, 0, 1)
    lower = empirical_bernstein(low_mean, var[:, 1:], moments.n[:, None], risk[:, None], "lower")
    h = np.where(partition.present()[:, 1:], lower, 1.0).min(axis=1)
    return Bounds(h, _cap(h), _margin_radius(h, sigma, smoothness))


def _margin_radius(h: Floats, sigma: Any, smoothness: Smoothness) -> Floats:
    if bool(np.all(np.isinf(smoothness.pair))):
        return radius_mono(h, sigma)
    return radius_mono_lipschitz(h, sigma, smoothness.pair * 0.5)


def _cap(lower: Floats) -> Floats:
    """`1 − p̲`, rounded up."""
    return np.asarray(np.minimum(np.nextafter(1 - lower, 2.0), 1.0))
