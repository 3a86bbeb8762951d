"""The sandwich layer of Wang & Manchester: two matrices around an activation, 1-Lipschitz together; networks of them.

    y = √2·A*Ψ act(√2·Ψ⁻¹B x + b),      ‖[A B]‖ ≤ 1,   Ψ > 0 diagonal,   slopes of act in [0, 1].

Its Jacobian is `2A*JB` with a diagonal J in [0, 1]: Ψ commutes with J and drops out. For unit vectors u, v with p = Au
and q = Bv,

    2·p*Jq ≤ 2·Σ max(0, p_i q_i) ≤ ½‖p + q‖² ≤ ½‖[A B]‖²·‖(u, v)‖² = ‖[A B]‖²,

so **the Lipschitz constant is at most ‖[A B]‖²**, whatever the rounding did to A and B. `[A B]* = C(X, Y)` is a Cayley
transform; for a convolution, one per frequency of the image at hand, with the circle and the zero padding of
`CayleyConv2d`. The layers are those of a user: the library does not trust their class, they state their bound.

Reference: Wang & Manchester 2023, Theorem 3.2 and §4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.bounds import Bound, Kind
from equipoise.core.modules import by_construction
from equipoise.core.precision import unit_roundoff
from equipoise.nn import Lipschitz, SRLinear
from equipoise.nn.activations import unit_slopes
from equipoise.nn.models.plain import Size, pair
from equipoise.nn.orthogonal.cayley import blocks, cayley, skew_and_identity
from equipoise.nn.orthogonal.frequency import (
    FrequencyConv2d,
    capped,
    filtered,
    isometry_bound,
    symbol,
)
from equipoise.nn.orthogonal.polar import project_to_contraction
from equipoise.nn.parametrize import ComputedLayer, Tensors

#: |log ψ| stays below this
LOG_PSI = 8.0


def monotone(activation: nn.Module | None) -> nn.Module:
    """The activation (ReLU by default), refused unless its slopes are known to lie in [0, 1]."""
    return unit_slopes(nn.ReLU() if activation is None else activation, "a sandwich layer")


def positive(log_psi: Tensor) -> Tensor:
    """`ψ = exp(8·tanh(log ψ/8))`: positive and far from overflow for every raw value."""
    return torch.exp(LOG_PSI * torch.tanh(log_psi / LOG_PSI))


def sandwich_bound(first: Tensor, second: Tensor, psi: Tensor) -> Bound:
    """`‖[A B]‖²` from the weights `first = √2·Ψ⁻¹B (..., h, n)` and `second = √2·A*Ψ (..., m, h)` as they are stored.

    Any positive psi gives a valid bound: it drops out of the Jacobian.

    Args:
        first: `√2·Ψ⁻¹B`.
        second: `√2·A*Ψ`.
        psi: the diagonal of Ψ.
    """
    psi = psi.detach().double()
    kind = torch.complex128 if first.is_complex() else torch.float64
    A = second.detach().to(kind) / psi[..., None, :] / math.sqrt(2)
    B = (first.detach().to(kind) * psi[..., :, None] / math.sqrt(2)).mH
    norm = float(isometry_bound(torch.cat([A, B], -2)).amax())
    return Bound(norm**2 * (1 + 1e-13), Kind.UPPER, "norm of [A B]")


def constructed(layer: ComputedLayer) -> float | None:
    """1; an exported layer is measured."""
    return 1.0 if layer.stored is None else None


class SandwichLinear(ComputedLayer):
    """A dense layer with its activation, `√2·AᵀΨ act(√2·Ψ⁻¹B x + b)`, 1-Lipschitz for every raw weight.

    Guarantee: `‖[A B]‖ ≤ 1`, hence constant at most 1, for activations with slopes in [0, 1] (others are refused).

    >>> layer = SandwichLinear(4, 3)
    >>> layer(torch.randn(2, 4)).shape, float(layer.lipschitz_upper((4,))) < 1.00001
    (torch.Size([2, 3]), True)
    """

    plain_type = nn.Linear
    out_features: int

    def build(self, plain: nn.Linear, *, activation: nn.Module | None = None) -> None:
        """Raw matrices X (out, out) and Y (in, out), and log ψ per output."""
        weight, out = plain.weight.detach(), plain.out_features
        self.activation = monotone(activation)
        self.raw = nn.Parameter(weight.mT.clone())
        self.square = nn.Parameter(nn.init.xavier_normal_(weight.new_empty(out, out)))
        self.log_psi = nn.Parameter(weight.new_zeros(out))

    def compute(self) -> Tensors:
        """(first, second, psi)."""
        dtype = self.raw.dtype
        X, Y = capped(self.square, self.raw, taps=1, channels=self.out_features)
        C = project_to_contraction(torch.cat(cayley(X, Y)).mT).mT
        C = C * (math.sqrt(2) * (1 - 4 * unit_roundoff(dtype) * math.sqrt(self.out_features)))
        psi = positive(self.log_psi)
        A, B = C[: self.out_features], C[self.out_features :]
        wide = psi.double()
        return (B.mT / wide[:, None]).to(dtype), (A * wide).to(dtype), psi

    def evaluate(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The layer with its activation."""
        first, second, _ = tensors
        hidden = functional.linear(x, first, self.bias)
        return functional.linear(monotone(self.activation)(hidden), second)

    def forward(self, x: Tensor) -> Tensor:
        """The layer on `x`; here, since a bound counts only beside the forward that it is about."""
        return super().forward(x)

    @by_construction(constructed)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """`‖[A B]‖²`."""
        monotone(self.activation)
        with torch.no_grad():
            return sandwich_bound(*self.effective())

    export = ComputedLayer.export


