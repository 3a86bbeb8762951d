"""Affine operations: matrices, convolutions, batch normalisation, arithmetic with constants, sums of branches."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, isfinite, prod, sqrt
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from equipoise.core import Bracket, Shape, float64, frobenius, inflate, proving
from equipoise.lipschitz.operations import Map, Opaque, Product, Scaled, Sum, Weighted
from equipoise.lipschitz.rules.products import (
    branch_matmul,
    branch_product,
    branch_quotient,
    instance_norm,
)
from equipoise.lipschitz.rules.registry import (
    Call,
    Signal,
    Step,
    as_signal,
    copies,
    largest,
    lower,
    norm_of,
    per_axis,
    rule,
)
from equipoise.lipschitz.values import aten_name
from equipoise.maps import linear as linear_maps
from equipoise.maps.linear import Adjoint, Diagonal, Linear, Matrix
from equipoise.norms import spectral_norm


def matrix_step(
    call: Call, x: Signal, weight: Tensor, bias: Tensor | None, label: str = "linear"
) -> Step:
    """`x Wᵀ + b` on the last dimension; a vector W takes that dimension away.

    Args:
        call: the operation.
        x: its argument.
        weight: W.
        bias: b, broadcast against the result.
        label: shown in the report.
    """
    vector = weight.dim() == 1
    weight = (weight.reshape(1, -1) if vector else weight).detach()
    form = Matrix(weight)
    bracket = call.bracket(form)
    top = float(bracket.upper)
    shift = torch.zeros(()) if bias is None else bias.detach().double()
    shift = torch.broadcast_to(shift, call.shape)
    row = inf if vector else inflate(top * x.row + float(frobenius(shift, (-1,)).max()))
    longest = float(frobenius(weight.double(), (-1,)).max())
    peak = inflate(longest * x.row + largest(shift))
    map = Opaque() if vector else Weighted(weight, bias, functional.linear, form, rows=-1)
    return Step(
        ((x, top),), label, bracket=bracket, offset=norm_of(shift), row=row, peak=peak, map=map
    )


@rule("aten.linear.default")
def linear(call: Call) -> Step:
    """A dense layer: its spectral norm, whatever the number of rows it is applied to."""
    return matrix_step(call, call.x, call.constant("weight"), call.constant("bias"))


@rule(
    *(f"aten.conv{d}d.{o}" for d in (1, 2, 3) for o in ("default", "padding")),
    "aten.convolution.default",
)
def convolution(call: Call) -> Step:
    """A convolution with the padding, stride, dilation, groups and input size of this very call."""
    if call.get("transposed"):
        return conv_transpose(call)
    form = _zero_padded(call, call.x.shape)
    return _conv_step(call, form, 1 - call.constant("weight").dim(), "convolution")


def _zero_padded(call: Call, shape: Shape | None = None) -> linear_maps.Convolution:
    """The convolution with the weight and settings of a call, on inputs of this shape."""
    weight = call.constant("weight").detach()
    dims = weight.dim() - 2
    dilation = per_axis(call["dilation"], dims)
    padding = 0 if call["padding"] == "valid" else call["padding"]
    amount = None if padding == "same" else [(p, p) for p in per_axis(padding, dims)]
    stride, size = per_axis(call["stride"], dims), shape and shape[-dims:]
    return linear_maps.convolution(
        weight, "zeros", stride, dilation, int(call["groups"]), amount, size
    )


def normalising(weight: Tensor | None, var: Tensor, eps: float) -> Tensor:
    """`γ/√(var + ε)` in float64: what a batch norm in evaluation multiplies its channels by.

    Args:
        weight: γ, one per channel; None for 1.
        var: running variance, one per channel.
        eps: ε.
    """
    scale = 1 / (var.double() + eps).sqrt()
    return scale if weight is None else scale * weight.double()


def _conv_step(call: Call, form: Linear, rows: int | None, label: str) -> Step:
    weight = call.constant("weight").detach()
    bias = call.constant("bias")
    bracket = call.bracket(form)
    positions = prod(call.shape) // max(1, bias.numel()) if bias is not None else 0
    offset = inflate(sqrt(positions) * norm_of(bias))
    operation: Callable[..., Tensor] = call.node.target  # type: ignore[assignment]

    def run(t: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return operation(**{**call.arguments, "input": t, "weight": w, "bias": b})

    with_batch = len(call.shape) == weight.dim()
    map = Weighted(weight, bias, run, form if with_batch else None, rows)
    return Step(((call.x, float(bracket.upper)),), label, bracket=bracket, offset=offset, map=map)


@rule("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def conv_transpose(call: Call) -> Step:
    """The adjoint of a convolution: the same norm, on the sizes of this call."""
    plain = _zero_padded(call)
    dims = len(plain.axes)
    sizes = zip(plain.axes, call.shape[-dims:], call.x.shape[-dims:], strict=True)
    form = Adjoint(plain.on([replace(axis, size=big, out=small) for axis, big, small in sizes]))
    return _conv_step(call, form, None, "transposed convolution")


@rule(
    "aten.batch_norm.default",
    "aten._native_batch_norm_legit_no_training.default",
    "aten.instance_norm.default",
)
def batch_norm(call: Call) -> Step:
    """In evaluation a diagonal map: max|γ|/√(var + ε), exactly; in training it mixes the batch."""
    if call.get("use_input_stats"):
        return instance_norm(call)
    mean, var = call.constant("running_mean"), call.constant("running_var")
    if call.get("training") or var is None:
        call.refuse(
            "batch normalisation with batch statistics mixes the samples", "call model.eval() first"
        )
    x = call.x
    shape = [1] * len(x.shape)
    shape[1] = -1
    scale = normalising(call.constant("weight"), var, float(call["eps"])).reshape(shape)
    bias = 0.0 if call["bias"] is None else call.constant("bias").double().reshape(shape)
    centre = mean.double().reshape(shape) * scale
    shift = bias - centre
    size = centre.abs() + abs(bias)
    scaled = _scaling(call, x, scale, rounded=True)
    high, far = scaled.gains[0][1], inflate(norm_of(torch.broadcast_to(shift, x.shape)))
    return replace(
        scaled,
        label="batch norm",
        bracket=Bracket(largest(scale) * (1 - 2.0**-49), high, method="exact"),
        offset=far,
        peak=inflate(scaled.peak + largest(shift)),
        row=inf,
        low=-inf,
        map=Scaled(scale, shift, size, _as_diagonal(scale, len(shape))),
    )


@rule("aten.mul.Tensor", "aten.mul.Scalar")
def multiplication(call: Call) -> Step:
    """By a constant: max|c|, with broadcasting. Two branches: see `products`."""
    a, b = call["self"], call["other"]
    if isinstance(a, Signal) and isinstance(b, Signal):
        return branch_product(call, a, b)
    return _scaling(call, a, float64(b)) if isinstance(a, Signal) else _scaling(call, b, float64(a))


@rule("aten.neg.default", "aten._neg_view.default")
def negative(call: Call) -> Step:
    """`−x`: an isometry."""
    return _scaling(call, call.x, float64(-1.0))


@rule("aten.div.Tensor", "aten.div.Scalar")
def division(call: Call) -> Step:
    """By a constant: max|1/c|, with broadcasting. Two branches: see `products`."""
    a, b = call["self"], call["other"]
    if isinstance(a, Signal) and isinstance(b, Signal):
        return branch_quotient(call, a, b)
    if isinstance(b, Signal):
        call.refuse(
            "dividing by something that depends on the input is not Lipschitz near 0",
            "use a normalisation layer",
        )
    return _scaling(call, a, 1 / float64(b), rounded=True)


def _scaling(call: Call, x: Signal, c: Tensor, rounded: bool = False) -> Step:
    if not torch.isfinite(c).all():
        call.refuse("the constant factor is not finite", "check the constants (a variance < 0?)")
    top = largest(c)
    top = inflate(top) if rounded else top
    gain, form = top, None
    if x.shape == call.shape:
        form = _as_diagonal(c, len(call.shape))
    else:
        gain = inflate(min(inflate(top * copies(x, call.shape)), _columns(c, x.shape, call.shape)))
    row = inflate(top * x.row) if x.shape[-1:] == call.shape[-1:] else inf
    low = -inf
    if c.numel() and float(c.min()) >= 0:
        low = lower(x.low * float(c.min() if x.low > 0 else c.max()))
    peak = inflate(top * x.peak)
    return Step(
        ((x, gain),), "scaling", offset=0.0, peak=peak, row=row, low=low, map=Scaled(c, form=form)
    )


def _columns(c: Tensor, shape: Shape, out: Shape) -> float:
    """The longest column of the matrix that repeats the entries by broadcasting and multiplies the copies by `c`."""
    repeated = [
        d for d, n in enumerate((1,) * (len(out) - len(shape)) + shape) if n == 1 and out[d] > 1
    ]
    return float(frobenius(torch.broadcast_to(c, out), tuple(repeated)).max()) if repeated else inf


def _as_diagonal(c: Tensor, dims: int) -> Diagonal | None:
    """A constant that varies along one dimension only, as a form (dimension 1 of images, the last of others)."""
    long = tuple(i - c.dim() for i, n in enumerate(c.shape) if n > 1)
    dim = {(): 1, (1 - dims,): 1, (-1,): -1}.get(long)
    error = inflate(8 * 2.0**-53 * largest(c))
    return None if dim is None else Diagonal(c.flatten(), dim, error)


@rule(*(f"aten.{name}.{kind}" for name in ("add", "sub", "rsub") for kind in ("Tensor", "Scalar")))
def addition(call: Call) -> Step:
    """`a + α·b`, `a − α·b` and `b − α·a`: the bounds of the branches add up; a constant only shifts."""
    a, b, alpha = call["self"], call["other"], float(call.get("alpha", 1))
    match aten_name(call.node).partition(".")[0]:
        case "add":
            return _interpolation(call) or sum_of(call, ((a, 1.0), (b, alpha)))
        case "sub":
            return sum_of(call, ((a, 1.0), (b, -alpha)))
        case _:
            return sum_of(call, ((a, -alpha), (b, 1.0)))


def _interpolation(call: Call) -> Step | None:
    """`z·(h − n) + n` with 0 ≤ z ≤ 1, as in a GRU: between h and n, so gains 1 for each and |h − n| for z."""
    node: Any = call.node
    for mixed, last in itertools.permutations(node.args[:2]) if not node.kwargs else ():
        if aten_name(mixed) != "mul.Tensor":
            continue
        for gap, gate in itertools.permutations(mixed.args):
            if aten_name(gap) != "sub.Tensor" or gap.args[1] is not last or gap.kwargs:
                continue
            values = [call.lookup(v) for v in (gap.args[0], last, gate) if isinstance(v, fx.Node)]
            if len(values) < 3 or any(v.shape != call.shape for v in values):
                continue
            h, n, z = (v if isinstance(v, Signal) else as_signal(call, v) for v in values)
            reach = inflate(n.peak + h.peak)
            if 0 <= z.low <= z.peak <= 1 and isfinite(reach):
                between = zip(values, (1.0, 1.0, reach), strict=True)
                gains = tuple((v, gain) for v, gain in between if isinstance(v, Signal))
                peak = inflate(max(n.peak, h.peak))
                return Step(gains, "interpolation", peak=peak, map=Product())
    return None


def sum_of(call: Call, terms: Sequence[tuple[Any, float]]) -> Step:
    """`Σ factor·value` with broadcasting; values that are constant shift.

    Args:
        call: the operation.
        terms: values and factors; at least one value is a signal.
    """
    gains: list[tuple[Signal, float]] = []
    weights: list[float] = []
    shift = None
    offset, peak, norm, row, low = 0.0, 0.0, 0.0, 0.0, 0.0
    for value, factor in terms:
        if isinstance(value, Signal):
            repeats = copies(value, call.shape)
            gains.append((value, repeats if abs(factor) == 1 else inflate(abs(factor) * repeats)))
            weights.append(factor)
        else:
            c, factor = float64(value) * factor, 1.0
            shift = c if shift is None else shift + c
            value, repeats = as_signal(call, torch.broadcast_to(c, call.shape)), 1.0
            offset = inflate(offset + value.norm)
        size = abs(factor)
        peak = inflate(peak + size * value.peak)
        norm = inflate(norm + inflate(size * repeats) * value.norm)
        row = inflate(row + size * value.row) if value.shape[-1:] == call.shape[-1:] else inf
        if factor:
            low = lower(low + factor * (value.low if factor > 0 else value.peak))
    if len(gains) > 1:
        label = "sum" if min(weights) > 0 else "difference"
        map: Map = Sum(tuple(weights), shift)
    else:
        label, one = "shift", float64(weights[0])
        rounding = 0.0 if abs(weights[0]) == 1 else inflate(4 * 2.0**-53 * abs(weights[0]))
        form = Diagonal(one.reshape(1), 1, rounding) if gains[0][0].shape == call.shape else None
        map = Scaled(one, shift, None if shift is None else shift.abs(), form)
    return Step(tuple(gains), label, offset=offset, peak=peak, norm=norm, row=row, low=low, map=map)


@rule("aten.matmul.default", "aten.mm.default", "aten.bmm.default", "aten.mv.default")
def matmul(call: Call) -> Step:
    """By a constant matrix: its spectral norm. Two branches: see `products`."""
    a, b = call.arguments.values()
    if isinstance(a, Signal) and isinstance(b, Signal):
        return branch_matmul(call, a, b)
    if isinstance(a, Signal) and b.dim() <= 2:
        return matrix_step(call, a, b.mT if b.dim() == 2 else b, None, "matmul")
    x, constant = (a, b) if isinstance(a, Signal) else (b, a)
    return by_matrices(call, x, constant)


def by_matrices(call: Call, x: Signal, constant: Tensor) -> Step:
    """Products with constant matrices, real or complex: the largest spectral norm.

    Args:
        call: the node.
        x: the operand that depends on the input.
        constant: the other operand, a vector or matrices in its last two dimensions.
    """
    if len(x.shape) < 2 or constant.dim() < 2:
        return Step(((x, norm_of(constant)),), "matmul", offset=0.0)
    with proving():
        norms = spectral_norm(
            constant.detach().reshape(-1, *constant.shape[-2:]), rtol=call.cache.rtol
        )
    grown = prod(call.shape[:-2]) // max(1, prod(x.shape[:-2]))
    top = inflate(float(torch.as_tensor(norms.upper).max()) * sqrt(max(1, grown)))
    return Step(((x, top),), "matmul", offset=0.0)
