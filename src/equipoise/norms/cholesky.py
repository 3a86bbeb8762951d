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
Only BLAS and LAPACK of torch are used. Off the CPU the factorisation is not trusted: the residual `M − L L*` is computed and
added instead.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from equipoise.core.precision import (
    deflate,
    frobenius,
    gamma,
    inflate,
    ldexp_down,
    ldexp_up,
    unit_roundoff,
)
from equipoise.norms.gram import gram, gram_bracket, scaled, small_side, wide
from equipoise.norms.lanczos import lanczos, random_start

#: below this many columns (of the smaller side) batched Gram iteration in float64 is faster than one factorisation
LARGE = 160
#: columns of one block of a factorisation: MKL factorises small matrices well, and large ones slowly on other processors
BLOCK = 48
#: rows summed in one go in float32: rounding grows with them, the number of calls with their inverse
PIECE = 128
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


def gram_lower(A: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Lower triangle of `A*A` (a symmetric rank-k update); what lies above the diagonal is not meaningful.

    The rows are summed in pieces of at most p, whose sums are added, so no product goes through more than `p + m/p` roundings.
    In float64 one piece will do; in float32 short pieces keep the error small.

    Args:
        A: a matrix `(m, n)` with `m ≥ n`.
        dtype: arithmetic of the products, float32 or float64; complex matrices use the complex type of that precision.

    >>> torch.tril(gram_lower(torch.tensor([[1.0, 2.0], [0.0, 1.0], [1.0, 0.0]]))).tolist()
    [[2.0, 0.0], [2.0, 5.0]]
    """
    if A.is_complex():
        return gram(A.to(dtype.to_complex()))
    n = A.shape[1]
    step = n if n < 128 else -(-n // 4)  # products of blocks leave three eighths of the square out
    G = torch.zeros(n, n, dtype=dtype, device=A.device)
    for piece in A.split(PIECE if dtype is torch.float32 else max(1, len(A))):
        rows = piece.to(dtype)
        for first in range(0, n, step):
            last = min(n, first + step)
            G[first:last, :last].addmm_(rows[:, first:last].mT, rows[:, :last])
    return G


def gram_lower_error(trace: float, shape: tuple[int, ...], dtype: torch.dtype, is_complex: bool = False) -> float:
    """A bound of `‖Ĝ − A*A‖₂` for `Ĝ = gram_lower(A, dtype)`, from its trace and the shape of A.

    `|Ĝ − A*A|_ij ≤ γ·|a_i|ᵀ|a_j|`, so the norm is at most `γ‖A‖_F²` (√2 more for complex numbers), with γ that of the longest
    chain of roundings, a cast of A included; and what underflow may lose.
    """
    rows, columns = shape
    piece = min(rows, PIECE) if dtype is torch.float32 else rows
    length = piece + -(-rows // max(1, piece)) + 4
    g = gamma(2 * rows + 8, dtype) * 1.4143 if is_complex else gamma(length, dtype)
    lost = 8.0 * columns * (2 * rows + columns) * torch.finfo(dtype).tiny * (1 + trace)
    return inflate(inflate(g * trace * (1 + 2 * g)) + lost)


def cholesky_gamma(n: int, dtype: torch.dtype) -> float:
    """`γ'` of the module's inequality for n×n matrices, real or complex."""
    g = gamma((4 if dtype.is_complex else 2) * (n + 4), dtype)
    return inflate(g / (1 - g))


def verification_loss(n: int, dtype: torch.dtype) -> float:
    """Relative loss of `below` at worst: a matrix is provable below τ if `λ_max ≤ τ·(1 − loss)`, roughly."""
    return n * cholesky_gamma(n, dtype) + 4 * unit_roundoff(dtype)


def expected_loss(G: Tensor, tau: float) -> float:
    """Relative loss of `below` that is to be expected of matrices like the Hermitian `G (n, n)`, in its precision."""
    diagonal = torch.diagonal(G).real.double()
    spread = _predicted_spread(G[None], diagonal[None], torch.tensor([tau], dtype=torch.float64, device=G.device))
    return float(spread) * cholesky_gamma(len(G), G.dtype) + 4 * unit_roundoff(G.dtype)


def below(G: Tensor, tau: Tensor, error: Tensor) -> Tensor:
    """Mask of the batch: True where `λ_max(H) ≤ tau` is *proved* for every Hermitian H with `‖H − G‖₂ ≤ error`.

    Args:
        G: Hermitian matrices `(F, n, n)`; only the lower triangles and the real diagonals are read.
        tau: float64 numbers `(F,)`.
        error: float64 numbers `(F,)`.

    Returns:
        A mask `(F,)`. False means «not proved», not «false».
    """
    n, dtype = G.shape[-1], G.dtype
    error = error + 4 * n * n * torch.finfo(dtype).tiny  # what products that underflow may lose
    diagonal = torch.diagonal(G, dim1=-2, dim2=-1).real.double()
    spread = _predicted_spread(G, diagonal, tau)
    if G.device.type != "cpu":
        return _by_residual(G, diagonal, tau, error, spread)

    done, needed = _attempt(G, diagonal, tau, error, spread)
    proved = done & (needed <= spread)
    again = (done & (needed > spread) & (spread < n)).nonzero()[:, 0]
    if len(again):  # predicted too low: once more with what was needed
        wider = (needed[again] * 1.1).clamp_max(1.01 * n)
        done, needed = _attempt(G[again], diagonal[again], tau[again], error[again], wider)
        proved[again] = done & (needed <= wider)
    return proved


def _predicted_spread(G: Tensor, diagonal: Tensor, tau: Tensor) -> Tensor:
    """ρ/s to be expected for `s·I − G` with s ≈ τ, from the size of G off the diagonal (`L_ij ≈ M_ij/√M_jj`); at most n.

    Every eighth matrix is measured, and of a large one every eighth row: those of one batch are alike.
    """
    n = G.shape[-1]
    worst = torch.full_like(tau, 1.01 * n)  # with a margin for diagonals that rounding made negative
    if n * cholesky_gamma(n, G.dtype) < NEGLIGIBLE or not len(tau):
        return worst

    step = 8 if n >= 256 else 1
    some = torch.arange(n, device=G.device)
    rows = G[::8, ::step].masked_fill(some >= some[::step, None], 0)
    entries = torch.view_as_real(rows) if rows.is_complex() else rows
    off = entries.flatten(1).square().sum(-1).double() * (n / rows.shape[1])

    s = tau.clamp_min(1e-300)
    share = (off / s[::8].square()).max()
    middle = (s - diagonal.mean(-1)).clamp_min(0.05 * s)
    largest = (1 - diagonal.amin(-1) / s).clamp(0, 2)
    expected = 1.65 * (largest.sqrt() + (share * s / middle).sqrt()).square()
    return torch.where(torch.isfinite(expected), torch.minimum(expected, worst), worst)


def _attempt(G: Tensor, diagonal: Tensor, tau: Tensor, error: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """`(done, needed)`: whether `s·I − G` has a factor, with s chosen for `ρ ≤ spread·s`, and a bound of ρ/s.

    `λ_max ≤ tau` is proved where it is done and needed ≤ spread.
    """
    s, usable = _shift(diagonal, tau, error, spread, G.dtype)
    M = -G
    shifted = torch.diagonal(M, dim1=-2, dim2=-1)
    shifted.add_(s[:, None].to(G.dtype))
    before = shifted.real.double()

    L, completed = factor(M)
    R = torch.diagonal(L, dim1=-2, dim2=-1).real.double()
    done = usable & completed & torch.isfinite(R).all(-1)

    g = cholesky_gamma(G.shape[-1], G.dtype)
    total = before.clamp_min(0).sum(-1) * (1 + g) * (1 + 1e-12)
    off = (total - R.square().sum(-1) * (1 - 1e-12)).clamp_min(0)
    rho = torch.minimum((R.amax(-1) + off.sqrt()).square() * (1 + 1e-12), total)
    return done, rho / s.double() * (1 + 1e-12)


def _shift(diagonal: Tensor, tau: Tensor, error: Tensor, spread: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`(s, usable)`: if `s·I − G` has a Cholesky factor with `ρ ≤ spread·s` and s is usable, `λ_max ≤ tau` follows."""
    n = diagonal.shape[-1]
    real = dtype.to_real() if dtype.is_complex else dtype
    loss = spread * cholesky_gamma(n, dtype) + 2 * unit_roundoff(dtype)
    # rounding may leave a diagonal entry a little below 0: tr(M) ≤ n·(s + τ/1000)
    allowed = tau - error - 1e-3 * loss * tau
    usable = (allowed > 0) & (diagonal.amin(-1) >= -1e-3 * tau)
    wanted = deflate(allowed / (1 + loss))
    s = torch.where(usable, wanted, torch.ones_like(wanted)).to(real)
    return torch.where(s.double() > wanted, torch.nextafter(s, torch.zeros_like(s)), s), usable


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
            M[:, last:, first:last] = torch.linalg.solve_triangular(corner.mH, column, upper=True, left=False)
    return M, completed


def _by_residual(G: Tensor, diagonal: Tensor, tau: Tensor, error: Tensor, spread: Tensor) -> Tensor:
    """`below` where the factorisation is not trusted: `‖M − L L*‖₂` is computed, and `|fl(L L*) − L L*| ≤ γ|L||L|*`."""
    n, u = G.shape[-1], unit_roundoff(G.dtype)
    s, usable = _shift(diagonal, tau, error, spread, G.dtype)
    lower = torch.tril(-G)
    M = lower + torch.tril(lower, -1).mH
    torch.diagonal(M, dim1=-2, dim2=-1).add_(s[:, None].to(G.dtype))
    L, info = torch.linalg.cholesky_ex(M)
    R = torch.diagonal(L, dim1=-2, dim2=-1).real
    largest = torch.minimum(inflate(R.double().amax(-1) + frobenius(torch.tril(L, -1))).square(), frobenius(L).square())
    residual = frobenius(torch.tril(M - L @ L.mH)) * 2**0.5 + inflate(gamma(4 * n + 8, G.dtype) * largest)
    completed = (info == 0) & torch.isfinite(R).all(-1)
    return usable & completed & (inflate(s.double() + residual + 4 * u * s.double() + error) <= tau)


def mirrored(G: Tensor) -> Tensor:
    """The Hermitian matrix of which G holds the lower triangle."""
    return torch.tril(G) + torch.tril(G, -1).mH


def is_below(G: Tensor, tau: float, error: float) -> bool:
    """`below` for one matrix `(n, n)`."""
    if not 0 < tau < math.inf:
        return False
    numbers = torch.tensor([[tau], [error]], dtype=torch.float64, device=G.device)
    return bool(below(G[None], numbers[0], numbers[1]))


def cholesky_bracket(
    W: Tensor, rtol: float, rounds: int = 6, start: Tensor | None = None, enough: float = 0.0
) -> tuple[float, float, Tensor]:
    """`(lower, upper, v)` of σ₁(W): Lanczos steps on `G = A*A` from below, one factorisation from above.

    Everything is read off one Gram matrix, which differs from the true one by at most `error` in norm: the lower end is
    `√(v*Gv/v*v − error)`, the upper end a proof that `G ⪯ upper²·I`. A failed proof means that the Ritz vector had not
    converged: Lanczos goes on from it, and after `rounds` failures the target is widened instead, at most up to ‖W‖_F.

    Args:
        W: one matrix, real or complex.
        rtol: relative gap to reach.
        rounds: how many failed proofs are answered by more Lanczos steps.
        start: a guess of the top vector of the smaller side.
        enough: an upper end that suffices; it is tried first, in float32 where the weight is and that may succeed.

    Returns:
        Both ends, and a vector near the top of the smaller side.
    """
    A = small_side(W)
    with single_thread(A.numel() * A.shape[1]):
        if enough > 0 and A.dtype is torch.float32 and A.device.type == "cpu" and start is not None:
            proof = _proof_in_single(A, start, enough)
            if proof is not None:
                return proof
        return _bracket_in_double(A, rtol, rounds, start, enough)


def _proof_in_single(A: Tensor, start: Tensor, enough: float) -> tuple[float, float, Tensor] | None:
    """`(lower, enough, v)` by a Gram matrix and a factorisation in float32; None where that did not succeed."""
    G = gram_lower(A, torch.float32)
    trace = float(torch.diagonal(G).sum(dtype=torch.float64))
    if not 1e-15 < trace < 1e15 or not 1e-7 < enough < 1e7:
        return None  # squares might leave the range of float32, or are not numbers
    error = gram_lower_error(trace, tuple(A.shape), torch.float32)
    tau = deflate(deflate(enough) ** 2)

    full = mirrored(G)
    v = full @ start.to(G)
    size = float(torch.linalg.vector_norm(v))
    if not 0 < size < math.inf:
        return None
    value = _rayleigh(full.double(), v.double(), trace) - error
    if value > tau * (1 - expected_loss(G, tau)) or not is_below(G, tau, error):
        return None
    return deflate(math.sqrt(max(0.0, value))), enough, v / size


def _bracket_in_double(
    A: Tensor, rtol: float, rounds: int, start: Tensor | None, enough: float
) -> tuple[float, float, Tensor]:
    """The bracket with the Gram matrix in float64; see `cholesky_bracket`."""
    e = 0
    G = gram_lower(A)
    trace = float(torch.diagonal(G).real.sum())
    if not 1e-15 < trace < 1e15:  # rescaling costs two passes: only where squares might leave the range of float32
        if not bool(A.any()):
            return 0.0, 0.0, A.new_ones(len(G))
        A, exponent = scaled(wide(A))
        e = int(exponent)
        G = gram_lower(A)
        trace = float(torch.diagonal(G).real.sum())
    n = len(G)
    error = gram_lower_error(trace, tuple(A.shape), torch.float64, A.is_complex())
    size = inflate(trace * (1 + gamma(n + 8, torch.float64)) + error)  # at least ‖A‖_F²

    tolerance = max(rtol, 4 * verification_loss(n, G.dtype))
    slack = tolerance * 0.9
    full = mirrored(G)
    # float32 steers well enough, unless it could not tell the top from its neighbours
    steering = full if tolerance < 1e-5 else full.to(torch.complex64 if G.is_complex() else torch.float32)
    v = random_start(n, steering) if start is None or not bool(start.any()) else start.to(steering)

    best = torch.zeros_like(v)
    longest = int(torch.diagonal(G).real.argmax())
    best[longest] = 1  # the longest column: a lower end that is never 0
    lower = float(G[longest, longest].real) - error

    if start is not None and enough > 0:
        v = steering @ v
        value = _rayleigh(full, wide(v), size) - error
        tau = deflate(deflate(ldexp_down(enough, -e)) ** 2)
        if value < tau and is_below(G, tau, error):
            return ldexp_down(deflate(math.sqrt(max(value, lower, 0.0))), e), enough, v

    while True:
        v = lanczos(steering.matmul, v, steps=100, converged=slack / 2)
        value = _rayleigh(full, wide(v), size) - error
        if value > lower:
            best, lower = v, value
        low = deflate(math.sqrt(max(lower, 0.0)))
        tau = (low * (1 + slack)) ** 2
        if tau >= size or is_below(G, tau, error):
            upper = inflate(math.sqrt(inflate(min(tau, size))))
            return ldexp_down(low, e), ldexp_up(upper, e), best
        rounds -= 1
        if rounds <= 0:
            slack *= 2


def _rayleigh(G: Tensor, v: Tensor, size: float) -> float:
    """`v*Gv/v*v` in float64, rounded down, for G with `‖G‖_F ≤ 2·size`: the rounding is at most `γ|v|ᵀ|G||v|/v*v ≤ γ‖G‖_F`."""
    v = v / v.abs().amax()
    g = gamma(4 * len(v) + 32, torch.float64)
    value = float(torch.vdot(v, G @ v).real) / float(torch.vdot(v, v).real)
    return deflate(value) - inflate(g * (2.0 * size + abs(value)))


def dense_bracket(W: Tensor, rtol: float) -> tuple[Tensor, Tensor, Tensor]:
    """`(lower, upper, v)` of a batch of matrices in float64: Gram iteration for small ones, Cholesky proofs for large ones."""
    if W.dim() == 2 and min(W.shape) >= LARGE:
        lower, upper, v = cholesky_bracket(W, rtol)
        return torch.tensor(lower, dtype=torch.float64), torch.tensor(upper, dtype=torch.float64), v
    if W.dim() > 2 and min(W.shape[-2:]) >= LARGE:
        flat = [dense_bracket(w, rtol) for w in W.reshape(-1, *W.shape[-2:])]
        low, high, v = (torch.stack([f[i] for f in flat]) for i in range(3))
        return low.reshape(W.shape[:-2]), high.reshape(W.shape[:-2]), v.reshape(*W.shape[:-2], -1)
    return gram_bracket(W, rtol)
