"""Power iteration on the layer itself: the usual baseline. A lower bound, so never a certificate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.nn.method import Kernel

#: output pixels per axis of the image the iteration runs on
PIXELS = 8


def power_start(kernel: Kernel) -> Tensor:
    """A fixed random output to start from: `(1, out, *pixels)`, or `(1, out)` for a dense layer."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, kernel.shape[0], *[PIXELS] * kernel.dims, generator=generator)


def power_norm(kernel: Kernel, raw: Tensor, start: Tensor, iterations: int) -> Tensor:
    """`uᵀWv` after some steps of power iteration from `start`: differentiable, at most ‖W‖ up to rounding."""
    with torch.no_grad():
        u, v = start.to(raw.dtype), start.to(raw.dtype)
        for _ in range(iterations):
            v = _unit(_adjoint(kernel, raw, u))
            u = _unit(_forward(kernel, raw, v))
    return (u * _forward(kernel, raw, v)).sum()


def _unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x).clamp_min(torch.finfo(x.dtype).tiny)


def _forward(kernel: Kernel, weight: Tensor, x: Tensor) -> Tensor:
    if kernel.dims == 0:
        return x @ weight.mT
    convolve = functional.conv1d if kernel.dims == 1 else functional.conv2d
    return convolve(x, weight, None, kernel.stride, 0, kernel.dilation, kernel.groups)


def _adjoint(kernel: Kernel, weight: Tensor, y: Tensor) -> Tensor:
    if kernel.dims == 0:
        return y @ weight
    spread = functional.conv_transpose1d if kernel.dims == 1 else functional.conv_transpose2d
    return spread(y, weight, None, kernel.stride, 0, 0, kernel.groups, kernel.dilation)
