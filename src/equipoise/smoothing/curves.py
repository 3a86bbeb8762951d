"""From radii to results: certified accuracy at ε, curves over ε, average certified radius."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from equipoise.core import InputError
from equipoise.smoothing.ramp import Floats


def certified_accuracy(radius: ArrayLike, correct: ArrayLike, epsilon: ArrayLike = 0.0) -> Floats:
    """`A(ε) = mean(correct and radius ≥ ε)`; for an array of ε it is the curve.

    Radii are rounded down, so `≥` is safe; abstentions must come as `correct = False`.

    >>> certified_accuracy([0.3, 0.6, 0.9], [True, True, False], [0.0, 0.5, 0.7]).round(3).tolist()
    [0.667, 0.333, 0.0]
    """
    radius, correct = _pair(radius, correct)
    level = np.asarray(epsilon, dtype=np.float64)
    if bool(np.any(level < 0)) or bool(np.any(np.isnan(level))):
        raise InputError("epsilon must be non-negative")
    kept = np.sort(np.where(correct, radius, -1.0))
    return np.asarray((len(kept) - np.searchsorted(kept, level, side="left")) / len(kept))


def average_certified_radius(radius: ArrayLike, correct: ArrayLike) -> float:
    """`ACR = mean(radius·correct)`, the area under the certified-accuracy curve (Zhai et al. 2020).

    >>> average_certified_radius([0.3, 0.6, 0.9], [True, True, False])
    0.3
    """
    radius, correct = _pair(radius, correct)
    return float(np.where(correct, radius, 0.0).mean())


def _pair(radius: ArrayLike, correct: ArrayLike) -> tuple[Floats, Floats]:
    r, c = np.asarray(radius, dtype=np.float64).ravel(), np.asarray(correct, dtype=bool).ravel()
    if r.size == 0 or r.shape != c.shape:
        raise InputError(f"expected as many radii as verdicts and at least one, got {r.size} and {c.size}")
    if bool(np.any(np.isnan(r))):
        raise InputError("a radius is NaN")
    return r, c
