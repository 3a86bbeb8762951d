"""Proof that a Hermitian matrix lies below a multiple of the identity, in floating point.

If the floating-point Cholesky factorisation of `M = s·I − G` runs to completion, the computed factor satisfies
`R*R = M + Δ` with `|Δ| ≤ γ'·|R|*|R|` (Higham 2002, thm 10.3; Demmel 1989; Rump 2006), and `R*R ⪰ 0`. Hence

    λ_max(G) ≤ s + γ'·ρ + rounding of the diagonal,      ρ = ‖|R|‖₂²,
    ρ ≤ (max_j R_jj + (Σ_j M_jj/(1 − γ) − R_jj²)^½)²     and     ρ ≤ tr(M)/(1 − γ).

The last bound of ρ is known beforehand; the one before it, read off the diagonals of M and R (what is missing of a column's
length lies off the diagonal), is some ten times smaller, which makes proofs in single precision possible. It has to be guessed
when s is chosen and is checked afterwards. The constant γ' used is √2 times the textbook one or more, which leaves room for
blocked factorisations that multiply by reciprocals. Off the CPU the factorisation is not trusted: the residual `M − R*R` is
computed and added instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from scipy.linalg import get_lapack_funcs
from threadpoolctl import LibController, ThreadpoolController
from torch import Tensor

from equipoise.core.precision import deflate, frobenius, gamma, inflate, unit_roundoff

#: from this many columns SciPy's LAPACK, matrix by matrix, is faster than torch's batch (which is a loop as well)
LAPACK_FROM = 24
#: bytes of matrices held at once: they should stay in the cache between being copied and being factorised
CHUNK_BYTES = 8 * 2**20
#: the same on other devices, where every batch waits for the one before
DEVICE_BYTES = 2**28
#: relative loss that is not worth a guess
FREE = 1e-6
#: up to this many multiplications SciPy's BLAS works on one thread
SERIAL = 2**28
#: and up to this many torch as well, where both work by turns
ALONE = 2**33


def chunk_bytes(device: torch.device) -> int:
    """Bytes of matrices worth holding at once on a device."""
    return CHUNK_BYTES if device.type == "cpu" else DEVICE_BYTES


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


@cache
def _blas() -> list[LibController]:
    return [library for library in _controller().lib_controllers if library.user_api == "blas"]


def serial(work: int) -> contextlib.AbstractContextManager[object]:
    """Inside, SciPy's BLAS keeps to the calling thread, unless the work is large.

    Its other threads would wait for more in a loop, on the very cores on which torch goes on with the training.
    """
    if work > SERIAL or all(
        library.num_threads == 1 for library in _blas()
    ):  # asking is fifty times as fast as limiting
        return contextlib.nullcontext()
    return _controller().limit(limits=1, user_api="blas")


@contextlib.contextmanager
def one_thread(work: int) -> Iterator[None]:
    """Inside, torch and SciPy's BLAS keep to the calling thread, unless the work is large: many short steps of both by turns
    take several times as long where the threads of one wait for work on the cores that the other uses."""
    threads = torch.get_num_threads()
    if threads == 1 or work > ALONE:
        yield
        return
    torch.set_num_threads(1)
    try:
        with serial(0):
            yield
    finally:
        torch.set_num_threads(threads)


def cholesky_gamma(n: int, dtype: torch.dtype) -> float:
    """`γ'` of the module's inequality for n×n matrices, real or complex."""
    g = gamma((4 if dtype.is_complex else 2) * (n + 4), dtype)
    return inflate(g / (1 - g))


def verification_loss(n: int, dtype: torch.dtype) -> float:
    """Relative loss of `below` at worst: a matrix is provable below τ if `λ_max ≤ τ·(1 − loss)`, roughly."""
    return n * cholesky_gamma(n, dtype) + 4 * unit_roundoff(dtype)


