"""Operators with one matrix per frequency of the image at hand, and convolutions made of them.

A convolution on a circle is a matrix per frequency: one that is orthogonal at every frequency is an orthogonal convolution.
It is one on the grid of that image size only: the layer's weight depends on the size, and the same kernel with zero padding
would be no contraction (errata 7). With `padding_mode="zeros"` the image is therefore put among zeros on a larger circle and
the result cut out, a part of an orthogonal operator.

Rounding. An upper bound of the norm of what was computed, from `W*W − μI` in float64, is taken at every frequency, and W
divided by it (`contracted`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.bounds import Bound, Kind
from equipoise.core.errors import InputError, Refused
from equipoise.core.modules import by_construction
from equipoise.core.precision import gamma, unit_roundoff
from equipoise.nn.orthogonal.frame import Frame, FramedConv2d, Size, batched
from equipoise.nn.parametrize import cast_input, is_plain_call, without_autocast
from equipoise.nn.powers import differentiable

#: largest side that a batch of matrices is inverted at by LAPACK
LEAST = 16
#: entries of the matrices whose residual is taken at once: they stay in the cache
AT_ONCE = 2**17


def multiplied(W: Tensor, scale: Tensor) -> Tensor:
    """W times a real scale, in place."""
    (torch.view_as_real(W) if W.is_complex() else W[..., None]).mul_(scale.to(W.real.dtype)[..., None])
    return W


def times(W: Tensor, scale: Tensor) -> Tensor:
    """`W·scale` for a real scale, in W's precision; a complex product would cost four times as much."""
    if not W.is_complex():
        return W * scale.to(W.dtype)
    parts = torch.view_as_real(W)
    return torch.view_as_complex(parts * scale.to(parts.dtype)[..., None])


def inverse(M: Tensor) -> Tensor:
    """The inverses of matrices `(..., n, n)` whose Hermitian part is positive definite: by blocks, halved without pivots.

    With `Re v*Mv ≥ ‖v‖²` the same holds for the leading block and for its Schur complement (`v = (−P⁻¹Qx, x)`), so nothing
    grows; products of many small matrices at once are faster than LAPACK's factorisations of one after the other.

    >>> M = torch.eye(40) + torch.randn(9, 40, 40).tril(-1) / 40
    >>> bool((inverse(M) @ M - torch.eye(40)).abs().max() < 1e-5)
    True
    """
    n = M.shape[-1]
    if n <= LEAST or M.dim() < 3 or math.prod(M.shape[:-2]) < 8:
        return torch.linalg.inv_ex(M)[0]
    half = n // 2
    (P, Q), (R, S) = (row.tensor_split([half], -1) for row in M.tensor_split([half], -2))
    first = inverse(P)
    left, right = R @ first, first @ Q
    last = inverse(S - R @ right)
    result, corner = torch.empty_like(M), right @ last
    result[..., :half, :half] = corner @ left + first
    result[..., :half, half:] = -corner
    result[..., half:, :half] = -(last @ left)
    result[..., half:, half:] = last
    return result


