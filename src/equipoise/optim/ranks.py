"""What the ranks of a distributed run agree on; without one, everything stays as it is."""

from __future__ import annotations

import torch
from torch import Tensor


def _running() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def leads() -> bool:
    """Whether this process is the one that changes weights."""
    return not _running() or torch.distributed.get_rank() == 0


def agreed(flags: list[bool], device: torch.device) -> list[bool]:
    """True where any rank says so.

    >>> agreed([True, False], torch.device("cpu"))
    [True, False]
    """
    if not _running():
        return flags
    votes = torch.tensor(flags, dtype=torch.int32, device=device)
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX)
    return [bool(vote) for vote in votes.tolist()]


def shared(weight: Tensor) -> bool:
    """Take the weight of rank 0; whether there was another rank to take it from."""
    if not _running():
        return False
    torch.distributed.broadcast(weight.data, 0)
    return True
