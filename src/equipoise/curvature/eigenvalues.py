"""The top eigenvalue of a loss Hessian, with the residual that says how far it can be trusted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from scipy.sparse.linalg import ArpackNoConvergence, eigsh
from torch import nn

from equipoise.core.errors import InputError, Refused
from equipoise.curvature.hessian import Data, LossHessian, Pattern, Vector
from equipoise.curvature.losses import Loss

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
