"""Compositions that are one operation and have a constant where their parts have none: norms, pooling, activations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from equipoise.lipschitz.idioms import idiom
from equipoise.lipschitz.values import functional

_aten = torch.ops.aten
_ADD = {_aten.add.Tensor, _aten.add.Scalar}
#: over how many dimensions they pool
_POOLS = {_aten.avg_pool1d.default: 1, _aten.avg_pool2d.default: 2, _aten.avg_pool3d.default: 3}
_MUL, _DIV = {_aten.mul.Tensor}, {_aten.div.Tensor}


def root_mean_square(node: fx.Node) -> tuple[fx.Node, int, float] | None:
    """`x·rsqrt(mean(x², −1) + ε)` or `x/√(mean(x², −1) + ε)`: the node of x, the length of its rows, and ε."""
    if node.op != "call_function" or node.kwargs or len(node.args) != 2:
        return None
    pairs = [node.args, node.args[::-1]] if node.target in _MUL else [node.args] if node.target in _DIV else []
    for x, size in pairs:
        inner: Any = _under_root(size, -0.5 if node.target in _MUL else 0.5)
        if not isinstance(x, fx.Node) or not isinstance(inner, fx.Node) or inner.target not in _ADD or inner.kwargs:
            continue
        if not isinstance(inner.args[1], float) or not inner.args[1] > 0:
            continue
        mean, value = inner.args[0], x.meta.get("val")
        if isinstance(mean, fx.Node) and isinstance(value, torch.Tensor) and value.dim() and _mean_of_squares(mean, x):
            return x, int(value.shape[-1]), inner.args[1]
    return None


def _under_root(node: Any, power: float) -> Any:
    """v, where the node is v^power for power ±½, however it is written."""
    match node.target if isinstance(node, fx.Node) and not node.kwargs else None, power:
        case (_aten.sqrt.default, 0.5) | (_aten.rsqrt.default, -0.5):
            return node.args[0]
        case _aten.pow.Tensor_Scalar, _ if node.args[1] == power:
            return node.args[0]
        case _aten.reciprocal.default, -0.5:
            return _under_root(node.args[0], 0.5)
        case _aten.mul.Tensor, -0.5 if node.args[1] == 1:  # 1/√v is exported as a reciprocal times 1
            return _under_root(node.args[0], power)
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


@dataclass(frozen=True)
class Pooling:
    """`(Σ x^p)^(1/p)` over windows, as `F.lp_pool2d` writes it: of this node, p, and size and step per dimension."""

    x: fx.Node
    order: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]


def power_pooling(node: fx.Node) -> Pooling | None:
    """`(sign(a)·relu(|a|)·k)^(1/p)` of `a = avg_pool(x^p)` over k entries: norms of windows for an even p, sums for p = 1."""
    match node.target, node.args, node.kwargs:
        case _aten.pow.Tensor_Scalar, (fx.Node() as scaled, float() as inverse), {}:
            pass
        case _:
            return None
    average = _signed(scaled)
    if average is None or average.target not in _POOLS or average.kwargs:
        return None
    given: Any = average.args
    powered, sizes, *rest = given
    if not isinstance(powered, fx.Node) or powered.target is not _aten.pow.Tensor_Scalar or powered.kwargs:
        return None
    x, order = powered.args
    if not isinstance(x, fx.Node) or not isinstance(order, int | float) or not _plain(order) or inverse != 1 / order:
        return None
    sizes, steps = tuple(sizes), tuple(rest[0] if rest and rest[0] else sizes)
    if {len(sizes), len(steps)} != {_POOLS[average.target]} or scaled.args[1] != math.prod(sizes):
        return None
    if any(_set(value) for value in rest[1:2]) or len(rest) > 3:
        return None
    spatial = x.meta["val"].shape[-len(sizes) :]
    cut = len(rest) > 2 and rest[2] and any((n - k) % s for n, k, s in zip(spatial, sizes, steps, strict=True))
    return None if cut else Pooling(x, int(order), sizes, steps)


def _plain(order: float) -> bool:
    """Whether x^p needs no sign."""
    return order == 1 or (order >= 2 and order % 2 == 0)


def _set(value: Any) -> bool:
    return any(value) if isinstance(value, list | tuple) else bool(value)


def _signed(scaled: fx.Node) -> fx.Node | None:
    """a in `sign(a)·relu(|a|)·k`."""
    match scaled.target, scaled.args:
        case _aten.mul.Tensor, (fx.Node() as both, int() | float()) if both.target is _aten.mul.Tensor:
            match both.args:
                case (fx.Node() as sign, fx.Node() as size) if sign.target is _aten.sign.default:
                    inner: Any = size.args[0] if size.target is _aten.relu.default else None
                    same = inner is not None and inner.target is _aten.abs.default and inner.args == sign.args
                    return sign.args[0] if same else None  # type: ignore[return-value]
    return None


def is_composition(node: fx.Node) -> bool:
    """Whether the node ends a composition that is one operation."""
    return node.op == "call_function" and any(
        find(node) is not None for find in (root_mean_square, power_pooling, idiom)
    )


def recognised(graph: fx.Graph, added: set[fx.Node]) -> None:
    """Replace compositions in the graph by the operation they are."""
    for node in list(graph.nodes):
        if not is_composition(node):
            continue
        with graph.inserting_before(node):
            made = _normalised(graph, node) or _activated(graph, node) or _pooled(graph, node)
        made[-1].meta = dict(node.meta)
        node.replace_all_uses_with(made[-1])
        added.update(made)


def _normalised(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    found = root_mean_square(node)
    if found is None:
        return []
    x, size, eps = found
    return [graph.call_function(_aten.rms_norm.default, (x, [size], None, eps))]


def _activated(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The operations of a written-out activation, one after the other; all have its shape."""
    made: list[fx.Node] = []
    for target, args in idiom(node) or ():
        made.append(graph.call_function(target, tuple(made[-1] if a is None and made else a for a in args)))
        made[-1].meta = dict(node.meta)
    return made


def _pooled(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Windows along every dimension, and their norms or sums."""
    found = power_pooling(node)
    assert found is not None
    made, value, dims = [found.x], found.x.meta["val"], len(found.sizes)
    first = value.dim() - dims
    for i, (size, step) in enumerate(zip(found.sizes, found.steps, strict=True)):
        made.append(graph.call_function(_aten.unfold.default, (made[-1], first + i, size, step)))
        made[-1].meta = {**node.meta, "val": (value := value.unfold(first + i, size, step))}
    last = list(range(-dims, 0))
    norm, total = _aten.linalg_vector_norm.default, _aten.sum.dim_IntList
    given = (made[-1], last) if found.order == 1 else (made[-1], float(found.order), last)
    made.append(graph.call_function(total if found.order == 1 else norm, given))
    return made[1:]
