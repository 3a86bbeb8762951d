"""Plain networks for the experiments (MLP, CNN, MLP-Mixer, VGG) and what builders share; constants are not constrained."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.core.modules import by_construction
from equipoise.core.precision import inflate
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
        return inflate(1 / float(self.std.min())) if float(self.std.min()) != 1 else 1.0

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


_named = activation  # the builders have an argument of that name


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

    >>> import torch
    >>> cnn(in_channels=1, input_size=8, channels=(4, 8))(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = pair(input_size)
    if min(height, width) < 2 ** len(channels):
        raise InputError(f"{len(channels)} halvings do not fit into {height}×{width} pixels; use fewer channels")
    layers, features = normalising(mean, std), in_channels
    for out in channels:
        layers += [nn.Conv2d(features, out, 3, padding=1), _named(activation), nn.MaxPool2d(2)]
        features, height, width = out, height // 2, width // 2
    layers += [nn.Flatten(), nn.Linear(features * height * width, hidden), _named(activation)]
    return nn.Sequential(*layers, nn.Linear(hidden, num_classes))


class MixerBlock(nn.Module):
    """Token mixing, then channel mixing, each a two-layer perceptron behind a layer norm and a skip connection."""

    def __init__(self, tokens: int, width: int, token_hidden: int, channel_hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, token_hidden), nn.GELU(), nn.Linear(token_hidden, tokens))
        self.channels = nn.Sequential(nn.Linear(width, channel_hidden), nn.GELU(), nn.Linear(channel_hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """Patches, mixer blocks, layer norm, mean over tokens, dense head."""

    def __init__(self, normalise: list[nn.Module], embed: nn.Module, blocks: list[nn.Module], width: int, out: int):
        super().__init__()
        self.normalise, self.embed = nn.Sequential(*normalise), embed
        self.blocks, self.norm, self.head = nn.Sequential(*blocks), nn.LayerNorm(width), nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        tokens = self.embed(self.normalise(x)).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def mlp_mixer(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: Size = 32,
    patch_size: int = 4,
    width: int = 128,
    depth: int = 8,
    token_hidden: int = 64,
    channel_hidden: int = 512,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Mixer:
    """MLP-Mixer.

    Reference: Tolstikhin et al. (2021), MLP-Mixer: an all-MLP architecture for vision.

    >>> import torch
    >>> mlp_mixer(in_channels=1, input_size=8, width=8, depth=1)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, columns = pair(input_size)
    if height % patch_size or columns % patch_size:
        raise InputError(f"patches of {patch_size}×{patch_size} do not tile {height}×{columns} pixels")
    tokens = (height // patch_size) * (columns // patch_size)
    embed = nn.Conv2d(in_channels, width, patch_size, patch_size)
    blocks: list[nn.Module] = [MixerBlock(tokens, width, token_hidden, channel_hidden) for _ in range(depth)]
    return Mixer(normalising(mean, std), embed, blocks, width, num_classes)


class VGG(nn.Module):
    """`features` (3×3 convolutions with batch norm, 2×2 max pooling), mean pooling, `classifier`."""

    def __init__(self, normalise: list[nn.Module], features: list[nn.Module], pool: int, classifier: list[nn.Module]):
        super().__init__()
        self.normalise, self.features = nn.Sequential(*normalise), nn.Sequential(*features)
        self.pool, self.classifier = nn.AdaptiveAvgPool2d(pool), nn.Sequential(*classifier)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(self.pool(self.features(self.normalise(x))).flatten(1))


_VGG = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def vgg(
    *,
    depth: int = 16,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: Size = 32,
    width: int = 64,
    hidden: int | None = None,
    batch_norm: bool = True,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> VGG:
    """VGG-16 or -19: a single dense layer as head for CIFAR, the three of ImageNet with `hidden=4096, num_classes=1000`.

    Reference: Simonyan, Zisserman (2015).
    """
    if depth not in _VGG:
        raise InputError(f"a VGG has depth {' or '.join(map(str, _VGG))}, got {depth}")
    if min(pair(input_size)) < 32:
        raise InputError(f"VGG halves the image five times: it needs at least 32×32 pixels, got {input_size}")
    features: list[nn.Module] = []
    channels = in_channels
    for stage, count in enumerate(_VGG[depth]):
        out = width * min(2**stage, 8)
        for _ in range(count):
            features += [nn.Conv2d(channels, out, 3, padding=1)]
            features += [nn.BatchNorm2d(out)] if batch_norm else []
            features += [nn.ReLU()]
            channels = out
        features.append(nn.MaxPool2d(2))
    if hidden is None:
        return VGG(normalising(mean, std), features, 1, [nn.Linear(channels, num_classes)])
    head: list[nn.Module] = [nn.Linear(channels * 49, hidden), nn.ReLU(), nn.Dropout()]
    head += [nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, num_classes)]
    return VGG(normalising(mean, std), features, 7, head)


vgg16, vgg19 = partial(vgg, depth=16), partial(vgg, depth=19)
