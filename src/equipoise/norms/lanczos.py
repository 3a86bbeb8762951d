"""Lanczos steps: the top of a Hermitian operator from below. Estimates, which other modules turn into bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from scipy.linalg.lapack import dsterf
from torch import Tensor


def random_start(n: int, like: Tensor) -> Tensor:
    """A fixed Gaussian start vector (the same every time, so that results are reproducible)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(like.device, like.dtype)


def mixed(v: Tensor) -> Tensor:
    """A unit vector near v with something of every direction: Lanczos steps never leave an eigenvector that they start from.

    >>> mixed(torch.tensor([1.0, 0.0]))[1] != 0
    tensor(True)
    """
    draw = random_start(len(v), v)
    v = v + 0.1 * torch.linalg.vector_norm(v) / torch.linalg.vector_norm(draw) * draw
    return v / torch.linalg.vector_norm(v)


@dataclass(frozen=True)
class Krylov:
    """`G Qᵀ = Qᵀ T + β q eᵀ`: orthonormal rows Q, and T tridiagonal with `diagonal` and `beside`, which ends with β."""

    Q: Any  # a NumPy array on the CPU, where a step on a short vector takes as long as its calls
    diagonal: list[float]
    beside: list[float]
    device: torch.device

    def ritz(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`(θ, r, Y)`: all Ritz values, largest first; the lengths of their residuals; their vectors are `Qᵀ Y`."""
        theta, Y = eigh_tridiagonal(self.diagonal, self.beside[:-1])
        theta, Y = theta[::-1], Y[:, ::-1]
        return theta, np.abs(self.beside[-1] * Y[-1]), Y

    def value(self) -> float:
        """The largest Ritz value."""
        if len(self.diagonal) == 1:
            return self.diagonal[0]
        return float(dsterf(self.diagonal, self.beside[:-1])[0][-1])

    def vectors(self, Y: np.ndarray) -> Tensor:
        """`Qᵀ Y` for the columns of Y."""
        if isinstance(self.Q, np.ndarray):
            return torch.from_numpy((Y.T.astype(self.Q.real.dtype) @ self.Q).T)
        return (torch.from_numpy(Y.T.copy()).to(self.device, self.Q.dtype) @ self.Q).mT

    def top(self) -> Tensor:
        """The Ritz vector of the largest value."""
        last = len(self.diagonal) - 1
        _, y = eigh_tridiagonal(self.diagonal, self.beside[:-1], select="i", select_range=(last, last))
        return self.vectors(y)[:, 0]


def krylov(
    multiply: Callable[[Tensor], Tensor],
    start: Tensor,
    steps: int,
    stop: Callable[[Krylov], bool] | None = None,
    every: int = 4,
) -> Krylov:
    """Orthogonalised steps on flat vectors; `every` fourth one `stop` may end them."""
    n, breakdown = start.numel(), 8 * torch.finfo(start.dtype).eps
    on_cpu = start.device.type == "cpu"
    q: Any = start.resolve_conj().numpy() if on_cpu else start
    apply: Callable[[Any], Any] = (lambda q: multiply(torch.from_numpy(q)).numpy()) if on_cpu else multiply
    Q: Any = np.zeros((min(steps, n), n), dtype=q.dtype) if on_cpu else start.new_zeros(min(steps, n), n)
    diagonal: list[float] = []
    beside: list[float] = []
    q = q / abs(q).max()  # squares of a small vector would vanish
    q = q / _length(q)
    for j in range(len(Q)):
        Q[j] = q
        w = apply(q)
        diagonal.append(float((q.conj() @ w).real))
        w = w - diagonal[j] * q - (beside[-1] * Q[j - 1] if j else 0.0)
        known = Q[: j + 1]
        w = w - (known.conj() @ w) @ known
        beta = _length(w)
        beside.append(beta)
        if beta <= breakdown * max(map(abs, diagonal)):
            break
        if stop is not None and (j + 1) % every == 0 and stop(Krylov(known, diagonal, beside, start.device)):
            break
        q = w / beta
    return Krylov(Q[: len(diagonal)], diagonal, beside, start.device)


def lanczos(multiply: Callable[[Tensor], Tensor], start: Tensor, steps: int, settle: float = 0.0) -> Tensor:
    """Ritz vector of the largest eigenvalue of a Hermitian operator on flat vectors.

    With `settle` it stops early, once eight steps have raised the Ritz value by no more than that share.
    """
    return krylov(multiply, start, steps, settled(settle) if settle else None).top()


def settled(share: float, calls: int = 2, enough: float = math.inf) -> Callable[[Krylov], bool]:
    """Whether the Ritz value is `enough`, or rose by no more than that share since it was asked for so many calls ago."""
    reached: list[float] = []

    def stop(space: Krylov) -> bool:
        reached.append(space.value())
        slow = len(reached) > calls and reached[-1] - reached[-1 - calls] <= share * reached[-1]
        return slow or reached[-1] >= enough

    return stop


def exhausted(share: float, enough: float) -> Callable[[Krylov], bool]:
    """Whether the Ritz value θ₁ is `enough`, or the next step promises no more than that share: about `r²/(θ₁ − θ₂)`."""

    def stop(space: Krylov) -> bool:
        if len(space.diagonal) == 1:
            return space.diagonal[0] >= enough
        theta, r, _ = space.ritz()
        return bool(theta[0] >= enough or r[0] ** 2 <= share * theta[0] * (theta[0] - theta[1]))

    return stop


def _length(q: Any) -> float:
    return math.sqrt(float((q.conj() @ q).real))
