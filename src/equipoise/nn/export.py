"""A trained network without the training: plain modules with the effective weights, and what is known of their norms."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError, Refused
from equipoise.core.modules import evaluating, is_unmodified
from equipoise.core.precision import inflate
from equipoise.nn.constants import known_constant
from equipoise.nn.effective import Effective
from equipoise.nn.orthogonal.frame import SizedConv2d
from equipoise.norms import spectral_norm

#: what the rounding of a layer's effective weights may add to its constant
ROUNDING = 1 + 1e-5


@dataclass(frozen=True)
class LayerNorm2:
    """Upper bound of one exported layer's ℓ2 constant: `spectral norm` for the stored weights, or `construction`."""

    name: str
    layer: str
    upper: float | None
    source: str


@dataclass(frozen=True)
class Certificate:
    """What was proved when a network was exported: a bound per layer, and one of the whole where it could be had.

    It speaks of the stored weights; changing them makes it void.
    """

    layers: tuple[LayerNorm2, ...]
    upper: float | None = None
    source: str = ""
    norm: str = "l2"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def plain(model: nn.Module) -> tuple[nn.Module, tuple[LayerNorm2, ...]]:
    """A deep copy with `layer.export()` in place of every layer that has effective weights, and their norms.

    Modules used twice stay one module. Outputs are equal up to the rounding of one product (≤ 1e-6 relative).

    >>> from equipoise.nn import SRLinear
    >>> net, rows = plain(nn.Sequential(SRLinear(4, 4), nn.ReLU()))
    >>> type(net[0]).__name__, rows[0].upper <= 1.00001
    ('Linear', True)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected an nn.Module, got {type(model).__name__}")
    rows: list[LayerNorm2] = []
    memo: dict[int, Any] = {}
    for path, layer in _outermost(model, ""):
        if id(layer) in memo:
            continue
        make = getattr(layer, "export", None)
        if make is None:
            raise Refused(f"{path or 'the model'} ({type(layer).__name__}) does not say how it is exported")
        if not is_unmodified(layer, "export"):
            raise Refused(
                f"{path or 'the model'} ({type(layer).__name__}) has hooks, or a subclass or a patch changes what its calls "
                "do, so that export() would make another map; remove them, or define export beside forward in the same class"
            )
        new: nn.Module = copy.deepcopy(make())
        memo[id(layer)] = new.train(layer.training)
        rows.append(_norm(path, layer, new))
    return copy.deepcopy(model, memo), tuple(rows)  # what is in the memo is taken from there, wherever it is used


def evaluate_at(model: nn.Module, *inputs: Tensor) -> None:
    """Evaluate once, so that layers whose weights depend on the image size are exported for the size they have in this call."""
    for part in model.modules():
        if isinstance(part, SizedConv2d):
            part.forget()
    with evaluating(model), torch.no_grad():
        model(*inputs)


def with_effective_weights(model: nn.Module, *inputs: Tensor) -> nn.Module:
    """The network with the weights it uses in evaluation on inputs of this size: itself where no layer computes its own.

    >>> from equipoise.nn import CayleyConv2d
    >>> type(with_effective_weights(CayleyConv2d(2, 2, 3), torch.zeros(1, 2, 6, 6))).__name__
    'SpectralConv2d'
    """
    if not any(isinstance(part, Effective) for part in model.modules()):
        return model
    evaluate_at(model, *inputs)
    return plain(model)[0].eval()


def _outermost(module: nn.Module, path: str) -> Iterator[tuple[str, Effective]]:
    """Layers with effective weights that are not part of another one."""
    if isinstance(module, Effective):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, f"{path}.{name}" if path else name)


def uses(module: nn.Module) -> int:
    """How many layers with effective weights a pass goes through: one that stands at two places counts twice.

    >>> from equipoise.nn import SRLinear
    >>> layer = SRLinear(4, 4)
    >>> uses(nn.Sequential(layer, nn.ReLU(), layer))
    2
    """
    if isinstance(module, Effective):
        return 1
    return sum(uses(child) for child in module._modules.values() if child is not None)


def _norm(path: str, layer: Effective, new: nn.Module) -> LayerNorm2:
    name = path or "(the model)"
    try:
        upper = spectral_norm(new, rtol=1e-4).upper
    except (Refused, InputError):
        constant = known_constant(layer)
        return LayerNorm2(
            name, type(layer).__name__, None if constant is None else inflate(constant * ROUNDING), "construction"
        )
    top = float(upper.max()) if isinstance(upper, Tensor) else float(upper)
    return LayerNorm2(name, type(layer).__name__, top, "spectral norm, all input sizes")
