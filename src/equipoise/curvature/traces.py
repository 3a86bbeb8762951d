"""The trace of a loss Hessian from few products: Hutchinson, Hutch++ and XTrace, each with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import stdtrit
from torch import nn

from equipoise.core.errors import InputError, require_one_of
from equipoise.curvature.hessian import Data, Loss, LossHessian, Pattern, Vector

TraceMethod = Literal["hutchinson", "hutch++", "xtrace"]
MatMat = Callable[[Vector], Vector]


@dataclass(frozen=True)
class TraceEstimate:
    """An unbiased estimate and its standard error (0 where the trace was summed up); no bound.

    `samples` is the number of random vectors the error comes from. XTrace's samples share their products, so its error is
    the jackknife's over vectors left out, which is too large rather than too small on average (Efron & Stein 1981).
    """

    value: float
    standard_error: float
    method: str
    products: int
    samples: int = 0

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Student's interval `value ± t·standard_error` with `samples − 1` degrees of freedom.

        XTrace's covers the trace at the level asked for, from 6 products on, over definite and indefinite spectra (tested).
        Hutchinson's and Hutch++'s take their samples for normal: below 95 % where few large eigenvalues rule them.

        >>> tuple(round(end, 2) for end in TraceEstimate(1.0, 0.1, "xtrace", 20, 10).interval())
        (0.77, 1.23)
        """
        if not 0 < confidence < 1:
            raise InputError(f"a confidence lies between 0 and 1, got {confidence}")
        reach = float(stdtrit(self.samples - 1, (1 + confidence) / 2)) * self.standard_error if self.samples else 0.0
        return self.value - reach, self.value + reach

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `interval` is that of 95 %."""
        return {**vars(self), "interval": list(self.interval()), "kind": "estimate"}


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
    require_one_of(get_args(TraceMethod), method=method)
    if products < 6:
        raise InputError(f"a trace with a standard error takes at least 6 products, got {products}")
    n, before = hessian.size, hessian.products

    def times(X: Vector) -> Vector:
        return np.stack([hessian.matvec(column) for column in X.T], axis=1)

    if n <= products:
        return TraceEstimate(float(np.trace(times(np.eye(n)))), 0.0, "exact", hessian.products - before)
    value, error, samples = _METHODS[method](times, n, products, np.random.default_rng(seed))
    return TraceEstimate(value, error, method, hessian.products - before, samples)


def independent(samples: Vector) -> tuple[float, float, int]:
    """Mean, standard error and number of independent samples."""
    largest = float(np.abs(samples).max()) or 1.0  # squares of small numbers would vanish
    error = largest * float((samples / largest).std(ddof=1)) / math.sqrt(len(samples))
    return float(samples.mean()), error, len(samples)


def hutchinson(times: MatMat, n: int, products: int, rng: np.random.Generator) -> tuple[float, float, int]:
    """Samples `gᵀAg` with random signs g; their mean is unbiased."""
    G = rng.choice((-1.0, 1.0), size=(n, products))
    return independent(np.einsum("ij,ij->j", G, times(G)))


def hutch_plus_plus(times: MatMat, n: int, products: int, rng: np.random.Generator) -> tuple[float, float, int]:
    """`tr(QᵀAQ)` on the range Q of a sketch, plus Hutchinson on what is left: a third of the products for each part."""
    k = products // 3
    Q = np.linalg.qr(times(rng.choice((-1.0, 1.0), size=(n, k))))[0]
    G = rng.choice((-1.0, 1.0), size=(n, products - 2 * k))
    G = G - Q @ (Q.T @ G)
    return independent(float(np.einsum("ij,ij->", Q, times(Q))) + np.einsum("ij,ij->j", G, times(G)))


def xtrace(times: MatMat, n: int, products: int, rng: np.random.Generator) -> tuple[float, float, int]:
    """Hutch++ with every test vector left out in turn: all products serve both parts.

    The standard error is the jackknife's, `√((k − 1)/k·Σ_j (T_j − T̄)²)` with T_j the estimate without vector j, which takes
    no further product. The spread of the k samples would be too small: they share the sketch.
    """
    k = products // 2
    Omega = rng.standard_normal((n, k))
    Omega *= math.sqrt(n) / np.linalg.norm(Omega, axis=0)  # uniform on the sphere
    Y = times(Omega)
    if not Y.any():
        return 0.0, 0.0, k
    Q, R = np.linalg.qr(Y)
    Z = times(Q)
    whole = _Sketch(n, R, Q.T @ Z, Q.T @ Omega, (Omega * Omega).sum(0), (Omega * Y).sum(0), Omega.T @ Z)
    without = np.array([whole.without(j).estimate() for j in range(k)])
    largest = float(np.abs(without).max()) or 1.0
    spread = float(np.square((without - without.mean()) / largest).sum())
    return whole.estimate(), largest * math.sqrt((k - 1) / k * spread), k


@dataclass(frozen=True)
class _Sketch:
    """XTrace in the coordinates of the range Q of `Y = AΩ = QR`, `Z = AQ`: k × k matrices only.

    H = QᵀZ, W = QᵀΩ, `squares` = diag ΩᵀΩ, `forms` = diag ΩᵀY, `mixed` = ΩᵀZ.
    """

    n: int
    R: Vector
    H: Vector
    W: Vector
    squares: Vector
    forms: Vector
    mixed: Vector

    def without(self, j: int) -> _Sketch:
        """The sketch of all vectors but j."""
        kept = np.arange(self.R.shape[1]) != j
        P, R = np.linalg.qr(self.R[:, kept])
        return _Sketch(
            self.n, R, P.T @ self.H @ P, P.T @ self.W[:, kept], self.squares[kept], self.forms[kept], self.mixed[kept] @ P
        )  # fmt: skip

    def estimate(self) -> float:
        """The mean over i of `tr(Q_iᵀAQ_i)` plus Hutchinson with vector i outside Q_i, Q_i the range without column i.

        That range is the one of `Q(I − ssᵀ)`, s the normalised column i of `R^{-T}`.
        """
        k = self.R.shape[1]
        R = self.R / (np.abs(self.R).max() or 1.0)  # only the directions of the columns of its inverse count
        R = R + np.diag(np.where(np.diag(R) < 0, -1e-14, 1e-14))
        S = solve_triangular(R, np.eye(k), trans="T")
        S /= np.linalg.norm(S, axis=0)
        W = self.W - S * (S * self.W).sum(0)  # Ω_i in the coordinates of Q_i
        lengths = self.squares - 2 * (W * self.W).sum(0) + (W * W).sum(0)
        forms = self.forms - (self.mixed.T * W).sum(0) - (W * self.R).sum(0) + (W * (self.H @ W)).sum(0)
        outside = lengths > 1e-12 * self.n  # Ω_i outside Q_i is uniform on a sphere of n − k + 1 dimensions
        scale = np.where(outside, (self.n - k + 1) / np.where(outside, lengths, 1.0), 0.0)
        return float((np.trace(self.H) - (S * (self.H @ S)).sum(0) + scale * forms).mean())


_METHODS: dict[str, Callable[[MatMat, int, int, np.random.Generator], tuple[float, float, int]]] = {
    "hutchinson": hutchinson,
    "hutch++": hutch_plus_plus,
    "xtrace": xtrace,
}
