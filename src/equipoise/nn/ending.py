"""The linear layer at the end of a network, as losses need it: its weight, and the constant of what comes before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from equipoise.core.modules import hooked, stands
from equipoise.core.precision import up
from equipoise.nn.constants import known_constant
from equipoise.nn.layers import Weighted
from equipoise.nn.normalise import LastLayerNormalised
from equipoise.nn.wrappers import Lipschitz


@dataclass(frozen=True)
class Ending:
    """`f = W·g + b`: `weight()` is W as it is now, differentiable; `trunk` bounds Lip(g) for all parameters, or is None."""

    weight: Callable[[], Tensor]
    trunk: float | None


def ending(model: nn.Module) -> Ending | None:
    """The linear layer that the network ends in, or None where it ends in something else.

    Read off sequences, `Lipschitz` and dense layers; other modules may end in anything, and hooks may change everything.
    In exact arithmetic, as `known_constant`: certificates take `lipschitz_bound(model, x).pairs`.

    >>> found = ending(nn.Sequential(nn.Flatten(), nn.ReLU(), LastLayerNormalised(4, 3)))
    >>> found.weight().shape, found.trunk
    (torch.Size([3, 4]), 1.0)
    """
    if hooked(model):
        return None
    if type(model) is nn.Sequential and len(model):
        *before, last = model
        found = ending(last)
        trunk = known_constant(nn.Sequential(*before))
        if found is None or found.trunk is None or trunk is None:
            return None if found is None else Ending(found.weight, None)
        return Ending(found.weight, up(found.trunk * trunk) if trunk != 1 else found.trunk)
    if type(model) is Lipschitz:
        inner, scale = ending(model.module), model.scale
        return None if inner is None else Ending(lambda: inner.weight() * scale, inner.trunk)
    if type(model) is nn.Linear:
        return Ending(lambda: model.weight, 1.0)
    if isinstance(model, Weighted) and model.plain_type is nn.Linear and stands(model, "forward"):
        return Ending(lambda: model.effective()[0], 1.0)
    if type(model) is LastLayerNormalised:
        return Ending(lambda: model.effective()[0], 1.0)
    return None
