"""The scoreboard's network with layers of other libraries, where they are installed: orthogonium and deel-torchlip.

Their weights are made by `torch.nn.utils.parametrize`; the builders here return networks whose bound is proved from the weights
that the forward pass uses, as for ours. They are no registered models: their checkpoints are weights alone.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from equipoise.core.errors import InputError
from equipoise.nn.activations import BetaAbs
from equipoise.nn.models.parts import Size, pair
from equipoise.nn.normalise import LastLayerNormalised
from equipoise.nn.pooling import SpaceToDepth

#: rows of the scoreboard: name → builder
PEERS = {
    "orthogonium-aoc": f"{__name__}:orthogonium_aoc",
    "torchlip-spectral": f"{__name__}:torchlip_spectral",
}


def baked(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode with the weights that `parametrize` computes now, as plain weights: one fixed map.

    Layers with a power iteration of their own change a buffer with every call; what is certified must not.
    """
    fixed = copy.deepcopy(model).eval()
    with torch.no_grad():
        for module in list(fixed.modules()):
            for name in list(getattr(module, "parametrizations", {})):
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    return fixed


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"this row needs {package}: pip install {package}") from error


def _network(
    conv: Callable[[int, int], nn.Module], dense: Callable[[int, int], nn.Module], num_classes: int, in_channels: int,
    input_size: Size, channels: Sequence[int], depths: Sequence[int], hidden: int,
) -> nn.Module:  # fmt: skip
    height, width = pair(input_size)
    layers: list[nn.Module] = []
    features = in_channels
    for count, depth in zip(channels, depths, strict=True):
        layers.append(SpaceToDepth(2))
        for number in range(depth):
            layers += [conv(count if number else 4 * features, count), BetaAbs()]
        features, height, width = count, height // 2, width // 2
    layers += [nn.Flatten(), dense(features * height * width, hidden), BetaAbs()]
    return nn.Sequential(*layers, LastLayerNormalised(hidden, num_classes))


def orthogonium_aoc(
    *, num_classes: int = 10, in_channels: int = 3, input_size: Size = 32, channels: Sequence[int] = (40, 80, 128),
    depths: Sequence[int] = (2, 2, 1), hidden: int = 256,
) -> nn.Module:  # fmt: skip
    """AOC convolutions and orthogonal dense layers of orthogonium."""
    layers = _module("orthogonium.layers", "orthogonium")
    return _network(
        lambda i, o: layers.AdaptiveOrthoConv2d(i, o, 3, padding="same", padding_mode="zeros"),
        layers.OrthoLinear, num_classes, in_channels, input_size, channels, depths, hidden,
    )  # fmt: skip


def torchlip_spectral(
    *, num_classes: int = 10, in_channels: int = 3, input_size: Size = 32, channels: Sequence[int] = (40, 80, 128),
    depths: Sequence[int] = (2, 2, 1), hidden: int = 256,
) -> nn.Module:  # fmt: skip
    """Spectral convolutions (Björck on the flattened kernel) and dense layers of deel-torchlip."""
    lip = _module("deel.torchlip", "deel-torchlip")
    return _network(
        lambda i, o: lip.SpectralConv2d(i, o, 3, padding=1),
        lip.SpectralLinear, num_classes, in_channels, input_size, channels, depths, hidden,
    )  # fmt: skip
