"""Gram iteration: σ₁ from above by repeated squaring, with the rounding accounted for.

`W₀ = W`, `W_{t+1} = W_t* W_t`, and `s_t = ‖W_t‖_F^(2^-t)` is the Schatten-2^(t+1) norm of W: an upper bound on σ₁ at
every t whose excess vanishes like (σ₂/σ₁)^(2^(t+1))/2^t. Iterates are rescaled by powers of two, which is exact.

Reference: B. Delattre et al., *Efficient bound of Lipschitz constant for convolutional layers by Gram iteration*,
ICML 2023.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from equipoise.core import InputError, require_tensor, require_type
from equipoise.core.precision import frobenius, gamma, inflate, power_of_two_scale, require_finite

Readout = Literal["fro", "one", "inf"]


def gram(A: Tensor) -> Tensor:
    """`A*A` for a batch of matrices; complex input goes through three real products, far faster on a CPU.

    With `A = B + iC`: `Re = BᵀB + CᵀC` and `Im = BᵀC − (BᵀC)ᵀ`.
    """
    if not A.is_complex():
        return A.mT @ A
    B, C = A.real, A.imag
    cross = B.mT @ C
    return torch.complex(B.mT @ B + C.mT @ C, cross - cross.mT)


def adjoint(W: Tensor) -> Tensor:
    """`W*`, with the conjugation done at once: lazy conjugation is lost inside operators that `torch.compile` calls."""
    return W.mT.conj_physical() if W.is_complex() else W.mT


def small_side(W: Tensor) -> Tensor:
    """`W`, or its adjoint where that has fewer columns: same singular values, cheaper Gram matrix."""
    return adjoint(W) if W.shape[-2] < W.shape[-1] else W


def scaled(W: Tensor) -> tuple[Tensor, Tensor]:
    """`(A, e)` with `W = 2^e·A`, `max|a_ij| ∈ [1/4, 1]` and e an integer per matrix; a zero matrix has e = 0."""
    parts = torch.view_as_real(W).flatten(-2) if W.is_complex() else W
    e = power_of_two_scale(parts.abs().amax(dim=(-2, -1)))
    half = torch.div(e, 2, rounding_mode="floor")  # two steps: 2^-e alone may overflow
    for part in (half, e - half):
        W = W * torch.exp2(-part.to(W.real.dtype))[..., None, None]
    return W, e


def near_one(W: Tensor) -> tuple[Tensor, Tensor]:
    """`(A, e)` with `W = 2^e·A`, `‖A‖_F ∈ [1/2, 1]` and e whole, for products of scaled matrices: with fewer passes, and without
    care for squares that overflow or vanish. A zero matrix stays one."""
    e = entries_norm(W).clamp_min(torch.finfo(W.dtype).tiny).log2().ceil()
    return W * torch.exp2(-e)[..., None, None], e.double()


def entries_norm(W: Tensor) -> Tensor:
    """Frobenius norms of matrices in their own arithmetic."""
    entries = torch.view_as_real(W).flatten(-3) if W.is_complex() else W.flatten(-2)
    return torch.linalg.vector_norm(entries, dim=-1)


def gram_iterate(W: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """`(A, log2)` with `W_t = 2^log2·A`, the iterate on the smaller side, rescaled by powers of two.

    Args:
        W: matrices `(..., m, n)`.
        iterations: how many products.
    """
    A, e = scaled(small_side(W))
    log2 = e.double()
    for _ in range(iterations):
        A, e = scaled(gram(A))
        log2 = 2 * log2 + e
    return A, log2


def gram_norm_plain(W: Tensor, iterations: int = 6, readout: Readout = "fro") -> Tensor:
    """`‖W_t‖^(2^-t)` in the arithmetic of W: an upper bound on σ₁ in real arithmetic only.

    `readout` is the norm taken of the last iterate: `fro` converges super-geometrically, `one` (largest column sum)
    and `inf` (largest row sum) only like 2^-t; at t = 0, where W is not Hermitian, either would be no bound and the root of
    their product is taken. For a bound that also covers rounding use `gram_bracket`.

    Args:
        W: matrices `(..., m, n)`.
        iterations: Gram iterations.
        readout: norm of the last iterate: `fro`, `one` or `inf`.

    >>> W = torch.diag(torch.tensor([3.0, 1.0]))
    >>> round(float(gram_norm_plain(W, 4)), 4)
    3.0
    """
    require_type(W, Tensor, "W")
    _check(W, iterations)
    if readout not in get_args(Readout):
        raise InputError(f"readout must be one of {', '.join(get_args(Readout))}, got {readout!r}")
    return iterated_norm(W, iterations, readout)


def iterated_norm(W: Tensor, iterations: int, readout: Readout = "fro") -> Tensor:
    """`gram_norm_plain` without its checks.

    Args:
        W: matrices `(..., m, n)`.
        iterations: Gram iterations.
        readout: norm of the last iterate.
    """
    A, log2 = gram_iterate(W, iterations)
    if readout == "fro":
        value = torch.linalg.matrix_norm(A).double()
    else:
        columns, rows = (A.abs().sum(d).amax(-1).double() for d in (-2, -1))
        value = (
            (rows * columns).sqrt() if iterations == 0 else columns if readout == "one" else rows
        )
    return (value.pow(2.0**-iterations) * torch.exp2(log2 * 2.0**-iterations)).to(W.real.dtype)


def gram_bracket(
    W: Tensor, rtol: float = 1e-3, max_iterations: int = 24
) -> tuple[Tensor, Tensor, Tensor]:
    """Batched `(lower, upper, v)` in float64, with `lower ≤ σ₁ ≤ upper` proved in floating point; v spans the top.

    If `A = W_t/α_t` with α_t a power of two, the computed Gram matrix is `A*A + E`, `‖E‖_F ≤ γ‖A‖_F²`, hence
    `σ₁(A)² ≤ σ₁(computed) + γ‖A‖_F²`. The read-out runs backwards, rounding up:

        U_T = ‖W_T‖_F,     U_t = α_t·√(U_{t+1} + γ‖W_t/α_t‖_F²),     upper = U_0

    The lower end is a Rayleigh quotient `‖Wv‖/‖v‖` in float64, with v the largest column of W_t. The iteration knows
    its own gap and stops at `upper ≤ (1 + rtol)·lower`, or when more products no longer help.

    Args:
        W: matrices `(..., m, n)`.
        rtol: relative gap to reach.
        max_iterations: most products.
    """
    _check(W, max_iterations)
    tall = small_side(W)
    shape = tall.shape[:-2]
    A, e = scaled(tall.reshape(-1, *tall.shape[-2:]))
    start, e0 = A, e
    history: list[
        tuple[Tensor, Tensor]
    ] = []  # (exponent of α_t, γ‖A_t‖_F² + underflow) per iterate
    upper = torch.full(A.shape[:1], math.inf, dtype=torch.float64, device=A.device)
    lower = torch.zeros_like(upper)
    v = torch.zeros_like(start[..., 0, :])
    v[..., 0] = 1
    for t in range(max_iterations + 1):
        candidate = _unwind(frobenius(A), e, history)
        stalled = bool((candidate >= upper * (1 - 2.0**-44)).all())
        upper = torch.minimum(upper, candidate)
        if t > 0:
            column = _largest_column(A)
            value = torch.ldexp(rayleigh_lower(start, column), e0)
            v = torch.where((value > lower)[:, None], column, v)
            lower = torch.maximum(lower, value)
        if bool((upper <= (1 + rtol) * lower).all()) or (stalled and t > 1) or t == max_iterations:
            break
        history.append((e, gram_error(A)))
        A, e = scaled(gram(A))
    lower = torch.minimum(lower, upper)
    return lower.reshape(shape), upper.reshape(shape), v.reshape(*shape, -1)


def rayleigh_lower(W: Tensor, v: Tensor) -> Tensor:
    """`‖Wv‖/‖v‖`, a lower bound on σ₁, evaluated in float64 and rounded down by the error of the product.

    `|fl(Wv) − Wv| ≤ γ_n|W||v|`, so the quotient is off by at most `γ_n‖W‖_F`.

    Args:
        W: matrices `(..., m, n)`.
        v: vectors `(..., n)`.
    """
    W64, v64 = wide(W), wide(v)
    v64 = v64 / v64.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    y = W64 @ v64[..., None]
    norm_v = frobenius(v64[..., None])
    value = (
        frobenius(y) * (1 - 2 * gamma(2 * y.shape[-2] + 8, torch.float64)) / norm_v.clamp_min(1.0)
    )
    error = inflate(gamma(2 * W.shape[-1] + 4, torch.float64) * frobenius(W64))
    return (value - error).clamp_min(0) * (norm_v > 0)


def wide(x: Tensor) -> Tensor:
    """The same numbers in float64 or complex128."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def dominant_pair(W: Tensor, rtol: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Dominant singular triple `(σ, u, v)`, `W v ≈ σ u`, from the columns of the Gram iterates.

    σ is the Rayleigh quotient `‖Wv‖`, a lower bound up to rounding.

    Args:
        W: matrices `(..., m, n)`.
        rtol: relative gap of the bracket at which the iteration stops.

    >>> s, u, v = dominant_pair(torch.diag(torch.tensor([3.0, 1.0])))
    >>> round(float(s), 4), bool(torch.allclose(v.abs(), torch.tensor([1.0, 0.0])))
    (3.0, True)
    """
    require_tensor(W, "W")
    require_finite(W)
    return complete_pair(W, gram_bracket(W, rtol)[2])


def complete_pair(W: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(σ, u, v)` of unit length from the vector an iteration found on the smaller side (the left one for a wide W).

    Args:
        W: matrices `(..., m, n)`.
        vector: vectors of the smaller side.
    """
    vector = vector.to(W.dtype)
    vector = vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    other = (small_side(W) @ vector[..., None])[..., 0]
    sigma = torch.linalg.vector_norm(other, dim=-1)
    other = other / torch.where(sigma > 0, sigma, torch.ones_like(sigma))[..., None]
    return (sigma, vector, other) if W.shape[-2] < W.shape[-1] else (sigma, other, vector)


