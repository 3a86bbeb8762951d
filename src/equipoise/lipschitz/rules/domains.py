"""Functions that are steep somewhere: powers, roots, logarithms, exponentials, bounded where their arguments are known to be.

Each is steepest at an end of the interval in which its argument is known to lie (`Signal.low`, `Signal.peak`), and largest
there. Roots, logarithms and reciprocals need entries bounded away from 0, as `x² + ε`, `1 + σ(x)` or a softplus plus ε are;
powers and exponentials need a bound from above. Outside of the interval a function is continued by its values at the ends.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, fx

from equipoise.core.precision import inflate
from equipoise.lipschitz.rules.pointwise import pointwise
from equipoise.lipschitz.rules.registry import BALL, Call, Signal, Step, lower, rule
from equipoise.maps.pointwise import TABLE, Pointwise

_aten = torch.ops.aten
AWAY = "keep its argument away from 0, e.g. by adding an ε to something that is not negative"
#: covers the rounding of a function or its slope as the standard library computes it
_SLACK = 1 + 1e-12


@dataclass(frozen=True)
class _Steep:
    """A function with its slope, on the open interval `domain`, where |slope| and |function| are largest at the ends."""

    function: Callable[[Tensor], Tensor]
    slope: Callable[[float], float]
    domain: tuple[float, float] = (-math.inf, math.inf)


_STEEP = {
    "sinh": _Steep(torch.sinh, math.cosh),
    "cosh": _Steep(torch.cosh, math.sinh),
    "tan": _Steep(torch.tan, lambda t: 1 + math.tan(t) ** 2, (-1.57, 1.57)),
    "asin": _Steep(torch.asin, lambda t: ((1 - t) * (1 + t)) ** -0.5, (-1.0, 1.0)),
    "acos": _Steep(torch.acos, lambda t: -(((1 - t) * (1 + t)) ** -0.5), (-1.0, 1.0)),
    "atanh": _Steep(torch.atanh, lambda t: 1 / ((1 - t) * (1 + t)), (-1.0, 1.0)),
    "exp": _Steep(torch.exp, math.exp),
    "expm1": _Steep(torch.expm1, math.exp),
    "exp2": _Steep(torch.exp2, lambda t: math.log(2) * 2.0**t),
    "square": _Steep(torch.square, lambda t: 2 * t),
    "sqrt": _Steep(torch.sqrt, lambda t: 0.5 / math.sqrt(t), (0.0, math.inf)),
    "rsqrt": _Steep(torch.rsqrt, lambda t: -0.5 * t**-1.5, (0.0, math.inf)),
    "reciprocal": _Steep(torch.reciprocal, lambda t: -(t**-2), (0.0, math.inf)),
    "log": _Steep(torch.log, lambda t: 1 / t, (0.0, math.inf)),
    "log2": _Steep(torch.log2, lambda t: 1 / (t * math.log(2)), (0.0, math.inf)),
    "log10": _Steep(torch.log10, lambda t: 1 / (t * math.log(10)), (0.0, math.inf)),
    "log1p": _Steep(torch.log1p, lambda t: 1 / (1 + t), (-1.0, math.inf)),
}


def _steep(call: Call, steep: _Steep, label: str, x: Signal | None = None) -> Step:
    """The step of a steep function of x, on the interval in which x is known to lie."""
    x = call.x if x is None else x
    a, b = max(x.low, -x.peak), min(x.peak, _highest(call, x))
    if not a > steep.domain[0] and math.isfinite(steep.domain[0]) and steep.domain[1] == math.inf:
        call.refuse(
            f"it has no bounded slope near {steep.domain[0]:g}, and nothing keeps its argument away from it", AWAY
        )
    if math.isfinite(steep.domain[1]) and not steep.domain[0] < a <= b < steep.domain[1]:
        call.refuse(
            f"its slope is bounded only where its argument stays within ±{steep.domain[1]:g}, and nothing keeps it there",
            "clamp the argument, or " + BALL,
        )
    slopes = [_number(steep.slope, end) for end in (a, b)]
    if not all(map(math.isfinite, slopes)):
        if math.isfinite(b):
            call.refuse(f"its slope between {a:.3g} and {b:.3g} does not fit a float", "state a smaller input ball")
        call.refuse(f"{label} is not Lipschitz on the whole space", BALL)

    def value(t: float) -> float:
        return float(steep.function(torch.tensor(t, dtype=torch.float64)))

    inside = min(max(0.0, a), b)
    values = [value(end) for end in (a, b, inside)]
    peak = inflate(max(map(abs, values)) * _SLACK)
    curve = Pointwise(
        (-inflate(max(0.0, *(-s for s in slopes)) * _SLACK), inflate(max(0.0, *slopes) * _SLACK)),
        lambda t: steep.function(t.clamp(a, b)),
        at_zero=inflate(abs(values[2]) * _SLACK),
        peak=peak if math.isfinite(peak) else math.inf,
        everywhere=False,  # beyond the interval the function itself may be steeper
    )
    least = min(values)
    step = pointwise(call, curve, label)
    return replace(step, low=max(step.low, least - 1e-12 * abs(least)) if math.isfinite(least) else step.low)


def _number(function: Callable[[float], float], t: float) -> float:
    try:
        return function(t)
    except OverflowError:
        return math.inf


def _highest(call: Call, x: Signal) -> float:
    """Above which no entry lies, where x is a negative multiple of something that is bounded from below."""
    target, args = x.node.target, x.node.args
    if target is _aten.neg.default:
        factor, source = -1.0, args[0]
    elif target is _aten.mul.Tensor and isinstance(args[1], int | float):
        factor, source = float(args[1]), args[0]
    else:
        return math.inf
    before = call.lookup(source) if isinstance(source, fx.Node) else None
    known = isinstance(before, Signal) and math.isfinite(before.low) and factor < 0
    return -lower(-factor * before.low) if known else math.inf  # type: ignore[union-attr]


for _name, _row in _STEEP.items():
    rule(f"aten.{_name}.default")(partial(_steep, steep=_row, label=_name))


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
    domain = (0.0 if p < 1 else -math.inf, math.inf)
    return _steep(call, _Steep(lambda t: t.pow(exponent), lambda t: p * t ** (exponent - 1), domain), f"power {p:g}")


@rule("aten.pow.Scalar")
def exponential_of_base(call: Call) -> Step:
    """`b^x = exp(x·log b)` for a constant b > 0."""
    base, x = float(call.constant("self")), call.signal("exponent")
    if not base > 0:
        call.refuse(f"powers of {base:g} are not real numbers, or jump at 0")
    rate = math.log(base)
    steep = _Steep(lambda t: torch.exp(rate * t), lambda t: rate * math.exp(rate * t))
    return _steep(call, steep, f"power of {base:g}", x)
