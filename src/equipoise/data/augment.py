"""Augmentation of image batches (B, C, H, W) in torch, on any device, from an explicit generator.

Random numbers come from the generator's own device, so a CPU generator gives the same images on every device.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import InputError, fresh_strides

Border = Literal["zeros", "reflect"]


def _require_images(x: Tensor) -> None:
    if x.ndim != 4:
        raise InputError(f"expected a batch of images (B, C, H, W), got shape {tuple(x.shape)}")


def _integers(high: int, shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randint(high, shape, generator=generator, device=generator.device).to(device)


def random_flip(x: Tensor, generator: torch.Generator, p: float = 0.5) -> Tensor:
    """Mirror each image left to right with probability p.

    Args:
        x: (B, C, H, W).
        generator: the source of randomness.
        p: the probability.

    >>> x = torch.arange(3.0).reshape(1, 1, 1, 3)
    >>> random_flip(x, torch.Generator().manual_seed(0), p=1.0).flatten().tolist()
    [2.0, 1.0, 0.0]
    """
    _require_images(x)
    if not 0 <= p <= 1:
        raise InputError(f"p must be a probability in [0, 1], got {p}")
    flipped = torch.rand(len(x), generator=generator, device=generator.device) < p
    return fresh_strides(torch.where(flipped.to(x.device)[:, None, None, None], x.flip(-1), x))


def random_crop(x: Tensor, padding: int, generator: torch.Generator, border: Border = "zeros") -> Tensor:
    """Pad each image on every side and crop it to its size again at one of `(2·padding + 1)²` random places.

    Args:
        x: (B, C, H, W).
        padding: at most the size of the images; below it for a reflected border.
        generator: the source of randomness.
        border: what the padding holds, zeros or the reflected image.

    >>> x = torch.ones(2, 1, 4, 4)
    >>> random_crop(x, 1, torch.Generator().manual_seed(0), border="reflect").equal(x)
    True
    """
    _require_images(x)
    modes = {"zeros": "constant", "reflect": "reflect"}
    height, width = x.shape[-2:]
    largest = min(height, width) - 1 if border == "reflect" else max(height, width)
    if border not in modes or not 0 <= padding <= largest:
        raise InputError(f"expected border in {list(modes)} and padding in 0 … {largest}, got {border!r}, {padding}")

    padded = functional.pad(x, [padding] * 4, mode=modes[border])
    corners = _integers(2 * padding + 1, (len(x), 2), generator, x.device)
    rows = corners[:, :1] + torch.arange(height, device=x.device)
    columns = corners[:, 1:] + torch.arange(width, device=x.device)
    images = torch.arange(len(x), device=x.device)[:, None, None]
    crops = padded.permute(0, 2, 3, 1)[images, rows[:, :, None], columns[:, None, :]]
    return fresh_strides(crops.permute(0, 3, 1, 2))


#: `(images, signed strength (B, 1, 1)) → images`
Operation = Callable[[Tensor, Tensor], Tensor]


def _warp(row: int, column: int, speed: float, mirrored: float = 0.0) -> Operation:
    """`x ∘ exp(s·G)` on coordinates in [−1, 1]²; `G[row, column] = speed`, `G[column, row] = mirrored` (for rotations)."""
    tangent = torch.zeros(3, 3)
    tangent[row, column] = speed
    tangent[column, row] = mirrored

    def operation(x: Tensor, strength: Tensor) -> Tensor:
        theta = torch.linalg.matrix_exp(strength * tangent.to(x))[:, :2]
        grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
        return functional.grid_sample(x, grid, align_corners=False)

    return operation


def _contrast(axes: tuple[int, ...], share: float = 1.0) -> Operation:
    """`d + (1 + 0.9·s)·(x − d)`, d the mean over some axes (or 0): away from it for s > 0, towards it for s < 0."""

    def operation(x: Tensor, strength: Tensor) -> Tensor:
        center = share * x.mean(axes, keepdim=True)
        return center + (1 + 0.9 * strength[..., None]) * (x - center)

    return operation


_TURN = math.radians(30)
OPERATIONS: dict[str, Operation] = {
    "identity": lambda x, strength: x,
    "shear-x": _warp(0, 1, 0.3),
    "shear-y": _warp(1, 0, 0.3),
    "translate-x": _warp(0, 2, 0.6),
    "translate-y": _warp(1, 2, 0.6),
    "rotate": _warp(1, 0, _TURN, -_TURN),
    "brightness": _contrast((1, 2, 3), 0.0),
    "contrast": _contrast((1, 2, 3)),
    "color": _contrast((1,)),
    "solarize": lambda x, strength: torch.where(x >= 1 - strength[..., None].abs(), 1 - x, x),
}


def randaugment(x: Tensor, generator: torch.Generator, operations: int = 2, strength: float = 0.3) -> Tensor:
    """A few random operations on each image: shear, translate, rotate, brightness, contrast, color, solarize.

    Args:
        x: (B, C, H, W) in [0, 1].
        generator: the source of randomness.
        operations: how many each image gets.
        strength: in [0, 1]; its sign is random.

    Reference: Cubuk, Zoph, Shlens, Le (2020), RandAugment; ten of its fourteen operations.

    >>> x = torch.rand(8, 3, 16, 16)
    >>> y = randaugment(x, torch.Generator().manual_seed(0))
    >>> y.shape == x.shape, bool((y >= 0).all() and (y <= 1).all())
    (True, True)
    """
    _require_images(x)
    if not 0 <= strength <= 1 or not bool(((x >= 0) & (x <= 1)).all()):
        raise InputError(f"expected images and a strength in [0, 1], got strength {strength}")
    y = x.clone()
    for _ in range(operations):
        choice = _integers(len(OPERATIONS), (len(x),), generator, x.device)
        sign = 2 * _integers(2, (len(x), 1, 1), generator, x.device) - 1
        for number, operation in enumerate(OPERATIONS.values()):
            rows = choice == number
            if bool(rows.any()):
                y[rows] = operation(y[rows], strength * sign[rows]).clamp(0, 1)
    return fresh_strides(y)
