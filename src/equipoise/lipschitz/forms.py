"""Linear maps that can be composed exactly: scaling of channels, dense matrices, convolutions, padding.

The norm of a composition is at most, and often far below, the product of the norms. Compositions are computed in float64;
`error` bounds the ℓ2 operator norm of what rounding did to them, and is added to every norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from equipoise.core.bounds import Bracket
from equipoise.core.precision import frobenius, full_precision, gamma, up
from equipoise.lipschitz import coarse
from equipoise.norms import spectral_norm
from equipoise.norms.convolution import conv_bracket
from equipoise.norms.geometry import Padding, from_kernel

#: a composed matrix with more entries than this is not formed
ENTRIES = 40_000_000
_U = 2.0**-53
_TINY = 1e-290  # covers underflow


@dataclass(frozen=True)
class Scale:
    """Multiplication of the entries along dimension `dim` by `factor` (one number: of everything)."""

    factor: Tensor
    dim: int
    error: float = 0.0


@dataclass(frozen=True)
class Dense:
    """Multiplication of the last dimension by `matrix (out, in)`."""

    matrix: Tensor
    error: float = 0.0


@dataclass(frozen=True)
class Conv:
    """A convolution with `weight (out, in/groups, *k)`, padded by `amount` per axis, on inputs of `size`."""

    weight: Tensor
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    amount: tuple[tuple[int, int], ...]
    size: tuple[int, ...]
    padding: Padding = "zeros"
    error: float = 0.0
    scaled: tuple[Conv, Tensor, Tensor] | None = field(default=None, repr=False, compare=False)

    @property
    def geometry(self) -> tuple[object, ...]:
        """Everything but the weight."""
        return (self.stride, self.dilation, self.groups, self.amount, self.size, self.padding)

    @property
    def origin(self) -> tuple[Conv, Tensor] | None:
        """The convolution and the factors per output channel that made this one, if nothing has changed since."""
        if self.scaled is None or self.scaled[2] is not self.weight or self.scaled[0].geometry != self.geometry:
            return None
        return self.scaled[:2]


@dataclass(frozen=True)
class Pad:
    """Padding of the trailing axes by `amount`, on inputs of `size`."""

    amount: tuple[tuple[int, int], ...]
    size: tuple[int, ...]
    padding: Padding


@dataclass(frozen=True)
class Adjoint:
    """A transposed convolution: the adjoint of `conv`, whose input is this one's output."""

    conv: Conv


Linear = Scale | Dense | Conv | Pad | Adjoint


@dataclass(frozen=True)
class Cache:
    """Brackets already computed, by the identity of the weights and the geometry: shared modules are bounded once.

    `scaled` holds brackets of convolutions times a scaling of their output channels, with the factors they are for.
    """

    rtol: float = 1e-3
    known: dict[object, tuple[Tensor, Bracket]] = field(default_factory=dict)
    scaled: dict[object, tuple[Tensor, Bracket]] = field(default_factory=dict)


def _key(form: Dense | Conv) -> object:
    weight = form.matrix if isinstance(form, Dense) else form.weight
    geometry = () if isinstance(form, Dense) else form.geometry
    return (weight.data_ptr(), tuple(weight.shape), weight.dtype, tuple(weight.stride()), geometry)


def bracket(form: Linear, cache: Cache, factors: Tensor | None = None) -> Bracket:
    """Proved bracket of the operator norm, rounding of the composition included.

    `factors` (one per output channel of a convolution) announces that the convolution will be scaled by them later.
    """
    if isinstance(form, Scale):
        top = float(form.factor.abs().max()) if form.factor.numel() else 0.0
        return Bracket(max(0.0, top - form.error), up(top + form.error) if form.error else top, method="exact")
    if isinstance(form, Adjoint):
        return bracket(form.conv, cache)
    assert not isinstance(form, Pad)
    key = _key(form)
    if key not in cache.known:
        with torch.no_grad(), full_precision():
            found = _computed(form, cache, factors)
        weight = form.matrix if isinstance(form, Dense) else form.weight
        cache.known[key] = (weight, found)  # keeping the weight keeps its address from being reused
    found = cache.known[key][1]
    if form.error == 0:
        return found
    lower, upper = float(found.lower), float(found.upper)
    return replace(found, lower=max(0.0, lower - form.error), upper=up(upper + form.error))


