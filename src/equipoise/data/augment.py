"""Augmentation of image batches (B, C, H, W) in torch, on any device, from an explicit generator.

Random numbers come from the generator's own device, so a CPU generator gives the same images on every device.
"""

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import InputError, fresh_strides


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
    if x.ndim != 4 or not 0 <= p <= 1:
        raise InputError(
            f"expected images (B, C, H, W) and p in [0, 1], got shape {tuple(x.shape)} and p = {p}"
        )
    flipped = torch.rand(len(x), generator=generator, device=generator.device) < p
    return fresh_strides(torch.where(flipped.to(x.device)[:, None, None, None], x.flip(-1), x))


def random_crop(x: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Pad each image with zeros on every side and crop it to its size again at one of `(2·padding + 1)²` random places.

    Args:
        x: (B, C, H, W).
        generator: the source of randomness.
        padding: at most the size of the images.

    >>> x = torch.ones(2, 1, 4, 4)
    >>> random_crop(x, torch.Generator().manual_seed(0), padding=0).equal(x)
    True
    """
    if x.ndim != 4 or not 0 <= padding <= max(x.shape[2:]):
        raise InputError(
            f"expected images (B, C, H, W) and a padding from 0 to their size, got {tuple(x.shape)} and {padding}"
        )
    height, width = x.shape[2:]
    padded = functional.pad(x, [padding] * 4)
    corners = torch.randint(
        2 * padding + 1, (len(x), 2), generator=generator, device=generator.device
    )
    crops = [
        image[:, row : row + height, column : column + width]
        for image, (row, column) in zip(padded, corners.tolist(), strict=True)
    ]
    return torch.stack(crops)
