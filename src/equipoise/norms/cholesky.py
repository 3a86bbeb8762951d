"""Proofs by Cholesky factorisation that a Hermitian matrix lies below a multiple of the identity; norms of large matrices.

If the floating-point Cholesky factorisation of `M = s·I − G` runs to completion, the computed factor satisfies
`L L* = M + Δ` with `|Δ| ≤ γ'·|L||L|*` (Higham 2002, thm 10.3; Demmel 1989; Rump 2006), and `L L* ⪰ 0`. Hence

    λ_max(G) ≤ s + γ'·ρ + rounding of the diagonal,      ρ = ‖|L|‖₂²,
    ρ ≤ (max_j L_jj + (Σ_j M_jj/(1 − γ) − L_jj²)^½)²     and     ρ ≤ tr(M)/(1 − γ).

The last bound of ρ is known beforehand. The one before it is read off the diagonals of M and L (what is missing of a row's
length lies off the diagonal) and is some ten times smaller, which makes proofs in single precision possible. It has to be
predicted when s is chosen, and is checked afterwards.

The theorem holds for every order in which the inner products are summed, so it covers blocked factorisations: entry (i, j) of
the factor solves `l_ij·l_jj = m_ij − Σ_k l_ik·l_jk`, whether the sum runs in one loop or as a matrix product followed by a
triangular solve. The γ' used here is twice the textbook one, which covers multiplication by reciprocals of the diagonal.
Proofs run on the CPU, by BLAS and LAPACK of torch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from equipoise.core.precision import (
    deflate,
    gamma,
    inflate,
    ldexp_down,
    ldexp_up,
    rescaled,
    unit_roundoff,
)
from equipoise.norms.gram import gram, gram_bracket, small_side, wide

Result = tuple[float, float, Tensor]

#: below this many columns (of the smaller side) batched Gram iteration in float64 is faster than one factorisation
LARGE = 160
#: columns of one block of a factorisation: MKL factorises small matrices well, and large ones slowly on other processors
BLOCK = 64
#: rows summed in one go in float32: rounding grows with them, the number of calls with their inverse
PIECE = 256
#: multiplications from which a Gram matrix in float32 saves more than a second look at the top costs, and up to how many
#: columns its rounding leaves room for that
SINGLE_FROM, SINGLE_UP_TO = 2**24, 1024
#: up to this many multiplications threads cost more processor time than they save
SERIAL = 2**31
#: relative loss that is not worth a prediction
NEGLIGIBLE = 1e-6


@contextlib.contextmanager
def single_thread(work: float) -> Iterator[None]:
    """Inside, torch keeps to the calling thread unless the work is large: threads that wait for short steps burn the cores."""
    threads = torch.get_num_threads()
    if threads == 1 or work > SERIAL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def syrk(A: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """`A*A` by a symmetric rank-k update: products of blocks on and below the diagonal, and their mirror images.

    The rows are summed in pieces of at most p, whose sums are added, so no product goes through more than `p + m/p` roundings,
    in whatever order a piece is summed. In float64 one piece will do; in float32 short pieces keep the error small (and must
    not be added by `addmm_`, which may start a piece from the sum so far, and round that sum with every product).

    Args:
        A: a matrix `(m, n)` with `m ≥ n`.
        dtype: arithmetic of the products, float32 or float64; complex matrices use the complex type of that precision.

    >>> syrk(torch.tensor([[1.0, 2.0], [0.0, 1.0], [1.0, 0.0]])).tolist()
    [[2.0, 2.0], [2.0, 5.0]]
    """
    if A.is_complex():
        return gram(A.to(dtype.to_complex()))
    n = A.shape[1]
    # four rows of blocks leave three eighths of the square out
    step = n if n < 128 else -(-n // 4)
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.inner
    pieces = [A.to(dtype).mT]
    if dtype is torch.float32:
        multiply = _products()
        pieces = [P.contiguous() for P in pieces[0].split(PIECE, 1)]
    G = torch.empty(n, n, dtype=dtype)
    for first in range(0, n, step):
        last = min(n, first + step)
        block = functools.reduce(torch.add, (multiply(P[first:last], P[:last]) for P in pieces))
        G[first:last, :last], G[:last, first:last] = block, block.mT
    return G


@functools.cache
def _products() -> Callable[[Tensor, Tensor], Tensor]:
    """`X, Y ↦ XYᵀ` of contiguous matrices in float32: by oneDNN, twice as fast as MKL on some processors, where torch has it.

    With these variables set it may round more than full precision allows.
    """
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if linear is None or any("FPMATH" in name for name in os.environ):
        return torch.inner
    return lambda X, Y: linear(X, Y, None, "none", [], "")


def syrk_error(A: Tensor, G: Tensor) -> tuple[float, float]:
    """Bounds of `‖G − A*A‖₂` for `G = syrk(A)`, and of `‖A‖_F²`.

    `|G − A*A|_ij ≤ γ·|a_i|ᵀ|a_j|`, so the norm is at most `γ‖A‖_F²` (√2 more for complex numbers), with γ that of the longest
    chain of roundings, a cast of A included; and what underflow may lose.

    Args:
        A: the matrix.
        G: its Gram matrix, as `syrk` computed it.
    """
    rows, columns = A.shape
    trace = float(torch.diagonal(G).real.sum(dtype=torch.float64))
    piece = min(rows, PIECE) if G.dtype is torch.float32 else rows
    length = piece + -(-rows // piece) + 4
    g = gamma(2 * rows + 8, G.dtype) * 1.4143 if A.is_complex() else gamma(length, G.dtype)
    lost = 8.0 * columns * (2 * rows + columns) * torch.finfo(G.dtype).tiny * (1 + trace)
    error = inflate(inflate(g * trace * (1 + 2 * g)) + lost)
    return error, inflate(trace * (1 + gamma(columns + 8, torch.float64)) + error)


def cholesky_gamma(n: int, dtype: torch.dtype) -> float:
    """`γ'` of the module's inequality for n×n matrices, real or complex.

    Args:
        n: size of the matrices.
        dtype: precision of the factorisation.
    """
    g = gamma((4 if dtype.is_complex else 2) * (n + 4), dtype)
    return inflate(g / (1 - g))


def below(
    G: Tensor, tau: Tensor, error: Tensor | float = 0.0, dtype: torch.dtype | None = None
) -> Tensor:
    """Mask of the batch: True where `λ_max(H) ≤ tau` is *proved* for every Hermitian H with `‖H − G‖₂ ≤ error`.

    Args:
        G: Hermitian matrices `(F, n, n)` on the CPU; of their proofs only lower triangles and real diagonals count.
        tau: float64 numbers `(F,)`.
        error: float64 numbers `(F,)`, or one for all.
        dtype: precision of the factorisation, by default that of G.

    Returns:
        A mask `(F,)`. False means «not proved», not «false».
    """
    n = G.shape[-1]
    dtype = dtype or G.dtype
    tau = tau - error - 4 * n * n * torch.finfo(dtype).tiny  # what products that underflow may lose
    spread = _predicted_spread(G, tau, dtype)
    completed, needed = _attempt(G, tau, spread, dtype)
    proved = completed & (needed <= spread)
    again = (completed & ~proved & (spread < n)).nonzero()[:, 0]
    if len(again):  # predicted too low: once more with what was needed
        wider = (needed[again] * 1.1).clamp_max(1.01 * n)
        completed, needed = _attempt(G[again], tau[again], wider, dtype)
        proved[again] = completed & (needed <= wider)
    return proved


def _diagonal(G: Tensor) -> Tensor:
    """The real diagonals in float64, as numbers of their own."""
    return torch.diagonal(G, dim1=-2, dim2=-1).real.to(torch.float64, copy=True)


def _predicted_spread(G: Tensor, tau: Tensor, dtype: torch.dtype) -> Tensor:
    """ρ/s to be expected for `s·I − G` with s ≈ τ, from the size of G off the diagonal (`L_ij ≈ M_ij/√M_jj`); at most n.

    Every eighth matrix is measured, and of a large one every eighth row: those of one batch are alike.
    """
    n = G.shape[-1]
    # with a margin for diagonals that rounding made negative
    worst = torch.full_like(tau, 1.01 * n)
    if n * cholesky_gamma(n, dtype) < NEGLIGIBLE or not len(tau):
        return worst

    step = 8 if n >= 256 else 1
    diagonal = _diagonal(G)
    rows = G[::8, ::step]
    entries = torch.view_as_real(rows) if rows.is_complex() else rows
    squares = torch.linalg.vector_norm(entries.flatten(1), dim=1).double().square()
    off = (squares - diagonal[::8, ::step].square().sum(-1)).clamp_min(0) * (n / 2 / rows.shape[1])

    s = tau.clamp_min(1e-300)
    share = (off / s[::8].square()).max()
    middle = (s - diagonal.mean(-1)).clamp_min(0.05 * s)
    largest = (1 - diagonal.amin(-1) / s).clamp(0, 2)
    expected = 1.65 * (largest.sqrt() + (share * s / middle).sqrt()).square()
    return torch.where(torch.isfinite(expected), torch.minimum(expected, worst), worst)


def _attempt(G: Tensor, tau: Tensor, spread: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`(completed, needed)`: whether `s·I − G` has a factor, with s chosen for `ρ ≤ spread·s`, and a bound of ρ/s.

    `λ_max ≤ tau` is proved where it is completed and needed ≤ spread.
    """
    n = G.shape[-1]
    g = cholesky_gamma(n, dtype)
    M = torch.neg(G.to(dtype))
    loss = spread * g + 2 * unit_roundoff(dtype)
    wanted = deflate(tau * (1 - 1e-3 * loss) / (1 + loss))
    # rounding may leave diagonal entries of G below 0; those of s·I − G are off by at most u·1.5·s
    usable = (tau > 0) & (_diagonal(M).amax(-1) <= 0.5 * wanted)
    s = torch.where(usable, wanted, torch.ones_like(wanted)).to(dtype.to_real())
    s = torch.where(s.double() > wanted, torch.nextafter(s, torch.zeros_like(s)), s)
    torch.diagonal(M, dim1=-2, dim2=-1).add_(s[:, None])
    before = _diagonal(M)  # the factor overwrites M

    L, completed = factor(M)
    R = _diagonal(L)
    total = before.clamp_min(0).sum(-1) * (1 + g) * (1 + 1e-12)
    off = (total - R.square().sum(-1) * (1 - 1e-12)).clamp_min(0)
    rho = torch.minimum((R.amax(-1) + off.sqrt()).square() * (1 + 1e-12), total)
    return usable & completed & torch.isfinite(R).all(-1), rho / s.double() * (1 + 1e-12)


