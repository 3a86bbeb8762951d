"""SOC: the exponential of a skew-symmetric convolution, as a polynomial with a certified modulus.

A kernel with `A_{−a} = −A_aᵀ` is a skew-symmetric operator, with circular padding and with zero padding alike: its
eigenvalues are iθ with |θ| ≤ ‖A‖, and it is normal. A polynomial p with real coefficients therefore has

    ‖p(A)‖ = max |p(iθ)|  and  σ_min(p(A)) ≥ min |p(iθ)|   over  |θ| ≤ ‖A‖,

which is a computation with numbers. The layer takes the Chebyshev expansion of e^{iθ} on |θ| ≤ τ, truncated after
`terms` convolutions and divided by its largest modulus: for τ = 1 and 4 terms singular values lie in [1 − 1e-3, 1],
where Taylor's polynomial reaches 0.994 only. A is multiplied by one number so that a proved bound of ‖A‖ is at most τ.
One number keeps it skew; a factor per channel after skew-symmetrising would not (a peer's layer reaches 1.37 that way).

References: Singla & Feizi 2021 (SOC); Abramowitz & Stegun 9.1 (Chebyshev expansion by Bessel functions).
"""

import functools
from math import pi, sqrt
from typing import Any

import numpy as np
import torch
from numpy.polynomial import chebyshev, polynomial
from scipy.special import jv
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core import (
    POSITIVE,
    Bound,
    Kind,
    Refused,
    Shape,
    full_precision,
    or_one,
    require_number,
)
from equipoise.maps.linear import convolution
from equipoise.nn.orthogonal.frame import Frame, FramedConv2d
from equipoise.nn.orthogonal.polar import last_step
from equipoise.nn.parametrize import Parametrization, Parametrized, Tensors
from equipoise.norms.convolution import conv_bracket
from equipoise.norms.differentiable import symbol_norm

#: p is bounded on an interval longer than τ by this: it covers the rounding of A to float32
MARGIN = 1.01


