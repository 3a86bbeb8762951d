"""Networks whose constant follows from their construction, 1 or the argument `constant`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from equipoise.core import InputError, require_one_of
from equipoise.nn import rescaling as rescalings
from equipoise.nn.activations import MaxMin
from equipoise.nn.activations import activation as activation_named
from equipoise.nn.convert import methods
from equipoise.nn.models.plain import Normalise, Size, pair
from equipoise.nn.normalise import LastLayerNormalised
from equipoise.nn.orthogonal.cayley import BROConv2d, BROLinear
from equipoise.nn.orthogonal.polar import BCOPConv2d
from equipoise.nn.pooling import PadChannels, ScaledAvgPool2d, SpaceToDepth
from equipoise.nn.residual import CPLConv2d, Residual, SLLConv2d, SLLLinear
from equipoise.nn.wrappers import Lipschitz, Mirrored

Head = Literal["sr", "aol", "lln"]
Activation = Callable[[], nn.Module]

_HEADS: dict[str, Callable[[int, int], nn.Module]] = {
    "sr": partial(rescalings.SRLinear, side="input"),
    "aol": partial(rescalings.AOLLinear, side="input"),
    "lln": LastLayerNormalised,
}


def _network(
    layers: Sequence[nn.Module], head: str, features: int, classes: int, constant: float
) -> nn.Module:
    """The layers and a last one: `sr` and `aol` keep the logits 1-Lipschitz.

    With `lln`, rows of norm 1, every logit is 1-Lipschitz, the vector of them up to ‖Ŵ‖: certify by pairs
    (`smoothing.margins.margin_radius(weight=…)`).
    """
    require_one_of(_HEADS, head=head)
    network = nn.Sequential(*layers, _HEADS[head](features, classes))
    return network if constant == 1 else Lipschitz(constant, network)


def _halved(input_size: Size, times: int) -> tuple[int, int]:
    """(height, width), refused unless they can be halved that often."""
    height, width = pair(input_size)
    if height % 2**times or width % 2**times:
        raise InputError(
            f"{times} halvings need sizes divisible by 2**{times}, got {height}×{width}"
        )
    return height, width


def isometric(block: Residual, threshold: float = 0.0) -> Residual:
    """Start a block from an orthogonal weight at the central tap, where R = 1 and `I − 2WDWᵀ` is orthogonal (hidden ≤
    features).

    Random weights are not orthogonal; then every block contracts a little, and a deep network starts as a constant.

    Args:
        block: it is changed in place, and returned.
        threshold: the bias becomes minus this.

    >>> block, x = isometric(SLLLinear(8, hidden=4)), torch.randn(5, 8)
    >>> torch.allclose(block(x).norm(dim=1), x.norm(dim=1), rtol=1e-3)
    True
    """
    with torch.no_grad():
        raw = block.raw
        centre = nn.init.orthogonal_(raw.new_empty(raw.shape[:2]))
        raw.zero_()
        middle: Any = (slice(None), slice(None), *(k // 2 for k in raw.shape[2:]))
        raw[middle] = centre
        if block.bias is not None:
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

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.
        input_size: their height and width, or one number for both.
        depth: number of convolutional blocks.
        channels: of the convolutions.
        kernel_size: of the convolutions.
        dense_depth: number of dense blocks.
        hidden: width of the dense layers.
        pool: side of the pooling windows.
        rescaling: "aol", or "sr" for spectral rescaling.
        t: steps of spectral rescaling.
        head: the last layer: sr, aol or lln.
        constant: Lipschitz constant of the network.
        threshold: the bias of the blocks starts at minus this.

    Reference: Araujo et al. (2023), A unified algebraic perspective on Lipschitz neural networks; Delattre et al.
    (2024) for `rescaling="sr"`.

    >>> import torch
    >>> sll(in_channels=1, input_size=8, channels=8, hidden=16)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = pair(input_size)
    if height < pool or width < pool:
        raise InputError(f"pooling over {pool}×{pool} pixels does not fit into {height}×{width}")
    conv = partial(SLLConv2d, channels, kernel_size=kernel_size, rescaling=rescaling, t=t)
    features = channels * (height // pool) * (width // pool)
    dense = partial(SLLLinear, features, hidden=hidden, rescaling=rescaling, t=t)
    layers: list[nn.Module] = [PadChannels(channels)]
    layers += [isometric(conv(), threshold) for _ in range(depth)]
    layers += [ScaledAvgPool2d(pool), nn.Flatten()]
    layers += [isometric(dense(), threshold) for _ in range(dense_depth)]
    return _network(layers, head, features, num_classes, constant)


#: for two cores and minutes
sll_tiny = partial(sll, depth=4, channels=16, dense_depth=2, hidden=128)
#: the sizes of Araujo et al.
sll_small = partial(sll, depth=20, channels=45, kernel_size=5, dense_depth=7, hidden=2048)
sll_medium = partial(sll, depth=30, channels=60, kernel_size=5, dense_depth=10, hidden=2048)
sll_large = partial(sll, depth=50, channels=90, kernel_size=5, dense_depth=10, hidden=2048)
sll_xlarge = partial(sll, depth=70, channels=120, kernel_size=5, dense_depth=15, hidden=2048)


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
    block: Literal["residual", "bro"] = "residual",
    rank: float = 0.5,
) -> nn.Module:
    """LiResNet: a strided stem, `depth` linear residual blocks with MaxMin, a strided neck, dense residual blocks, a
    last layer.

    A block is `(I + Q)x/‖I + Q‖`, whose norm is taken of the whole map: an SN layer that starts near the identity. `bro`
    has block reflectors instead, as `bronet` does. The default head has rows of norm 1: certify by pairs.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.
        input_size: their height and width, or one number for both.
        channels: of the convolutions.
        depth: number of convolutional blocks.
        dense_depth: number of dense blocks.
        hidden: width of the dense layers.
        head: the last layer: sr, aol or lln.
        constant: Lipschitz constant of the network.
        block: residual, or bro.
        rank: of block reflectors, as a share of the width.

    Reference: Hu, Zou, Wang, Leino, Fredrikson (2023), Unlocking deterministic robustness certification on ImageNet; Lai,
    Huang, Kung, Chen (2025), Enhancing certified robustness via block reflector orthogonal layers and logit annealing loss
    (BRONet).

    >>> import torch
    >>> liresnet(in_channels=1, input_size=8, channels=8, depth=2, hidden=16)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = _halved(input_size, 2)
    require_one_of(("residual", "bro"), block=block)
    share = rank if block == "bro" else None
    features = channels * (height // 4) * (width // 4)
    layers = [rescalings.SNConv2d(in_channels, channels, 5, stride=2, padding=2), MaxMin()]
    for _ in range(depth):
        layers += [_residual(channels, share, 3), MaxMin()]
    layers += [rescalings.SNConv2d(channels, channels, 2, stride=2), MaxMin(), nn.Flatten()]
    layers += [rescalings.SNLinear(features, hidden), MaxMin()]
    for _ in range(dense_depth):
        layers += [_residual(hidden, share), MaxMin()]
    return _network(layers, head, hidden, num_classes, constant)


#: BRONet: block reflectors
bronet = partial(liresnet, block="bro")


def _residual(width: int, rank: float | None = None, kernel: int | None = None) -> nn.Module:
    """A block of a LiResNet, dense without a kernel size: `I + Q` over its norm, or a block reflector."""
    sizes = (width, width) if kernel is None else (width, width, kernel, 1, kernel // 2)
    if rank is not None:
        reflector = BROLinear if kernel is None else BROConv2d
        return reflector(*sizes, rank=max(1, round(rank * width)))
    normed = rescalings.SNLinear if kernel is None else rescalings.SNConv2d
    block = normed(*sizes)
    with torch.no_grad():
        raw = block.parametrizations["weight"].original  # type: ignore[union-attr, index]
        centre = raw if kernel is None else raw[..., kernel // 2, kernel // 2]
        centre.diagonal().add_(1)
    return block


#: `(channels, activation) → layers` that keep the number of channels: blocks with an activation or a skip of their own
BLOCKS: dict[str, Callable[[int, Activation], list[nn.Module]]] = {
    "sll-aol": lambda c, act: [isometric(SLLConv2d(c))],
    "sll-sr": lambda c, act: [isometric(SLLConv2d(c, rescaling="sr"))],
    "cpl": lambda c, act: [CPLConv2d(c)],
    "liresnet": lambda c, act: [_residual(c, kernel=3), act()],
}


def families() -> tuple[str, ...]:
    """The names that `lipschitz_cnn(family=…)` takes: methods with convolutions, and blocks.

    >>> {"bcop", "aol", "sr", "cpl", "liresnet"} <= set(families())
    True
    """
    layers = [name for name, row in methods().items() if nn.Conv2d in row]
    return tuple(sorted([*layers, *BLOCKS]))


def lipschitz_cnn(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: Size = 32,
    family: str = "bcop",
    channels: Sequence[int] = (40, 80, 128),
    depths: Sequence[int] = (2, 2, 1),
    hidden: int = 256,
    dense: str = "cayley",
    activation: str = "abs",
    head: str = "lln",
    mean: Sequence[float] | None = None,
    mirrored: bool = False,
    constant: float = 1.0,
) -> nn.Module:
    """Stages of 3×3 layers of one family, each behind a space-to-depth step; then an orthogonal dense layer and a last one.

    A stage with depth d has d layers. A family with layers of any width (`bcop`, `aol`, `sr`, …) changes the number of channels
    in its first one; a family of blocks (`sll-aol`, `cpl`, `liresnet`, …) has an orthogonal 1×1 layer before them. `mirrored`
    averages the features of an image and its mirror image in evaluation. The default is the best network that a desk trained
    here; its last layer has rows of norm 1, so certify by pairs.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.
        input_size: their height and width, or one number for both.
        family: one of `families()`.
        channels: of the convolutions.
        depths: layers per stage.
        hidden: width of the dense layer.
        dense: its method, an orthogonal one: cayley or bcop.
        activation: its name, see `nn.activations.ACTIVATIONS`.
        head: the last layer: sr, aol or lln.
        mean: subtracted per channel, as part of the network.
        mirrored: whether features are averaged over the image and its mirror image in evaluation.
        constant: Lipschitz constant of the network.

    >>> import torch
    >>> lipschitz_cnn(in_channels=1, input_size=8, channels=[8, 8], depths=[1, 1], hidden=16)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = _halved(input_size, len(channels))
    if len(channels) != len(depths) or not len(channels) or min(depths) < 1:
        raise InputError(
            f"channels and depths need one entry per stage, depths ≥ 1, got {channels} and {depths}"
        )
    require_one_of(families(), family=family)
    require_one_of(("cayley", "bcop"), dense=dense)
    linear = methods()[dense][nn.Linear]
    act = partial(activation_named, activation)
    layers: list[nn.Module] = [] if mean is None else [Normalise(mean, [1.0] * len(mean))]
    features = in_channels
    for count, depth in zip(channels, depths, strict=True):
        layers += [SpaceToDepth(2), *_stage(family, 4 * features, count, depth, act)]
        features = count
    pixels = height * width // 4 ** len(channels)
    layers += [nn.Flatten(), linear(features * pixels, hidden), act()]
    if mirrored:
        layers = [Mirrored(nn.Sequential(*layers))]
    return _network(layers, head, hidden, num_classes, constant)


def _stage(family: str, ins: int, out: int, depth: int, act: Activation) -> list[nn.Module]:
    if family in BLOCKS:
        blocks = [layer for _ in range(depth) for layer in BLOCKS[family](out, act)]
        return [BCOPConv2d(ins, out, 1), *blocks]
    kind = methods()[family][nn.Conv2d]
    layers: list[nn.Module] = []
    for number in range(depth):
        layers += [kind(out if number else ins, out, 3, padding=1), act()]
    return layers
