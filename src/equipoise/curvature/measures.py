"""Measured curvature: top eigenvalue with its residual, trace with its standard error, density, and sharpness."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from scipy.linalg import norm
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from equipoise.core import (
    Refused,
    require_counts,
    require_number,
    require_one_of,
    require_positive,
    require_type,
)
from equipoise.curvature.hessian import LossHessian, Vector

#: up to this many parameters the matrix is formed and solved
SMALL = 40
Which = Literal["LA", "SA", "LM"]


class _Measured:
    """A result with plain values for JSON."""

    kind = "estimate"

    def to_dict(self) -> dict[str, Any]:
        """The fields, without the eigenvector, and what kind of number it is."""
        fields = vars(self) | {"kind": self.kind}
        fields.pop("vector", None)
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in fields.items()}


@dataclass(frozen=True)
class Eigenvalue(_Measured):
    """A Ritz pair: `value = xᵀHx` and `residual = ‖Hx − value·x‖` for a unit vector x.

    Up to the rounding of the products, `[value − residual, value + residual]` contains *an* eigenvalue, and a largest one is
    at least `value`: the value is a lower bound of λ_max (an upper bound of λ_min for `which="SA"`). That it is λ_max
    itself is not proved.
    """

    value: float
    residual: float
    vector: Vector = field(repr=False, compare=False)
    kind: str = "lower bound of the largest"


def top_eigenvalue(
    hessian: LossHessian,
    *,
    which: Which = "LA",
    tol: float = 1e-4,
    max_products: int = 1000,
    seed: int = 0,
) -> Eigenvalue:
    """The largest eigenvalue of the loss Hessian by implicitly restarted Lanczos (SciPy's `eigsh`).

    Args:
        hessian: the operator.
        which: `"LA"` the largest, `"SA"` the smallest, `"LM"` the largest in absolute value.
        tol: relative accuracy asked of ARPACK; the residual reported is measured afterwards.
        max_products: refused where this many Hessian-vector products do not suffice.
        seed: of the starting vector.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(2, 1, bias=False)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> e = top_eigenvalue(LossHessian(model, "mse", (x, torch.zeros(2, 1))))  # H = 2·mean xxᵀ = diag(1, 9)
    >>> round(e.value, 4), e.residual < 1e-4
    (9.0, True)
    """
    require_one_of(Which, which=which)
    require_type(hessian, LinearOperator, "hessian")
    if hessian.size <= SMALL:
        H = hessian @ np.eye(hessian.size)
        values, vectors = np.linalg.eigh((H + H.T) / 2)
        x = vectors[:, {"LA": -1, "SA": 0, "LM": int(np.abs(values).argmax())}[which]]
    else:
        x = _arpack(hessian, which, tol, max_products, seed)
    x = x / np.linalg.norm(x)
    Hx = hessian.matvec(x)
    theta = float(x @ Hx)
    kind = "upper bound of the smallest" if which == "SA" else Eigenvalue.kind
    return Eigenvalue(theta, float(norm(Hx - theta * x)), x, kind)


def _arpack(hessian: LossHessian, which: Which, tol: float, max_products: int, seed: int) -> Vector:
    start = np.random.default_rng(seed).standard_normal(hessian.size)
    if not hessian.matvec(
        start
    ).any():  # a random start that is mapped to 0 exactly: ARPACK takes no zero matrix
        return start
    basis = min(hessian.size, 20)
    restarts = max(1, (max_products - basis) // (basis - 1))
    try:
        _, vectors = eigsh(
            hessian, k=1, which=which, tol=tol, v0=start, ncv=basis, maxiter=restarts
        )
    except ArpackNoConvergence as error:
        raise Refused(
            f"no eigenvalue to tolerance {tol:g} within {max_products} Hessian-vector products; raise max_products or tol"
        ) from error
    return vectors[:, 0]


@dataclass(frozen=True)
class TraceEstimate(_Measured):
    """An unbiased estimate and its standard error (0 where the trace was summed up); no bound."""

    value: float
    standard_error: float


def trace(hessian: LossHessian, *, products: int = 60, seed: int = 0) -> TraceEstimate:
    """`tr H` of the loss Hessian from `products` Hessian-vector products; exact where that many parameters or fewer.

    Hutchinson: the mean of `gᵀHg` over vectors g of random signs, with its standard error.

    Args:
        hessian: the operator.
        products: number of Hessian-vector products, at least 2.
        seed: of the random vectors.

    >>> import torch
    >>> from torch import nn
    >>> trace(LossHessian(nn.Linear(2, 1, bias=False), "mse", (torch.eye(2), torch.zeros(2, 1)))).value
    2.0

    Reference: Hutchinson 1990.
    """
    require_number(products, "products", least=2, whole=True)
    require_type(hessian, LinearOperator, "hessian")
    n = hessian.size
    if n <= products:
        return TraceEstimate(float(np.trace(hessian @ np.eye(n))), 0.0)
    G = np.random.default_rng(seed).choice((-1.0, 1.0), size=(n, products))
    samples = np.sum(G * (hessian @ G), axis=0)
    error = float(samples.std(ddof=1)) / math.sqrt(products)
    return TraceEstimate(float(samples.mean()), error)


@dataclass(frozen=True)
class SpectralDensity(_Measured):
    """Quadrature nodes and weights (summing to one) that stand for the eigenvalues; an estimate.

    For each random vector the first `2·steps − 1` moments `vᵀH^k v` are exact up to rounding; between vectors they vary as
    Hutchinson's estimator does.
    """

    nodes: Vector = field(repr=False)
    weights: Vector = field(repr=False)


def spectral_density(
    hessian: LossHessian, *, steps: int = 30, vectors: int = 4, seed: int = 0
) -> SpectralDensity:
    """How the eigenvalues of the loss Hessian are spread: stochastic Lanczos quadrature.

    Args:
        hessian: the operator.
        steps: Lanczos steps per vector.
        vectors: random vectors.
        seed: of the vectors.

    >>> import torch
    >>> from torch import nn
    >>> d = spectral_density(LossHessian(nn.Linear(2, 1, bias=False), "mse", (torch.eye(2), torch.zeros(2, 1))))
    >>> round(float(d.weights @ d.nodes), 6)  # both eigenvalues are 1
    1.0

    Reference: Ubaru, Chen and Saad 2017; Ghorbani et al. 2019.
    """
    require_counts(steps=steps, vectors=vectors)
    require_type(hessian, LinearOperator, "hessian")
    rng = np.random.default_rng(seed)
    nodes = []
    weights = []
    for _ in range(vectors):
        v = rng.choice((-1.0, 1.0), size=hessian.size)
        T = lanczos(hessian, v / np.linalg.norm(v), min(steps, hessian.size))
        theta, U = np.linalg.eigh(T)
        nodes.append(theta)
        weights.append(U[0] ** 2 / vectors)
    values = np.concatenate(nodes)
    shares = np.concatenate(weights)
    order = np.argsort(values)
    return SpectralDensity(values[order], shares[order])


def lanczos(hessian: LossHessian, v: Vector, steps: int) -> Vector:
    """The tridiagonal matrix of Lanczos, fully reorthogonalised.

    Args:
        hessian: the operator.
        v: a unit vector to start from.
        steps: at most so many.
    """
    basis = v[None]
    alpha: list[float] = []
    beta: list[float] = []
    for _ in range(steps):
        w = hessian.matvec(basis[-1])
        scale = float(np.linalg.norm(w))
        alpha.append(float(basis[-1] @ w))
        for _ in range(2):
            w = w - basis.T @ (basis @ w)
        beta.append(float(np.linalg.norm(w)))
        if beta[-1] <= 1e-10 * max(scale, *map(abs, alpha)):  # an invariant subspace
            break
        basis = np.vstack([basis, w / beta[-1]])
    off = beta[: len(alpha) - 1]
    return np.diag(alpha) + np.diag(off, 1) + np.diag(off, -1)


@dataclass(frozen=True)
class Sharpness(_Measured):
    """`value ≤ max_{Δ∈B} (L(θ+Δ) − L(θ))/(1 + L(θ))`: the best the ascent found, a lower bound up to rounding."""

    value: float
    loss: float
    largest_loss: float
    radius: float
    kind: str = "lower"


def sharpness(
    hessian: LossHessian,
    *,
    radius: float = 0.05,
    steps: int = 20,
    restarts: int = 2,
    seed: int = 0,
    adaptive: bool = False,
) -> Sharpness:
    """`max_{Δ∈B} (L(θ+Δ) − L(θ))/(1 + L(θ))` by projected gradient ascent on the whole data set.

    B is `‖Δ‖₂ ≤ radius`, or `‖Δ/|θ|‖₂ ≤ radius` (Kwon et al. 2021), which does not change where neurons of a ReLU network are
    rescaled. The first start is θ itself (SAM's direction, Foret et al. 2021), the others are random.

    Args:
        hessian: the operator.
        radius: of the ball.
        steps: of the ascent.
        restarts: starting points.
        seed: of the random starting points.
        adaptive: measure Δ relative to the size of each parameter.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = model.weight.data.fill_(0.0)
    >>> s = sharpness(LossHessian(model, "mse", (torch.ones(1, 1), torch.zeros(1, 1))), radius=0.5)  # L(w) = w²
    >>> round(s.value, 4)
    0.25
    """
    require_positive(radius=radius)
    require_counts(steps=steps, restarts=restarts)
    require_type(hessian, LinearOperator, "hessian")
    rng = np.random.default_rng(seed)
    base = hessian.value()
    best = base
    # the ascent is on Δ divided by this scale
    scale = hessian.theta.abs().cpu().double().numpy() if adaptive else np.ones(hessian.size)
    for start in range(restarts):
        delta = np.zeros(hessian.size)
        # at a stationary point any direction does
        if start > 0 or not np.any(scale * hessian.gradient(delta)):
            delta = _inside(rng.standard_normal(hessian.size) * radius, radius)
        for _ in range(steps):
            best = max(best, hessian.value(scale * delta))
            slope = scale * hessian.gradient(scale * delta)
            delta = _inside(delta + slope * (radius / max(norm(slope), 1e-300)), radius)
        best = max(best, hessian.value(scale * delta))
    return Sharpness((best - base) / (1 + base), base, best, radius)


def _inside(delta: Vector, radius: float) -> Vector:
    return delta * min(1.0, radius / max(norm(delta), 1e-300))
