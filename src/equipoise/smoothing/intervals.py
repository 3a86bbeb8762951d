"""Confidence bounds for a mean, one- or two-sided, rounded outward: coverage is at least 1 − α, in floating point too.

`side="lower"` gives ℓ with `P(ℓ ≤ μ) ≥ 1 − α`, `"upper"` the mirror image, `"both"` a pair at α/2 each.
All arguments broadcast.

*Betting.* A gambler who bets the fraction λ_t of the wealth on "X_t is above m" holds `K_t(m) = Π(1 + λ_i(X_i − m))`. If the
mean is at most m this is a non-negative supermartingale, so by Ville's inequality it ever reaches 1/α with probability at most
α: an m whose gambler gets that rich is refuted.

*E-processes.* A non-negative process whose mean is at most 1 under the hypothesis at every stopping time ever reaches 1/α with
probability at most α. `log_e_value` bets with a mixture of Bernoulli alternatives.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, betaincinv, betaln

from equipoise.core import Floats, InputError, floats

Side = Literal["lower", "upper", "both"]
OneSide = Literal["lower", "upper"]
Pair = tuple[Floats, Floats]

_SLACK = 1e-10  # relative error allowed to scipy's regularised incomplete beta function (tests: below 1e-11)
_MANY = 2048  # from here on equal arguments are looked for
_CAP = 0.75  # of a bet, as a share of the wealth at the worst value
_STEPS = 40  # of a bisection
_LN_HALF_HALF = float(betaln(0.5, 0.5))
_SMALLEST = 1e-250  # below, `betaincinv` and `betainc` were seen to err by any factor


def clopper_pearson(k: ArrayLike, n: ArrayLike, alpha: ArrayLike, side: Side = "both") -> Any:
    """Exact bound of a binomial proportion from k hits in n draws.

    Lower bound ℓ: the root of `P(Bin(n, ℓ) ≥ k) = I_ℓ(k, n − k + 1) = α` (0 for k = 0), moved down until the
    incomplete beta function, evaluated, is below α by more than its own error.
    Guarantee: coverage ≥ 1 − α for every p and n. Reference: Clopper & Pearson (1934).

    Args:
        k: hits.
        n: number of draws.
        alpha: risk.
        side: "lower", "upper" or "both".

    >>> round(float(clopper_pearson(990, 1000, 0.001, "lower")), 6)
    0.976036
    >>> [round(float(v), 4) for v in clopper_pearson(0, 100, 0.05)]
    [0.0, 0.0362]
    """
    k, n, alpha = _arrays(k, n, alpha)
    bad = ~((k >= 0) & (k <= n) & (k == np.floor(k)) & (n == np.floor(n)))
    if bad.any():
        raise InputError(
            f"counts must be integers with 0 ≤ k ≤ n, got k = {k[bad][0]:.17g} and n = {n[bad][0]:.17g}"
        )

    def lower(hits: Floats, risk: Floats) -> Floats:
        return once(_binomial_lower, hits, n, risk)

    return sides(side, alpha, lambda a: lower(k, a), lambda a: complement(lower(n - k, a)))


def once(function: Callable[..., Floats], *arguments: Floats) -> Floats:
    """An elementwise function of arrays of one shape, evaluated once for equal arguments: 10⁵ counts of 10⁴ draws repeat."""
    if arguments[0].size < _MANY:
        return function(*arguments)
    rows = np.stack([a.ravel() for a in arguments])
    distinct, place = np.unique(rows, axis=1, return_inverse=True)
    return function(*distinct)[place.reshape(arguments[0].shape)]


def _binomial_lower(k: Floats, n: Floats, alpha: Floats) -> Floats:
    some = k > 0
    b = np.where(some, k, 1.0)
    c = np.where(some, n - k, n - 1) + 1
    p = np.asarray(betaincinv(b, c, alpha * (1 - 3 * _SLACK)))
    p = np.where(np.isfinite(p), p, 0.0)
    for step in 4.0 ** np.arange(-26, 0):  # almost always satisfied at once
        bad = ~(betainc(b, c, p) <= alpha * (1 - _SLACK))
        if not bad.any():
            break
        p = np.where(bad, p * (1 - step), p)
    p = np.where(betainc(b, c, p) <= alpha * (1 - _SLACK), p, 0.0)
    return np.where(some, p, 0.0)


def hoeffding(mean: ArrayLike, n: ArrayLike, alpha: ArrayLike, side: Side = "both") -> Any:
    """`mean ± √(ln(1/α)/(2n))` for independent values in [0, 1]; no variance needed.

    Guarantee: coverage ≥ 1 − α for every law on [0, 1]. Reference: Hoeffding (1963), Theorem 1.

    Args:
        mean: of the values.
        n: number of draws.
        alpha: risk.
        side: "lower", "upper" or "both".

    >>> round(float(hoeffding(0.9, 1000, 0.001, "lower")), 6)
    0.84123
    """
    mean, n, alpha = _arrays(mean, n, alpha)
    return _around(mean, n, side, alpha, lambda a: np.sqrt(np.log(1 / a) / (2 * n)))


def empirical_bernstein(
    mean: ArrayLike, var: ArrayLike, n: ArrayLike, alpha: ArrayLike, side: Side = "both"
) -> Any:
    """`mean ± (√(2V·ln(2/α)/n) + 7·ln(2/α)/(3(n − 1)))` for independent values in [0, 1].

    V is the *unbiased sample variance* `Σ(Z − mean)²/(n − 1)` (the extra 1/n of the thesis makes the interval √n too
    narrow: errata 8). Guarantee: one-sided coverage ≥ 1 − α for every law on [0, 1] and n ≥ 2.
    Reference: Maurer & Pontil (2009), Theorem 4.

    Args:
        mean: of the values.
        var: unbiased sample variance.
        n: number of draws.
        alpha: risk.
        side: "lower", "upper" or "both".

    >>> round(float(empirical_bernstein(0.9, 0.01, 1000, 0.001, "lower")), 6)
    0.869917
    """
    mean, var, n, alpha = _arrays(mean, var, n, alpha, least=2)

    def shift(a: Floats) -> Floats:
        log = np.log(2 / a)
        return np.sqrt(2 * var * log / n) + 7 * log / (3 * (n - 1))

    return _around(mean, n, side, alpha, shift)


def lipschitz_interval(
    mean: ArrayLike, n: ArrayLike, alpha: ArrayLike, scale: ArrayLike, side: Side = "both"
) -> Any:
    """`mean ± σL·√(2·ln(1/α)/n)` for values `F(x + δ_i)` of one L-Lipschitz function F into [0, 1], δ_i ~ N(0, σ²I).

    An L-Lipschitz function of Gaussian noise is sub-Gaussian with variance proxy σ²L² (so its variance is at most that, the
    Gaussian Poincaré inequality). Guarantee: one-sided coverage ≥ 1 − α, if `scale ≥ σL`.
    Reference: Tsirelson, Ibragimov, Sudakov (1976); Boucheron, Lugosi, Massart (2013), Theorem 5.6.

    Args:
        mean: of the n values.
        n: number of draws.
        alpha: risk.
        scale: an upper bound of σL.
        side: "lower", "upper" or "both".

    >>> round(float(lipschitz_interval(0.9, 1000, 0.001, 0.25, "lower")), 6)
    0.870615
    """
    mean, scale, n, alpha = _arrays(mean, scale, n, alpha)
    return _around(mean, n, side, alpha, lambda a: scale * np.sqrt(2 * np.log(1 / a) / n))


def _around(
    mean: Floats, n: Floats, side: Side, alpha: Floats, shift: Callable[[Floats], Floats]
) -> Floats | Pair:
    """Mean ± shift, widened by the rounding of a float64 mean of n terms, and clipped to [0, 1]."""
    if not np.all(mean <= 1):
        raise InputError("a mean of values in [0, 1] lies in [0, 1]; rescale first")
    # pairwise or blocked sums; plain ones carry their error in `Moments`
    rounding = 2.0**-52 * (np.log2(n) + 8)

    def lower(a: Floats) -> Floats:
        return np.maximum(mean - shift(a) * (1 + 2.0**-48) - rounding, 0.0)

    def upper(a: Floats) -> Floats:
        return np.minimum(mean + shift(a) * (1 + 2.0**-48) + rounding, 1.0)

    return sides(side, alpha, lower, upper)


def sides(
    side: Side, alpha: Floats, lower: Callable[[Floats], Floats], upper: Callable[[Floats], Floats]
) -> Floats | Pair:
    """One bound at the whole risk, or both at half of it each.

    Args:
        side: "lower", "upper" or "both".
        alpha: the risk.
        lower: the lower bound at a risk.
        upper: the upper bound at a risk.
    """
    if side == "lower":
        return lower(alpha)
    if side == "upper":
        return upper(alpha)
    if side == "both":
        return lower(alpha / 2), upper(alpha / 2)
    raise InputError(f"side must be 'lower', 'upper' or 'both', got {side!r}")


def complement(p: Floats) -> Floats:
    """`1 − p`, rounded up."""
    return np.where(p > 0, np.minimum(np.nextafter(1 - p, 2.0), 1.0), 1.0)


def _arrays(*values: ArrayLike, least: int = 1) -> list[Floats]:
    """Non-negative arrays of one shape, the last two numbers of draws (at least so many) and risks."""
    arrays = np.broadcast_arrays(*(floats(v) for v in values))
    *rest, n, alpha = arrays
    if not np.all((alpha >= _SMALLEST) & (alpha < 1)):
        raise InputError(
            f"the risk alpha must lie strictly between 0 and 1, and above {_SMALLEST:g}"
        )
    if not np.all(n >= least):
        raise InputError(f"at least {least} draw(s) are needed")
    if not all(bool(np.all(array >= 0)) for array in rest):
        raise InputError("counts, means, variances and constants must not be negative")
    return list(arrays)


def betting(samples: ArrayLike, alpha: ArrayLike, side: Side = "both") -> Any:
    """Bound of the mean of independent values in [0, 1], the samples along the last axis, in the order drawn.

    Bets `λ_t = min(√(2·ln(1/α)/(n·v̂_{t−1})), 0.75/m)` with v̂ the running variance of the past; m is refuted when
    `max_t K_t(m) ≥ 1/α`. Each factor decreases in m, so the refuted m form an interval and bisection finds its end; the
    end returned is one that was refuted with a margin for rounding.
    Guarantee: coverage ≥ 1 − α for every law on [0, 1] (also under optional stopping, the bets knowing only n and the
    past). Reference: Waudby-Smith & Ramdas (2024), §4.

    Args:
        samples: values in [0, 1], in the order drawn.
        alpha: risk.
        side: "lower", "upper" or "both".

    >>> x = np.tile([0.85, 0.95], 500)
    >>> round(float(betting(x, 0.001, "lower")), 3)
    0.891
    """
    x = floats(samples)
    if x.ndim < 1 or not np.all((x >= 0) & (x <= 1)):
        raise InputError("betting needs samples in [0, 1] along the last axis")
    _, _, alpha = _arrays(np.zeros(x.shape[:-1]), x.shape[-1], alpha)
    return sides(side, alpha, lambda a: _lower(x, a), lambda a: _above(x, a))


def _above(x: Floats, alpha: Floats) -> Floats:
    # 1 − x rounds by 2^-54 at most
    return np.minimum(np.nextafter(1 - _lower(1 - x, alpha) + 2.0**-52, 2.0), 1.0)


def _lower(x: Floats, alpha: Floats) -> Floats:
    goal = np.log(1 / alpha)
    bets = bet_sizes(x, goal[..., None])
    # rounding of the sum of n logarithms, each below 2 in size
    margin = 1e-12 + 4e-15 * x.shape[-1]
    low = np.zeros(alpha.shape)
    high = np.ones(alpha.shape)
    for _ in range(_STEPS):
        m = (low + high) / 2
        refuted = wealth(x, bets, m[..., None]).max(axis=-1) >= goal + margin
        low = np.where(refuted, m, low)
        high = np.where(refuted, high, m)
    return low


def bet_sizes(x: Floats, goal: Floats) -> Floats:
    """The bets before their cap: `√(2·ln(1/α)/(n·v̂_{t−1}))`, v̂ started at ¼ and using the past only.

    Args:
        x: values in [0, 1].
        goal: `ln(1/α)`.
    """
    n = x.shape[-1]
    t = np.arange(1, n + 1, dtype=np.float64)
    mean = (0.5 + np.cumsum(x, axis=-1)) / (t + 1)
    spread = (0.25 + np.cumsum((x - mean) ** 2, axis=-1)) / (t + 1)
    before = np.concatenate([np.full((*x.shape[:-1], 1), 0.25), spread[..., :-1]], axis=-1)
    return np.sqrt(2 * goal / (n * before))


def wealth(x: Floats, bets: Floats, m: Floats) -> Floats:
    """`ln K_t(m)` for t = 1 … n along the last axis; no factor is below ¼, so the gambler is never ruined.

    Args:
        x: values in [0, 1].
        bets: before their cap.
        m: the mean that is tested.
    """
    capped = np.minimum(bets, _CAP / np.maximum(m, 1e-300))
    return np.cumsum(np.log1p(capped * (x - m)), axis=-1)


def log_e_value(hits: ArrayLike, draws: ArrayLike, p0: ArrayLike) -> Floats:
    """`ln e` of the truncated-mixture e-process for H0: p ≤ p0 after t draws with A hits, rounded down.

    `ln e = lnB(A+½, t−A+½) − lnB(½,½) + ln I_{1−p0}(t−A+½, A+½) − ln I_{1−p0}(½,½) − A·ln p0 − (t−A)·ln(1−p0)`: the
    likelihood ratio against p0 averaged over the arcsine law restricted to (p0, 1). A may be a sum of scores in [0, 1].

    Guarantee: under H0, `P(∃t: e_t ≥ 1/α) ≤ α`. Reference: Ville (1939); Robbins (1970); Howard et al. (2021).

    Args:
        hits: hits so far, or a sum of scores.
        draws: draws so far.
        p0: the largest mean of the hypothesis.

    >>> bool(log_e_value(990, 1000, 0.9) > np.log(1000)), bool(log_e_value(900, 1000, 0.9) < 0)
    (True, True)
    """
    a, t, p = (floats(v) for v in (hits, draws, p0))
    if not np.all((a >= 0) & (a <= t * (1 + 1e-12))):
        raise InputError("hits must lie between 0 and the number of draws")
    if not np.all((p > 0) & (p < 1)):
        raise InputError("p0 must lie strictly between 0 and 1")
    miss = np.maximum(t - a, 0.0)
    tail = betainc(miss + 0.5, a + 0.5, 1 - p)
    with np.errstate(divide="ignore"):
        terms = (
            betaln(a + 0.5, miss + 0.5),
            -_LN_HALF_HALF,
            np.log(np.where(tail > _SMALLEST, tail, 0.0)),
            -np.log(betainc(0.5, 0.5, 1 - p)),
            -a * np.log(p),
            -miss * np.log1p(-p),
        )
    total = np.zeros(np.broadcast(a, t, p).shape)
    # a logarithm of the beta function is a difference of some of the gamma function
    size = t * np.log1p(t)
    for term in terms:
        total = total + term
        size = size + np.where(np.isfinite(term), np.abs(term), 0.0)
    return total - 1e-11 - 4e-14 * size
