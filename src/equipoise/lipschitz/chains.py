"""Feed-forward chains: a bound of semidefinite-programming quality in closed form, without a solver.

For `x_i = φ_i(W_i x_{i−1} + b_i)` with slopes of φ_i in [α, β], differences obey, for every layer,

    Q(δz, δx) = −αβ|δz|² + (α + β) δz·δx − |δx|² ≥ 0.

Invariant: `|δx_0|² ≥ c·δx_iᵀ Y_i δx_i` with `Y_0 = I, c = 1`. With `A = W_i Y⁻¹ W_iᵀ`, any a ≥ λ_max(A), `B = A/a`,
`m = (α + β)/2`, `t = 2/(β(β − α))` and `q = −αβ`, subtracting `(t/a)·Q` and minimising over δz gives the next

    Y = t·I − m²t²·B(I − q·t·B)⁻¹   (ReLU: Y = 2I − B),   c ← c/a,   hence   L² ≤ Π a_i · λ_max(W_l Y⁻¹ W_lᵀ).

Soundness in floating point: the invariant only weakens when A is replaced by something larger and Y by something smaller. Every
computed A is enlarged, and every computed Y shrunk, by a multiple of the identity that covers the rounding and the
verified residual of the inverse. Reference: Xu & Sivaranjani 2024 (ECLipsE-Fast); Fazlyab et al. 2019 (LipSDP).
"""

import itertools
from collections.abc import Sequence
from math import copysign, inf, ldexp, log, sqrt

import torch
from torch import Tensor, fx

from equipoise.core import InputError, frobenius, gamma, inflate, proving, require_tensor, rescaled
from equipoise.lipschitz.logs import exp_up, log_product, log_up
from equipoise.lipschitz.operations import Copy
from equipoise.lipschitz.propagate import Propagation
from equipoise.maps.linear import Matrix
from equipoise.norms import spectral_norm

#: wider layers than this are left to the product bound
WIDEST = 3000
_U = 2.0**-53
#: the slopes of the identity
LINEAR = (1.0, 1.0)
#: an approximate inverse, and a bound of its distance to the true one
Inverse = tuple[Tensor | None, float]


def chain_bound(weights: Sequence[Tensor], slopes: tuple[float, float] = (0.0, 1.0)) -> float:
    """Upper bound of the Lipschitz constant of `W_l φ(… φ(W_1 x))`, never above the product of norms.

    Args:
        weights: the matrices `(out, in)` from input to output.
        slopes: interval of slopes of the activations; ReLU by default.

    >>> W = [torch.randn(20, 10), torch.randn(20, 20), torch.randn(3, 20)]
    >>> import math
    >>> product = math.prod(float(spectral_norm(w).upper) for w in W)
    >>> chain_bound(W) <= product
    True
    """
    for weight in weights:
        require_tensor(weight, "a weight of the chain", dims=2)
    if not len(weights) or any(a.shape[0] != b.shape[1] for a, b in itertools.pairwise(weights)):
        raise InputError(
            "a chain needs matrices (out, in), each with as many inputs as the one before it has outputs"
        )
    hidden = len(weights) - 1
    with proving():
        norms = [log_up(float(spectral_norm(w.detach()).upper)) for w in weights]
        product = log_product(*norms, *[log_up(max(map(abs, slopes)))] * hidden)
        closed = _closed_form([Matrix(w.detach()) for w in weights], [slopes] * hidden)
    return exp_up(product if closed is None else min(product, closed))


def _closed_form(layers: Sequence[Matrix], slopes: Sequence[tuple[float, float]]) -> float | None:
    """Logarithm of the bound, or None where the recursion cannot be verified (α ≤ −β, a linear activation, ill conditioning)."""
    if any(not layer.matrix.any() and layer.error == 0 for layer in layers):
        return -inf
    layers, exponents = zip(*(_scaled(layer) for layer in layers), strict=True)
    total = log_product(2 * log(2) * sum(exponents))  # the bound is homogeneous in every layer
    inverse: Inverse | None = None, 0.0
    for i, layer in enumerate(layers):
        if inverse is None:
            return None
        A = _spread(layer, *inverse)
        a = inflate(float(spectral_norm(A, rtol=1e-6).upper))
        if a == 0:
            return -inf
        total = log_product(total, log_up(a))
        if i < len(slopes):
            alpha, beta = slopes[i]
            if not (beta > 0 and abs(alpha) < 0.999 * beta):
                return None
            Y = _next(A, a, alpha, beta)
            inverse = None if Y is None else verified_inverse(Y)
    return total / 2


def _scaled(layer: Matrix) -> tuple[Matrix, int]:
    """`(2^−e·layer, e)` with the largest entry brought to [1/2, 1), so that no product overflows or vanishes."""
    matrix, e = rescaled(layer.matrix.double())
    error = inflate(ldexp(layer.error, -e)) + 1e-290 if layer.error else 0.0
    return Matrix(matrix, error), e


