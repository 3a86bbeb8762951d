"""Pointwise activations: which row of `maps.pointwise` an operation is, with its own parameters."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.core.precision import inflate
from equipoise.lipschitz.operations import Scaled
from equipoise.lipschitz.rules.registry import Call, Signal, Step, copies, lower, rule
from equipoise.maps.linear import Diagonal
from equipoise.maps.pointwise import TABLE, Pointwise, celu, clamp, elu, gelu, hinge, softplus, softshrink


def pointwise(call: Call, curve: Pointwise, label: str, note: str = "") -> Step:
    """The step of an activation."""
    x = next(v for v in call.arguments.values() if isinstance(v, Signal))
    offset = 0.0 if curve.at_zero == 0 else inflate(math.sqrt(x.numel) * curve.at_zero)
    peak = min(curve.peak, inflate(curve.gain * x.peak + curve.at_zero))
    return Step(((x, curve.gain),), label, offset=offset, peak=peak, low=_lowest(curve, x), map=curve, note=note)


def _lowest(curve: Pointwise, x: Signal) -> float:
    """Below which no value lies: φ of the lowest entry where φ increases, 0 for |x|."""
    if curve.hinge is not None:
        left, right = curve.hinge
        if bool((right < 0).any()) or x.low >= 0:
            return -math.inf if x.low < 0 else lower(float(right.min()) * x.low)
        steepest = float(left.max())
        return lower(steepest * x.low) if steepest > 0 else 0.0
    if curve.function is None or curve.slopes[0] < 0:
        return -math.inf
    found = curve.function(torch.tensor(x.low, dtype=torch.float64)).min()
    return -math.inf if bool(found.isnan()) else float(found - 1e-12 * found.abs())


#: operations that PyTorch writes out, or that are linear
_WRITTEN_OUT = ("softsign", "tanhshrink", "identity", "neg")
for _name, _curve in TABLE.items():
    if _name not in _WRITTEN_OUT:
        rule(f"aten.{_name}.default")(functools.partial(pointwise, curve=_curve, label=_name))


def _elu(call: Call) -> Pointwise:
    scale, inner = float(call["scale"]), float(call["input_scale"])
    if inner < 0 or scale < 0:
        call.refuse("ELU with a negative scale")
    return elu(float(call["alpha"]), scale, inner)


def _celu(call: Call) -> Pointwise:
    alpha = float(call["alpha"])
    if alpha <= 0:
        call.refuse("CELU with α ≤ 0 grows without bound")
    return celu(alpha)


def _row(call: Call, *, curve: Callable[[Call], Pointwise], label: str) -> Step:
    return pointwise(call, curve(call), label)


#: curves with a parameter of the call
_CURVES: dict[str, Callable[[Call], Pointwise]] = {
    "elu": _elu,
    "celu": _celu,
    "gelu": lambda call: gelu(call["approximate"]),
    "leaky_relu": lambda call: hinge(float(call["negative_slope"])),
    "softshrink": lambda call: softshrink(float(call["lambd"])),
}
for _name, _made in _CURVES.items():
    rule(f"aten.{_name}.default")(functools.partial(_row, curve=_made, label=_name))


@rule("aten.neg.default", "aten._neg_view.default")
def negative(call: Call) -> Step:
    """`−x`: an isometry."""
    x, minus = call.x, torch.tensor(-1.0, dtype=torch.float64)
    found = Scaled(minus, form=Diagonal(minus.reshape(1), 1))
    return Step(((x, 1.0),), "neg", offset=0.0, peak=x.peak, row=x.row, norm=x.norm, map=found)


@rule("aten.prelu.default")
def prelu(call: Call) -> Step:
    """Slopes 1 and every entry of the weight, one per channel."""
    weight: Tensor = call.constant("weight")
    shape = [-1] + [1] * max(0, len(call.shape) - 2) if weight.numel() > 1 else []
    return pointwise(call, hinge(weight.reshape(shape)), "prelu")


@rule("aten.rrelu.default")
def rrelu(call: Call) -> Step:
    """In evaluation a leaky ReLU with the mean slope; in training it is random."""
    if call["training"]:
        call.refuse("randomised in training mode", "call model.eval() first")
    slope = (float(call["lower"]) + float(call["upper"])) / 2
    curve = Pointwise((min(slope, 1.0), inflate(max(abs(slope), 1.0))), hinge(slope).function)
    return pointwise(call, curve, "rrelu")


@rule("aten.softplus.default")
def softplus_(call: Call) -> Step:
    """`log(1 + e^{βx})/β`: slopes in [0, 1]. PyTorch returns x above βx = threshold; see `values` for what is promised."""
    beta, threshold = float(call["beta"]), float(call["threshold"])
    if not (beta > 0 and threshold >= 20):
        call.refuse("softplus with a threshold below 20 jumps where it turns into x", "use the default threshold of 20")
    jump = math.log1p(math.exp(-threshold)) / beta
    note = f"for log(1 + exp({beta:g}·x))/{beta:g}; PyTorch's own jumps by {jump:.1e} at x = {threshold / beta:g}"
    return pointwise(call, softplus(beta), "softplus", note)


@rule(*(f"aten.{name}.{kind}" for name in ("clamp", "clamp_min", "clamp_max") for kind in ("default", "Tensor")))
@rule("aten.hardtanh.default")
def clipped(call: Call) -> Step:
    """Clipping to constants: slopes 0 and 1."""
    low, high = call.get("min", call.get("min_val")), call.get("max", call.get("max_val"))
    if isinstance(low, Signal) or isinstance(high, Signal):
        call.refuse("the limits depend on the input")
    x, curve = call.x, clamp(low, high)
    if x.shape != call.shape:  # limits of a larger shape copy the entries
        offset = inflate(math.sqrt(math.prod(call.shape)) * curve.at_zero)
        peak = min(curve.peak, inflate(x.peak + curve.at_zero))
        return Step(((x, copies(x, call.shape)),), "clamp", offset=offset, peak=peak)
    return pointwise(call, curve, "clamp")


@rule("aten.threshold.default")
def threshold(call: Call) -> Step:
    """Continuous only where the value is the threshold."""
    value = float(call["value"])
    if float(call["threshold"]) != value:
        return jumps(call)
    return pointwise(call, Pointwise((0.0, 1.0), lambda x: x.clamp_min(value), at_zero=max(0.0, value)), "threshold")


_JUMPS = (
    "hardshrink", "sign", "sgn", "round", "floor", "ceil", "trunc", "frac", "floor_divide", "heaviside", "signbit",
)  # fmt: skip


@rule(*(f"aten.{_name}.default" for _name in _JUMPS))
@rule("aten.round.decimals", "aten.fmod.Scalar", "aten.fmod.Tensor", "aten.remainder.Scalar", "aten.remainder.Tensor")
@rule("aten.floor_divide.Scalar", "aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.bernoulli.default")
def jumps(call: Call) -> Step:
    """Discontinuous: no constant exists."""
    call.refuse("it is discontinuous, so no Lipschitz constant exists", "replace it, e.g. by softshrink or relu")


_COMPARISONS = ("gt", "lt", "ge", "le", "eq", "ne")


@rule(*(f"aten.{_name}.{_kind}" for _name in _COMPARISONS for _kind in ("Scalar", "Tensor")))
@rule(
    "aten.argmax.default",
    "aten.argmin.default",
    "aten.argsort.default",
    "aten.logical_not.default",
    "aten.isnan.default",
)
def decides(call: Call) -> Step:
    """A decision: what follows jumps where it changes, unless both sides meet there, which is not looked at."""
    call.refuse(
        "a decision by comparing values of the input jumps where it changes",
        "write it with relu, clamp, maximum or minimum, which have a constant",
    )
