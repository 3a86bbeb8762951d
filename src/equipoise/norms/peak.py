"""The largest Gram bound `max_ω s_t(E(ω))` of a convolution's symbol over a grid of frequencies.

`s_t(ω)` falls with t, so a frequency whose bound has fallen to the final value of another one is left there; most are left
before, because one Cholesky factorisation proves that they lie below that value (`norms.verify`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from equipoise.norms.gram import entries_norm
from equipoise.norms.symbol import Symbol, tap_positions
from equipoise.norms.verify import below_parts, verification_loss

#: bytes of a batch of Gram matrices
CHUNK_BYTES = 2**23
#: relative loss up to which frequencies are left behind by a proof in complex64
MOST_LOSS = 4e-3


def combined_pays(kernel: Sequence[int], frequencies: int) -> bool:
    """Whether Gram matrices are cheaper to combine from correlations than to form at every frequency."""
    g, m, c, taps = kernel[0], max(kernel[1:3]), min(kernel[1:3]), math.prod(kernel[3:])
    offsets = (math.prod(2 * k - 1 for k in kernel[3:]) + 1) // 2
    formed = g * frequencies * (4 * taps * m * c + 6 * m * c * c)
    combined = g * (2 * m * c * c * taps * (taps + 1) + 4 * frequencies * offsets * c * c)
    return combined + 50_000 * taps * (taps + 1) < formed  # every pair of taps is a call


@functools.lru_cache(maxsize=64)
def frequencies(sizes: tuple[int, ...], real: bool) -> np.ndarray:
    """The points 2πj/n of a grid; for a real kernel one of each pair ±ω, whose symbols are conjugate."""
    points = np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij")).reshape(len(sizes), -1)
    if real:
        mirrored = -points % np.array(sizes).reshape(-1, 1)
        points = points[:, np.ravel_multi_index(tuple(points), sizes) <= np.ravel_multi_index(tuple(mirrored), sizes)]
    return np.asarray(points.T * (2 * math.pi / np.array(sizes)))


def largest(kernel: Tensor, omega: Tensor, iterations: int) -> tuple[Tensor, int, int]:
    """The largest `s_t` in float64, its group and its frequency; `s_t` falls with t, so most frequencies need few products."""
    groups, most = kernel.shape[0], max(kernel.shape[1] * kernel.shape[2], min(kernel.shape[1:3]) ** 2)
    grams = _grams(kernel, omega)
    per = max(1, CHUNK_BYTES // (2 * kernel.element_size() * groups * most))
    best, where = -math.inf, 0
    for first in range(0, len(omega), per):
        X, Y = grams(omega[first : first + per])
        log_s = _log_norm(X, Y) / 2 if iterations else torch.diagonal(X, dim1=-2, dim2=-1).double().sum(-1).log2() / 2
        if first == 0:  # a first value to leave others behind
            best, where = _race(X, Y, log_s, log_s.argmax()[None], iterations, best, where)
        found, row = _race(X, Y, log_s, _unproved(X, Y, log_s, best), iterations, best, -1)
        best, where = (found, first * groups + row) if row >= 0 else (best, where)
    value = torch.tensor(best, dtype=torch.float64, device=kernel.device).exp2()
    return value, where % groups, where // groups


def _grams(kernel: Tensor, omega: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Real and imaginary part of `E*E` at given frequencies, `(frequencies·groups, c, c)`, by the cheaper route."""
    groups, dtype = kernel.shape[0], kernel.real.dtype
    if kernel.is_complex() or combined_pays(kernel.shape, len(omega)):
        symbol = Symbol.of(kernel, len(omega) * groups)

        def combined(part: Tensor) -> tuple[Tensor, Tensor]:
            which = torch.arange(groups, device=part.device).repeat(len(part))
            return symbol.gram(which, part.repeat_interleave(groups, 0), dtype)

        return combined
    if kernel.shape[1] < kernel.shape[2]:
        kernel = kernel.transpose(1, 2)  # E(ω)ᵀ has the same norm
    m, c = kernel.shape[1:3]
    flat = kernel.flatten(3).movedim(3, 0).reshape(-1, groups * m * c)
    places = tap_positions(kernel.shape[3:]).to(kernel.device).mT

    def direct(part: Tensor) -> tuple[Tensor, Tensor]:
        angle = part @ places
        X, Y = ((wave.to(dtype) @ flat).reshape(-1, m, c) for wave in (angle.cos(), angle.sin()))
        cross = X.mT @ Y  # real products are the faster ones
        return torch.baddbmm(X.mT @ X, Y.mT, Y), cross - cross.mT

    return direct


def _unproved(X: Tensor, Y: Tensor, log_s: Tensor, best: float) -> Tensor:
    """Which of the Gram matrices `X + iY` are not proved to lie below `2^(2·best)`."""
    left = (log_s > best).nonzero()[:, 0]
    if not len(left) or best == -math.inf:
        return left
    X, Y = (X, Y) if len(left) == len(X) else (X[left], Y[left])
    narrow = X.dtype is torch.float32 and verification_loss(X.shape[-1], torch.complex64) <= MOST_LOSS
    tau = torch.full((len(left),), 2.0 ** (2 * best), dtype=torch.float64, device=X.device)
    return left[~below_parts(X, Y, tau, torch.zeros_like(tau), torch.complex64 if narrow else torch.complex128)]


def _race(
    X: Tensor, Y: Tensor, log_s: Tensor, rows: Tensor, iterations: int, best: float, where: int
) -> tuple[float, int]:
    """`log2 s_t` of some rows as long as it exceeds `best`; the largest found and its row, or what was given."""
    G, log_s = torch.complex(X[rows], Y[rows]), log_s[rows]
    log2, norm = torch.zeros_like(log_s), 2 * log_s
    for t in range(1, max(1, iterations) + 1):
        if t > 1:
            size = norm.nan_to_num(neginf=0.0).ceil()
            G = G * torch.exp2(-size).to(G.real.dtype)[:, None, None]
            G = G @ G  # Hermitian
            log2, norm = 2 * (log2 + size), entries_norm(G).double().log2()
            log_s = (norm + log2) * 2.0**-t
        stay = (log_s > best).nonzero()[:, 0]
        if not len(stay):
            return best, where
        if 4 * len(stay) < 3 * len(rows):
            G, log2, norm, log_s, rows = G[stay], log2[stay], norm[stay], log_s[stay], rows[stay]
    top = int(log_s.argmax())
    return float(log_s[top]), int(rows[top])


def _log_norm(X: Tensor, Y: Tensor) -> Tensor:
    """log2 of the Frobenius norms of `X + iY`."""
    sizes = (torch.linalg.vector_norm(part.flatten(1), dim=1).double() for part in (X, Y))
    return torch.hypot(*sizes).log2()
