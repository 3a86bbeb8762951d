"""Compositions that are one operation: a root-mean-square norm written by hand has a constant, its square alone has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from equipoise.lipschitz.values import functional

_aten = torch.ops.aten
_ADD = {_aten.add.Tensor, _aten.add.Scalar}
_MUL, _DIV = {_aten.mul.Tensor}, {_aten.div.Tensor}


def root_mean_square(node: fx.Node) -> tuple[fx.Node, int, float] | None:
    """`x·rsqrt(mean(x², −1) + ε)` or `x/√(mean(x², −1) + ε)`: the node of x, the length of its rows, and ε."""
    if node.op != "call_function" or node.kwargs or len(node.args) != 2:
        return None
    pairs = [node.args, node.args[::-1]] if node.target in _MUL else [node.args] if node.target in _DIV else []
    inverse = _aten.rsqrt.default if node.target in _MUL else _aten.sqrt.default
    for x, size in pairs:
        if not isinstance(x, fx.Node) or not isinstance(size, fx.Node) or size.target is not inverse:
            continue
        inner: Any = size.args[0]
        if inner.target not in _ADD or inner.kwargs or not isinstance(inner.args[1], float) or not inner.args[1] > 0:
            continue
        mean, value = inner.args[0], x.meta.get("val")
        if isinstance(mean, fx.Node) and isinstance(value, torch.Tensor) and value.dim() and _mean_of_squares(mean, x):
            return x, int(value.shape[-1]), inner.args[1]
    return None


def _mean_of_squares(mean: fx.Node, x: fx.Node) -> bool:
    """Whether this is the mean of x² over the last dimension, which is kept."""
    if mean.target is not _aten.mean.dim or mean.kwargs or len(mean.args) != 3 or mean.args[2] is not True:
        return False
    dims, squared = mean.args[1], mean.args[0]
    if list(dims) not in ([-1], [x.meta["val"].dim() - 1]) or not isinstance(squared, fx.Node):  # type: ignore[arg-type]
        return False
    match functional(squared.target):
        case _aten.square.default:
            return squared.args == (x,)
        case _aten.pow.Tensor_Scalar:
            return squared.args == (x, 2)
        case _aten.mul.Tensor:
            return squared.args == (x, x)
    return False


def recognised(graph: fx.Graph, added: set[fx.Node]) -> int:
    """Replace compositions in the graph by the operation they are; how many there were."""
    count = 0
    for node in list(graph.nodes):
        found = root_mean_square(node)
        if found is None:
            continue
        x, size, eps = found
        with graph.inserting_before(node):
            whole = graph.call_function(_aten.rms_norm.default, (x, [size], None, eps))
        whole.meta = dict(node.meta)
        node.replace_all_uses_with(whole)
        added.add(whole)
        count += 1
    return count
