"""Pointwise activations: the interval of their slopes, rounded outward.

The Lipschitz constant is the larger end in absolute value. GELU, SiLU and Mish exceed 1, and their slopes go below 0: both
ends are needed by the closed-form bound of chains. `GELU'(x) + GELU'(−x) = 1`, and the same holds for its tanh form and
for SiLU, which gives their lower ends.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equipoise.core.precision import up
from equipoise.lipschitz.rules.registry import Call, Signal, Step, copies, rule
from equipoise.maps.linear import Diagonal

GELU, GELU_TANH, SILU = 1.128904145185156, 1.128993068658773, 1.099839320128868
MISH, MISH_LOW = 1.088498161251729, -0.112526123
SELU = 1.758099340847378
SIXTH = 0.1666666716337205  # 1/6 as float32 rounds it up

#: slopes of operations without parameters, and a bound of |f| where there is one, and whether f(0) = 0
FIXED: dict[str, tuple[float, float, float, bool]] = {
    "relu": (0, 1, math.inf, True),
    "relu6": (0, 1, 6, True),
    "tanh": (0, 1, 1, True),
    "sigmoid": (0, 0.25, 1, False),
    "silu": (1 - SILU, SILU, math.inf, True),
    "mish": (MISH_LOW, MISH, math.inf, True),
    "selu": (0, SELU, math.inf, True),
    "hardswish": (-0.5, 1.5, math.inf, True),
    "hardsigmoid": (0, SIXTH, 1, False),
    "log_sigmoid": (0, 1, math.inf, False),
    "abs": (-1, 1, math.inf, True),
    "neg": (-1, -1, math.inf, True),
    "sin": (-1, 1, 1, True),
    "cos": (-1, 1, 1, False),
    "atan": (0, 1, 1.5707963267948968, True),
    "erf": (0, 1.1283791670955128, 1, True),
    "asinh": (0, 1, math.inf, True),
}


def pointwise(
    call: Call,
    low: float,
    high: float,
    peak: float = math.inf,
    at_zero: float = 0.0,
    kind: str | None = None,
    everywhere: bool = True,
) -> Step:
    """Step of a pointwise map with slopes in [low, high], `|f(0)| = at_zero` and `|f| ≤ peak`.

    `everywhere` is false where the slopes hold for the values that the input ball can give only.
    """
    x = next(v for v in call.arguments.values() if isinstance(v, Signal))
    gain = max(abs(low), abs(high))
    offset = 0.0 if at_zero == 0 else up(math.sqrt(x.numel) * at_zero)
    reach = up(gain * x.peak + at_zero)
    return Step(
        ((x, gain),),
        kind or call.node.name.rstrip("_0123456789"),
        offset=offset,
        peak=min(peak, reach),
        slopes=(low, high),
        everywhere=everywhere,
    )


@rule(*(f"aten.{name}.default" for name in FIXED))
def fixed(call: Call) -> Step:
    """Activations without parameters."""
    name = str(call.node.target).split(".")[1].rstrip("_")
    low, high, peak, odd = FIXED[name]
    step = pointwise(call, low, high, peak, 0.0 if odd else 1.0, name)
    return replace(step, linear=Diagonal(torch.tensor([-1.0], dtype=torch.float64), 1)) if name == "neg" else step


@rule("aten.gelu.default")
def gelu(call: Call) -> Step:
    """GELU: largest slope Φ(√2) + √2·φ(√2); the tanh form is a little steeper."""
    top = GELU_TANH if call["approximate"] == "tanh" else GELU
    return pointwise(call, 1 - top, top, kind="gelu")


@rule("aten.leaky_relu.default")
def leaky_relu(call: Call) -> Step:
    """Slopes 1 and a."""
    slope = float(call["negative_slope"])
    return pointwise(call, min(slope, 1.0), max(slope, 1.0), kind="leaky_relu")


@rule("aten.prelu.default")
def prelu(call: Call) -> Step:
    """Slopes 1 and every entry of the weight."""
    weight: Tensor = call.constant("weight")
    return pointwise(call, min(1.0, float(weight.min())), max(1.0, float(weight.max())), kind="prelu")


@rule("aten.rrelu.default")
def rrelu(call: Call) -> Step:
    """In evaluation a leaky ReLU with the mean slope; in training it is random."""
    if call["training"]:
        call.refuse("randomised in training mode", "call model.eval() first")
    slope = (float(call["lower"]) + float(call["upper"])) / 2
    return pointwise(call, min(slope, 1.0), up(max(abs(slope), 1.0)), kind="rrelu")


@rule("aten.elu.default")
def elu(call: Call) -> Step:
    """`scale·x` above 0, `scale·α·(exp(β·x) − 1)` below: slopes up to scale·max(1, αβ)."""
    alpha, scale, inner = float(call["alpha"]), float(call["scale"]), float(call["input_scale"])
    low_side = alpha * scale * inner
    if inner < 0 or scale < 0:
        call.refuse("ELU with a negative scale")
    return pointwise(
        call, min(0.0, up(abs(low_side)) * math.copysign(1, low_side)), up(max(scale, low_side)), kind="elu"
    )


@rule("aten.celu.default")
def celu(call: Call) -> Step:
    """CELU is ELU with α·β = 1: slopes in [0, 1] for α > 0."""
    if float(call["alpha"]) <= 0:
        call.refuse("CELU with α ≤ 0 grows without bound")
    return pointwise(call, 0.0, 1.0, kind="celu")


@rule("aten.softplus.default")
def softplus(call: Call) -> Step:
    """`log(1 + e^{βx})/β`: slopes in [0, 1]. PyTorch returns x above βx = threshold; see `values` for what is promised."""
    beta, threshold = float(call["beta"]), float(call["threshold"])
    if not (beta > 0 and threshold >= 20):
        call.refuse("softplus with a threshold below 20 jumps where it turns into x", "use the default threshold of 20")
    jump = math.log1p(math.exp(-threshold)) / beta
    note = f"for log(1 + exp({beta:g}·x))/{beta:g}; PyTorch's own jumps by {jump:.1e} at x = {threshold / beta:g}"
    return replace(pointwise(call, 0.0, 1.0, at_zero=up(math.log(2) / beta), kind="softplus"), note=note)


@rule(
    "aten.hardtanh.default",
    "aten.clamp.default",
    "aten.clamp_min.default",
    "aten.clamp_max.default",
    "aten.clamp.Tensor",
)
def clamp(call: Call) -> Step:
    """Clipping to constants: slopes 0 and 1."""
    low, high = (call.get(a, call.get(b)) for a, b in (("min", "min_val"), ("max", "max_val")))
    if isinstance(low, Signal) or isinstance(high, Signal):
        call.refuse("the limits depend on the input")
    ends = [_largest(v) for v in (low, high)]
    both = low is not None and high is not None
    inside = (low is None or _largest(low, -1) <= 0) and (high is None or _largest(high, 1) >= 0)
    peak, at_zero = max(ends) if both else math.inf, 0.0 if inside else max(ends)
    x = call.signal("self")
    if x.shape != call.shape:  # limits of a larger shape copy the entries
        offset = up(math.sqrt(math.prod(call.shape)) * at_zero)
        return Step(((x, copies(x, call.shape)),), "clamp", offset=offset, peak=min(peak, up(x.peak + at_zero)))
    return pointwise(call, 0.0, 1.0, peak, at_zero, "clamp")


def _largest(v: Any, sign: int = 0) -> float:
    if v is None:
        return 0.0
    if isinstance(v, Tensor):
        return float(v.abs().max()) if sign == 0 else float(v.max()) if sign < 0 else float(v.min())
    return abs(float(v)) if sign == 0 else float(v)


@rule("aten.softshrink.default")
def softshrink(call: Call) -> Step:
    """Continuous, slopes 0 and 1."""
    return pointwise(call, 0.0, 1.0, kind="softshrink")


@rule(
    "aten.threshold.default", "aten.hardshrink.default", "aten.sign.default", "aten.round.default", "aten.floor.default"
)
def jumps(call: Call) -> Step:
    """Discontinuous: no constant exists."""
    if str(call.node.target) == "aten.threshold.default" and float(call["threshold"]) == float(call["value"]):
        return pointwise(call, 0.0, 1.0, at_zero=abs(float(call["value"])), kind="threshold")
    call.refuse("it is discontinuous, so no Lipschitz constant exists", "replace it, e.g. by softshrink or relu")


@rule("aten.pow.Tensor_Scalar", "aten.square.default")
def power(call: Call) -> Step:
    """`x^p`, p ≥ 1 an integer, on a bounded domain: p·peak^(p−1)."""
    x = call.signal("self")
    p = call.get("exponent", 2)
    if float(p) == 1:
        return pointwise(call, 1.0, 1.0, kind="identity")
    if float(p) != int(p) or p < 1:
        call.refuse(f"the power {p} has no bounded slope near 0")
    if not math.isfinite(x.peak):
        call.refuse("a power is not Lipschitz on the whole space", "state an input ball: lipschitz_bound(..., ball=R)")
    if int(p) * math.log(max(1.0, x.peak)) > 700:
        call.refuse(f"the power {p} of numbers up to {x.peak:.3g} does not fit a float", "state a smaller input ball")
    slope = up(float(p) * up(x.peak ** (int(p) - 1)))
    return pointwise(call, -slope, slope, up(x.peak ** int(p)), kind=f"power {p}", everywhere=False)


@rule("aten.exp.default")
def exponential(call: Call) -> Step:
    """`exp` on a bounded domain: exp(peak)."""
    x = call.signal("self")
    if not x.peak < 700:
        call.refuse("exp is not Lipschitz on the whole space", "state an input ball: lipschitz_bound(..., ball=R)")
    top = up(math.exp(x.peak))
    return pointwise(call, 0.0, top, top, at_zero=1.0, kind="exp", everywhere=False)