def _computed(form: Dense | Conv, cache: Cache, factors: Tensor | None) -> Bracket:
    if isinstance(form, Dense):
        return spectral_norm(form.matrix, rtol=cache.rtol)
    if form.origin is not None:
        first, factor = form.origin
        known = cache.scaled.get(_key(first))
        if known is not None and torch.equal(known[0], factor):
            return known[1]
    conv = from_kernel(form.weight, form.padding, form.stride, form.dilation, form.groups, list(form.amount), form.size)
    spec = coarse.spectrum(conv, cache.rtol) if cache.rtol >= coarse.COARSE else None
    if spec is None:
        return conv_bracket(conv, cache.rtol)
    alone, together = coarse.pair(spec, factors, cache.rtol)
    if factors is not None and together is not None:
        cache.scaled[_key(form)] = (factors, together)
    return alone


def compose(first: Linear, then: Linear) -> Linear | None:
    """`then ∘ first` as one form, or None where it has none."""
    if isinstance(first, Pad):
        return _padded(first, then) if isinstance(then, Conv) else None
    if isinstance(then, Pad):
        return None
    if isinstance(first, Adjoint) or isinstance(then, Adjoint):
        return _scaled_adjoint(first, then)
    if isinstance(first, Scale) and isinstance(then, Scale):
        return _scales(first, then)
    if isinstance(first, Scale):
        return None if isinstance(then, Scale) else _scaled_columns(then, first)
    if isinstance(then, Scale):
        return _scaled_rows(first, then)
    if isinstance(first, Dense) and isinstance(then, Dense):
        return _product(first, then)
    if isinstance(first, Conv) and isinstance(then, Conv):
        return _pointwise_after(first, then) or _pointwise_before(first, then)
    return None


def _scaled_adjoint(first: Linear, then: Linear) -> Linear | None:
    """Scaling before a transposed convolution scales the rows of its convolution, scaling after it the columns."""
    if isinstance(first, Scale) and isinstance(then, Adjoint):
        conv = _scaled_rows(then.conv, first)
    elif isinstance(first, Adjoint) and isinstance(then, Scale):
        conv = _scaled_columns(first.conv, then)
    else:
        return None
    return Adjoint(conv) if isinstance(conv, Conv) else None


def _scales(a: Scale, b: Scale) -> Scale | None:
    if a.dim != b.dim and a.factor.numel() > 1 and b.factor.numel() > 1:
        return None
    dim = a.dim if a.factor.numel() > 1 else b.dim
    top_a, top_b = float(a.factor.abs().max()), float(b.factor.abs().max())
    error = up(4 * _U * top_a * top_b + a.error * (top_b + b.error) + b.error * top_a) + _TINY
    return Scale(a.factor * b.factor, dim, error)


def spread(weight: Tensor, form: Conv) -> float:
    """Bound of the operator norm of a convolution with this weight: Σ_taps ‖K_tap‖_F ≤ √taps·‖K‖_F.

    With other paddings than zeros a tap may read one pixel several times, at most once more per padded position.
    """
    taps = math.prod(weight.shape[2:])
    repeats = 1 if form.padding == "zeros" else math.prod(1 + sum(pair) for pair in form.amount)
    return up(float(frobenius(weight.flatten(1))) * math.sqrt(taps) * repeats)


def _scaled_rows(form: Dense | Conv, scale: Scale) -> Linear | None:
    top = float(scale.factor.abs().max())
    if isinstance(form, Dense):
        if scale.factor.numel() > 1 and (scale.dim != -1 or scale.factor.numel() != form.matrix.shape[0]):
            return None
        matrix = form.matrix.double() * scale.factor.reshape(-1, 1)
        error = up(8 * _U * float(frobenius(matrix)) + form.error * (top + scale.error))
        return Dense(matrix, up(error + scale.error * float(frobenius(form.matrix.double()))) + _TINY)
    if scale.factor.numel() > 1 and (scale.dim != 1 or scale.factor.numel() != form.weight.shape[0]):
        return None
    weight = form.weight.double() * scale.factor.reshape(-1, *[1] * (form.weight.dim() - 1))
    wide = spread(form.weight.double(), form)
    error = up(8 * _U * spread(weight, form) + form.error * (top + scale.error))
    made = (form, scale.factor, weight) if scale.factor.numel() == form.weight.shape[0] and form.error == 0 else None
    return replace(form, weight=weight, error=up(error + scale.error * wide) + _TINY, scaled=made)


