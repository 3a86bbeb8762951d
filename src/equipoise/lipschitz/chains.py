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
import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from equipoise.core.checks import require_tensor
from equipoise.core.errors import InputError
from equipoise.core.precision import frobenius, full_precision, gamma, inflate, rescaled
from equipoise.lipschitz.logs import exp_up, log_product, log_up
from equipoise.lipschitz.operations import Copy
from equipoise.lipschitz.propagate import Propagation
from equipoise.maps.linear import Matrix
from equipoise.norms import spectral_norm

#: wider layers than this are left to the product bound
WIDEST = 3000
_U = 2.0**-53


def chain_bound(weights: Sequence[Tensor], slopes: tuple[float, float] = (0.0, 1.0)) -> float:
    """Upper bound of the Lipschitz constant of `W_l φ(… φ(W_1 x))`, never above the product of norms.

    Args:
        weights: the matrices `(out, in)` from input to output.
        slopes: interval of slopes of the activations; ReLU by default.

    >>> W = [torch.randn(20, 10), torch.randn(20, 20), torch.randn(3, 20)]
    >>> product = math.prod(float(spectral_norm(w).upper) for w in W)
    >>> chain_bound(W) <= product
    True
    """
    hidden = len(weights) - 1
    if hidden < 0:
        raise InputError("a chain needs at least one matrix (out, in)")
    for weight in weights:
        require_tensor(weight, "a weight of the chain", dims=2)
    if any(a.shape[0] != b.shape[1] for a, b in itertools.pairwise(weights)):
        raise InputError(
            "every matrix of a chain takes as many inputs as the one before it has outputs"
        )
    layers = [Matrix(w.detach()) for w in weights]
    with torch.no_grad(), full_precision():
        product = log_product(
            *(log_up(_norm(layer)) for layer in layers), *[log_up(max(map(abs, slopes)))] * hidden
        )
        closed = _closed_form(layers, [slopes] * hidden)
    return exp_up(product if closed is None else min(product, closed))


def _norm(layer: Matrix) -> float:
    return inflate(float(spectral_norm(layer.matrix).upper) + layer.error)


def _closed_form(layers: Sequence[Matrix], slopes: Sequence[tuple[float, float]]) -> float | None:
    """Logarithm of the bound, or None where the recursion cannot be verified (α ≤ −β, a linear activation, ill conditioning)."""
    if any(not bool(layer.matrix.any()) and layer.error == 0 for layer in layers):
        return -math.inf
    layers, exponents = zip(*(_scaled(layer) for layer in layers), strict=True)
    total = log_product(2 * math.log(2) * sum(exponents))  # the bound is homogeneous in every layer
    inverse = torch.eye(layers[0].matrix.shape[1], dtype=torch.float64), 0.0
    for layer, (alpha, beta) in zip(layers[:-1], slopes, strict=True):
        A = _spread(layer, *inverse)
        if A is None or not (beta > 0 and -alpha < 0.999 * beta and alpha < 0.999 * beta):
            return None
        a = inflate(float(spectral_norm(A, rtol=1e-6).upper))
        if a == 0:
            return -math.inf
        total = log_product(total, log_up(a))
        Y = _next(A, a, alpha, beta)
        next_inverse = None if Y is None else verified_inverse(Y)
        if next_inverse is None:
            return None
        inverse = next_inverse
    A = _spread(layers[-1], *inverse)
    if A is None:
        return None
    return log_product(total, log_up(inflate(float(spectral_norm(A, rtol=1e-6).upper)))) / 2


def _scaled(layer: Matrix) -> tuple[Matrix, int]:
    """`(2^−e·layer, e)` with the largest entry brought to [1/2, 1), so that no product overflows or vanishes."""
    matrix, e = rescaled(layer.matrix.double())
    error = inflate(math.ldexp(layer.error, -e)) + 1e-290 if layer.error else 0.0
    return Matrix(matrix, error), e


