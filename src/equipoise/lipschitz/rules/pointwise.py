"""Functions of every entry alone: activations (rows of `maps.pointwise`), and functions that are steep somewhere.

A power, root, logarithm or exponential is steepest at an end of the interval in which its argument is known to lie
(`Signal.low`, `Signal.peak`), and largest there. Roots, logarithms and reciprocals need entries bounded away from 0, as
`x² + ε`, `1 + σ(x)` or a softplus plus ε are; powers and exponentials need a bound from above. Outside of the interval a
function is continued by its values at the ends.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from math import exp, inf, isfinite, log1p, sqrt

import torch
from torch import Tensor

from equipoise.core import float64, inflate
from equipoise.lipschitz.rules.registry import BALL, Call, Signal, Step, rule
from equipoise.maps.pointwise import (
    TABLE,
    Pointwise,
    celu,
    clamp,
    elu,
    gelu,
    hinge,
    softplus,
    softshrink,
)

_aten = torch.ops.aten

# --- activations ------------------------------------------------------------------------------------------------------------


def pointwise(
    call: Call, curve: Pointwise | Callable[[Call], Pointwise], label: str, note: str = ""
) -> Step:
    """The step of an activation.

    Args:
        call: its first signal is the argument.
        curve: the function, or what makes it of the call's parameters.
        label: shown in the report.
        note: shown in the report's row.
    """
    x = call.source
    if not isinstance(curve, Pointwise):
        curve = curve(call)
    offset = 0.0 if curve.at_zero == 0 else inflate(sqrt(x.numel) * curve.at_zero)
    peak = min(curve.peak, inflate(curve.gain * x.peak + curve.at_zero))
    return Step(
        ((x, curve.gain),),
        label,
        offset=offset,
        peak=peak,
        low=_lowest(curve, x),
        map=curve,
        note=note,
    )


def _lowest(curve: Pointwise, x: Signal) -> float:
    """Below which no value lies: φ of the lowest entry where φ increases, 0 for |x|."""
    if curve.hinge is not None and curve.slopes[0] < 0:
        left, right = curve.hinge
        return 0.0 if (left <= 0).all() and (right >= 0).all() else -inf
    if curve.function is None or curve.slopes[0] < 0:
        return -inf
    lowest = float64(max(x.low, -1e300))  # 0·∞ is not a number
    value = curve.function(lowest).min()
    return float(value - 1e-12 * value.abs()) if float(value) > -1e200 else -inf


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


def _prelu(call: Call) -> Pointwise:
    """Slopes 1 and every entry of the weight, one per channel."""
    weight = call.constant("weight")
    shape = [-1] + [1] * max(0, len(call.shape) - 2) if weight.numel() > 1 else []
    return hinge(weight.reshape(shape))


def _threshold(call: Call) -> Pointwise:
    """Continuous only where the value is the threshold."""
    value = float(call["value"])
    if float(call["threshold"]) != value:
        jumps(call)
    return clamp(value)


#: curves with a parameter of the call
_CURVES: dict[str, Callable[[Call], Pointwise]] = {
    "elu": _elu,
    "celu": _celu,
    "prelu": _prelu,
    "threshold": _threshold,
    "gelu": lambda call: gelu(call["approximate"]),
    "leaky_relu": lambda call: hinge(float(call["negative_slope"])),
    "softshrink": lambda call: softshrink(float(call["lambd"])),
}
for _name, _made in _CURVES.items():
    rule(f"aten.{_name}.default")(functools.partial(pointwise, curve=_made, label=_name))


@rule("aten.softplus.default")
def softplus_(call: Call) -> Step:
    """`log(1 + e^{βx})/β`: slopes in [0, 1]. PyTorch returns x above βx = threshold; see `values` for what is promised."""
    beta, threshold = float(call["beta"]), float(call["threshold"])
    if not (beta > 0 and threshold >= 20):
        call.refuse(
            "softplus with a threshold below 20 jumps where it turns into x",
            "use the default threshold of 20",
        )
    jump = log1p(exp(-threshold)) / beta
    note = f"for log(1 + exp({beta:g}·x))/{beta:g}; PyTorch's own jumps by {jump:.1e} at x = {threshold / beta:g}"
    return pointwise(call, softplus(beta), "softplus", note)


@rule(
    *(
        f"aten.{name}.{kind}"
        for name in ("clamp", "clamp_min", "clamp_max")
        for kind in ("default", "Tensor")
    )
)
@rule("aten.hardtanh.default")
def clipped(call: Call) -> Step:
    """Clipping to constants: slopes 0 and 1."""
    low, high = call.get("min", call.get("min_val")), call.get("max", call.get("max_val"))
    if isinstance(low, Signal) or isinstance(high, Signal):
        call.refuse("the limits depend on the input")
    if call.x.shape != call.shape:
        call.refuse("limits of a larger shape", "expand the tensor first")
    return pointwise(call, clamp(low, high), "clamp")


# --- functions that are steep somewhere -------------------------------------------------------------------------------------

#: covers the rounding of a function or its slope as the standard library computes it
_SLACK = 1 + 1e-12


#: functions whose value and slope are largest, in modulus, at the ends of every interval above this number
STEEP = {
    "exp": -inf, "square": -inf, "sqrt": 0.0, "rsqrt": 0.0, "reciprocal": 0.0, "log": 0.0,
}  # fmt: skip


def _value_and_slope(function: Callable[[Tensor], Tensor], t: float) -> tuple[float, float]:
    with torch.inference_mode(False), torch.enable_grad():
        at = torch.tensor(t, dtype=torch.float64, requires_grad=True)
        value = function(at)
        (slope,) = torch.autograd.grad(value, at)
    return float(value.detach()), float(slope)


def _steep(call: Call, function: Callable[[Tensor], Tensor], start: float, label: str) -> Step:
    """The step of a steep function of x, on the interval in which x is known to lie."""
    x = call.x
    a, b = max(x.low, -x.peak), x.peak
    if not a > start and start != -inf:
        call.refuse(
            f"it has no bounded slope near {start:g}, and nothing keeps its argument away from it",
            "keep its argument away from 0, e.g. by adding an ε to something that is not negative",
        )
    values, slopes = zip(*(_value_and_slope(function, end) for end in (a, b)), strict=True)
    if not all(map(isfinite, slopes)):
        call.refuse(f"{label} has no slope that fits a float between {a:.3g} and {b:.3g}", BALL)

    nearest_to_zero = min(max(0.0, a), b)
    values = (*values, _value_and_slope(function, nearest_to_zero)[0])
    curve = Pointwise(
        (-inflate(max(0.0, *(-s for s in slopes)) * _SLACK), inflate(max(0.0, *slopes) * _SLACK)),
        lambda t: function(t.clamp(a, b)),
        at_zero=inflate(abs(values[2]) * _SLACK),
        peak=inflate(max(map(abs, values)) * _SLACK),
        everywhere=False,  # beyond the interval the function itself may be steeper
    )
    step = pointwise(call, curve, label)
    least = min(values)
    return replace(
        step, low=max(step.low, least - 1e-12 * abs(least)) if isfinite(least) else step.low
    )


for _name, _start in STEEP.items():
    rule(f"aten.{_name}.default")(
        functools.partial(_steep, function=getattr(torch, _name), start=_start, label=_name)
    )


@rule("aten.pow.Tensor_Scalar")
def power(call: Call) -> Step:
    """`x^p` on a bounded domain (p > 1: slope p·peak^(p−1)), or away from 0 (p < 1)."""
    p, x = float(call["exponent"]), call.x
    if p == 1:
        return pointwise(call, TABLE["identity"], "power 1")
    if p == 0:
        call.refuse("the power 0 is constant but at 0", "leave it out")
    if p > 1 and p != int(p) and x.low < 0:
        call.refuse(f"the power {p:g} of negative numbers is not real")
    exponent = int(p) if p == int(p) else p  # whole powers of negative numbers are real
    start = 0.0 if p < 1 else -inf
    return _steep(call, lambda t: t.pow(exponent), start, f"power {p:g}")


# --- what has no constant ---------------------------------------------------------------------------------------------------

_JUMPS = (
    "hardshrink", "sign", "sgn", "round", "floor", "ceil", "trunc", "frac", "floor_divide", "heaviside", "signbit",
    "argmax", "argmin", "argsort", "logical_not", "isnan",
)  # fmt: skip
_DECISIONS = ("gt", "lt", "ge", "le", "eq", "ne", "fmod", "remainder")


@rule(*(f"aten.{_name}.default" for _name in _JUMPS))
@rule(*(f"aten.{_name}.{_kind}" for _name in _DECISIONS for _kind in ("Scalar", "Tensor")))
@rule(
    "aten.round.decimals", "aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.bernoulli.default"
)
def jumps(call: Call) -> Step:
    """Discontinuous, or a decision, after which something jumps unless both sides meet there, which is not looked at."""
    call.refuse(
        "it is discontinuous (a rounding, a decision or a position jumps with the input), so no Lipschitz constant exists",
        "write it with relu, clamp, maximum or softshrink, which have one",
    )
