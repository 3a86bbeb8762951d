"""Operators with one matrix per frequency: the symbol of a kernel on the half grid of a real image, and images through it."""

import math
from typing import Any

import torch
from torch import Tensor

from equipoise.nn.effective import plainly_called
from equipoise.nn.factored import differentiable
from equipoise.nn.orthogonal.frame import Size

#: largest side that a batch of matrices is inverted at by LAPACK
LEAST = 16


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
    found, corner = torch.empty_like(M), right @ last
    found[..., :half, :half] = corner @ left + first
    found[..., :half, half:] = -corner
    found[..., half:, :half] = -(last @ left)
    found[..., half:, half:] = last
    return found


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
    if plainly_called(x) and plainly_called(weight):
        found: Tensor = Filtered.apply(x, weight)
        return found
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
