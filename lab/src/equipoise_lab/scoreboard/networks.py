"""Networks that only the scoreboard trains: LOT and LipNeXt, in the shape of `lipschitz_cnn`.

LOT: an orthogonal convolution as the polar factor `(VV*)^(−1/2)·V` of a raw kernel's symbol V at every frequency, the inverse
square root by Newton's iteration, coupled as Denman and Beavers do with Schulz' products instead of inverses:

    Y ← ½Y(3I − ZY),   Z ← ½(3I − ZY)Z,   from Y = VV*/s, Z = I;   then Z → (VV*/s)^(−1/2).

With `s ≥ ‖VV*‖` all eigenvalues of Y lie in [0, 1], where the iteration converges. The guarantee needs no convergence: what came
out is divided by an upper bound of its norm at every frequency (`contracted`), and the layer's bound is computed from the
weights that its forward pass uses.

LipNeXt: no convolutions but orthogonal 1×1 layers and shifts of channels on the circle of the image, which permute pixels.

References: Xu, Li, Li 2022, LOT: layer-wise orthogonal training on improving ℓ2 certified robustness; Hu, Zou, Fredrikson and
others 2026, LipNeXt: scaling up Lipschitz-based certified robustness to billion-parameter models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import or_one
from equipoise.core.bounds import Bound, Kind
from equipoise.core.modules import by_construction
from equipoise.nn.activations import BetaAbs
from equipoise.nn.models.plain import Size, pair
from equipoise.nn.normalise import LastLayerNormalised
from equipoise.nn.orthogonal.cayley import CayleyLinear
from equipoise.nn.orthogonal.frequency import (
    FrequencyConv2d,
    contracted,
    isometry_bound,
    symbol,
)
from equipoise.nn.orthogonal.polar import BCOPConv2d, BCOPLinear
from equipoise.nn.parametrize import ComputedLayer, Tensors
from equipoise.nn.pooling import L2NormPool2d, SpaceToDepth
from equipoise_lab.sandwich import constructed

#: steps of Newton's iteration, as published
NEWTON_STEPS = 10


def polar_factor(V: Tensor, steps: int = NEWTON_STEPS) -> Tensor:
    """`(VV*)^(−1/2)·V` of matrices with no more rows than columns, by Newton's iteration.

    Args:
        V: matrices (..., m, n), m ≤ n.
        steps: how many.

    >>> polar_factor(torch.tensor([[3.0, 0.0], [0.0, 1.0]])).round(decimals=4).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    V = V / or_one(V.detach().abs().amax((-2, -1), keepdim=True))
    gram = V @ V.mH
    scale = or_one(torch.linalg.matrix_norm(gram))[..., None, None]
    Y = gram / scale
    identity = torch.eye(Y.shape[-1], dtype=Y.dtype, device=Y.device)
    Z = identity
    for step in range(steps):
        T = 1.5 * identity - 0.5 * (Z @ Y)
        Z = T @ Z
        if step + 1 < steps:  # the last Y is not used
            Y = Y @ T
    return (Z @ V) / scale.sqrt()