def symbol(kernel: Tensor, size: Size, dilation: Size) -> Tensor:
    """`E(ω) = Σ_a K_a e^{iω·(d·a − centre)}` of `K (g, m, n, *k)` on the half grid of a real image: (g, frequencies, m, n)."""
    angles = []
    for axis, (n, count) in enumerate(zip(size, (size[0], size[1] // 2 + 1), strict=True)):
        k, d = kernel.shape[3 + axis], dilation[axis]
        place = torch.arange(k, device=kernel.device) * d - d * (k - 1) // 2
        turns = torch.arange(count, device=kernel.device)[:, None] * place % n
        angles.append(turns.double() * (2 * math.pi / n))
    angle = angles[0][:, None, :, None] + angles[1][None, :, None, :]
    angle = angle.reshape(angle.shape[0] * angle.shape[1], -1)
    flat = kernel.flatten(3).movedim(3, 1)  # (g, taps, m, n)
    g, _, m, n = flat.shape
    flat = flat.reshape(g, -1, m * n)
    E = torch.complex(angle.cos().to(kernel.dtype) @ flat, angle.sin().to(kernel.dtype) @ flat)
    return E.reshape(g, -1, m, n)


def transform(x: Tensor, groups: int) -> Tensor:
    """`(b, g·c, h, w)` real → `(g, frequencies, b, c)`: images as rows, one matrix product per frequency."""
    b, channels = x.shape[:2]
    spectrum = torch.fft.rfft2(x, norm="ortho").reshape(b * channels, -1).mT.contiguous()  # strided ones are slow
    return spectrum.reshape(-1, b, groups, channels // groups).permute(2, 0, 1, 3)


def back(X: Tensor, size: Size) -> Tensor:
    """The inverse of `transform`."""
    g, frequencies, b, c = X.shape
    flat = X.permute(1, 2, 0, 3).reshape(frequencies, -1).mT.contiguous()
    spectrum = flat.reshape(b, g * c, size[0], size[1] // 2 + 1)
    return torch.fft.irfft2(spectrum, s=size, norm="ortho")


def filtered(x: Tensor, weight: Tensor) -> Tensor:
    """`(b, g·c, h, w)` → `(b, g·o, h, w)`: a matrix `weight (g, frequencies, o, c)` at every frequency of the half grid."""
    if is_plain_call(x) and is_plain_call(weight):
        return Filtered.apply(x, weight)
    return by_operators(x, weight)


def by_operators(x: Tensor, weight: Tensor) -> Tensor:
    """`filtered` by operators that torch differentiates itself."""
    return back(transform(x, len(weight)) @ weight.mT, (x.shape[-2], x.shape[-1]))


class Filtered(torch.autograd.Function):
    """`filtered`: the same numbers and derivatives, with fewer transforms and passes.

    The adjoint of `rfft2` is `irfft2·D⁻¹` and that of `irfft2` is `D·rfft2`, D twice the identity on the columns of the half grid
    that have a mirror image. So D drops out of the gradient for x, `irfft2(W*·rfft2(g))`, and stays in that for W.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """The images."""
        X = transform(x, len(weight))
        ctx.save_for_backward(x, weight, X)
        return back(X @ weight.mT, (x.shape[-2], x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients for x and the matrices."""
        (x, weight, X), g = ctx.saved_tensors, gradients[0]
        if torch.is_grad_enabled():  # somebody will differentiate again
            return differentiable([by_operators(x, weight)], [g], x, weight)
        size = x.shape[-2], x.shape[-1]
        G = transform(g, len(weight))
        few = G.numel() + X.numel() < weight.numel()  # what is conjugated, weights or images
        image = (G.conj_physical() @ weight).conj_physical() if few else G @ weight.conj_physical()
        by_frequency = multiplied(G, _mirrored(size, G)) if ctx.needs_input_grad[1] else G
        return (
            back(image, size) if ctx.needs_input_grad[0] else None,
            by_frequency.mT @ X.conj_physical() if ctx.needs_input_grad[1] else None,
        )


def _mirrored(size: Size, like: Tensor) -> Tensor:
    """D of `Filtered`, (frequencies, 1, 1)."""
    column = torch.arange(size[1] // 2 + 1, device=like.device)
    return torch.where((column == 0) | (2 * column == size[1]), 1.0, 2.0).repeat(size[0])[:, None, None]


def isometry_bound(*blocks: Tensor) -> Tensor:
    """Upper bound of the norm of the block column of `blocks (..., m_i, n)`, tight where it is nearly a multiple of an isometry.

    `σ² ≤ μ + ‖G − μI‖_F` with `G = Σ W_i*W_i` and μ the mean of its diagonal, in float64, rounded up.
    """
    columns = [W.detach() for W in blocks]
    if len(columns) == 1 and columns[0].shape[-2] < columns[0].shape[-1]:
        columns = [columns[0].mH]
    n, length = columns[0].shape[-1], sum(W.shape[-2] for W in columns)
    flat = [W.reshape(-1, *W.shape[-2:]) for W in columns]
    per = max(1, AT_ONCE // (n * length))
    parts = [_mean_and_rest(some) for some in zip(*[W.split(per) for W in flat], strict=True)]
    mu, rest = (torch.cat(part).reshape(columns[0].shape[:-2]) for part in zip(*parts, strict=True))
    square = mu + rest * (1 + 1e-9) + gamma(4 * length + 64, torch.float64) * n * mu
    return square.sqrt() * (1 + 1e-12)


def _mean_and_rest(columns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`(μ, ‖G − μI‖_F)` of `G = Σ W_i*W_i` in float64, μ the mean of its diagonal."""
    W = torch.cat([part.resolve_conj() for part in columns], 1) if len(columns) > 1 else columns[0]
    # real and imaginary parts side by side: real products are the faster ones
    S = (torch.cat([W.real, W.imag], 1) if W.is_complex() else W).double()
    X = S.mT @ S
    mu = torch.diagonal(X, dim1=-2, dim2=-1).mean(-1)
    rest = torch.linalg.vector_norm((X - torch.diag_embed(mu[:, None].expand(X.shape[:2]))).flatten(1), dim=1)
    if not W.is_complex():
        return mu, rest
    length = W.shape[1]
    Y = S[:, :length].mT @ S[:, length:]  # the imaginary part is Y − Yᵀ
    return mu, torch.hypot(rest, torch.linalg.vector_norm((Y - Y.mT).flatten(1), dim=1))


def contraction_scale(*blocks: Tensor) -> Tensor:
    """What makes the block column a contraction also after rounding to its dtype, (..., 1, 1) in float64."""
    columns = min(blocks[0].shape[-1], sum(W.shape[-2] for W in blocks))
    margin = 1 + 4 * unit_roundoff(blocks[0].dtype) * math.sqrt(columns)
    bound = isometry_bound(*blocks).clamp_min(1e-30)  # a matrix of zeros stays one
    return (1 / (bound * margin))[..., None, None]


def contracted(W: Tensor) -> Tensor:
    """Matrices over their `isometry_bound`: norm at most 1, also after rounding."""
    return times(W, contraction_scale(W))


def capped(*kernels: Tensor, taps: int, channels: int) -> list[Tensor]:
    """Raw kernels, shrunk where `√taps·‖·‖_F`, a bound of their symbols, exceeds 16·√(channels/64) (at least 16).

    Beyond it orthogonal transforms hardly move, and inverses would lose their digits.
    """
    cap = 16.0 * max(1.0, math.sqrt(channels / 64))
    largest = torch.stack([k.detach().abs().flatten().amax(0) for k in kernels if k.numel()]).amax(0)
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    unit = [k / largest for k in kernels]
    total = torch.stack([k.square().sum() for k in unit]).sum().clamp_min(1.0)
    return [k * (cap / torch.maximum(total.sqrt() * math.sqrt(taps), cap / largest)) for k in unit]


class FrequencyConv2d(FramedConv2d):
    """`nn.Conv2d` with one matrix per frequency: `compute(size)` is (weight,), (groups, frequencies, out, in) on the half grid.

    The operator depends on the image size, so `export(input_size)` is for one size.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The convolution, through Fourier space."""
        x = cast_input(x, next(self.parameters()))
        (weight,) = self.effective(self.frame.size((x.shape[-2], x.shape[-1])))
        with without_autocast(x.device.type):
            return _apply(self.frame, x, weight, self.bias)

    @by_construction(FramedConv2d.constant)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """The largest norm over the frequencies of this image size, from the effective weights."""
        with torch.no_grad():
            (weight,) = self.effective(self.frame.size((input_shape[-2], input_shape[-1])))
        return _bound(weight)

    def export(self, input_size: int | Size | None = None) -> nn.Module:
        """The plain module for one image size (by default the one this layer was evaluated at)."""
        size = export_size(self, input_size)
        with torch.no_grad():
            (weight,) = self.effective(size)
        return SpectralConv2d(self.frame, size, weight, self.bias).train(self.training)


def export_size(layer: FramedConv2d, input_size: int | Size | None) -> Size:
    """The operator's image size to export for: that of `input_size`, or the one size this layer was evaluated at."""
    if input_size is not None:
        return layer.frame.size((input_size, input_size) if isinstance(input_size, int) else input_size)
    sizes = [key[0] for key in layer._kept]
    if len(sizes) > 1:
        raise Refused(
            f"the effective weight of {type(layer).__name__} depends on the image size, and it was evaluated at "
            f"{len(sizes)}: no plain layer is all of them; call export(input_size=(h, w)), or bound the network itself"
        )
    if not sizes:
        raise InputError(
            f"the effective weight of {type(layer).__name__} depends on the image size; call export(input_size=(h, w)), or "
            "evaluate the layer at one size first"
        )
    size: Size = sizes[0]
    return size


class SpectralConv2d(nn.Module):
    """What convolutions with one matrix per frequency export: those of one image size, as real and imaginary parts."""

    bias: nn.Parameter | None

    def __init__(self, frame: Frame, size: Size, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.frame, self.size = frame, size
        self.weight = nn.Parameter(torch.view_as_real(weight.detach().resolve_conj()).clone())
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        """The convolution, through Fourier space."""
        check_size(self.frame, self.size, x)
        return _apply(self.frame, x, torch.view_as_complex(self.weight), self.bias)

    @by_construction(None)
    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        """The largest norm over the frequencies, from the stored matrices."""
        return _bound(torch.view_as_complex(self.weight))


def check_size(frame: Frame, size: Size, x: Tensor) -> None:
    """An exported layer is for one size."""
    given = frame.size((x.shape[-2], x.shape[-1]))
    if given != size:
        raise InputError(
            f"this layer was exported for images of {size[0]}×{size[1]} (padding included), got {given}; "
            "export it for that size"
        )


def _apply(frame: Frame, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, single = batched(x)
    y = frame.leave(filtered(frame.enter(x), weight), (x.shape[-2], x.shape[-1]))
    y = y if bias is None else y + bias[:, None, None]
    return y[0] if single else y


def _bound(weight: Tensor) -> Bound:
    return Bound(float(isometry_bound(weight).amax()), Kind.UPPER, "residual at every frequency")
