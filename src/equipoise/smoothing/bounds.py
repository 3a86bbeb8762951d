"""From statistics to radii: the bounds shared by all procedures, for hard votes (counts) and soft ones (moments).

A plan says how the risk is spent: `top` for the lower bound of the selected class, `rival` for the upper bound of each
other bucket. `Gaussian` says what is known of the noise: its level, and how far the law that was drawn may be from it.

A confidence bound by betting: for bounded values, tighter than Bernstein, and valid at any stopping time.

A gambler who bets the fraction λ_t of the wealth on "X_t is above m" holds `K_t(m) = Π(1 + λ_i(X_i − m))`. If the mean
is at most m this is a non-negative supermartingale, so by Ville's inequality it ever reaches 1/α with probability at
most α: an m whose gambler gets that rich is refuted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core import InputError, as_upper
from equipoise.smoothing.intervals import (
    Side,
    clopper_pearson,
    complement,
    empirical_bernstein,
    randomized_binomial,
    sides,
)
from equipoise.smoothing.moments import Moments, Partition
from equipoise.smoothing.radii import positive, radius_mono, radius_mono_lipschitz, radius_multi, radius_multi_lipschitz
from equipoise.smoothing.ramp import Floats

_CAP = 0.75
_STEPS = 40


def betting(samples: ArrayLike, alpha: ArrayLike, side: Side = "both") -> Any:
    """Bound of the mean of independent values in [0, 1], the samples along the last axis, in the order drawn.

    Bets `λ_t = min(√(2·ln(1/α)/(n·v̂_{t−1})), 0.75/m)` with v̂ the running variance of the past; m is refuted when
    `max_t K_t(m) ≥ 1/α`. Each factor decreases in m, so the refuted m form an interval and bisection finds its end; the
    end returned is one that was refuted with a margin for rounding.
    Guarantee: coverage ≥ 1 − α for every law on [0, 1] (also under optional stopping, the bets knowing only n and the
    past). Reference: Waudby-Smith & Ramdas (2024), §4.

    >>> x = np.tile([0.85, 0.95], 500)
    >>> round(float(betting(x, 0.001, "lower")), 3)
    0.891
    """
    x = np.asarray(samples, dtype=np.float64)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise InputError("betting needs at least one sample along the last axis")
    if not bool(np.all((x >= 0) & (x <= 1))):
        raise InputError("betting needs samples in [0, 1]")
    alpha = np.broadcast_to(np.asarray(alpha, dtype=np.float64), x.shape[:-1])
    if not bool(np.all((alpha > 0) & (alpha < 1))):
        raise InputError("the risk alpha must lie strictly between 0 and 1")
    return sides(side, alpha, lambda a: _lower(x, a), lambda a: _above(x, a))


def _above(x: Floats, alpha: Floats) -> Floats:
    return np.minimum(np.nextafter(1 - _lower(1 - x, alpha) + 2.0**-52, 2.0), 1.0)  # 1 − x rounds by 2^-54 at most


def _lower(x: Floats, alpha: Floats) -> Floats:
    goal = np.log(1 / alpha)
    bets = bet_sizes(x, goal[..., None])
    margin = 1e-12 + 4e-15 * x.shape[-1]  # rounding of the sum of n logarithms, each below 2 in size
    low, high = np.zeros(alpha.shape), np.ones(alpha.shape)
    for _ in range(_STEPS):
        m = (low + high) / 2
        refuted = wealth(x, bets, m[..., None]).max(axis=-1) >= goal + margin
        low, high = np.where(refuted, m, low), np.where(refuted, high, m)
    return low


def bet_sizes(x: Floats, goal: Floats) -> Floats:
    """The bets before their cap: `√(2·ln(1/α)/(n·v̂_{t−1}))`, v̂ started at ¼ and using the past only."""
    n = x.shape[-1]
    t = np.arange(1, n + 1, dtype=np.float64)
    mean = (0.5 + np.cumsum(x, axis=-1)) / (t + 1)
    spread = (0.25 + np.cumsum((x - mean) ** 2, axis=-1)) / (t + 1)
    before = np.concatenate([np.full((*x.shape[:-1], 1), 0.25), spread[..., :-1]], axis=-1)
    return np.asarray(np.sqrt(2 * goal / (n * before)))


def wealth(x: Floats, bets: Floats, m: Floats) -> Floats:
    """`ln K_t(m)` for t = 1 … n along the last axis; no factor is below ¼, so the gambler is never ruined."""
    capped = np.minimum(bets, _CAP / np.maximum(m, 1e-300))
    return np.asarray(np.cumsum(np.log1p(capped * (x - m)), axis=-1))


@dataclass(frozen=True)
class Smoothness:
    """Lipschitz constants of the scores before smoothing: of one component, and of the difference of two; ∞ if
    unknown."""

    component: Any = np.inf
    pair: Any = np.inf

    @classmethod
    def of(cls, lipschitz: Any, pair: Any = None) -> Smoothness:
        """Read constants: only upper bounds are let through; that of a pair defaults to twice the component's."""
        if lipschitz is None:
            return cls()
        if isinstance(lipschitz, np.ndarray) and lipschitz.ndim:
            return cls(lipschitz, 2 * lipschitz if pair is None else np.asarray(pair))
        constant = as_upper(lipschitz)
        return cls(constant, 2 * constant if pair is None else as_upper(pair))


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
    upper = complement(lower)
    several = partition.buckets > 2
    if several.any():
        most = hits[several, 1:].max(axis=1)
        u = None if ties is None else ties[several, 1]
        bound = complement(_binomial(n[several] - most, n[several], np.broadcast_to(rival, n.shape)[several], u))
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
    cap = np.minimum(complement(lower) + 1e-9, 1.0)  # soft scores sum to 1 up to rounding (checked where they come in)
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
    return Bounds(h, complement(h), _margin_radius(h, noise.sigma, smoothness))


def _margin_radius(h: Floats, sigma: Any, smoothness: Smoothness) -> Floats:
    if bool(np.all(np.isinf(smoothness.pair))):
        return radius_mono(h, sigma)
    return radius_mono_lipschitz(h, sigma, smoothness.pair * 0.5)


def _column(risk: Any) -> Floats:
    return np.asarray(risk, dtype=np.float64)[..., None]
