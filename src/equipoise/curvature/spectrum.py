"""The spectrum of a loss Hessian: its top eigenvalue with the residual that says how far it can be trusted, and its density."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from scipy.sparse.linalg import ArpackNoConvergence, eigsh
from torch import nn

from equipoise.core.errors import InputError, Refused
from equipoise.curvature.hessian import Data, Loss, LossHessian, Pattern, Vector

#: up to this many parameters the matrix is formed and solved
SMALL = 40
Which = Literal["LA", "SA", "LM"]


@dataclass(frozen=True)
class Eigenvalue:
    """A Ritz pair: `value = xᵀHx` and `residual = ‖Hx − value·x‖` for a unit vector x.

    Up to the rounding of the products, `[value − residual, value + residual]` contains *an* eigenvalue, and a largest one is
    at least `value`: the value is a lower bound of λ_max (an upper bound of λ_min for `which="SA"`). That it is λ_max
    itself is not proved.
    """

    value: float
    residual: float
    products: int
    parameters: int
    which: str = "LA"
    vector: Vector = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)

    @property
    def interval(self) -> tuple[float, float]:
        """Contains an eigenvalue."""
        return self.value - self.residual, self.value + self.residual

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "value": self.value,
            "residual": self.residual,
            "kind": "upper bound of the smallest" if self.which == "SA" else "lower bound of the largest",
            "parameters": self.parameters,
            "products": self.products,
        }


def top_eigenvalue(
    model: nn.Module,
    loss: Loss,
    data: Data,
    layer: Pattern = None,
    *,
    which: Which = "LA",
    tol: float = 1e-4,
    max_products: int = 1000,
    seed: int = 0,
    **options: Any,
) -> Eigenvalue:
    """The largest eigenvalue of the loss Hessian by implicitly restarted Lanczos (SciPy's `eigsh`).

    Args:
        model: the network; `loss`, `data`, `layer` and further options are those of `LossHessian`.
        which: `"LA"` the largest, `"SA"` the smallest, `"LM"` the largest in absolute value.
        tol: relative accuracy asked of ARPACK; the residual reported is measured afterwards.
        max_products: refused where this many Hessian-vector products do not suffice.
        seed: of the starting vector.

    >>> import torch
    >>> model = nn.Linear(2, 1, bias=False)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> e = top_eigenvalue(model, "mse", (x, torch.zeros(2, 1)))  # H = 2·mean xxᵀ = diag(1, 9)
    >>> round(e.value, 4), e.residual < 1e-4
    (9.0, True)
    """
    return top_of(
        LossHessian(model, loss, data, layer, **options), which=which, tol=tol, max_products=max_products, seed=seed
    )


def top_of(
    hessian: LossHessian, *, which: Which = "LA", tol: float = 1e-4, max_products: int = 1000, seed: int = 0
) -> Eigenvalue:
    """`top_eigenvalue` of an operator that is there already."""
    if which not in ("LA", "SA", "LM"):
        raise InputError(f"which must be LA, SA or LM, got {which!r}")
    n, before = hessian.size, hessian.products
    if n <= SMALL:
        values, vectors = np.linalg.eigh(_symmetric(hessian.dense()))
        index = {"LA": -1, "SA": 0, "LM": int(np.abs(values).argmax())}[which]
        x = vectors[:, index]
    else:
        x = _arpack(hessian, which, tol, max_products, seed)
    x = x / np.linalg.norm(x)
    Hx = hessian.matvec(x)
    theta = float(x @ Hx)
    return Eigenvalue(theta, _length(Hx - theta * x), hessian.products - before, n, which, x)


def _arpack(hessian: LossHessian, which: Which, tol: float, max_products: int, seed: int) -> Vector:
    n = hessian.size
    start = np.random.default_rng(seed).standard_normal(n)
    if not hessian.matvec(start).any():  # a start at random that is mapped to 0 exactly: ARPACK takes no zero matrix
        return start
    basis = min(n, 20)
    restarts = max(1, (max_products - basis) // (basis - 1))
    try:
        _, vectors = eigsh(hessian.linear_operator(), k=1, which=which, tol=tol, v0=start, ncv=basis, maxiter=restarts)
    except ArpackNoConvergence as error:
        raise Refused(
            f"no eigenvalue to tolerance {tol:g} within {max_products} Hessian-vector products; raise max_products or tol"
        ) from error
    found: Vector = vectors[:, 0]
    return found


def _length(v: Vector) -> float:
    """‖v‖ without squares that vanish."""
    largest = float(np.abs(v).max())
    return largest * float(np.linalg.norm(v / largest)) if largest > 0 else 0.0


def _symmetric(A: Vector) -> Vector:
    return (A + A.T) / 2


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
