"""Augmentation of whole batches in torch, on any device, drawn from an explicit generator; RandAugment among it.

The draws come from the generator's own device, so a CPU generator gives the same pictures on every device. Images are
(B, C, H, W); RandAugment takes and leaves them in [0, 1], grey or in colour.

Reference: Cubuk, Zoph, Shlens, Le (2020), RandAugment.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import InputError, fresh_strides

Border = Literal["zeros", "reflect"]


def _require(x: Tensor, fine: bool, what: str) -> None:
    if x.ndim != 4:
        raise InputError(f"expected a batch of images (B, C, H, W), got shape {tuple(x.shape)}")
    if not fine:
        raise InputError(f"expected {what}")


def _integers(high: int, shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randint(high, shape, generator=generator, device=generator.device).to(device)


def _coins(x: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """True with probability p for each image, (B, 1, 1, 1)."""
    drawn = torch.rand(len(x), generator=generator, device=generator.device) < p
    return drawn.to(x.device)[:, None, None, None]


def random_flip(x: Tensor, generator: torch.Generator, p: float = 0.5) -> Tensor:
    """Mirror each image left to right with probability p.

    Args:
        x: (B, C, H, W).
        generator: of the draws.
        p: the probability.

    >>> x = torch.arange(3.0).reshape(1, 1, 1, 3)
    >>> random_flip(x, torch.Generator().manual_seed(0), p=1.0).flatten().tolist()
    [2.0, 1.0, 0.0]
    """
    _require(x, 0 <= p <= 1, f"a probability, got p = {p}")
    return fresh_strides(torch.where(_coins(x, p, generator), x.flip(-1), x))


def random_crop(x: Tensor, padding: int, generator: torch.Generator, border: Border = "zeros") -> Tensor:
    """Pad each image on every side and cut its size out again at a random place, one of `(2·padding + 1)²`.

    Args:
        x: (B, C, H, W).
        padding: at most the size of the images; below it for a reflected border.
        generator: of the draws.
        border: what is padded with.

    >>> x = torch.ones(2, 1, 4, 4)
    >>> random_crop(x, 1, torch.Generator().manual_seed(0), border="reflect").equal(x)
    True
    """
    modes = {"zeros": "constant", "reflect": "reflect"}
    height, width = x.shape[-2:]
    most = min(height, width) - 1 if border == "reflect" else max(height, width)
    _require(
        x, border in modes and 0 <= padding <= most, f"border in {list(modes)}, padding in 0 … {most}, got {padding}"
    )
    if padding == 0:
        return fresh_strides(x)

    padded = functional.pad(x, [padding] * 4, mode=modes[border])
    corners = _integers(2 * padding + 1, (len(x), 2), generator, x.device)
    rows = corners[:, :1] + torch.arange(height, device=x.device)
    columns = corners[:, 1:] + torch.arange(width, device=x.device)
    images = torch.arange(len(x), device=x.device)[:, None, None]
    cut = padded.permute(0, 2, 3, 1)[images, rows[:, :, None], columns[:, None, :]]
    return fresh_strides(cut.permute(0, 3, 1, 2))


def cutout(x: Tensor, size: int, generator: torch.Generator, p: float = 1.0, value: float = 0.0) -> Tensor:
    """Cover a square around a random pixel of each image; it is cut at the border, so that on average less is covered.

    Args:
        x: (B, C, H, W).
        size: of the square.
        generator: of the draws.
        p: the probability that an image is covered.
        value: what it is covered with.

    Reference: DeVries, Taylor (2017), Improved regularization of convolutional neural networks with cutout.

    >>> x = torch.ones(1, 1, 8, 8)
    >>> 4 <= int((cutout(x, 4, torch.Generator().manual_seed(0)) == 0).sum()) <= 16
    True
    """
    _require(x, size >= 1 and 0 <= p <= 1, f"a size ≥ 1 and a probability, got {size} and {p}")

    def covered(length: int) -> Tensor:
        first = _integers(length, (len(x), 1), generator, x.device) - size // 2
        place = torch.arange(length, device=x.device)
        return (place >= first) & (place < first + size)

    rows, columns = covered(x.shape[-2]), covered(x.shape[-1])
    square = rows[:, None, :, None] & columns[:, None, None, :] & _coins(x, p, generator)
    return fresh_strides(torch.where(square, x.new_tensor(value), x))


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
        """Augmented copies of a batch.

        Args:
            x: (B, C, H, W).
            generator: of the draws.
        """
        x = random_crop(x, self.padding, generator, self.border)
        return random_flip(x, generator) if self.flip else x


#: `(images, signed strength (B,) in [−1, 1]) → images`
Operation = Callable[[Tensor, Tensor], Tensor]


def _warp(x: Tensor, s: Tensor, places: tuple[tuple[int, int, float], ...], angle: float = 0.0) -> Tensor:
    """The image under an affine map of its coordinates in [−1, 1]²: a turn, plus `factor·s` in some entries of its matrix."""
    theta = torch.zeros(len(x), 2, 3, dtype=x.dtype, device=x.device)
    theta[:, 0, 0] = theta[:, 1, 1] = torch.cos(angle * s)
    theta[:, 1, 0] = torch.sin(angle * s)
    theta[:, 0, 1] = -theta[:, 1, 0]
    for row, column, factor in places:
        theta[:, row, column] += factor * s
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, align_corners=False)


def _affine(*places: tuple[int, int, float], angle: float = 0.0) -> Operation:
    return functools.partial(_warp, places=places, angle=angle)


def _blend(towards: Callable[[Tensor], Tensor]) -> Operation:
    """`d + (1 + 0.9·s)·(x − d)` with d what the operation leads to: away from it for s > 0."""

    def operation(x: Tensor, s: Tensor) -> Tensor:
        other = towards(x)
        return (other + (1 + 0.9 * s)[:, None, None, None] * (x - other)).clamp(0, 1)

    return operation


def _blurred(x: Tensor) -> Tensor:
    return functional.avg_pool2d(functional.pad(x, [1] * 4, mode="replicate"), 3, 1)


def _autocontrast(x: Tensor, s: Tensor) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp_min(1e-6), x)


def _equalize(x: Tensor, s: Tensor) -> Tensor:
    """Every value becomes the share of the channel's pixels that are not larger."""
    flat = (x * 255).round().flatten(2)
    ranks = torch.searchsorted(flat.sort(-1).values, flat.contiguous(), right=True)
    return (ranks / flat.shape[-1]).to(x.dtype).reshape(x.shape)


