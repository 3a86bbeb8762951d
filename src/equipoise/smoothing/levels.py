"""Noise levels: one number, or one per channel; never one that depends on the input.

Let `D = diag(σ_c)` hold the level of every coordinate. In the coordinates `v = σ_min·D⁻¹x` the noise is N(0, σ_min²·I), so every
theorem holds there: what is certified is the ellipsoid `‖D⁻¹(x' − x)‖₂ < R/σ_min`, whose semi-axes are `R·σ_c/σ_min`. It
contains the ball `‖x' − x‖₂ < R`, the radius that is reported. A function that is L-Lipschitz in x is L·σ_max/σ_min-Lipschitz
in v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.core import InputError, Refused

#: what a noise level may be given as
Sigma = float | Sequence[float]


@dataclass(frozen=True)
class Levels:
    """The smallest level, which radii are made with, and the level of every channel if they differ.

    >>> levels = Levels.of([0.5, 0.25, 0.5])
    >>> levels.sigma, levels.stretch > 2, str(levels)
    (0.25, True, 'N(0, diag(0.5², 0.25², 0.5²)) noise, one level per channel')
    >>> Levels.of(0.25).channels is None, str(Levels.of(0.25))
    (True, 'N(0, 0.25²·I) noise')
    """

    sigma: float
    channels: tuple[float, ...] | None = None

    @classmethod
    def of(cls, sigma: Any) -> Levels:
        """Read a number or a list of numbers; refuse a level that depends on the input.

        If σ(x) differs from point to point, the class probabilities at x' are those of another Gaussian, and the theorem
        that carries a bound from x to x' does not apply: certified radii can be broken. A level that is constant on the
        certified region (one per run, one per channel, one per class of *inputs told apart beforehand*) is fine.
        """
        if callable(sigma) or (isinstance(sigma, Tensor) and sigma.numel() > 1):
            raise Refused(
                "the noise level must be a number, or a list with one number per channel: a level that depends on the input "
                "moves the Gaussian between x and x', and no radius is certified then; make one run per level"
            )
        several = isinstance(sigma, list | tuple)
        values = tuple(_level(v) for v in (sigma if several else [sigma]))
        if not values:
            raise InputError("the list of noise levels is empty: give one per channel")
        return cls(min(values), values if len(set(values)) > 1 else None)

    @property
    def stretch(self) -> float:
        """`σ_max/σ_min`, rounded up: what Lipschitz constants are multiplied with."""
        return 1.0 if self.channels is None else max(self.channels) / self.sigma * (1 + 2.0**-50)

    def require_channels(self, shape: Sequence[int]) -> None:
        """Refuse inputs with another number of channels."""
        if self.channels is not None and (not shape or shape[0] != len(self.channels)):
            raise InputError(
                f"got {len(self.channels)} noise levels, one per channel, for inputs of shape {tuple(shape)}: the first "
                "dimension holds the channels"
            )

    def scale(self, x: Tensor) -> float | Tensor:
        """The level of every number of one input, to multiply standard normals with."""
        if self.channels is None:
            return self.sigma
        self.require_channels(x.shape)
        levels = torch.tensor(self.channels, dtype=torch.float64).to(x.device, x.dtype)
        return levels.reshape(-1, *[1] * (x.dim() - 1))

    def __str__(self) -> str:
        if self.channels is None:
            return f"N(0, {self.sigma:g}²·I) noise"
        return f"N(0, diag({', '.join(f'{c:g}²' for c in self.channels)})) noise, one level per channel"


def _level(value: Any) -> float:
    if isinstance(value, Tensor | list | tuple | bool) and not (isinstance(value, Tensor) and value.numel() == 1):
        raise InputError(f"sigma must be a positive number, or a list of them, one per channel, got {value!r}")
    try:
        level = float(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"sigma must be a positive number, got {value!r}") from error
    if not (math.isfinite(level) and level > 0):
        raise InputError(f"sigma must be a positive number, got {level}")
    return level
