"""How a weight whose norm is too large is brought back; each way is a row of `RESTORES`."""

from __future__ import annotations

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
