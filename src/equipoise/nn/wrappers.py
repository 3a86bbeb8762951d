"""Constants that follow from construction; modules around modules: a chosen constant, skip connections; the last layer."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from equipoise.core import (
    InputError,
    Refused,
    by_construction,
    constructed,
    deflate,
    hooked,
    inflate,
    require_module,
    require_number,
    require_positive,
    root,
    single_down,
)
from equipoise.maps.geometry import integers
from equipoise.nn.activations import Described, steepness
from equipoise.nn.parametrize import PLAIN, proved_constant, sole_parametrization

_ISOMETRIES = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.ChannelShuffle,
)
_RANDOM = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_MAX = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_MEAN = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


def known_constant(module: nn.Module) -> float | None:
    """An upper bound of the module's ℓ2 constant in evaluation mode that holds for all values of its parameters, or
    None.

    It is read off the construction: equipoise's layers have 1, compositions multiply, activations and pooling come
    from tables. A module of yours can state its own, `lipschitz_upper = by_construction(…)`; that is your claim. Plain
    weights, parametrizations of yours, batch norm, modules with hooks and other forwards give None:
    `equipoise.lipschitz_bound` bounds those, for the weights they have now.

    >>> known_constant(nn.Sequential(nn.Flatten(), nn.ReLU())), known_constant(nn.MaxPool2d(3, 2, 1))
    (1.0, 2.0)
    """
    if hooked(require_module(module, "module")):
        return None
    if isinstance(module, PLAIN):
        return proved_constant(module)
    stated = constructed(module)
    if stated is not None:
        return stated
    if type(module) is nn.Sequential:
        return _product(map(known_constant, module))
    return _plain(module)


def _product(constants: Iterable[float | None]) -> float | None:
    """The constant of a chain of maps, None where that of one is not known."""
    total = 1.0
    for constant in constants:
        if constant is None:
            return None
        exact = 1 in (total, constant)
        total = total * constant if exact else inflate(total * constant)
    return total


def _plain(module: nn.Module) -> float | None:
    """PyTorch's own modules, by exact type: a subclass may have another forward."""
    kind = type(module)
    if kind in _ISOMETRIES or kind in _RANDOM:
        return 1.0
    if kind in _MAX:
        return overlap(module)
    if kind in _MEAN:
        plain = getattr(module, "count_include_pad", True) and not module.ceil_mode
        return 1.0 if plain and getattr(module, "divisor_override", None) is None else None
    if kind in _ADAPTIVE:
        size = module.output_size
        return 1.0 if size == 1 or (isinstance(size, tuple) and set(size) == {1}) else None
    return steepness(module)


def overlap(pool: Any) -> float:
    """`√Π ⌈k·gcd(s, d)/s⌉` of a max pooling: the number of windows that one pixel reaches, 1 without overlap.

    >>> overlap(nn.MaxPool2d(3, 2, 1)), overlap(nn.MaxPool2d(2))
    (2.0, 1.0)
    """
    dims = next(d for d, kind in enumerate(_MAX, 1) if isinstance(pool, kind))
    k, s, d = (
        integers(getattr(pool, name), dims, name) for name in ("kernel_size", "stride", "dilation")
    )
    windows = math.prod(-(-a * math.gcd(b, c) // b) for a, b, c in zip(k, s, d, strict=True))
    return root(windows)


class Lipschitz(Described):
    """`k·f`: a network of constant k from a 1-Lipschitz f; one multiplication at the end.

    The factor is part of the forward pass. An f of known constant c > 1, such as another `Lipschitz`, is scaled
    by k/c.

    Guarantee: k-Lipschitz, for every value of the parameters. An f whose constant does not follow from its
    construction is refused; a module of yours states its own, see `known_constant`.

    Args:
        constant: k.
        module: f.

    >>> import torch
    >>> f = nn.Sequential(nn.Flatten(), nn.ReLU())
    >>> Lipschitz(3.0, f)(torch.ones(1, 2))
    tensor([[3., 3.]])
    >>> Lipschitz(3.0, Lipschitz(5.0, f))(torch.ones(1, 2))
    tensor([[3.0000, 3.0000]])
    """

    __constants__ = ("constant",)

    def __init__(self, constant: float, module: nn.Module) -> None:
        super().__init__()
        require_positive(constant=constant)
        bound = known_constant(module)
        if bound is None:
            raise Refused(
                f"the constant of {type(module).__name__} does not follow from its construction, so {constant:g} could not be "
                "guaranteed; convert it with equipoise.make_lipschitz, or state its constant by equipoise.nn.by_construction"
            )
        self.constant = float(constant)
        self.scale = single_down(constant if bound <= 1 else deflate(constant / bound))
        self.module = module

    def _constant(self) -> float | None:
        """The constant, as long as the module is what it was; else what follows from the module that is there now."""
        bound = known_constant(self.module)
        if bound is None:
            return None
        now = abs(self.scale) if bound <= 1 else inflate(abs(self.scale) * bound)
        return self.constant if now <= inflate(self.constant) else now

    lipschitz_upper = by_construction(_constant)

    def forward(self, x: Tensor) -> Tensor:
        """The scaled map."""
        return self.module(x) * self.scale


class ConvexResidual(Described):
    """`α·x + (1 − α)·f(x)`, α in [0, 1]: a skip connection of constant `α + (1 − α)·Lip(f)`, 1 for a 1-Lipschitz f.

    A plain `x + f(x)` has constant 2.

    Args:
        module: f.
        alpha: weight of the identity.

    >>> import torch
    >>> ConvexResidual(nn.ReLU(), 0.25)(torch.tensor([[-4.0, 4.0]]))
    tensor([[-1.,  4.]])
    """

    __constants__ = ("alpha",)

    def __init__(self, module: nn.Module, alpha: float = 0.5) -> None:
        super().__init__()
        self.module = module
        self.alpha = float(require_number(alpha, "alpha", least=0, most=1))

    def _constant(self) -> float | None:
        """`|α| + |1 − α|·Lip(f)`, 1 for a convex combination with a 1-Lipschitz f; None if Lip(f) is not known."""
        inner = known_constant(self.module)
        if inner is None:
            return None
        if inner <= 1 and 0 <= self.alpha <= 1:
            return 1.0
        return inflate(inflate(abs(self.alpha) + abs(1 - self.alpha) * inner))

    lipschitz_upper = by_construction(_constant)

    def forward(self, x: Tensor) -> Tensor:
        """The combination."""
        y = self.module(x)
        if y.shape != x.shape:
            raise InputError(
                f"a skip connection needs equal shapes, got {tuple(x.shape)} and {tuple(y.shape)}"
            )
        return single_down(self.alpha) * x + single_down(1 - self.alpha) * y


class Mirrored(nn.Module):
    """`(f(x) + f(x̄))/2` in evaluation, x̄ the image mirrored left to right; `f(x)` while training.

    Mirroring is an isometry, so the mean has the constant of f, while the margins of images and their mirror images, which
    training treats alike, are averaged: certified accuracy for the price of a second evaluation.

    Guarantee: the constant of f, in both modes.

    >>> import torch
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
        return None if final is None else Ending(final.weight, _product([trunk, final.trunk]))
    if type(model) is Lipschitz:
        inner = ending(model.module)
        scale = model.scale
        return None if inner is None else Ending(lambda: inner.weight() * scale, inner.trunk)
    plain = type(model) is nn.Linear or sole_parametrization(model) is not None
    if isinstance(model, nn.Linear) and plain and type(model).forward is nn.Linear.forward:
        return Ending(lambda: model.weight, 1.0)
    return None