def _spread(layer: Matrix, X: Tensor | None, e: float) -> Tensor:
    """A symmetric matrix above `W Y⁻¹ Wᵀ` for every `Y⁻¹ ⪯ X + e·I` and every W within `error` of the stored one.

    None is the identity, whose size the input of a network may have.
    """
    W = layer.matrix.double()
    w, x = float(frobenius(W)), 1.0 if X is None else float(frobenius(X))
    A = (W if X is None else W @ X) @ W.mT
    rounding = 2 * gamma(2 * W.shape[1] + 8, torch.float64) * w * w * x + 1e-290
    drift = (2 * w + layer.error) * layer.error * (x + e)
    return _symmetric(A, inflate(rounding + e * w * w + drift))


def _symmetric(A: Tensor, more: float) -> Tensor:
    """`(A + Aᵀ)/2 + more·I`, with the rounding of both added to the diagonal."""
    A = (A + A.mT) / 2
    extra = inflate(more + 4 * _U * (float(frobenius(A)) + more))
    A.diagonal().add_(extra)
    return A


def _next(A: Tensor, a: float, alpha: float, beta: float) -> Tensor | None:
    """A matrix below the next Y, for `A` above the true one and `a ≥ λ_max(A)`."""
    m, t, q = (alpha + beta) / 2, 2 / (beta * (beta - alpha)), -alpha * beta
    eye = torch.eye(len(A), dtype=torch.float64)
    size = sqrt(len(A))
    B = A / a
    far = float(frobenius(B))
    if q == 0:
        Y = t * eye - (m * m * t * t) * B
        lost = 16 * _U * (t * size + m * m * t * t * far)
        return _symmetric(Y, 0.0) - eye * inflate(lost)
    # B(I − qtB)⁻¹ = ((I − qtB)⁻¹ − I)/(qt): increasing in B for either sign of q, positive definite since qt·λ_max(B) < 1
    N = eye - (q * t) * B
    shift = inflate(16 * _U * (size + abs(q * t) * far))
    inverse = verified_inverse(N - copysign(shift, q) * eye)  # towards the larger B
    if inverse is None:
        return None
    X, e = inverse
    assert X is not None
    scale = m * m * t / q
    Y = t * eye - scale * (X - eye)
    lost = abs(scale) * (e + 16 * _U * (float(frobenius(X)) + size)) + 16 * _U * t * size
    return _symmetric(Y, 0.0) - eye * inflate(lost + 8 * _U * float(frobenius(Y)))


def verified_inverse(Y: Tensor) -> Inverse | None:
    """`(X, e)` with `‖Y⁻¹ − X‖₂ ≤ e`, from the residual `I − YX`; None where Y is not verified positive definite.

    If `‖I − YX‖ ≤ r < 1` then Y is invertible and `‖Y⁻¹ − X‖ ≤ ‖X‖·r/(1 − r)`. Positive definiteness by a Cholesky
    factorisation of
    `Y − shift·I` whose shift exceeds its backward error (Rump 2006).
    """
    n = Y.shape[0]
    size = float(frobenius(Y))
    shift = inflate(4 * (n + 8) * _U * float(Y.diagonal().abs().sum()) + 8 * _U * size)
    if int(torch.linalg.cholesky_ex(Y - shift * torch.eye(n, dtype=torch.float64))[1]) != 0:
        return None
    X = torch.linalg.inv(Y)
    if not torch.isfinite(X).all():
        return None
    X = (X + X.mT) / 2
    x = float(frobenius(X))
    R = torch.eye(n, dtype=torch.float64) - Y @ X
    r = inflate(float(frobenius(R)) + gamma(n + 8, torch.float64) * (size * x + sqrt(n)))
    return (X, inflate(x * r / (1 - r))) if r < 0.5 else None


def chain_total(run: Propagation) -> float:
    """Log-bound of the network if it ends in a chain of dense layers and pointwise activations; infinite where it does not."""
    if len(run.program.outputs) != 1:
        return inf
    layers: list[Matrix] = []
    slopes: list[tuple[float, float]] = []  # of the activation after every layer
    start = run.program.outputs[0]
    while True:
        curve, node = _activation(run, start)
        facts = run.facts[node]
        if not isinstance(facts.form, Matrix) or facts.base is None or (layers and curve == LINEAR):
            break
        layers.insert(0, facts.form)
        slopes.insert(0, curve)
        start = facts.base
    if len(layers) < 2 or max(layer.matrix.shape[0] for layer in layers[:-1]) > WIDEST:
        return inf

    with proving():
        closed = _closed_form(layers, slopes[:-1])
    last = log_up(max(map(abs, slopes[-1])))
    return inf if closed is None else log_product(closed, run.facts[start].fused, last)


def _activation(run: Propagation, node: fx.Node) -> tuple[tuple[float, float], fx.Node]:
    """The slopes of the activation that ends in this node, and its argument."""
    node = _skip(run, node)
    step = run.steps.get(node)
    if step is None or step.curve is None:
        return LINEAR, node
    return step.curve.slopes, step.gains[0][0].node


def _skip(run: Propagation, node: fx.Node) -> fx.Node:
    """The node behind identities (dropout in evaluation, casts)."""
    while node in run.steps:
        step = run.steps[node]
        if not (isinstance(step.map, Copy) and step.map.same):
            break
        node = step.gains[0][0].node
    return node
