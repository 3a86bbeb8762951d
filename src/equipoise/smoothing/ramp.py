"""The Gaussian mean of a clipped ramp, and its certified inverse: the curve behind every strong-law radius.

Among all functions with values in [0, 1] and Lipschitz constant L, the clipped ramp of slope L moves its Gaussian
mean fastest. In units of σ, with the width `a = 1/(L·σ)` of the ramp and t measured from the ramp's centre,

    H_a(t) = (1/a)·∫_{t−a/2}^{t+a/2} Φ(s) ds = (J(t + a/2) − J(t − a/2))/a,     J(x) = x·Φ(x) + φ(x),

increasing from 0 to 1 with `H_a(−t) = 1 − H_a(t)`; `H_0 = Φ` is the step function of Cohen et al. (2019).
In the notation G, ψ of the documentation: `ψ(p) = σ·H_a⁻¹(p) + 1/(2L)`, and the constant cancels in every radius.

Model of the special functions: `ndtr`, `ndtri`, `exp` of scipy and numpy are taken as accurate to a relative
`2^-48·(1 + x²)`, which the tests check against 50-digit arithmetic; every result below is widened by that much.
"""

from math import pi, sqrt

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from equipoise.core import Floats, floats

_EPS = 2.0**-48  # relative error allowed to a special function, times (1 + x²) in the tail
_ROUND = 2.0**-50  # a handful of rounded operations
_THIN = 0.01  # below this width J(x) − J(x − a) cancels and the series is used
_TINY = 1e-290  # probabilities below are replaced by this one (lower end) or by 0 (upper end)
_BLOCK = 1 << 13
_INV_SQRT_2PI = 1 / sqrt(2 * pi)


def density(z: Floats) -> Floats:
    """That of the standard normal law."""
    return _INV_SQRT_2PI * np.exp(-0.5 * z * z)


def quantile(p: ArrayLike) -> tuple[Floats, Floats]:
    """`lower ≤ Φ⁻¹(p) ≤ upper`, in floating point.

    >>> low, up = quantile(0.975)
    >>> bool(low < 1.959963984540054 < up), bool(up - low < 1e-12)
    (True, True)
    """
    z = np.asarray(ndtri(floats(p)))
    slack = _EPS * np.abs(z)
    with np.errstate(invalid="ignore"):
        low = z - slack
        up = z + slack
    return np.where(np.isinf(z), z, low), np.where(np.isinf(z), z, up)


