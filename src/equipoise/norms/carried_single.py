"""A proof of a matrix's norm in single precision: one Gram matrix and one Cholesky factorisation in float32, and no more.

With `‖Ĝ − AᵀA‖ ≤ error` from `norms.half`, a factorisation of `M = sI − Ĝ` that runs to completion proves (Higham 2002, thm 10.3,
with twice its constant as in `verify`)

    σ₁(A)² ≤ s + γ'·tr M + 2us + error,        tr M = ns − tr Ĝ.

What rounding costs is known beforehand: some 0.4 % of the norm for 256 columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg.blas import ssymv
from scipy.linalg.lapack import spotrf
from torch import Tensor

from equipoise.core.precision import deflate, gamma, inflate, unit_roundoff
from equipoise.norms.half import gram_lower, lower_error, summed
from equipoise.norms.lanczos import lanczos, mixed, random_start
from equipoise.norms.verify import cholesky_gamma

#: Lanczos steps from the vector kept, and again where they were too few
STEPS = (10, 24, 60)

_U = unit_roundoff(torch.float32)


@dataclass(frozen=True)
class Single:
    """Lower triangle Ĝ of `AᵀA` in float32 (as LAPACK sees it, the upper one), with its trace and `error ≥ ‖Ĝ − AᵀA‖₂`."""

    G: np.ndarray
    trace: float
    error: float

    @staticmethod
    def of(A: Tensor) -> Single | None:
        """None where squares might leave the range of float32, or are no numbers."""
        G = gram_lower(A, torch.float32).numpy().T
        trace = float(G.diagonal().sum(dtype=np.float64))
        return Single(G, trace, lower_error(trace, A.shape, torch.float32)) if 1e-15 < trace < 1e15 else None

    @property
    def lost(self) -> float:
        """What is taken off a Rayleigh quotient for safety."""
        return inflate(2 * gamma(len(self.G) + 8, torch.float32) * self.trace + self.error)

    def bound(self, s: float) -> float:
        """What σ₁² is proved below if `sI − Ĝ` has a Cholesky factor."""
        n = len(self.G)
        most = inflate(max(0.0, n * s - self.trace * (1 - 1e-12))) * (1 + 2 * _U)  # tr M, its diagonal rounded
        return inflate(inflate(s * (1 + 2 * _U) + cholesky_gamma(n, torch.float32) * most) + self.error)

    def shift(self, tau: float) -> float:
        """The largest s, a number of float32 up to a few steps, with `bound(s) ≤ tau`; 0 where there is none."""
        n = len(self.G)
        g = cholesky_gamma(n, torch.float32)
        s = (tau - self.error + g * self.trace) / (1 + 2 * _U + g * n * (1 + 2 * _U))
        for _ in range(8):
            if not s > 0:
                return 0.0
            s = float(np.float32(s * (1 - 2 * _U)))
            if self.bound(s) <= tau:
                return s
        return 0.0

    def below(self, s: float) -> bool:
        """Whether `sI − Ĝ` has a Cholesky factor, so that `σ₁² ≤ bound(s)`."""
        if not 0 < s < 1e30:
            return False
        M = np.negative(self.G)
        M.ravel(order="K")[:: len(M) + 1] += np.float32(s)
        R, info = spotrf(M, lower=0, clean=0, overwrite_a=1)
        return bool(info == 0 and np.isfinite(R.diagonal().sum()))

    def times(self, v: Tensor) -> Tensor:
        """`Ĝv`."""
        return torch.from_numpy(ssymv(1.0, self.G, v.numpy(), lower=0))

    def quotient(self, v: Tensor) -> tuple[float, Tensor]:
        """`v*Ĝv/v*v` and the unit vector along `Ĝv`; 0 where v is zero."""
        w = self.times(v)
        x, y = v.numpy().astype(np.float64), w.numpy().astype(np.float64)
        length, size = float(x @ x), math.sqrt(float(y @ y))
        if not (0 < length < math.inf and 0 < size < math.inf):
            return 0.0, random_start(len(v), v)
        return float(x @ y) / length, w / size

    def lower(self, quotient: float) -> float:
        """`l ≤ σ₁²` from a Rayleigh quotient, with the rounding of the product and of Ĝ taken off."""
        return max(0.0, deflate(quotient * (1 - 1e-12) - self.lost))


def single_loss(n: int) -> float:
    """Roughly the share of the norm that a proof in float32 gives away, for a matrix with n columns of like size."""
    f32 = torch.float32
    products = gamma(summed(n, f32), f32) + 2 * gamma(n + 8, f32)
    return 0.5 * (n * cholesky_gamma(n, f32) + n / 4 * products)


def single_bracket(A: Tensor, start: Tensor | None, enough: float) -> tuple[float, float, Tensor] | None:
    """`(lower, upper, v)` of σ₁(A), A of float32 on the CPU with no more columns than rows; None where no proof was found.

    `upper` is `enough` where that can be proved at once. Otherwise it lies above the Ritz value that Lanczos steps reach from
    `start` by as much as rounding takes.

    >>> lower, upper, _ = single_bracket(torch.diag(torch.tensor([3.0, 2.0, 1.0])), None, 0.0)
    >>> lower <= 3 <= upper <= 3.01
    True
    """
    g = Single.of(A)
    if g is None:
        return None
    value, v = g.quotient(random_start(len(g.G), A) if start is None else start)
    low = g.lower(value)
    s = g.shift(deflate(enough * enough)) if enough < 1e9 else 0.0
    if value < s and g.below(s):
        return deflate(math.sqrt(low)), enough, v
    for steps in STEPS:
        value, v = g.quotient(lanczos(g.times, v if steps == STEPS[0] else mixed(v), steps))
        low = max(low, g.lower(value))
        s = float(np.float32(value * (1 + 5e-4)))
        if g.below(s):
            return deflate(math.sqrt(low)), inflate(math.sqrt(inflate(g.bound(s)))), v
    return None
