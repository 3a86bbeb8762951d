"""Certified accuracy, in one place: what counts as certified at ε, curves over ε, the average certified radius."""

import math
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
#: one truth value per input, class or bucket
Mask = NDArray[np.bool_]
Verdicts = TypeVar("Verdicts", bound=Any)


def floats(values: ArrayLike) -> Floats:
    """An array in float64."""
    return np.asarray(values, dtype=np.float64)


def certified_at(radius: Any, correct: Verdicts, epsilon: float) -> Verdicts:
    """Which inputs are certified at ε: `correct and R ≥ ε`, of arrays or of tensors.

    Radii are rounded down, so `≥` is safe. `correct` must be False where there is no decision: for an abstention, for a
    margin of 0 (then R = 0, and a tie is not a decision) and for logits that are no numbers. Such inputs stay in the
    denominator, so that certified accuracy never exceeds accuracy.

    Args:
        radius: certified radii.
        correct: whether each prediction is right.
        epsilon: the level.

    >>> certified_at(np.array([0.5, 0.5, 0.4]), np.array([True, False, True]), 0.5).tolist()
    [True, False, False]
    """
    if not epsilon >= 0:
        raise InputError(f"epsilon must be non-negative, got {epsilon}")
    return correct & (radius >= epsilon)


def percent(share: float, decimals: int = 2) -> str:
    """A certified share in percent, rounded down: it is never shown larger than it is.

    Args:
        share: between 0 and 1.
        decimals: digits after the point.

    >>> percent(0.29), percent(2 / 3), percent(0.99999, 1)
    ('29.00', '66.66', '99.9')
    """
    steps = 10.0**decimals
    return f"{math.floor(share * 100 * steps + 1e-6) / steps:.{decimals}f}"


def certified_accuracy(radius: ArrayLike, correct: ArrayLike, epsilon: ArrayLike = 0.0) -> Floats:
    """`A(ε) = mean(correct and R ≥ ε)`, see `certified_at`; for an array of ε it is the curve.

    Args:
        radius: certified radii.
        correct: whether each prediction is right.
        epsilon: one level or several.

    >>> certified_accuracy([0.3, 0.6, 0.9], [True, True, False], [0.0, 0.5, 0.7]).round(3).tolist()
    [0.667, 0.333, 0.0]
    """
    radius, correct = _pair(radius, correct)
    levels = floats(epsilon)
    shares = [certified_at(radius, correct, float(level)).mean() for level in levels.ravel()]
    return np.asarray(shares).reshape(levels.shape)


def average_certified_radius(radius: ArrayLike, correct: ArrayLike) -> float:
    """`ACR = mean(R·correct)`, the area under the certified-accuracy curve (Zhai et al. 2020).

    Args:
        radius: certified radii.
        correct: whether each prediction is right.

    >>> average_certified_radius([0.3, 0.6, 0.9], [True, True, False])
    0.3
    """
    radius, correct = _pair(radius, correct)
    return float(np.where(correct, radius, 0.0).mean())


def _pair(radius: ArrayLike, correct: ArrayLike) -> tuple[Floats, Mask]:
    r = floats(radius).ravel()
    c = np.asarray(correct, dtype=bool).ravel()
    if r.size == 0 or r.shape != c.shape:
        raise InputError(
            f"expected as many radii as verdicts and at least one, got {r.size} and {c.size}"
        )
    if np.any(np.isnan(r)):
        raise InputError("a radius is NaN")
    return r, c


def round_levels(end: float) -> tuple[float, ...]:
    """0 and four round radii up to about `end`; 0 alone where that is 0.

    >>> round_levels(1.3), round_levels(0.45)
    ((0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.1, 0.2, 0.3, 0.4))
    """
    if end <= 0:
        return (0.0,)
    wanted = end / 4
    scale = 10.0 ** math.floor(math.log10(wanted))
    step = max(m * scale for m in (1.0, 2.0, 2.5, 4.0, 5.0) if m * scale <= wanted * (1 + 1e-9))
    return tuple(float(f"{k * step:.6g}") for k in range(5))
