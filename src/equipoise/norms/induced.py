"""Operator norms induced by ℓ1 and ℓ∞: largest absolute column and row sums.

For a matrix `‖W‖_∞ = max_i Σ_j |w_ij|` and `‖W‖_1 = max_j Σ_i |w_ij|`. A convolution is a matrix whose rows hold every
kernel entry at most once (zero padding), so `|K|` applied to an image of ones gives all row sums at once, and its adjoint
all column sums: exact, borders and strides included. Other paddings may read a pixel several times; the sums of absolute
values are then upper bounds.

Reference: Gouk et al. 2021, *Regularisation of neural networks by enforcing Lipschitz continuity*.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from equipoise.core import Bracket, InputError
from equipoise.core.precision import gamma, inflate, require_finite
from equipoise.maps.geometry import padding_norm
from equipoise.maps.linear import Adjoint, Convolution, Diagonal, Linear, Matrix
from equipoise.maps.reading import read
from equipoise.norms.gram import wide

Order = Literal["l1", "linf"]


def induced_norm(
    operator: Tensor | nn.Module, order: Order, *, input_size: int | tuple[int, ...] | None = None
) -> Bracket:
    """The norm of a matrix or layer induced by ℓ1 or ℓ∞, exact up to rounding where the padding is zeros.

    Args:
        operator: a matrix `(m, n)`, an `nn.Linear` or a convolution (transposed ones included).
        order: `l1` (largest column sum) or `linf` (largest row sum).
        input_size: spatial size of a convolution's input; unknown: the supremum over all sizes.

    >>> W = torch.tensor([[1.0, -2.0], [0.0, 3.0]])
    >>> round(float(induced_norm(W, "l1").upper), 6), round(float(induced_norm(W, "linf").upper), 6)
    (5.0, 3.0)
    """
    if order not in ("l1", "linf"):
        raise InputError(f"order must be l1 or linf, got {order!r}")
    with torch.no_grad():
        if isinstance(operator, Tensor):
            if operator.dim() != 2:
                raise InputError(f"expected a matrix (m, n), got shape {tuple(operator.shape)}")
            return map_norm(Matrix(operator.detach()), order)
        return map_norm(read(operator, input_size), order)


def map_norm(form: Linear, order: Order) -> Bracket:
    """The same for any linear map without a rounding error of its own (that is known in ℓ2 only).

    Args:
        form: the linear map.
        order: `l1` or `linf`.
    """
    if isinstance(form, Adjoint):
        return map_norm(form.conv, "l1" if order == "linf" else "linf")
    if isinstance(form, Diagonal):
        top = float(wide(form.factor).abs().max())
        # the error of the worst factor
        return Bracket(max(0.0, top - form.error), inflate(top + form.error), method="exact")
    if isinstance(form, Matrix):
        if form.error:
            raise InputError("the rounding of a composed matrix is bounded in ℓ2, not in ℓ1 or ℓ∞")
        sums = require_finite(wide(form.matrix)).abs().sum(1 if order == "linf" else 0)
        return _largest(sums, form.matrix.numel())
    if isinstance(form, Convolution):
        if form.error:
            raise InputError(
                "the rounding of a composed convolution is bounded in ℓ2, not in ℓ1 or ℓ∞"
            )
        return _convolution(form, order)
    # a padding: rows hold one pixel, columns its copies
    ones = torch.ones(1, *form.size, dtype=torch.float64)
    if order == "linf":
        return Bracket(1.0, 1.0, method="exact")
    copies = float(form.collect(form.apply(ones)).max())
    return Bracket(copies, copies, method="exact")


def _largest(sums: Tensor, terms: int, exact: bool = True) -> Bracket:
    top = float(sums.max())
    slack = gamma(terms + 8, torch.float64)
    return Bracket(
        top * (1 - slack) if exact else 0.0,
        inflate(top * (1 + slack)),
        method="sums of absolute values",
    )


def _convolution(conv: Convolution, order: Order) -> Bracket:
    """With unknown size every kernel entry counts in the sums: an output away from the borders reads each once, and a pixel
    is read by each once where the stride is 1; copies of pixels by padding count for the columns."""
    positive = conv.with_weight(require_finite(wide(conv.weight))).magnitude()
    K = positive.kernel
    if not conv.known:
        flat = K.flatten(3).sum(-1)  # (groups, out, in)
        if order == "linf":
            return _largest(flat.sum(2), K.numel())
        repeats = math.prod(round(padding_norm(axis, conv.padding) ** 2) for axis in conv.axes)
        reached = repeats == 1 and all(axis.stride == 1 for axis in conv.axes)
        return _largest(flat.sum(1) * repeats, K.numel(), reached)
    exact = conv.padding == "zeros"
    if order == "linf":
        sums = positive.apply(torch.ones(1, *conv.input_shape, dtype=torch.float64))
        return _largest(sums, K[0, 0].numel() * 4, exact)
    sums = positive.adjoint().apply(torch.ones(1, *conv.output_shape, dtype=torch.float64))
    return _largest(
        sums, K[0].numel() * 4 * math.prod(1 + a.left + a.right for a in conv.axes), exact
    )
