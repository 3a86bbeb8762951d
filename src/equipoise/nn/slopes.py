"""Which activations have all slopes in [0, 1]: what a residual block `x − 2U·act(Uᵀx)` needs to be 1-Lipschitz.

With a slope outside, the block is not: abs or −x give 3, GELU 1.17 was seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from equipoise.core.errors import Refused

_WHY = "a residual block x − 2U·act(Uᵀx) is 1-Lipschitz only if every slope of act lies in [0, 1]"
_TRY = "use ReLU, LeakyReLU, Tanh, Softplus, ELU or Hardtanh"


def _always(_: Any) -> bool:
    return True


#: activation class → whether the slopes of this instance lie in [0, 1]; exact classes, since a subclass may do anything
SLOPES: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.Identity: _always,
    nn.ReLU: _always,
    nn.ReLU6: _always,
    nn.LeakyReLU: lambda act: 0 <= act.negative_slope <= 1,
    nn.ELU: lambda act: 0 <= act.alpha <= 1,
    nn.CELU: lambda act: act.alpha > 0,
    nn.Tanh: _always,
    nn.Tanhshrink: _always,
    nn.Sigmoid: _always,
    nn.LogSigmoid: _always,
    nn.Hardtanh: _always,
    nn.Hardsigmoid: _always,
    nn.Softsign: _always,
    nn.Softshrink: lambda act: act.lambd >= 0,
    nn.Softplus: lambda act: act.beta > 0 and act.threshold >= 20,  # below, the switch to the identity is a jump
}

#: activations with act(c·z) = c·act(z) for c > 0: a factor can be moved through them
HOMOGENEOUS: tuple[type[nn.Module], ...] = (nn.Identity, nn.ReLU, nn.LeakyReLU)

_REASONS: dict[type[nn.Module], str] = {
    nn.GELU: "its slope goes from −0.13 to 1.13",
    nn.SiLU: "its slope goes from −0.10 to 1.10",
    nn.Mish: "its slope goes from −0.12 to 1.09",
    nn.Hardswish: "its slope goes from −0.5 to 1.5",
    nn.SELU: "its slope reaches 1.76",
    nn.PReLU: "its slope is learned and may leave [0, 1]",
    nn.Threshold: "it jumps",
    nn.Hardshrink: "it jumps",
    nn.ELU: "with alpha outside [0, 1] so is its slope",
    nn.LeakyReLU: "with negative_slope outside [0, 1] so is its slope",
    nn.Softplus: "with threshold below 20 it jumps where it switches to the identity",
}


def require_unit_slopes(activation: Any) -> None:
    """Refuse, by name and with the reason, an activation that is not known to have slopes in [0, 1].

    >>> require_unit_slopes(nn.ReLU())
    >>> require_unit_slopes(nn.GELU())
    Traceback (most recent call last):
    ...
    equipoise.core.errors.Refused: GELU: its slope goes from −0.13 to 1.13; a residual block ...
    """
    known = SLOPES.get(type(activation))
    if known is not None and known(activation):
        return
    name = (
        type(activation).__name__ if isinstance(activation, nn.Module) else getattr(activation, "__name__", activation)
    )
    reason = _REASONS.get(type(activation), "its slopes are not known here")
    raise Refused(f"{name}: {reason}; {_WHY}; {_TRY}")
