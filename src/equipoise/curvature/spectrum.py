"""The spectrum of a loss Hessian: top eigenvalue with its residual, trace with its standard error, density."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from scipy.sparse.linalg import ArpackNoConvergence, eigsh
from scipy.special import stdtrit

from equipoise.core.checks import require_one_of
from equipoise.core.errors import InputError, Refused
from equipoise.curvature.hessian import LossHessian, Vector, require_operator

#: up to this many parameters the matrix is formed and solved
SMALL = 40
Which = Literal["LA", "SA", "LM"]
TraceMethod = Literal["hutchinson", "hutch++"]


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
        plain = {key: value for key, value in vars(self).items() if key not in ("vector", "which")}
        kind = "upper bound of the smallest" if self.which == "SA" else "lower bound of the largest"
        return {**plain, "kind": kind}


def top_eigenvalue(
    hessian: LossHessian, *, which: Which = "LA", tol: float = 1e-4, max_products: int = 1000, seed: int = 0
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
    require_one_of(get_args(Which), which=which)
    require_operator(hessian)
    before = hessian.products
    if hessian.size <= SMALL:
        H = hessian.dense()
        values, vectors = np.linalg.eigh((H + H.T) / 2)
        x = vectors[:, {"LA": -1, "SA": 0, "LM": int(np.abs(values).argmax())}[which]]
    else:
        x = _arpack(hessian, which, tol, max_products, seed)
    x = x / np.linalg.norm(x)
    Hx = hessian.matvec(x)
    theta = float(x @ Hx)
    return Eigenvalue(theta, _length(Hx - theta * x), hessian.products - before, hessian.size, which, x)


def _arpack(hessian: LossHessian, which: Which, tol: float, max_products: int, seed: int) -> Vector:
    start = np.random.default_rng(seed).standard_normal(hessian.size)
    if not hessian.matvec(start).any():  # a random start that is mapped to 0 exactly: ARPACK takes no zero matrix
        return start
    basis = min(hessian.size, 20)
    restarts = max(1, (max_products - basis) // (basis - 1))
    operator = hessian.linear_operator()
    try:
        _, vectors = eigsh(operator, k=1, which=which, tol=tol, v0=start, ncv=basis, maxiter=restarts)
    except ArpackNoConvergence as error:
        raise Refused(
            f"no eigenvalue to tolerance {tol:g} within {max_products} Hessian-vector products; raise max_products or tol"
        ) from error
    return np.asarray(vectors[:, 0])


def _length(v: Vector) -> float:
    """‖v‖ without squares that vanish."""
    largest = float(np.abs(v).max())
    return largest * float(np.linalg.norm(v / largest)) if largest > 0 else 0.0


@dataclass(frozen=True)
class TraceEstimate:
    """An unbiased estimate and its standard error (0 where the trace was summed up); no bound.

    `samples` is the number of random vectors the error comes from.
    """

    value: float
    standard_error: float
    method: str
    products: int
    samples: int = 0

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Student's interval `value ± t·standard_error` with `samples − 1` degrees of freedom.

        The samples are taken for normal: it covers less than asked where few large eigenvalues rule them.

        >>> tuple(round(end, 2) for end in TraceEstimate(1.0, 0.1, "hutch++", 30, 10).interval())
        (0.77, 1.23)
        """
        if not 0 < confidence < 1:
            raise InputError(f"a confidence lies between 0 and 1, got {confidence}")
        reach = float(stdtrit(self.samples - 1, (1 + confidence) / 2)) * self.standard_error if self.samples else 0.0
        return self.value - reach, self.value + reach

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `interval` is that of 95 %."""
        return {**vars(self), "interval": list(self.interval()), "kind": "estimate"}


def trace(hessian: LossHessian, *, method: TraceMethod = "hutch++", products: int = 60, seed: int = 0) -> TraceEstimate:
    """`tr H` of the loss Hessian from `products` Hessian-vector products; exact where that many parameters or fewer.

    Hutchinson's samples are `gᵀHg` with random signs g. Hutch++ takes the trace on the range Q of a sketch exactly and
    Hutchinson's samples outside it, with a third of the products for each part.

    Args:
        hessian: the operator.
        method: `"hutch++"` or `"hutchinson"`.
        products: number of Hessian-vector products, at least 6.
        seed: of the random vectors.

    >>> import torch
    >>> from torch import nn
    >>> trace(LossHessian(nn.Linear(2, 1, bias=False), "mse", (torch.eye(2), torch.zeros(2, 1)))).value
    2.0

    References: Hutchinson 1990; Meyer et al. 2021 (Hutch++).
    """
    require_one_of(get_args(TraceMethod), method=method)
    if products < 6:
        raise InputError(f"a trace with a standard error takes at least 6 products, got {products}")
    require_operator(hessian)
    n, before = hessian.size, hessian.products
    rng = np.random.default_rng(seed)

    def signs(count: int) -> Vector:
        return rng.choice((-1.0, 1.0), size=(n, count))

    def times(X: Vector) -> Vector:
        return np.stack([hessian.matvec(column) for column in X.T], axis=1)

    if n <= products:
        return TraceEstimate(float(np.trace(times(np.eye(n)))), 0.0, "exact", hessian.products - before)
    inside, sketch = 0.0, 0
    Q = np.zeros((n, 0))
    if method == "hutch++":
        sketch = products // 3
        Q = np.linalg.qr(times(signs(sketch)))[0]
        inside = float(np.sum(Q * times(Q)))
    G = signs(products - 2 * sketch)
    G = G - Q @ (Q.T @ G)
    samples = inside + np.sum(G * times(G), axis=0)

    largest = float(np.abs(samples).max()) or 1.0  # squares of small numbers would vanish
    error = largest * float((samples / largest).std(ddof=1)) / math.sqrt(len(samples))
    return TraceEstimate(float(samples.mean()), error, method, hessian.products - before, len(samples))


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

    def mass_below(self, value: float) -> float:
        """Estimate of the share of eigenvalues at most `value`."""
        return float(self.weights[self.nodes <= value].sum())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = {"nodes": self.nodes.tolist(), "weights": self.weights.tolist()}
        return {**vars(self), **plain, "kind": "estimate"}


def spectral_density(hessian: LossHessian, *, steps: int = 30, vectors: int = 4, seed: int = 0) -> SpectralDensity:
    """How the eigenvalues of the loss Hessian are spread: stochastic Lanczos quadrature.

    Args:
        hessian: the operator.
        steps: Lanczos steps per vector.
        vectors: random vectors.
        seed: of the vectors.

    >>> import torch
    >>> from torch import nn
    >>> d = spectral_density(LossHessian(nn.Linear(2, 1, bias=False), "mse", (torch.eye(2), torch.zeros(2, 1))))
    >>> round(d.moment(1), 6)  # both eigenvalues are 1
    1.0

    Reference: Ubaru, Chen and Saad 2017; Ghorbani et al. 2019.
    """
    if steps < 1 or vectors < 1:
        raise InputError(f"expected at least one step and one vector, got {steps} and {vectors}")
    require_operator(hessian)
    rng, before = np.random.default_rng(seed), hessian.products
    nodes, weights = [], []
    for _ in range(vectors):
        v = rng.choice((-1.0, 1.0), size=hessian.size)
        T = lanczos(hessian, v / np.linalg.norm(v), min(steps, hessian.size))
        theta, U = np.linalg.eigh(T)
        nodes.append(theta)
        weights.append(U[0] ** 2 / vectors)
    values, shares = np.concatenate(nodes), np.concatenate(weights)
    order = np.argsort(values)
    return SpectralDensity(values[order], shares[order], vectors, hessian.products - before)


def lanczos(hessian: LossHessian, v: Vector, steps: int) -> Vector:
    """The tridiagonal matrix of Lanczos from the unit vector v, fully reorthogonalised."""
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
