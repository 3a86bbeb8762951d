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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.core.errors import InputError
from equipoise.core.precision import unit_roundoff
from equipoise.maps.geometry import Lattice, polyphase, rejoined
from equipoise.nn.dominance import largest_exponent, near_one, powers, refuse_large, totals
from equipoise.nn.effective import plainly_called
from equipoise.nn.factored import Gram, differentiable, pays, row_sums

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
    refuse_large(K, t)
    if plainly_called(K):
        short = short_factors(K, t, log_q)
        if short is not None:
            return K * short.reshape(_across(K, False)), short
        if in_closed_form(K, t):
            return Rescaled.apply(K, log_q, t, False, ())
    return _by_operators(K, t, log_q)


def in_closed_form(K: Tensor, t: int) -> bool:
    """Whether `Rescaled` is for the kernel: wide matrices go another way, and numbers must not be too large or small."""
    wide = t > 1 and math.prod(K.shape[3:]) == 1 and K.shape[1] < K.shape[2]
    return not wide and K.device.type != "mps" and near_one(largest_exponent(K, 0))


def _on_phases(K: Tensor, turned: bool, lattices: Sequence[Lattice]) -> Tensor:
    """The kernel on the phases of its inputs, turned round."""
    S = polyphase(K, lattices)
    return S.transpose(1, 2) if turned else S


def _off_phases(S: Tensor, turned: bool, lattices: Sequence[Lattice]) -> Tensor:
    """The inverse, and the adjoint."""
    return rejoined(S.transpose(1, 2) if turned else S, lattices)


def _times(K: Tensor, R: Tensor, turned: bool, lattices: Sequence[Lattice]) -> Tensor:
    """`K·R`, or `R·K`, of a kernel that is not on its phases."""
    if turned or all(lattice.phases == 1 for lattice in lattices):
        return K * R.reshape(_across(K, turned))
    S = polyphase(K, lattices)
    return rejoined(S * R.reshape(_across(S, False)), lattices)


