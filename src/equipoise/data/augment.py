"""Augmentation of whole batches in torch, on any device, drawn from an explicit generator; RandAugment among it.

The draws come from the generator's own device, so a CPU generator gives the same pictures on every device. Images are
(B, C, H, W); RandAugment takes and leaves them in [0, 1], grey or in colour.

Reference: Cubuk, Zoph, Shlens, Le (2020), RandAugment.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import InputError, fresh_strides

Border = Literal["zeros", "reflect"]


def random_flip(x: Tensor, generator: torch.Generator, p: float = 0.5) -> Tensor:
    """Mirror each image of (B, C, H, W) left to right with probability p.

    >>> x = torch.arange(3.0).reshape(1, 1, 1, 3)
    >>> random_flip(x, torch.Generator().manual_seed(0), p=1.0).flatten().tolist()
    [2.0, 1.0, 0.0]
    """
    _require_images(x)
    if not 0 <= p <= 1:
        raise InputError(f"p must be a probability, got {p}")
    flipped = _coins(len(x), p, generator).to(x.device)
    return fresh_strides(torch.where(flipped[:, None, None, None], x.flip(-1), x))


def random_crop(x: Tensor, padding: int, generator: torch.Generator, border: Border = "zeros") -> Tensor:
    """Pad each image by `padding` on every side and cut its size out again at a random place, `(2·padding + 1)²` places.

    >>> x = torch.ones(2, 1, 4, 4)
    >>> random_crop(x, 1, torch.Generator().manual_seed(0), border="reflect").equal(x)
    True
    """
    _require_images(x)
    height, width = x.shape[-2:]
    if border not in ("zeros", "reflect"):
        raise InputError(f"border must be 'zeros' or 'reflect', got {border!r}")
    if padding < 0 or (border == "reflect" and padding >= min(height, width)):
        raise InputError(f"padding {padding} does not fit images of {height}×{width} with border {border!r}")
    if padding == 0:
        return fresh_strides(x)
    padded = functional.pad(x, [padding] * 4, mode="constant" if border == "zeros" else "reflect")
    corners = crop_corners(len(x), padding, generator).to(x.device)
    rows = corners[:, :1] + torch.arange(height, device=x.device)
    columns = corners[:, 1:] + torch.arange(width, device=x.device)
    by_row = padded.gather(2, rows[:, None, :, None].expand(-1, x.shape[1], -1, padded.shape[-1]))
    return fresh_strides(by_row.gather(3, columns[:, None, None, :].expand(-1, x.shape[1], height, -1)))


def crop_corners(count: int, padding: int, generator: torch.Generator) -> Tensor:
    """Upper left corners (count, 2) in the padded image, uniform on 0 … 2·padding."""
    return torch.randint(2 * padding + 1, (count, 2), generator=generator, device=generator.device)


def cutout(x: Tensor, size: int, generator: torch.Generator, p: float = 1.0, value: float = 0.0) -> Tensor:
    """Cover a square of `size` pixels around a random pixel of each image with `value`, with probability p.

    The square is cut at the border, so that on average less is covered.

    Reference: DeVries, Taylor (2017), Improved regularization of convolutional neural networks with cutout.

    >>> x = torch.ones(1, 1, 8, 8)
    >>> 4 <= int((cutout(x, 4, torch.Generator().manual_seed(0)) == 0).sum()) <= 16
    True
    """
    _require_images(x)
    if size < 1 or not 0 <= p <= 1:
        raise InputError(f"cutout needs a size ≥ 1 and a probability, got {size} and {p}")
    height, width = x.shape[-2:]
    source: dict[str, Any] = {"generator": generator, "device": generator.device}
    top = torch.randint(height, (len(x), 1), **source).to(x.device) - size // 2
    left = torch.randint(width, (len(x), 1), **source).to(x.device) - size // 2
    taken = _coins(len(x), p, generator).to(x.device)
    row, column = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    rows, columns = (row >= top) & (row < top + size), (column >= left) & (column < left + size)
    covered = rows[:, None, :, None] & columns[:, None, None, :] & taken[:, None, None, None]
    return fresh_strides(torch.where(covered, x.new_tensor(value), x))


def _coins(count: int, p: float, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator, device=generator.device) < p


def _require_images(x: Tensor) -> None:
    if x.ndim != 4:
        raise InputError(f"expected a batch of images (B, C, H, W), got shape {tuple(x.shape)}")


@dataclass(frozen=True)
class Augmentation:
    """Pad-and-crop, then flip: the usual recipe of small images, `Augmentation(padding=4)(x, generator)`.

    >>> Augmentation(padding=4)(torch.rand(8, 3, 32, 32), torch.Generator().manual_seed(0)).shape
    torch.Size([8, 3, 32, 32])
    """

    flip: bool = True
    padding: int = 0
    border: Border = "zeros"

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Augmented copies of a batch."""
        x = random_crop(x, self.padding, generator, self.border)
        return random_flip(x, generator) if self.flip else x


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
