"""One network for every family of 1-Lipschitz layers: what recipes train on a desk, and what the scoreboard compares."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from equipoise.core.errors import InputError
from equipoise.nn.activations import activation as activation_named
from equipoise.nn.convert import methods
from equipoise.nn.models.lipschitz import head as head_named
from equipoise.nn.models.lipschitz import isometric
from equipoise.nn.models.plain import Normalise, Size, pair
from equipoise.nn.orthogonal.bcop import BCOPConv2d
from equipoise.nn.orthogonal.cayley import CayleyLinear
from equipoise.nn.orthogonal.sandwich import SandwichConv2d
from equipoise.nn.pooling import SpaceToDepth
from equipoise.nn.rescaling import RLBConv2d
from equipoise.nn.residual import CPLConv2d, SLLConv2d
from equipoise.nn.wrappers import Lipschitz, Mirrored

#: `(channels, activation) → layers` that keep the number of channels: blocks with an activation or a skip of their own
BLOCKS: dict[str, Callable[[int, Callable[[], nn.Module]], list[nn.Module]]] = {
    "sll-aol": lambda c, act: [isometric(SLLConv2d(c, kernel_size=3, rescaling="aol"))],
    "sll-sr": lambda c, act: [isometric(SLLConv2d(c, kernel_size=3, rescaling="sr", t=2))],
    "cpl": lambda c, act: [CPLConv2d(c, kernel_size=3)],
    "liresnet": lambda c, act: [RLBConv2d(c, c, 3, padding=1), act()],
    "sandwich": lambda c, act: [SandwichConv2d(c, c, 3, padding=1)],
}


def families() -> tuple[str, ...]:
    """The names that `lipschitz_cnn(family=…)` takes: methods with convolutions, and blocks.

    >>> {"bcop", "aol", "sr", "cpl", "liresnet"} <= set(families())
    True
    """
    layers: dict[Any, str] = {}  # a layer with two names (BCOP, AOC) is one family
    for name, row in methods().items():
        if nn.Conv2d in row:
            layers.setdefault(row[nn.Conv2d], name)
    return tuple(sorted({*layers.values(), *BLOCKS}))


def lipschitz_cnn(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: Size = 32,
    family: str = "bcop",
    channels: Sequence[int] = (40, 80, 128),
    depths: Sequence[int] = (2, 2, 1),
    hidden: int = 256,
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

    >>> import torch
    >>> lipschitz_cnn(in_channels=1, input_size=8, channels=[8, 8], depths=[1, 1], hidden=16)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = pair(input_size)
    if len(channels) != len(depths) or not len(channels) or min(depths) < 1:
        raise InputError(f"channels and depths need one entry per stage, depths ≥ 1, got {channels} and {depths}")
    if height % 2 ** len(channels) or width % 2 ** len(channels):
        raise InputError(f"{len(channels)} halvings need sizes divisible by 2**{len(channels)}, got {height}×{width}")
    if family not in families():
        raise InputError(f"there is no family {family!r}; there are {', '.join(families())}")

    def act() -> nn.Module:
        return activation_named(activation)

    layers: list[nn.Module] = [] if mean is None else [Normalise(mean, [1.0] * len(mean))]
    features = in_channels
    for count, depth in zip(channels, depths, strict=True):
        layers += [SpaceToDepth(2), *_stage(family, 4 * features, count, depth, act)]
        features, height, width = count, height // 2, width // 2
    layers += [nn.Flatten(), CayleyLinear(features * height * width, hidden), act()]
    trunk = nn.Sequential(*layers)
    last = head_named(head, hidden, num_classes)
    network = nn.Sequential(Mirrored(trunk), last) if mirrored else nn.Sequential(*trunk, last)
    return network if constant == 1 else Lipschitz(constant, network)


def _stage(family: str, ins: int, out: int, depth: int, act: Callable[[], nn.Module]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    if family in BLOCKS:
        layers.append(BCOPConv2d(ins, out, 1))
        for _ in range(depth):
            layers += BLOCKS[family](out, act)
        return layers
    kind: Any = methods()[family][nn.Conv2d]
    for number in range(depth):
        layers += [kind(out if number else ins, out, 3, padding=1), act()]
    return layers
