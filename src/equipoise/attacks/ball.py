"""The ℓ2 ball in floating point: starts and projections that end inside it, measured in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def unit(g: Tensor) -> Tensor:
    """`g/‖g‖₂` per input, in float64; 0 where the gradient is 0 or not finite.

    >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).round(decimals=6).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    g = g.double()
    norm = g.flatten(1).norm(dim=1)
    good = torch.isfinite(norm) & (norm > 0)
    scale = torch.where(good, 1 / torch.where(good, norm, torch.ones_like(norm)), torch.zeros_like(norm))
    return torch.nan_to_num(g, 0.0, 0.0, 0.0) * _wide(scale, g)


def random_start(x: Tensor, radius: Tensor, generator: torch.Generator) -> Tensor:
    """`x + ε·u` with u uniform on the sphere, then made to lie in the ball."""
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64, device=x.device)
    return inside_ball(x, x.double() + _wide(radius, x) * unit(noise), radius)


def inside_ball(x: Tensor, z: Tensor, radius: Tensor) -> Tensor:
    """Project the float64 point z on the ball around x, in the dtype of x: `‖z − x‖₂ ≤ radius` for what is returned.

    Rounding to x's dtype may step over the sphere, so the perturbation is shrunk until the float64 norm of the stored
    difference, enlarged by its own rounding, is within the radius; if that fails, the point is x itself.

    >>> x = torch.zeros(1, 3)
    >>> z = inside_ball(x, torch.full((1, 3), 5.0, dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64))
    >>> bool((z.double() - x.double()).norm() <= 1.0), bool(z.norm() > 0.9999)
    (True, True)
    """
    centre = x.double()
    delta = z - centre
    rounding = 1 + (delta[0].numel() + 4) * 2.0**-52
    scale = torch.clamp(radius / delta.flatten(1).norm(dim=1).clamp(min=1e-300), max=1.0)
    for attempt in range(12):
        stored = (centre + _wide(scale, x) * delta).to(x.dtype)
        norm = (stored.double() - centre).flatten(1).norm(dim=1) * rounding
        outside = norm > radius
        if not bool(outside.any()):
            return stored
        scale = torch.where(outside, scale * (1 - 1e-7 * 4.0**attempt), scale).clamp(min=0.0)
    return torch.where(_wide(outside, x), x, stored)


def _wide(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))