def _posterize(x: Tensor, s: Tensor) -> Tensor:
    levels = (2.0 ** (8 - (4 * s.abs()).round()) - 1)[:, None, None, None]
    return (x * levels).round() / levels


def _solarize(x: Tensor, s: Tensor) -> Tensor:
    return torch.where(x >= (1 - s.abs())[:, None, None, None], 1 - x, x)


#: the operations; a new one is a new row
OPERATIONS: dict[str, Operation] = {
    "identity": lambda x, s: x,
    "shear-x": _affine((0, 1, 0.3)),
    "shear-y": _affine((1, 0, 0.3)),
    "translate-x": _affine((0, 2, 0.6)),
    "translate-y": _affine((1, 2, 0.6)),
    "rotate": _affine(angle=math.radians(30)),
    "brightness": _blend(torch.zeros_like),
    "contrast": _blend(lambda x: x.mean((1, 2, 3), keepdim=True).expand_as(x)),
    "color": _blend(lambda x: x.mean(1, keepdim=True).expand_as(x)),
    "sharpness": _blend(_blurred),
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}


def randaugment(x: Tensor, generator: torch.Generator, operations: int = 2, strength: float = 0.3) -> Tensor:
    """A few draws from the table of operations for each image.

    Args:
        x: (B, C, H, W) in [0, 1].
        generator: of the draws.
        operations: how many are drawn, at most 100.
        strength: in [0, 1], with a random sign.

    >>> x = torch.rand(8, 3, 16, 16)
    >>> y = randaugment(x, torch.Generator().manual_seed(0))
    >>> y.shape == x.shape, bool((y >= 0).all() and (y <= 1).all())
    (True, True)
    """
    unit = bool(((x >= 0) & (x <= 1)).all())
    _require(
        x,
        unit and 0 <= operations <= 100 and 0 <= strength <= 1,
        f"values, and a strength, in [0, 1] and 0 … 100 operations, got strength {strength} and {operations} operations",
    )
    y = x.clone()
    for _ in range(operations):
        choice = _integers(len(OPERATIONS), (len(x),), generator, x.device)
        sign = 2 * _integers(2, (len(x),), generator, x.device).to(x.dtype) - 1
        for number, operation in enumerate(OPERATIONS.values()):
            rows = choice == number
            if bool(rows.any()):
                y[rows] = operation(y[rows], strength * sign[rows]).clamp(0, 1)
    return fresh_strides(y)
