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
from torch import Tensor

from equipoise.core.bounds import Bound, Kind
from equipoise.core.precision import gamma, unit_roundoff
from equipoise.nn.orthogonal.frame import FramedConv2d, Size
from equipoise.nn.parametrize import is_plain_call

#: largest side that a batch of matrices is inverted at by LAPACK
LEAST = 16
#: entries of the matrices whose residual is taken at once: they stay in the cache
AT_ONCE = 2**17


def times(W: Tensor, scale: Tensor) -> Tensor:
    """`W·scale` for a real scale, in W's precision; a complex product would cost four times as much.

    Args:
        W: real or complex matrices.
        scale: real factors.
    """
    if not W.is_complex():
        return W * scale.to(W.dtype)
    parts = torch.view_as_real(W)
    return torch.view_as_complex(parts * scale.to(parts.dtype)[..., None])


def inverse(M: Tensor) -> Tensor:
    """The inverses of matrices `(..., n, n)` whose Hermitian part is positive definite.

    >>> M = torch.eye(40) + torch.randn(9, 40, 40).tril(-1) / 40
    >>> bool((inverse(M) @ M - torch.eye(40)).abs().max() < 1e-5)
    True
    """
    return _Inverse.apply(M) if is_plain_call(M) else torch.linalg.inv_ex(M)[0]


class _Inverse(torch.autograd.Function):
    """`V = M⁻¹` by blocks; the gradient g for V is `−V*gV*` for M."""

    @staticmethod
    def forward(ctx: Any, M: Tensor) -> Tensor:
        V = inverse_by_blocks(M)
        ctx.save_for_backward(V)
        return V

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (V,) = ctx.saved_tensors
        return -(V.mH @ gradients[0] @ V.mH)


def inverse_by_blocks(M: Tensor) -> Tensor:
    """Inverses without pivots, by halves: products of many small matrices at once are faster than LAPACK's factorisations.

    With `Re v*Mv ≥ ‖v‖²` the same holds for the leading block and for its Schur complement (`v = (−P⁻¹Qx, x)`), so nothing grows.
    """
    n = M.shape[-1]
    if n <= LEAST or M.dim() < 3 or math.prod(M.shape[:-2]) < 8:
        return torch.linalg.inv_ex(M)[0]
    half = n // 2
    (P, Q), (R, S) = (row.tensor_split([half], -1) for row in M.tensor_split([half], -2))
    first = inverse_by_blocks(P)
    left = R @ first
    right = first @ Q
    last = inverse_by_blocks(S - R @ right)
    corner = right @ last
    result = torch.empty_like(M)
    result[..., :half, :half] = corner @ left + first
    result[..., :half, half:] = -corner
    result[..., half:, :half] = -(last @ left)
    result[..., half:, half:] = last
    return result


def symbol(kernel: Tensor, size: Size, dilation: Size) -> Tensor:
    """`E(ω) = Σ_a K_a e^{iω·(d·a − centre)}` of `K (g, m, n, *k)` on the half grid of a real image: (g, frequencies, m, n).

    Args:
        kernel: K.
        size: of the image.
        dilation: of the kernel.
    """
    angles = []
    for axis, (n, count) in enumerate(zip(size, (size[0], size[1] // 2 + 1), strict=True)):
        k, d = kernel.shape[3 + axis], dilation[axis]
        place = torch.arange(k, device=kernel.device) * d - d * (k - 1) // 2
        turns = torch.arange(count, device=kernel.device)[:, None] * place % n
        angles.append(turns.double() * (2 * math.pi / n))
    angle = angles[0][:, None, :, None] + angles[1][None, :, None, :]
    angle = angle.reshape(angle.shape[0] * angle.shape[1], -1)
    flat = kernel.flatten(3).movedim(3, 1)  # (g, taps, m, n)
    g, taps, m, n = flat.shape
    flat = flat.reshape(g, taps, m * n)
    E = torch.complex(angle.cos().to(kernel.dtype) @ flat, angle.sin().to(kernel.dtype) @ flat)
    return E.reshape(g, len(angle), m, n)


def _to_frequencies(x: Tensor, groups: int) -> Tensor:
    """`(b, g·c, h, w)` real → `(g, frequencies, b, c)`: images as rows, one matrix product per frequency."""
    b, channels = x.shape[:2]
    spectrum = torch.fft.rfft2(x, norm="ortho").reshape(b * channels, -1).mT.contiguous()  # strided ones are slow
    return spectrum.reshape(-1, b, groups, channels // groups).permute(2, 0, 1, 3)


def _to_images(X: Tensor, size: Size) -> Tensor:
    """The inverse of `_to_frequencies`."""
    g, frequencies, b, c = X.shape
    flat = X.permute(1, 2, 0, 3).reshape(frequencies, -1).mT.contiguous()
    spectrum = flat.reshape(b, g * c, size[0], size[1] // 2 + 1)
    return torch.fft.irfft2(spectrum, s=size, norm="ortho")


def filtered(x: Tensor, weight: Tensor) -> Tensor:
    """`(b, g·c, h, w)` → `(b, g·o, h, w)`: a matrix `weight (g, frequencies, o, c)` at every frequency of the half grid.

    Args:
        x: images.
        weight: the matrices.
    """
    return _to_images(_to_frequencies(x, len(weight)) @ weight.mT, (x.shape[-2], x.shape[-1]))


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

    Args:
        kernels: the raw kernels.
        taps: number of taps.
        channels: of the smaller side.
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

    sized = True

    def key(self, shape: tuple[int, ...]) -> tuple[Size]:
        """The size of the operator's image."""
        return (self.frame.size((shape[-2], shape[-1])),)

    def operator(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The convolution, through Fourier space."""
        return filtered(x, tensors[0])

    def bound(self, tensors: tuple[Tensor, ...], input_shape: tuple[int, ...]) -> Bound:
        """The largest norm over the frequencies of this image size."""
        return Bound(float(isometry_bound(tensors[0]).amax()), Kind.UPPER, "residual at every frequency")
