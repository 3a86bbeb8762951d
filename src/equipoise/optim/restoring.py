"""How a weight whose norm is too large is brought back (a row of `RESTORES` each), and what ranks of a run agree on."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from equipoise.core.errors import InputError
from equipoise.norms.carried import CarriedMatrix

How = Literal["cap", "sphere", "clip", "hammer"]

#: `(weight, its followed space, radius) → new weight` in float64; what comes out is proved afterwards, whatever it claims
Restore = Callable[[Tensor, CarriedMatrix, float], Tensor]


def clip(W: Tensor, carried: CarriedMatrix, radius: float) -> Tensor:
    """`W − Σ (σ_i − R) u_i v_iᵀ` over the followed singular directions with σ_i > R; the others stay as they are."""
    U, s, V = carried.top(W)
    excess = (s - radius).clamp_min(0)
    return W.double() - (U * excess) @ V.mT


def hammer(W: Tensor, carried: CarriedMatrix, radius: float) -> Tensor:
    """`W + (R − σ₁) u₁v₁ᵀ`: the largest singular value is set to R, the others stay (Newhouse et al. 2025)."""
    U, s, V = carried.top(W)
    return W.double() - (U[:, :1] * (s[0] - radius)) @ V[:, :1].mT


#: ways that change single directions before what is left of the excess is scaled away
RESTORES: dict[str, Restore] = {"clip": clip, "hammer": hammer}


def check_how(how: str, convolutions: list[str]) -> None:
    """Refuse an unknown way, and ways that need singular directions where there are convolutions."""
    if how not in get_args(How):
        raise InputError(f"how must be one of {', '.join(get_args(How))}, got {how!r}")
    if how in RESTORES and convolutions:
        raise InputError(
            f"how={how!r} changes single singular directions of a matrix, and {convolutions[0]!r} is a convolution, "
            "whose singular vectors are images and whose clipped kernel would be larger; take how='cap', or leave it out"
        )


@torch.no_grad()
def write(weight: Tensor, value: Tensor) -> None:
    """Store `value` in the parameter, rounded to its precision."""
    weight.copy_(value.to(weight.dtype))


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
