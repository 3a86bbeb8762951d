"""The norm of one large matrix: a Lanczos lower end, and an upper end verified by one Cholesky factorisation.

Gram iteration needs some ten products of n×n matrices; this needs one Gram matrix, some forty matrix–vector products
and a factorisation. Both give the same contract: `lower ≤ σ₁ ≤ upper`, proved in floating point.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from equipoise.core.precision import down, gamma, up
from equipoise.norms.gram import gram, gram_error, product_length, rayleigh_lower, scaled, small_side, wide
from equipoise.norms.verify import below, verification_loss

#: below this many columns (of the smaller side) batched Gram iteration in float64 is faster
LARGE = 160


def gram_lower(A: Tensor, blocks: int = 10) -> Tensor:
    """Lower triangle of `A*A` block row by block row: little more than half the work of the full product.

    What lies above the block diagonal is not set.
    """
    n = A.shape[-1]
    step = -(-n // blocks)
    G = A.new_empty(n, n)
    for i in range(0, n, step):
        torch.matmul(A[:, i : i + step].mH, A[:, : i + step], out=G[i : i + step, : i + step])
    return G


def lanczos(multiply: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """Ritz vector of the largest eigenvalue of a Hermitian operator on flat vectors, after orthogonalised steps."""
    n = start.numel()
    Q = start.new_zeros(min(steps, n), n)
    diagonal: list[float] = []
    beside: list[float] = []
    q = start / torch.linalg.vector_norm(start)
    for j in range(Q.shape[0]):
        Q[j] = q
        w = multiply(q)
        diagonal.append(float(torch.vdot(q, w).real))
        w = w - diagonal[j] * q - (beside[-1] * Q[j - 1] if j else 0.0)
        w = w - Q[: j + 1].mT @ (Q[: j + 1].conj() @ w)
        beta = float(torch.linalg.vector_norm(w))
        if beta <= 1e-6 * max(map(abs, diagonal)) or j + 1 == Q.shape[0]:
            break
        beside.append(beta)
        q = w / beta
    size = len(diagonal)
    _, y = eigh_tridiagonal(diagonal, beside[: size - 1], select="i", select_range=(size - 1, size - 1))
    return Q[:size].mT @ torch.from_numpy(y[:, 0]).to(Q.device, Q.dtype)


def random_start(n: int, like: Tensor) -> Tensor:
    """A fixed Gaussian start vector (the same every time, so that results are reproducible)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(like.device, like.dtype)


def cholesky_bracket(W: Tensor, rtol: float, rounds: int = 6) -> tuple[float, float, Tensor]:
    """`(lower, upper, v)` for one matrix: Lanczos on `A = W*W`, then a proof that `A ⪯ upper²·I`.

    A failed proof means that the Ritz vector had not converged: Lanczos goes on from it, and after `rounds` failures the
    target is widened instead, at most up to the Frobenius norm, so the function always ends with a proved bound.
    """
    A, e = wide(small_side(W)), torch.zeros((), dtype=torch.int64)
    G = gram(A) if A.is_complex() else gram_lower(A)
    trace = float(torch.diagonal(G).real.sum())
    if not 1e-15 < trace < 1e15:  # rescaling costs two passes: only where float32 squares might leave the range
        if not bool(A.any()):
            return 0.0, 0.0, A.new_ones(A.shape[-1])
        A, e = scaled(A)
        G = gram(A) if A.is_complex() else gram_lower(A)
        trace = float(torch.diagonal(G).real.sum())
    g = gamma(product_length(A) + A.shape[-1] + 8, torch.float64)
    size = torch.tensor(up(math.sqrt(trace) * (1 + g)), dtype=torch.float64, device=A.device)  # ‖A‖_F
    error = gram_error(A, size).reshape(1)
    quick = torch.tril(G.to(torch.complex64 if G.is_complex() else torch.float32))
    quick = quick + torch.tril(quick, -1).mH
    tolerance = max(rtol, 4 * verification_loss(G.shape[-1], G.dtype))
    v = random_start(G.shape[-1], quick)
    best = torch.zeros_like(v)
    longest = int(torch.diagonal(G).real.argmax())
    best[longest] = 1  # the longest column: a lower end that is never 0
    lower, slack = down(math.sqrt(float(G[longest, longest].real) * (1 - 2 * g))), tolerance * 0.9
    while True:
        v = lanczos(quick.matmul, v, steps=30)
        value = float(rayleigh_lower(A, v, size))
        if value > lower:
            best, lower = v, value
        tau = torch.full((1,), (lower * (1 + slack)) ** 2, dtype=torch.float64, device=G.device)
        if float(tau) >= float(size) ** 2 or bool(below(G[None], tau, error)):
            upper = min(up(up(float(tau)) ** 0.5), float(size))
            return math.ldexp(lower, int(e)), math.ldexp(upper, int(e)), best
        rounds -= 1
        if rounds <= 0:
            slack *= 2
