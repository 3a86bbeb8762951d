"""Rescaling: W·R with a diagonal R (AOL, SR) or a number (SN), so that the norm is at most 1.

If `(WᵀW)^p ⪯ D` for a diagonal D ≥ 0 and p = 2^(t−1), then `WᵀW ⪯ D^(1/p)` (Löwner–Heinz), hence `‖W·D^(−1/2p)‖ ≤ 1`. Diagonal
dominance gives such a D, for every q > 0:

    D_ii = Σ_j |(WᵀW)^p|_ij q_j/q_i,          R = D^(−2^−t).

A convolution is the same with the table of its Gram operator: the sum runs over channels and offsets. With a stride the input is
seen through space-to-depth, so that every phase of an input channel is a channel.

Rounding. The sums are taken in float64, whatever the parameters' dtype. A computed power differs from the true one by an operator
of norm at most `δ·‖(WᵀW)^p‖` (`rounding`), so `(1 + δ)D + δ·max_i Σ_j|…|_ij` is a true majorant. The last product, rounded to
the parameters' dtype of unit roundoff u, moves the norm by at most `u·√(taps·min(m, n))`: the result is shrunk by that.

References: Prach & Lampert 2022 (AOL); Delattre et al. 2024 (spectral rescaling); Miyato et al. 2018 (spectral normalisation).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.core.errors import InputError, Refused
from equipoise.core.precision import unit_roundoff
from equipoise.nn import spectra

#: largest |log q|: the ratio of two entries of q stays far from overflow
LOG_Q = 40.0


def rescaling(K: Tensor, t: int = 1, log_q: Tensor | None = None) -> Tensor:
    """`K·R` with `R_ii = (Σ_j |G_t|_ij q_j/q_i)^(−2^−t)`, `G_t = (KᵀK)^(2^(t−1))`: norm at most 1, also in floating point.

    Args:
        K: matrices `(g, m, n)` or kernels `(g, co, ci, *taps)` of stride 1: one block per group.
        t: 1 is AOL; every step halves what is left to spectral normalisation.
        log_q: `(g, n)`, the logarithm of the positive weights q; None is q = 1.

    >>> W = torch.tensor([[[3.0, 0.0], [0.0, 1e-30]]])
    >>> rescaling(W).round(decimals=4).tolist()
    [[[1.0, 0.0], [0.0, 0.0]]]
    """
    return rescaling_pair(K, t, log_q)[0]


def rescaling_pair(K: Tensor, t: int = 1, log_q: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`(K·R, R)` with R as (g, n): the weight of `rescaling` and its factors."""
    check_steps(t)
    unit, exponent = to_unit(K)
    taps = math.prod(K.shape[3:])
    delta = rounding(K.shape[1], K.shape[2], taps, t)
    if K.dim() == 3 or taps == 1:
        rows, log2 = _matrix_rows(unit.reshape(*K.shape[:3]), t, log_q)
    else:
        rows, log2 = _kernel_rows(unit, t, log_q)
    weighted, plain = rows
    majorant = weighted * (1 + delta) + delta * plain.detach().amax(-1, keepdim=True)
    present = weighted > 0
    safe = torch.where(present, majorant, torch.ones_like(majorant))
    R = torch.where(present, torch.exp2(-(safe.log2() + log2) * 2.0**-t), torch.zeros_like(safe))
    result = unit * R.reshape(R.shape[0], 1, R.shape[1], *[1] * (K.dim() - 3))
    most = torch.finfo(K.dtype).max
    factors = (R * torch.exp2(-exponent.reshape(-1, 1))).clamp(max=most).to(device=K.device, dtype=K.dtype)
    return stored(result, K, taps), factors


def normalised(K: Tensor, bound: Tensor, delta: float) -> Tensor:
    """`K/bound`, where `bound·(1 + delta)` is at least the norm of K: norm at most 1; 0 where the bound is 0."""
    return normalised_pair(K, bound, delta)[0]


