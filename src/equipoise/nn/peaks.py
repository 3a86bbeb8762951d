"""The largest norm of a symbol over a grid by Gram iteration, at the cost of the frequencies that matter; differentiable.

For `E(ω) = Σ_a K_a e^{−ia·ω}` the bound `s_t(ω) = ‖(E*E)^(2^(t−1))‖_F^(2^−t) ≥ ‖E(ω)‖` falls with t, so a frequency whose bound
has fallen to the final value of another one is left there; most are left before, because one Cholesky factorisation proves
that they lie below that value (`norms.verify`). A grid of n points per axis of a kernel with k taps reaches all
frequencies with the factor `Π 1/cos(π(k − 1)/(2n))`.

Rounding. Products run in float32 where `rounding` is small, and powers of two keep every iterate near 1. A Gram product of
length ℓ with c columns is off by at most `2γ_ℓ·c` times the square of the norm, and the error of level i counts `2^−i`.

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
from equipoise.norms.verify import below, verification_loss

#: relative rounding error up to which float32 is taken
MOST_ROUNDING = 8e-3
#: relative loss up to which the proof runs in complex64
MOST_LOSS = 4e-3
#: bytes of a batch of Gram matrices
CHUNK_BYTES = 2**22


def symbol_norm(K: Tensor, iterations: int, grid: int) -> tuple[Tensor, float]:
    """`(s, δ)` with `sup_ω ‖E(ω)‖ ≤ s·(1 + δ)` for kernels `K (g, co, ci, *taps)`: s float64, with its explicit gradient.

    `grid` is the number of points per axis and unit of (k − 1)/2.

    >>> s, delta = symbol_norm(torch.ones(1, 1, 1, 3, 3), 6, 16)
    >>> bool(9 <= s * (1 + delta) <= 9.5)
    True
    """
    sizes = [max(1, math.ceil(grid * (k - 1) / 2)) for k in K.shape[3:]]
    factor = math.prod([1 / math.cos(math.pi * (k - 1) / (2 * n)) for k, n in zip(K.shape[3:], sizes, strict=True)])
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
    """`ω·a` of one of each pair ±ω of the grid (a real kernel's symbols there are conjugate) and all taps, in one turn."""
    points = np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij")).reshape(len(sizes), -1)
    mirrored = -points % np.array(sizes).reshape(-1, 1)
    points = points[:, np.ravel_multi_index(tuple(points), sizes) <= np.ravel_multi_index(tuple(mirrored), sizes)]
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
        G = _gram(*((w[first : first + per] @ flat).reshape(-1, m, c) for w in (cos, sin)))
        log_s = _log_norm(G) / 2
        if first == 0:  # a first value to leave others behind
            best, where = _race(G, log_s, log_s.argmax()[None], iterations, best, where)
        at, before = where, best
        best, where = _race(G, log_s, _unproved(G, log_s, best), iterations, best, where)
        where = where + first * g if best > before else at
    return best, where


def _unproved(G: Tensor, log_s: Tensor, best: float) -> Tensor:
    """Which of the Gram matrices are not proved to lie below `2^(2·best)`."""
    left = (log_s > best).nonzero()[:, 0]
    G = G if len(left) == len(G) else G[left]
    if verification_loss(G.shape[-1], G.dtype) > MOST_LOSS:
        G = G.to(torch.complex128)
    tau = torch.full((len(left),), 2.0 ** (2 * best), dtype=torch.float64, device=G.device)
    return left[~below(G, tau, torch.zeros_like(tau))]


def _race(G: Tensor, log_s: Tensor, rows: Tensor, iterations: int, best: float, where: int) -> tuple[float, int]:
    """`log2 s_t` of some rows as long as it exceeds `best`; the largest found and its row, or what was given."""
    G, log_s = G[rows], log_s[rows]
    log2, norm = torch.zeros_like(log_s), 2 * log_s
    for t in range(1, iterations + 1):
        if t > 1:
            size = norm.nan_to_num(neginf=0.0).ceil()
            G = G * torch.exp2(-size).to(G.real.dtype)[:, None, None]
            G = G @ G  # Hermitian
            log2, norm = 2 * (log2 + size), _log_norm(G)
            log_s = (norm + log2) * 2.0**-t
        stay = (log_s > best).nonzero()[:, 0]
        if not len(stay):
            return best, where
        if 4 * len(stay) < 3 * len(rows):
            G, log2, norm, log_s, rows = G[stay], log2[stay], norm[stay], log_s[stay], rows[stay]
    top = int(log_s.argmax())
    return float(log_s[top]), int(rows[top])


def _gram(X: Tensor, Y: Tensor) -> Tensor:
    """`(X + iY)*(X + iY)`; real products are the faster ones."""
    cross = X.mT @ Y
    return torch.complex(torch.baddbmm(X.mT @ X, Y.mT, Y), cross - cross.mT)


def _log_norm(G: Tensor) -> Tensor:
    return torch.linalg.vector_norm(torch.view_as_real(G).flatten(1), dim=1).double().log2()
