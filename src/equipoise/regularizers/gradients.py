"""The input-gradient penalty: how fast the output changes at the data, from one side or both."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.core.modules import fresh_strides


def input_gradient_penalty(
    model: nn.Module | Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor | None = None,
    *,
    target: float = 0.0,
    two_sided: bool = False,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    weight: float = 1.0,
) -> Tensor:
    """`weight · mean_i max(‖∇_x g(x_i)‖₂ − γ, 0)²`, two-sided `weight · mean_i (‖∇_x g(x_i)‖₂ − γ)²`, with γ = `target`.

    g is the loss of each sample at its label `y`; without `y` the model's output, which must then be one number per sample (a
    critic). γ = 0 is double back-propagation, γ = 1 two-sided the WGAN penalty. It measures the slope at the data only: no
    bound of the Lipschitz constant. In training mode samples should not see each other: batch normalisation mixes them.

    References: Drucker and Le Cun 1991; Gulrajani et al. 2017; Petzka et al. 2018 (one-sided).

    >>> critic = nn.Linear(2, 1, bias=False)
    >>> _ = critic.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> round(input_gradient_penalty(critic, torch.zeros(5, 2), target=1.0).item(), 4)
    16.0
    """
    if not (math.isfinite(target) and target >= 0 and math.isfinite(weight) and weight >= 0):
        raise InputError(f"target and weight must be non-negative numbers, got {target} and {weight}")
    with torch.enable_grad():
        x = fresh_strides(x.detach()).requires_grad_()
        output = model(x)
        if y is None:
            if output.numel() != len(x):
                raise InputError(
                    f"without labels the model must give one number per sample, got {tuple(output.shape)} for {len(x)} samples"
                )
            total = output.sum()
        else:
            total = loss(output, y) * len(x)  # the loss is a mean over samples: the sum has the samples' own gradients
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        excess = _length(slope.flatten(1)) - target
        if not two_sided:
            excess = excess.clamp_min(0)
        return weight * excess.square().mean()


def _length(v: Tensor) -> Tensor:
    """‖v‖₂ per row, with gradient zero where it is zero."""
    square = v.square().sum(1)
    positive = square > 0
    return torch.where(
        positive, torch.where(positive, square, torch.ones_like(square)).sqrt(), torch.zeros_like(square)
    )
