"""Gram matrices by half: symmetric rank-k updates and products of SciPy's BLAS, which torch does not have.

On other devices and for complex numbers the full products of torch serve instead; the results mean the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.linalg.blas import dsymv, dsyrk, ssymv, ssyrk
from torch import Tensor

from equipoise.norms.gram import gram, small_side, wide

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
