"""The spectral density of a loss Hessian by stochastic Lanczos quadrature."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from equipoise.core.errors import InputError
from equipoise.curvature.hessian import Data, LossHessian, Pattern, Vector
from equipoise.curvature.losses import Loss


@dataclass(frozen=True)
class SpectralDensity:
    """Quadrature nodes and weights (summing to one) that stand for the eigenvalues; an estimate.

    For each random vector the first `2·steps − 1` moments `vᵀH^k v` are exact up to rounding; between vectors they vary as
    Hutchinson's estimator does.
    """

    nodes: Vector = field(repr=False)
    weights: Vector = field(repr=False)
    vectors: int
    products: int

    def moment(self, k: int) -> float:
        """Estimate of `tr(H^k)/n`."""
        return float(self.weights @ self.nodes**k)

    def density(self, grid: Vector, width: float) -> Vector:
        """The density on a grid of values, every node widened to a Gaussian of that width."""
        if width <= 0:
            raise InputError(f"width must be positive, got {width}")
        z = (np.asarray(grid)[:, None] - self.nodes) / width
        result: Vector = np.exp(-(z**2) / 2) @ self.weights / (width * np.sqrt(2 * np.pi))
        return result

    def mass_below(self, value: float) -> float:
        """Estimate of the share of eigenvalues at most `value`."""
        return float(self.weights[self.nodes <= value].sum())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "nodes": self.nodes.tolist(),
            "weights": self.weights.tolist(),
            "vectors": self.vectors,
            "products": self.products,
            "kind": "estimate",
        }


def spectral_density(
    model: nn.Module,
    loss: Loss,
    data: Data,
    layer: Pattern = None,
    *,
    steps: int = 30,
    vectors: int = 4,
    seed: int = 0,
    **options: Any,
) -> SpectralDensity:
    """How the eigenvalues of the loss Hessian are spread, from `vectors` runs of `steps` Lanczos steps.

    >>> import torch
    >>> d = spectral_density(nn.Linear(2, 1, bias=False), "mse", (torch.eye(2), torch.zeros(2, 1)))
    >>> round(d.moment(1), 6)  # both eigenvalues are 1
    1.0

    Reference: Ubaru, Chen and Saad 2017; Ghorbani et al. 2019.
    """
    return density_of(LossHessian(model, loss, data, layer, **options), steps=steps, vectors=vectors, seed=seed)


def density_of(hessian: LossHessian, *, steps: int = 30, vectors: int = 4, seed: int = 0) -> SpectralDensity:
    """`spectral_density` of an operator that is there already."""
    if steps < 1 or vectors < 1:
        raise InputError(f"expected at least one step and one vector, got {steps} and {vectors}")
    rng, before = np.random.default_rng(seed), hessian.products
    nodes, weights = [], []
    for _ in range(vectors):
        v = rng.choice((-1.0, 1.0), size=hessian.size)
        alpha, beta = lanczos(hessian, v / np.linalg.norm(v), min(steps, hessian.size))
        T = np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1)
        theta, U = np.linalg.eigh(T)
        nodes.append(theta)
        weights.append(U[0] ** 2 / vectors)
    order = np.argsort(np.concatenate(nodes))
    return SpectralDensity(
        np.concatenate(nodes)[order], np.concatenate(weights)[order], vectors, hessian.products - before
    )


def lanczos(hessian: LossHessian, v: Vector, steps: int) -> tuple[Vector, Vector]:
    """Diagonal and off-diagonal of the Lanczos matrix from the unit vector v, fully reorthogonalised."""
    basis = [v]
    alpha: list[float] = []
    beta: list[float] = []
    for k in range(steps):
        w = hessian.matvec(basis[-1])
        scale = float(np.linalg.norm(w))
        alpha.append(float(basis[-1] @ w))
        V = np.stack(basis)
        for _ in range(2):
            w = w - V.T @ (V @ w)
        b = float(np.linalg.norm(w))
        if k == steps - 1 or b <= 1e-10 * max(scale, max(map(abs, alpha))):  # an invariant subspace is found
            break
        beta.append(b)
        basis.append(w / b)
    return np.array(alpha), np.array(beta)
