"""The sandwich layer of Wang & Manchester: two matrices around an activation, 1-Lipschitz together.

    y = √2·A*Ψ act(√2·Ψ⁻¹B x + b),      ‖[A B]‖ ≤ 1,   Ψ > 0 diagonal,   slopes of act in [0, 1].

Its Jacobian is `2A*JB` with a diagonal J in [0, 1]: Ψ commutes with J and drops out. For unit vectors u, v with p = Au
and q = Bv,

    2·p*Jq ≤ 2·Σ max(0, p_i q_i) ≤ ½‖p + q‖² ≤ ½‖[A B]‖²·‖(u, v)‖² = ‖[A B]‖²,

so **the Lipschitz constant is at most ‖[A B]‖²**, whatever the rounding did to A and B. `[A B]* = C(X, Y)` is a Cayley
transform; for a convolution, one per frequency of the image at hand, with the circle and the zero padding of
`CayleyConv2d`.

Reference: Wang & Manchester 2023, Theorem 3.2 and §4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.bounds import Bound, Kind
from equipoise.core.precision import unit_roundoff
from equipoise.nn.activations import unit_slopes
from equipoise.nn.orthogonal.cayley import blocks, cayley, skew_and_identity
from equipoise.nn.orthogonal.frame import Size
from equipoise.nn.orthogonal.frequency import (
    FrequencyConv2d,
    capped,
    filtered,
    inverse_by_blocks,
    isometry_bound,
    symbol,
    times,
)
from equipoise.nn.orthogonal.polar import project_to_contraction
from equipoise.nn.parametrize import ComputedLayer, Tensors, differentiated, is_plain_call

#: |log ψ| stays below this
LOG_PSI = 8.0


def monotone(activation: nn.Module) -> nn.Module:
    """The activation, refused unless its slopes are known to lie in [0, 1]."""
    return unit_slopes(activation, "a sandwich layer")


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
    return Bound(float(isometry_bound(A, B).amax() ** 2) * (1 + 1e-13), Kind.UPPER, "norm of [A B]")


class SandwichLinear(ComputedLayer):
    """A dense layer with its activation, `√2·AᵀΨ act(√2·Ψ⁻¹B x + b)`, 1-Lipschitz for every raw weight.

    Guarantee: `‖[A B]‖ ≤ 1`, hence constant at most 1, for activations with slopes in [0, 1] (others are refused).

    Args:
        in_features: size of the input.
        out_features: size of the output.
        bias: whether b is learned.
        device: of the parameters.
        dtype: of the parameters.
        activation: ReLU by default.

    >>> layer = SandwichLinear(4, 3)
    >>> layer(torch.randn(2, 4)).shape, float(layer.lipschitz_upper((4,))) < 1.00001
    (torch.Size([2, 3]), True)
    """

    plain_type = nn.Linear
    out_features: int

    def build(self, plain: nn.Linear, *, activation: nn.Module | None = None) -> None:
        """Raw matrices X (out, out) and Y (in, out), and log ψ per output."""
        weight, out = plain.weight.detach(), plain.out_features
        self.activation = monotone(nn.ReLU() if activation is None else activation)
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

    def bound(self, tensors: Tensors, input_shape: tuple[int, ...]) -> Bound:
        """`‖[A B]‖²`."""
        monotone(self.activation)
        return sandwich_bound(*tensors)


def pair(Z: Tensor, Y: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
    """`√2·Ψ⁻¹B` and `√2·A*Ψ` over a bound of ‖[A B]‖, with `[A B]* = C` from Z and Y (g, frequencies, ·, n), ψ (g, 1, n).

    Args:
        Z: `I + X − X*` at every frequency.
        Y: the other block of the column.
        psi: the diagonal of Ψ.
    """
    A, B = blocks(Z, Y)
    scale, wide = _scale(A, B), psi[..., None, :]
    return times(B, scale / wide).mH.resolve_conj(), times(A, scale * wide)


def _scale(A: Tensor, B: Tensor) -> Tensor:
    """√2 over a bound of the norm of the block column, less what rounding to the weights' dtype adds."""
    margin = 1 - 16 * unit_roundoff(A.dtype) * math.sqrt(2 * A.shape[-1])
    return (math.sqrt(2) * margin / isometry_bound(A, B)).to(A.real.dtype)[..., None, None]