class SandwichConv2d(FrequencyConv2d):
    """A convolution with its activation, `√2·A*Ψ act(√2·Ψ⁻¹B x + b)` with A and B per frequency of the image at hand.

    Guarantee: 1-Lipschitz for every raw weight and input size, for activations with slopes in [0, 1]. Padding and
    stride as in `CayleyConv2d`; the operator depends on the image size.

    >>> layer = SandwichConv2d(3, 4, 3, padding=1)
    >>> layer(torch.randn(2, 3, 6, 6)).shape, float(layer.lipschitz_upper((3, 6, 6))) < 1.00001
    (torch.Size([2, 4, 6, 6]), True)
    """

    def build(self, plain: nn.Conv2d, *, activation: nn.Module | None = None) -> None:
        """Raw kernels of X (out, out) and Y (in, out), and log ψ per output channel."""
        self.activation = monotone(activation)
        g, ins, out, taps = self.frame.groups, self.frame.ins, self.frame.out, self.frame.taps
        std = 1 / math.sqrt(taps[0] * taps[1] * (ins + out))
        like = plain.weight.detach()
        start = torch.randn(g, ins + out, out, *taps, dtype=torch.float64) * std
        self.raw = nn.Parameter(start[:, out:].to(like))
        self.square = nn.Parameter(start[:, :out].to(like))
        self.log_psi = nn.Parameter(like.new_zeros(g, out))

    def compute(self, *args: Any) -> Tensors:
        """(first, second, psi): matrices of the half grid (groups, frequencies, ·, ·) and ψ (groups, 1, out)."""
        size = args[0]
        out, taps = self.frame.out, self.frame.taps
        X, Y = capped(self.square, self.raw, taps=taps[0] * taps[1], channels=out)
        Z = symbol(skew_and_identity(X), size, self.frame.dilation)
        A, B = blocks(Z, symbol(Y, size, self.frame.dilation))
        psi = positive(self.log_psi)[:, None]
        # √2 over a bound of the norm of the block column, less what rounding to the weights' dtype adds
        margin = 1 - 16 * unit_roundoff(A.dtype) * math.sqrt(2 * A.shape[-1])
        bound = isometry_bound(torch.cat([A, B], -2))
        scale = (math.sqrt(2) * margin / bound).to(psi.dtype)[..., None, None]
        wide = psi[..., None, :]
        return (B * (scale / wide)).mH.resolve_conj(), A * (scale * wide), psi

    def operator(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The layer, through Fourier space."""
        first, second, _ = tensors
        hidden = self.biased(filtered(x, first))
        return filtered(monotone(self.activation)(hidden), second)

    def evaluate(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The operator, which has the bias inside."""
        return self.framed(x, *tensors)

    def forward(self, x: Tensor) -> Tensor:
        """The layer on `x`; here, since a bound counts only beside the forward that it is about."""
        return super().forward(x)

    @by_construction(constructed)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """`‖[A B]‖²` over the frequencies of this image size."""
        monotone(self.activation)
        with torch.no_grad():
            return sandwich_bound(*self.effective(*self.key(input_shape)))

    export = ComputedLayer.export


def sandwich_cnn(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: Size = 32,
    channels: Sequence[int] = (16, 32),
    hidden: int = 128,
    constant: float = 1.0,
) -> nn.Module:
    """A small network of sandwich layers, `constant`-Lipschitz: what Lipschitz-aware smoothing is tried on.

    Every sandwich layer holds its ReLU; convolutions halve the image by their stride.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.
        input_size: their height and width, or one number for both.
        channels: of the convolutions.
        hidden: width of the dense layers.
        constant: Lipschitz constant of the network.

    >>> sandwich_cnn(in_channels=1, input_size=8, channels=(4,), hidden=16, constant=2.0)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = pair(input_size)
    layers: list[nn.Module] = []
    features = in_channels
    for out in channels:
        layers.append(SandwichConv2d(features, out, 3, stride=2, padding=1))
        features, height, width = out, -(-height // 2), -(-width // 2)
    layers += [nn.Flatten(), SandwichLinear(features * height * width, hidden)]
    return Lipschitz(constant, nn.Sequential(*layers, SRLinear(hidden, num_classes, side="input")))


def sandwich_mlp(
    *,
    num_classes: int = 10,
    in_channels: int = 1,
    input_size: Size = 8,
    widths: Sequence[int] = (128, 128),
    constant: float = 1.0,
) -> nn.Module:
    """Dense sandwich layers, `constant`-Lipschitz.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.
        input_size: their height and width, or one number for both.
        widths: of the hidden layers.
        constant: Lipschitz constant of the network.

    >>> sandwich_mlp(widths=(16,))(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    height, width = pair(input_size)
    sizes = [in_channels * height * width, *widths]
    layers = [SandwichLinear(a, b) for a, b in pairwise(sizes)]
    return Lipschitz(
        constant,
        nn.Sequential(nn.Flatten(), *layers, SRLinear(sizes[-1], num_classes, side="input")),
    )
