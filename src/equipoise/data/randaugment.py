"""RandAugment on batches of tensors: a few operations from a table per image, at one strength, from an explicit generator.

Images are (B, C, H, W) in [0, 1], grey or in colour; every operation leaves them there.

Reference: Cubuk, Zoph, Shlens, Le (2020), RandAugment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import InputError, fresh_strides

#: `(images, signed strength (B,) in [−1, 1]) → images`
Operation = Callable[[Tensor, Tensor], Tensor]


def _warp(x: Tensor, matrix: list[list[Tensor]]) -> Tensor:
    """The image under an affine map of its coordinates in [−1, 1]², bilinear, zeros outside."""
    theta = torch.stack([torch.stack(row, 1) for row in matrix], 1).to(x.dtype)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, align_corners=False)


def _affine(make: Callable[[Tensor, Tensor, Tensor], list[list[Tensor]]]) -> Operation:
    def operation(x: Tensor, s: Tensor) -> Tensor:
        return _warp(x, make(s, torch.ones_like(s), torch.zeros_like(s)))

    return operation


def _turn(s: Tensor, one: Tensor, zero: Tensor) -> list[list[Tensor]]:
    angle = s * math.radians(30)
    return [[angle.cos(), -angle.sin(), zero], [angle.sin(), angle.cos(), zero]]


def _blend(towards: Callable[[Tensor], Tensor]) -> Operation:
    """`d + (1 + 0.9·s)·(x − d)` with d what the operation leads to: away from it for s > 0."""

    def operation(x: Tensor, s: Tensor) -> Tensor:
        other = towards(x)
        return (other + (1 + 0.9 * s)[:, None, None, None] * (x - other)).clamp(0, 1)

    return operation


def _grey(x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True).expand_as(x)


def _blurred(x: Tensor) -> Tensor:
    return functional.avg_pool2d(functional.pad(x, [1] * 4, mode="replicate"), 3, 1)


def _autocontrast(x: Tensor, s: Tensor) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp_min(1e-6), x)


def _equalize(x: Tensor, s: Tensor) -> Tensor:
    """Every value becomes the share of the channel's pixels that are not larger, counted in 256 bins."""
    bins = (x * 255).round().long().clamp(0, 255).flatten(2)
    counts = torch.zeros(*x.shape[:2], 256, dtype=x.dtype, device=x.device)
    counts.scatter_add_(2, bins, torch.ones_like(bins, dtype=x.dtype))
    return (counts.cumsum(2) / bins.shape[2]).gather(2, bins).reshape(x.shape).clamp(0, 1)


def _posterize(x: Tensor, s: Tensor) -> Tensor:
    levels = (2.0 ** (8 - (4 * s.abs()).round()) - 1)[:, None, None, None]
    return (x * levels).round() / levels


def _solarize(x: Tensor, s: Tensor) -> Tensor:
    return torch.where(x >= (1 - s.abs())[:, None, None, None], 1 - x, x)


#: the operations; a new one is a new row
OPERATIONS: dict[str, Operation] = {
    "identity": lambda x, s: x,
    "shear-x": _affine(lambda s, one, zero: [[one, 0.3 * s, zero], [zero, one, zero]]),
    "shear-y": _affine(lambda s, one, zero: [[one, zero, zero], [0.3 * s, one, zero]]),
    "translate-x": _affine(lambda s, one, zero: [[one, zero, 0.6 * s], [zero, one, zero]]),
    "translate-y": _affine(lambda s, one, zero: [[one, zero, zero], [zero, one, 0.6 * s]]),
    "rotate": _affine(_turn),
    "brightness": _blend(torch.zeros_like),
    "contrast": _blend(lambda x: x.mean((1, 2, 3), keepdim=True).expand_as(x)),
    "color": _blend(_grey),
    "sharpness": _blend(_blurred),
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}


def randaugment(x: Tensor, generator: torch.Generator, operations: int = 2, strength: float = 0.3) -> Tensor:
    """`operations` draws from the table for each image, at `strength` in [0, 1] with a random sign.

    >>> x = torch.rand(8, 3, 16, 16)
    >>> y = randaugment(x, torch.Generator().manual_seed(0))
    >>> y.shape == x.shape, bool((y >= 0).all() and (y <= 1).all())
    (True, True)
    """
    if x.ndim != 4 or bool((x < 0).any()) or bool((x > 1).any()):
        raise InputError(f"randaugment expects images (B, C, H, W) with values in [0, 1], got shape {tuple(x.shape)}")
    if operations < 0 or not 0 <= strength <= 1:
        raise InputError(f"randaugment needs operations ≥ 0 and strength in [0, 1], got {operations} and {strength}")
    table, y = list(OPERATIONS.values()), x.clone()
    for _ in range(operations):
        source: dict[str, Any] = {"generator": generator, "device": generator.device}
        chosen = torch.randint(len(table), (len(x),), **source).to(x.device)
        sign = (torch.randint(2, (len(x),), **source) * 2 - 1).to(x.device, x.dtype)
        for number, operation in enumerate(table):
            rows = chosen == number
            if bool(rows.any()):
                y[rows] = operation(y[rows], strength * sign[rows]).clamp(0, 1)
    return fresh_strides(y)
