"""Gaussian noise on a grid, as exact integers: what floating-point noise cannot promise.

Let Q round ℝ^d to a grid of step h. The certified classifier is F∘Q, a measurable map of ℝ^d, so every theorem about real
Gaussian noise holds for it. At a point x of the grid `Q(x + δ) = x + Q(δ)`, and the coordinates of `Q(δ)/h` are independent
integers with

    P(k) = Φ((k + ½)h/σ) − Φ((k − ½)h/σ),

which no longer depends on x. They are drawn by inversion of a uniform 64-bit word: the distribution function is a table of
64-bit thresholds, computed once with 40 digits and rounded down. With K cells the total variation per coordinate is at
most K·2⁻⁶³: each of the K − 1 thresholds is off by less than 2⁻⁶⁴, and the mass beyond the last cell, which has a
probability below 2⁻⁶⁴ on either side, is put into it.

Most words are decided by their first 16 bits: a table of 2¹⁶ entries holds the value, or says that a threshold cuts this
entry; then 48 more bits are drawn and the threshold is searched. So a 64-bit word makes four draws.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core import InputError, Refused

_BITS = 16
_REST = 64 - _BITS
_FINEST = 1 << 12  # cells per σ at most


@dataclass(frozen=True)
class Law:
    """The tables of one integer law."""

    thresholds: NDArray[np.uint64]
    guide: NDArray[np.float32]
    lowest: int

    @property
    def cells(self) -> int:
        """Number of values that can be drawn."""
        return len(self.thresholds) + 1


@dataclass(frozen=True)
class Grid:
    """A grid with `cells` points per unit (255 for 8-bit images, else a power of two) and noise of level sigma on it.

    >>> g = Grid(0.25, 255.0)
    >>> g.law.cells, g.variation(3072) < 1e-12, g.distance(3072)
    (1159, True, 0.0)
    """

    sigma: float
    cells: float

    def __post_init__(self) -> None:
        if not self.image and math.frexp(self.cells)[0] != 0.5:
            raise InputError(f"a grid has 255 points per unit or a power of two, got {self.cells}")
        if not 1 / 64 <= self.sigma * self.cells <= _FINEST:
            raise InputError(
                f"noise of level {self.sigma:g} on a grid of step {self.step:g}: expected between 1/64 and {_FINEST} steps per "
                "σ; use noise='float'"
            )

    @property
    def image(self) -> bool:
        """Whether it is the grid of 8-bit images."""
        return self.cells == 255.0

    @property
    def step(self) -> float:
        """The distance h of neighbours (rounded)."""
        return 1 / self.cells

    @property
    def law(self) -> Law:
        """The tables, made once per level and grid."""
        return _law(self.sigma, self.cells)

    @property
    def reach(self) -> int:
        """The largest integer that can be drawn."""
        return -self.law.lowest

    def variation(self, dimension: int) -> float:
        """Bound of the total variation between the drawn noise of `dimension` coordinates and the rounded Gaussian."""
        return float(np.nextafter(dimension * self.law.cells * 2.0**-63, 1.0))

    def distance(self, dimension: int) -> float:
        """What to subtract from radii: nothing for 8-bit images; else `h·√d`, for x and for x' rounded to the grid."""
        if self.image:
            return 0.0
        return float(np.nextafter(self.step * math.sqrt(dimension) * (1 + 2.0**-50), math.inf))

    def integers(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """The place of x on the grid; a point beside the 8-bit grid is refused."""
        if self.image and not on_bytes(x):
            raise Refused(
                "this classifier smooths on the grid of 8-bit images (multiples of 1/255), and the input lies beside it: "
                "round it first, (255·x).round()/255, or use noise='float'"
            )
        return np.rint(x * self.cells)

    def draw(self, bits: np.random.Philox, out: NDArray[Any]) -> None:
        """Fill a contiguous float array with independent integers of the law."""
        law, flat = self.law, out.reshape(-1)
        words = bits.random_raw(-(-flat.size // 4)).astype("<u8", copy=False)
        first = words.view("<u2")[: flat.size]
        if out.dtype == np.float32:
            np.take(law.guide, first, out=flat, mode="wrap")
        else:
            flat[:] = law.guide[first]
        cut = np.flatnonzero(np.isnan(flat))
        more = bits.random_raw(len(cut)) if len(cut) else np.empty(0, dtype=np.uint64)
        whole = (first[cut].astype(np.uint64) << np.uint64(_REST)) | (more >> np.uint64(_BITS))
        flat[cut] = np.searchsorted(law.thresholds, whole, side="right") + law.lowest


def power_of_two(sigma: float) -> float:
    """Points per unit for data that is not 8-bit: between 1024 and 2048 steps per σ."""
    return 2.0 ** (11 - math.frexp(sigma)[1])


def is_image(x: NDArray[np.float64]) -> bool:
    """Whether every number is k/255 for a byte k.

    >>> is_image(np.float32([0, 1 / 255, 200 / 255]).astype(float)), is_image(np.array([0.5])), is_image(np.array([2.0]))
    (True, False, False)
    """
    return bool(np.all((x >= 0) & (x <= 1))) and on_bytes(x)


def on_bytes(x: NDArray[np.float64]) -> bool:
    """Whether every number is k/255 for a whole k, as float32 or float64 writes it (by division, or times 1/255)."""
    k = np.rint(x * 255)
    small = k.astype(np.float32)
    written = (k / 255, k * (1 / 255), small / np.float32(255), small * np.float32(1 / 255))
    return any(bool(np.array_equal(x, w.astype(np.float64))) for w in written)


@lru_cache(maxsize=32)
def _law(sigma: float, cells: float) -> Law:
    """Thresholds ⌊2⁶⁴·Φ(−(k + ½)h/σ)⌋ and their mirror images, and the guide table.

    mpmath is installed with torch (through sympy); 40 digits leave an error far below one unit of the 64-bit threshold,
    and a value too near a whole number to be rounded safely is computed again with 80.
    """
    tail: list[int] = []
    while not tail or tail[-1] > 0:
        tail.append(_threshold(len(tail), sigma, cells))
    low = [t for t in tail if t > 0][::-1]
    table = np.array([*low, *(2**64 - t for t in low[::-1])], dtype=np.uint64)
    starts = np.arange(2**_BITS, dtype=np.uint64) << np.uint64(_REST)
    ends = starts + np.uint64(2**_REST - 1)
    first, last = (np.searchsorted(table, v, side="right") for v in (starts, ends))
    lowest = -len(low)
    guide = np.where(first == last, first + lowest, np.nan).astype(np.float32)
    return Law(table, guide, lowest)


def _threshold(k: int, sigma: float, cells: float) -> int:
    import mpmath

    for digits in (40, 80, 160):
        with mpmath.workdps(digits):
            z = (mpmath.mpf(k) + mpmath.mpf(1) / 2) / (mpmath.mpf(cells) * mpmath.mpf(sigma))
            scaled = mpmath.erfc(z / mpmath.sqrt(2)) / 2 * mpmath.mpf(2) ** 64
            whole = int(mpmath.floor(scaled))
            if mpmath.mpf(10) ** (25 - digits) < scaled - whole < 1 - mpmath.mpf(10) ** (25 - digits):
                return whole
    raise InputError(
        f"the distribution function at {k} cannot be rounded safely (σ = {sigma!r}, {cells} points per unit)"
    )