@functools.cache
def exponential_series(angle: float, terms: int) -> tuple[float, ...]:
    """Coefficients `c_0 … c_terms` of the polynomial near e^A with `|p(iθ)| ≤ 1` for |θ| ≤ 1.01·angle.

    `e^{iθ} = J_0(τ) + 2Σ iⁿJ_n(τ)T_n(θ/τ)`, truncated, over its largest modulus.

    Args:
        angle: largest norm of A.
        terms: degree of the polynomial.

    >>> [round(c, 3) for c in exponential_series(1.0, 4)]
    [1.0, 0.997, 0.499, 0.156, 0.04]
    """
    require_number(angle, "angle", least=POSITIVE, most=8)
    require_number(terms, "terms", least=1, most=40, whole=True)
    bessel = [float(jv(n, angle)) * (1 if n == 0 else 2) for n in range(terms + 1)]
    coefficients = [0.0] * (terms + 1)
    for n, b in enumerate(bessel):
        for m, t in enumerate(chebyshev.cheb2poly([0] * n + [1])):
            if t:  # iⁿ⁻ᵐ is real: n − m is even
                coefficients[m] += b * t * (-1) ** ((n - m) // 2) / angle**m
    # a little below 1, in numbers of single precision: the layer is the same function in float32 and in float64
    largest = largest_modulus(tuple(coefficients), MARGIN * angle) * (1 + 2.0**-22)
    return tuple(float(np.float32(c / largest)) for c in coefficients)


def largest_modulus(coefficients: tuple[float, ...], theta: float) -> float:
    """Upper bound of `|p(iθ)|` over |θ| ≤ `theta`: a grid, and the second derivative between its points.

    `|p(iθ)|² = g(θ)` is an even polynomial; at a maximum `g(θ*) − g(grid) ≤ max|g''|·h²/8`.

    Args:
        coefficients: of p, lowest degree first.
        theta: end of the interval.
    """
    parts = np.array(coefficients) * np.array([1, 1j, -1, -1j])[np.arange(len(coefficients)) % 4]
    g = np.convolve(parts.real, parts.real) + np.convolve(parts.imag, parts.imag)
    points = np.linspace(0.0, theta, 40_001)
    second = float(polynomial.polyval(theta, np.abs(polynomial.polyder(g, 2))))
    rounding = 1e-14 * float(polynomial.polyval(theta, np.abs(g))) * len(g)
    largest = (
        float(polynomial.polyval(points, g).max()) + second * (theta / 40_000) ** 2 / 8 + rounding
    )
    return sqrt(largest) * (1 + 1e-15)


def skew(M: Tensor) -> Tensor:
    """`A_a = M_a − M_{−a}ᵀ` of `M (g, c, c, kh, kw)` with odd kh, kw: exactly skew-symmetric also in floating point.

    Entries beyond 2⁶⁰ are scaled down first, all by one number: their difference would overflow, and only the direction
    of so large a kernel counts.
    """
    c = M.detach().abs().amax()
    M = M * torch.where(c > 2.0**60, 2.0**60 / c, 1.0)
    return M - M.transpose(1, 2).flip(3, 4)


def bounded(A: Tensor, angle: float) -> Tensor:
    """A times the largest number ≤ 1 such that a proved bound of the symbol's norm is at most `angle`.

    The bound: `‖(E*E)⁴‖_F^(1/8)` at the points of a grid with 4(k − 1) of them per axis, times `Π 1/cos(π/8)`, which
    reaches all frequencies between; in float64 (`norms.differentiable`). Only the largest one carries a gradient.

    Args:
        A: skew kernels (g, c, c, kh, kw).
        angle: largest norm.
    """
    c = or_one(A.detach().abs().amax())
    unit = A / c
    bound, delta = symbol_norm(unit.double(), 3, 8)
    return unit * (angle / torch.maximum(bound * (1 + delta + 1e-9), angle / c.double())).to(
        A.dtype
    )


def series(A: Tensor, coefficients: tuple[float, ...], frame: Frame, x: Tensor) -> Tensor:
    """`p(A)x` by Horner's rule: one convolution per term.

    Args:
        A: skew kernels.
        coefficients: of the polynomial.
        frame: padding, dilation and groups.
        x: images.
    """
    circular = frame.plain.padding == "circular"
    dilation = frame.dilation
    (top, left), weight = frame.centre, A.flatten(0, 1)
    y = coefficients[-1] * x
    for c in coefficients[-2::-1]:
        if circular:
            y = functional.pad(y, (left, left, top, top), mode="circular")
        y = functional.conv2d(
            y, weight, None, 1, 0 if circular else (top, left), dilation, frame.groups
        )
        y = torch.add(y, x, alpha=c)
    return y


def channels(x: Tensor, groups: int, current: int, count: int) -> Tensor:
    """Zero channels added to, or channels left out of, each group.

    Args:
        x: images.
        groups: of the channels.
        current: channels per group.
        count: channels per group of the result.
    """
    if current == count:
        return x
    x = x.reshape(x.shape[0], groups, current, *x.shape[2:])
    x = functional.pad(x, (0, 0, 0, 0, 0, count - current)) if count > current else x[:, :, :count]
    return x.flatten(1, 2)


class SOCConv2d(FramedConv2d):
    """`nn.Conv2d` as `exp(A)`, A a skew-symmetric convolution of norm at most `angle`, in `terms` convolutions.

    Guarantee: 1-Lipschitz for every raw weight and input size, with zero and circular padding; singular values at least
    1 − 1e-3 (default) for in = out, stride 1 and «same» padding. Unequal channels: zero channels are added, or channels
    left out. Stride is space-to-depth before. A skew kernel has a centre: an even number of taps becomes one more.

    >>> layer = SOCConv2d(4, 4, 3, padding=1, bias=False)
    >>> x = torch.randn(1, 4, 6, 6)
    >>> bool(0.998 < layer(x).norm() / x.norm() <= 1)
    True
    """

    embed = False

    def build(self, plain: Any, *, terms: int = 4, angle: float = 1.0) -> None:
        """One raw kernel `(groups, c, c, *taps)`, c the larger number of channels.

        Args:
            plain: the plain layer that the arguments describe.
            terms: degree of the polynomial.
            angle: largest norm of A.
        """
        self.terms = terms
        self.angle = float(angle)
        self.coefficients = exponential_series(self.angle, terms)
        c = max(self.frame.ins, self.frame.out)
        taps = self.frame.taps
        start = torch.randn(self.frame.groups, c, c, *taps, dtype=torch.float64) / sqrt(
            8 * c * taps[0] * taps[1]
        )
        self.raw = nn.Parameter(start.to(plain.weight))

    def compute(self) -> Tensors:
        """(A,), the skew kernel with norm at most `angle`."""
        return (bounded(skew(self.raw), self.angle),)

    def operator(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """`p(A)x`."""
        frame, (A,) = self.frame, tensors
        image = channels(x, frame.groups, frame.ins, A.shape[1])
        y = series(A, self.coefficients, frame, image)
        return channels(y, frame.groups, A.shape[1], frame.out)

    def bound(self, tensors: Tensors, input_shape: Shape) -> Bound:
        """`max|p(iθ)|` over the proved norm of A, which must be skew.

        Args:
            tensors: the effective tensors.
            input_shape: of one sample.
        """
        frame = self.frame
        A = tensors[0].detach()
        if not torch.equal(A, -A.transpose(1, 2).flip(3, 4)):
            raise Refused(
                "the kernel of this series is not skew-symmetric: the modulus of the polynomial says nothing about its norm"
            )
        amount = [(c, c) for c in frame.centre]
        size = frame.size((input_shape[-2], input_shape[-1]))
        conv = convolution(
            A.flatten(0, 1), frame.plain.padding, 1, frame.dilation, A.shape[0], amount, size
        )
        with full_precision():
            theta = conv_bracket(conv, 1e-2).upper
        return Bound(
            largest_modulus(self.coefficients, float(theta)), Kind.UPPER, "modulus of the series"
        )


class SOCConvTranspose2d(SOCConv2d):
    """`nn.ConvTranspose2d` as `exp(A)`: the adjoint of a `SOCConv2d` from its outputs to its inputs (`exp(A)ᵀ = exp(−A)`).

    Guarantee: 1-Lipschitz for every raw weight and input size; stride is depth-to-space after. Singular values are at least
    1 − 1e-3 (default) where the adjoint keeps every pixel: in = out·s², and `padding` and `output_padding` that make the image
    s times as large.

    >>> layer = SOCConvTranspose2d(16, 4, 3, stride=2, padding=1, output_padding=1, bias=False)
    >>> x = torch.randn(1, 16, 3, 3)
    >>> y = layer(x)
    >>> tuple(y.shape), bool(0.998 < y.norm() / x.norm() <= 1)
    ((1, 4, 6, 6), True)
    """

    plain_type = nn.ConvTranspose2d


class SOC(Parametrization):
    """`W` = first columns of `exp(A)` (or rows), `A = [[B − Bᵀ, −Cᵀ], [C, 0]]` scaled to norm at most π, raw = [B; C].

    The columns are `[M; C·N]`, `[M; N]` those of the exponential of `[[B − Bᵀ, −CᵀC], [I, 0]]` (`A[M; CN] = [(B − Bᵀ)M − CᵀCN;
    CM]`): its side is twice the smaller side of the layer, however long the other one is.

    Guarantee: norm at most 1 for every raw weight; orthonormal rows or columns.

    >>> W = SOCLinear(6, 4).weight
    >>> bool((W @ W.mT - torch.eye(4)).abs().max() < 1e-5)
    True

    Reference: Singla & Feizi 2021; Edelman, Arias, Smith 1998, §2.4 (the exponential on the smaller side).
    """

    kinds = (nn.Linear,)
    instead = "use SOCConv2d"

    def right_inverse(self, weight: Tensor) -> Tensor:
        """A random A of norm about 1: one that has the given weight as exponential need not exist."""
        side = max(weight.shape)
        return (
            torch.randn(weight.shape, dtype=torch.float64, device=weight.device)
            .div(sqrt(8 * side))
            .to(weight)
        )

    def construct(self, raw: Tensor) -> Tensor:
        """The weight."""
        tall = raw if raw.shape[0] >= raw.shape[1] else raw.mT
        n = tall.shape[1]
        largest = or_one(tall.detach().abs().amax().double())
        unit = tall.double() / largest
        parts = [unit[:n] - unit[:n].mT, *([unit[n:]] if len(unit) > n else [])]
        bound = torch.stack(
            [symbol_norm(part[None, :, :, None, None], 3, 8)[0] for part in parts]
        ).sum()  # of A
        S, *rest = [part * (pi / torch.maximum(bound, pi / largest)) for part in parts]
        if not rest:
            columns = torch.linalg.matrix_exp(S)
        else:
            (C,), identity = rest, torch.eye(n, dtype=S.dtype, device=S.device)
            M = torch.cat(
                [torch.cat([S, -C.mT @ C], 1), torch.cat([identity, torch.zeros_like(S)], 1)]
            )
            E = torch.linalg.matrix_exp(M)[:, :n]
            columns = torch.cat([E[:n], C @ E[n:]])
        W = last_step(columns.mT, raw.dtype).to(raw.dtype)
        return W.mT if raw.shape[0] >= raw.shape[1] else W


class SOCLinear(Parametrized, nn.Linear):
    """`nn.Linear` as the exponential of a skew-symmetric matrix, see `SOC`."""

    parametrization = SOC
