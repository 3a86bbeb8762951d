"""A confidence bound by betting: for bounded values, tighter than Bernstein, and valid at any stopping time.

A gambler who bets the fraction λ_t of the wealth on "X_t is above m" holds `K_t(m) = Π(1 + λ_i(X_i − m))`. If the mean
is at most m this is a non-negative supermartingale, so by Ville's inequality it ever reaches 1/α with probability at
most α: an m whose gambler gets that rich is refuted.
"""

from __future__ import annotations

from typing import Literal, overload

import numpy as np
from numpy.typing import ArrayLike

from equipoise.core import InputError
from equipoise.smoothing.intervals import OneSide, Pair, Side
from equipoise.smoothing.ramp import Floats

_CAP = 0.75
_STEPS = 40


@overload
def betting(samples: ArrayLike, alpha: ArrayLike, side: OneSide) -> Floats: ...
@overload
def betting(samples: ArrayLike, alpha: ArrayLike, side: Literal["both"] = "both") -> Pair: ...
def betting(samples: ArrayLike, alpha: ArrayLike, side: Side = "both") -> Floats | Pair:
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
    if side == "lower":
        return _lower(x, alpha)
    if side == "upper":
        return _above(x, alpha)
    if side == "both":
        return _lower(x, alpha / 2), _above(x, alpha / 2)
    raise InputError(f"side must be 'lower', 'upper' or 'both', got {side!r}")


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