def factor(M: Tensor) -> tuple[Tensor, Tensor]:
    """`(L, completed)`: Cholesky factors of a batch on the CPU, by columns of blocks; M may be overwritten.

    Only lower triangles are read; what lies above the diagonal of L is not meaningful. Where a factorisation did not run to
    completion, L is not meaningful either.
    """
    n = M.shape[-1]
    if n <= BLOCK + BLOCK // 2:
        L, info = torch.linalg.cholesky_ex(M)
        return L, info == 0
    completed = torch.ones(len(M), dtype=torch.bool)
    for first in range(0, n, BLOCK):
        last = min(n, first + BLOCK)
        if first:
            M[:, first:, first:last] -= M[:, first:, :first] @ M[:, first:last, :first].mH
        corner, info = torch.linalg.cholesky_ex(M[:, first:last, first:last])
        M[:, first:last, first:last] = corner
        completed &= info == 0
        if last < n:
            column = M[:, last:, first:last]
            M[:, last:, first:last] = torch.linalg.solve_triangular(
                corner.mH, column, upper=True, left=False
            )
    return M, completed


def is_below(G: Tensor, tau: float, error: float) -> bool:
    """`below` for one matrix `(n, n)`.

    Args:
        G: a Hermitian matrix.
        tau: the target.
        error: norm of what G may be off by.
    """
    return 0 < tau < math.inf and bool(
        below(G[None], torch.tensor([tau], dtype=torch.float64), error)
    )


