"""`T_ij = Σ_b |A_b|_ij` of the table A of `(KᵀK)^(2^(t−1))`, over all offsets b: what a diagonal must dominate.

The value is computed in float64, as the proof of `nn.diagonal` needs it. The gradient needs no proof: it is taken in closed form
and in the parameters' dtype, with one complex product per frequency and squaring. For a gradient g of T, `A_b` has the gradient
`sign(A_b)·g` (and `sign(A_b)·gᵀ` for its mirror image). With Hermitian symbols `Z = X + iY`, `Γ = S + iN` the gradient of Z²,
that of Z is `ΓZ + ZΓ`; that of E is `2EΓ̄` for `Z = E*E`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core.errors import Refused
from equipoise.core.precision import full_precision
from equipoise.nn import spectra
from equipoise.nn.factored import symmetric_gram

#: largest table of waves, in numbers: half a gigabyte
_WAVES = 2**26
#: ratio of the largest and the smallest row of T up to which float32 holds the gradient's digits
_SPREAD = 2.0**24


def totals(K: Tensor, exponent: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """`(T·2^-log2, log2)`, (g, n, n) and (g, 1), of `K·2^-exponent`, kernels `(g, co, ci, *taps)` or matrices `(g, m, n)`.

    Operator by operator: for compilers, transforms and higher derivatives, and for wide matrices.
    """
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


def refuse_large(K: Tensor, t: int) -> None:
    """Refuse kernels whose table of waves would not fit into memory."""
    if math.prod(K.shape[3:]) == 1:
        return
    points = math.prod([2**t * (k - 1) + 1 for k in K.shape[3:]]) // 2 + 1
    if points**2 > _WAVES:
        raise Refused(
            f"{t} steps of spectral rescaling of a kernel of {tuple(K.shape[3:])} taps need a table of {points}² waves, "
            f"more than {_WAVES}; use fewer steps t, or 'sn', 'aol' or 'bcop'"
        )


@dataclass(frozen=True)
class Powers:
    """`T·2^-log2` and log2 of kernels or matrices, and what the gradient needs: signs, and what went into every step."""

    T: Tensor
    log2: Tensor
    signs: Tensor
    kept: list[list[Tensor]]
    reach: spectra.Reach

    def gradient(self, g: Tensor) -> Tensor:
        """The gradient for K, from that of T."""
        g = g.to(self.signs.dtype)
        gA = self.signs * (g + g.mT)
        gA[0] = self.signs[0] * g
        return _kernel_gradient(gA, self.kept, self.reach) if self.reach else _matrix_gradient(gA, self.kept)


def powers(K: Tensor, t: int) -> Powers:
    """The same of K itself, entries neither very large nor very small, in closed form; nothing is recorded for autograd."""
    taps = K.shape[3:] if math.prod(K.shape[3:]) > 1 else ()
    with full_precision():
        T, log2, A, kept = (_kernel_powers if taps else _matrix_powers)(K, t)
    rows = T.sum(-1)
    lengths = rows[rows > 0]
    even = len(lengths) > 0 and bool(lengths.amax() <= _SPREAD * lengths.amin())
    narrow = K.dtype if even else torch.float64
    kept = [[part.to(narrow) for part in parts] for parts in kept]
    return Powers(T, log2, A.sign().to(narrow), kept, tuple((k - 1) * 2 ** (t - 1) for k in taps))


_Table = tuple[Tensor, Tensor, Tensor, list[list[Tensor]]]


def _kernel_powers(K: Tensor, t: int) -> _Table:
    """T, log2, the table A, and what its gradient needs: symbols of every step, and the factor that tamed it."""
    whole = K.double()
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


def _matrix_powers(K: Tensor, t: int) -> _Table:
    """T, log2, the last power, and what its gradient needs: every power before, and the factor that tamed the next."""
    W = K.reshape(K.shape[:3])
    G, log2, e = _tamed(symmetric_gram(W.double())[None], 0.0)
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
