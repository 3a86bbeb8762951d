"""Randomness that is a function of (seed, what for, where in the run): nothing of it needs to be stored to repeat it.

The order of the data is keyed by the epoch, augmentation and noise by the step and the example's place in the global batch, so
they do not depend on how many processes share the batch. What the network itself draws (dropout) comes from the global
generators, whose states are part of a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

#: examples that share one draw of noise; fixed, so that a batch may be cut anywhere
BLOCK = 64


def key(seed: int, purpose: str, *position: int) -> int:
    """A 32-bit generator seed (torch's CPU generator uses no more).

    >>> key(0, "order", 1) == key(0, "order", 1), key(0, "order", 1) == key(0, "order", 2)
    (True, False)
    """
    name = f"{seed}/{purpose}/{'/'.join(map(str, position))}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big")


def generator(seed: int, purpose: str, *position: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator with that key."""
    return torch.Generator(device=device).manual_seed(key(seed, purpose, *position))


def data_order(seed: int, epoch: int, count: int) -> Tensor:
    """A permutation of 0 … count−1, the same for this seed and epoch on every process and after every restart."""
    return torch.randperm(count, generator=generator(seed, "order", epoch))


def in_blocks(
    function: Callable[[Tensor, torch.Generator], Tensor],
    x: Tensor,
    first: int,
    seed: int,
    purpose: str,
    *position: int,
) -> Tensor:
    """Apply a random function to the rows of `x`, the places first, first+1, … of the global batch, block by block.

    What happens to row i depends only on (seed, purpose, position, first + i), not on where the batch was cut, provided that
    `function` treats the rows of its batch by their place in it.

    >>> noise = lambda x, generator: x + torch.randn(x.shape, generator=generator)
    >>> whole = in_blocks(noise, torch.zeros(100, 3), 0, 0, "noise", 7)
    >>> torch.equal(whole[20:95], in_blocks(noise, torch.zeros(75, 3), 20, 0, "noise", 7))
    True
    """
    start, end = first // BLOCK * BLOCK, -(-(first + len(x)) // BLOCK) * BLOCK
    before, after = first - start, end - first - len(x)
    if before or after:
        x = torch.cat([x.new_zeros(before, *x.shape[1:]), x, x.new_zeros(after, *x.shape[1:])])
    source = torch.Generator(device=x.device)
    done = []
    for block, rows in enumerate(x.split(BLOCK), start // BLOCK):
        done.append(function(rows, source.manual_seed(key(seed, purpose, *position, block))))
    result = done[0] if len(done) == 1 else torch.cat(done)
    return result[before : len(result) - after]


def random_states() -> dict[str, Tensor]:
    """The states of the global generators of torch, CUDA, NumPy and Python, as byte tensors."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "numpy": _bytes([name, np.asarray(keys).tolist(), *rest]),
        "python": _bytes(random.getstate()),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    """Put the global generators where `random_states` found them."""
    torch.set_rng_state(states["torch"].cpu())
    name, keys, *rest = json.loads(states["numpy"].numpy().tobytes())
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))
    version, words, gauss = json.loads(states["python"].numpy().tobytes())
    random.setstate((version, tuple(words), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Inside, the global generators are seeded; afterwards they are where the caller left them."""
    before = random_states()
    try:
        seed_all(seed)
        yield
    finally:
        set_random_states(before)


def _bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).clone()