# --- Lanczos steps: the top of a Hermitian operator from below, as an estimate ---------------------------------------------

Operator = Callable[[Tensor], Tensor]


def random_start(n: int, like: Tensor) -> Tensor:
    """A fixed Gaussian start vector of length n (the same every time, so that results are reproducible).

    Args:
        n: its length.
        like: a tensor of the type and device that it gets.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(like.device, like.dtype)


def lanczos(
    multiply: Operator,
    start: Tensor,
    steps: int,
    converged: float,
    enough: float = math.inf,
    every: int = 8,
    count: int = 1,
) -> Tensor:
    """Ritz vectors of a Hermitian operator on flat vectors as rows, by orthogonalised steps; that of the largest value first.

    Args:
        multiply: the operator.
        start: the first vector.
        steps: how many steps at most.
        converged: stop early, once so many steps have raised the sum of Ritz values by no more than this share.
        enough: a sum that suffices.
        every: how many steps; Ritz values are computed after as many.
        count: how many of the largest are summed.
    """
    steps = min(steps, start.numel())
    Q = start.new_zeros(steps, start.numel())
    diagonal: list[float] = []  # of a tridiagonal T with `G Qᵀ ≈ Qᵀ T`, and what lies beside it
    beside: list[float] = [0.0]
    value = -math.inf
    q = start / start.abs().amax()  # squares of a small vector would vanish
    q = q / torch.linalg.vector_norm(q)
    for j in range(steps):
        Q[j] = q
        basis = Q[: j + 1]
        w = multiply(q)
        diagonal.append(float(torch.vdot(q, w).real))
        w = torch.sub(w, q, alpha=diagonal[j]).sub_(Q[j - 1], alpha=beside[j])
        # rounding brings back what was taken out
        w = torch.addmv(w, basis.mT, basis.conj() @ w, alpha=-1)
        beside.append(float(torch.linalg.vector_norm(w)))
        breakdown = 8 * torch.finfo(w.dtype).eps * max(map(abs, diagonal))
        last = j + 1 == steps or beside[-1] <= breakdown
        if last or (j + 1) % every == 0:
            T = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
            T += torch.diag(torch.tensor(beside[1:-1], dtype=torch.float64), -1)
            before, value = value, float(torch.linalg.eigvalsh(T)[-count:].sum())
            if last or value >= enough or value - before <= converged * value:
                break
        q = w / beside[-1]
    vectors = torch.linalg.eigh(T)[1]
    return vectors.flip(1).mT.to(Q) @ basis


# --- brackets of matrices ---------------------------------------------------------------------------------------------------


def cholesky_bracket(W: Tensor, rtol: float) -> Result:
    """`(lower, upper, v)` of σ₁(W): Lanczos steps on `G = A*A` from below, one factorisation from above.

    Args:
        W: one matrix, real or complex; large real ones are tried in float32 first.
        rtol: relative gap to reach.

    Returns:
        Both ends, and a vector near the top of the smaller side.
    """
    A, e = rescaled(small_side(W.cpu()))
    if not bool(A.sum()) and not bool(A.any()):  # a sum is the faster of the two
        return 0.0, 0.0, A.new_ones(A.shape[1])
    n, work = A.shape[1], A.numel() * A.shape[1]
    with single_thread(work):
        result = None
        if work >= SINGLE_FROM and n < SINGLE_UP_TO and rtol >= 1e-5 and not A.is_complex():
            G = syrk(A, torch.float32)
            result = _split_bracket(A, G, *syrk_error(A, G), rtol, random_start(n, G))
        if result is None:
            G = syrk(A)
            result = bracket_of_gram(G, *syrk_error(A, G), rtol)
        assert result is not None
        lower, upper, v = result
    return ldexp_down(lower, e), ldexp_up(upper, e), v


def bracket_of_gram(
    G: Tensor,
    error: float,
    size: float,
    rtol: float,
    A: Tensor | None = None,
    start: Tensor | None = None,
    enough: float = 0.0,
) -> Result | None:
    """`(lower, upper, v)` of σ₁(A) from its Gram matrix.

    The lower end is a Rayleigh quotient, the upper end a proof that `G ⪯ upper²·I`. A failed proof means that the Ritz
    vector had not converged: Lanczos goes on from it, and after six failures the target is widened instead, at most up to ‖A‖_F.
    None where G is in float32 and its rounding is in the way.

    Args:
        G: the Gram matrix, not zero.
        error: norm of what G may be off by.
        size: at least `‖A‖_F²`.
        rtol: relative gap to reach.
        A: the matrix, if G is in float32; lower ends are read off G otherwise.
        start: a guess of the top vector.
        enough: an upper end that suffices; given with a start, it is tried first.
    """
    n = len(G)
    steering = G if G.dtype is torch.float32 else G / torch.diagonal(G).real.amax()
    # float32 steers well enough, unless it could not tell the top from its neighbours
    if rtol >= 1e-5:
        steering = steering.to(torch.complex64 if G.is_complex() else torch.float32)
    v = (
        random_start(n, steering)
        if start is None or not bool(start.any())
        else steering @ start.to(steering)
    )

    def rayleigh(v: Tensor) -> float:
        w = wide(v) / torch.linalg.vector_norm(wide(v))
        rounding = 4 * gamma(8 * n + 32, torch.float64) * size
        return deflate(
            math.sqrt(max(0.0, float(torch.vdot(w, wide(G) @ w).real) - rounding - error))
        )

    best = torch.zeros_like(v)
    longest = int(torch.diagonal(G).real.argmax())
    best[longest] = 1  # the longest column: a lower end that is never 0
    lower = deflate(math.sqrt(max(0.0, float(G[longest, longest].real) - error)))

    if enough > 0 and start is not None:
        value = max(lower, rayleigh(v))
        tau = deflate(deflate(enough) ** 2)
        # a bound with a margin lasts for more steps
        aim = tau if value**2 > 0.8 * tau else value * math.sqrt(tau)
        if value**2 < aim and is_below(G, aim, error):
            return value, enough if aim == tau else inflate(math.sqrt(inflate(aim))), v

    # rounding of float32 leaves room for a proof of loose bounds only
    coarse = A is not None and 4 * error > rtol * max(lower, rayleigh(v)) ** 2
    loss = n * cholesky_gamma(n, torch.float64)  # of a proof in float64, at worst
    slack = 0.9 * max(rtol, 5 * loss)
    for attempt in itertools.count(1):
        if A is not None and (coarse or attempt > 2):
            return _split_bracket(A, G, error, size, rtol, v)
        v = lanczos(steering.matmul, v, steps=100, converged=slack / 2)[0]
        value = rayleigh(v)
        if value > lower:
            best, lower = v, value
        tau = max(lower**2, error) * (1 + slack) ** 2
        if tau >= size or is_below(G, tau, error):
            return lower, inflate(math.sqrt(inflate(min(tau, size)))), best
        if attempt >= 6:
            slack *= 2
    return None


def _split_bracket(
    A: Tensor, G: Tensor, error: float, size: float, rtol: float, v: Tensor
) -> Result | None:
    """`(lower, upper, v)` of σ₁(A) from its Gram matrix in float32, of which only a bound off the top is used.

    Let the rows of Q be near the top of a real A, `x = Qᵀy + r` with `Qr = 0`, and Z any matrix. Then, with `H = QAᵀAQᵀ`,

        ‖Ax‖² = yᵀHy + 2yᵀRr + ‖Ar‖²,      R = QAᵀA − ZQ,

    so σ₁² ≤ τ if `‖Ar‖² ≤ β‖r‖²` and `H + RRᵀ/(τ − β) ⪯ τQQᵀ`. The first is proved by a factorisation in float32 of G
    without its top, with room for all rounding; H and R are computed in float64.

    Args:
        A: the matrix.
        G: its Gram matrix in float32, to be overwritten.
        error: norm of what G may be off by.
        size: at least `‖A‖_F²`.
        rtol: relative gap to reach.
        v: where Lanczos steps start.
    """
    vectors = lanczos(G.matmul, v, steps=100, converged=3e-4, every=4, count=4)[:4]
    single = torch.linalg.qr(vectors.double().mT)[0].mT.float().contiguous()
    Q = single.double()
    k, n = Q.shape
    H, B = Q.new_zeros(k, k), torch.zeros_like(Q)
    for piece in A.split(max(1, 2**17 // n)):  # copies that stay in the cache
        A64 = piece.double()
        Y = Q @ A64.mT
        H.addmm_(Y, Y.mT)
        B.addmm_(Y, A64)
    R = torch.addmm(B, B @ Q.mT, Q, alpha=-1)
    values = H.diagonal()
    top, last = float(values[0]), float(values[-1])
    beta = top - 3 / 8 * (top - last)
    # ‖QQᵀ − I‖, and what the products in float64 may be off by: ‖Q‖_F² ≤ 2k
    g = gamma(2 * sum(A.shape) + 4 * k, torch.float64)
    defect = float(torch.linalg.matrix_norm(Q @ Q.mT - torch.eye(k, dtype=Q.dtype))) + 2 * k * g
    lost = 16 * k * g * size
    square = deflate(deflate(top - lost) / (1 + defect))
    tau = square * (1 + rtol)
    if not (defect < 1e-3 and beta + error + lost < tau and last + error < beta):
        return None

    room = deflate(tau - beta)
    length = float(torch.linalg.matrix_norm(R))
    lost += ((length + lost) ** 2 - length**2 + 4 * g * length**2) / room
    S = H + R @ R.mT / room
    X = torch.linalg.eigh(S)[1]
    # by sums of rows, of which what is lost may raise one by √k ≤ 2 times its norm
    largest = float((X.mT @ S @ X).abs().sum(1).amax()) * (1 + 1e-12)
    defect += 2 * float(torch.linalg.matrix_norm(X.mT @ X - torch.eye(k, dtype=Q.dtype)))
    if inflate(inflate(largest + 2 * lost) * (1 + 2 * defect)) > tau:
        return None
    rest = G.addmm_((single * values[:, None].float()).mT, single, alpha=-1)
    rounding = 4 * gamma(k + 8, torch.float32) * size + k * n * torch.finfo(torch.float32).tiny
    if is_below(rest, beta, inflate(error + rounding)):
        return deflate(math.sqrt(square)), inflate(math.sqrt(tau)), single[0]
    return None


def dense_bracket(W: Tensor, rtol: float) -> tuple[Tensor, Tensor, Tensor]:
    """`(lower, upper, v)` of a batch of matrices in float64: Gram iteration for small ones, Cholesky proofs for large ones.

    Args:
        W: matrices `(..., m, n)`.
        rtol: relative gap to reach.
    """
    if min(W.shape[-2:]) < LARGE:
        return gram_bracket(W, rtol)
    results = [cholesky_bracket(w, rtol) for w in W.reshape(-1, *W.shape[-2:])]
    lower, upper = torch.tensor([x[:2] for x in results], dtype=torch.float64).mT
    v = torch.stack([x[2] for x in results])
    shape = W.shape[:-2]
    return lower.reshape(shape), upper.reshape(shape), v.reshape(*shape, -1)