def expected_loss(G: Tensor, tau: float) -> float:
    """Relative loss of `below` that is to be expected of matrices like the Hermitian `G (n, n)` in its precision."""
    diagonal = torch.diagonal(G).real.double()
    spread = _guess(G[None], diagonal[None], torch.tensor([tau], dtype=torch.float64, device=G.device))
    return float(spread) * cholesky_gamma(len(G), G.dtype) + 4 * unit_roundoff(G.dtype)


def below(G: Tensor, tau: Tensor, error: Tensor) -> Tensor:
    """Mask of the batch: True where `λ_max(H) ≤ tau` is *proved* for every Hermitian H with `‖H − G‖₂ ≤ error`.

    Only the lower triangle and the real diagonal of `G (F, n, n)` are read; `tau` and `error` are float64 of shape
    (F,). False means «not proved», not «false».
    """
    return below_formed(lambda rows: -G[rows], G.shape[-1], tau, error, G.dtype)


def below_parts(X: Tensor, Y: Tensor, tau: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """`below` for `G = X + iY` given as real matrices, in a complex `dtype` that holds them, with fewer passes over memory."""

    def negative(rows: slice | Tensor) -> Tensor:
        if X.device.type != "cpu":
            return torch.complex(X[rows], Y[rows]).to(dtype).neg_()
        M = torch.empty(X[rows].shape, dtype=dtype)
        for part, into in zip((X, Y), (M.numpy().real, M.numpy().imag), strict=True):
            np.negative(part[rows].numpy(), out=into)
        return M

    return below_formed(negative, X.shape[-1], tau, error, dtype)


def below_formed(
    negative: Callable[[slice | Tensor], Tensor], n: int, tau: Tensor, error: Tensor, dtype: torch.dtype
) -> Tensor:
    """`below` where `negative(rows)` forms −G of some rows, to be overwritten: chunk by chunk, in the cache."""
    count = len(tau)
    one = n * n * torch.finfo(dtype).bits // (4 if dtype.is_complex else 8)
    room = chunk_bytes(tau.device)
    per = max(1, room // one, min(16, 8 * room // one))  # forming many at once is cheaper, where that is one product
    proved = torch.zeros(count, dtype=torch.bool, device=tau.device)
    error = error + 4 * n * n * torch.finfo(dtype).tiny  # what products that underflow may lose
    for first in range(0, count, per):
        rows = slice(first, first + per)
        M = _ready(negative(rows))
        diagonal = -_diagonal(M)
        spread = _guess(M, diagonal, tau[rows])
        done, needed = _attempt(M, diagonal, tau[rows], error[rows], spread)
        proved[rows] = done & (needed <= spread)
        if M.device.type != "cpu":  # nothing is guessed there, and nothing asked in the loop
            continue
        again = (done & (needed > spread) & (spread < n)).nonzero()[:, 0]
        if len(again):  # guessed too low: once more with what was needed
            wider, which = (needed[again] * 1.1).clamp_max(1.01 * n), again + first
            done, needed = _attempt(_ready(negative(which)), diagonal[again], tau[which], error[which], wider)
            proved[which] = done & (needed <= wider)
    return proved


def _ready(M: Tensor) -> Tensor:
    return M.resolve_conj().resolve_neg().contiguous()


def _diagonal(M: Tensor) -> Tensor:
    """The real diagonals in float64, as numbers of their own."""
    return torch.diagonal(M, dim1=-2, dim2=-1).real.to(torch.float64, copy=True)


def _guess(M: Tensor, diagonal: Tensor, tau: Tensor) -> Tensor:
    """ρ/s to be expected for `s·I − G` with s ≈ τ, from the size of G off the diagonal: `R_ij ≈ M_ij/√M_ii`; at most n.

    Every eighth matrix is measured, and of a large one every eighth row: those of one batch are alike.
    """
    n = M.shape[-1]
    worst = torch.full_like(tau, 1.01 * n)  # a little room for diagonals that rounding made negative
    if n * cholesky_gamma(n, M.dtype) < FREE or not len(tau):
        return worst
    step = 8 if n >= 256 else 1
    rows, some = M[::8, ::step], torch.arange(n, device=M.device)
    if M.is_complex():
        sizes = torch.view_as_real(rows).square().flatten(1)
        off = (sizes.sum(-1).double() - diagonal[::8, ::step].square().sum(-1)).clamp_min(0) / 2
    else:  # real ones may lack their upper half
        off = rows.masked_fill(some >= some[::step, None], 0).square().flatten(1).sum(-1).double()
    off = off * (n / rows.shape[1])
    s = tau.clamp_min(1e-300)
    share = (off / s[::8].square()).max()
    middle = (s - diagonal.mean(-1)).clamp_min(0.05 * s)
    largest = (1 - diagonal.amin(-1) / s).clamp(0, 2)
    expected = 1.65 * (largest.sqrt() + (share * s / middle).sqrt()).square()
    return torch.where(torch.isfinite(expected), torch.minimum(expected, worst), worst)


def _attempt(M: Tensor, diagonal: Tensor, tau: Tensor, error: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """`(done, needed)` for `M = −G`: whether `s·I − G` has a factor with s chosen for `ρ ≤ spread·s`, and ρ/s; overwrites M.

    `λ_max ≤ tau` is proved where it is done and needed ≤ spread.
    """
    n, dtype = M.shape[-1], M.dtype
    s, usable = _shift(diagonal, tau, error, spread, dtype)
    shifted = torch.diagonal(M, dim1=-2, dim2=-1)
    shifted.add_(s[:, None].to(dtype))
    before = _diagonal(M)
    if M.device.type != "cpu":
        return by_residual(M, s, usable, tau, error), torch.zeros_like(tau)
    if n >= LAPACK_FROM:
        done, R = factorised(M, usable), shifted.real
    else:
        factor, info = torch.linalg.cholesky_ex(M)
        R = torch.diagonal(factor, dim1=-2, dim2=-1).real
        done = info == 0
    R = R.double()
    done = usable & done & torch.isfinite(R).all(-1)
    return done, _largest_square(before, R, cholesky_gamma(n, dtype)) / s.double() * (1 + 1e-12)


def _largest_square(before: Tensor, R: Tensor, g: float) -> Tensor:
    """`ρ ≥ ‖|R|‖₂²` from the diagonals of M and of its factor, by the smaller of the two forms."""
    total = before.clamp_min(0).sum(-1) * (1 + g) * (1 + 1e-12)
    off = (total - R.square().sum(-1) * (1 - 1e-12)).clamp_min(0)
    return torch.minimum((R.amax(-1) + off.sqrt()).square() * (1 + 1e-12), total)


def _shift(diagonal: Tensor, tau: Tensor, error: Tensor, spread: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`(s, usable)`: if `s·I − G` has a Cholesky factor with `ρ ≤ spread·s` and s is usable, `λ_max ≤ tau` follows."""
    n, narrow = diagonal.shape[-1], torch.float32 if torch.finfo(dtype).bits == 32 else torch.float64
    loss = spread * cholesky_gamma(n, dtype) + 2 * unit_roundoff(dtype)
    # rounding may leave a diagonal entry a little below 0: tr(M) ≤ n·(s + τ/1000)
    room = tau - error - 1e-3 * loss * tau
    usable = (room > 0) & (diagonal.amin(-1) >= -1e-3 * tau)
    wanted = deflate(room / (1 + loss))
    s = torch.where(usable, wanted, torch.ones_like(wanted)).to(narrow)
    return torch.where(s.double() > wanted, torch.nextafter(s, torch.zeros_like(s)), s), usable


def by_residual(M: Tensor, s: Tensor, usable: Tensor, tau: Tensor, error: Tensor) -> Tensor:
    """The proof where the factorisation is not trusted: `‖M − R*R‖₂` is computed, and `|fl(R*R) − R*R| ≤ γ|R|*|R|`."""
    n, u = M.shape[-1], unit_roundoff(M.dtype)
    R, info = torch.linalg.cholesky_ex(M)
    diagonal = torch.diagonal(R, dim1=-2, dim2=-1).real
    largest = torch.minimum(
        inflate(diagonal.double().amax(-1) + frobenius(torch.tril(R, -1))).square(), frobenius(R).square()
    )
    residual = frobenius(torch.tril(M - R @ R.mH)) * 2**0.5 + inflate(gamma(4 * n + 8, M.dtype) * largest)
    completed = (info == 0) & torch.isfinite(diagonal).all(-1)
    return usable & completed & (inflate(s.double() + residual + 4 * u * s.double() + error) <= tau)


def factorised(M: Tensor, wanted: Tensor) -> Tensor:
    """Mask of the wanted matrices of a batch on the CPU whose Cholesky factorisation runs to completion; overwrites M.

    Only the lower triangles are read, and replaced by the factor. LAPACK sees the transposed matrix, which is positive
    definite as well, so nothing is copied.
    """
    matrices = M.numpy()
    (potrf,) = get_lapack_funcs(("potrf",), (matrices[0],))
    with serial(matrices.shape[-1] ** 3):
        done = [
            want and potrf(matrix.T, lower=0, clean=0, overwrite_a=1)[1] == 0
            for matrix, want in zip(matrices, wanted.tolist(), strict=True)
        ]
    return torch.tensor(done)


def part_norm(X: Tensor, Y: Tensor) -> Tensor:
    """`‖X + iY‖_F` in float64, rounded up."""
    return inflate((frobenius(X).square() + frobenius(Y).square()).sqrt())


def below_by_squaring(X: Tensor, Y: Tensor, tau: Tensor, squarings: int = 5) -> tuple[Tensor, Tensor]:
    """`(proved, low)` for Hermitian `G = X + iY`: is `λ_max ≤ tau` proved, and a lower estimate of λ_max.

    `σ₁(A)² ≤ ‖fl(A*A)‖_F + γ‖A‖_F²` from iterate to iterate as in `gram_bracket`, on `G/2^e` with 2^e ≈ tau so that powers stay
    near 1; `‖A*A‖_F/‖A‖_F ≤ σ₁(A)` steers.
    """
    c, device = X.shape[-1], X.device
    proved = torch.zeros(len(X), dtype=torch.bool, device=device)
    low = torch.zeros(len(X), dtype=torch.float64, device=device)
    open_ = torch.arange(len(X), device=device)
    g = 1.4143 * gamma(2 * c + 4, X.dtype)
    lost = 16.0 * c * c * float(torch.finfo(X.dtype).tiny)
    scale = torch.exp2(tau.clamp_min(1e-30).log2().floor())
    X, Y = (part / scale.to(X.dtype)[:, None, None] for part in (X, Y))  # a power of two: exact
    size, limit = part_norm(X, Y), tau / scale
    power = 1.0
    for _ in range(squarings):
        cross = X.mT @ Y
        X, Y = torch.baddbmm(X.mT @ X, Y.mT, Y), cross - cross.mT
        limit = torch.where(limit > 0, limit.square() * (1 - 1e-14) - inflate(g * size.square()) - lost, limit)
        new = part_norm(X, Y)
        estimate = (new / size.clamp_min(1e-300)).pow(1 / power) * scale[open_] * (1 - 1e-6)
        low[open_] = torch.maximum(low[open_], estimate.nan_to_num(nan=0.0, posinf=0.0))
        done = new <= limit
        proved[open_[done]] = True
        stay = ~done & (low[open_] <= tau[open_]) & torch.isfinite(new)
        X, Y, limit, size, open_ = X[stay], Y[stay], limit[stay], new[stay], open_[stay]
        power *= 2
        if not len(open_):
            break
    return proved, low
