"""`T_ij = Σ_b |A_b|_ij` of the table A of `(KᵀK)^(2^(t−1))`, over all spatial offsets b: what a diagonal must dominate.

The Gram operator of a kernel with k taps has 2(k − 1) + 1 offsets and each squaring doubles their reach: `2^t(k − 1) + 1`. On a
grid of that many frequencies nothing wraps around, so the table is exact up to rounding. Real arithmetic throughout: a Hermitian
symbol `X + iY` is a symmetric X and a skew-symmetric Y, and the half of the grid that conjugation gives is left out.

The value is computed in float64, as the proof of `nn.rescaling` needs it. The gradient needs no proof: it is taken in closed form
and in the parameters' dtype, with one complex product per frequency and squaring. For a gradient g of T, `A_b` has the gradient
`sign(A_b)·g` (and `sign(A_b)·gᵀ` for its mirror image). With Hermitian symbols `Z = X + iY`, `Γ = S + iN` the gradient of Z²,
that of Z is `ΓZ + ZΓ`; that of E is `2EΓ̄` for `Z = E*E`.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from equipoise.core import Refused, full_precision, or_one

Reach = tuple[int, ...]
#: T, its exponent, the table A, and what went into every step
_Table = tuple[Tensor, Tensor, Tensor, list[list[Tensor]]]
#: largest table of waves, in numbers: half a gigabyte
_WAVES = 2**26
#: ratio of the largest and the smallest row of T up to which float32 holds the gradient's digits
_SPREAD = 2.0**24


def _waves(kind: str, reach: Reach, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a transform, as constants."""
    return _cached_waves(kind, tuple(int(h) for h in reach), like.dtype, like.device)


#: what `torch.compiler.assume_constant_result` does, without two seconds of importing the compiler
vars(_waves)["_dynamo_marked_constant"] = True


