"""An existing network with 1-Lipschitz layers in place of its own, and a trained one with plain layers in place of those."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair
from torch.nn.utils import parametrize

from equipoise.core import (
    InputError,
    Refused,
    evaluating,
    hooked,
    is_unmodified,
    require_module,
    require_one_of,
    run_on,
)
from equipoise.maps.reading import module_kind
from equipoise.nn import rescaling
from equipoise.nn.activations import Contracted, steepness
from equipoise.nn.normalise import BatchCentering
from equipoise.nn.orthogonal import cayley, polar, soc
from equipoise.nn.parametrize import PLAIN, Computed, ComputedLayer, Parametrized
from equipoise.nn.pooling import MaxPool2d
from equipoise.nn.wrappers import known_constant, overlap
from equipoise.norms import spectral_norm

Action = Literal["converted", "replaced", "kept", "left"]


#: families with layers that replace a plain one; residual blocks, which hold an activation, do not
_FAMILIES = {
    rescaling: ("SN", "AOL", "SR"),
    cayley: ("Cayley", "BRO"),
    soc: ("SOC",),
    polar: ("BCOP", "RKO", "Bjorck"),
}


def methods() -> dict[str, dict[type[nn.Module], Any]]:
    """The layers by family and plain layer: `methods()["sr"][nn.Linear]` is `SRLinear`.

    >>> methods()["sr"][nn.Linear].__name__
    'SRLinear'
    """
    return {
        family.lower(): {
            plain: getattr(module, family + plain.__name__)
            for plain in PLAIN
            if hasattr(module, family + plain.__name__)
        }
        for module, families in _FAMILIES.items()
        for family in families
    }


@dataclass(frozen=True)
class Change:
    """What became of one module: `left` ones are not 1-Lipschitz by construction, and the note says why."""

    name: str
    was: str
    now: str
    action: Action
    note: str = ""


def convert(
    model: nn.Module, method: str = "sr", **options: Any
) -> tuple[nn.Module, tuple[Change, ...]]:
    """A deep copy of the model in which every layer that has a 1-Lipschitz form has it, and a row for every module.

    * `nn.Linear`, `nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`, `nn.ConvTranspose2d` → the layer of that method, starting from the same
      weight;
    * batch norm → `BatchCentering`, with the scale `γ/√(var + ε)` dropped (it is what stretches) and the shift `β`
      divided by it: the means are re-estimated by a few batches in training mode;
    * max pooling that overlaps, with "same" padding → the same output size from windows that do not;
    * activations with slopes beyond 1 → divided by their constant (`Contracted`).

    Modules that are used in several places stay one module, and layers that share a weight go on sharing it.
    Functions called in a `forward` (`F.gelu`, sums of branches) are not modules: nothing here sees them,
    `lipschitz_bound` of the result does.

    Args:
        model: any module; it is not changed.
        method: a key of `methods()`.
        options: handed to every layer, e.g. `t=3` for SR.

    >>> net, rows = convert(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)), "aol")
    >>> [(row.now, row.action) for row in rows]
    [('AOLLinear', 'converted'), ('Contracted', 'replaced'), ('LayerNorm', 'left')]
    """
    require_module(model, "model")
    require_one_of(methods(), method=method)
    walk = _Walk(methods()[method], options)
    new = walk.visit(copy.deepcopy(model), "")
    return new, tuple(walk.rows)


#: the module in place of the old one, what was done, and why
_Step = tuple[nn.Module, Action, str]


class _Walk:
    """Depth first through the modules; `done` keeps modules used twice one module, `shared` weights used twice one weight."""

    def __init__(self, layers: dict[type[nn.Module], Any], options: dict[str, Any]) -> None:
        self.layers = layers
        self.options = options
        self.rows: list[Change] = []
        self.done: dict[nn.Module, nn.Module] = {}
        self.shared: dict[Tensor, nn.Module] = {}

    def visit(self, module: nn.Module, path: str) -> nn.Module:
        """The replacement of a module, the module itself where there is none.

        Args:
            module: the module, in the copy of the network.
            path: its dotted name.
        """
        if module in self.done:
            return self.done[module]
        self.done[module] = module  # a module that contains itself would not end otherwise
        step = self.inside(module, path) if _has_parts(module) else self.leaf(module, path)
        if step is not None:
            new, action, why = step
            was, now = (parametrize.type_before_parametrizations(m).__name__ for m in (module, new))
            self.rows.append(Change(path or "(the model)", was, now, action, why))
            self.done[module] = new
        return self.done[module]

    def inside(self, module: nn.Module, path: str) -> _Step | None:
        """A module of modules: its children are replaced in place.

        Args:
            module: the module, in the copy of the network.
            path: its dotted name.
        """
        for name, child in list(module._modules.items()):  # named_children leaves out repetitions
            if child is not None:
                module._modules[name] = self.visit(child, f"{path}.{name}" if path else name)
        own = ", ".join(name for name, _ in module.named_parameters(recurse=False))
        return (module, "left", f"its own forward uses {own}") if own else None

    def leaf(self, module: nn.Module, path: str) -> _Step:
        """A module without children, or one that uses their weights itself.

        Args:
            module: the module, in the copy of the network.
            path: its dotted name.
        """
        if isinstance(module, Computed | Parametrized):
            return module, "kept", "1-Lipschitz already"
        if parametrize.is_parametrized(module):
            return module, "left", "it has a parametrization of its own; remove it first"
        if hooked(module):
            return module, "left", "it has hooks or a patched forward; remove them first"
        if type(module) in self.layers:
            return self.weighted(module, path)
        if type(module) in _BATCH_NORMS and getattr(module, "track_running_stats", False):
            why = "the scale is dropped; run batches in training mode to re-estimate the means"
            return _centering(module), "replaced", why
        if type(module) is nn.MaxPool2d and overlap(module) > 1:
            pool = _disjoint(module)
            why = f"overlapping windows have constant {overlap(module):.4g}"
            if pool is None:
                return module, "left", why + "; no disjoint windows give the same output size"
            return pool, "replaced", why
        steepest = steepness(module)
        if steepest is not None and steepest > 1:
            return Contracted(module), "replaced", f"its slopes reach {steepest:.5g}"
        constant = known_constant(module)
        if constant is None:
            return module, "left", _reason(module)
        if constant <= 1 + 1e-5:  # reflections state their rounding
            return module, "kept", ""
        return module, "left", f"its constant is {constant:.4g}"

    def weighted(self, module: Any, path: str) -> _Step:
        """A plain linear layer.

        Args:
            module: the module, in the copy of the network.
            path: its dotted name.
        """
        weight = module.weight
        try:
            layer = self.layers[type(module)].from_plain(module, **self.options)
        except Refused as refusal:
            return module, "left", str(refusal)
        except TypeError as error:
            raise InputError(
                f"{path or 'the model'}: the method does not take these options: {error}"
            ) from error
        why = ""
        if isinstance(layer, Parametrized):
            first = self.shared.setdefault(weight, layer)
            if first is not layer and repr(first) == repr(layer):
                layer.parametrizations["weight"] = first.parametrizations["weight"]  # type: ignore[index, operator]
                why = "shares its weight"
        layer.requires_grad_(weight.requires_grad)
        return layer, "converted", why


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
#: modules that use their children's weights themselves, or fuse them
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase)


def _has_parts(module: nn.Module) -> bool:
    """Whether a module is to be looked into: it has children, and neither fuses them nor computes their weights."""
    closed = isinstance(module, (Computed, Parametrized, *_WHOLE))
    return bool(module._modules) and not closed and not parametrize.is_parametrized(module)


def _centering(norm: Any) -> BatchCentering:
    mean = norm.running_mean
    momentum = norm.momentum or 0.1
    layer = BatchCentering(norm.num_features, momentum, device=mean.device, dtype=mean.dtype)
    layer.running_mean.copy_(mean)
    if norm.affine and layer.bias is not None:
        scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
        safe = scale.abs().clamp_min(1e-6).copysign(scale)
        layer.bias.data.copy_(norm.bias.detach() / safe)
        layer.bias.requires_grad_(norm.bias.requires_grad)
    return layer.train(norm.training)


def _disjoint(pool: nn.MaxPool2d) -> MaxPool2d | None:
    """Windows of the stride's size with the same number of outputs for every input: those where 2·padding = kernel − 1."""
    k, s, p, d = map(_pair, (pool.kernel_size, pool.stride, pool.padding, pool.dilation))
    same = all(2 * c == a - 1 for a, c in zip(k, p, strict=True))
    if not same or d != (1, 1) or pool.ceil_mode or pool.return_indices or min(s) < 2:
        return None
    return MaxPool2d(s, ceil_mode=True)


