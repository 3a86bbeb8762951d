"""Affine operations: matrices, convolutions, batch normalisation, arithmetic with constants, sums of branches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equipoise.core.bounds import Bracket
from equipoise.core.precision import float64, frobenius, full_precision, up
from equipoise.lipschitz.rules.registry import Call, Signal, Step, copies, norm_of, rule
from equipoise.maps import linear as linear_maps
from equipoise.maps.linear import Adjoint, Diagonal, Linear, Matrix
from equipoise.norms import spectral_norm


def matrix_step(call: Call, x: Signal, weight: Tensor, bias: Tensor | None, kind: str = "linear") -> Step:
    """`x Wᵀ + b` on the last dimension; a vector W takes that dimension away."""
    vector = weight.dim() == 1
    weight = weight.reshape(1, -1) if vector else weight
    form = Matrix(weight.detach())
    found = call.bracket(form)
    top = float(found.upper)
    shift = (
        None if bias is None else torch.broadcast_to(bias.detach().double(), call.shape)
    )  # (out), (1), (rows, out) …
    b_row = 0.0 if shift is None or vector else float(frobenius(shift, (-1,)).max())
    widest = float(frobenius(weight.detach().double(), (-1,)).max())
    b_peak = float(bias.abs().max()) if bias is not None and bias.numel() else 0.0
    return Step(
        ((x, top),), kind, bracket=found, offset=norm_of(shift), row=math.inf if vector else up(top * x.row + b_row),
        peak=up(widest * x.row + b_peak), linear=None if vector else form,
    )  # fmt: skip


@rule("aten.linear.default")
def linear(call: Call) -> Step:
    """A dense layer: its spectral norm, whatever the number of rows it is applied to."""
    return matrix_step(call, call.signal("input"), call.constant("weight"), call.constant("bias"))


@rule("aten.addmm.default")
def addmm(call: Call) -> Step:
    """`β·b + α·x·M` with constant b and M."""
    if float(call["alpha"]) != 1 or float(call["beta"]) != 1:
        call.refuse("alpha and beta other than 1", "multiply explicitly")
    return matrix_step(call, call.signal("mat1"), call.constant("mat2").mT, call.constant("self"))


def _numbers(value: Any, dims: int) -> tuple[int, ...]:
    values = [int(v) for v in (value if isinstance(value, list | tuple) else [value])]
    return tuple(values * dims if len(values) == 1 else values)


def _spatial(call: Call, x: Signal, weight: Tensor) -> tuple[int, ...]:
    dims = weight.dim() - 2
    if len(x.shape) not in (dims + 1, dims + 2):
        call.refuse(f"a convolution of a tensor of shape {x.shape}")
    return x.shape[-dims:]


@rule(*(f"aten.conv{d}d.{o}" for d in (1, 2, 3) for o in ("default", "padding")), "aten.convolution.default")
def convolution(call: Call) -> Step:
    """A convolution with the padding, stride, dilation, groups and input size of this very call."""
    x, weight = call.signal("input"), call.constant("weight")
    dims = weight.dim() - 2
    if call.get("transposed"):
        return conv_transpose(call)
    dilation, stride = _numbers(call["dilation"], dims), _numbers(call["stride"], dims)
    padding = call["padding"]
    if padding == "valid":
        padding = 0
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        amount = tuple((r // 2, r - r // 2) for r in reach)
    else:
        amount = tuple((p, p) for p in _numbers(padding, dims))
    size = _spatial(call, x, weight)
    form = linear_maps.convolution(weight.detach(), "zeros", stride, dilation, int(call["groups"]), amount, size)
    found = call.bracket(form, _factors_ahead(call))
    return _conv_step(call, x, found, form if len(x.shape) == dims + 2 else None, "convolution")


def _factors_ahead(call: Call) -> Tensor | None:
    """The factors of a batch norm that alone reads this convolution: both norms are then proved together."""
    users = list(call.node.users)
    if len(users) != 1 or str(users[0].target) != "aten.batch_norm.default" or users[0].kwargs:
        return None
    weight, var = (None if n is None else call.lookup(n) for n in (users[0].args[1], users[0].args[4]))  # type: ignore[arg-type]
    if not isinstance(var, Tensor) or users[0].args[5]:
        return None
    return normalising(weight, var, float(users[0].args[7]))  # type: ignore[arg-type]


def normalising(weight: Tensor | None, var: Tensor, eps: float) -> Tensor:
    """`γ/√(var + ε)` in float64: what a batch norm in evaluation multiplies its channels by."""
    scale = 1 / (var.double() + eps).sqrt()
    return scale if weight is None else scale * weight.double()


def _conv_step(call: Call, x: Signal, found: Bracket, form: Linear | None, kind: str) -> Step:
    bias: Tensor | None = call.constant("bias")
    positions = math.prod(call.shape) // max(1, bias.numel()) if bias is not None else 0
    return Step(
        ((x, float(found.upper)),), kind, bracket=found, offset=up(math.sqrt(positions) * norm_of(bias)), linear=form
    )


@rule("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def conv_transpose(call: Call) -> Step:
    """The adjoint of a convolution: the same norm, on the sizes of this call."""
    x, weight = call.signal("input"), call.constant("weight")
    dims = weight.dim() - 2
    stride, dilation = _numbers(call["stride"], dims), _numbers(call["dilation"], dims)
    amount = [(p, p) for p in _numbers(call["padding"], dims)]
    plain = linear_maps.convolution(weight.detach(), "zeros", stride, dilation, int(call["groups"]), amount)
    sizes = zip(plain.axes, call.shape[-dims:], _spatial(call, x, weight), strict=True)
    form = Adjoint(plain.on([replace(axis, size=big, out=small) for axis, big, small in sizes]))
    found = call.bracket(form)
    return _conv_step(call, x, found, form if len(x.shape) == dims + 2 else None, "transposed convolution")


@rule("aten.batch_norm.default", "aten._native_batch_norm_legit_no_training.default", "aten.native_batch_norm.default")
def batch_norm(call: Call) -> Step:
    """In evaluation a diagonal map: max|γ|/√(var + ε), exactly; in training it mixes the batch."""
    mean, var = call.constant("running_mean"), call.constant("running_var")
    if call.get("training") or var is None:
        call.refuse("batch normalisation with batch statistics mixes the samples", "call model.eval() first")
    x = call.signal("input")
    scale = normalising(call.constant("weight"), var, float(call["eps"]))
    shift = -mean.double() * scale
    if call["bias"] is not None:
        shift = shift + call.constant("bias").double()
    if not bool(torch.isfinite(scale).all()):
        call.refuse("the running variance is negative or the scale is not finite", "check the checkpoint")
    return diagonal_step(call, x, scale, -1 if len(x.shape) == 2 else 1, norm_of(shift), "batch norm")


def diagonal_step(call: Call, x: Signal, scale: Tensor, dim: int, shift: float, kind: str) -> Step:
    """Multiplication by `scale` (float64, rounded a few times) along `dim`, plus a constant of norm `shift` per position."""
    top = float(scale.abs().max())
    high = up(top)
    positions = x.numel / max(1, scale.numel())
    return Step(
        ((x, high),), kind, bracket=Bracket(top * (1 - 2.0**-49), high, method="exact"),
        offset=up(up(math.sqrt(positions)) * up(shift)), peak=up(high * x.peak + up(shift)),
        linear=Diagonal(scale, dim, up(8 * 2.0**-53 * top)),
    )  # fmt: skip


@rule("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar")
def scaling(call: Call) -> Step:
    """By a constant: max|c|, with broadcasting. Two branches: see `products`."""
    a, b = call["self"], call["other"]
    division = ".div" in str(call.node.target)
    if isinstance(a, Signal) and isinstance(b, Signal):
        from equipoise.lipschitz.rules.products import branch_product, branch_quotient

        return branch_quotient(call, a, b) if division else branch_product(call, a, b)
    if division and isinstance(b, Signal):
        call.refuse(
            "dividing by something that depends on the input is not Lipschitz near 0", "use a normalisation layer"
        )
    x, constant = (a, b) if isinstance(a, Signal) else (b, a)
    c = float64(constant)
    c = 1 / c if division else c
    if not bool(torch.isfinite(c).all()):
        call.refuse("the constant factor is not finite", "check the constants")
    top = float(c.abs().max())
    top = up(top) if division else top
    grown = copies(x, call.shape)
    gain = top if grown == 1 else up(top * grown)
    form = _as_scale(c, len(call.shape)) if x.shape == call.shape else None
    row = up(top * x.row) if x.shape[-1:] == call.shape[-1:] else math.inf
    return Step(((x, gain),), "scaling", offset=0.0, peak=up(top * x.peak), row=row, linear=form)


def _as_scale(c: Tensor, dims: int) -> Diagonal | None:
    """A constant that varies along one dimension only, as a form (dimension 1 of images, the last of others)."""
    error = up(8 * 2.0**-53 * float(c.abs().max()))
    if c.numel() == 1:
        return Diagonal(c.reshape(1), 1, error)
    long = [c.dim() - i for i, n in enumerate(c.shape) if n > 1]
    if len(long) != 1:
        return None
    dim = dims - long[0]
    if dim == dims - 1:
        return Diagonal(c.flatten(), -1, error)
    return Diagonal(c.flatten(), 1, error) if dim == 1 else None


@rule(
    "aten.add.Tensor", "aten.sub.Tensor", "aten.add.Scalar", "aten.sub.Scalar", "aten.rsub.Scalar", "aten.rsub.Tensor"
)
def addition(call: Call) -> Step:
    """`a ± α·b`: the bounds of the branches add up; a constant only shifts."""
    alpha = float(call.get("alpha", 1))
    reverse = "rsub" in str(call.node.target)
    weights = {"self": alpha, "other": 1.0} if reverse else {"self": 1.0, "other": alpha}
    gains, offset, peak, norm, row = [], 0.0, 0.0, 0.0, 0.0
    for name, factor in weights.items():
        value = call[name]
        if isinstance(value, Signal):
            repeats = copies(value, call.shape)
            grown = repeats if abs(factor) == 1 else up(abs(factor) * repeats)
            gains.append((value, grown))
            peak, norm = up(peak + abs(factor) * value.peak), up(norm + grown * value.norm)
            row = up(row + abs(factor) * value.row) if value.shape[-1:] == call.shape[-1:] else math.inf
        else:
            c = float64(value) * factor
            spread = torch.broadcast_to(c, call.shape)
            peak = up(peak + float(c.abs().max()))
            offset = up(norm_of(spread))
            norm = up(norm + offset)
            row = up(row + (float(frobenius(spread, (-1,)).max()) if call.shape else float(c.abs())))
    minus = "sub" in str(call.node.target) or alpha < 0
    kind = ("difference" if minus else "sum") if len(gains) > 1 else "shift"
    form = None
    if len(gains) == 1 and gains[0][0].shape == call.shape:
        first = isinstance(call["self"], Signal)
        negative = first if reverse else (not first and "sub" in str(call.node.target))
        factor = weights["self" if first else "other"] * (-1 if negative else 1)
        form = Diagonal(torch.tensor([factor], dtype=torch.float64), 1)
    return Step(tuple(gains), kind, offset=offset, peak=peak, norm=norm, row=row, linear=form)


@rule("aten.lerp.Scalar")
def lerp(call: Call) -> Step:
    """`a + w·(b − a)` with a constant w; broadcasting copies."""
    w = float(call["weight"])
    pairs = ((call["self"], abs(1 - w)), (call["end"], abs(w)))
    gains = tuple((v, up(f * copies(v, call.shape))) for v, f in pairs if isinstance(v, Signal))
    return Step(gains, "interpolation")


@rule("aten.matmul.default", "aten.mm.default", "aten.bmm.default", "aten.mv.default")
def matmul(call: Call) -> Step:
    """By a constant matrix: its spectral norm. Two branches: see `products`."""
    a = call["self"]
    b = call.get("other", call.get("mat2", call.get("vec")))
    if isinstance(a, Signal) and isinstance(b, Signal):
        from equipoise.lipschitz.rules.products import branch_matmul

        return branch_matmul(call, a, b)
    if isinstance(a, Signal) and b.dim() <= 2:
        return matrix_step(call, a, b.mT if b.dim() == 2 else b, None, "matmul")
    x, constant = (a, b) if isinstance(a, Signal) else (b, a)
    if len(x.shape) < 2 or constant.dim() < 2:
        return Step(((x, norm_of(constant)),), "matmul", offset=0.0)
    with torch.no_grad(), full_precision():
        found = spectral_norm(constant.detach().reshape(-1, *constant.shape[-2:]), rtol=call.rtol)
    grown = math.prod(call.shape[:-2]) // max(1, math.prod(x.shape[:-2]))
    top = up(float(torch.as_tensor(found.upper).max()) * math.sqrt(max(1, grown)))
    return Step(((x, top),), "matmul", offset=0.0)
