"""Gaussian noise keyed by (seed, input id, stream, chunk): the same draws whatever the batch, order, worker or restart.

Bit-identical, always (same torch version and device type): the noise of a chunk. The chunk size is fixed and part of
the
key, so a run may be cut anywhere. Selection and estimation are different streams.

torch's CPU generator uses only the low 32 bits of its seed (checked in the tests). So hashing alone could give two
chunks
of one input the same noise by accident, and the draws would not be independent. Here the low 32 bits are a bijective
mix of `base(seed, input) + index`: distinct for all chunks and streams of an input, by construction.

float32 normals from torch stop at about 5.8 σ (they come from 24-bit uniforms); the law differs from the Gaussian by at
most 2.5e-5 in total variation for a CIFAR-sized vector. `dtype=torch.float64` draws finer ones.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import torch
from torch import Tensor

from equipoise.core import InputError

_MASK = 0xFFFFFFFF
MAX_CHUNKS = 1 << 29


class Stream(IntEnum):
    """What a sample is for; no two streams share a draw."""

    SELECTION = 0
    ESTIMATION = 1
    PREDICTION = 2
    CALIBRATION = 3


def noise_key(seed: int, input_id: int | str, stream: Stream, chunk: int) -> int:
    """The 63-bit generator seed of one chunk.

    >>> keys = {noise_key(0, 7, s, c) & 0xFFFFFFFF for s in Stream for c in range(1000)}
    >>> len(keys)
    4000
    """
    if not 0 <= chunk < MAX_CHUNKS:
        raise InputError(f"chunk must lie in [0, {MAX_CHUNKS}), got {chunk}")
    name = f"{seed}/{type(input_id).__name__}:{input_id}".encode()
    base = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
    low = _mix((base + len(Stream) * chunk + int(stream)) & _MASK)
    return ((base >> 33) << 32) | low


def _mix(h: int) -> int:
    """A bijection of 32-bit words (the finaliser of MurmurHash3)."""
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & _MASK
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def fill_noisy(buffer: Tensor, x: Tensor, sigma: float, key: int, generator: torch.Generator) -> Tensor:
    """Write `x + σ·g` into the buffer (chunk, *x.shape), in place: no allocation per chunk."""
    generator.manual_seed(key)
    return buffer.normal_(0.0, sigma, generator=generator).add_(x)
