"""What the processes of a run share: sums, values of the first process, and randomness.

Randomness is a function of (seed, purpose, position in the run), so nothing of it needs to be stored to repeat it. The order of
the data is keyed by the epoch, augmentation and noise by the step and the place of the process's share in the global batch.
What the network itself draws (dropout) comes from torch's global generator, seeded by the step and the number of the process.
"""

import hashlib
from typing import Any

import torch
from torch import distributed


def world() -> int:
    """The number of processes."""
    grouped = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if grouped else 1


def rank() -> int:
    """The number of this process."""
    return distributed.get_rank() if world() > 1 else 0


def from_all(value: Any) -> list[Any]:
    """The values of all processes, in order."""
    values = [value] * world()
    if world() > 1:
        distributed.all_gather_object(values, value)
    return values


def from_first(value: Any) -> Any:
    """The value of the first process, on all of them."""
    return from_all(value)[0]


def key(seed: int, purpose: str, *position: int) -> int:
    """A 32-bit generator seed (torch's CPU generator uses no more).

    Args:
        seed: of the recipe.
        purpose: what is drawn.
        position: in the run.

    >>> key(0, "order", 1) == key(0, "order", 1), key(0, "order", 1) == key(0, "order", 2)
    (True, False)
    """
    name = f"{seed}/{purpose}/{'/'.join(map(str, position))}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big")


def generator(
    seed: int, purpose: str, *position: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A fresh generator with the key of `key`.

    Args:
        seed: of the recipe.
        purpose: what is drawn.
        position: in the run.
        device: of the generator.
    """
    return torch.Generator(device=device).manual_seed(key(seed, purpose, *position))