def _reason(module: nn.Module) -> str:
    if isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.InstanceNorm2d | nn.RMSNorm):
        return "dividing by a standard deviation has constant max|γ|/√ε; LayerCentering does not divide"
    if isinstance(module, PLAIN):
        return "this method has no such layer, or it is a subclass with a forward of its own"
    return f"the constant of {type(module).__name__} does not follow from its construction"


@dataclass(frozen=True)
class LayerBound:
    """Upper bound of one exported layer's ℓ2 constant: `spectral norm` for the stored weights, or `construction`."""

    name: str
    layer: str
    upper: float | None
    source: str


@dataclass(frozen=True)
class Certificate:
    """What was proved when a network was exported: a bound per layer, and one of the whole where it could be had.

    It is about the stored weights; changing them makes it void.
    """

    layers: tuple[LayerBound, ...]
    upper: float | None = None
    source: str = ""
    norm: str = "l2"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def plain(model: nn.Module) -> tuple[nn.Module, tuple[LayerBound, ...]]:
    """A deep copy with plain layers in place of those that compute their weights, and their norms.

    Modules used twice stay one module. Outputs are equal up to the rounding of one product (≤ 1e-6 relative).

    >>> net, rows = plain(nn.Sequential(rescaling.SRLinear(4, 4), nn.ReLU()))
    >>> type(net[0]).__name__, rows[0].upper <= 1.00001
    ('Linear', True)
    """
    require_module(model, "model")
    rows: list[LayerBound] = []
    memo: dict[int, Any] = {}
    for path, layer in _outermost(model, ""):
        if id(layer) not in memo:
            memo[id(layer)] = _exported(path or "the model", layer).train(layer.training)
            rows.append(_norm(path or "(the model)", layer, memo[id(layer)]))
    # what is in the memo is taken from there, wherever it is used
    return copy.deepcopy(model, memo), tuple(rows)


