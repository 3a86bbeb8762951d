"""Order statistics, running sums, maxima, distances and concatenations: what contracts, or stretches by a known root."""

import functools
import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core.precision import inflate
from equipoise.lipschitz.operations import Average, Join, Largest, Map, Opaque, Sorted
from equipoise.lipschitz.rules.registry import Call, Signal, Step, carried, norm_of, repeated, root, rule, unchanged

_aten = torch.ops.aten


@rule("aten.sort.default", "aten.sort.stable", "aten.topk.default")
def sort(call: Call) -> Step:
    """Sorting along a dimension (GroupSort), or the k largest, is a contraction: the values only."""
    x = call.x
    if not call.get("sorted", True) and call["k"] > 1:
        call.refuse("the k largest in no fixed order jump where two of them change places", "ask for sorted=True")
    by_rows = call.get("dim", -1) in (-1, len(x.shape) - 1)
    return carried(x, 1.0, "sort", Sorted(), x.row if by_rows else math.inf)


_EXTREMES = ("amax.default", "amin.default", "max.dim", "min.dim", "max.default", "min.default")
_RANKS = ("kthvalue.default", "median.dim", "median.default", "nanmedian.dim", "nanmedian.default")


@rule(*(f"aten.{name}" for name in (*_EXTREMES, *_RANKS)))
def rank(call: Call) -> Step:
    """One order statistic of disjoint sets of entries: 1, the values only."""
    extreme = str(call.node.target).removeprefix("aten.") in _EXTREMES
    return carried(call.x, 1.0, "order statistic", Largest() if extreme else Sorted())


@rule("aten.quantile.scalar", "aten.quantile.default")
def quantile(call: Call) -> Step:
    """Weighted means of neighbouring order statistics: √ of how many levels are asked for."""
    levels = call.constant("q")
    return carried(call.x, root(levels.numel() if isinstance(levels, Tensor) else 1), "quantile")


@rule("aten.cumsum.default")
def running_sum(call: Call) -> Step:
    """Running sums over n entries: `1/(2·sin(π/(4n + 2)))`, the largest singular value of the triangle of ones."""
    x = call.x
    n = x.shape[call["dim"]] if x.shape else 1
    gain = 1.0 if n == 1 else inflate(0.5 / math.sin(math.pi / (4 * n + 2)))
    return Step(((x, gain),), "running sum", offset=0.0, peak=inflate(n * x.peak), map=Average())


@rule("aten.cummax.default", "aten.cummin.default", "aten.logcumsumexp.default")
def running_maximum(call: Call) -> Step:
    """Running maxima, or their smooth form: every output can follow the first of n entries, √n."""
    x = call.x
    n = x.shape[call["dim"]] if x.shape else 1
    smooth = call.node.target is _aten.logcumsumexp.default
    more = math.log(n + 1) if smooth else 0.0
    offset = inflate(more * math.sqrt(x.numel))
    return Step(((x, root(n)),), "running maximum", offset=offset, peak=inflate(x.peak + more), low=x.low)


#: functions of two entries whose gradient has norm at most 1, and how far they may exceed the larger of both
_OF_TWO = {
    **dict.fromkeys(
        ("maximum.default", "minimum.default", "max.other", "min.other", "fmax.default", "fmin.default"), 0.0
    ),
    "logaddexp.default": math.log(2),
    "logaddexp2.default": 1.0,
}


@rule(*(f"aten.{name}" for name in _OF_TWO), "aten.hypot.default")
def two_to_one(call: Call) -> Step:
    """Functions of two entries whose gradient has norm at most 1: root of the sum of squares."""
    gains, fixed, peak = repeated(call, (call["self"], call["other"]))
    name = str(call.node.target).removeprefix("aten.")
    root_size = math.sqrt(math.prod(call.shape))
    if name not in _OF_TWO:
        return Step(gains, "hypot", "root", offset=inflate(fixed * root_size), peak=inflate(1.5 * peak), low=0.0)
    more = _OF_TWO[name]
    found: Map = Opaque() if more else Largest()
    offset, label = inflate(inflate(fixed + more) * root_size), "logaddexp" if more else "maximum"
    return Step(gains, label, "root", offset=offset, peak=inflate(peak + more) if more else peak, map=found)


@rule("aten._cdist_forward.default")
def distances(call: Call) -> Step:
    """All distances between the rows of two tensors: each is 1-Lipschitz in either of its rows."""
    order = float(call["p"])
    if order < 1:
        call.refuse(f"the ℓ{order:g} «distance» is not Lipschitz")
    gains = []
    for x in (v for v in (call["x1"], call["x2"]) if isinstance(v, Signal)):
        read = math.prod(call.shape) // max(1, x.numel // max(1, x.shape[-1]))
        inner = 1.0 if order >= 2 else inflate(float(x.shape[-1]) ** (1 / order - 0.5))
        gains.append((x, inflate(root(read) * inner)))
    fixed = [norm_of(v) for v in (call["x1"], call["x2"]) if isinstance(v, Tensor)]
    offset = inflate(
        max(fixed, default=0.0) * math.sqrt(math.prod(call.shape)) * (1 if order >= 2 else call["x1"].shape[-1])
    )
    return Step(tuple(gains), "distances", offset=offset, low=0.0)


@rule("aten.nan_to_num.default")
def numbers(call: Call) -> Step:
    """The identity on numbers."""
    return unchanged(call.x)


@rule("aten.cat.default", "aten.concat.default", "aten.stack.default")
def concatenation(call: Call) -> Step:
    """Root of the sum of squares; a maximum next to the minimum of the same two tensors only reorders them (MaxMin)."""
    join = torch.stack if call.node.target is _aten.stack.default else torch.cat
    tensors = call["tensors"]
    parts = [t for t in tensors if isinstance(t, Signal)]
    constant = math.hypot(*(norm_of(t) for t in tensors if isinstance(t, Tensor)))
    gains = _sorted_pairs(call, parts)
    peak = max([t.peak for t in parts] + [float(t.abs().max()) for t in tensors if isinstance(t, Tensor) and t.numel()])
    norm = inflate(math.hypot(*(t.norm for t in parts), constant))
    low = min([t.low for t in parts] + [float(t.min()) for t in tensors if isinstance(t, Tensor) and t.numel()])
    plain = [s for s, _ in gains] == parts
    fixed = tuple(t.detach().double() if isinstance(t, Tensor) else None for t in tensors)
    found = Join(fixed, functools.partial(join, dim=call["dim"]))
    return Step(
        tuple(gains), "concatenation", "root", offset=inflate(constant), peak=peak, norm=norm, low=low,
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
