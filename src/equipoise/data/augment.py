"""Augmentation of whole batches in torch, on any device, drawn from an explicit generator.

The draws come from the generator's own device, so a CPU generator gives the same pictures on every device.
"""

from __future__ import annotations

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
