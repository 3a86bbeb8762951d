"""Composition and sums of linear maps as one map, where there is one.

The norm of a composition is at most, and often far below, the product of the norms. Compositions are computed in float64;
`error` bounds the ℓ2 operator norm of what rounding did to them.
"""

from dataclasses import replace
from math import prod, sqrt

import torch
from torch import Tensor

from equipoise.core.precision import frobenius, gamma, inflate
from equipoise.maps.geometry import Axis, Geometry
from equipoise.maps.linear import Adjoint, Convolution, Diagonal, Linear, Matrix, Padding

#: a composed matrix with more entries than this is not formed
ENTRIES = 40_000_000
#: sums of convolutions with more channels than this are not formed
CHANNELS = 1024
_U = 2.0**-53
_TINY = 1e-290  # covers underflow


def compose(first: Linear, then: Linear) -> Linear | None:
    """`then ∘ first` as one map, or None where it has none.

    Args:
        first: the map that is applied first.
        then: the map that is applied to its outputs.
    """
    match first, then:
        case Padding(), Convolution():
            return _padded(first, then)
        case (Padding(), _) | (_, Padding()):
            return None
        # `BA = (A*B*)*`: scaling before a transposed convolution scales the rows of its convolution
        case (Diagonal(), Adjoint()) | (Adjoint(), Diagonal()):
            turned = compose(then.adjoint(), first.adjoint())
            return None if turned is None else turned.adjoint()
        case Diagonal(), Diagonal():
            return _scales(first, then)
        case Diagonal(), (Matrix() | Convolution()):
            return _scaled(then, first, rows=False)
        case ((Matrix() | Convolution()), Diagonal()):
            return _scaled(first, then, rows=True)
        case Matrix(), Matrix():
            return _product(first, then)
        case Convolution(), Convolution():
            return _with_pointwise(first, then)
    return None


def add(a: Linear, b: Linear) -> Linear | None:
    """`a + b` of two maps with the same input and output, as one map, or None where it has none.

    Args:
        a: one map.
        b: the other.
    """
    match a, b:
        case Matrix(), Matrix():
            matrix = a.matrix.double() + b.matrix.double()
            return Matrix(matrix, inflate(2 * _U * float(frobenius(matrix)) + a.error + b.error))
        case Diagonal(), Diagonal():
            dim = _shared_dim(a, b)
            if dim is None:
                return None
            factor = a.factor + b.factor
            return Diagonal(
                factor, dim, inflate(2 * _U * float(factor.abs().max()) + a.error + b.error)
            )
        case Diagonal(), Convolution():
            return add(b, a)
        case Convolution(), Diagonal():
            other = _as_convolution(b, a)
            return None if other is None else add(a, other)
        case Convolution(), Convolution():
            return _aligned_sum(a, b)
    return None


def spread(weight: Tensor, conv: Convolution) -> float:
    """Bound of the operator norm of a convolution with this weight: Σ_taps ‖K_tap‖_F ≤ √taps·‖K‖_F.

    With other paddings than zeros a tap may read one pixel several times, at most once more per padded position.

    Args:
        weight: the weight.
        conv: a convolution with the geometry.
    """
    taps = prod(weight.shape[2:])
    repeats = 1 if conv.padding == "zeros" else prod(1 + sum(pair) for pair in conv.amount)
    return inflate(float(frobenius(weight.flatten(1))) * sqrt(taps) * repeats)


def _shared_dim(a: Diagonal, b: Diagonal) -> int | None:
    """The dimension along which both scale; None where there are two."""
    if a.dim != b.dim and a.factor.numel() > 1 and b.factor.numel() > 1:
        return None
    return a.dim if a.factor.numel() > 1 else b.dim


def _scales(a: Diagonal, b: Diagonal) -> Diagonal | None:
    dim = _shared_dim(a, b)
    if dim is None:
        return None
    top_a = float(a.factor.abs().max())
    top_b = float(b.factor.abs().max())
    error = _product_error(4 * _U * top_a * top_b, top_a, a.error, top_b, b.error)
    return Diagonal(a.factor * b.factor, dim, error)


def _scaled(form: Matrix | Convolution, scale: Diagonal, rows: bool) -> Matrix | Convolution | None:
    """`diag(f)·A` (rows) or `A·diag(f)` (columns); the rounding of the product and the errors of both factors add up."""
    if isinstance(form, Matrix):
        weight = form.matrix.double()
        groups = 1
        dim = -1
    else:
        weight = form.weight.double()
        groups = form.groups
        dim = 1
    side = weight.shape[0] if rows else weight.shape[1] * groups
    factor = scale.factor
    top = float(scale.factor.abs().max())
    if factor.numel() > 1 and (scale.dim != dim or factor.numel() != side):
        return None

    # blocks of (group, output, input, *taps); the factors lie along the second or the third axis
    blocks = weight.reshape(groups, -1, *weight.shape[1:])
    along = (groups, -1, 1) if rows else (groups, 1, -1)
    product = blocks * factor.reshape(-1).expand(side).reshape(*along, *[1] * (weight.dim() - 2))
    scaled = product.reshape(weight.shape)

    size, before = (
        float(frobenius(w)) if isinstance(form, Matrix) else spread(w, form)
        for w in (scaled, weight)
    )
    error = _product_error(8 * _U * size, top, scale.error, before, form.error)
    return Matrix(scaled, error) if isinstance(form, Matrix) else form.with_weight(scaled, error)


