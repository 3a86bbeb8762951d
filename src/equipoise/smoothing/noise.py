"""Gaussian noise keyed by (seed, input id, stream, chunk): the same draws whatever the batch, order, worker or restart.

The key is a 128-bit BLAKE2b hash of the four, injectively written, and the key of a counter-based generator (Philox
4×64, ten rounds): two streams never run into each other, and two keys agree by accident with probability 2⁻¹²⁸ a pair.

*Float noise*: normals in float32 or float64, whose law is *not* that of the theorem; a classifier that reads the rounding of
x + δ can be certified wrongly (the tests show one).

*Grid noise*: exact integers. Let Q round ℝ^d to a grid of step h. The certified classifier is F∘Q, a measurable map of ℝ^d, so
every theorem about real Gaussian noise holds for it. At a point x of the grid `Q(x + δ) = x + Q(δ)`, and the coordinates of
`Q(δ)/h` are independent integers with

    P(k) = Φ((k + ½)h/σ) − Φ((k − ½)h/σ),

which no longer depends on x. They are drawn by inversion of a uniform 64-bit word: the distribution function is a table of
64-bit thresholds, computed once with 80 digits and rounded down. With K cells the total variation per coordinate is at
most K·2⁻⁶³: each of the K − 1 thresholds is off by less than 2⁻⁶⁴, and the mass beyond the last cell, which has a
probability below 2⁻⁶⁴ on either side, is put into it. Most words are decided by their first 16 bits: a table of 2¹⁶ entries
holds the value, or says that a threshold cuts this entry; then 48 more bits are drawn and the threshold is searched. So a
64-bit word makes four draws.

*Levels*: one number, or one per channel; never one that depends on the input. Let `D = diag(σ_c)` hold the level of every
coordinate. In the coordinates `v = σ_min·D⁻¹x` the noise is N(0, σ_min²·I), so every theorem holds there: what is certified is
the ellipsoid `‖D⁻¹(x' − x)‖₂ < R/σ_min`, whose semi-axes are `R·σ_c/σ_min`. It contains the ball `‖x' − x‖₂ < R`, the radius
that is reported. A function that is L-Lipschitz in x is L·σ_max/σ_min-Lipschitz in v.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import frexp, fsum, inf, nextafter, sqrt
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core import POSITIVE, InputError, Refused, along, require_number
from equipoise.smoothing.bounds import Gaussian
from equipoise.smoothing.certificates import NOT_COVERED
from equipoise.smoothing.derive import Setting

_BITS = 16
_REST = 64 - _BITS
_FINEST = 1 << 12  # cells per σ at most


#: what a noise level may be given as
Sigma = float | Sequence[float]


@dataclass(frozen=True)
class Levels:
    """The smallest level, which radii are made with, and the level of every channel if they differ.

    >>> levels = Levels.of([0.5, 0.25, 0.5])
    >>> levels.sigma, levels.stretch > 2, str(levels)
    (0.25, True, 'N(0, diag(0.5², 0.25², 0.5²)) noise, one level per channel')
    >>> Levels.of(0.25).channels is None, str(Levels.of(0.25))
    (True, 'N(0, 0.25²·I) noise')
    """

    sigma: float
    channels: tuple[float, ...] | None = None

    @classmethod
    def of(cls, sigma: Any) -> Levels:
        """Read a number or a list of numbers; refuse a level that depends on the input.

        If σ(x) differs from point to point, the class probabilities at x' are those of another Gaussian, and the theorem
        that carries a bound from x to x' does not apply: certified radii can be broken. A level that is constant on the
        certified region (one per run, one per channel, one per class of *inputs told apart beforehand*) is fine.
        """
        if callable(sigma) or (isinstance(sigma, Tensor) and sigma.numel() > 1):
            raise Refused(
                "the noise level must be a number, or a list with one number per channel: a level that depends on the input "
                "moves the Gaussian between x and x', and no radius is certified then; make one run per level"
            )
        several = isinstance(sigma, list | tuple)
        name = "every level of sigma (a list has one per channel)" if several else "sigma"
        values = tuple(
            float(require_number(v, name, least=POSITIVE)) for v in (sigma if several else [sigma])
        )
        if not values:
            raise InputError("the list of noise levels is empty: give one per channel")
        return cls(min(values), values if len(set(values)) > 1 else None)

    @property
    def stretch(self) -> float:
        """`σ_max/σ_min`, rounded up: what Lipschitz constants are multiplied with."""
        return 1.0 if self.channels is None else max(self.channels) / self.sigma * (1 + 2.0**-50)

    def require_channels(self, shape: Sequence[int]) -> None:
        """Refuse inputs with another number of channels."""
        if self.channels is not None and (not shape or shape[0] != len(self.channels)):
            raise InputError(
                f"got {len(self.channels)} noise levels, one per channel, for inputs of shape {tuple(shape)}: the first "
                "dimension holds the channels"
            )

    def scale(self, x: Tensor) -> float | Tensor:
        """The level of every number of one input, to multiply standard normals with."""
        if self.channels is None:
            return self.sigma
        levels = torch.tensor(self.channels, dtype=torch.float64).to(x.device, x.dtype)
        return along(levels, x)

    def __str__(self) -> str:
        if self.channels is None:
            return f"N(0, {self.sigma:g}²·I) noise"
        return f"N(0, diag({', '.join(f'{c:g}²' for c in self.channels)})) noise, one level per channel"


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
        if not self.image and frexp(self.cells)[0] != 0.5:
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

    def variation(self, dimension: int) -> float:
        """Bound of the total variation between the drawn noise of `dimension` coordinates and the rounded Gaussian."""
        return float(np.nextafter(dimension * self.law.cells * 2.0**-63, 1.0))

    def distance(self, dimension: int) -> float:
        """What to subtract from radii: nothing for 8-bit images; else `h·√d`, for x and for x' rounded to the grid."""
        if self.image:
            return 0.0
        return float(np.nextafter(self.step * sqrt(dimension) * (1 + 2.0**-50), inf))

    def integers(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """The place of x on the grid; a point beside the 8-bit grid is refused."""
        if self.image and not on_bytes(x):
            raise Refused(
                "this classifier smooths on the grid of 8-bit images (multiples of 1/255), and the input lies beside it: "
                "round it first, (255·x).round()/255, or use noise='float'"
            )
        return np.rint(x * self.cells)

    def draw(self, bits: np.random.Philox, out: NDArray[Any]) -> None:
        """Fill a contiguous float array with independent integers of the law.

        Args:
            bits: the generator.
            out: array to fill.
        """
        law = self.law
        flat = out.reshape(-1)
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
    return 2.0 ** (11 - frexp(sigma)[1])


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

    80 digits leave an error far below one unit of the 64-bit threshold; a value too near a whole number to be rounded
    safely is refused.
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
    import mpmath  # slow to load, and not needed for float noise

    with mpmath.workdps(80):
        z = (k + 0.5) / (mpmath.mpf(cells) * sigma)
        scaled = mpmath.erfc(z / mpmath.sqrt(2)) * 2**63
        if abs(scaled - mpmath.nint(scaled)) < 1e-50:
            raise InputError(
                f"the distribution function at {k} cannot be rounded safely (σ = {sigma!r}, {cells} points per unit)"
            )
        return int(mpmath.floor(scaled))


NoiseName = Literal["grid", "float"]


class Stream(IntEnum):
    """What a sample is for; no two streams share a draw."""

    SELECTION = 0
    ESTIMATION = 1
    PREDICTION = 2
    CALIBRATION = 3


def noise_key(seed: int, input_id: int | str, stream: Stream, chunk: int) -> int:
    """The 128-bit generator key of one chunk.

    Args:
        seed: of the run.
        input_id: of the input.
        stream: what the draws are for.
        chunk: number of the chunk.

    >>> keys = {noise_key(0, i, s, c) for i in (7, "7", "7/0") for s in Stream for c in range(100)}
    >>> len(keys), max(keys) < 1 << 128
    (1200, True)
    """
    name = f"{seed}/{int(stream)}/{chunk}/{type(input_id).__name__}:{input_id}".encode()
    return int.from_bytes(
        hashlib.blake2b(name, digest_size=16, person=b"equipoise noise").digest(), "big"
    )


def philox(key: int) -> np.random.Philox:
    """The generator of a key."""
    return np.random.Philox(key=np.array([key & (2**64 - 1), key >> 64], dtype=np.uint64))


def fresh_seed() -> int:
    """A seed from the operating system: nobody can have made a model or an input that knows its draws."""
    return secrets.randbits(63)


@dataclass(frozen=True)
class NoiseSpec:
    """The noise law actually sampled: what certificates of these draws rest on, in numbers and in words.

    Args:
        levels: the standard deviations.
        noise: "grid", "float", or None where nothing but the level is known (counts from elsewhere).
        cells: points per unit of the grid.
        dimension: of one input.
        batch: draws per forward pass.
        seed: of the draws.
        user_seed: whether the user chose the seed.
    """

    levels: Levels
    noise: NoiseName | None = None
    cells: float | None = None
    dimension: int = 0
    batch: int = 0
    seed: int = 0
    user_seed: bool = True

    def __str__(self) -> str:
        return str(self.levels)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The grid, if there is one: of all channels, or of each."""
        if self.cells is None:
            return ()
        return tuple(
            Grid(sigma, self.cells) for sigma in self.levels.channels or (self.levels.sigma,)
        )

    @property
    def grid(self) -> Grid | None:
        """The first grid: all have one step."""
        return self.grids[0] if self.grids else None

    @property
    def variation(self) -> float:
        """Total variation between one draw and the law of the theorem, as far as it is counted: 0 for float noise."""
        if not self.grids:
            return 0.0
        each = self.dimension // len(self.grids)
        return nextafter(fsum(g.variation(each) for g in self.grids), 1.0)

    def fill(self, buffer: Tensor, x: Tensor, key: int) -> Tensor:
        """Write noisy copies of x into a buffer (chunk, *x.shape): `x + σ·g`, or `(k_x + k)·h` with integers k on a grid.

        Args:
            buffer: tensor (chunk, *x.shape).
            x: the input; rounded to the grid once.
            key: of the generator.
        """
        host = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
        out = host.numpy()
        bits = philox(key)
        grids = self.grids
        if not grids:
            if torch.finfo(x.dtype).eps * float(x.abs().max()) > self.levels.sigma:
                raise Refused(
                    f"noise of level {self.levels.sigma:g} is lost in the rounding of the input in {x.dtype}: rescale it, or "
                    "use more noise"
                )
            np.random.Generator(bits).standard_normal(dtype=out.dtype, out=out)
            return buffer.copy_(host).mul_(self.levels.scale(buffer[0])).add_(x)

        first = grids[0]
        place = first.integers(x.detach().cpu().double().numpy())
        exact = 2 / torch.finfo(buffer.dtype).eps  # whole numbers below are exact
        if np.abs(place).max(initial=0) - min(g.law.lowest for g in grids) >= exact:
            raise InputError(
                f"the input is too large for a grid of step {first.step:g} in {buffer.dtype}: rescale it, or use noise='float'"
            )
        if len(grids) == 1:
            first.draw(bits, out)
        else:
            for channel, grid in enumerate(grids):
                part = np.empty_like(out[:, channel], order="C")
                grid.draw(bits, part)
                out[:, channel] = part
        out += place.astype(out.dtype)
        out /= out.dtype.type(first.cells)
        return buffer.copy_(host)

    def setting(self, alpha: float, about: str) -> Setting:
        """What certificates of these draws rest on.

        Args:
            alpha: risk per input.
            about: the classifier, in words.
        """
        distance = 0.0 if self.grid is None else self.grid.distance(self.dimension)
        return Setting(
            Gaussian(self.levels.sigma, self.variation),
            alpha,
            about + self.shape(),
            self.caveats(),
            distance,
        )

    def shape(self) -> str:
        """What more than a ball is certified, where the channels have levels of their own."""
        if self.levels.channels is None:
            return ""
        axes = ", ".join(f"{c / self.levels.sigma:.4g}" for c in self.levels.channels)
        return f" (radii R are ℓ2, by the smallest level; certified is the ellipsoid of semi-axes R·({axes}), per channel)"

    def caveats(self) -> str:
        """What is not covered, from what was used."""
        if self.noise is None:
            return NOT_COVERED
        source = f"The seed {self.seed} was drawn from the operating system."
        if self.user_seed:
            source = (
                f"Seed {self.seed} was chosen by the user: nothing is certified of a model or an input made knowing its "
                "draws."
            )
        generator = "the quality of the pseudo-random generator (Philox4x64-10 keyed by BLAKE2b)"
        shape = f"The network is evaluated in batches of {self.batch}; predict in the same shape."
        grid = self.grid
        if grid is None:
            return (
                "Not covered: noise drawn in floating point instead of real numbers, rounding inside the network's forward "
                f"pass, {generator}. {source}"
            )
        step = "1/255"
        whole = "its inputs are 8-bit images"
        if not grid.image:
            step = f"{grid.step:g}"
            whole = "what rounding moves is subtracted from the radius"
        return (
            f"Inputs and noise lie on the grid of step {step}, exactly: {whole}, and a total variation of "
            f"{self.variation:.1e} is counted. {shape} Not covered: {generator}. {source}"
        )
