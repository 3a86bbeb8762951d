"""An existing network with 1-Lipschitz layers in place of its own: what is replaced, and what is left, with the reason."""

import copy
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils import parametrize

from equipoise.core.errors import InputError, Refused
from equipoise.core.modules import hooked
from equipoise.nn.activations import Contracted, slopes
from equipoise.nn.constants import known_constant, overlap
from equipoise.nn.effective import Effective
from equipoise.nn.layers import Weighted, methods
from equipoise.nn.normalise import BatchCentering
from equipoise.nn.pooling import MaxPool2d

Action = Literal["converted", "replaced", "kept", "left"]


@dataclass(frozen=True)
class Change:
    """What became of one module: `left` ones are not 1-Lipschitz by construction, and the note says why."""

    name: str
    was: str
    now: str
    action: Action
    note: str = ""


def convert(model: nn.Module, method: str = "sr", **options: Any) -> tuple[nn.Module, tuple[Change, ...]]:
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
    if not isinstance(model, nn.Module):
        raise InputError(f"expected an nn.Module, got {type(model).__name__}")
    if method not in methods():
        raise InputError(f"there is no method {method!r}; there are {', '.join(sorted(methods()))}")
    walk = _Walk(method, options)
    new = walk.visit(copy.deepcopy(model), "")
    return new, tuple(walk.rows)


class _Walk:
    """Depth first through the modules; `seen` keeps modules used twice one module, `shared` weights used twice one weight."""

    def __init__(self, method: str, options: dict[str, Any]) -> None:
        self.layers, self.options = methods()[method], options
        self.rows: list[Change] = []
        self.seen: dict[nn.Module, nn.Module] = {}
        self.shared: dict[Tensor, Weighted] = {}

    def visit(self, module: nn.Module, path: str) -> nn.Module:
        """The replacement of a module, the module itself where there is none."""
        if module in self.seen:
            return self.seen[module]
        self.seen[module] = module  # a module that contains itself would not end otherwise
        if parametrize.is_parametrized(module):
            return self.note(path, module, module, "left", "it has a parametrisation of its own; remove it first")
        if isinstance(module, Effective):
            return self.note(path, module, module, "kept", "1-Lipschitz already")
        whole = isinstance(module, _WHOLE)
        if not whole and any(True for _ in module.children()):
            for name, child in list(module._modules.items()):  # named_children leaves out what was there before
                if child is not None:
                    module._modules[name] = self.visit(child, f"{path}.{name}" if path else name)
            own = [name for name, _ in module.named_parameters(recurse=False)]
            if own:
                self.note(path, module, module, "left", f"its own forward uses {', '.join(own)}")
            return module
        if hooked(module):
            return self.note(path, module, module, "left", "it has hooks or a patched forward; remove them first")
        new = self.replace(module, path)
        self.seen[module] = new
        return new

    def note(self, path: str, old: nn.Module, new: nn.Module, action: Action, why: str = "") -> nn.Module:
        """Write the row, return the new module."""
        self.rows.append(Change(path or "(the model)", type(old).__name__, type(new).__name__, action, why))
        return new

    def replace(self, module: nn.Module, path: str) -> nn.Module:
        """A leaf."""
        if type(module) in self.layers:
            return self.weighted(module, path)
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and _plain_batch_norm(module):
            why = "the scale is dropped; run a few batches in training mode to re-estimate the means"
            return self.note(path, module, _centering(module), "replaced", why)
        if type(module) is nn.MaxPool2d and overlap(module) > 1:
            pool = _disjoint(module)
            why = f"overlapping windows have constant {overlap(module):.4g}"
            if pool is None:
                return self.note(path, module, module, "left", why + "; no disjoint windows give the same output size")
            return self.note(path, module, pool, "replaced", why)
        found = slopes(module)
        if found is not None and max(map(abs, found)) > 1:
            new = Contracted(module)
            return self.note(path, module, new, "replaced", f"its slopes reach {max(map(abs, found)):.5g}")
        known = known_constant(module)
        if known is not None and known <= 1:
            return self.note(path, module, module, "kept")
        if known is not None:
            return self.note(path, module, module, "left", f"its constant is {known:.4g}")
        return self.note(path, module, module, "left", _reason(module))

    def weighted(self, module: nn.Module, path: str) -> nn.Module:
        """A plain linear layer."""
        weight = module.weight
        assert isinstance(weight, Tensor)
        try:
            layer = self.layers[type(module)].from_plain(module, **self.options)
        except Refused as refusal:
            return self.note(path, module, module, "left", str(refusal))
        except TypeError as error:
            raise InputError(f"{path or 'the model'}: the method does not take these options: {error}") from error
        first = self.shared.get(weight)
        why = ""
        if isinstance(layer, Weighted) and type(first) is type(layer) and first.settings == layer.settings:
            layer.raw, layer.method, why = first.raw, first.method, "shares its weight"
        if isinstance(layer, Weighted):
            self.shared.setdefault(weight, layer)
        layer.requires_grad_(weight.requires_grad)
        return self.note(path, module, layer, "converted", why)


#: modules that use their children's weights themselves, or fuse them
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase)


def _plain_batch_norm(module: nn.modules.batchnorm._BatchNorm) -> bool:
    return module.track_running_stats and type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _centering(norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> BatchCentering:
    mean, var = norm.running_mean, norm.running_var
    assert mean is not None
    assert var is not None
    momentum = norm.momentum if norm.momentum else 0.1
    layer = BatchCentering(norm.num_features, momentum, device=mean.device, dtype=mean.dtype)
    layer.running_mean.copy_(mean)
    if norm.affine and layer.bias is not None:
        scale = norm.weight.detach() / (var + norm.eps).sqrt()
        safe = scale.abs().clamp_min(1e-6).copysign(scale)
        layer.bias.data.copy_(norm.bias.detach() / safe)
        layer.bias.requires_grad_(norm.bias.requires_grad)
    return layer.train(norm.training)


def _disjoint(pool: nn.MaxPool2d) -> MaxPool2d | None:
    """Windows of the stride's size with the same number of outputs for every input: those where 2·padding = kernel − 1."""
    k, s, p, d = (
        (v, v) if isinstance(v, int) else tuple(v) for v in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    )
    same = all(2 * c == a - 1 for a, c in zip(k, p, strict=True))
    if not same or d != (1, 1) or pool.ceil_mode or pool.return_indices or min(s) < 2:
        return None
    return MaxPool2d((s[0], s[1]), ceil_mode=True)


def _reason(module: nn.Module) -> str:
    if isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.InstanceNorm2d | nn.RMSNorm):
        return "dividing by a standard deviation has constant max|γ|/√ε; LayerCentering does not divide"
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d):
        return "this method has no such layer, or it is a subclass with a forward of its own"
    if isinstance(module, nn.PReLU):
        return "its slope is learned and not limited; use LeakyReLU"
    if next(module.parameters(), None) is not None:
        return f"there is no 1-Lipschitz form of {type(module).__name__} here"
    return "its constant does not follow from its construction"
