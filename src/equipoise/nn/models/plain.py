"""Plain networks (MLP, CNN) and what builders share; constants are not constrained."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.core import InputError, by_construction, inflate
from equipoise.nn.activations import activation as _named

Size = int | Sequence[int]


class Normalise(nn.Module):
    """`(x − mean)/std` per channel, part of the network, so that certificates speak of the pixels.

    The constants are arguments, not state: a state dict without them fits.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not len(mean) or not all(s > 0 for s in std):
            raise InputError(
                f"mean and std need one entry per channel and std > 0, got {tuple(mean)} and {tuple(std)}"
            )
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(
                name,
                torch.tensor([float(v) for v in values]).reshape(1, -1, 1, 1),
                persistent=False,
            )

    def _constant(self) -> float:
        """`1/min std`."""
        return inflate(1 / float(self.std.min())) if float(self.std.min()) != 1 else 1.0

    lipschitz_upper = by_construction(_constant)

    def forward(self, x: Tensor) -> Tensor:
        """The normalised images."""
        return (x - self.mean) / self.std


def normalising(mean: Sequence[float] | None, std: Sequence[float] | None) -> list[nn.Module]:
    """`[Normalise(mean, std)]`, or nothing where neither is given.

    Args:
        mean: per channel, or None.
        std: per channel, or None.
    """
    if mean is None and std is None:
        return []
    if mean is None or std is None:
        raise InputError("mean and std come together: give both or neither")
    return [Normalise(mean, std)]


def pair(size: Size) -> tuple[int, int]:
    """(height, width) from a number or a pair.

    >>> pair(32), pair([28, 30])
    ((32, 32), (28, 30))
    """
    values = (size, size) if isinstance(size, int) else tuple(int(n) for n in size)
    if len(values) != 2 or min(values) < 1:
        raise InputError(f"input_size must be a positive number or a pair of them, got {size}")
    return values[0], values[1]


def mlp(
    *,
    num_classes: int = 10,
    in_channels: int = 1,
    input_size: Size = 8,
    in_features: int | None = None,
    widths: Sequence[int] = (128, 128),
    activation: str = "relu",
    dropout: float = 0.0,
    bias: bool = True,
) -> nn.Sequential:
    """Flatten, then dense layers of the given widths with an activation after each but the last.

    `in_features` replaces `in_channels·height·width` for inputs that are not images.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.
        input_size: their height and width, or one number for both.
        in_features: for inputs that are not images: replaces channels and size.
        widths: of the hidden layers.
        activation: its name, see `nn.activations.ACTIVATIONS`.
        dropout: probability of dropout after each hidden layer.
        bias: whether layers have one.

    >>> mlp(widths=(16,), activation="gelu")
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=16, bias=True)
      (2): GELU(approximate='none')
      (3): Linear(in_features=16, out_features=10, bias=True)
    )
    """
    height, width = pair(input_size)
    features = in_channels * height * width if in_features is None else in_features
    layers: list[nn.Module] = [nn.Flatten()]
    for size in widths:
        layers += [nn.Linear(features, size, bias), _named(activation)]
        layers += [nn.Dropout(dropout)] if dropout else []
        features = size
    return nn.Sequential(*layers, nn.Linear(features, num_classes, bias))


def cnn(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: Size = 32,
    channels: Sequence[int] = (32, 64),
    hidden: int = 128,
    activation: str = "relu",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> nn.Sequential:
    """A small CNN: 3×3 convolution, activation, 2×2 max pooling (without overlap) for each entry of `channels`, two
    dense layers.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.
        input_size: their height and width, or one number for both.
        channels: of the convolutions.
        hidden: width of the dense layers.
        activation: its name, see `nn.activations.ACTIVATIONS`.
        mean: subtracted per channel, as part of the network.
        std: divided by per channel, as part of the network.

    >>> import torch
    >>> cnn(in_channels=1, input_size=8, channels=(4, 8))(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = pair(input_size)
    if min(height, width) < 2 ** len(channels):
        raise InputError(
            f"{len(channels)} halvings do not fit into {height}×{width} pixels; use fewer channels"
        )
    layers = normalising(mean, std)
    features = in_channels
    for out in channels:
        layers += [nn.Conv2d(features, out, 3, padding=1), _named(activation), nn.MaxPool2d(2)]
        features = out
        height = height // 2
        width = width // 2
    layers += [nn.Flatten(), nn.Linear(features * height * width, hidden), _named(activation)]
    return nn.Sequential(*layers, nn.Linear(hidden, num_classes))
