"""Confidence bounds for a mean, one- or two-sided, rounded outward: coverage is at least 1 − α, in floating point too.

`side="lower"` gives ℓ with `P(ℓ ≤ μ) ≥ 1 − α`, `"upper"` the mirror image, `"both"` a pair at α/2 each.
All arguments broadcast. The betting interval, which looks at the samples, is in `betting`.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, betaincinv

from equipoise.core import InputError
from equipoise.smoothing.ramp import Floats

Side = Literal["lower", "upper", "both"]
OneSide = Literal["lower", "upper"]
Pair = tuple[Floats, Floats]

_SLACK = 1e-10  # relative error allowed to scipy's regularised incomplete beta function (tests: below 1e-11)
_MANY = 2048  # from here on equal arguments are looked for
_SMALLEST = 1e-250  # below, `betaincinv` and `betainc` were seen to err by any factor


def clopper_pearson(k: ArrayLike, n: ArrayLike, alpha: ArrayLike, side: Side = "both") -> Any:
    """Exact bound of a binomial proportion from k hits in n draws.

    Lower bound ℓ: the root of `P(Bin(n, ℓ) ≥ k) = I_ℓ(k, n − k + 1) = α` (0 for k = 0), moved down until the
    incomplete beta function, evaluated, is below α by more than its own error.
    Guarantee: coverage ≥ 1 − α for every p and n. Reference: Clopper & Pearson (1934).

    >>> round(float(clopper_pearson(990, 1000, 0.001, "lower")), 6)
    0.976036
    >>> [round(float(v), 4) for v in clopper_pearson(0, 100, 0.05)]
    [0.0, 0.0362]
    """
    k, n, alpha = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in (k, n, alpha)))
    _check(alpha, n, least=1)
    bad = ~((k >= 0) & (k <= n) & (k == np.floor(k)) & (n == np.floor(n)))
    if bool(bad.any()):
        raise InputError(f"counts must be integers with 0 ≤ k ≤ n, got k = {k[bad][0]:.17g} and n = {n[bad][0]:.17g}")

    if bool(np.any(alpha < _SMALLEST)):
        raise InputError(f"the risk alpha must be at least {_SMALLEST:g}: the binomial tail is not accurate below")

    def lower(hits: Floats, risk: Floats) -> Floats:
        return once(_binomial_lower, hits, n, risk)

    return sides(side, alpha, lambda a: lower(k, a), lambda a: complement(lower(n - k, a)))


def once(function: Callable[..., Floats], *arguments: Floats) -> Floats:
    """An elementwise function of arrays of one shape, evaluated once for equal arguments: 10⁵ counts of 10⁴ draws repeat."""
    if arguments[0].size < _MANY:
        return function(*arguments)
    rows = np.stack([a.ravel() for a in arguments], axis=1)
    order = np.lexsort(rows.T)
    ordered = rows[order]
    new = np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])
    values = np.empty(len(rows))
    values[order] = function(*ordered[new].T)[np.cumsum(new) - 1]
    return values.reshape(arguments[0].shape)


def randomized_binomial(k: ArrayLike, n: ArrayLike, alpha: ArrayLike, u: ArrayLike) -> Floats:
    """Lower bound of a binomial proportion whose ties are broken by `u`, uniform on [0, 1] and drawn before the sample.

    The root of `u·P(Bin(n, ℓ) ≥ k) + (1 − u)·P(Bin(n, ℓ) > k) = α`, found from the side of the smaller values. u = 1
    gives Clopper–Pearson. Guarantee: coverage ≥ 1 − α over sample and u, exactly 1 − α but for rounding and for one
    restraint: u is taken as at least 0.05, so that no draw of u alone shows p = 1. Reference: Stevens (1950).

    >>> bool(randomized_binomial(1000, 1000, 0.001, 0.5) > clopper_pearson(1000, 1000, 0.001, "lower"))
    True
    """
    k, n, alpha, given = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in (k, n, alpha, u)))
    if not bool(np.all((given >= 0) & (given <= 1))):
        raise InputError("the numbers that break ties must lie in [0, 1]")
    share: Floats = np.maximum(given, 0.05)
    low = clopper_pearson(k, n, alpha, "lower")
    high = np.where(k < n, clopper_pearson(np.minimum(k + 1, n), n, alpha, "lower"), 1.0)
    high = np.maximum(high, low)

    def tail(p: Floats) -> Floats:
        least = np.where(k > 0, betainc(np.maximum(k, 1.0), n - k + 1, p), 1.0)
        more = np.where(k < n, betainc(k + 1, np.maximum(n - k, 1.0), p), 0.0)
        return np.asarray(share * least + (1 - share) * more)

    for _ in range(55):
        p = (low + high) / 2
        fine = tail(p) <= alpha * (1 - _SLACK)
        low, high = np.where(fine, p, low), np.where(fine, high, p)
    return np.asarray(low)


def _binomial_lower(k: Floats, n: Floats, alpha: Floats) -> Floats:
    some = k > 0
    b, c = np.where(some, k, 1.0), np.where(some, n - k, n - 1) + 1
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

    >>> round(float(hoeffding(0.9, 1000, 0.001, "lower")), 6)
    0.84123
    """
    mean, n, alpha = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in (mean, n, alpha)))
    _check(alpha, n, least=1)
    _unit(mean)
    return _around(mean, n, side, alpha, lambda a: np.sqrt(np.log(1 / a) / (2 * n)))