@functools.lru_cache(maxsize=64)
def _cached_waves(
    kind: str, reach: Reach, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`taps`: the symbol of a kernel. `back`: the inverse transform. `finer`: from offsets to the grid of twice the reach.

    In the last two every point but the first represents ±; `finer` is for matrices that come doubled.
    """
    grid = _half_grid(reach)
    signs = np.where(np.arange(len(grid)) == 0, 1.0, 2.0)
    if kind == "taps":
        taps = np.stack(np.meshgrid(*[np.arange(h + 1.0) for h in reach], indexing="ij"))
        cos, sin = _trigonometry(grid, taps.reshape(len(reach), -1).T, reach, 1.0)
    elif kind == "back":
        cos, sin = _trigonometry(grid, grid, reach, signs / (2 * len(grid) - 1))
    else:
        finer = tuple(2 * h for h in reach)
        cos, sin = _trigonometry(_half_grid(finer), grid, finer, signs / 2)
    with _disable_current_modes():  # not the fake tensors of an export
        return tuple(torch.from_numpy(part).to(device=device, dtype=dtype) for part in (cos, sin))  # type: ignore[return-value]


def _half_grid(reach: Reach) -> np.ndarray:
    """Zero and the lexicographically positive points of `Π [−h_j, h_j]`, as (points, dims)."""
    points = (
        np.stack(np.meshgrid(*[np.arange(-h, h + 1.0) for h in reach], indexing="ij"))
        .reshape(len(reach), -1)
        .T
    )
    return points[len(points) // 2 :]


def _trigonometry(
    f: np.ndarray, b: np.ndarray, reach: Reach, weight: np.ndarray | float
) -> tuple[np.ndarray, np.ndarray]:
    """`weight·cos` and `weight·sin` of ω·b with ω = 2πf/(2h + 1)."""
    angle = (f * [2 * math.pi / (2 * h + 1) for h in reach]) @ b.T
    return np.cos(angle) * weight, np.sin(angle) * weight


def _offsets(X: Tensor, Y: Tensor, reach: Reach) -> Tensor:
    """The table `A_b` for b = 0 and the positive offsets: the inverse transform. The others are `A_{−b} = A_bᵀ`."""
    cos, sin = _waves("back", reach, X)
    return torch.tensordot(cos, X, 1) - torch.tensordot(sin, Y, 1)


def _offsets_adjoint(A: Tensor, reach: Reach) -> Tensor:
    """The adjoint of `_offsets` on symmetric X and skew-symmetric Y, as `X + iY`."""
    cos, sin = _waves("back", reach, A)
    return torch.complex(
        torch.tensordot(cos.mT, (A + A.mT) / 2, 1), torch.tensordot(sin.mT, (A.mT - A) / 2, 1)
    )


def _kernel_powers(K: Tensor, t: int) -> _Table:
    """Of kernels `(g, co, ci, *taps)` in float64."""
    reach = tuple(k - 1 for k in K.shape[3:])
    cos, sin = _waves("taps", reach, K)
    flat = K.flatten(3).movedim(3, 0)
    B, C = torch.tensordot(cos, flat, 1), torch.tensordot(sin, flat, 1)  # the symbol is B + iC

    cross = C.mT @ B
    A = _offsets(B.mT @ B + C.mT @ C, cross - cross.mT, reach)
    log2 = K.new_zeros(1, K.shape[0], 1, 1)
    one = K.new_ones(1, 1, 1, 1)
    history = [[B, C, one]]
    for step in range(t - 1):
        cos, sin = _waves("finer", reach, A)
        X = torch.tensordot(cos, A + A.mT, 1)
        Y = torch.tensordot(sin, A.mT - A, 1)
        reach = tuple(2 * h for h in reach)
        cross = X @ Y
        A = _offsets(X @ X + Y.mT @ Y, cross - cross.mT, reach)
        log2, e = 2 * log2, 0 * log2
        if step > 0:  # entries of K are near 1, so the first powers cannot overflow
            A, log2, e = _tamed(A, log2)
        history.append([X, Y, torch.exp2(-e)])

    size = A.abs()
    total = size.sum(0)
    total = total + (total - size[0]).mT  # the mirror images
    return total, log2.flatten(1).mT, A, history


def _kernel_gradient(gA: Tensor, history: list[list[Tensor]], reach: Reach) -> Tensor:
    """The gradient for the kernel `(g, co, ci, taps)` from that of the table of the last power, and the reach of that."""
    for X, Y, factor in history[:0:-1]:
        product = _offsets_adjoint(gA * factor, reach) @ torch.complex(X, Y)
        reach = tuple(h // 2 for h in reach)
        cos, sin = _waves("finer", reach, X)
        c = torch.tensordot(cos.mT, product.real, 1)
        s = torch.tensordot(sin.mT, product.imag, 1)
        gA = 2 * ((c - s) + (c + s).mT)

    B, C, factor = history[0]
    product = torch.complex(B, C) @ _offsets_adjoint(gA * factor, reach).conj()
    cos, sin = _waves("taps", reach, B)
    taps = torch.tensordot(cos.mT, product.real, 1) + torch.tensordot(sin.mT, product.imag, 1)
    return 2 * taps.movedim(0, 3)


def _matrix_powers(W: Tensor, t: int) -> _Table:
    """Of matrices `(g, m, n)`, with their Gram matrices in float64."""
    wide = W.double()
    gram = wide.mT @ wide
    # symmetric to the last bit: weighted row sums are then column sums
    gram = gram.tril() + gram.tril(-1).mT
    G, log2, e = _tamed(gram[None], 0.0)
    history = [[W, torch.exp2(-e)]]
    for _ in range(t - 1):
        before = G
        G, log2, e = _tamed(before @ before, 2 * log2)
        history.append([before[0], torch.exp2(-e)])
    return G[0].abs(), log2.flatten(1).mT, G, history


def _matrix_gradient(gA: Tensor, history: list[list[Tensor]]) -> Tensor:
    """The gradient for W from that of the last power of `WᵀW`."""
    g = gA[0]
    for G, factor in history[:0:-1]:
        P = (g + g.mT) @ G * (0.5 * factor[0])
        g = P + P.mT
    W, factor = history[0]
    S = (g + g.mT) * factor[0]
    return (S @ W.mT).mT if W.stride(-2) == 1 else W @ S  # in the layout of W


@dataclass(frozen=True)
class Powers:
    """`T·2^-log2` and log2 of kernels or matrices, and what the gradient needs: signs, and what went into every step."""

    T: Tensor
    log2: Tensor
    signs: Tensor
    history: list[list[Tensor]]
    reach: Reach

    def gradient(self, g: Tensor) -> Tensor:
        """The gradient for K, from that of T."""
        g = g.to(self.signs.dtype)
        gA = self.signs * (g + g.mT)
        gA[0] = self.signs[0] * g
        if not self.reach:
            return _matrix_gradient(gA, self.history)
        return _kernel_gradient(gA, self.history, self.reach)


def count_taps(K: Tensor) -> int:
    """The number of taps of kernels `(g, co, ci, *taps)`."""
    return math.prod(K.shape[3:])


def powers(K: Tensor, t: int) -> Powers:
    """Of kernels `(g, co, ci, *taps)` whose entries are neither very large nor very small; nothing is recorded for autograd.

    Args:
        K: the kernels, or matrices.
        t: number of squarings, plus one.
    """
    taps = K.shape[3:] if count_taps(K) > 1 else ()
    with full_precision():
        if taps:
            T, log2, A, history = _kernel_powers(K.double(), t)
        else:
            T, log2, A, history = _matrix_powers(K.reshape(K.shape[:3]), t)
    rows = T.sum(-1)
    lengths = rows[rows > 0]
    even = len(lengths) > 0 and bool(lengths.amax() <= _SPREAD * lengths.amin())
    narrow = K.dtype if even else torch.float64
    history = [[part.to(narrow) for part in parts] for parts in history]
    return Powers(
        T, log2, A.sign().to(narrow), history, tuple((k - 1) * 2 ** (t - 1) for k in taps)
    )


def totals(K: Tensor, exponent: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """`(T·2^-log2, log2)`, (g, n, n) and (g, 1), of `K·2^-exponent`: for compilers, transforms and higher derivatives.

    Args:
        K: kernels `(g, co, ci, *taps)` or matrices `(g, m, n)`.
        exponent: that of their largest entry.
        t: number of squarings, plus one.
    """
    half = (exponent / 2).floor()  # two exact steps: 2^-exponent alone may overflow
    whole = K.double() * torch.exp2(-half) * torch.exp2(half - exponent)
    if count_taps(K) > 1:
        return _kernel_powers(whole, t)[:2]
    return _matrix_powers(whole.reshape(K.shape[:3]), t)[:2]


def largest_exponent(x: Tensor, batch: int) -> Tensor:
    """log2 of the largest entry, rounded up, in float64, for each index of dimension `batch`, for broadcasting; 0 for zero.

    Args:
        x: a tensor.
        batch: the dimension that stays.
    """
    largest = (
        x.detach().abs().amax([d for d in range(x.dim()) if d != batch], keepdim=True).double()
    )
    return or_one(largest).log2().ceil()


def _tamed(G: Tensor, log2: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """`(G/c, log2 + log2 c, log2 c)` with c near the largest entry of each group of `G (b, g, n, n)`: no power overflows."""
    e = largest_exponent(G, 1)
    return G * torch.exp2(-e), log2 + e, e


def refuse_large(K: Tensor, t: int) -> None:
    """Refuse kernels whose table of waves would not fit into memory.

    Args:
        K: kernels.
        t: steps.
    """
    if count_taps(K) == 1:
        return
    points = math.prod([2**t * (k - 1) + 1 for k in K.shape[3:]]) // 2 + 1
    if points**2 > _WAVES:
        raise Refused(
            f"{t} steps of spectral rescaling of a kernel of {tuple(K.shape[3:])} taps need a table of {points}² waves, "
            f"more than {_WAVES}; use fewer steps t, or 'sn', 'aol' or 'bcop'"
        )
