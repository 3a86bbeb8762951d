"""`T_ij = Σ_b |A_b|_ij` of the table A of `(KᵀK)^(2^(t−1))`, over all offsets b: what a diagonal must dominate.

The value is computed in float64, as the proof of `nn.diagonal` needs it. The gradient needs no proof: it is taken in closed form
and in the parameters' dtype, with one complex product per frequency and squaring. For a gradient g of T, `A_b` has the gradient
`sign(A_b)·g` (and `sign(A_b)·gᵀ` for its mirror image). With Hermitian symbols `Z = X + iY`, `Γ = S + iN` the gradient of Z²,
that of Z is `ΓZ + ZΓ`; that of E is `2EΓ̄` for `Z = E*E`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from equipoise.core.errors import Refused
from equipoise.core.precision import full_precision
from equipoise.nn import spectra
from equipoise.nn.effective import plainly_called
from equipoise.nn.factored import symmetric_gram

#: largest table of waves, in numbers: half a gigabyte
_WAVES = 2**26
#: ratio of the largest and the smallest row of T up to which float32 holds the gradient's digits
_SPREAD = 2.0**24


def totals(K: Tensor, exponent: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """`(T·2^-log2, log2)`, (g, n, n) and (g, 1), of `K·2^-exponent`, kernels `(g, co, ci, *taps)` or matrices `(g, m, n)`."""
    taps = math.prod(K.shape[3:])
    _refuse_large(K, t)
    wide = taps == 1 and t > 1 and K.shape[1] < K.shape[2]
    if wide or not plainly_called(K):
        return _by_operators(K, exponent, t)
    T, log2 = _Totals.apply(K, exponent, t)
    return T, log2


def unit(K: Tensor, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """`K·2^-exponent` in a dtype, in two exact steps: 2^-exponent alone may overflow."""
    half = (exponent / 2).floor()
    wide = (K.cpu() if K.device.type == "mps" else K).to(dtype)
    return wide * torch.exp2(-half).to(dtype) * torch.exp2(half - exponent).to(dtype)


def near_one(exponent: Tensor) -> bool:
    """Whether numbers of these sizes can be multiplied as they are, without a power of two before."""
    return bool(exponent.abs().amax() <= 30)


def largest_exponent(x: Tensor, batch: int) -> Tensor:
    """log2 of the largest entry, rounded up, in float64, for each index of dimension `batch`, for broadcasting; 0 for zero."""
    largest = x.detach().abs().amax([d for d in range(x.dim()) if d != batch], keepdim=True).double()
    return torch.where(largest > 0, largest, torch.ones_like(largest)).log2().ceil()


def _tamed(G: Tensor, log2: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """`(G/c, log2 + log2 c, log2 c)` with c near the largest entry of each group of `G (b, g, n, n)`: no power overflows."""
    e = largest_exponent(G, 1)
    return G * torch.exp2(-e), log2 + e, e


def _summed(A: Tensor) -> Tensor:
    """Sums of |A| over the offsets of `A (b, g, n, n)` and their mirror images."""
    size = A.abs()
    total = size.sum(0)
    return total + (total - size[0]).mT


def _refuse_large(K: Tensor, t: int) -> None:
    if math.prod(K.shape[3:]) == 1:
        return
    points = math.prod([2**t * (k - 1) + 1 for k in K.shape[3:]]) // 2 + 1
    if points**2 > _WAVES:
        raise Refused(
            f"{t} steps of spectral rescaling of a kernel of {tuple(K.shape[3:])} taps need a table of {points}² waves, "
            f"more than {_WAVES}; use fewer steps t, or 'sn', 'aol' or 'bcop'"
        )


def _by_operators(K: Tensor, exponent: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """The same operator by operator: for compilers, transforms and higher derivatives, and for wide matrices."""
    whole = unit(K, exponent, torch.float64)
    if math.prod(K.shape[3:]) > 1:
        X, Y, reach = spectra.kernel_gram(whole)
        A, log2 = spectra.offsets(X, Y, reach), whole.new_zeros(1, K.shape[0], 1, 1)
        for step in range(t - 1):
            X, Y, reach = spectra.refine(A, reach)
            A, log2 = spectra.offsets(*spectra.square(X, Y), reach), 2 * log2
            if step > 0:  # entries of K are at most 1, so the first powers cannot overflow
                A, log2, _ = _tamed(A, log2)
        return _summed(A), log2.flatten(1).mT
    W = whole.reshape(*K.shape[:3])
    if t > 1 and W.shape[-2] < W.shape[-1]:
        H, h, _ = _tamed((W @ W.mT)[None], 0.0)  # (WᵀW)^(2^s) = Wᵀ·(Π_{i<s} H^(2^i))·W
        Z, z = H @ W, h
        for _ in range(t - 2):
            H, h, _ = _tamed(H @ H, 2 * h)
            Z, z, _ = _tamed(H @ Z, h + z)
        return _summed(W.mT @ Z), z.flatten(1).mT
    G, log2, _ = _tamed((W.mT @ W)[None], 0.0)
    for _ in range(t - 1):
        G, log2, _ = _tamed(G @ G, 2 * log2)
    return _summed(G), log2.flatten(1).mT


class _Totals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, K: Tensor, exponent: Tensor, t: int) -> tuple[Tensor, Tensor]:
        powers = _kernel_powers if math.prod(K.shape[3:]) > 1 else _matrix_powers
        with full_precision():
            T, log2, A, kept = powers(K, exponent, t)
        rows = T.sum(-1)
        lengths = rows[rows > 0]
        even = len(lengths) > 0 and bool(lengths.amax() <= _SPREAD * lengths.amin())
        narrow = K.dtype if even else torch.float64
        ctx.narrow, ctx.kept, ctx.t = narrow, [[part.to(narrow) for part in parts] for parts in kept], t
        ctx.signs, ctx.near = A.sign().to(narrow), powers is _matrix_powers and near_one(exponent)
        ctx.save_for_backward(K, exponent)
        ctx.mark_non_differentiable(log2)
        ctx.set_materialize_grads(False)
        return T, log2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        g, (K, exponent) = gradients[0], ctx.saved_tensors
        if g is None:
            return None, None, None
        if torch.is_grad_enabled():  # somebody will differentiate again
            T = _by_operators(K, exponent, ctx.t)[0]
            return torch.autograd.grad(T, K, g, create_graph=True)[0], None, None
        g = g.to(ctx.narrow)
        gA = ctx.signs * (g + g.mT)
        gA[0] = ctx.signs[0] * g
        found = (
            _kernel_gradient(gA, ctx.kept, tuple((k - 1) * 2 ** (ctx.t - 1) for k in K.shape[3:]))
            if math.prod(K.shape[3:]) > 1
            else _matrix_gradient(gA, ctx.kept)
        ).reshape(K.shape)
        if not ctx.near:
            found = unit(found, exponent, found.dtype)
        return found.to(K.device, K.dtype), None, None


Powers = tuple[Tensor, Tensor, Tensor, list[list[Tensor]]]


def _kernel_powers(K: Tensor, exponent: Tensor, t: int) -> Powers:
    """T, log2, the table A, and what its gradient needs: symbols of every step, and the factor that tamed it."""
    whole = unit(K, exponent, torch.float64)
    B, C, reach = spectra.kernel_symbol(whole)
    X, Y = spectra.gram(B, C)
    A, log2, one = spectra.offsets(X, Y, reach), whole.new_zeros(1, K.shape[0], 1, 1), whole.new_ones(1, 1, 1, 1)
    kept = [[B, C, one]]
    for step in range(t - 1):
        X, Y, reach = spectra.refine(A, reach)
        A, log2, e = spectra.offsets(*spectra.square(X, Y), reach), 2 * log2, 0 * log2
        if step > 0:
            A, log2, e = _tamed(A, log2)
        kept.append([X, Y, torch.exp2(-e)])
    return _summed(A), log2.flatten(1).mT, A, kept


def _kernel_gradient(gA: Tensor, kept: list[list[Tensor]], reach: spectra.Reach) -> Tensor:
    """The gradient for the kernel `(g, co, ci, taps)` from that of the table of the last power, and the reach of that."""
    for X, Y, factor in kept[:0:-1]:
        PQ = torch.complex(*spectra.offsets_adjoint(gA * factor, reach)) @ torch.complex(X, Y)
        reach = tuple(h // 2 for h in reach)
        gA = spectra.refine_adjoint(PQ.real, PQ.imag, reach)
    B, C, factor = kept[0]
    S, N = spectra.offsets_adjoint(gA * factor, reach)
    product = torch.complex(B, C) @ torch.complex(S, -N)
    return 2 * spectra.taps_adjoint(product.real, product.imag, reach).movedim(0, 3)


def _matrix_powers(K: Tensor, exponent: Tensor, t: int) -> Powers:
    """T, log2, the last power, and what its gradient needs: every power before, and the factor that tamed the next."""
    shape, near = K.shape[:3], near_one(exponent)
    W = (K if near else unit(K, exponent, K.dtype)).reshape(shape)
    G = symmetric_gram((W if near else unit(K, exponent, torch.float64).reshape(shape)).double())
    log2 = -2 * exponent.reshape(1, -1, 1, 1) if near else torch.zeros_like(exponent).reshape(1, -1, 1, 1)
    G, log2, e = _tamed(G[None], log2)
    kept = [[W, torch.exp2(-e)]]
    for _ in range(t - 1):
        before = G
        G, log2, e = _tamed(before @ before, 2 * log2)
        kept.append([before[0], torch.exp2(-e)])
    return G[0].abs(), log2.flatten(1).mT, G, kept


def _matrix_gradient(gA: Tensor, kept: list[list[Tensor]]) -> Tensor:
    """The gradient for W from that of the last power of `WᵀW`."""
    g = gA[0]
    for G, factor in kept[:0:-1]:
        P = (g + g.mT) @ G * (0.5 * factor[0])
        g = P + P.mT
    W, factor = kept[0]
    S = (g + g.mT) * factor[0]
    return (S @ W.mT).mT if W.stride(-2) == 1 else W @ S  # in the layout of W
