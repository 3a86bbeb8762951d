"""Plain networks of the experiments: ResNet-18/34/50, CIFAR ResNets of depth 6n + 2, wide ResNets, VGG, MLP-Mixer.

Layer names are the customary ones, so that published weights fit. Recipes name them `equipoise_lab.models:resnet18`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.errors import InputError
from equipoise.nn import models
from equipoise.nn.models.plain import Size, normalising, pair
from equipoise_lab.gpt import LipschitzGPT
from equipoise_lab.sandwich import sandwich_cnn, sandwich_mlp

#: per-channel mean and standard deviation of ImageNet in [0, 1]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _conv(i: int, o: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(i, o, kernel, stride, kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions; the shortcut is the identity, a projection ("B"), or subsampling with zero channels ("A")."""

    expansion: ClassVar[int] = 1

    def __init__(
        self, i: int, width: int, stride: int = 1, option: Literal["A", "B"] = "B"
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(i, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width), nn.BatchNorm2d(width)
        self.stride, self.extra = stride, width - i
        projected = option == "B" and (stride != 1 or i != width)
        self.downsample = _projection(i, width, stride) if projected else None

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.downsample is not None:
            x = self.downsample(x)
        elif self.stride != 1 or self.extra:
            before = self.extra // 2
            x = functional.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.extra - before)
            )
        return functional.relu(x + y)


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions with four times as many channels at the end; a projection where the shape changes."""

    expansion: ClassVar[int] = 4

    def __init__(self, i: int, width: int, stride: int = 1) -> None:
        super().__init__()
        o = 4 * width
        self.conv1, self.bn1 = _conv(i, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, o, 1), nn.BatchNorm2d(o)
        self.downsample = _projection(i, o, stride) if stride != 1 or i != o else None

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        y = functional.relu(self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))))
        y = self.bn3(self.conv3(y))
        return functional.relu((x if self.downsample is None else self.downsample(x)) + y)


def _projection(i: int, o: int, stride: int) -> nn.Sequential:
    return nn.Sequential(_conv(i, o, 1, stride), nn.BatchNorm2d(o))


class ResNet(nn.Module):
    """Stem, four stages that halve the image, mean over pixels, dense head `fc`."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], counts: Sequence[int], num_classes: int,
                 in_channels: int, width: int, stem: str, normalise: list[nn.Module]) -> None:  # fmt: skip
        super().__init__()
        if stem not in ("imagenet", "cifar"):
            raise InputError(
                f"stem is 'imagenet' (7×7, stride 2, max pooling) or 'cifar' (3×3), got {stem!r}"
            )
        small = stem == "cifar"
        self.normalise = nn.Sequential(*normalise)
        self.conv1 = _conv(in_channels, width) if small else _conv(in_channels, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        channels = width
        for stage, count in enumerate(counts):
            blocks = []
            for index in range(count):
                blocks.append(block(channels, width * 2**stage, 2 if stage and not index else 1))
                channels = width * 2**stage * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = self.maxpool(functional.relu(self.bn1(self.conv1(self.normalise(x)))))
        for stage in (1, 2, 3, 4):
            y = self.get_submodule(f"layer{stage}")(y)
        return self.fc(y.mean((2, 3)))


class CifarResNet(nn.Module):
    """The CIFAR ResNet of depth 6n + 2: three stages of n option-A blocks with 16, 32, 64 channels, dense head `linear`."""

    def __init__(
        self, depth: int, num_classes: int, in_channels: int, width: int, normalise: list[nn.Module]
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise InputError(
                f"a CIFAR ResNet has depth 6n + 2 (8, 14, 20, …, 56, …, 110), got {depth}"
            )
        n = (depth - 2) // 6
        self.normalise = nn.Sequential(*normalise)
        self.conv1, self.bn1 = _conv(in_channels, width), nn.BatchNorm2d(width)
        channels = width
        for stage in range(3):
            out = width * 2**stage
            first = BasicBlock(channels, out, 2 if stage else 1, "A")
            self.add_module(
                f"layer{stage + 1}",
                nn.Sequential(first, *(BasicBlock(out, out) for _ in range(n - 1))),
            )
            channels = out
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = functional.relu(self.bn1(self.conv1(self.normalise(x))))
        for stage in (1, 2, 3):
            y = self.get_submodule(f"layer{stage}")(y)
        return self.linear(y.mean((2, 3)))


Stem = Literal["imagenet", "cifar"]


#: depth → (block, blocks per stage)
_STAGES: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


def resnet(
    *,
    depth: int = 18,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: Size = 32,
    width: int = 64,
    stem: Stem = "cifar",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> ResNet:
    """ResNet-18 or -34, or -50, -101, -152 with bottleneck blocks.

    `stem="imagenet", num_classes=1000, input_size=224` is the original, whose state-dict names it has.

    Reference: He et al. (2016), Deep residual learning for image recognition.

    >>> import torch
    >>> resnet18(width=4, in_channels=1)(torch.zeros(2, 1, 16, 16)).shape
    torch.Size([2, 10])
    """
    pair(input_size)
    if depth not in _STAGES:
        raise InputError(f"a ResNet has depth {', '.join(map(str, _STAGES))}, got {depth}")
    return ResNet(*_STAGES[depth], num_classes, in_channels, width, stem, normalising(mean, std))


resnet18 = partial(resnet, depth=18)
resnet34 = partial(resnet, depth=34)
resnet50 = partial(resnet, depth=50)
resnet101 = partial(resnet, depth=101)
resnet152 = partial(resnet, depth=152)


def cifar_resnet(
    *,
    depth: int = 20,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: Size = 32,
    width: int = 16,
    mean: Sequence[float] | None = IMAGENET_MEAN,
    std: Sequence[float] | None = IMAGENET_STD,
) -> CifarResNet:
    """CIFAR ResNet of depth 6n + 2 with option-A shortcuts; takes pixels in [0, 1] and normalises them itself.

    Reference: He et al. (2016), §4.2.

    >>> sum(p.numel() for p in cifar_resnet().parameters())
    269722
    """
    pair(input_size)
    return CifarResNet(depth, num_classes, in_channels, width, normalising(mean, std))


cifar_resnet20, cifar_resnet56 = partial(cifar_resnet, depth=20), partial(cifar_resnet, depth=56)
cifar_resnet110 = partial(cifar_resnet, depth=110)


class WideBlock(nn.Module):
    """Pre-activation block: batch norm, ReLU and 3×3 convolution, twice; 1×1 projection where the shape changes."""

    def __init__(self, i: int, o: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(i), _conv(i, o, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(o), _conv(o, o)
        self.dropout = nn.Dropout(dropout)
        self.shortcut = _conv(i, o, 1, stride) if stride != 1 or i != o else None

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        y = functional.relu(self.bn1(x))
        skip = x if self.shortcut is None else self.shortcut(y)
        return skip + self.conv2(self.dropout(functional.relu(self.bn2(self.conv1(y)))))


def wide_resnet(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: Size = 32,
    depth: int = 28,
    widen: int = 10,
    width: int = 16,
    dropout: float = 0.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> nn.Sequential:
    """WideResNet-depth-widen.

    Reference: Zagoruyko, Komodakis (2016).

    >>> import torch
    >>> wide_resnet(depth=10, widen=1, in_channels=1)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    pair(input_size)
    if depth < 10 or (depth - 4) % 6:
        raise InputError(f"a wide ResNet has depth 6n + 4 (10, 16, 22, 28, 40, …), got {depth}")
    layers, channels = [*normalising(mean, std), _conv(in_channels, width)], width
    for stage in range(3):
        for index in range((depth - 4) // 6):
            out = width * widen * 2**stage
            layers.append(WideBlock(channels, out, 2 if stage and not index else 1, dropout))
            channels = out
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(channels, num_classes))


class MixerBlock(nn.Module):
    """Token mixing, then channel mixing, each a two-layer perceptron behind a layer norm and a skip connection."""

    def __init__(self, tokens: int, width: int, token_hidden: int, channel_hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Linear(tokens, token_hidden), nn.GELU(), nn.Linear(token_hidden, tokens)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, channel_hidden), nn.GELU(), nn.Linear(channel_hidden, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """Patches, mixer blocks, layer norm, mean over tokens, dense head."""

    def __init__(
        self,
        normalise: list[nn.Module],
        embed: nn.Module,
        blocks: list[nn.Module],
        width: int,
        out: int,
    ):
        super().__init__()
        self.normalise, self.embed = nn.Sequential(*normalise), embed
        self.blocks, self.norm, self.head = (
            nn.Sequential(*blocks),
            nn.LayerNorm(width),
            nn.Linear(width, out),
        )

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
        raise InputError(
            f"patches of {patch_size}×{patch_size} do not tile {height}×{columns} pixels"
        )
    tokens = (height // patch_size) * (columns // patch_size)
    embed = nn.Conv2d(in_channels, width, patch_size, patch_size)
    blocks: list[nn.Module] = [
        MixerBlock(tokens, width, token_hidden, channel_hidden) for _ in range(depth)
    ]
    return Mixer(normalising(mean, std), embed, blocks, width, num_classes)


class VGG(nn.Module):
    """`features` (3×3 convolutions with batch norm, 2×2 max pooling), mean pooling, `classifier`."""

    def __init__(
        self,
        normalise: list[nn.Module],
        features: list[nn.Module],
        pool: int,
        classifier: list[nn.Module],
    ):
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
        raise InputError(
            f"VGG halves the image five times: it needs at least 32×32 pixels, got {input_size}"
        )
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

#: a character model with a proved constant
lipschitz_gpt = LipschitzGPT

#: the networks by name
MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp_mixer": mlp_mixer,
    "vgg16": vgg16,
    "vgg19": vgg19,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet101": resnet101,
    "resnet152": resnet152,
    "cifar_resnet": cifar_resnet,
    "cifar_resnet20": cifar_resnet20,
    "cifar_resnet56": cifar_resnet56,
    "cifar_resnet110": cifar_resnet110,
    "wide_resnet": wide_resnet,
    "lipschitz_gpt": lipschitz_gpt,
    "sandwich_cnn": sandwich_cnn,
    "sandwich_mlp": sandwich_mlp,
}


def build(name: str, **arguments: Any) -> nn.Module:
    """The network of that name, of this module or of `equipoise.nn.models`.

    Args:
        name: of the builder.
        arguments: of the builder.

    >>> build("cifar_resnet", depth=8, width=2).__class__.__name__
    'CifarResNet'
    """
    return MODELS[name](**arguments) if name in MODELS else models.build(name, **arguments)


def factory(name: str) -> str:
    """What a recipe calls the builder.

    >>> factory("resnet18"), factory("mlp")
    ('equipoise_lab.models:resnet18', 'equipoise.nn.models:mlp')
    """
    return f"{__name__}:{name}" if name in MODELS else models.factory(name)
