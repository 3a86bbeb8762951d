"""Powers of a convolution's Gram operator: `(KᵀK)^(2^(t−1))` as a finite table of matrices, one per spatial offset.

The Gram operator of a kernel with k taps has 2(k − 1) + 1 offsets and each squaring doubles their reach: `2^t(k − 1) + 1`. On a
grid of that many frequencies nothing wraps around, so the table is exact up to rounding. Real arithmetic throughout: a Hermitian
symbol `X + iY` is a symmetric X and a skew-symmetric Y, and the half of the grid that conjugation does not give is left out.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

Reach = tuple[int, ...]
Table = tuple[np.ndarray, np.ndarray]


def kernel_gram(K: Tensor) -> tuple[Tensor, Tensor, Reach]:
    """`(X, Y, reach)`: the symbol `E(ω)*E(ω) = X + iY` of the kernel `K (g, co, ci, *k)` on its own grid.

    X and Y are (frequencies, g, ci, ci).
    """
    B, C, reach = kernel_symbol(K)
    return *gram(B, C), reach


def kernel_symbol(K: Tensor) -> tuple[Tensor, Tensor, Reach]:
    """`(B, C, reach)`: the symbol `E(ω) = B + iC` of the kernel `K (g, co, ci, *k)` on the grid of its Gram operator."""
    reach = tuple(k - 1 for k in K.shape[3:])
    cos, sin = _waves("taps", reach, K)
    flat = K.flatten(3).movedim(3, 0)
    return torch.tensordot(cos, flat, 1), torch.tensordot(sin, flat, 1), reach


def gram(B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Real part, and imaginary part turned round, of `(B + iC)*(B + iC)`."""
    cross = C.mT @ B
    return B.mT @ B + C.mT @ C, cross - cross.mT


def offsets(X: Tensor, Y: Tensor, reach: Reach) -> Tensor:
    """The table `A_b` for b = 0 and the positive offsets: the inverse transform. The others are `A_{−b} = A_bᵀ`."""
    cos, sin = _waves("back", reach, X)
    return torch.tensordot(cos, X, 1) - torch.tensordot(sin, Y, 1)


def refine(A: Tensor, reach: Reach) -> tuple[Tensor, Tensor, Reach]:
    """The symbol of the table on the grid of twice the reach, where its square has room."""
    cos, sin = _waves("finer", reach, A)
    return torch.tensordot(cos, A + A.mT, 1), torch.tensordot(sin, A.mT - A, 1), tuple(2 * h for h in reach)


def square(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """`(X + iY)²` of Hermitian matrices in three real products."""
    cross = X @ Y
    return X @ X + Y.mT @ Y, cross - cross.mT


def offsets_adjoint(A: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
    """The adjoint of `offsets` on symmetric X and skew-symmetric Y."""
    cos, sin = _waves("back", reach, A)
    return torch.tensordot(cos.mT, (A + A.mT) / 2, 1), torch.tensordot(sin.mT, (A.mT - A) / 2, 1)


def refine_adjoint(P: Tensor, Q: Tensor, reach: Reach) -> Tensor:
    """The adjoint of `refine` for `X = P + Pᵀ` and `Y = Q − Qᵀ`."""
    cos, sin = _waves("finer", reach, P)
    c, s = torch.tensordot(cos.mT, P, 1), torch.tensordot(sin.mT, Q, 1)
    return 2 * ((c - s) + (c + s).mT)


def taps_adjoint(B: Tensor, C: Tensor, reach: Reach) -> Tensor:
    """The adjoint of `kernel_symbol`: (taps, g, co, ci)."""
    cos, sin = _waves("taps", reach, B)
    return torch.tensordot(cos.mT, B, 1) + torch.tensordot(sin.mT, C, 1)


#: waves as tensors, of the first kernels met: making them again costs as much as the products of a small kernel
_KNOWN: dict[tuple[str, Reach, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
_FEW, _SMALL = 64, 2**16


def _waves(kind: str, reach: Reach, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a transform, as constants."""
    key = kind, tuple(int(h) for h in reach), like.dtype, like.device
    if key not in _KNOWN:
        cos, sin = {"taps": _at_taps, "back": _back, "finer": _finer}[kind](key[1])
        if len(_KNOWN) >= _FEW or cos.size > _SMALL:
            return torch.from_numpy(cos).to(like), torch.from_numpy(sin).to(like)
        _KNOWN[key] = torch.from_numpy(cos).to(like), torch.from_numpy(sin).to(like)
    return _KNOWN[key]


#: what `torch.compiler.assume_constant_result` does, without two seconds of importing the compiler
vars(_waves)["_dynamo_marked_constant"] = True


@functools.lru_cache(maxsize=64)
def _at_taps(reach: Reach) -> Table:
    """Grid ω × taps 0 … h: `Σ_a K_a e^{iω·a}`."""
    taps = np.stack(np.meshgrid(*[np.arange(h + 1.0) for h in reach], indexing="ij"))
    return _trigonometry(_half_grid(reach), taps.reshape(len(reach), -1).T, reach, 1.0)


@functools.lru_cache(maxsize=64)
def _back(reach: Reach) -> Table:
    """Offsets × grid: the inverse transform; every frequency but the first stands for ±."""
    grid = _half_grid(reach)
    return _trigonometry(grid, grid, reach, _copies(grid) / (2 * len(grid) - 1))


@functools.lru_cache(maxsize=64)
def _finer(reach: Reach) -> Table:
    """Grid of twice the reach × offsets; every offset but the first stands for ±, and the matrices come doubled."""
    finer, points = tuple(2 * h for h in reach), _half_grid(reach)
    return _trigonometry(_half_grid(finer), points, finer, _copies(points) / 2)


def _half_grid(reach: Reach) -> np.ndarray:
    """Zero and the lexicographically positive points of `Π [−h_j, h_j]`, as (points, dims)."""
    points = np.stack(np.meshgrid(*[np.arange(-h, h + 1.0) for h in reach], indexing="ij")).reshape(len(reach), -1).T
    return points[len(points) // 2 :]


def _copies(points: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(points)) == 0, 1.0, 2.0)


def _trigonometry(f: np.ndarray, b: np.ndarray, reach: Reach, weight: np.ndarray | float) -> Table:
    """`weight·cos` and `weight·sin` of ω·b with ω = 2πf/(2h + 1)."""
    angle = (f * [2 * math.pi / (2 * h + 1) for h in reach]) @ b.T
    return np.cos(angle) * weight, np.sin(angle) * weight
