"""Certified ℓ2 radii from bounds of class probabilities: strong law (Cohen) and Lipschitz-aware.

Every function takes `p1`, a *lower* bound of the smoothed score of the predicted class, and `p2`, an *upper* bound of
every other one; arrays broadcast; the result is rounded down and is 0 where nothing is certified. A radius R means:
the prediction is the same at every x' with ‖x' − x‖₂ < R.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from equipoise.core import Floats, InputError, as_upper, floats
from equipoise.smoothing.ramp import quantile, ramp_quantile

_DOWN = 1 - 2.0**-49
_LARGEST = 1e300  # radii of larger noise may be no floats
_WIDEST = 1e100  # where L·σ comes near the end of the floats a larger constant is taken: never an infinite radius


def radius_mono(p: ArrayLike, sigma: ArrayLike) -> Floats:
    """`R = σ·Φ⁻¹(p)`: the radius from the predicted class alone.

    Guarantee: exact for the worst classifier with values in [0, 1]; needs p ≤ F̃_y(x), nothing else.
    Reference: Cohen, Rosenfeld, Kolter (2019), Theorem 1 with p2 = 1 − p1.

    Args:
        p: lower bound of the score.
        sigma: standard deviation of the noise.

    >>> round(float(radius_mono(0.9, 0.5)), 6)
    0.640776
    """
    p = _probability(p, "p")
    sigma = positive(sigma, "sigma")
    return _times(sigma, quantile(p)[0])


def radius_multi(p1: ArrayLike, p2: ArrayLike, sigma: ArrayLike) -> Floats:
    """`R = (σ/2)·(Φ⁻¹(p1) − Φ⁻¹(p2))`.

    Guarantee: needs p1 ≤ F̃_y(x) and p2 ≥ F̃_k(x) for every k ≠ y. Reference: Cohen et al. (2019), Theorem 1.

    Args:
        p1: lower bound of the top score.
        p2: upper bound of every other score.
        sigma: standard deviation of the noise.

    >>> round(float(radius_multi(0.6, 0.2, 0.5)), 6)
    0.273742
    """
    p1 = _probability(p1, "p1")
    p2 = _probability(p2, "p2")
    sigma = positive(sigma, "sigma")
    return _half_gap(quantile(p1)[0], quantile(p2)[1], sigma)


def radius_multi_lipschitz(
    p1: ArrayLike, p2: ArrayLike, sigma: ArrayLike, lipschitz: Any
) -> Floats:
    """`R = ½(ψ(p1) − ψ(p2))`, ψ the inverse of the Gaussian mean of a ramp of slope L: Cohen's radius for Lipschitz
    scores.

    With `G(s) = 1 − L·(I(s + 1/L) − I(s))`, `I(x) = x·Φ(x/σ) + σ·φ(x/σ)` and `ψ(p) = −G⁻¹(p)`, each ψ∘F̃_k is
    1-Lipschitz. Guarantee: as `radius_multi`, plus: `lipschitz` is an upper bound of Lip(F_k) for every component
    `F_k: R^d → [0, 1]` *before* smoothing (a number per input, or an array that broadcasts). Never below
    `radius_multi`, equal to it for L = ∞, decreasing in L, attained by a clipped ramp, infinite for L = 0 and p1 > p2.

    Args:
        p1: lower bound of the top score.
        p2: upper bound of every other score.
        sigma: standard deviation of the noise.
        lipschitz: upper bound of the Lipschitz constant (number, `Bound`, `Bracket`, or array of numbers).

    >>> [round(float(radius_multi_lipschitz(0.9, 0.1, s, L)), 4) for s, L in ((0.25, 0.5), (0.5, 1), (1, 0.5))]
    [0.8393, 0.7431, 1.4862]
    """
    p1 = _probability(p1, "p1")
    p2 = _probability(p2, "p2")
    lipschitz = _constant(lipschitz)
    sigma = positive(sigma, "sigma")
    if np.all(np.isinf(lipschitz)):
        return radius_multi(p1, p2, sigma)
    a = _width(lipschitz, sigma)
    finite = np.where(np.isinf(a), 1.0, a)
    low = ramp_quantile(p1, finite)[0]
    up = ramp_quantile(p2, finite)[1]
    ramp = np.maximum(_half_gap(low, up, sigma), radius_multi(p1, p2, sigma))
    # constant scores: p1 > p2 holds everywhere or nowhere
    return np.where(np.isinf(a), np.where(p1 > p2, np.inf, 0.0), ramp)


def radius_mono_lipschitz(p: ArrayLike, sigma: ArrayLike, lipschitz: Any) -> Floats:
    """`R = ψ(p) − ψ(½)`: the distance over which an L-Lipschitz score in [0, 1], smoothed, stays above ½.

    Args:
        p: lower bound of the score.
        sigma: standard deviation of the noise.
        lipschitz: upper bound of the Lipschitz constant.

    >>> round(float(radius_mono_lipschitz(0.9, 0.5, 1.0)), 4)
    0.7431
    """
    p = _probability(p, "p")
    sigma = positive(sigma, "sigma")
    constant = _constant(lipschitz)
    a = _width(constant, sigma)
    finite = np.where(np.isinf(a), 1.0, a)
    ramp = np.maximum(_times(sigma, ramp_quantile(p, finite)[0]), radius_mono(p, sigma))
    return np.where(np.isinf(a), np.where(p > 0.5, np.inf, 0.0), ramp)


def _half_gap(low: Floats, up: Floats, sigma: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        gap = low - up  # ∞ − ∞ happens only where p1 = p2 ∈ {0, 1}
    return _times(0.5 * sigma, np.where(np.isnan(gap), 0.0, gap) * _DOWN)


def _times(sigma: Floats, gap: Floats) -> Floats:
    """`σ·gap`, rounded down: infinite only where the gap is, not because the product is no float."""
    with np.errstate(over="ignore"):
        radius = np.maximum(sigma * gap * _DOWN, 0.0)
    return np.where(np.isfinite(gap), np.minimum(radius, np.finfo(np.float64).max), radius)


def _width(lipschitz: Floats, sigma: Floats) -> Floats:
    """`a = 1/(L·σ)` rounded down, that is, for a constant a touch larger than L; infinite for L = 0 only."""
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        width = np.asarray(1 / (lipschitz * sigma) * _DOWN)
    return np.where(lipschitz > 0, np.minimum(width, _WIDEST), width)


def _probability(p: ArrayLike, name: str) -> Floats:
    array = floats(p)
    if array.size and not np.all((array >= 0) & (array <= 1)):
        bad = array[~((array >= 0) & (array <= 1))].flat[0]
        raise InputError(f"{name} must lie in [0, 1], got {bad}")
    return array


def positive(sigma: ArrayLike, name: str) -> Floats:
    """A positive number, or an array of them; anything else is refused.

    Args:
        sigma: standard deviation of the noise.
        name: for the message.
    """
    try:
        array = floats(sigma)
    except (TypeError, ValueError):
        array = np.asarray(np.nan)
    if not np.all((array > 0) & (array <= _LARGEST)):
        raise InputError(f"{name} must be a positive number (at most {_LARGEST:g}), got {sigma!r}")
    return array


def _constant(lipschitz: Any) -> Floats:
    if isinstance(lipschitz, np.ndarray) and lipschitz.ndim:
        if not np.all(lipschitz >= 0):
            raise InputError("the Lipschitz constants must be non-negative numbers")
        return floats(lipschitz)
    return np.asarray(as_upper(lipschitz))
