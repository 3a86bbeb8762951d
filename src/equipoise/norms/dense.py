"""The norm of one large matrix: a Lanczos lower end, and an upper end verified by one Cholesky factorisation.

Gram iteration needs some ten products of n×n matrices; this needs one Gram matrix, some forty matrix–vector products
and a factorisation. Both give the same contract: `lower ≤ σ₁ ≤ upper`, proved in floating point.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from equipoise.core.precision import down, gamma, up
from equipoise.norms.gram import scaled, wide
from equipoise.norms.symmetric import gram_lower, narrow, symmetric_product
from equipoise.norms.verify import below, verification_loss

#: below this many columns (of the smaller side) batched Gram iteration in float64 is faster
LARGE = 160


def lanczos(multiply: Callable[[Tensor], Tensor], start: Tensor, steps: int, settle: float = 0.0) -> Tensor:
    """Ritz vector of the largest eigenvalue of a Hermitian operator on flat vectors, after orthogonalised steps.

    With `settle` it stops early, once eight steps have raised the Ritz value by no more than that share.
    """
    n, breakdown = start.numel(), 8 * torch.finfo(start.dtype).eps
    Q = start.new_zeros(min(steps, n), n)
    diagonal: list[float] = []
    beside: list[float] = []
    reached: list[float] = []  # Ritz values, every fourth step
    q = start / torch.linalg.vector_norm(start)
    for j in range(Q.shape[0]):
        Q[j] = q
        w = multiply(q)
        diagonal.append(float(torch.vdot(q, w).real))
        w = w - diagonal[j] * q - (beside[-1] * Q[j - 1] if j else 0.0)
        w = w - Q[: j + 1].mT @ (Q[: j + 1].conj() @ w)
        beta = float(torch.linalg.vector_norm(w))
        if beta <= breakdown * max(map(abs, diagonal)) or j + 1 == Q.shape[0]:
            break
        if settle and j % 4 == 3:
            reached.append(float(_top(diagonal, beside)[0]))
            if len(reached) > 2 and reached[-1] - reached[-3] <= settle * reached[-1]:
                break
        beside.append(beta)
        q = w / beta
    size = len(diagonal)
    y = _top(diagonal, beside[: size - 1])[1]
    return Q[:size].mT @ torch.from_numpy(y).to(Q.device, Q.dtype)


def _top(diagonal: list[float], beside: list[float]) -> tuple[float, NDArray[np.float64]]:
    """Largest eigenvalue of a tridiagonal matrix and its vector."""
    last = len(diagonal) - 1
    value, vector = eigh_tridiagonal(diagonal, beside, select="i", select_range=(last, last))
    return float(value[0]), vector[:, 0]


def random_start(n: int, like: Tensor) -> Tensor:
    """A fixed Gaussian start vector (the same every time, so that results are reproducible)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(like.device, like.dtype)


def _quotient(multiply: Callable[[Tensor], Tensor], v: Tensor, size: float) -> float:
    """`v*Gv/v*v` for G ⪰ 0 of trace at most `size`, rounded down: `|v|ᵀ|G||v| ≤ ‖G‖_F‖v‖²` and `‖G‖_F ≤ tr G`."""
    v = v / v.abs().amax()
    g = gamma(4 * len(v) + 32, torch.float64)
    value = float(torch.vdot(v, multiply(v)).real) / float(torch.vdot(v, v).real)
    return down(value) - up(g * (2.0 * size + abs(value)))


def cholesky_bracket(W: Tensor, rtol: float, rounds: int = 6) -> tuple[float, float, Tensor]:
    """`(lower, upper, v)` for one matrix: Lanczos on `G = A*A`, then a proof that `G ⪯ upper²·I`.

    Everything is read off the one Gram matrix in float64, which differs from the true one by at most `error` in norm: the lower
    end is `√(v*Gv/v*v − error)`, the upper end a verified factorisation. A failed proof means that the Ritz vector had not
    converged: Lanczos goes on from it, and after `rounds` failures the target is widened instead, at most up to the Frobenius
    norm, so the function always ends with a proved bound.
    """
    A, e = W, 0
    G = gram_lower(A)
    trace = float(torch.diagonal(G).real.sum())
    if not 1e-15 < trace < 1e15:  # rescaling costs two passes: only where float32 squares might leave the range
        if not bool(A.any()):
            return 0.0, 0.0, A.new_ones(G.shape[-1])
        A, exponent = scaled(A)
        e = int(exponent)
        G = gram_lower(A)
        trace = float(torch.diagonal(G).real.sum())
    n, (rows, columns) = len(G), A.shape
    length = (2 if A.is_complex() else 1) * max(rows, columns) + 8
    g = gamma(length + n, torch.float64)
    size = up(trace * (1 + g))  # ‖A‖_F²
    error = up(gamma(length, torch.float64) * 1.4143 * size) + 4.0 * n * length * torch.finfo(torch.float64).tiny
    tolerance = max(rtol, 4 * verification_loss(n, G.dtype))
    exact = symmetric_product(G, double=True)
    fine = tolerance < 1e-5  # float32 would not tell the top from its neighbours
    quick = exact if fine else symmetric_product(G)
    v, slack = random_start(n, G) if fine else narrow(random_start(n, G)), tolerance * 0.9
    best = torch.zeros_like(v)
    longest = int(torch.diagonal(G).real.argmax())
    best[longest] = 1  # the longest column: a lower end that is never 0
    lower = float(G[longest, longest].real) - error
    while True:
        v = lanczos(quick, v, steps=100, settle=slack / 2)
        value = _quotient(exact, wide(v), size) - error
        if value > lower:
            best, lower = v, value
        low = down(math.sqrt(max(lower, 0.0)))
        tau = (low * (1 + slack)) ** 2
        if tau >= size or bool(
            below(G[None], *(torch.tensor([x], dtype=torch.float64, device=G.device) for x in (tau, error)))
        ):
            upper = up(math.sqrt(up(min(tau, size))))
            return math.ldexp(low, e), math.ldexp(upper, e), best
        rounds -= 1
        if rounds <= 0:
            slack *= 2