def _again(
    ctx: Any, K: Tensor, log_q: Tensor | None, g: Tensor | None, g_R: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients operator by operator."""
    E, R = _by_operators(_on_phases(K, ctx.turned, ctx.lattices), ctx.t, log_q)
    pairs = ((_off_phases(E, ctx.turned, ctx.lattices), g), (R, g_R))
    values, given = zip(*[(value, gradient) for value, gradient in pairs if gradient is not None], strict=True)
    return differentiable(values, given, K, log_q)


def _across(K: Tensor, turned: bool) -> tuple[int, ...]:
    """The shape of R (g, n) beside kernels `(g, m, n, …)`, or (turned) `(g, n, m, …)`."""
    ones = [1] * (K.dim() - 3)
    return (K.shape[0], -1, 1, *ones) if turned else (K.shape[0], 1, -1, *ones)


def _by_operators(K: Tensor, t: int, log_q: Tensor | None) -> tuple[Tensor, Tensor]:
    exponent = largest_exponent(K, 0)
    exponent = exponent.cpu() if K.device.type == "mps" else exponent
    total, log2 = totals(K, exponent, t)
    weighted, majorant = _majorant(K, t, total, log_q)
    present = weighted > 0
    safe = torch.where(present, majorant, torch.ones_like(majorant))
    R = torch.where(present, torch.exp2(-(safe.log2() + log2) * 2.0**-t), torch.zeros_like(safe))
    factors = (R * torch.exp2(-exponent.reshape(-1, 1))).clamp(max=torch.finfo(K.dtype).max)
    return scaled(K, R, exponent), factors.to(device=K.device, dtype=K.dtype)


def _majorant(K: Tensor, t: int, total: Tensor, log_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Row sums as computed, and at least the exact ones."""
    delta = rounding(K.shape[1], K.shape[2], math.prod(K.shape[3:]), t)
    weighted, plain = _row_sums(total, log_q)
    return weighted, weighted * (1 + delta) + delta * plain.detach().amax(-1, keepdim=True)


class Rescaled(torch.autograd.Function):
    """`(K·R, R)`, or (`turned`) `(R·K, R)` with the R of Kᵀ, of kernels on the phases of their inputs; closed gradient.

    A gradient g for R is `−2^−t·g·R/D` for the majorant D, and its outer product with q for T. One function for all of it:
    kernels are small, and every operation that autograd records costs as much as the products.
    """

    @staticmethod
    def forward(
        ctx: Any, K: Tensor, log_q: Tensor | None, t: int, turned: bool, lattices: Sequence[Lattice]
    ) -> tuple[Tensor, Tensor]:
        """The weight and its factors."""
        S = _on_phases(K, turned, lattices)
        refuse_large(S, t)
        found = powers(S, t)
        weighted, majorant = _majorant(S, t, found.T, log_q)
        R = torch.exp2(-(majorant.log2() + found.log2) * 2.0**-t)
        if not bool((weighted > 0).all()):
            R = torch.where(weighted > 0, R, torch.zeros_like(R))
        factor = (R * _factor(S)).to(K.dtype)
        ctx.save_for_backward(K, log_q, R, majorant, weighted, factor)
        ctx.found, ctx.t, ctx.turned, ctx.lattices, ctx.shape, ctx.loss = (
            found,
            t,
            turned,
            lattices,
            S.shape,
            _factor(S),
        )
        ctx.set_materialize_grads(False)
        return _times(K, factor, turned, lattices), R.to(K.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients for K and log q."""
        K, log_q, R, majorant, weighted, factor = ctx.saved_tensors
        g, g_R = gradients
        if torch.is_grad_enabled():  # somebody will differentiate again
            return *_again(ctx, K, log_q, g, g_R), None, None, None
        own, total = None, torch.zeros_like(R) if g_R is None else g_R.to(R)
        if g is not None:
            own, parts = _times(g, factor, ctx.turned, ctx.lattices), _on_phases(g * K, ctx.turned, ctx.lattices)
            total = total + parts.sum([d for d in range(parts.dim()) if d not in (0, 2)]) * ctx.loss
        c = torch.where(R > 0, total * R / majorant, torch.zeros_like(R)) * -(2.0**-ctx.t)
        q, inside = None, None
        if log_q is None:
            g_T = c[..., :, None].expand_as(ctx.found.T)
        else:
            wide = log_q.to(R)
            q, inside = wide.clamp(-LOG_Q, LOG_Q).exp(), wide.abs() <= LOG_Q
            g_T = (c / q)[..., :, None] * q[..., None, :]
        g_K = _off_phases(ctx.found.gradient(g_T).reshape(ctx.shape), ctx.turned, ctx.lattices)
        g_K = g_K.to(K.dtype) if own is None else own.add_(g_K)
        if q is None or inside is None:
            return g_K, None, None, None, None
        along = (ctx.found.T.mT @ (c / q)[..., None])[..., 0] * q - c * weighted
        return g_K, (along * inside).to(log_q.dtype), None, None, None


def short_factors(K: Tensor, t: int, log_q: Tensor | None) -> Tensor | None:
    """R as (1, n) in K's dtype from sums in float32 (`row_sums`), shrunk as in `scaled`; None where they do not do or pay."""
    if K.shape[0] > 1 or math.prod(K.shape[3:]) > 1 or not worth(K.reshape(K.shape[1:3]).mT, t):
        return None
    return short_diagonal(Gram.apply(K.reshape(K.shape[1:3]).mT, False), K, t, log_q)


def worth(W: Tensor, t: int) -> bool:
    """Whether sums in float32 are to be tried for the rows of W."""
    return t <= 2 and W.dtype is torch.float32 and W.device.type != "mps" and pays(*W.shape) and plainly_called(W)


def short_diagonal(G: Tensor, K: Tensor, t: int, log_q: Tensor | None) -> Tensor | None:
    """`short_factors` from the Gram matrix of the columns of `K (1, m, n)`."""
    total = row_sums(G, K.shape[1], t, None if log_q is None else log_q[0])
    return None if total is None else (total.pow(-(2.0**-t)) * _factor(K))[None].to(K.dtype)


def scaled(K: Tensor, R: Tensor, exponent: Tensor) -> Tensor:
    """`K·2^-exponent·R` for a diagonal R (g, n) that makes its norm at most 1, in K's dtype, shrunk for what rounding does.

    The power of two is applied in two parts, one to K (exactly) and one to R; R rounded costs a factor 1 + u, the product what it
    costs in `stored`.
    """
    shape = R.shape[0], 1, R.shape[1], *[1] * (K.dim() - 3)
    factor = R.reshape(shape) * _factor(K)
    if plainly_called(K) and near_one(exponent):
        return K * (factor * torch.exp2(-exponent)).to(K)
    half = (exponent / 2).floor()
    return (K * torch.exp2(-half).to(K)) * (factor * torch.exp2(half - exponent)).to(K)


def normalised(K: Tensor, bound: Tensor, delta: float) -> Tensor:
    """`K/bound`, where `bound·(1 + delta)` is at least the norm of K: norm at most 1; 0 where the bound is 0."""
    return normalised_pair(K, bound, delta)[0]


def normalised_pair(K: Tensor, bound: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """`(K/bound, 1/bound)`: the weight of `normalised` and its factor."""
    present = bound != 0  # of a weight that is no number neither is its norm: it must be seen
    safe = torch.where(present, bound, torch.ones_like(bound)) * (1 + delta)
    weight = torch.where(present, K.to(bound.dtype) / safe, torch.zeros_like(K, dtype=bound.dtype))
    factor = torch.where(present, 1 / safe, torch.zeros_like(safe)).clamp(max=torch.finfo(K.dtype).max)
    return stored(weight, K), factor.to(device=K.device, dtype=K.dtype)


def stored(weight: Tensor, like: Tensor) -> Tensor:
    """A weight of norm ≤ 1 in float64, brought to the dtype of `like (g, m, n, …)` such that its norm stays ≤ 1.

    Rounding changes each entry by at most u times itself, and `Σ_a ‖K_a‖_F ≤ √(taps·min(m, n))·sup‖E‖` (Parseval).
    """
    return (weight * _shrunk(like)).to(device=like.device, dtype=like.dtype)


def _factor(like: Tensor) -> float:
    """What R is multiplied by: its own rounding, and that of `stored`."""
    return _shrunk(like) - 2 * unit_roundoff(like.dtype)


def _shrunk(like: Tensor) -> float:
    """The factor of `stored`."""
    taps, u = math.prod(like.shape[3:]), unit_roundoff(like.dtype)
    return 1 - 1.01 * u * math.sqrt(taps * min(like.shape[1], like.shape[2])) - 8 * unit_roundoff(torch.float64)


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


def _row_sums(total: Tensor, log_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """`(Σ_j T_ij q_j/q_i, Σ_j T_ij)`, both (g, n)."""
    plain = total.sum(-1)
    if log_q is None:
        return plain, plain
    log_q = log_q.to(total.device, total.dtype).clamp(-LOG_Q, LOG_Q)
    return (total @ log_q.exp()[..., None])[..., 0] * (-log_q).exp(), plain
