"""Modules around modules: a chosen constant for the whole, skip connections that do not add up to 2; the last layer."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.core.checks import require_number
from equipoise.core.errors import InputError, Refused
from equipoise.core.modules import by_construction, hooked
from equipoise.core.precision import deflate, inflate
from equipoise.nn.constants import known_constant
from equipoise.nn.parametrize import sole_parametrization


class Lipschitz(nn.Module):
    """`k·f`: a network of constant k from a 1-Lipschitz f; one multiplication at the end, after everything that f is
    made of.

    The factor is part of the forward pass (`lipschitz_bound`, `torch.export` and `export` see it) and not a wish
    handed down to layers that were built before. An f of known constant c > 1, such as another `Lipschitz`, is scaled
    by k/c.

    Guarantee: k-Lipschitz, for every value of the parameters. An f whose constant does not follow from its
    construction is refused, unless the caller states it (`inner`).

    >>> from torch import nn
    >>> f = nn.Sequential(nn.Flatten(), nn.ReLU())
    >>> Lipschitz(3.0, f)(torch.ones(1, 2))
    tensor([[3., 3.]])
    >>> Lipschitz(3.0, Lipschitz(5.0, f))(torch.ones(1, 2))
    tensor([[3., 3.]])
    """

    def __init__(self, constant: float, module: nn.Module, inner: float | None = None) -> None:
        super().__init__()
        require_number(constant, "constant")
        if constant <= 0:
            raise InputError(f"the constant must be a positive number, got {constant}")
        known = known_constant(module) if inner is None else inner
        if known is None:
            raise Refused(
                f"the constant of {type(module).__name__} does not follow from its construction, so {constant:g} could not be "
                "guaranteed; convert it with equipoise.make_lipschitz, or state its own constant with inner="
            )
        if not (known >= 0 and math.isfinite(known)):
            raise InputError(f"the inner constant must be a non-negative number, got {known}")
        self.constant, self.inner = float(constant), inner
        self.scale = float(constant) if known <= 1 else deflate(constant / known)
        self.module = module

    def _constant(self) -> float | None:
        """The constant, as long as the module is what it was; else what follows from the module that is there now."""
        known = known_constant(self.module) if self.inner is None else self.inner
        if known is None:
            return None
        now = abs(self.scale) if known <= 1 else inflate(abs(self.scale) * known)
        return self.constant if now <= inflate(self.constant) else now

    lipschitz_upper = by_construction(_constant)

    def forward(self, x: Tensor) -> Tensor:
        """The scaled map."""
        return self.module(x) * self.scale

    def extra_repr(self) -> str:
        """The constant."""
        return f"constant={self.constant:g}"


class ConvexResidual(nn.Module):
    """`α·x + (1 − α)·f(x)`, α in [0, 1]: a skip connection of constant `α + (1 − α)·Lip(f)`, 1 for a 1-Lipschitz f.

    A plain `x + f(x)` has constant 2. With `learnable=True` α is the sigmoid of a parameter.

    >>> ConvexResidual(nn.ReLU(), 0.25)(torch.tensor([[-4.0, 4.0]]))
    tensor([[-1.,  4.]])
    """

    def __init__(self, module: nn.Module, alpha: float = 0.5, learnable: bool = False) -> None:
        super().__init__()
        if not 0 <= alpha <= 1 or (learnable and alpha in (0, 1)):
            inside = "(0, 1)" if learnable else "[0, 1]"
            raise InputError(f"alpha must lie in {inside} for a convex combination, got {alpha}")
        self.module = module
        self.fixed = None if learnable else float(alpha)
        self.logit = nn.Parameter(torch.tensor(math.log(alpha / (1 - alpha)))) if learnable else None

    @property
    def alpha(self) -> Tensor | float:
        """The weight of the identity."""
        if self.logit is not None:
            return self.logit.sigmoid()
        assert self.fixed is not None
        return self.fixed

    def _constant(self) -> float | None:
        """`max(1, Lip(f))`, which bounds every convex combination; None where Lip(f) is not known."""
        inner = known_constant(self.module)
        if inner is not None and self.fixed is not None and not 0 <= self.fixed <= 1:  # set by hand: not convex
            return inflate(inflate(abs(self.fixed) + abs(1 - self.fixed) * inner))
        if inner is None or inner <= 1:
            return None if inner is None else 1.0
        return inner if self.fixed is None else inflate(self.fixed + (1 - self.fixed) * inner)

    lipschitz_upper = by_construction(_constant)

    def forward(self, x: Tensor) -> Tensor:
        """The combination."""
        y = self.module(x)
        if y.shape != x.shape:
            raise InputError(f"a skip connection needs equal shapes, got {tuple(x.shape)} and {tuple(y.shape)}")
        return self.alpha * x + (1 - self.alpha) * y

    def extra_repr(self) -> str:
        """The weight."""
        return "alpha learned" if self.fixed is None else f"alpha={self.fixed:g}"


class Mirrored(nn.Module):
    """`(f(x) + f(x̄))/2` in evaluation, x̄ the image mirrored left to right; `f(x)` while training.

    Mirroring is an isometry, so the mean has the constant of f, while the margins of images and their mirror images, which
    training treats alike, are averaged: certified accuracy for the price of a second evaluation.

    Guarantee: the constant of f, in both modes.

    >>> Mirrored(nn.Flatten()).eval()(torch.tensor([[[[1.0, 3.0]]]]))
    tensor([[2., 2.]])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def _constant(self) -> float | None:
        """That of the module."""
        return known_constant(self.module)

    lipschitz_upper = by_construction(_constant)

    def forward(self, x: Tensor) -> Tensor:
        """The mean over both images, or the module itself while training."""
        if self.training:
            return self.module(x)
        return 0.5 * self.module(x) + 0.5 * self.module(x.flip(-1))


@dataclass(frozen=True)
class Ending:
    """`f = W·g + b`: `weight()` is W as it is now, differentiable; `trunk` bounds Lip(g) for all parameters, or is None."""

    weight: Callable[[], Tensor]
    trunk: float | None


def ending(model: nn.Module) -> Ending | None:
    """The linear layer that the network ends in, or None where it ends in something else.

    Read off sequences, `Lipschitz` and dense layers; other modules may end in anything, and hooks may change everything.
    In exact arithmetic, as `known_constant`: certificates take `lipschitz_bound(model, x).pairs`.

    >>> last = ending(nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(4, 3)))
    >>> last.weight().shape, last.trunk
    (torch.Size([3, 4]), 1.0)
    """
    if hooked(model):
        return None
    if type(model) is nn.Sequential and len(model):
        *before, last = model
        final = ending(last)
        trunk = known_constant(nn.Sequential(*before))
        if final is None or final.trunk is None or trunk is None:
            return None if final is None else Ending(final.weight, None)
        return Ending(final.weight, inflate(final.trunk * trunk) if trunk != 1 else final.trunk)
    if type(model) is Lipschitz:
        inner, scale = ending(model.module), model.scale
        return None if inner is None else Ending(lambda: inner.weight() * scale, inner.trunk)
    plain = type(model) is nn.Linear or sole_parametrization(model) is not None
    if isinstance(model, nn.Linear) and plain and type(model).forward is nn.Linear.forward:
        return Ending(lambda: model.weight, 1.0)
    return None
