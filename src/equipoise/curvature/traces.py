"""The trace of a loss Hessian from few products: Hutchinson, Hutch++ and XTrace, each with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from scipy.linalg import solve_triangular
from torch import nn

from equipoise.core.errors import InputError
from equipoise.curvature.hessian import Data, Loss, LossHessian, Pattern, Vector

TraceMethod = Literal["hutchinson", "hutch++", "xtrace"]
MatMat = Callable[[Vector], Vector]


@dataclass(frozen=True)
class TraceEstimate:
    """An unbiased estimate and its standard error (0 where the trace was summed up); no bound."""

    value: float
    standard_error: float
    method: str
    products: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "kind": "estimate"}


def trace(
    model: nn.Module,
    loss: Loss,
    data: Data,
    layer: Pattern = None,
    *,
    method: TraceMethod = "xtrace",
    products: int = 60,
    seed: int = 0,
    **options: Any,
) -> TraceEstimate:
    """`tr H` of the loss Hessian from `products` Hessian-vector products; exact where that many parameters or fewer.

    >>> import torch
    >>> trace(nn.Linear(2, 1, bias=False), "mse", (torch.eye(2), torch.zeros(2, 1))).value
    2.0

    References: Hutchinson 1990; Meyer et al. 2021 (Hutch++); Epperly, Tropp and Webber 2024 (XTrace).
    """
    return trace_of(LossHessian(model, loss, data, layer, **options), method=method, products=products, seed=seed)


def trace_of(
    hessian: LossHessian, *, method: TraceMethod = "xtrace", products: int = 60, seed: int = 0
) -> TraceEstimate:
    """`trace` of an operator that is there already."""
    if method not in get_args(TraceMethod):
        raise InputError(f"method must be one of {', '.join(get_args(TraceMethod))}, got {method!r}")
    if products < 6:
        raise InputError(f"a trace with a standard error takes at least 6 products, got {products}")
    n, before = hessian.size, hessian.products

    def times(X: Vector) -> Vector:
        return np.stack([hessian.matvec(column) for column in X.T], axis=1)

    if n <= products:
        return TraceEstimate(float(np.trace(times(np.eye(n)))), 0.0, "exact", hessian.products - before)
    samples = _METHODS[method](times, n, products, np.random.default_rng(seed))
    largest = float(np.abs(samples).max()) or 1.0  # squares of small numbers would vanish
    error = largest * float((samples / largest).std(ddof=1)) / math.sqrt(len(samples))
    return TraceEstimate(float(samples.mean()), error, method, hessian.products - before)


def hutchinson(times: MatMat, n: int, products: int, rng: np.random.Generator) -> Vector:
    """Samples `gᵀAg` with random signs g; their mean is unbiased."""
    G = rng.choice((-1.0, 1.0), size=(n, products))
    result: Vector = np.einsum("ij,ij->j", G, times(G))
    return result


def hutch_plus_plus(times: MatMat, n: int, products: int, rng: np.random.Generator) -> Vector:
    """`tr(QᵀAQ)` on the range Q of a sketch, plus Hutchinson on what is left: a third of the products for each part."""
    k = products // 3
    Q = np.linalg.qr(times(rng.choice((-1.0, 1.0), size=(n, k))))[0]
    G = rng.choice((-1.0, 1.0), size=(n, products - 2 * k))
    G = G - Q @ (Q.T @ G)
    result: Vector = float(np.einsum("ij,ij->", Q, times(Q))) + np.einsum("ij,ij->j", G, times(G))
    return result


def xtrace(times: MatMat, n: int, products: int, rng: np.random.Generator) -> Vector:
    """Hutch++ with every test vector left out in turn: all products serve both parts, and the samples give the error.

    With `Y = AΩ = QR`, the range of Y without column i is that of `Q(I − ssᵀ)`, s the normalised column i of `R^{-T}`.
    """
    k = products // 2
    Omega = rng.standard_normal((n, k))
    Omega *= math.sqrt(n) / np.linalg.norm(Omega, axis=0)  # uniform on the sphere
    Y = times(Omega)
    if not Y.any():
        return np.zeros(k)
    Q, R = np.linalg.qr(Y)
    Z = times(Q)
    H, W = Q.T @ Z, Q.T @ Omega
    R = R / np.abs(R).max()  # only the directions of the columns of its inverse count
    R = R + np.diag(np.where(np.diag(R) < 0, -1e-14, 1e-14))
    S = solve_triangular(R, np.eye(k), trans="T")
    S /= np.linalg.norm(S, axis=0)
    samples = np.empty(k)
    for i in range(k):
        s, w = S[:, i], W[:, i] - S[:, i] * (S[:, i] @ W[:, i])
        x = Omega[:, i] - Q @ w
        Ax = Y[:, i] - Z @ w
        length = float(x @ x)
        scale = (n - k + 1) / length if length > 1e-12 * n else 0.0  # x is uniform on a sphere of n − k + 1 dimensions
        samples[i] = np.trace(H) - s @ H @ s + scale * float(x @ Ax)
    return samples


_METHODS: dict[str, Callable[[MatMat, int, int, np.random.Generator], Vector]] = {
    "hutchinson": hutchinson,
    "hutch++": hutch_plus_plus,
    "xtrace": xtrace,
}
