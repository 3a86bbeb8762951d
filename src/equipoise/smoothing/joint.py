"""One test of class and rival together: what two separate bounds waste, without an approximation.

Let n_A and n_k be the votes of the class and of a rival among n, and let r be smaller than no true radius, that is
`Φ⁻¹(p_A) − Φ⁻¹(p_k) < 2r/σ`. Write `t = Φ⁻¹(p_A)`; then `p_k ≥ Φ(t − 2r/σ)`. Given n_A, the rival's votes are binomial among the
other n − n_A, with probability `p_k/(1 − p_A) ≥ θ_t = Φ(t − 2r/σ)/(1 − Φ(t))`. So

    U₁ = P(Bin(n, Φ(t)) ≥ n_A),        U₂ = P(Bin(n − n_A, θ_t) ≤ n_k)

are p-values, the second for every value of the first, and so is Stouffer's combination: for weights with `w₁² + w₂² = 1`,
w ≥ 0, fixed before the draws, `P( w₁Φ⁻¹(1 − U₁) + w₂Φ⁻¹(1 − U₂) ≥ Φ⁻¹(1 − α) ) ≤ α`. Indeed `Φ⁻¹(1 − U₂)` is, given n_A, below a
standard normal variable in law; replace it by one, then the first, of which the probability is an increasing function.

The radius r is certified if *every* t is rejected (the true one among them), and against every rival at the full α (the true
runner-up among them). Weights may depend on t: on a middle zone they are those that make the statistic nearly constant in t,
below it the class alone decides (w₂ = 0), above it the rival alone. For t in a cell [a, b] the first p-value is largest at b and
θ_t smallest at a, so finitely many cells cover all t. Two bounds at α/2 lose `z_{α/2}·(s₁ + s₂)`, this test about
`z_α·√(s₁² + s₂²)`.

Reference: Stouffer et al. (1949); intersection–union tests, Berger (1982).
"""

import numpy as np
from scipy.special import betainc, betaincinv, ndtr, ndtri

from equipoise.core import Floats, floats
from equipoise.smoothing.intervals import clopper_pearson
from equipoise.smoothing.ramp import density, quantile

_SLACK = 1e-9  # relative error allowed to the special functions; far above what was seen
_CELLS = (28, 40, 28)  # below, around and above the observed share
_WIDTH = 3.0  # of the middle part, in standard deviations
_LEAST = 1e-200  # risks below are taken as this: they ask for more than any sample shows


def joint_radius(
    hits: Floats,
    rival: Floats,
    draws: Floats,
    selection: tuple[Floats, Floats, Floats],
    alpha: float,
    variation: float = 0.0,
) -> Floats:
    """Certified `R/σ` (N,) from the votes of the class and of its strongest rival, 0 where nothing is shown; rounded down.

    Guarantee: wrong with probability at most alpha over the draws, for any selection that is independent of them.

    Args:
        hits: votes of the class.
        rival: votes of the rival with most votes.
        draws: all draws.
        selection: selection votes of the class, of its runner-up, and all of them: they choose weights and zone.
        alpha: risk.
        variation: total variation between one draw and a Gaussian one.

    >>> selection = tuple(np.array([v]) for v in (30.0, 7.0, 100.0))
    >>> bool(joint_radius(np.array([300.0]), np.array([70.0]), np.array([1000.0]), selection, 1e-3)[0] > 0.33)
    True
    """
    n_a, n_k, n = (floats(v) for v in (hits, rival, draws))
    weight, low, high = _zone(*selection, n)
    usable = (n_a > 0) & (n_a < n) & np.isfinite(low) & np.isfinite(high)
    n_a = np.where(usable, n_a, 1.0)
    n = np.where(usable, n, 2.0)
    n_k = np.minimum(np.where(usable, n_k, 0.0), n - n_a)
    ends = _cells(n_a, n, low, high)
    first = _below(n_a, n, ends, variation)
    total = quantile(1 - alpha)[1] * (1 + _SLACK)
    needed = (total - weight[:, None] * first[:, 1:]) / np.sqrt(1 - weight**2)[:, None]
    needed = needed + _SLACK * (1 + np.abs(needed))
    inside = _gap(ends[:, :-1], n_k[:, None], (n - n_a)[:, None], needed, variation).min(axis=1)
    above = _gap(high, n_k, n - n_a, np.full(len(n), total), variation)
    sure = usable & (first[:, 0] >= total)
    radius = 0.5 * np.minimum(inside, above)
    return np.where(sure & (radius > 0), np.maximum(radius * (1 - 1e-12) - 1e-12, 0.0), 0.0)