def _spread(layer: Matrix, X: Tensor, e: float) -> Tensor | None:
    """A symmetric matrix above `W Y⁻¹ Wᵀ` for every `Y⁻¹ ⪯ X + e·I` and every W within `error` of the stored one."""
    W = layer.matrix.double()
    if max(W.shape) > WIDEST and X.shape[0] > WIDEST:
        return None
    w, x = float(frobenius(W)), float(frobenius(X))
    A = W @ X @ W.mT
    rounding = 2 * gamma(2 * X.shape[0] + 8, torch.float64) * w * w * x + 1e-290
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
    n = A.shape[0]
    eye = torch.eye(n, dtype=torch.float64)
    B = A / a
    if q == 0:
        Y = t * eye - (m * m * t * t) * B
        return _symmetric(Y, 0.0) - eye * inflate(
            16 * _U * (t * math.sqrt(n) + m * m * t * t * float(frobenius(B)))
        )
    # B(I − qtB)⁻¹ = ((I − qtB)⁻¹ − I)/(qt): increasing in B for either sign of q, positive definite since qt·λ_max(B) < 1
    N = eye - (q * t) * B
    shift = inflate(16 * _U * (math.sqrt(n) + abs(q * t) * float(frobenius(B))))
    N = N - math.copysign(1.0, q) * shift * eye  # towards the larger B
    inverse = verified_inverse(N)
    if inverse is None:
        return None
    X, e = inverse
    scale = m * m * t / q
    Y = t * eye - scale * (X - eye)
    lost = abs(scale) * (
        e + 16 * _U * (float(frobenius(X)) + math.sqrt(n))
    ) + 16 * _U * t * math.sqrt(n)
    return _symmetric(Y, 0.0) - eye * inflate(lost + 8 * _U * float(frobenius(Y)))


def verified_inverse(Y: Tensor) -> tuple[Tensor, float] | None:
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
    if not bool(torch.isfinite(X).all()):
        return None
    X = (X + X.mT) / 2
    x = float(frobenius(X))
    R = torch.eye(n, dtype=torch.float64) - Y @ X
    r = inflate(float(frobenius(R)) + gamma(n + 8, torch.float64) * (size * x + math.sqrt(n)))
    return (X, inflate(x * r / (1 - r))) if r < 0.5 else None


def chain_total(run: Propagation) -> float | None:
    """Log-bound of the network if it ends in a chain of dense layers and pointwise activations; None where it does not."""
    if len(run.program.outputs) != 1:
        return None
    layers: list[Matrix] = []
    slopes: list[tuple[float, float]] = []
    start, after = _skip(run, run.program.outputs[0]), 0.0
    step = run.steps.get(start)
    if step is not None and step.curve is not None:
        after = log_up(step.gains[0][1])
        start = _skip(run, step.gains[0][0].node)

    facts = run.facts[start]
    while isinstance(facts.form, Matrix) and facts.base is not None:
        layers.insert(0, facts.form)
        start = _skip(run, facts.base)
        step = run.steps.get(start)
        if step is None or step.curve is None:
            break
        slopes.insert(0, step.curve.slopes)
        facts = run.facts[_skip(run, step.gains[0][0].node)]
    if len(layers) < 2 or max(layer.matrix.shape[0] for layer in layers[:-1]) > WIDEST:
        return None

    with torch.no_grad(), full_precision():
        closed = _closed_form(
            layers, slopes[1 - len(layers) :]
        )  # an activation before the first layer is not part of it
    return None if closed is None else log_product(closed, run.facts[start].fused, after)


def _skip(run: Propagation, node: fx.Node) -> fx.Node:
    """The node behind identities (dropout in evaluation, casts)."""
    while node in run.steps:
        step = run.steps[node]
        if not (isinstance(step.map, Copy) and step.map.same):
            break
        node = step.gains[0][0].node
    return node
