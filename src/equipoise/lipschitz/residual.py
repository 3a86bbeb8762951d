"""Residual blocks `x + A·φ(B·x + b)` whose branch is the negative of a gradient: a bound far below `1 + ‖A‖‖B‖`.

Let the slopes of φ lie in [α, β] with α ≤ 0 ≤ β, T ≥ 0 be diagonal, `E = A + BᵀT` and `M = T^{1/2}B`. For every pair of
inputs there is a diagonal D with entries in [α, β] (the secant slopes) such that

    f(x) − f(y) = (I + A D B)(x − y) = (I − Mᵀ D M + E D B)(x − y),

because the diagonal matrices T and D commute. `Mᵀ D M` is symmetric with eigenvalues in [α‖M‖², β‖M‖²], hence

    L ≤ max(1 − α‖M‖², β‖M‖² − 1) + max(β, −α)·‖E‖‖B‖.

For slopes in [0, 1] (ReLU, tanh, sigmoid) and `‖M‖² ≤ 2` that is 1: the convex potential layer and SLL. For abs (α = −1)
it is `1 + ‖M‖²`, no better than the sum of the branches, and for GELU it lies between. T is read off the weights
(`t_j = −⟨A_j, B_j⟩/‖B_j‖²`, negative ones set to 0) and E is whatever is left, so nothing about the weights is assumed:
matrices, or a convolution and its adjoint.

References: Meunier et al. 2022 (convex potential layers); Araujo et al. 2023 (SLL); errata 6.
"""

from dataclasses import replace

import torch
from torch import Tensor

from equipoise.core.precision import frobenius, inflate
from equipoise.maps.algebra import spread
from equipoise.maps.linear import Adjoint, Convolution, Linear, Matrix, convolution
from equipoise.norms.spectral import Cache, bracket

_U = 2.0**-53


def adjoint(form: Linear | None) -> Matrix | Convolution | None:
    """The adjoint of a matrix, of a transposed convolution, or of a zero-padded convolution of stride 1."""
    if isinstance(form, Matrix):
        return Matrix(form.matrix.mT, form.error)
    if isinstance(form, Adjoint):
        return form.conv if isinstance(form.conv, Convolution) else None
    if (
        not isinstance(form, Convolution)
        or form.groups != 1
        or form.padding != "zeros"
        or any(s != 1 for s in form.stride)
    ):
        return None
    amount = [(axis.reach - axis.left, axis.reach - axis.right) for axis in form.axes]
    if any(p < 0 for pair in amount for p in pair):
        return None
    weight = form.weight.transpose(0, 1).flip(tuple(range(2, form.weight.dim()))).contiguous()
    turned = convolution(weight, "zeros", 1, form.dilation, 1, amount, form.geometry.out)
    return replace(turned, error=form.error)


def residual_bound(
    B: Linear | None, A: Linear | None, sign: float, slopes: tuple[float, float], cache: Cache
) -> float | None:
    """Bound of `x ↦ x + sign·A·φ(B·x + b)`; None where A has no adjoint of the geometry of B."""
    turned = adjoint(A)
    if isinstance(B, Matrix) and isinstance(turned, Matrix):
        ours, theirs = B.matrix, turned.matrix
    elif isinstance(B, Convolution) and isinstance(turned, Convolution) and B.geometry == turned.geometry:
        ours, theirs = B.weight, turned.weight
    else:
        return None
    if ours.shape != theirs.shape:
        return None
    low, high = min(0.0, slopes[0]), max(0.0, slopes[1])
    K, R = ours.double(), sign * theirs.double()  # R holds the adjoint of sign·A
    t = _multipliers(K, R)
    E = R + t * K
    if float(torch.linalg.vector_norm(E)) > 0.5 * float(torch.linalg.vector_norm(R)):
        return None  # not such a block: the sum of the branches is as good
    M = t.sqrt() * K
    lost = 8 * _U
    error = inflate(_size(E, B) + lost * (_size(R, B) + _size(t * K, B)) + turned.error)
    wide = _rebuilt(B, M, inflate(lost * _size(M, B)))
    m, b = float(bracket(wide, cache).upper), float(bracket(B, cache).upper)
    a = float(bracket(turned, cache).upper)
    curved = max(inflate(1 - low * inflate(m * m)), inflate(high * inflate(m * m)) - 1, 1.0)
    # B is known up to B.error: A D (B + ΔB) adds ‖A‖‖ΔB‖, and E D B reads the true B (b covers it)
    return inflate(curved + inflate(max(high, -low) * inflate(error * b + a * B.error)))


def _multipliers(K: Tensor, R: Tensor) -> Tensor:
    """`t_j ≥ 0` per row of B that makes `R_j + t_j·K_j` smallest, shaped to multiply K."""
    rows = K.flatten(1)
    squares = rows.square().sum(1)
    t = -(rows * R.flatten(1)).sum(1) / torch.where(squares > 0, squares, torch.ones_like(squares))
    return t.clamp_min(0).reshape(-1, *[1] * (K.dim() - 1))


def _size(K: Tensor, like: Matrix | Convolution) -> float:
    """Upper bound of the operator norm of a weight, without an iteration."""
    return float(frobenius(K)) if isinstance(like, Matrix) else spread(K, like)


def _rebuilt(like: Matrix | Convolution, weight: Tensor, error: float) -> Matrix | Convolution:
    return Matrix(weight, error) if isinstance(like, Matrix) else like.with_weight(weight, error)
