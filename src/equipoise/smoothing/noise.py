"""Gaussian noise keyed by (seed, input id, stream, chunk): the same draws whatever the batch, order, worker or restart.

The key is a 128-bit BLAKE2b hash of the four, injectively written, and the key of a counter-based generator (Philox
4×64, ten rounds): two streams never run into each other, and two keys agree by accident with probability 2⁻¹²⁸ a pair.

Two laws. `GridNoise`: integers with the law of a Gaussian rounded to a grid, exact but for a total variation that is counted
(see `grid`). `FloatNoise`: normals in float32 or float64, whose law is *not* that of the theorem; a classifier that reads
the rounding of x + δ can be certified wrongly (the tests show one).
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from equipoise.core import InputError
from equipoise.smoothing.grid import Grid
from equipoise.smoothing.levels import Levels

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


@dataclass(frozen=True)
class FloatNoise:
    """`x + σ·g` in floating point; g in float32 or, with `dtype`, in float64."""

    levels: Levels
    dtype: torch.dtype

    def fill(self, buffer: Tensor, x: Tensor, key: int) -> Tensor:
        """Write noisy copies of x into a buffer (chunk, *x.shape) of this dtype."""
        kind: Any = np.float64 if self.dtype == torch.float64 else np.float32
        on_host = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
        np.random.Generator(philox(key)).standard_normal(dtype=kind, out=on_host.numpy())
        if on_host is not buffer:
            buffer.copy_(on_host)
        return buffer.mul_(self.levels.scale(buffer[0])).add_(x)


@dataclass(frozen=True)
class GridNoise:
    """`(k_x + k)·h` with exact integer noise k, x rounded to the grid once; one grid, or one per channel (all of one step)."""

    grids: tuple[Grid, ...]
    dtype: torch.dtype

    def fill(self, buffer: Tensor, x: Tensor, key: int) -> Tensor:
        """Write noisy copies of x into a buffer (chunk, *x.shape) of this dtype."""
        kind: Any = np.float64 if self.dtype == torch.float64 else np.float32
        first = self.grids[0]
        place = first.integers(x.detach().cpu().double().numpy())
        if np.abs(place).max(initial=0) + max(g.reach for g in self.grids) >= 2 ** (53 if kind is np.float64 else 24):
            raise InputError(
                f"the input is too large for a grid of step {first.step:g} in {self.dtype}: rescale it, or use noise='float'"
            )
        on_host = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
        out = on_host.numpy()
        bits = philox(key)
        if len(self.grids) == 1:
            first.draw(bits, out)
        else:
            for channel, grid in enumerate(self.grids):
                part = np.empty_like(out[:, channel], order="C")
                grid.draw(bits, part)
                out[:, channel] = part
        out += place.astype(kind)
        out /= kind(first.cells)
        if on_host is not buffer:
            buffer.copy_(on_host)
        return buffer
