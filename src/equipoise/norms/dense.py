"""The norm of one large matrix: a Lanczos lower end, and an upper end verified by one Cholesky factorisation.

Gram iteration needs some ten products of n×n matrices; this needs one Gram matrix, some forty matrix–vector products
and a factorisation. Both give the same contract: `lower ≤ σ₁ ≤ upper`, proved in floating point.

Gram matrices by half: symmetric rank-k updates and products of SciPy's BLAS, which torch does not have.

On other devices and for complex numbers the full products of torch serve instead; the results mean the same.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from scipy.linalg.blas import dsymv, dsyrk, ssymv, ssyrk
from scipy.linalg.lapack import dsterf
from torch import Tensor

from equipoise.core.precision import down, gamma, ldexp_down, ldexp_up, up
from equipoise.norms.gram import gram, scaled, small_side, wide
from equipoise.norms.verify import below, serial, verification_loss

#: numbers cast to float64 at once: the whole matrix would be written to memory and read back
_PIECE = 2**19


def gram_lower(W: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Lower triangle of `A*A` in `dtype` arithmetic, with A the side of `W (m, n)` that has fewer columns.

    What lies above the diagonal is not set. Every entry is a sum of max(m, n) products, rounded in some order.

    >>> torch.tril(gram_lower(torch.tensor([[1.0, 2.0], [0.0, 1.0], [1.0, 0.0]]))).tolist()
    [[2.0, 0.0], [2.0, 5.0]]
    """
    if W.is_complex() or W.device.type != "cpu":
        return gram(small_side(wide(W) if dtype is torch.float64 else W))
    if W.shape[0] != W.shape[1] and not W.is_contiguous() and W.mT.is_contiguous():
        W = W.mT  # the same matrix on its smaller side, without a copy
    tall = W.shape[0] >= W.shape[1]
    n, long = (W.shape[1], W.shape[0]) if tall else W.shape
    syrk, number = (dsyrk, np.float64) if dtype is torch.float64 else (ssyrk, np.float32)
    total = np.zeros((n, n), dtype=number, order="F")
    whole = W.dtype is dtype and W.is_contiguous()
    pieces = (W,) if whole else W.split(max(1, min(long, _PIECE // n)), dim=0 if tall else 1)
    with serial(long * n * n):
        for piece in pieces:  # row-major here is column-major transposed there, so nothing is copied but the cast
            a = piece.to(dtype).contiguous().numpy().T
            total = syrk(1.0, a, beta=1.0, c=total, trans=not tall, lower=0, overwrite_c=1)
    return torch.from_numpy(total.T)


def narrow(x: Tensor) -> Tensor:
    """The same numbers rounded to float32 or complex64."""
    return x.to(torch.complex64 if x.is_complex() else torch.float32)


def symmetric_product(G: Tensor, double: bool = False) -> Callable[[Tensor], Tensor]:
    """`v ↦ Gv` for a Hermitian matrix of which only the lower triangle is set, in float32 (or float64)."""
    if G.is_complex() or G.device.type != "cpu":
        full = torch.tril(G if double else narrow(G))
        full = full + torch.tril(full, -1).mH
        return full.matmul
    upper = G.numpy().T if double else G.numpy().astype(np.float32, copy=False).T
    symv = dsymv if double else ssymv
    return lambda v: torch.from_numpy(symv(1.0, upper, v.numpy(), lower=0))


#: below this many columns (of the smaller side) batched Gram iteration in float64 is faster
LARGE = 160


def lanczos(multiply: Callable[[Tensor], Tensor], start: Tensor, steps: int, settle: float = 0.0) -> Tensor:
    """Ritz vector of the largest eigenvalue of a Hermitian operator on flat vectors, after orthogonalised steps.

    With `settle` it stops early, once eight steps have raised the Ritz value by no more than that share. On the CPU the vectors
    are NumPy's: a step on a short one takes as long as its calls.
    """
    n, breakdown = start.numel(), 8 * torch.finfo(start.dtype).eps
    on_cpu = start.device.type == "cpu"
    q: Any = start.resolve_conj().numpy() if on_cpu else start
    apply: Callable[[Any], Any] = (lambda q: multiply(torch.from_numpy(q)).numpy()) if on_cpu else multiply
    Q: Any = np.zeros((min(steps, n), n), dtype=q.dtype) if on_cpu else start.new_zeros(min(steps, n), n)
    diagonal: list[float] = []
    beside: list[float] = []
    reached: list[float] = []  # Ritz values, every fourth step
    q = q / _length(q)
    for j in range(len(Q)):
        Q[j] = q
        w = apply(q)
        diagonal.append(float((q.conj() @ w).real))
        w = w - diagonal[j] * q - (beside[-1] * Q[j - 1] if j else 0.0)
        known = Q[: j + 1]
        w = w - (known.conj() @ w) @ known
        beta = _length(w)
        if beta <= breakdown * max(map(abs, diagonal)) or j + 1 == len(Q):
            break
        if settle and j % 4 == 3:
            reached.append(float(dsterf(diagonal, beside)[0][-1]))
            if len(reached) > 2 and reached[-1] - reached[-3] <= settle * reached[-1]:
                break
        beside.append(beta)
        q = w / beta
    size = len(diagonal)
    _, y = eigh_tridiagonal(diagonal, beside[: size - 1], select="i", select_range=(size - 1, size - 1))
    y = y[:, 0]
    if on_cpu:
        return torch.from_numpy(y.astype(Q.real.dtype) @ Q[:size])
    return torch.from_numpy(y).to(Q.device, Q.dtype) @ Q[:size]


def _length(q: Any) -> float:
    return math.sqrt(float((q.conj() @ q).real))


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


def cholesky_bracket(
    W: Tensor, rtol: float, rounds: int = 6, start: Tensor | None = None, enough: float = 0.0
) -> tuple[float, float, Tensor]:
    """`(lower, upper, v)` for one matrix: Lanczos on `G = A*A`, then a proof that `G ⪯ upper²·I`.

    Everything is read off the one Gram matrix in float64, which differs from the true one by at most `error` in norm: the lower
    end is `√(v*Gv/v*v − error)`, the upper end a verified factorisation. A failed proof means that the Ritz vector had not
    converged: Lanczos goes on from it, and after `rounds` failures the target is widened instead, at most up to the Frobenius
    norm, so the function always ends with a proved bound. `start` is a guess of v; where it leaves `σ₁ ≤ enough` possible, that
    is tried first and will do.
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
    slack = tolerance * 0.9
    v = random_start(n, G) if start is None or not bool(start.any()) else start.to(G)
    v = v if fine else narrow(v)
    best = torch.zeros_like(v)
    longest = int(torch.diagonal(G).real.argmax())
    best[longest] = 1  # the longest column: a lower end that is never 0
    lower = float(G[longest, longest].real) - error

    def proved(tau: float) -> bool:
        return bool(below(G[None], *(torch.tensor([x], dtype=torch.float64, device=G.device) for x in (tau, error))))

    if start is not None and enough > 0:
        v = quick(v)
        value, tau = _quotient(exact, wide(v), size) - error, down(down(ldexp_down(enough, -e)) ** 2)
        if value < tau < math.inf and proved(tau):
            return ldexp_down(down(math.sqrt(max(value, lower, 0.0))), e), enough, v
    while True:
        v = lanczos(quick, v, steps=100, settle=slack / 2)
        value = _quotient(exact, wide(v), size) - error
        if value > lower:
            best, lower = v, value
        low = down(math.sqrt(max(lower, 0.0)))
        tau = (low * (1 + slack)) ** 2
        if tau >= size or proved(tau):
            upper = up(math.sqrt(up(min(tau, size))))
            return ldexp_down(low, e), ldexp_up(upper, e), best
        rounds -= 1
        if rounds <= 0:
            slack *= 2
