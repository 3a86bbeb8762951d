"""Activations as values: the one table of their slopes, curvature, size and real function.

A `Pointwise` applies one real function φ to every entry. Everything a bound needs of it is in this table, rounded outward: the
interval of its slopes (the Lipschitz constant is the larger end in absolute value), the largest |φ''| where φ is smooth,
|φ(0)| and sup|φ|, and, for maps with one kink at 0 and slopes on either side (ReLU, leaky ReLU, |x|), those two slopes.
GELU, SiLU and Mish exceed 1, and their slopes go below 0; `GELU'(x) + GELU'(−x) = 1`, and the same for its tanh form and
for SiLU, which gives their lower ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import copysign, inf, log
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.core.precision import float64, inflate

Function = Callable[[Tensor], Tensor]
GELU = 1.128904145185156
SILU = 1.099839320128868
GELU_TANH = 1.1289934  # 1.128993068658773, and more than the rounding of its two constants to float32 can add
MISH = 1.088498161251729
MISH_LOW = -0.112526123
SELU = 1.758099340847378
SIXTH = 0.1666666716337205  # 1/6 as float32 rounds it up


@dataclass(frozen=True)
class Pointwise:
    """`φ` on every entry, with slopes in `slopes` (`everywhere`, or on the values that occur on the stated domain only).

    `function` is φ in float64 as a real function, up to rounding; None where only the network's own operation knows it.
    `curvature` bounds |φ''| and is infinite where φ has kinks; `at_zero` bounds |φ(0)|, `peak` |φ|. `hinge` holds the
    slopes below and above 0 of a positively homogeneous φ, numbers or tensors that broadcast against the entries.

    >>> TABLE["relu"].slopes, TABLE["relu"].value(torch.tensor([3.0]))
    ((0.0, 1.0), tensor([3.]))
    """

    slopes: tuple[float, float]
    function: Function | None = field(default=None, repr=False, compare=False)
    curvature: float = inf
    at_zero: float = 0.0
    peak: float = inf
    hinge: tuple[Tensor, Tensor] | None = field(default=None, repr=False, compare=False)
    everywhere: bool = True
    exact: bool = False  # `function` does not round

    @property
    def gain(self) -> float:
        """The Lipschitz constant."""
        return max(abs(self.slopes[0]), abs(self.slopes[1]))

    @property
    def homogeneous(self) -> bool:
        """Whether `φ(t·x) = t·φ(x)` for t ≥ 0."""
        return self.hinge is not None

    def value(self, x: Tensor) -> Tensor:
        """φ(x)."""
        assert self.function is not None
        return self.function(x)


def hinge(left: float | Tensor, right: float | Tensor = 1.0) -> Pointwise:
    """`left·x` below 0 and `right·x` above; tensors must broadcast against the entries.

    Args:
        left: slope below 0.
        right: slope above 0.

    >>> hinge(0.1).slopes, hinge(-2.0).gain
    ((0.1, 1.0), 2.0)
    """
    a = float64(left)
    b = float64(right)
    ends = [float(v) for t in (a, b) for v in (t.min(), t.max())]
    plain = bool(((a.abs() == 1) | (a == 0)).all()) and bool(((b.abs() == 1) | (b == 0)).all())
    return Pointwise(
        (min(ends), max(ends)),
        lambda x: torch.where(x > 0, b * x, a * x),
        hinge=(a, b),
        exact=plain,
    )


def elu(alpha: float = 1.0, scale: float = 1.0, inner: float = 1.0) -> Pointwise:
    """`scale·x` above 0, `scale·α·(exp(βx) − 1)` below: slopes up to scale·max(1, αβ), smooth where αβ = 1.

    Args:
        alpha: α.
        scale: factor of both sides.
        inner: β.
    """
    side = scale * alpha * inner
    if scale != 1 or inner != 1:  # else nothing was rounded
        side = inflate(abs(side)) * copysign(1, side)
    slopes = (min(0.0, side), max(scale, side))
    curvature = inflate(abs(side) * inner) if alpha * inner == 1 else inf
    return Pointwise(slopes, lambda x: torch.where(x > 0, scale * x, scale * alpha * torch.expm1(inner * x.clamp_max(0))),
                     curvature)  # fmt: skip


def celu(alpha: float = 1.0) -> Pointwise:
    """`α·(exp(x/α) − 1)` below 0: slopes in [0, 1] for α > 0."""
    return Pointwise(
        (0.0, 1.0),
        lambda x: torch.where(x > 0, x, alpha * torch.expm1(x.clamp_max(0) / alpha)),
        inflate(1 / alpha),
    )


def softplus(beta: float = 1.0) -> Pointwise:
    """`log(1 + e^{βx})/β`, without PyTorch's switch to x above βx = 20, a jump of 2·10⁻⁹/β."""
    return Pointwise(
        (0.0, 1.0),
        lambda x: torch.logaddexp(beta * x, torch.zeros_like(x)) / beta,
        inflate(beta / 4),
        inflate(log(2) / beta),
    )


