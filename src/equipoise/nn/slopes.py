"""Which activations have all slopes in [0, 1]: what a residual block `x − 2U·act(Uᵀx)` needs to be 1-Lipschitz.

With a slope outside, the block is not: abs or −x give 3, GELU 1.17 was seen.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from equipoise.core.errors import Refused
from equipoise.maps.pointwise import read_activation

_WHY = "a residual block x − 2U·act(Uᵀx) is 1-Lipschitz only if every slope of act lies in [0, 1]"
_TRY = "use ReLU, LeakyReLU, Tanh, Softplus, ELU or Hardtanh"


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


def homogeneous(activation: Any) -> bool:
    """Whether act(c·z) = c·act(z) for c > 0: a factor can be moved through it."""
    curve = read_activation(activation) if isinstance(activation, nn.Module) else None
    return curve is not None and curve.homogeneous


def require_unit_slopes(activation: Any) -> None:
    """Refuse, by name and with the reason, an activation that is not known to have slopes in [0, 1].

    >>> require_unit_slopes(nn.ReLU())
    >>> require_unit_slopes(nn.GELU())
    Traceback (most recent call last):
    ...
    equipoise.core.errors.Refused: GELU: its slope goes from −0.13 to 1.13; a residual block ...
    """
    curve = read_activation(activation) if isinstance(activation, nn.Module) else None
    if curve is not None and curve.slopes[0] >= 0 and curve.slopes[1] <= 1:
        return
    name = (
        type(activation).__name__ if isinstance(activation, nn.Module) else getattr(activation, "__name__", activation)
    )
    reason = _REASONS.get(type(activation), "its slopes are not known here")
    raise Refused(f"{name}: {reason}; {_WHY}; {_TRY}")
