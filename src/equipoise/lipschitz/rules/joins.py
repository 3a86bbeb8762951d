"""Concatenations: root of the sum of squares, and 1 where a maximum stands next to the minimum of the same entries."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core.precision import up
from equipoise.lipschitz.operations import Join, Sorted
from equipoise.lipschitz.rules.registry import Call, Signal, Step, norm_of, rule

_aten = torch.ops.aten


@rule("aten.cat.default", "aten.concat.default")
def concatenation(call: Call) -> Step:
    """Root of the sum of squares."""
    dim = call["dim"]
    return _joined(call, lambda tensors: torch.cat(tensors, dim))


@rule("aten.stack.default")
def stack(call: Call) -> Step:
    """Root of the sum of squares."""
    dim = call["dim"]
    return _joined(call, lambda tensors: torch.stack(tensors, dim))


def _joined(call: Call, run: Callable[[list[Tensor]], Tensor]) -> Step:
    """Root of the sum of squares; a maximum next to the minimum of the same two tensors only reorders them (MaxMin)."""
    tensors = call["tensors"]
    parts = [t for t in tensors if isinstance(t, Signal)]
    constant = math.hypot(*(norm_of(t) for t in tensors if isinstance(t, Tensor)))
    gains = _sorted_pairs(call, parts)
    peak = max([t.peak for t in parts] + [float(t.abs().max()) for t in tensors if isinstance(t, Tensor) and t.numel()])
    norm = up(math.hypot(*(t.norm for t in parts), constant))
    low = min([t.low for t in parts] + [float(t.min()) for t in tensors if isinstance(t, Tensor) and t.numel()])
    plain = [s for s, _ in gains] == parts
    found = Join(tuple(t.detach().double() if isinstance(t, Tensor) else None for t in tensors), run)
    return Step(
        tuple(gains), "concatenation", "root", offset=up(constant), peak=peak, norm=norm, low=low,
        map=found if plain else Sorted(),
    )  # fmt: skip


#: operations that give the same tensor when they are asked twice
_SAME_VIEWS = {
    _aten.view.default, _aten.reshape.default, _aten.unflatten.int, _aten.transpose.int, _aten.permute.default,
    _aten.movedim.int, _aten.unsqueeze.default, _aten.flatten.using_ints,
}  # fmt: skip
_LARGER = {_aten.maximum.default, _aten.max.other}
_SMALLER = {_aten.minimum.default, _aten.min.other}


def _sorted_pairs(call: Call, parts: list[Signal]) -> list[tuple[Signal, float]]:
    """Maxima and minima of the same two tensors, or of the same groups of entries, together hold each entry at most once."""
    by_pair: dict[Any, list[int]] = {}
    for i, part in enumerate(parts):
        if part.node.target in _LARGER | _SMALLER:
            pair = frozenset(_identity(call, n) for n in part.node.args)
            if len(pair) == 2:
                by_pair.setdefault(pair, []).append(i)
    taken: set[int] = set()  # positions: one tensor may be joined twice
    gains: list[tuple[Signal, float]] = []
    for found in by_pair.values():
        first = parts[found[0]]
        inputs = [call.lookup(n) for n in first.node.args if isinstance(n, fx.Node)]
        both = len(found) == 2 and len({parts[i].node.target in _LARGER for i in found}) == 2
        if both and len(inputs) == 2 and all(isinstance(s, Signal) and s.shape == first.shape for s in inputs):
            taken.update(found)
            gains += [(s, 1.0) for s in inputs]
    for one, other in _extremes(call, {i: p for i, p in enumerate(parts) if i not in taken}):
        taken |= {one, other}
        gains.append((call.lookup(_reduced(parts[one])[0]), 1.0))  # type: ignore[index]
    return gains + [(p, 1.0) for i, p in enumerate(parts) if i not in taken]


def _identity(call: Call, argument: Any, depth: int = 3) -> Any:
    """What a tensor holds, so that `x[:, :2]` taken twice is one thing: which entries of which other one, or which view."""
    if not isinstance(argument, fx.Node):
        return tuple(argument) if isinstance(argument, list) else argument
    known = call.lookup(argument)
    if not isinstance(known, Signal) or known.pieces:
        return argument
    if known.part is not None:
        base, places = known.part
        return base, tuple(places.shape), places.numpy().tobytes()
    if depth and argument.target in _SAME_VIEWS and not argument.kwargs:
        return argument.target, *(_identity(call, a, depth - 1) for a in argument.args)
    return argument


_TOP, _BOTTOM = {_aten.amax.default, _aten.max.dim}, {_aten.amin.default, _aten.min.dim}


def _reduced(part: Signal) -> tuple[fx.Node, Any, bool] | None:
    """The tensor whose groups of entries a maximum or minimum is taken of, the dimensions, and which of the two it is."""
    node: Any = part.node
    node = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
    if node.target not in _TOP | _BOTTOM or node.kwargs or len(node.args) < 2:
        return None
    dims = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
    source = node.args[0].meta["val"]
    dims = tuple(sorted(d % source.dim() for d in dims))
    return (node.args[0], dims, node.target in _TOP) if math.prod(source.shape[d] for d in dims) > 1 else None


def _extremes(call: Call, parts: dict[int, Signal]) -> list[tuple[int, int]]:
    """Pairs, by position, of the maximum and the minimum of the same groups of two or more entries."""
    found: dict[Any, dict[bool, int]] = {}
    for i, part in parts.items():
        key = _reduced(part)
        if key is not None:
            found.setdefault((_identity(call, key[0]), key[1]), {}).setdefault(key[2], i)
    return [(both[True], both[False]) for both in found.values() if len(both) == 2]
