"""Half of a Gram matrix: symmetric rank-k updates and products of SciPy's BLAS, which torch does not have.

The rows of `A (m, n)` are summed in pieces of at most p, whose sums are added: every entry of the result is a sum of m products
in some order, none of which goes through more than `p + m/p` roundings. Hence (Higham 2002, §3 and §4.2)

    |Ĝ − A*A|_ij ≤ γ·|a_i|ᵀ|a_j|,        ‖Ĝ − A*A‖₂ ≤ γ‖A‖_F²,        γ = γ_{p + m/p + 4},

a cast of A to a narrower type (two roundings a product) included. In float64 one piece will do; in float32 short pieces keep γ
small. On other devices and for complex numbers the full products of torch serve instead; the results mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.linalg.blas import dgemm, dsymv, dsyrk, ssymv, ssyr2k, ssyrk
from torch import Tensor

from equipoise.core.precision import gamma, inflate
from equipoise.norms.gram import gram, small_side, wide
from equipoise.norms.verify import SERIAL, serial

#: rows of a piece in float32: rounding grows with them, calls with their inverse
PIECE = 128
#: numbers cast to another type at once: the whole matrix would be written to memory and read back
_CAST = 2**19
#: from this many columns products of torch on all its threads are faster than a small update on one
_THREADED_FROM = 64


def gram_lower(W: Tensor, dtype: torch.dtype = torch.float64, *, step: bool = False) -> Tensor:
    """Lower triangle of `A*A` in `dtype` arithmetic, with A the side of `W (m, n)` that has fewer columns.

    What lies above the diagonal is not set. `step`: torch goes on at once with the rest of a training step, and threads of
    another BLAS, which wait for more in a loop, would be in its way (a whole step of a network took twice as long).

    >>> torch.tril(gram_lower(torch.tensor([[1.0, 2.0], [0.0, 1.0], [1.0, 0.0]]))).tolist()
    [[2.0, 0.0], [2.0, 5.0]]
    """
    if W.is_complex():
        return gram(small_side(wide(W) if dtype is torch.float64 else W))
    if W.shape[0] != W.shape[1] and not W.is_contiguous() and W.mT.is_contiguous():
        W = W.mT  # the same matrix on its smaller side, without a copy
    tall = W.shape[0] >= W.shape[1]
    n, long = (W.shape[1], W.shape[0]) if tall else W.shape
    whole = dtype is torch.float64 and W.dtype is dtype and W.is_contiguous()
    most = long if whole else PIECE if dtype is torch.float32 else max(1, _CAST // n)
    pieces = W.split(most, dim=0 if tall else 1)
    threaded = torch.get_num_threads() > 1 and n >= _THREADED_FROM and (step or long * n * n <= SERIAL)
    if W.device.type != "cpu" or threaded:
        return _by_products(pieces, n, tall, dtype)
    syrk, number = (dsyrk, np.float64) if dtype is torch.float64 else (ssyrk, np.float32)
    total: np.ndarray | None = None
    with serial(long * n * n):
        for piece in pieces:
            # row-major here is column-major transposed there, so nothing is copied but the cast: by NumPy, since torch's
            # threads would meet those of the BLAS
            a = np.ascontiguousarray(piece.numpy(), dtype=number).T
            if total is None:
                total = syrk(1.0, a, trans=not tall, lower=0)
            else:
                total = syrk(1.0, a, beta=1.0, c=total, trans=not tall, lower=0, overwrite_c=1)
    assert total is not None
    return torch.from_numpy(total.T)


def _by_products(pieces: tuple[Tensor, ...], n: int, tall: bool, dtype: torch.dtype) -> Tensor:
    """The same by products of torch, on all its threads; three eighths of the square are left out."""
    G, step = torch.zeros(n, n, dtype=dtype, device=pieces[0].device), -(-n // 4)
    for piece in pieces:
        A = piece.to(dtype) if tall else piece.to(dtype).mT
        for first in range(0, n, step):
            last = min(n, first + step)
            G[first:last, :last].addmm_(A[:, first:last].mT, A[:, :last])
    return G


def add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """`total += xᵀy` in place, for real matrices on the CPU; on one thread by SciPy's BLAS, the faster one in float64."""
    if total.dtype is not torch.float64 or torch.get_num_threads() > 1:
        total.addmm_(x.mT, y)
        return
    with serial(x.numel() * y.shape[1]):  # row-major is column-major transposed: totalᵀ += yᵀx, and nothing is copied
        dgemm(1.0, y.numpy().T, x.numpy().T, trans_b=True, beta=1.0, c=total.numpy().T, overwrite_c=1)


def summed(rows: int, dtype: torch.dtype) -> int:
    """Roundings that a product in an entry of `gram_lower` goes through at most, for A with that many rows."""
    piece = min(rows, PIECE) if dtype is torch.float32 else rows
    return piece + -(-rows // piece) + 4


def lower_error(trace: float, shape: Sequence[int], dtype: torch.dtype) -> float:
    """A bound of `‖Ĝ − AᵀA‖₂` for real A of that shape, from the trace of Ĝ: `γ‖A‖_F²`, and what underflow may lose."""
    rows, columns = shape
    g, tiny = gamma(summed(rows, dtype), dtype), torch.finfo(dtype).tiny
    lost = 8.0 * columns * (rows + columns) * tiny * (1 + trace)  # of products, and of numbers that were cast
    return inflate(inflate(g * trace * (1 + 2 * g)) + lost)


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


def subtract_pair(G: Tensor, V: Tensor, B: Tensor) -> Tensor:
    """Lower triangle of `G − VBᵀ − BVᵀ` for `V, B (n, k)` in float32, off by at most `γ_{2k+2}(|G| + |V||B|ᵀ + |B||V|ᵀ)`."""
    if G.device.type != "cpu":
        return G.sub(V @ B.mT).sub_(B @ V.mT)
    v, b = (np.asfortranarray(x.numpy()) for x in (V, B))
    return torch.from_numpy(ssyr2k(-1.0, v, b, beta=1.0, c=G.numpy().T, lower=0).T)
