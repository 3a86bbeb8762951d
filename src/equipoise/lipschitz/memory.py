"""Which tensors of a captured graph share memory, and which writes nothing else can see."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from equipoise.core.errors import Refused
from equipoise.lipschitz.places import where

_aten = torch.ops.aten
#: operations that may hand back their own input although their schema does not say so
_MAYBE_SAME = {
    _aten.reshape, _aten.contiguous, _aten.flatten, _aten.to, _aten.type_as, _aten.dropout, _aten.alpha_dropout,
    _aten.feature_dropout, _aten.feature_alpha_dropout, _aten.expand_as, _aten.view_as, _aten.movedim, _aten.unflatten,
    _aten.einsum, _aten.pixel_shuffle, _aten.pixel_unshuffle, _aten.channel_shuffle,
}  # fmt: skip


def written_arguments(node: fx.Node) -> list[Any]:
    """The arguments a node writes into: the first of `add_`, the last of `out=` variants."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [value for a, value in _given(node, schema) if a.alias_info is not None and a.alias_info.is_write]


def refuse_mutation(node: fx.Node, moving: set[fx.Node]) -> None:
    """An in-place operation on the input is fine if nothing reads the overwritten memory afterwards under another name."""
    targets: list[fx.Node] = []
    fx.node.map_arg(tuple(written_arguments(node)), targets.append)
    if not targets:
        return
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    own = {node} | {a for a in _aliases(node) if order[a] > order[node] and _descends(a, node)}
    for target in targets:
        aliases = _aliases(target)
        for alias in aliases - own:
            later = [u for u in alias.users if order[u] > order[node] and u not in own]
            if later:
                raise Refused(
                    f"{where(node)} overwrites memory that {later[0].name!r} reads afterwards; "
                    "write the operation out of place (e.g. torch.relu(x) for torch.relu_(x))"
                )
        if any(a.op in ("placeholder", "get_attr") and a not in moving for a in aliases):
            raise Refused(f"{where(node)} changes a parameter or buffer: the map differs from call to call")


def _given(node: fx.Node, schema: Any) -> list[tuple[Any, Any]]:
    """The schema's arguments with the values given for them."""
    return [
        (a, node.args[i] if i < len(node.args) else node.kwargs.get(a.name)) for i, a in enumerate(schema.arguments)
    ]


def _aliases(node: fx.Node) -> set[fx.Node]:
    """Every node that may share memory with this one, as far as the schemas say."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        todo += [user for user in current.users if current in _shared(user)]
        todo += _shared(current)
    return seen


def _shared(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the result of a node may be, as far as the schemas say."""
    if node.target is operator.getitem:
        return _taken_from(node)
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    if getattr(node.target, "overloadpacket", None) in _MAYBE_SAME:
        return node.all_input_nodes[:1]
    if all(r.alias_info is None for r in schema.returns):
        return []
    found: list[fx.Node] = []
    fx.node.map_arg(tuple(v for a, v in _given(node, schema) if a.alias_info is not None), found.append)
    return found


def _taken_from(item: fx.Node) -> list[fx.Node]:
    """What one of several results may share memory with: all of them if they are views, else only itself taken again."""
    source = item.all_input_nodes[0]
    schema = getattr(source.target, "_schema", None)
    if schema is None or any(r.alias_info is not None for r in schema.returns):
        return [source]
    return [u for u in source.users if u.target is operator.getitem and u.args == item.args and u is not item]


def _descends(node: fx.Node, ancestor: fx.Node) -> bool:
    todo, seen = [node], set[fx.Node]()
    while todo:
        current = todo.pop()
        if current is ancestor:
            return True
        if current not in seen:
            seen.add(current)
            todo += _shared(current)
    return False