def ramp_quantile(p: ArrayLike, width: ArrayLike) -> tuple[Floats, Floats]:
    """`lower ≤ H_a⁻¹(p) ≤ upper` for p in [0, 1] and ramp width `a = 1/(L·σ) ≥ 0`; infinite at p = 0 and p = 1.

    The root comes from Halley steps; its two certified sides come from one more evaluation and two facts: left of
    the centre H is convex, so Newton's step on H never passes the root, and H is log-concave (a convolution of
    log-concave functions), so Newton's step on log H always does. The error of the evaluation is added to both.

    Args:
        p: values in [0, 1].
        width: `a = 1/(L·σ)`.

    >>> low, up = ramp_quantile([0.9, 0.1], 2.0)
    >>> [round(float(v), 6) for v in low]
    [1.486188, -1.486188]
    >>> bool((up - low < 1e-11).all())
    True
    """
    p, a = np.broadcast_arrays(floats(p), floats(width))
    shape = p.shape
    p = p.ravel()
    a = a.ravel()
    low = np.empty(p.shape)
    up = np.empty(p.shape)
    with np.errstate(all="ignore"):
        for start in range(0, p.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            low[part], up[part] = _block(p[part], a[part])
    return low.reshape(shape), up.reshape(shape)


def _block(p: Floats, a: Floats) -> tuple[Floats, Floats]:
    q = np.minimum(p, 1 - p)  # 1 − p is exact for p ≥ ½
    right = p > 0.5
    low, up = _depth(np.maximum(q, _TINY), a)
    low[q <= 0] = np.inf
    up[q < _TINY] = np.inf
    return np.where(right, low, -up), np.where(right, up, -low)


def _depth(q: Floats, a: Floats) -> tuple[Floats, Floats]:
    """Bracket of `m ≥ 0` with `H_a(−m) = q` for q in (0, ½]."""
    z = -ndtri(q)
    z_low = np.maximum(z * (1 - _EPS), 0.0)
    z_up = z * (1 + _EPS)
    half = a / 2
    floor = z_low
    ceiling = z_up + half
    x = np.minimum(np.maximum(half - _guess(q, z, a), half - ceiling), half - floor)
    log_q = np.log(q)
    # Halley on log H: nearly a parabola in the tail and nearly a line at the centre
    for _ in range(2):
        h, slope, bend, _ = _tail(x, a, False)
        rise = slope / h
        f = np.log(h) - log_q
        curve = bend / h - rise * rise
        step = 2 * f * rise / np.maximum(2 * rise * rise - f * curve, rise * rise)
        np.nan_to_num(step, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        x = np.minimum(np.maximum(x - step, half - ceiling), half - floor)
    h, slope, _, error = _tail(x, a)
    k = h - q
    moved = _ROUND * (half + np.abs(x))
    below = k - error
    low = (half - x) + below / (slope * np.where(below > 0, 1 + 1e-6, 1 - 1e-6)) - moved
    wrong = ~(np.isfinite(low) & (slope > 0)) | (a <= 0)
    low = np.maximum(low, z_low)
    low[wrong] = z_low[wrong]
    centre = q >= 0.5
    low[centre] = 0.0
    above = np.log1p((k + error) / q) * h / slope
    up = (
        (half - x)
        + above * np.where(above > 0, 1 + 1e-6, 1 - 1e-6)
        + moved
        + _ROUND * np.abs(above)
    )
    ceiling = ceiling * (1 + _ROUND)
    up = np.minimum(up, ceiling)
    wrong |= ~(up >= low)
    up[wrong] = ceiling[wrong]
    up[centre] = 0.0
    return low, up


def _guess(q: Floats, z: Floats, a: Floats) -> Floats:
    """Where to start: a ramp adds the variance a²/12 of a uniform law; far out only its upper corner is felt."""
    area = a * q
    corner = np.where(
        area > 0.4, a / 2 - area + 0.4, a / 2 + np.sqrt(2 * np.log(0.4 / np.minimum(area, 0.4)))
    )
    return np.minimum(z * np.sqrt(1 + a * a / 12), corner)


def _tail(x: Floats, a: Floats, bounded: bool = True) -> tuple[Floats, Floats, Floats, Floats]:
    """(H, H', H'', error bound of H if asked for) at `t = x − a/2 ≤ 0`; x is the distance to the ramp's upper
    corner."""
    thin = a < _THIN
    if thin.all():
        return _series(x - a / 2, a)
    y = x - a
    phi_x = density(x)
    phi_y = density(y)
    cdf_x = ndtr(x)
    cdf_y = ndtr(y)
    h = (x * cdf_x + phi_x - y * cdf_y - phi_y) / a
    slope = (cdf_x - cdf_y) / a
    bend = (phi_x - phi_y) / a
    error = np.empty_like(h)
    if bounded:
        error = _evaluation_error(x, phi_x, cdf_x, a) + _evaluation_error(y, phi_y, cdf_y, a)
    if thin.any():
        h[thin], slope[thin], bend[thin], error[thin] = _series(x[thin] - a[thin] / 2, a[thin])
    return h, slope, bend, error


def _evaluation_error(x: Floats, phi: Floats, cdf: Floats, a: Floats) -> Floats:
    tail = np.minimum(x, 0)
    return (1 + tail * tail) * (phi + np.abs(x) * cdf) * (_EPS / a)


def _series(t: Floats, a: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """The same for a thin ramp: `H = Φ + a²Φ''/24 + a⁴Φ''''/1920 + R`, `|R| ≤ a⁶·max|Φ⁽⁶⁾|/322560` near t."""
    b = a * a
    phi = density(t)
    cdf = ndtr(t)
    h = cdf - phi * (b / 24 * t + b * b / 1920 * (t * t * t - 3 * t))
    slope = phi * (1 + b / 24 * (t * t - 1))
    bend = -t * phi
    r = np.abs(t) + a
    # |Φ⁽⁶⁾| ≤ (r⁵ + 10r³ + 15r)·φ on the window, and φ grows there by at most exp(r·a/2) ≤ 2
    rest = b * b * b / 322560 * 2 * phi * r * ((r * r + 10) * (r * r) + 15)
    # t itself was rounded by 2^-53·(|x| + a): that moves Φ by as much times its slope φ
    return h, slope, bend, rest + _EPS * (1 + t * t) * cdf + _EPS * (1 + r) * phi