def _product(first: Matrix, then: Matrix) -> Matrix | None:
    if then.matrix.shape[0] * first.matrix.shape[1] > ENTRIES:
        return None
    A = then.matrix.double()
    B = first.matrix.double()
    a = float(frobenius(A))
    b = float(frobenius(B))
    rounding = gamma(B.shape[0] + 4, torch.float64) * a * b
    return Matrix(A @ B, _product_error(rounding, a, then.error, b, first.error))


def _is_pointwise(conv: Convolution) -> bool:
    plain = all(
        axis.kernel == axis.stride == 1 and axis.left == axis.right == 0 for axis in conv.axes
    )
    return plain and conv.groups == 1


def _with_pointwise(first: Convolution, then: Convolution) -> Convolution | None:
    """A 1×1 convolution after any ungrouped one mixes its output channels, before it its input channels (zeros stay zeros)."""
    after = _is_pointwise(then)
    if not after and not _is_pointwise(first):
        return None
    conv, mix = (first, then) if after else (then, first)
    kept, inner = mix.weight.shape[:2] if after else reversed(mix.weight.shape[:2])
    if conv.groups != 1 or conv.weight.numel() // inner * kept > ENTRIES:
        return None
    K = conv.weight.double()
    A = mix.weight.double().flatten(1)
    weight = torch.einsum("om,mi...->oi..." if after else "mi,om...->oi...", A, K).contiguous()
    a = float(frobenius(A))
    k = spread(K, conv)
    rounding = gamma(inner + 4, torch.float64) * a * k
    return conv.with_weight(weight, _product_error(rounding, a, mix.error, k, conv.error))


def _product_error(rounding: float, a: float, error_a: float, b: float, error_b: float) -> float:
    """Bound of the error of a product of maps of norms at most a and b, with errors of their own."""
    return inflate(rounding + error_a * (b + error_b) + error_b * a) + _TINY


def _padded(pad: Padding, conv: Convolution) -> Convolution | None:
    """Padding in any mode before an unpadded convolution is that convolution with this padding mode."""
    plain = conv.padding == "zeros" and not any(map(any, conv.amount))
    crops = any(p < 0 for pair in pad.amount for p in pair)
    if not plain or crops or len(pad.amount) != len(conv.amount):
        return None
    axes = tuple(
        replace(axis, left=left, right=right, size=n)
        for axis, (left, right), n in zip(conv.axes, pad.amount, pad.size, strict=True)
    )
    # a padding repeats a pixel at most so often
    error = conv.error * prod(1 + sum(pair) for pair in pad.amount)
    return Convolution(
        conv.weight, replace(conv.geometry, axes=axes, padding=pad.padding), inflate(error)
    )


def _as_convolution(scale: Diagonal, like: Convolution) -> Convolution | None:
    """A scaling of channels as a 1×1 convolution on the same input."""
    channels = like.geometry.channels
    if (
        scale.factor.numel() > 1 and (scale.dim != 1 or scale.factor.numel() != channels)
    ) or channels > CHANNELS:
        return None
    weight = torch.diag(scale.factor.double().expand(channels)).reshape(
        channels, channels, *[1] * len(like.axes)
    )
    axes = tuple(Axis(1).with_size(n) for n in like.size)
    return Convolution(weight, Geometry(tuple(weight.shape), 1, axes), scale.error)


def _ungrouped(conv: Convolution) -> Tensor:
    """The weight with the blocks of its groups on the diagonal, and zeros elsewhere."""
    parts = conv.kernel.double()
    identity = torch.eye(conv.groups, dtype=torch.float64, device=parts.device)
    return torch.einsum("gh,goi...->gohi...", identity, parts).flatten(0, 1).flatten(1, 2)


def _aligned_sum(a: Convolution, b: Convolution) -> Convolution | None:
    """Zero-padded convolutions with one stride add up to one kernel over the union of their taps."""
    if not a.known or a.stride != b.stride or a.size != b.size:
        return None
    for conv in (a, b):
        dilated = any(axis.dilation != 1 and axis.kernel > 1 for axis in conv.axes)
        if conv.padding != "zeros" or dilated:
            return None
    if max(a.weight.shape[0], a.geometry.channels) > CHANNELS:
        return None
    A = _ungrouped(a)
    B = _ungrouped(b)
    axes = []
    box_a = [slice(None), slice(None)]
    box_b = [slice(None), slice(None)]
    for x, y in zip(a.axes, b.axes, strict=True):
        left = max(x.left, y.left)
        start_x = left - x.left
        start_y = left - y.left
        taps = max(start_x + x.kernel, start_y + y.kernel)
        assert x.size is not None
        assert x.out is not None
        right = max(0, (x.out - 1) * x.stride + taps - x.size - left)
        axis = Axis(taps, x.stride, 1, left, right).with_size(x.size)
        if axis.out != x.out or y.out != x.out:
            return None
        axes.append(axis)
        box_a.append(slice(start_x, start_x + x.kernel))
        box_b.append(slice(start_y, start_y + y.kernel))
    weight = A.new_zeros([A.shape[0], A.shape[1], *(axis.kernel for axis in axes)])
    weight[tuple(box_a)] += A
    weight[tuple(box_b)] += B
    error = inflate(2 * _U * spread(weight, a) + a.error + b.error)
    return Convolution(weight, Geometry(tuple(weight.shape), 1, tuple(axes)), error)
