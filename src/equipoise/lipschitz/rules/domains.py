"""Functions that are steep somewhere: powers, roots, logarithms, quotients, bounded where their arguments are known to be.

Roots, logarithms and reciprocals need entries bounded away from 0 (`Signal.low`), as `x² + ε`, `1 + σ(x)` or a softplus plus ε
are. Such a function is continued by its value at the lowest entry, so that it is Lipschitz everywhere.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, fx

from equipoise.core.precision import deflate, inflate
from equipoise.lipschitz.rules.pointwise import pointwise
from equipoise.lipschitz.rules.registry import BALL, Call, Signal, Step, copies, lower, rule
from equipoise.maps.pointwise import TABLE, Pointwise

_aten = torch.ops.aten
AWAY = "keep its argument away from 0, e.g. by adding an ε to something that is not negative"


@rule("aten.square.default")
def square(call: Call) -> Step:
    """`x²` on a bounded domain."""
    return _power(call, 2.0)


@rule("aten.pow.Tensor_Scalar")
def power(call: Call) -> Step:
    """`x^p` on a bounded domain (p > 1: slope p·peak^(p−1)), or away from 0 (p < 1)."""
    return _power(call, float(call["exponent"]))


def _power(call: Call, p: float) -> Step:
    x = call.signal("self")
    if p == 1:
        return pointwise(call, TABLE["identity"], "power 1")
    if p == 0:
        call.refuse("the power 0 is constant but at 0", "leave it out")
    if p < 1:
        return _continued(call, lambda t: t.pow(p), lambda low: p * low ** (p - 1), f"power {p:g}")
    whole = p == int(p)
    if not whole and x.low < 0:
        call.refuse(f"the power {p:g} of negative numbers is not real")
    if not math.isfinite(x.peak):
        call.refuse("a power is not Lipschitz on the whole space", BALL)
    if p * math.log(max(1.0, x.peak)) > 700:
        call.refuse(f"the power {p:g} of numbers up to {x.peak:.3g} does not fit a float", "state a smaller input ball")
    slope, even = inflate(p * inflate(x.peak ** (p - 1))), whole and int(p) % 2 == 0
    least = -slope if x.low < 0 and even else 0.0
    signed = x.low < 0
    function: Callable[[Tensor], Tensor] = (lambda t: t.pow(int(p))) if signed else (lambda t: t.clamp_min(0).pow(p))
    curve = Pointwise((least, slope), function, peak=inflate(x.peak**p), everywhere=False)
    return _above(pointwise(call, curve, f"power {p:g}"), 0.0 if even or x.low >= 0 else -math.inf)


def _above(step: Step, low: float) -> Step:
    return replace(step, low=max(step.low, low))


@rule("aten.exp.default", "aten.expm1.default", "aten.exp2.default")
def exponential(call: Call) -> Step:
    """`e^x` or `2^x` where x stays below some t: slope e^t."""
    match call.node.target:
        case _aten.expm1.default:
            return _growth(call, call.signal("self"), 1.0, -1.0, "expm1")
        case _aten.exp2.default:
            return _growth(call, call.signal("self"), math.log(2.0), 0.0, "exp2")
    return _growth(call, call.signal("self"), 1.0, 0.0, "exp")


@rule("aten.pow.Scalar")
def exponential_of_base(call: Call) -> Step:
    """`b^x = exp(x·log b)` for a constant b > 0."""
    base = float(call.constant("self"))
    if not base > 0:
        call.refuse(f"powers of {base:g} are not real numbers, or jump at 0")
    return _growth(call, call.signal("exponent"), math.log(base), 0.0, f"power of {base:g}")


def _growth(call: Call, x: Signal, rate: float, shift: float, label: str) -> Step:
    """`exp(rate·x) + shift`, continued by its value where rate·x is largest."""
    end = min(x.peak, _highest(call, x) if rate > 0 else -x.low)
    top = inflate(abs(rate) * end) if end > 0 else abs(rate) * end * (1 - 1e-12)
    if not top < 700:
        call.refuse("an exponential is not Lipschitz on the whole space", BALL)
    steep = inflate(inflate(abs(rate) * (1 + 1e-12)) * inflate(math.exp(top)))
    curve = Pointwise(
        (0.0, steep) if rate >= 0 else (-steep, 0.0),
        lambda t: (torch.expm1 if shift else torch.exp)((rate * t).clamp_max(top)),
        at_zero=0.0 if shift else 1.0,
        peak=max(inflate(math.exp(top)), -shift),
        everywhere=False,
    )
    return _above(pointwise(call, curve, label), shift)


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


@dataclass(frozen=True)
class _Steep:
    """A function on `[−limit, limit]` that is steepest at the ends, with its slope there."""

    function: Callable[[Tensor], Tensor]
    slope: Callable[[float], float]
    limit: float
    sign: int = 1
    at_zero: float = 0.0


_STEEP = {
    "sinh": _Steep(torch.sinh, math.cosh, 700.0),
    "cosh": _Steep(torch.cosh, math.sinh, 700.0, 0, 1.0),
    "tan": _Steep(torch.tan, lambda t: 1 + math.tan(t) ** 2, 1.57),
    "asin": _Steep(torch.asin, lambda t: ((1 - t) * (1 + t)) ** -0.5, 1.0),
    "acos": _Steep(torch.acos, lambda t: ((1 - t) * (1 + t)) ** -0.5, 1.0, -1, 1.5707963267948968),
    "atanh": _Steep(torch.atanh, lambda t: 1 / ((1 - t) * (1 + t)), 1.0),
}


def _steep(call: Call, *, row: _Steep, label: str) -> Step:
    """A row of the table on a bounded domain, continued by its values at the ends."""
    end = call.signal("self").peak
    if not end < row.limit:
        call.refuse(
            f"its slope is bounded only where its argument stays within ±{row.limit:g}, and nothing keeps it there",
            "clamp the argument, or " + BALL,
        )
    slope = inflate(row.slope(end) * (1 + 1e-12))
    at = [abs(float(row.function(torch.tensor(v, dtype=torch.float64)))) for v in (-end, 0.0, end)]
    curve = Pointwise(
        (-slope if row.sign <= 0 else 0.0, slope if row.sign >= 0 else 0.0),
        lambda t: row.function(t.clamp(-end, end)),
        at_zero=row.at_zero,
        peak=inflate(max(at) * (1 + 1e-12)),
        everywhere=False,
    )
    return pointwise(call, curve, label)


for _name, _row in _STEEP.items():
    rule(f"aten.{_name}.default")(partial(_steep, row=_row, label=_name))


@rule("aten.logit.default")
def logit(call: Call) -> Step:
    """`log(x/(1 − x))` of numbers clipped to [ε, 1 − ε]: 1/(ε(1 − ε))."""
    eps = call["eps"]
    if eps is None or not 0 < float(eps) < 0.5:
        call.refuse(
            "the logit is steep without bound near 0 and 1", "give it an ε between 0 and ½: torch.logit(x, eps=…)"
        )
    end = math.log((1 - eps) / eps) * (1 + 1e-12)
    steep = inflate(1 / (eps * (1 - eps)) * (1 + 1e-12))
    return pointwise(call, Pointwise((0.0, steep), partial(torch.logit, eps=eps), at_zero=end, peak=end), "logit")


@rule("aten.atan2.default")
def angle(call: Call) -> Step:
    """The angle of (x, y) in a half-plane that is at least r away from 0 and from the cut: 1/r."""
    y, x = call["self"], call["other"]
    above = y.low if isinstance(y, Signal) else float(y.min())
    right = x.low if isinstance(x, Signal) else float(x.min())
    below = -math.inf if isinstance(y, Signal) else -float(y.max())
    away = max(above, right, below)
    if not away > 0:
        call.refuse(
            "an angle jumps where both coordinates may be 0 and across the negative half-axis",
            "keep one coordinate above 0, e.g. by adding an ε to something that is not negative",
        )
    gain = inflate(1 / deflate(away))
    gains = tuple((t, inflate(gain * copies(t, call.shape))) for t in (y, x) if isinstance(t, Signal))
    return Step(gains, "angle", combine="root", peak=math.pi + 1e-15)


def _continued(
    call: Call, function: Callable[[Tensor], Tensor], slope: Callable[[float], float], label: str, start: float = 0.0
) -> Step:
    """A function that is steepest at the lowest entry, continued below it by its value there."""
    x = call.signal("self")
    low = x.low
    if not low > start:
        call.refuse(f"it has no bounded slope near {start:g}, and nothing keeps its argument away from it", AWAY)
    steep = slope(low)
    if not math.isfinite(steep):
        call.refuse(f"its slope at {low:.3g}, the lowest argument, does not fit a float", AWAY)
    ends = (inflate(max(0.0, steep)), -inflate(max(0.0, -steep)))
    at = [abs(float(function(torch.tensor(v, dtype=torch.float64)))) for v in (low, max(low, x.peak))]
    peak = inflate(max(at) * (1 + 1e-12))
    curve = Pointwise(
        (ends[1], ends[0]),
        lambda t: function(t.clamp_min(low)),
        at_zero=inflate(at[0] * (1 + 1e-12)) if low > 0 else 0.0,
        peak=peak if math.isfinite(peak) else math.inf,
        everywhere=False,  # below the lowest entry the function itself is steeper
    )
    return _above(pointwise(call, curve, label), _least(function, low, x.peak, steep))


def _least(function: Callable[[Tensor], Tensor], low: float, high: float, steep: float) -> float:
    """The lowest value of a monotone function on [low, high]."""
    found = float(function(torch.tensor(low if steep > 0 else high, dtype=torch.float64)))
    return found - 1e-12 * abs(found)


#: operation → its function, the slope at the lowest entry, the label, and the number that all entries must lie above
_CONTINUED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], float], str, float]] = {
    "sqrt": (torch.sqrt, lambda low: 0.5 / math.sqrt(low), "square root", 0.0),
    "rsqrt": (torch.rsqrt, lambda low: -0.5 * low**-1.5, "inverse root", 0.0),
    "reciprocal": (torch.reciprocal, lambda low: -(low**-2), "reciprocal", 0.0),
    "log": (torch.log, lambda low: 1 / low, "logarithm", 0.0),
    "log2": (torch.log2, lambda low: 1 / (low * math.log(2)), "log2", 0.0),
    "log10": (torch.log10, lambda low: 1 / (low * math.log(10)), "log10", 0.0),
    "log1p": (torch.log1p, lambda low: 1 / (1 + low), "log1p", -1.0),
}
for _name, (_function, _slope, _label, _start) in _CONTINUED.items():
    rule(f"aten.{_name}.default")(partial(_continued, function=_function, slope=_slope, label=_label, start=_start))