def gelu(approximate: str = "none") -> Pointwise:
    """`x·Φ(x)`: largest slope Φ(√2) + √2·φ(√2); the tanh form is a little steeper."""
    top = GELU_TANH if approximate == "tanh" else GELU
    return Pointwise((1 - top, top), lambda x: F.gelu(x, approximate=approximate), 0.81)


def clamp(low: float | Tensor | None = None, high: float | Tensor | None = None) -> Pointwise:
    """Clipping to constants: slopes 0 and 1.

    Args:
        low: lower end, if any.
        high: upper end, if any.

    >>> clamp(-1.0, 6.0).peak, clamp(2.0, None).at_zero
    (6.0, 2.0)
    """
    a, b = (None if v is None else float64(v) for v in (low, high))
    ends = [float(v.abs().max()) for v in (a, b) if v is not None and v.numel()]
    inside = (a is None or float(a.max()) <= 0) and (b is None or float(b.min()) >= 0)
    peak = max(ends) if a is not None and b is not None else inf
    return Pointwise(
        (0.0, 1.0),
        lambda x: torch.clamp(x, a, b),
        at_zero=0.0 if inside else max(ends),
        peak=peak,
        exact=True,
    )


def softshrink(threshold: float = 0.5) -> Pointwise:
    """Continuous, slopes 0 and 1."""
    return Pointwise((0.0, 1.0), lambda x: F.softshrink(x, threshold))


#: activations without parameters, by the name of their operation
TABLE: dict[str, Pointwise] = {
    "relu": hinge(0.0),
    "abs": hinge(-1.0),
    "neg": hinge(-1.0, -1.0),
    "relu6": clamp(0.0, 6.0),
    "tanh": Pointwise((0.0, 1.0), torch.tanh, 0.76981, peak=1.0),
    "sigmoid": Pointwise((0.0, 0.25), torch.sigmoid, 0.09623, 0.5, 1.0),
    "silu": Pointwise((1 - SILU, SILU), F.silu, 0.50001),
    "mish": Pointwise((MISH_LOW, MISH), F.mish, 0.64421),
    "selu": Pointwise((0.0, SELU), F.selu),
    "hardswish": Pointwise((-0.5, 1.5), F.hardswish),
    "hardsigmoid": Pointwise((0.0, SIXTH), F.hardsigmoid, at_zero=0.5, peak=1.0),
    "log_sigmoid": Pointwise((0.0, 1.0), F.logsigmoid, 0.25001, 0.6931472),
    "sin": Pointwise((-1.0, 1.0), torch.sin, 1.0, peak=1.0),
    "cos": Pointwise((-1.0, 1.0), torch.cos, 1.0, 1.0, 1.0),
    "atan": Pointwise((0.0, 1.0), torch.atan, 0.64952, peak=1.5707963267948968),
    "erf": Pointwise((0.0, 1.1283791670955128), torch.erf, 0.96789, peak=1.0),
    "erfc": Pointwise((-1.1283791670955128, 0.0), torch.erfc, 0.96789, 1.0, 2.0),
    "sinc": Pointwise(
        (-1.37031, 1.37031), torch.sinc, at_zero=1.0, peak=1.0
    ),  # π·max|d/du (sin u/u)| = 1.370307…
    "asinh": Pointwise((0.0, 1.0), torch.asinh, 0.38491),
    "softsign": Pointwise((0.0, 1.0), F.softsign, 2.0, peak=1.0),
    "tanhshrink": Pointwise((0.0, 1.0), F.tanhshrink, 0.76981),
    "identity": replace(hinge(1.0), curvature=0.0),
}

#: modules of PyTorch, and what they apply; None where a setting leaves no constant
_MODULES: dict[type[nn.Module], Callable[[Any], Pointwise | None]] = {
    nn.LeakyReLU: lambda m: hinge(m.negative_slope),
    nn.ELU: lambda m: elu(float(m.alpha)),
    nn.CELU: lambda m: celu(float(m.alpha)) if m.alpha > 0 else None,
    nn.GELU: lambda m: gelu(m.approximate),
    nn.Softplus: lambda m: softplus(float(m.beta)) if m.beta > 0 and m.threshold >= 20 else None,
    nn.Hardtanh: lambda m: clamp(m.min_val, m.max_val),
    nn.Softshrink: lambda m: softshrink(m.lambd) if m.lambd >= 0 else None,
}
_PLAIN = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.Softsign, nn.LogSigmoid, nn.Hardsigmoid, nn.SiLU, nn.Mish,
    nn.SELU, nn.Hardswish, nn.Tanhshrink,
)  # fmt: skip


def read_activation(module: nn.Module) -> Pointwise | None:
    """What an activation module of PyTorch applies; None where it is none, or has no constant. Exact classes only.

    >>> read_activation(nn.LeakyReLU(0.1)).slopes, read_activation(nn.Linear(1, 1))
    ((0.1, 1.0), None)
    """
    kind = type(module)  # a subclass may have another forward
    if kind in _PLAIN:
        return TABLE["log_sigmoid" if kind is nn.LogSigmoid else kind.__name__.lower()]
    return _MODULES[kind](module) if kind in _MODULES else None