class _Pair(torch.autograd.Function):
    """`pair`: the same numbers and derivatives, with fewer passes over them.

    With `V = (Z + Y*Y)⁻¹`, so that `A = 2V − I` and `B = −2YV`, s the scale, which has no gradient, and g, h the gradients for
    the two results: those for A and B are `a = s·hΨ` and `b = s·g*Ψ⁻¹`, for `Z + Y*Y` it is `N = −(2V*a + B*b)V*`, which is that
    for Z; for Y it is `−2bV* + Y(N + N*)`, and for ψ the real diagonals of `A*a − B*b` over ψ, whose parts N is made of.
    """

    @staticmethod
    def forward(ctx: Any, Z: Tensor, Y: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
        """The two weights."""
        conj_Y, wide = Y.conj_physical(), psi[..., None, :]
        V = inverse_by_blocks(conj_Y.mT @ Y + Z)
        conj_V = V.conj_physical()
        A, B = V.mul_(2), conj_V.mT @ conj_Y.mul_(-2).mT  # B is the adjoint
        A.diagonal(dim1=-2, dim2=-1).sub_(1)
        scale = _scale(A, B.mH)
        first, second = _multiplied(B, scale / wide.mT), _multiplied(A, scale * wide)
        ctx.save_for_backward(Z, Y, psi, conj_V, scale, first)
        return first, second

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients for Z, Y and ψ."""
        (Z, Y, psi, conj_V, scale, first), (g, h) = ctx.saved_tensors, gradients
        if torch.is_grad_enabled():  # for higher derivatives
            return differentiated(pair(Z, Y, psi), gradients, Z, Y, psi)
        wide = psi[..., None, :]
        g = _multiplied(g.conj_physical(), -2 * scale / wide.mT)
        N, a = _multiplied(first @ g.mT, wide.mT / (2 * scale)), times(h, -2 * scale * wide)
        rest = conj_V.mT @ a
        of_psi = _diagonal(N) - _diagonal(rest) + _diagonal(a) / 2
        N = N.add_(rest) @ conj_V.mT
        return N, (g.mT @ conj_V.mT).add_(Y @ (N + N.mH)), of_psi.sum(1, keepdim=True) / psi


def _multiplied(W: Tensor, scale: Tensor) -> Tensor:
    """W times a real scale, in place."""
    torch.view_as_real(W).mul_(scale[..., None])
    return W


def _diagonal(W: Tensor) -> Tensor:
    """The diagonals' real parts."""
    return W.real.diagonal(dim1=-2, dim2=-1)


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
        self.activation = monotone(nn.ReLU() if activation is None else activation)
        g, ins, out, taps = self.frame.groups, self.frame.ins, self.frame.out, self.frame.taps
        std = 1 / math.sqrt(taps[0] * taps[1] * (ins + out))
        like = plain.weight.detach()
        start = torch.randn(g, ins + out, out, *taps, dtype=torch.float64) * std
        self.raw = nn.Parameter(start[:, out:].to(like))
        self.square = nn.Parameter(start[:, :out].to(like))
        self.log_psi = nn.Parameter(like.new_zeros(g, out))

    def compute(self, size: Size) -> Tensors:
        """(first, second, psi): matrices of the half grid (groups, frequencies, ·, ·) and ψ (groups, 1, out)."""
        out, taps = self.frame.out, self.frame.taps
        X, Y = capped(self.square, self.raw, taps=taps[0] * taps[1], channels=out)
        Z = symbol(skew_and_identity(X), size, self.frame.dilation)
        Y, psi = symbol(Y, size, self.frame.dilation), positive(self.log_psi)[:, None]
        first, second = (_Pair.apply if is_plain_call(Z) else pair)(Z, Y, psi)
        return first, second, psi

    def operator(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The layer, through Fourier space."""
        first, second, _ = tensors
        hidden = self.biased(filtered(x, first))
        return filtered(monotone(self.activation)(hidden), second)

    def evaluate(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The operator, which has the bias inside."""
        return self.framed(x, *tensors)

    def bound(self, tensors: Tensors, input_shape: tuple[int, ...]) -> Bound:
        """`‖[A B]‖²` over the frequencies of this image size."""
        monotone(self.activation)
        return sandwich_bound(*tensors)