def _exported(path: str, layer: nn.Module) -> nn.Module:
    """One layer as a plain module."""
    name = parametrize.type_before_parametrizations(layer).__name__
    if isinstance(layer, ComputedLayer):
        if not is_unmodified(layer, "export"):
            raise Refused(
                f"{path} ({name}) has hooks, or a subclass or a patch changes what its calls do, so that export() would make "
                "another map; remove them"
            )
        return layer.export()
    kind = module_kind(layer)  # refuses hooks and overridden forwards
    if type(layer).__call__ is not nn.Module.__call__:
        raise Refused(
            f"{path} ({name}) overrides __call__, so that export() would make another map"
        )
    new = copy.deepcopy(layer)
    parametrize.remove_parametrizations(new, "weight")
    new.__class__ = kind
    return new


def evaluate_at(model: nn.Module, *inputs: Tensor) -> None:
    """Evaluate once, so that layers whose weights depend on the image size are exported for the size they have in this call."""
    parts = [part for part in model.modules() if isinstance(part, Computed)]
    for part in parts:
        part._cache.clear()
    if parts:
        with evaluating(model):
            run_on(model, inputs)


def with_effective_weights(model: nn.Module, *inputs: Tensor) -> nn.Module:
    """The network with the weights it uses in evaluation on inputs of this size: itself where no layer computes its own.

    >>> type(with_effective_weights(cayley.CayleyConv2d(2, 2, 3), torch.zeros(1, 2, 6, 6))).__name__
    'CayleyConv2d'
    """
    if next(_outermost(model, ""), None) is None:
        return model
    evaluate_at(model, *inputs)
    return plain(model)[0].eval()


def _outermost(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Layers that compute their weights and are not part of another one."""
    if isinstance(module, ComputedLayer):
        if module.stored is None:
            yield path, module
        return
    if isinstance(module, PLAIN) and parametrize.is_parametrized(module, "weight"):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, f"{path}.{name}" if path else name)


def _norm(name: str, layer: nn.Module, new: nn.Module) -> LayerBound:
    kind = parametrize.type_before_parametrizations(layer).__name__
    try:
        upper = spectral_norm(new, rtol=1e-4).upper
    except (Refused, InputError):
        return LayerBound(name, kind, known_constant(layer), "construction")
    top = float(torch.as_tensor(upper).max())
    return LayerBound(name, kind, top, "spectral norm, all input sizes")
