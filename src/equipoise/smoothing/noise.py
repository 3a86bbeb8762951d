"""Gaussian noise keyed by (seed, input id, stream, chunk): the same draws whatever the batch, order, worker or restart.

The key is a 128-bit BLAKE2b hash of the four, injectively written, and the key of a counter-based generator (Philox
4×64, ten rounds): two streams never run into each other, and two keys agree by accident with probability 2⁻¹²⁸ a pair.

Two laws. `GridNoise`: integers with the law of a Gaussian rounded to a grid, exact but for a total variation that is counted
(see `grid`). `FloatNoise`: normals in float32 or float64, whose law is *not* that of the theorem; a classifier that reads
the rounding of x + δ can be certified wrongly (the tests show one).

Noise levels: one number, or one per channel; never one that depends on the input.

Let `D = diag(σ_c)` hold the level of every coordinate. In the coordinates `v = σ_min·D⁻¹x` the noise is N(0, σ_min²·I), so every
theorem holds there: what is certified is the ellipsoid `‖D⁻¹(x' − x)‖₂ < R/σ_min`, whose semi-axes are `R·σ_c/σ_min`. It
contains the ball `‖x' − x‖₂ < R`, the radius that is reported. A function that is L-Lipschitz in x is L·σ_max/σ_min-Lipschitz
in v.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from equipoise.core import InputError, Refused
from equipoise.core.checks import POSITIVE, require_number
from equipoise.smoothing.bounds import Gaussian
from equipoise.smoothing.certificates import NOT_COVERED
from equipoise.smoothing.derive import Setting
from equipoise.smoothing.grid import Grid
from equipoise.smoothing.ramp import Floats

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
        values = tuple(float(require_number(v, name, least=POSITIVE)) for v in (sigma if several else [sigma]))
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
        self.require_channels(x.shape)
        levels = torch.tensor(self.channels, dtype=torch.float64).to(x.device, x.dtype)
        return levels.reshape(-1, *[1] * (x.dim() - 1))

    def __str__(self) -> str:
        if self.channels is None:
            return f"N(0, {self.sigma:g}²·I) noise"
        return f"N(0, diag({', '.join(f'{c:g}²' for c in self.channels)})) noise, one level per channel"


NoiseName = Literal["grid", "float"]
MAX_CHUNKS = 1 << 29
GENERATOR = "Philox4x64-10 keyed by BLAKE2b"


class Stream(IntEnum):
    """What a sample is for; no two streams share a draw."""

    SELECTION = 0
    ESTIMATION = 1
    PREDICTION = 2
    CALIBRATION = 3
    TIES = 4


def noise_key(seed: int, input_id: int | str, stream: Stream, chunk: int) -> int:
    """The 128-bit generator key of one chunk.

    >>> keys = {noise_key(0, i, s, c) for i in (7, "7", "7/0") for s in Stream for c in range(100)}
    >>> len(keys), max(keys) < 1 << 128
    (1500, True)
    """
    if not 0 <= chunk < MAX_CHUNKS:
        raise InputError(f"chunk must lie in [0, {MAX_CHUNKS}), got {chunk}")
    name = f"{seed}/{int(stream)}/{chunk}/{type(input_id).__name__}:{input_id}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=16, person=b"equipoise noise").digest(), "big")


def philox(key: int) -> np.random.Philox:
    """The generator of a key."""
    return np.random.Philox(key=np.array([key & (2**64 - 1), key >> 64], dtype=np.uint64))


def fresh_seed() -> int:
    """A seed from the operating system: nobody can have made a model or an input that knows its draws."""
    return secrets.randbits(63)


def _on_host(buffer: Tensor) -> Tensor:
    """Where NumPy can write: the buffer itself, or one of its shape."""
    return buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")


@dataclass(frozen=True)
class FloatNoise:
    """`x + σ·g` in floating point; g in float32 or, with `dtype`, in float64."""

    levels: Levels
    dtype: torch.dtype

    def fill(self, buffer: Tensor, x: Tensor, key: int) -> Tensor:
        """Write noisy copies of x into a buffer (chunk, *x.shape) of this dtype."""
        drawn = _on_host(buffer)
        out = drawn.numpy()
        np.random.Generator(philox(key)).standard_normal(dtype=out.dtype, out=out)
        return buffer.copy_(drawn).mul_(self.levels.scale(buffer[0])).add_(x)


@dataclass(frozen=True)
class GridNoise:
    """`(k_x + k)·h` with exact integer noise k, x rounded to the grid once; one grid, or one per channel (all of one step)."""

    grids: tuple[Grid, ...]
    dtype: torch.dtype

    def fill(self, buffer: Tensor, x: Tensor, key: int) -> Tensor:
        """Write noisy copies of x into a buffer (chunk, *x.shape) of this dtype."""
        first = self.grids[0]
        place = first.integers(x.detach().cpu().double().numpy())
        exact = 2 / torch.finfo(self.dtype).eps  # whole numbers below are exact
        if np.abs(place).max(initial=0) + max(g.reach for g in self.grids) >= exact:
            raise InputError(
                f"the input is too large for a grid of step {first.step:g} in {self.dtype}: rescale it, or use noise='float'"
            )
        drawn, bits = _on_host(buffer), philox(key)
        out = drawn.numpy()
        if len(self.grids) == 1:
            first.draw(bits, out)
        else:
            for channel, grid in enumerate(self.grids):
                part = np.empty_like(out[:, channel], order="C")
                grid.draw(bits, part)
                out[:, channel] = part
        out += place.astype(out.dtype)
        out /= out.dtype.type(first.cells)
        return buffer.copy_(drawn)


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
        chosen: whether the user chose the seed.
    """

    levels: Levels
    noise: NoiseName | None = None
    cells: float | None = None
    dimension: int = 0
    batch: int = 0
    seed: int = 0
    chosen: bool = True

    def __str__(self) -> str:
        return str(self.levels)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The grid, if there is one: of all channels, or of each."""
        if self.cells is None:
            return ()
        return tuple(Grid(sigma, self.cells) for sigma in self.levels.channels or (self.levels.sigma,))

    @property
    def grid(self) -> Grid | None:
        """The first grid: all have one step."""
        return self.grids[0] if self.grids else None

    @property
    def variation(self) -> float:
        """Total variation between one draw and the law of the theorem, as far as it is counted: 0 for float noise."""
        each = self.dimension // max(1, len(self.grids))
        return math.nextafter(math.fsum(g.variation(each) for g in self.grids), 1.0) if self.grids else 0.0

    def setting(self, alpha: float, about: str) -> Setting:
        """What certificates of these draws rest on."""
        distance = 0.0 if self.grid is None else self.grid.distance(self.dimension)
        return Setting(
            Gaussian(self.levels.sigma, self.variation), alpha, about + self.shape(), self.caveats(), distance
        )

    def shape(self) -> str:
        """What more than a ball is certified, where the channels have levels of their own."""
        if self.levels.channels is None:
            return ""
        axes = ", ".join(f"{c / self.levels.sigma:.4g}" for c in self.levels.channels)
        return (
            f" (radii R are ℓ2, by the smallest level; certified is the ellipsoid of semi-axes R·({axes}), per channel)"
        )

    def caveats(self) -> str:
        """What is not covered, from what was used."""
        if self.noise is None:
            return NOT_COVERED
        source = (
            f"Seed {self.seed} was chosen by the user: nothing is certified of a model or an input made knowing its draws."
            if self.chosen
            else f"The seed {self.seed} was drawn from the operating system."
        )
        generator = f"the quality of the pseudo-random generator ({GENERATOR})"
        shape = f"The network is evaluated in batches of {self.batch}; predict in the same shape."
        grid = self.grid
        if grid is None:
            return (
                "Not covered: noise drawn in floating point instead of real numbers, rounding inside the network's forward "
                f"pass, {generator}. {source}"
            )
        step = "1/255" if grid.image else f"{grid.step:g}"
        whole = "its inputs are 8-bit images" if grid.image else "what rounding moves is subtracted from the radius"
        return (
            f"Inputs and noise lie on the grid of step {step}, exactly: {whole}, and a total variation of "
            f"{self.variation:.1e} is counted. {shape} Not covered: {generator}. {source}"
        )


def tie_breaks(seed: int, input_id: int | str) -> Floats:
    """Two uniform numbers of an input, from a stream of their own: fixed before its draws and independent of them."""
    return np.random.Generator(philox(noise_key(seed, input_id, Stream.TIES, 0))).random(2)