def _scaled_columns(form: Dense | Conv, scale: Scale) -> Linear | None:
    top = float(scale.factor.abs().max())
    if isinstance(form, Dense):
        if scale.factor.numel() > 1 and (scale.dim != -1 or scale.factor.numel() != form.matrix.shape[1]):
            return None
        matrix = form.matrix.double() * scale.factor.reshape(1, -1)
        error = up(8 * _U * float(frobenius(matrix)) + form.error * (top + scale.error))
        return Dense(matrix, up(error + scale.error * float(frobenius(form.matrix.double()))) + _TINY)
    channels = form.weight.shape[1] * form.groups
    if scale.factor.numel() > 1 and (scale.dim != 1 or scale.factor.numel() != channels):
        return None
    factor = scale.factor.expand(channels) if scale.factor.numel() == 1 else scale.factor
    per_group = factor.reshape(form.groups, 1, -1, *[1] * (form.weight.dim() - 2))
    grouped = form.weight.double().reshape(form.groups, -1, *form.weight.shape[1:])
    weight = (grouped * per_group).reshape(form.weight.shape)
    wide = spread(form.weight.double(), form)
    error = up(8 * _U * spread(weight, form) + form.error * (top + scale.error))
    return replace(form, weight=weight, error=up(error + scale.error * wide) + _TINY)


def _product(first: Dense, then: Dense) -> Dense | None:
    if then.matrix.shape[0] * first.matrix.shape[1] > ENTRIES:
        return None
    A, B = then.matrix.double(), first.matrix.double()
    a, b = float(frobenius(A)), float(frobenius(B))
    rounding = gamma(B.shape[0] + 4, torch.float64) * a * b + _TINY
    return Dense(A @ B, up(rounding + then.error * (b + first.error) + first.error * a))


def _is_pointwise(form: Conv) -> bool:
    return (
        all(k == 1 for k in form.weight.shape[2:])
        and form.groups == 1
        and all(s == 1 for s in form.stride)
        and all(pair == (0, 0) for pair in form.amount)
    )


def _pointwise_after(first: Conv, then: Conv) -> Conv | None:
    """A 1×1 convolution after any ungrouped one mixes its output channels."""
    if not _is_pointwise(then) or first.groups != 1 or then.weight.shape[0] * first.weight[0].numel() > ENTRIES:
        return None
    A, K = then.weight.double().flatten(1), first.weight.double()
    a, k = float(frobenius(A)), spread(K, first)
    weight = (A @ K.flatten(1)).reshape(-1, *K.shape[1:])
    rounding = gamma(A.shape[1] + 4, torch.float64) * a * k + _TINY
    return replace(first, weight=weight, error=up(rounding + then.error * (k + first.error) + first.error * a))


def _pointwise_before(first: Conv, then: Conv) -> Conv | None:
    """A 1×1 convolution before any ungrouped one mixes its input channels (the padded zeros stay zeros)."""
    if not _is_pointwise(first) or then.groups != 1 or then.weight.shape[0] * first.weight.shape[1] > ENTRIES // 9:
        return None
    K, B = then.weight.double(), first.weight.double().flatten(1)
    b, k = float(frobenius(B)), spread(K, then)
    weight = torch.einsum("om...,mi->oi...", K, B).contiguous()
    rounding = gamma(B.shape[0] + 4, torch.float64) * b * k + _TINY
    return replace(then, weight=weight, error=up(rounding + then.error * (b + first.error) + first.error * k))


def _padded(pad: Pad, conv: Conv) -> Conv | None:
    """Padding in any mode before an unpadded convolution is that convolution with this padding mode."""
    if conv.padding != "zeros" or any(pair != (0, 0) for pair in conv.amount) or len(pad.amount) != len(conv.amount):
        return None
    if pad.padding == "zeros" and any(p < 0 for pair in pad.amount for p in pair):
        return None
    error = conv.error * math.prod(1 + sum(pair) for pair in pad.amount)  # a padding repeats a pixel at most so often
    return replace(conv, padding=pad.padding, amount=pad.amount, size=pad.size, error=up(error))


