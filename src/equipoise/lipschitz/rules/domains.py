"""Functions that are steep somewhere: powers, roots, logarithms, quotients, bounded where their arguments are known to be.

Roots, logarithms and reciprocals need entries bounded away from 0 (`Signal.low`), as `x² + ε`, `1 + σ(x)` or a softplus plus ε
are. Such a function is continued by its value at the lowest entry, so that it is Lipschitz everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from equipoise.core.precision import up
from equipoise.lipschitz.rules.pointwise import pointwise
from equipoise.lipschitz.rules.registry import Call, Step, rule
from equipoise.maps.pointwise import TABLE, Pointwise

_aten = torch.ops.aten
BALL = "state an input ball: lipschitz_bound(..., ball=R)"
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
    slope, even = up(p * up(x.peak ** (p - 1))), whole and int(p) % 2 == 0
    least = -slope if x.low < 0 and even else 0.0
    signed = x.low < 0
    function: Callable[[Tensor], Tensor] = (lambda t: t.pow(int(p))) if signed else (lambda t: t.clamp_min(0).pow(p))
    curve = Pointwise((least, slope), function, peak=up(x.peak**p), everywhere=False)
    return _above(pointwise(call, curve, f"power {p:g}"), 0.0 if even or x.low >= 0 else -math.inf)


def _above(step: Step, low: float) -> Step:
    return replace(step, low=max(step.low, low))


@rule("aten.exp.default", "aten.expm1.default")
def exponential(call: Call) -> Step:
    """`exp` on a bounded domain: exp(peak)."""
    x = call.signal("self")
    if not x.peak < 700:
        call.refuse("exp is not Lipschitz on the whole space", BALL)
    top = up(math.exp(x.peak))
    if call.node.target in (_aten.expm1.default, _aten.expm1_.default):
        curve = Pointwise((0.0, top), torch.expm1, peak=top, everywhere=False)
        return pointwise(call, curve, "expm1")
    curve = Pointwise((0.0, top), torch.exp, at_zero=1.0, peak=top, everywhere=False)
    return pointwise(call, curve, "exp")


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
    ends = (up(max(0.0, steep)), -up(max(0.0, -steep)))
    at = [abs(float(function(torch.tensor(v, dtype=torch.float64)))) for v in (low, max(low, x.peak))]
    peak = up(max(at) * (1 + 1e-12))
    curve = Pointwise(
        (ends[1], ends[0]),
        lambda t: function(t.clamp_min(low)),
        at_zero=up(at[0] * (1 + 1e-12)) if low > 0 else 0.0,
        peak=peak if math.isfinite(peak) else math.inf,
        everywhere=False,  # below the lowest entry the function itself is steeper
    )
    return _above(pointwise(call, curve, label), _least(function, low, x.peak, steep))


def _least(function: Callable[[Tensor], Tensor], low: float, high: float, steep: float) -> float:
    """The lowest value of a monotone function on [low, high]."""
    found = float(function(torch.tensor(low if steep > 0 else high, dtype=torch.float64)))
    return found - 1e-12 * abs(found)


@rule("aten.sqrt.default")
def square_root(call: Call) -> Step:
    """`1/(2√low)`."""
    return _continued(call, torch.sqrt, lambda low: 0.5 / math.sqrt(low), "square root")


@rule("aten.rsqrt.default")
def inverse_root(call: Call) -> Step:
    """`low^(−3/2)/2`."""
    return _continued(call, torch.rsqrt, lambda low: -0.5 * low**-1.5, "inverse root")


@rule("aten.reciprocal.default")
def reciprocal(call: Call) -> Step:
    """`1/low²`."""
    return _continued(call, torch.reciprocal, lambda low: -(low**-2), "reciprocal")


@rule("aten.log.default")
def logarithm(call: Call) -> Step:
    """`1/low`."""
    return _continued(call, torch.log, lambda low: 1 / low, "logarithm")


@rule("aten.log1p.default")
def logarithm_of_more(call: Call) -> Step:
    """`1/(1 + low)`: 1 where nothing is negative."""
    return _continued(call, torch.log1p, lambda low: 1 / (1 + low), "log1p", start=-1.0)