def normalised_pair(K: Tensor, bound: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """`(K/bound, 1/bound)`: the weight of `normalised` and its factor."""
    taps = math.prod(K.shape[3:])
    present = bound > 0
    safe = torch.where(present, bound, torch.ones_like(bound)) * (1 + delta)
    weight = torch.where(present, K.to(bound.dtype) / safe, torch.zeros_like(K, dtype=bound.dtype))
    factor = torch.where(present, 1 / safe, torch.zeros_like(safe)).clamp(max=torch.finfo(K.dtype).max)
    return stored(weight, K, taps), factor.to(device=K.device, dtype=K.dtype)


def stored(weight: Tensor, like: Tensor, taps: int) -> Tensor:
    """A weight of norm ≤ 1 in float64, brought to the dtype of `like (g, m, n, …)` such that its norm stays ≤ 1.

    Rounding changes each entry by at most u times itself, and `Σ_a ‖K_a‖_F ≤ √(taps·min(m, n))·sup‖E‖` (Parseval).
    """
    u = unit_roundoff(like.dtype)
    shrink = 1 - 1.01 * u * math.sqrt(taps * min(like.shape[1], like.shape[2])) - 8 * unit_roundoff(torch.float64)
    return (weight * shrink).to(device=like.device, dtype=like.dtype)


def to_unit(K: Tensor) -> tuple[Tensor, Tensor]:
    """`(K/2^e, e)` in float64 with 2^e near max|K| of each group: the result of a rescaling does not depend on e."""
    wide = (K.cpu() if K.device.type == "mps" else K).double()
    exponent = _exponent(wide, 0)
    half = (exponent / 2).floor()  # two steps: 2^-e alone may overflow
    return wide * torch.exp2(-half) * torch.exp2(half - exponent), exponent


def _exponent(x: Tensor, batch: int) -> Tensor:
    """log2 of the largest entry, rounded up, for each index of dimension `batch`, ready for broadcasting; 0 for zero."""
    largest = x.detach().abs().amax([d for d in range(x.dim()) if d != batch], keepdim=True)
    return torch.where(largest > 0, largest, torch.ones_like(largest)).log2().ceil()


def rounding(rows: int, columns: int, taps: int, t: int) -> float:
    """δ: a computed `(KᵀK)^(2^(t−1))` is off by an operator of norm at most δ times its own.

    A product of length ℓ of matrices with r columns is off by at most `γ_ℓ·‖A‖_F‖B‖_F ≤ γ_ℓ·r·‖A‖‖B‖`; a transform over B points
    by `γ_B·B·r`; powers of one matrix multiply their norms exactly, so relative errors add, and double with every squaring.
    """
    points = taps if taps == 1 else taps * 2 ** (t * 2)
    length = rows + columns + 2 * points + 16
    return 4.0 * 2.0**t * length * columns * points * unit_roundoff(torch.float64)


def check_steps(t: int) -> None:
    """t ≥ 1: at t = 0 there is no symmetric matrix to sum over."""
    if not isinstance(t, int) or not 1 <= t <= 12:
        raise InputError(f"spectral rescaling needs a whole number of steps t from 1 to 12, got {t}")


def _matrix_rows(W: Tensor, t: int, log_q: Tensor | None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Row sums of |(WᵀW)^(2^(t−1))| as `(sums·2^-log2, log2)`; a wide W goes through the smaller WWᵀ."""
    if t > 1 and W.shape[-2] < W.shape[-1]:
        H, h = _tamed((W @ W.mT)[None], 0.0)  # (WᵀW)^(2^s) = Wᵀ·(Π_{i<s} H^(2^i))·W
        Z, z = H @ W, h
        for _ in range(t - 2):
            H, h = _tamed(H @ H, 2 * h)
            Z, z = _tamed(H @ Z, h + z)
        return _row_sums(W.mT @ Z, log_q), z.flatten(1).mT
    G, log2 = _tamed((W.mT @ W)[None], 0.0)
    for _ in range(t - 1):
        G, log2 = _tamed(G @ G, 2 * log2)
    return _row_sums(G, log_q), log2.flatten(1).mT


#: largest table of waves, in numbers: half a gigabyte
_WAVES = 2**26


def _kernel_rows(K: Tensor, t: int, log_q: Tensor | None) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Row sums over channels and offsets of the table of `(KᵀK)^(2^(t−1))`, likewise."""
    points = math.prod([2**t * (k - 1) + 1 for k in K.shape[3:]]) // 2 + 1
    if points**2 > _WAVES:
        raise Refused(
            f"{t} steps of spectral rescaling of a kernel of {tuple(K.shape[3:])} taps need a table of {points}² waves, "
            f"more than {_WAVES}; use fewer steps t, or 'sn', 'aol' or 'bcop'"
        )
    X, Y, reach = spectra.kernel_gram(K)
    A, log2 = spectra.offsets(X, Y, reach), K.new_zeros(1, K.shape[0], 1, 1)
    for step in range(t - 1):
        X, Y, reach = spectra.refine(A, reach)
        A, log2 = spectra.offsets(*spectra.square(X, Y), reach), 2 * log2
        if step > 0:  # entries of K are at most 1, so the first powers cannot overflow
            A, log2 = _tamed(A, log2)
    return _row_sums(A, log_q), log2.flatten(1).mT


def _tamed(G: Tensor, log2: Tensor | float) -> tuple[Tensor, Tensor]:
    """`(G/c, log2 + log2 c)` with c near the largest entry of each group of `G (b, g, n, n)`: no power overflows."""
    e = _exponent(G, 1)
    return G * torch.exp2(-e), log2 + e


def _row_sums(A: Tensor, log_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """`(Σ_j |A|_ij q_j/q_i, Σ_j |A|_ij)`, both (g, n), over the offsets b of `A (b, g, n, n)` and their mirror images −b."""
    size = A.abs()
    total = size.sum(0)
    total = total + (total - size[0]).mT
    plain = total.sum(-1)
    if log_q is None:
        return plain, plain
    log_q = log_q.to(A.device, A.dtype).clamp(-LOG_Q, LOG_Q)
    return (total @ log_q.exp()[..., None])[..., 0] * (-log_q).exp(), plain
