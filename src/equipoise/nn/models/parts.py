"""What several builders share: input normalisation, sizes, activations by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.core.modules import by_construction
from equipoise.core.precision import up
from equipoise.nn.activations import activation

Size = int | Sequence[int]

#: per-channel mean and standard deviation of ImageNet in [0, 1]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Normalise(nn.Module):
    """`(x − mean)/std` per channel, part of the network, so that certificates speak of the pixels.

    The constants are arguments, not state: a state dict without them fits.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not len(mean) or not all(s > 0 for s in std):
            raise InputError(f"mean and std need one entry per channel and std > 0, got {tuple(mean)} and {tuple(std)}")
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor([float(v) for v in values]).reshape(1, -1, 1, 1), persistent=False)

    def _constant(self) -> float:
        """`1/min std`."""
        return up(1 / float(self.std.min())) if float(self.std.min()) != 1 else 1.0

    lipschitz_upper = by_construction(_constant)

    def forward(self, x: Tensor) -> Tensor:
        """The normalised images."""
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """The constants."""
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


def normalising(mean: Sequence[float] | None, std: Sequence[float] | None) -> list[nn.Module]:
    """`[Normalise(mean, std)]`, or nothing where neither is given."""
    if mean is None and std is None:
        return []
    if mean is None or std is None:
        raise InputError("mean and std come together: give both or neither")
    return [Normalise(mean, std)]


def pair(size: Size, what: str = "input_size") -> tuple[int, int]:
    """(height, width) from a number or a pair.

    >>> pair(32), pair([28, 30])
    ((32, 32), (28, 30))
    """
    values = (size, size) if isinstance(size, int) else tuple(int(n) for n in size)
    if len(values) != 2 or min(values) < 1:
        raise InputError(f"{what} must be a positive number or a pair of them, got {size}")
    return values[0], values[1]


def joined(blocks: Sequence[Sequence[nn.Module]]) -> nn.Sequential:
    """One `nn.Sequential` of several runs of layers."""
    return nn.Sequential(*(layer for block in blocks for layer in block))


__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "Normalise", "Size", "activation", "joined", "normalising", "pair"]
