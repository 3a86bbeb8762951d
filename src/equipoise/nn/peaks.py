"""The largest norm of a symbol over a grid by Gram iteration, at the cost of the frequencies that matter; differentiable.

For `E(ω) = Σ_a K_a e^{−ia·ω}` the bound `s_t(ω) = ‖(E*E)^(2^(t−1))‖_F^(2^−t) ≥ ‖E(ω)‖` falls with t, so a frequency whose bound
has fallen to the final value of another one is left there. A grid of n points per axis of a kernel with k taps reaches all
frequencies with the factor `Π 1/cos(π(k − 1)/(2n))`.

Rounding. Products run in float32 where `rounding` is small, real arithmetic throughout, and powers of two keep every iterate
near 1. A Gram product of length ℓ with c columns is off by at most `2γ_ℓ·c` times the square of the norm, and the error of
level i counts `2^−i`.

Reference: Delattre et al. 2023 (Gram iteration, explicit gradient).
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from equipoise.core.precision import full_precision, gamma
from equipoise.norms import functional

#: relative rounding error up to which float32 is taken
MOST_ROUNDING = 8e-3
#: bytes of a batch of Gram matrices: they stay in the cache
CHUNK_BYTES = 2**18


def symbol_norm(K: Tensor, iterations: int, grid: int) -> tuple[Tensor, float]:
    """`(s, δ)` with `sup_ω ‖E(ω)‖ ≤ s·(1 + δ)` for kernels `K (g, co, ci, *taps)`: s float64, with its explicit gradient.

    `grid` is the number of points per axis and unit of (k − 1)/2.

    >>> s, delta = symbol_norm(torch.ones(1, 1, 1, 3, 3), 6, 16)
    >>> bool(9 <= s * (1 + delta) <= 9.5)
    True
    """
    sizes = [max(1, math.ceil(grid * (k - 1) / 2)) for k in K.shape[3:]]
    factor = math.prod(1 / math.cos(math.pi * (k - 1) / (2 * n)) for k, n in zip(K.shape[3:], sizes, strict=True))
    m, c, taps = max(K.shape[1:3]), min(K.shape[1:3]), math.prod(K.shape[3:])
    K = K.cpu() if K.device.type == "mps" else K
    wide = K.dtype is torch.float64 or rounding(m, c, taps, torch.float32) > MOST_ROUNDING
    dtype = torch.float64 if wide else torch.float32
    exponent = _exponent(K.detach().abs().amax())
    unit = scaled(K.to(torch.float64), -exponent).to(dtype)
    want = torch.is_grad_enabled() and unit.requires_grad
    value = functional.attach(unit, *_peak(unit.detach(), sizes, iterations, want))
    return scaled(value.double() * factor, exponent), rounding(m, c, taps, dtype)


def rounding(rows: int, columns: int, taps: int, dtype: torch.dtype) -> float:
    """δ: the computed value times 1 + δ is an upper bound. E itself, its Gram matrix, and half as much for each later one."""
    symbol = 4 * gamma(taps + 8, dtype) * math.sqrt(taps * columns)
    return 1.5 * (symbol + columns * (gamma(2 * rows + 8, dtype) + gamma(2 * columns + 8, dtype)))


def scaled(x: Tensor, exponent: Tensor) -> Tensor:
    """`x·2^exponent`, exactly, in two steps: one factor alone may overflow."""
    half = (exponent / 2).floor()
    return x * torch.exp2(half) * torch.exp2(exponent - half)


def _exponent(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, largest, torch.ones_like(largest)).double().log2().ceil()


@torch.library.custom_op("equipoise::grid_peak", mutates_args=())
def _peak(kernel: Tensor, sizes: list[int], iterations: int, want_gradient: bool) -> tuple[Tensor, Tensor]:
    """`max s_t` over the grid and all groups, and its gradient with respect to the kernel."""
    with full_precision(), torch.no_grad():
        angles = torch.from_numpy(_angles(tuple(sizes), tuple(kernel.shape[3:]))).to(kernel.device)
        log_s, index = _largest(kernel, angles, iterations)
        value = torch.tensor(log_s, dtype=torch.float64, device=kernel.device).exp2().to(kernel.dtype)
        if not want_gradient:
            return value, kernel.new_empty(0)
        row, group = divmod(index, kernel.shape[0])
        phases = torch.complex(angles[row].cos(), -angles[row].sin())
        phases = phases.to(torch.complex128 if kernel.dtype is torch.float64 else torch.complex64)
        _, dE = functional.explicit_gradient(kernel[group].flatten(2).to(phases.dtype) @ phases, iterations)
        gradient = torch.zeros_like(kernel, memory_format=torch.contiguous_format)
        gradient[group] = (dE[..., None] * phases.conj_physical()).real.reshape(kernel.shape[1:])
        return value, gradient


@_peak.register_fake
def _(kernel: Tensor, sizes: list[int], iterations: int, want_gradient: bool) -> tuple[Tensor, Tensor]:
    gradient = torch.empty_like(kernel, memory_format=torch.contiguous_format) if want_gradient else kernel.new_empty(0)
    return kernel.new_empty(()), gradient


@functools.lru_cache(maxsize=64)
def _angles(sizes: tuple[int, ...], taps: tuple[int, ...]) -> np.ndarray:
    """`ω·a` of the half grid (a real kernel's other half is conjugate) and all taps, reduced to one turn."""
    counts = [n // 2 + 1 if j == 0 else n for j, n in enumerate(sizes)]
    points = np.stack(np.meshgrid(*map(np.arange, counts), indexing="ij")).reshape(len(sizes), -1)
    places = np.stack(np.meshgrid(*map(np.arange, taps), indexing="ij")).reshape(len(taps), -1)
    turns = [np.outer(f, a) % n / n for f, a, n in zip(points, places, sizes, strict=True)]
    return np.asarray(2 * math.pi * sum(turns))


def _largest(kernel: Tensor, angles: Tensor, iterations: int) -> tuple[float, int]:
    """The largest `log2 s_t` and where it is: frequency·groups + group."""
    if kernel.shape[1] < kernel.shape[2]:
        kernel = kernel.transpose(1, 2)  # E(ω)ᵀ has the same norm
    g, m, c = kernel.shape[:3]
    flat = kernel.flatten(3).movedim(3, 0).reshape(-1, g * m * c)
    cos, sin = angles.cos().to(kernel.dtype), angles.sin().to(kernel.dtype)
    per = max(1, CHUNK_BYTES // (kernel.element_size() * g * m * c))
    best, where = -math.inf, 0
    for first in range(0, len(cos), per):
        waves = [(w[first : first + per] @ flat).reshape(-1, m, c) for w in (cos, sin)]
        X, Y = _gram(*waves)
        log_s = _log_norm(X, Y) / 2
        if first == 0:  # a first value to leave others behind
            some = log_s.topk(min(2, len(log_s))).indices
            best, where = _race(X[some], Y[some], log_s[some], some, iterations, best, where)
        best, where = _race(X, Y, log_s, torch.arange(len(X), device=X.device) + first * g, iterations, best, where)
    return best, where


def _race(
    X: Tensor, Y: Tensor, log_s: Tensor, rows: Tensor, iterations: int, best: float, where: int
) -> tuple[float, int]:
    """`log2 s_t` of `X + iY` as long as it exceeds `best`; the largest found and its row, or what was given."""
    log2, norm = torch.zeros_like(log_s), 2 * log_s
    for t in range(1, iterations + 1):
        if t > 1:
            size = norm.nan_to_num(neginf=0.0).ceil()
            shrink = torch.exp2(-size).to(X.dtype)[:, None, None]
            X, Y = _gram(X.mul_(shrink), Y.mul_(shrink))
            log2, norm = 2 * (log2 + size), _log_norm(X, Y)
            log_s = (norm + log2) * 2.0**-t
        stay = (log_s > best).nonzero()[:, 0]
        if not len(stay):
            return best, where
        if 4 * len(stay) < 3 * len(rows):
            X, Y, log2, norm, log_s, rows = X[stay], Y[stay], log2[stay], norm[stay], log_s[stay], rows[stay]
    top = int(log_s.argmax())
    return float(log_s[top]), int(rows[top])


def _gram(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of `(X + iY)*(X + iY)`."""
    cross = X.mT @ Y
    return torch.baddbmm(X.mT @ X, Y.mT, Y), cross - cross.mT


def _log_norm(X: Tensor, Y: Tensor) -> Tensor:
    sizes = [torch.linalg.vector_norm(part.flatten(1), dim=1).double() for part in (X, Y)]
    return torch.hypot(*sizes).log2()
