"""What the processes of a run share: sums, values of the first process, and randomness.

Randomness is a function of (seed, purpose, position in the run), so nothing of it needs to be stored to repeat it. The order of
the data is keyed by the epoch, augmentation and noise by the step and the example's place in the global batch, so they do not
depend on how many processes share the batch. What the network itself draws (dropout) comes from torch's global generator, whose
state is part of a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

#: examples that share one draw of noise; fixed, so that a batch may be cut anywhere
BLOCK = 64


def world() -> int:
    """The number of processes."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """The number of this process."""
    return distributed.get_rank() if world() > 1 else 0


def all_sum(values: Tensor) -> Tensor:
    """The sum over all processes."""
    if world() > 1:
        values = values.clone()
        distributed.all_reduce(values)
    return values


def from_first(value: Any) -> Any:
    """The value of the first process, on all of them."""
    if world() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]


def gather(value: Any) -> list[Any]:
    """The values of all processes, on all of them."""
    values = [value] * world()
    if world() > 1:
        distributed.all_gather_object(values, value)
    return values


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

    Args:
        function: of a block of rows and a generator.
        x: rows of this process.
        first: place of the first row in the global batch.
        seed: of the recipe.
        purpose: keeps different uses apart.
        position: of the batch in the run.

    >>> noise = lambda x, generator: x + torch.randn(x.shape, generator=generator)
    >>> whole = in_blocks(noise, torch.zeros(100, 3), 0, 0, "noise", 7)
    >>> torch.equal(whole[20:95], in_blocks(noise, torch.zeros(75, 3), 20, 0, "noise", 7))
    True
    """
    before = first % BLOCK
    after = -(first + len(x)) % BLOCK
    if before or after:
        x = torch.cat([x.new_zeros(before, *x.shape[1:]), x, x.new_zeros(after, *x.shape[1:])])
    blocks = [
        function(rows, generator(seed, purpose, *position, number, device=x.device))
        for number, rows in enumerate(x.split(BLOCK), first // BLOCK)
    ]
    result = torch.cat(blocks)
    return result[before : len(result) - after]
