"""Affine operations: matrices, convolutions, batch normalisation, arithmetic with constants, sums of branches."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core.bounds import Bracket
from equipoise.core.precision import float64, frobenius, full_precision, inflate
from equipoise.lipschitz.operations import Map, Own, Product, Scaled, Sum, Weighted
from equipoise.lipschitz.rules.products import branch_matmul, branch_product, branch_quotient
from equipoise.lipschitz.rules.registry import Call, Signal, Step, copies, lower, norm_of, per_axis, rule
from equipoise.maps import linear as linear_maps
from equipoise.maps.linear import Adjoint, Diagonal, Linear, Matrix
from equipoise.norms import spectral_norm

_aten = torch.ops.aten


def matrix_step(call: Call, x: Signal, weight: Tensor, bias: Tensor | None, label: str = "linear") -> Step:
    """`x Wᵀ + b` on the last dimension; a vector W takes that dimension away."""
    vector = weight.dim() == 1
    weight = (weight.reshape(1, -1) if vector else weight).detach()
    form = Matrix(weight)
    found = call.bracket(form)
    top = float(found.upper)
    shift = (
        None if bias is None else torch.broadcast_to(bias.detach().double(), call.shape)
    )  # (out), (1), (rows, out) …
    b_row = 0.0 if shift is None or vector else float(frobenius(shift, (-1,)).max())
    widest = float(frobenius(weight.double(), (-1,)).max())
    b_peak = float(bias.abs().max()) if bias is not None and bias.numel() else 0.0
    return Step(
        ((x, top),), label, bracket=found, offset=norm_of(shift), row=math.inf if vector else inflate(top * x.row + b_row),
        peak=inflate(widest * x.row + b_peak), map=Own() if vector else Weighted(weight, bias, _multiply, form, rows=-1),
    )  # fmt: skip


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.nn.functional.linear(x, weight)
    return product if bias is None else product + bias


@rule("aten.linear.default")
def linear(call: Call) -> Step:
    """A dense layer: its spectral norm, whatever the number of rows it is applied to."""
    return matrix_step(call, call.x, call.constant("weight"), call.constant("bias"))


@rule("aten.addmm.default")
def addmm(call: Call) -> Step:
    """`b + x·M` with constant b and M; other forms are written out (see `decompose`)."""
    return matrix_step(call, call.signal("mat1"), call.constant("mat2").mT, call.constant("self"))


def _spatial(call: Call, x: Signal, weight: Tensor) -> tuple[int, ...]:
    dims = weight.dim() - 2
    if len(x.shape) not in (dims + 1, dims + 2):
        call.refuse(f"a convolution of a tensor of shape {x.shape}")
    return x.shape[-dims:]


@rule(*(f"aten.conv{d}d.{o}" for d in (1, 2, 3) for o in ("default", "padding")), "aten.convolution.default")
def convolution(call: Call) -> Step:
    """A convolution with the padding, stride, dilation, groups and input size of this very call."""
    x, weight = call.x, call.constant("weight")
    dims = weight.dim() - 2
    if call.get("transposed"):
        return conv_transpose(call)
    dilation, stride = per_axis(call["dilation"], dims), per_axis(call["stride"], dims)
    padding = call["padding"]
    if padding == "valid":
        padding = 0
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        amount = tuple((r // 2, r - r // 2) for r in reach)
    else:
        amount = tuple((p, p) for p in per_axis(padding, dims))
    size = _spatial(call, x, weight)
    form = linear_maps.convolution(weight.detach(), "zeros", stride, dilation, int(call["groups"]), amount, size)
    found = call.bracket(form)
    return _conv_step(call, x, found, form if len(x.shape) == dims + 2 else None, -1 - dims, "convolution")


def normalising(weight: Tensor | None, var: Tensor, eps: float) -> Tensor:
    """`γ/√(var + ε)` in float64: what a batch norm in evaluation multiplies its channels by."""
    scale = 1 / (var.double() + eps).sqrt()
    return scale if weight is None else scale * weight.double()


def _conv_step(call: Call, x: Signal, found: Bracket, form: Linear | None, rows: int | None, label: str) -> Step:
    weight: Tensor = call.constant("weight").detach()
    bias: Tensor | None = call.constant("bias")
    positions = math.prod(call.shape) // max(1, bias.numel()) if bias is not None else 0

    def run(t: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        found: Tensor = call.node.target(**{**call.arguments, "input": t, "weight": w, "bias": b})  # type: ignore[operator]
        return found

    return Step(
        ((x, float(found.upper)),), label, bracket=found, offset=inflate(math.sqrt(positions) * norm_of(bias)),
        map=Weighted(weight, bias, run, form, rows),
    )  # fmt: skip


@rule("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def conv_transpose(call: Call) -> Step:
    """The adjoint of a convolution: the same norm, on the sizes of this call."""
    x, weight = call.x, call.constant("weight")
    dims = weight.dim() - 2
    stride, dilation = per_axis(call["stride"], dims), per_axis(call["dilation"], dims)
    amount = [(p, p) for p in per_axis(call["padding"], dims)]
    plain = linear_maps.convolution(weight.detach(), "zeros", stride, dilation, int(call["groups"]), amount)
    sizes = zip(plain.axes, call.shape[-dims:], _spatial(call, x, weight), strict=True)
    form = Adjoint(plain.on([replace(axis, size=big, out=small) for axis, big, small in sizes]))
    found = call.bracket(form)
    return _conv_step(call, x, found, form if len(x.shape) == dims + 2 else None, None, "transposed convolution")


@rule("aten.batch_norm.default", "aten._native_batch_norm_legit_no_training.default", "aten.native_batch_norm.default")
def batch_norm(call: Call) -> Step:
    """In evaluation a diagonal map: max|γ|/√(var + ε), exactly; in training it mixes the batch."""
    mean, var = call.constant("running_mean"), call.constant("running_var")
    if call.get("training") or var is None:
        call.refuse("batch normalisation with batch statistics mixes the samples", "call model.eval() first")
    x = call.x
    scale = normalising(call.constant("weight"), var, float(call["eps"]))
    shift = -mean.double() * scale
    if call["bias"] is not None:
        shift = shift + call.constant("bias").double()
    if not bool(torch.isfinite(scale).all()):
        call.refuse("the running variance is negative or the scale is not finite", "check the checkpoint")
    size = (mean.double() * scale).abs() + (0.0 if call["bias"] is None else call["bias"].double().abs())
    shape = [1] * len(x.shape)
    shape[1] = -1
    top = float(scale.abs().max())
    high, far = inflate(top), norm_of(shift)
    positions = x.numel / max(1, scale.numel())
    form = Diagonal(scale, -1 if len(x.shape) == 2 else 1, inflate(8 * 2.0**-53 * top))
    return Step(
        ((x, high),), "batch norm", bracket=Bracket(top * (1 - 2.0**-49), high, method="exact"),
        offset=inflate(inflate(math.sqrt(positions)) * inflate(far)), peak=inflate(high * x.peak + inflate(far)),
        map=Scaled(scale.reshape(shape), shift.reshape(shape), size.reshape(shape), form),
    )  # fmt: skip


@rule("aten.mul.Tensor", "aten.mul.Scalar")
def multiplication(call: Call) -> Step:
    """By a constant: max|c|, with broadcasting. Two branches: see `products`."""
    a, b = call["self"], call["other"]
    if isinstance(a, Signal) and isinstance(b, Signal):
        return branch_product(call, a, b)
    return _scaling(call, a, float64(b)) if isinstance(a, Signal) else _scaling(call, b, float64(a))


@rule("aten.div.Tensor", "aten.div.Scalar")
def division(call: Call) -> Step:
    """By a constant: max|1/c|, with broadcasting. Two branches: see `products`."""
    a, b = call["self"], call["other"]
    if isinstance(a, Signal) and isinstance(b, Signal):
        return branch_quotient(call, a, b)
    if isinstance(b, Signal):
        call.refuse(
            "dividing by something that depends on the input is not Lipschitz near 0", "use a normalisation layer"
        )
    return _scaling(call, a, 1 / float64(b), rounded=True)


def _scaling(call: Call, x: Signal, c: Tensor, rounded: bool = False) -> Step:
    if not bool(torch.isfinite(c).all()):
        call.refuse("the constant factor is not finite", "check the constants")
    top = float(c.abs().max())
    top = inflate(top) if rounded else top
    gain = (
        top
        if x.shape == call.shape
        else inflate(min(inflate(top * copies(x, call.shape)), _columns(c, x.shape, call.shape)))
    )
    form = _as_diagonal(c, len(call.shape)) if x.shape == call.shape else None
    row = inflate(top * x.row) if x.shape[-1:] == call.shape[-1:] else math.inf
    low = math.inf if c.numel() == 0 else lower(x.low * float(c.min() if x.low > 0 else c.max()))
    low = low if c.numel() == 0 or float(c.min()) >= 0 else -math.inf
    return Step(
        ((x, gain),), "scaling", offset=0.0, peak=inflate(top * x.peak), row=row, low=low, map=Scaled(c, form=form)
    )


def _columns(c: Tensor, shape: tuple[int, ...], out: tuple[int, ...]) -> float:
    """The longest column of the matrix that repeats the entries by broadcasting and multiplies the copies by `c`."""
    repeated = [d for d, n in enumerate((1,) * (len(out) - len(shape)) + shape) if n == 1 and out[d] > 1]
    return float(frobenius(torch.broadcast_to(c, out), tuple(repeated)).max()) if repeated else math.inf


def _as_diagonal(c: Tensor, dims: int) -> Diagonal | None:
    """A constant that varies along one dimension only, as a form (dimension 1 of images, the last of others)."""
    error = inflate(8 * 2.0**-53 * float(c.abs().max()))
    if c.numel() == 1:
        return Diagonal(c.reshape(1), 1, error)
    long = [c.dim() - i for i, n in enumerate(c.shape) if n > 1]
    if len(long) != 1:
        return None
    dim = dims - long[0]
    if dim == dims - 1:
        return Diagonal(c.flatten(), -1, error)
    return Diagonal(c.flatten(), 1, error) if dim == 1 else None


@rule("aten.add.Tensor", "aten.add.Scalar")
def addition(call: Call) -> Step:
    """`a + α·b`: the bounds of the branches add up; a constant only shifts."""
    terms = (call["self"], 1.0), (call["other"], float(call.get("alpha", 1)))
    return _interpolation(call) or sum_of(call, terms)


def _interpolation(call: Call) -> Step | None:
    """`z·(h − n) + n` with 0 ≤ z ≤ 1, as in a GRU: between h and n, so gains 1 for each and |h − n| for z."""
    if call.get("alpha", 1) != 1:
        return None
    for mixed, n in ((call["self"], call["other"]), (call["other"], call["self"])):
        if not isinstance(mixed, Signal) or not isinstance(n, Signal) or mixed.node.target is not _aten.mul.Tensor:
            continue
        factors = [call.lookup(a) for a in mixed.node.args if isinstance(a, fx.Node)]
        for gap, z in (factors, factors[::-1]) if len(factors) == 2 else ():
            if not isinstance(gap, Signal) or not isinstance(z, Signal) or z.low < 0 or z.peak > 1 or gap.node.kwargs:
                continue
            if gap.node.target is _aten.sub.Tensor and gap.node.args[1] is n.node:
                h = call.lookup(gap.node.args[0]) if isinstance(gap.node.args[0], fx.Node) else None
                if h is None or not h.shape == n.shape == z.shape == call.shape:
                    continue
                size = inflate(n.peak + (h.peak if isinstance(h, Signal) else float(h.abs().max())))
                peak = inflate(max(n.peak, size - n.peak))
                held = ((h, 1.0),) if isinstance(h, Signal) else ()
                if math.isfinite(size):
                    return Step((*held, (n, 1.0), (z, size)), "interpolation", peak=peak, map=Product())
    return None


@rule("aten.sub.Tensor", "aten.sub.Scalar")
def subtraction(call: Call) -> Step:
    """`a − α·b`."""
    return sum_of(call, ((call["self"], 1.0), (call["other"], -float(call.get("alpha", 1)))))


@rule("aten.rsub.Scalar", "aten.rsub.Tensor")
def reverse_subtraction(call: Call) -> Step:
    """`b − α·a`."""
    return sum_of(call, ((call["self"], -float(call.get("alpha", 1))), (call["other"], 1.0)))


def sum_of(call: Call, terms: Sequence[tuple[Any, float]]) -> Step:
    """`Σ factor·value` with broadcasting; values that are constant shift."""
    gains, weights, shift = [], [], None
    offset, peak, norm, row, low = 0.0, 0.0, 0.0, 0.0, 0.0
    for value, factor in terms:
        if isinstance(value, Signal):
            repeats = copies(value, call.shape)
            grown = repeats if abs(factor) == 1 else inflate(abs(factor) * repeats)
            gains.append((value, grown))
            weights.append(factor)
            peak, norm = inflate(peak + abs(factor) * value.peak), inflate(norm + grown * value.norm)
            low = lower(low + factor * (value.low if factor > 0 else value.peak)) if factor else low
            row = inflate(row + abs(factor) * value.row) if value.shape[-1:] == call.shape[-1:] else math.inf
        else:
            c = float64(value) * factor
            shift = c if shift is None else shift + c
            spread = torch.broadcast_to(c, call.shape)
            peak = inflate(peak + float(c.abs().max()))
            low = lower(low + float(c.min()))
            offset = inflate(offset + inflate(norm_of(spread)))
            norm = inflate(norm + inflate(norm_of(spread)))
            row = inflate(row + (float(frobenius(spread, (-1,)).max()) if call.shape else float(c.abs())))
    if len(gains) > 1:
        label = "sum" if all(w > 0 for w in weights) else "difference"
        found: Map = Sum(tuple(weights), shift)
    else:
        label, one = "shift", torch.tensor(weights[0], dtype=torch.float64)
        rounding = 0.0 if abs(weights[0]) == 1 else inflate(4 * 2.0**-53 * abs(weights[0]))
        form = Diagonal(one.reshape(1), 1, rounding) if gains[0][0].shape == call.shape else None
        found = Scaled(one, shift, None if shift is None else shift.abs(), form)
    return Step(tuple(gains), label, offset=offset, peak=peak, norm=norm, row=row, low=low, map=found)


@rule("aten.matmul.default", "aten.mm.default", "aten.bmm.default", "aten.mv.default")
def matmul(call: Call) -> Step:
    """By a constant matrix: its spectral norm. Two branches: see `products`."""
    a = call["self"]
    b = call.get("other", call.get("mat2", call.get("vec")))
    if isinstance(a, Signal) and isinstance(b, Signal):
        return branch_matmul(call, a, b)
    if isinstance(a, Signal) and b.dim() <= 2:
        return matrix_step(call, a, b.mT if b.dim() == 2 else b, None, "matmul")
    x, constant = (a, b) if isinstance(a, Signal) else (b, a)
    return by_matrices(call, x, constant)


def by_matrices(call: Call, x: Signal, constant: Tensor) -> Step:
    """Products with constant matrices, real or complex: the largest spectral norm."""
    if len(x.shape) < 2 or constant.dim() < 2:
        return Step(((x, norm_of(constant)),), "matmul", offset=0.0, map=Own())
    with torch.no_grad(), full_precision():
        norms = spectral_norm(constant.detach().reshape(-1, *constant.shape[-2:]), rtol=call.rtol)
    grown = math.prod(call.shape[:-2]) // max(1, math.prod(x.shape[:-2]))
    top = inflate(float(torch.as_tensor(norms.upper).max()) * math.sqrt(max(1, grown)))
    return Step(((x, top),), "matmul", offset=0.0, map=Own())