def joint_cells(
    hits: Floats, draws: Floats, selection: tuple[Floats, Floats, Floats]
) -> tuple[Floats, Floats]:
    """The weights w₁ (N,) and the ends of the cells (N, ·) of the test: what another program needs to repeat it.

    Args:
        hits: votes of the class.
        draws: all draws.
        selection: as for `joint_radius`.
    """
    weight, low, high = _zone(*selection, draws)
    return weight, _cells(hits, draws, low, high)


def _gap(t: Floats, k: Floats, others: Floats, needed: Floats, variation: float) -> Floats:
    """The largest 2r/σ at which `Φ⁻¹(1 − U₂)` reaches what is needed, for every t from this one on."""
    theta = _rejected(*np.broadcast_arrays(k, others, needed))
    p = np.minimum(
        (theta * (1 - ndtr(t) * (1 - _SLACK) + variation) + variation) * (1 + _SLACK), 1.0
    )
    return t - quantile(p)[1] - _SLACK * (1 + np.abs(t))


def _rejected(k: Floats, m: Floats, needed: Floats) -> Floats:
    """The smallest θ with `P(Bin(m, θ) ≤ k) ≤ Φ(−needed)`, rounded up; by the other tail where little is needed."""
    theta = clopper_pearson(k, m, np.clip(ndtr(-needed) * (1 - _SLACK), _LEAST, 0.9), "upper")
    other = ndtr(needed) * (1 + _SLACK) + 1e-300
    easy = (needed < 0) & (k < m)
    a = np.where(easy, k + 1, 1.0)
    b = np.where(easy, m - k, 1.0)
    root = betaincinv(a, b, np.minimum(other, 0.5)) * (1 + _SLACK)
    easy &= (root < 1) & (betainc(a, b, np.clip(root, 0, 1)) >= other * (1 - 1e-10))
    return np.where(easy, np.minimum(root, theta), theta)


def _below(hits: Floats, draws: Floats, t: Floats, variation: float) -> Floats:
    """`Φ⁻¹(1 − U₁)` at every t, rounded down."""
    p = np.minimum((ndtr(t) + variation) * (1 + _SLACK), 1.0)
    a = hits[:, None]
    b = (draws - hits)[:, None]
    tail = betainc(a, b + 1, p)
    rest = betainc(b + 1, a, 1 - p)
    with np.errstate(invalid="ignore"):
        z = np.where(tail < 0.5, -ndtri(tail * (1 + _SLACK)), ndtri(rest * (1 - _SLACK)))
        return np.where(
            np.isfinite(z), z - _SLACK * (1 + np.abs(z)), np.where(tail < 0.5, 30.0, -1e3)
        )


def _cells(hits: Floats, draws: Floats, low: Floats, high: Floats) -> Floats:
    """Ends of cells that cover the zone, narrow where the votes are."""
    p = (hits + 0.5) / (draws + 1)
    centre = ndtri(p)
    half = _WIDTH * np.sqrt(p * (1 - p) / draws) / density(centre)
    a = np.clip(centre - half, low, high)
    b = np.clip(centre + half, low, high)
    below, around, above = (np.linspace(0, 1, c + 1) for c in _CELLS)
    # farther away wider cells do: there is more to spare
    below = 1 - (1 - below) ** 2
    above = above**2
    parts = [
        s[:, None] + (e - s)[:, None] * u
        for s, e, u in ((low, a, below), (a, b, around), (b, high, above))
    ]
    ends = np.concatenate([parts[0], parts[1][:, 1:], parts[2][:, 1:]], axis=1)
    ends[:, 0] = low
    ends[:, -1] = high
    return np.maximum.accumulate(ends, axis=1)


def _zone(top: Floats, second: Floats, total: Floats, n: Floats) -> tuple[Floats, Floats, Floats]:
    """The weight w₁, and the ends of the zone of t, from selection votes: a matter of power, not of validity."""
    p1 = (top + 0.5) / (total + 1)
    theta = np.clip((second + 0.5) / (total - top + 0.85), 1e-4, 1 - 1e-4)
    p2 = theta * (1 - p1)
    slope1 = 1 / density(ndtri(p1))
    slope2 = 1 / density(ndtri(p2))
    own = np.sqrt(p1 * (1 - p1)) * (slope1 + theta * slope2)
    others = np.sqrt((1 - p1) * theta * (1 - theta)) * slope2
    spread = np.sqrt(p1 * (1 - p1) / n) * slope1
    ends = (betaincinv(top + 0.5, total - top + 0.5, q) for q in (0.002, 0.99))
    low, high = (ndtri(p) for p in ends)
    return own / np.hypot(own, others), low - 5 * spread, high + 3 * spread