def _unwind(last: Tensor, e: Tensor, history: list[tuple[Tensor, Tensor]]) -> Tensor:
    U = inflate(torch.ldexp(last, e))
    for exponent, error in reversed(history):
        U = inflate(torch.ldexp(inflate((U + error).sqrt()), exponent))
    return U


def gram_error(A: Tensor) -> Tensor:
    """Bound on `‖fl(A*A) − A*A‖_F`, plus what scaling and products may lose to underflow.

    Real: `γ_m‖A‖_F²`. Complex: real and imaginary part are real inner products of length 2m, each off by at most
    `γ·a_i·a_j` with a_i the column norms, so the factor √2 more.
    """
    m, n = A.shape[-2:]
    factor = 1.0
    if A.is_complex():  # real inner products of twice the length, and one subtraction
        m, factor = 2 * m + 2, 1.4143
    lost = 4.0 * n * (m + n) * torch.finfo(A.dtype).tiny
    return inflate(gamma(m, A.dtype) * factor * frobenius(A).square()) + lost


def _largest_column(A: Tensor) -> Tensor:
    best = torch.linalg.vector_norm(A, dim=-2).argmax(-1)
    index = best[..., None, None].expand(*A.shape[:-1], 1)
    return A.gather(-1, index)[..., 0]


def _check(W: Tensor, iterations: int) -> None:
    if W.dim() < 2:
        raise InputError(f"expected matrices of shape (..., m, n), got shape {tuple(W.shape)}")
    if iterations < 0 or iterations != int(iterations):
        raise InputError(f"iterations must be a whole number ≥ 0, got {iterations}")
    require_finite(W)
