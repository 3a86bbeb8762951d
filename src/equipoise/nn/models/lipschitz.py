"""Networks whose constant follows from their construction, 1 or the argument `constant`: SLL, LiResNet, orthogonal, Sandwich."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.nn.activations import MaxMin
from equipoise.nn.models.plain import Size, pair
from equipoise.nn.normalise import LastLayerNormalised
from equipoise.nn.orthogonal.bcop import BCOPConv2d, RKOLinear
from equipoise.nn.orthogonal.cayley import BROConv2d, BROLinear, CHORDConv2d, CHORDLinear
from equipoise.nn.orthogonal.sandwich import SandwichConv2d, SandwichLinear
from equipoise.nn.pooling import FirstFeatures, PadChannels, ScaledAvgPool2d, SpaceToDepth
from equipoise.nn.rescaling import AOLLinear, RLBConv2d, RLBLinear, SNConv2d, SNLinear, SRLinear
from equipoise.nn.residual import Residual, SLLConv2d, SLLLinear
from equipoise.nn.wrappers import Lipschitz

Head = Literal["sr", "aol", "lln", "first"]
Block = Literal["rlb", "bro", "chord"]


def head(kind: str, features: int, num_classes: int) -> nn.Module:
    """The last layer: `sr` and `aol` keep the logits 1-Lipschitz, `first` takes the first features, `lln` has rows of
    norm 1.

    With `lln` every logit is 1-Lipschitz, the vector of them up to ‖Ŵ‖: certify by pairs
    (`smoothing.margins.margin_radius(weight=…)`).
    """
    if kind == "first" and features < num_classes:
        raise InputError(
            f"{features} features are too few for {num_classes} classes; use another head or more channels"
        )
    table = {
        "sr": lambda: SRLinear(features, num_classes, side="input"),
        "aol": lambda: AOLLinear(features, num_classes, side="input"),
        "lln": lambda: LastLayerNormalised(features, num_classes),
        "first": lambda: FirstFeatures(num_classes),
    }
    if kind not in table:
        raise InputError(f"head is one of {', '.join(table)}, got {kind!r}")
    return table[kind]()


def _scaled(constant: float, layers: Sequence[nn.Module]) -> nn.Module:
    network = nn.Sequential(*layers)
    return network if constant == 1 else Lipschitz(constant, network)


def isometric(block: Residual, threshold: float = 0.0) -> Residual:
    """Start a block from an orthogonal weight at the central tap, where R = 1 and `I − 2WDWᵀ` is orthogonal (hidden ≤
    features).

    Random weights are not orthogonal; then every block contracts a little, and a deep network starts as a constant.

    >>> block, x = isometric(SLLLinear(8, hidden=4)), torch.randn(5, 8)
    >>> torch.allclose(block(x).norm(dim=1), x.norm(dim=1), rtol=1e-3)
    True
    """
    with torch.no_grad():
        raw = block.raw
        centre = raw.new_empty(raw.shape[:2])
        nn.init.orthogonal_(centre)
        raw.zero_()
        middle: tuple[Any, ...] = (slice(None), slice(None), *(k // 2 for k in raw.shape[2:]))
        raw[middle] = centre
        if isinstance(block.bias, Tensor):
            block.bias.fill_(-threshold)
    return block


def sll(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: Size = 32,
    depth: int = 4,
    channels: int = 32,
    kernel_size: int = 3,
    dense_depth: int = 2,
    hidden: int = 256,
    pool: int = 4,
    rescaling: Literal["aol", "sr"] = "sr",
    t: int = 2,
    head: Head = "sr",
    constant: float = 1.0,
    threshold: float = 0.0,
) -> nn.Module:
    """SLL network: zero channels, `depth` convolutional blocks, pooling, `dense_depth` dense blocks, a last layer.

    Every block is `x − 2WR²·relu(Wᵀx + b)`, without normalisation. The blocks start as isometries (`isometric`), with
    bias −threshold: a threshold of 1 puts most units to rest, so that the network starts near the identity and hundreds
    of blocks train.

    Reference: Araujo et al. (2023), A unified algebraic perspective on Lipschitz neural networks; Delattre et al.
    (2024) for `rescaling="sr"`.

    >>> import torch
    >>> sll(in_channels=1, input_size=8, channels=8, hidden=16)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = pair(input_size)
    if channels < in_channels:
        raise InputError(f"the blocks keep the number of channels: {channels} is fewer than the input's {in_channels}")
    if height < pool or width < pool:
        raise InputError(f"pooling over {pool}×{pool} pixels does not fit into {height}×{width}")
    options: dict[str, Any] = {"rescaling": rescaling, "t": t}
    layers: list[nn.Module] = [PadChannels(channels)]
    layers += [isometric(SLLConv2d(channels, kernel_size=kernel_size, **options), threshold) for _ in range(depth)]
    layers += [ScaledAvgPool2d(pool), nn.Flatten()]
    features = channels * (height // pool) * (width // pool)
    layers += [isometric(SLLLinear(features, hidden=hidden, **options), threshold) for _ in range(dense_depth)]
    return _scaled(constant, [*layers, _head(head, features, num_classes)])


_head = head  # the builders have an argument of that name


#: for two cores and minutes
sll_tiny = partial(sll, depth=4, channels=16, dense_depth=2, hidden=128)
#: the sizes of Araujo et al.
sll_small = partial(sll, depth=20, channels=45, kernel_size=5, dense_depth=7, hidden=2048)
sll_medium = partial(sll, depth=30, channels=60, kernel_size=5, dense_depth=10, hidden=2048)
sll_large = partial(sll, depth=50, channels=90, kernel_size=5, dense_depth=10, hidden=2048)
sll_xlarge = partial(sll, depth=70, channels=120, kernel_size=5, dense_depth=15, hidden=2048)


def _halved(input_size: Size, times: int) -> tuple[int, int]:
    """(height, width), refused unless they can be halved that often."""
    height, width = pair(input_size)
    if height % 2**times or width % 2**times:
        raise InputError(f"{times} halvings need sizes divisible by 2**{times}, got {height}×{width}")
    return height, width


def orthogonal_cnn(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: Size = 32,
    channels: Sequence[int] = (16, 32),
    hidden: int = 128,
    head: Head = "sr",
    constant: float = 1.0,
) -> nn.Module:
    """A small gradient-norm-preserving network: BCOP convolutions, MaxMin, space-to-depth, orthogonal dense layers.

    Reference: Li et al. (2019), Preventing gradient attenuation in Lipschitz constrained convolutional networks.

    >>> import torch
    >>> orthogonal_cnn(in_channels=1, input_size=8, channels=(4, 8), hidden=16)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = _halved(input_size, len(channels))
    layers: list[nn.Module] = []
    features = in_channels
    for out in channels:
        layers += [BCOPConv2d(features, out, 3, padding=1), MaxMin(), SpaceToDepth(2)]
        features, height, width = 4 * out, height // 2, width // 2
    layers += [nn.Flatten(), RKOLinear(features * height * width, hidden), MaxMin()]
    return _scaled(constant, [*layers, _head(head, hidden, num_classes)])


def sandwich_cnn(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: Size = 32,
    channels: Sequence[int] = (16, 32),
    hidden: int = 128,
    head: Head = "sr",
    constant: float = 1.0,
) -> nn.Module:
    """A small network of sandwich layers, `constant`-Lipschitz: what Lipschitz-aware smoothing is tried on.

    Every sandwich layer holds its ReLU; convolutions halve the image by their stride.

    Reference: Wang, Manchester (2023), Direct parameterization of Lipschitz-bounded deep networks.

    >>> import torch
    >>> sandwich_cnn(in_channels=1, input_size=8, channels=(4,), hidden=16, constant=2.0)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = _halved(input_size, len(channels))
    layers: list[nn.Module] = []
    features = in_channels
    for out in channels:
        layers.append(SandwichConv2d(features, out, 3, stride=2, padding=1))
        features, height, width = out, height // 2, width // 2
    layers += [nn.Flatten(), SandwichLinear(features * height * width, hidden)]
    return _scaled(constant, [*layers, _head(head, hidden, num_classes)])


def sandwich_mlp(
    *,
    num_classes: int = 10,
    in_channels: int = 1,
    input_size: Size = 8,
    widths: Sequence[int] = (128, 128),
    head: Head = "sr",
    constant: float = 1.0,
) -> nn.Module:
    """Dense sandwich layers, `constant`-Lipschitz.

    >>> import torch
    >>> sandwich_mlp(widths=(16,))(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = pair(input_size)
    layers: list[nn.Module] = [nn.Flatten()]
    features = in_channels * height * width
    for size in widths:
        layers.append(SandwichLinear(features, size))
        features = size
    return _scaled(constant, [*layers, _head(head, features, num_classes)])


def liresnet(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: Size = 32,
    channels: int = 64,
    depth: int = 12,
    dense_depth: int = 4,
    hidden: int = 512,
    head: Head = "lln",
    constant: float = 1.0,
    block: Block = "rlb",
    dense: Block = "rlb",
    rank: float = 0.5,
) -> nn.Module:
    """LiResNet: a strided stem, `depth` linear residual blocks with MaxMin, a strided neck, dense residual blocks, a
    last layer.

    A block is `(I + Q)x/‖I + Q‖`, whose norm is taken of the whole map (`rlb`), the same made orthogonal (`chord`), or a block
    reflector whose rank is this share of the width (`bro`): `bronet` has reflectors and CHORD dense layers. The default head
    has rows of norm 1: certify by pairs.

    Reference: Hu, Zou, Wang, Leino, Fredrikson (2023), Unlocking deterministic robustness certification on ImageNet; Hu, Leino,
    Wang, Fredrikson (2024), A recipe for improved certifiable robustness (CHORD); Lai, Huang, Kung, Chen (2025), Enhancing
    certified robustness via block reflector orthogonal layers and logit annealing loss (BRONet).

    >>> import torch
    >>> liresnet(in_channels=1, input_size=8, channels=8, depth=2, hidden=16)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = pair(input_size)
    if height % 4 or width % 4:
        raise InputError(f"LiResNet halves the image twice: sizes must be divisible by 4, got {height}×{width}")
    layers: list[nn.Module] = [SNConv2d(in_channels, channels, 5, stride=2, padding=2), MaxMin()]
    conv, _ = _blocks(block, rank, channels)
    _, linear = _blocks(dense, rank, hidden)
    for _ in range(depth):
        layers += [conv(channels, channels, 3, padding=1), MaxMin()]
    layers += [SNConv2d(channels, channels, 2, stride=2), MaxMin(), nn.Flatten()]
    layers += [SNLinear(channels * (height // 4) * (width // 4), hidden), MaxMin()]
    for _ in range(dense_depth):
        layers += [linear(hidden, hidden), MaxMin()]
    return _scaled(constant, [*layers, _head(head, hidden, num_classes)])


#: BRONet: block reflectors, and CHORD dense layers
bronet = partial(liresnet, block="bro", dense="chord")


#: blocks of a LiResNet: (convolution, dense layer)
_BLOCKS: dict[str, tuple[Any, Any]] = {
    "rlb": (RLBConv2d, RLBLinear),
    "chord": (CHORDConv2d, CHORDLinear),
    "bro": (BROConv2d, BROLinear),
}


def _blocks(kind: str, rank: float, width: int) -> tuple[Any, Any]:
    """(convolution, dense layer) of this kind; reflectors of the share `rank` of the width."""
    if kind not in _BLOCKS:
        raise InputError(f"a block is one of {', '.join(_BLOCKS)}, got {kind!r}")
    if kind != "bro":
        return _BLOCKS[kind]
    conv, dense = _BLOCKS[kind]
    return partial(conv, rank=max(1, round(rank * width))), partial(dense, rank=max(1, round(rank * width)))
