"""Proof that a Hermitian matrix lies below a multiple of the identity, in floating point.

If the floating-point Cholesky factorisation of `M = s·I − G` runs to completion, the computed factor satisfies
`R*R = M + Δ` with `‖Δ‖₂ ≤ γ'·tr(M)` (Higham 2002, thm 10.3; Demmel 1989; Rump 2006), and `R*R ⪰ 0`. Hence

    λ_max(G) ≤ s + γ'·tr(M) + rounding of the diagonal.

The constant used is twice the textbook one, which leaves room for blocked factorisations that multiply by reciprocals.
Off the CPU the factorisation is not trusted: the residual `M − R*R` is computed and added instead.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import get_lapack_funcs
from torch import Tensor

from equipoise.core.precision import down, frobenius, gamma, unit_roundoff, up

#: from this many columns, by the bits of a number, SciPy's LAPACK, matrix by matrix, is faster than torch's batch
LAPACK_FROM = {32: 96, 64: 48}


def cholesky_gamma(n: int, dtype: torch.dtype) -> float:
    """`γ'` of the module's inequality for n×n matrices, real or complex."""
    g = gamma((4 if dtype.is_complex else 2) * (n + 4), dtype)
    return up(g / (1 - g))


def verification_loss(n: int, dtype: torch.dtype) -> float:
    """Relative loss of `below`: a matrix is provable below τ only if `λ_max ≤ τ·(1 − loss)`, roughly."""
    return n * cholesky_gamma(n, dtype) + 4 * unit_roundoff(dtype)


def below(G: Tensor, tau: Tensor, error: Tensor) -> Tensor:
    """Mask of the batch: True where `λ_max(H) ≤ tau` is *proved* for every Hermitian H with `‖H − G‖₂ ≤ error`.

    Only the lower triangle and the real diagonal of `G (F, n, n)` are read; `tau` and `error` are float64 of shape
    (F,). False means «not proved», not «false».
    """
    diagonal = torch.diagonal(G, dim1=-2, dim2=-1).real.double()
    s, usable = _shift(diagonal, tau, error, G.dtype)
    M = -G
    return _positive(M, s, usable, tau, error)


def below_parts(X: Tensor, Y: Tensor, tau: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """`below` for `G = X + iY` given as real matrices, in a complex `dtype` that holds them, with fewer passes over memory."""
    s, usable = _shift(torch.diagonal(X, dim1=-2, dim2=-1).double(), tau, error, dtype)
    if X.device.type == "cpu":
        M = torch.empty(X.shape, dtype=dtype)
        for part, into in zip((X, Y), (M.numpy().real, M.numpy().imag), strict=True):
            np.negative(part.numpy(), out=into)
    else:
        M = torch.complex(X, Y).to(dtype).neg_()
    return _positive(M, s, usable, tau, error)


def _shift(diagonal: Tensor, tau: Tensor, error: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`(s, usable)`: if `s·I − G` has a Cholesky factor and s is usable, `λ_max ≤ tau` follows."""
    n, narrow = diagonal.shape[-1], torch.float32 if torch.finfo(dtype).bits == 32 else torch.float64
    loss = n * cholesky_gamma(n, dtype) + 2 * unit_roundoff(dtype)
    # rounding may leave a diagonal entry a little below 0: tr(M) ≤ n·(s + τ/1000)
    room = tau - error - 1e-3 * loss * tau
    usable = (room > 0) & (diagonal.amin(-1) >= -1e-3 * tau)
    wanted = down(room / (1 + loss))
    s = torch.where(usable, wanted, torch.ones_like(wanted)).to(narrow)
    return torch.where(s.double() > wanted, torch.nextafter(s, torch.zeros_like(s)), s), usable


def _positive(M: Tensor, s: Tensor, usable: Tensor, tau: Tensor, error: Tensor) -> Tensor:
    """Where `M = −G`, shifted by s, is proved positive definite; overwrites M."""
    n, u = M.shape[-1], unit_roundoff(M.dtype)
    torch.diagonal(M, dim1=-2, dim2=-1).add_(s[:, None].to(M.dtype))
    if M.device.type == "cpu":
        large = n >= LAPACK_FROM[torch.finfo(M.dtype).bits]
        return usable & (factorised(M, usable) if large else _completed(*torch.linalg.cholesky_ex(M)))
    R, info = torch.linalg.cholesky_ex(M)
    residual = frobenius(torch.tril(M - R @ R.mH)) * 2**0.5 + gamma(2 * n + 4, M.dtype) * frobenius(R).square()
    return usable & _completed(R, info) & (up(s.double() + residual + 4 * u * s.double() + error) <= tau)


def _completed(R: Tensor, info: Tensor) -> Tensor:
    return (info == 0) & torch.isfinite(torch.diagonal(R, dim1=-2, dim2=-1).real).all(-1)


def factorised(M: Tensor, wanted: Tensor) -> Tensor:
    """Mask of the wanted matrices of a batch on the CPU whose Cholesky factorisation runs to completion; overwrites M.

    Only the lower triangles are read. LAPACK sees the transposed matrix, which is positive definite as well, so nothing is
    copied; what is not a number counts as failure.
    """
    matrices = M.resolve_conj().resolve_neg().contiguous().numpy()
    (potrf,) = get_lapack_funcs(("potrf",), (matrices[0],))
    done = []
    for i, want in enumerate(wanted.tolist()):
        if not want:
            done.append(False)
            continue
        R, info = potrf(matrices[i].T, lower=0, clean=0, overwrite_a=1)
        done.append(info == 0 and bool(np.isfinite(R.diagonal()).all()))
    return torch.tensor(done)