def parallel(a: Linear, b: Linear) -> Linear | None:
    """`a + b` of two maps with the same input and output, as one form, or None where it has none."""
    if isinstance(a, Dense) and isinstance(b, Dense):
        matrix = a.matrix.double() + b.matrix.double()
        return Dense(matrix, up(2 * _U * float(frobenius(matrix)) + a.error + b.error))
    if isinstance(a, Scale) and isinstance(b, Scale):
        if a.dim != b.dim and a.factor.numel() > 1 and b.factor.numel() > 1:
            return None
        factor = a.factor + b.factor
        dim = a.dim if a.factor.numel() > 1 else b.dim
        return Scale(factor, dim, up(2 * _U * float(factor.abs().max()) + a.error + b.error))
    if isinstance(a, Scale) and isinstance(b, Conv):
        return parallel(b, a)
    if isinstance(a, Conv) and isinstance(b, Scale):
        other = _as_conv(b, a)
        return None if other is None else parallel(a, other)
    if isinstance(a, Conv) and isinstance(b, Conv):
        return _aligned_sum(a, b)
    return None


def _as_conv(scale: Scale, like: Conv) -> Conv | None:
    """A scaling of channels as a 1×1 convolution on the same input."""
    channels = like.weight.shape[1] * like.groups
    if (scale.factor.numel() > 1 and (scale.dim != 1 or scale.factor.numel() != channels)) or channels > 1024:
        return None
    axes = len(like.size)
    weight = torch.diag(scale.factor.double().expand(channels)).reshape(channels, channels, *[1] * axes)
    zero = ((0, 0),) * axes
    return Conv(weight, (1,) * axes, (1,) * axes, 1, zero, like.size, "zeros", scale.error)


def _ungrouped(form: Conv) -> Tensor:
    weight = form.weight.double()
    if form.groups == 1:
        return weight
    parts = weight.reshape(form.groups, -1, *weight.shape[1:])
    full = weight.new_zeros(weight.shape[0], weight.shape[1] * form.groups, *weight.shape[2:])
    rows, cols = parts.shape[1], parts.shape[2]
    for g in range(form.groups):
        full[g * rows : (g + 1) * rows, g * cols : (g + 1) * cols] = parts[g]
    return full


def _aligned_sum(a: Conv, b: Conv) -> Conv | None:
    """Zero-padded convolutions with one stride add up to one kernel over the union of their taps."""
    if a.padding != "zeros" or b.padding != "zeros" or a.stride != b.stride or a.size != b.size:
        return None
    for form in (a, b):
        if any(d != 1 and k > 1 for d, k in zip(form.dilation, form.weight.shape[2:], strict=True)):
            return None
    if max(a.weight.shape[0], a.weight.shape[1] * a.groups) > 1024:
        return None
    A, B = _ungrouped(a), _ungrouped(b)
    amount = []
    box_a: list[slice] = [slice(None), slice(None)]
    box_b: list[slice] = [slice(None), slice(None)]
    shape = [A.shape[0], A.shape[1]]
    for i, n in enumerate(a.size):
        ka, kb = A.shape[2 + i], B.shape[2 + i]
        left = max(a.amount[i][0], b.amount[i][0])
        start_a, start_b = left - a.amount[i][0], left - b.amount[i][0]
        taps = max(start_a + ka, start_b + kb)
        out = (n + sum(a.amount[i]) - ka) // a.stride[i] + 1
        right = max(0, (out - 1) * a.stride[i] + taps - n - left)
        if (n + left + right - taps) // a.stride[i] + 1 != out:
            return None
        amount.append((left, right))
        box_a.append(slice(start_a, start_a + ka))
        box_b.append(slice(start_b, start_b + kb))
        shape.append(taps)
    weight = A.new_zeros(shape)
    weight[tuple(box_a)] += A
    weight[tuple(box_b)] += B
    error = up(2 * _U * spread(weight, a) + a.error + b.error)
    return Conv(weight, a.stride, (1,) * len(a.size), 1, tuple(amount), a.size, "zeros", error)
