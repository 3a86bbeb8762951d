"""Lanczos steps: the top of a Hermitian operator from below. Estimates, which other modules turn into bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]


def random_start(n: int, like: Tensor) -> Tensor:
    """A fixed Gaussian start vector of length n (the same every time, so that results are reproducible).

    Args:
        n: its length.
        like: a tensor of the type and device that it gets.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(like.device, like.dtype)


def perturb(v: Tensor) -> Tensor:
    """A unit vector near v with a share of every direction: Lanczos steps never leave an eigenvector that they start from.

    >>> perturb(torch.tensor([1.0, 0.0]))[1] != 0
    tensor(True)
    """
    noise = random_start(len(v), v)
    v = v + 0.1 * torch.linalg.vector_norm(v) / torch.linalg.vector_norm(noise) * noise
    return v / torch.linalg.vector_norm(v)


@dataclass(frozen=True)
class Krylov:
    """`G Qᵀ = Qᵀ T + β q eᵀ`: orthonormal rows Q, and T tridiagonal with `diagonal` and `off_diagonal`, which ends with β."""

    Q: Tensor
    diagonal: list[float]
    off_diagonal: list[float]

    def ritz(self) -> tuple[Tensor, Tensor]:
        """All Ritz values, smallest first, and their coordinates in the rows of Q, as columns."""
        T = torch.diag(torch.tensor(self.diagonal, dtype=torch.float64))
        beside = torch.tensor(self.off_diagonal[:-1], dtype=torch.float64)
        torch.diagonal(T, -1).copy_(beside)  # eigh reads the lower triangle
        return torch.linalg.eigh(T)

    def value(self) -> float:
        """The largest Ritz value."""
        return float(self.ritz()[0][-1])

    def top(self) -> Tensor:
        """The Ritz vector of the largest value."""
        return self.ritz()[1][:, -1].to(self.Q) @ self.Q


def krylov(
    multiply: Operator, start: Tensor, steps: int, stop: Callable[[Krylov], bool] | None = None, every: int = 4
) -> Krylov:
    """Orthogonalised Lanczos steps.

    Args:
        multiply: the Hermitian operator on flat vectors.
        start: the first vector.
        steps: how many steps at most.
        stop: ends the steps early.
        every: how often `stop` is called.
    """
    n = start.numel()
    breakdown = 8 * torch.finfo(start.dtype).eps
    Q = start.new_zeros(min(steps, n), n)
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    q = start / start.abs().amax()  # squares of a small vector would vanish
    q = q / torch.linalg.vector_norm(q)
    for j in range(len(Q)):
        Q[j] = q
        basis = Q[: j + 1]
        w = multiply(q)
        diagonal.append(float(torch.vdot(q, w).real))
        w = torch.sub(w, q, alpha=diagonal[j])
        if j:
            w = torch.sub(w, Q[j - 1], alpha=off_diagonal[-1])
        w = torch.addmv(w, basis.mT, basis.conj() @ w, alpha=-1)  # rounding brings back what the recurrence took out
        off_diagonal.append(float(torch.linalg.vector_norm(w)))
        if off_diagonal[j] <= breakdown * max(map(abs, diagonal)):
            break
        if stop is not None and (j + 1) % every == 0 and stop(Krylov(basis, diagonal, off_diagonal)):
            break
        q = w / off_diagonal[j]
    return Krylov(Q[: len(diagonal)], diagonal, off_diagonal)


def lanczos(multiply: Operator, start: Tensor, steps: int, converged: float = 0.0) -> Tensor:
    """Ritz vector of the largest eigenvalue of a Hermitian operator on flat vectors.

    Args:
        multiply: the operator.
        start: the first vector.
        steps: how many steps at most.
        converged: stop early, once eight steps have raised the Ritz value by no more than this share.
    """
    return krylov(multiply, start, steps, has_converged(converged) if converged else None).top()


def has_converged(share: float, calls: int = 2, enough: float = math.inf) -> Callable[[Krylov], bool]:
    """True if the Ritz value is `enough`, or rose by no more than `share` in the last `calls` calls.

    Args:
        share: relative gain that is not worth another step.
        calls: over how many calls the gain is counted.
        enough: a Ritz value that suffices.
    """
    values: list[float] = []

    def stop(space: Krylov) -> bool:
        values.append(space.value())
        slow = len(values) > calls and values[-1] - values[-1 - calls] <= share * values[-1]
        return slow or values[-1] >= enough

    return stop