def empirical_bernstein(mean: ArrayLike, var: ArrayLike, n: ArrayLike, alpha: ArrayLike, side: Side = "both") -> Any:
    """`mean ± (√(2V·ln(2/α)/n) + 7·ln(2/α)/(3(n − 1)))` for independent values in [0, 1].

    V is the *unbiased sample variance* `Σ(Z − mean)²/(n − 1)` (the extra 1/n of the thesis makes the interval √n too
    narrow: errata 8). Guarantee: one-sided coverage ≥ 1 − α for every law on [0, 1] and n ≥ 2.
    Reference: Maurer & Pontil (2009), Theorem 4.

    >>> round(float(empirical_bernstein(0.9, 0.01, 1000, 0.001, "lower")), 6)
    0.869917
    """
    arrays = (np.asarray(v, dtype=np.float64) for v in (mean, var, n, alpha))
    mean, var, n, alpha = np.broadcast_arrays(*arrays)
    _check(alpha, n, least=2)
    _unit(mean)
    if not bool(np.all(var >= 0)):
        raise InputError("a sample variance must be non-negative")

    def shift(a: Floats) -> Floats:
        log = np.log(2 / a)
        return np.asarray(np.sqrt(2 * var * log / n) + 7 * log / (3 * (n - 1)))

    return _around(mean, n, side, alpha, shift)


def _around(mean: Floats, n: Floats, side: Side, alpha: Floats, shift: Callable[[Floats], Floats]) -> Floats | Pair:
    """Mean ± shift, widened by the rounding of a float64 mean of n terms, and clipped to [0, 1]."""
    rounding = 2.0**-52 * (np.log2(n) + 8)  # pairwise or blocked sums; plain ones carry their error in `Moments`

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
    return np.asarray(np.where(p > 0, np.minimum(np.nextafter(1 - p, 2.0), 1.0), 1.0))


def _check(alpha: Floats, n: Floats, least: int) -> None:
    if not bool(np.all((alpha > 0) & (alpha < 1))):
        raise InputError("the risk alpha must lie strictly between 0 and 1")
    if not bool(np.all(n >= least)):
        raise InputError(f"at least {least} draw(s) are needed")


def _unit(mean: Floats) -> None:
    if not bool(np.all((mean >= 0) & (mean <= 1))):
        raise InputError("a mean of values in [0, 1] lies in [0, 1]; rescale first")
