"""The bent identity as an operation of its own, and its rule: slopes in [1/2, 3/2], f(0) = 0."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.lipschitz import Call, Step


@torch.library.custom_op("equipoise_holder::bent", mutates_args=())
def bent(x: Tensor) -> Tensor:
    """`x + (√(x² + 1) − 1)/2`."""
    return x + ((x * x + 1).sqrt() - 1) / 2


@bent.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Bent(nn.Module):
    """The bent identity as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Entry by entry."""
        return bent(x)


def bent_rule(call: Call) -> Step:
    """Its slope is `1 + x/(2√(x² + 1))`."""
    return Step(((call.signal("x"), 1.5),), "bent identity", offset=0.0, slopes=(0.5, 1.5))


#: operation → rule: what the entry point names
RULES = {"equipoise_holder.bent.default": bent_rule}