class LOTConv2d(FrequencyConv2d):
    """`nn.Conv2d` that is orthogonal on the circle of the image at hand: a polar factor at every frequency.

    Guarantee: 1-Lipschitz on every input size, for every raw weight; padding and stride as in `CayleyConv2d`.

    >>> layer = LOTConv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False)
    >>> x = torch.randn(1, 4, 6, 6)
    >>> bool((layer(x).norm() / x.norm() - 1).abs() < 1e-3)
    True
    """

    def build(self, plain: nn.Conv2d) -> None:
        """The raw kernel, orthogonal at its central tap: the iteration starts from equal singular values, as published."""
        frame = self.frame
        raw = torch.zeros(frame.groups, frame.out, frame.ins, *frame.taps)
        for group in raw:
            nn.init.orthogonal_(group[:, :, frame.taps[0] // 2, frame.taps[1] // 2])
        self.raw = nn.Parameter(raw.to(plain.weight))

    def compute(self, *args: Any) -> Tensors:
        """(weight,), the matrices of the half grid."""
        raw = self.raw / or_one(self.raw.detach().abs().amax())
        V = symbol(raw, args[0], self.frame.dilation)
        wide = V.shape[-2] <= V.shape[-1]
        W = contracted(polar_factor(V if wide else V.mH))
        return (W if wide else W.mH.resolve_conj(),)

    def forward(self, x: Tensor) -> Tensor:
        """The layer on `x`; here, since a bound counts only beside the forward that it is about."""
        return super().forward(x)

    @by_construction(constructed)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """The largest norm over the frequencies of this image size."""
        with torch.no_grad():
            (weight,) = self.effective(*self.key(input_shape))
            norm = float(isometry_bound(weight).amax())
        return Bound(norm, Kind.UPPER, "residual at every frequency")

    export = ComputedLayer.export


class SpatialShift(nn.Module):
    """Moves an eighth of the channels by one pixel in each of the four directions, on a circle: a permutation of the entries.

    >>> x = torch.arange(16.0).reshape(1, 16, 1, 1).expand(1, 16, 2, 2)
    >>> torch.equal(SpatialShift()(x), x)
    True
    """

    lipschitz_upper = by_construction(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """The moved channels, and those that stay."""
        part = x.shape[1] // 8
        up, down, left, right, still = x.split([part] * 4 + [x.shape[1] - 4 * part], 1)
        moved = [up.roll(-1, 2), down.roll(1, 2), left.roll(-1, 3), right.roll(1, 3)]
        return torch.cat([*moved, still], 1)


def board_network(
    conv: Callable[[int, int], nn.Module],
    dense: Callable[[int, int], nn.Module],
    num_classes: int,
    in_channels: int,
    input_size: Size,
    channels: Sequence[int],
    depths: Sequence[int],
    hidden: int,
) -> nn.Module:
    """The scoreboard's network, `lipschitz_cnn`, of any layers.

    Args:
        conv: (in, out) → a 3×3 layer.
        dense: (in, out) → the dense layer.
        num_classes: number of logits.
        in_channels: channels of the images.
        input_size: their height and width, or one number for both.
        channels: of the convolutions.
        depths: layers per stage.
        hidden: width of the dense layer.
    """
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


def lot(
    *, num_classes: int = 10, in_channels: int = 3, input_size: Size = 32, channels: Sequence[int] = (40, 80, 128),
    depths: Sequence[int] = (2, 2, 1), hidden: int = 256,
) -> nn.Module:  # fmt: skip
    """LOT convolutions and the board's orthogonal dense layer."""
    return board_network(
        lambda i, o: LOTConv2d(i, o, 3, padding=1),
        CayleyLinear, num_classes, in_channels, input_size, channels, depths, hidden,
    )  # fmt: skip


#: a 1×1 layer has a ninth of the multiplications: LipNeXt has twice the channels and three blocks for a 3×3 layer
WIDER, DEEPER = 2, 3


def lipnext(
    *, num_classes: int = 10, in_channels: int = 3, input_size: Size = 32, channels: Sequence[int] = (40, 80, 128),
    depths: Sequence[int] = (2, 2, 1), hidden: int = 256,
) -> nn.Module:  # fmt: skip
    """Blocks of shift, orthogonal 1×1 layer and β-Abs, 2-norms over the image, and an orthogonal dense layer."""
    height, width = pair(input_size)
    layers: list[nn.Module] = []
    features = in_channels
    for count, depth in zip(channels, depths, strict=True):
        layers += [SpaceToDepth(2), BCOPConv2d(4 * features, WIDER * count, 1), BetaAbs()]
        features, height, width = WIDER * count, height // 2, width // 2
        for _ in range(DEEPER * depth):
            layers += [SpatialShift(), BCOPConv2d(features, features, 1), BetaAbs()]
    layers += [L2NormPool2d((height, width)), nn.Flatten(), BCOPLinear(features, hidden), BetaAbs()]
    return nn.Sequential(*layers, LastLayerNormalised(hidden, num_classes))
