"""Operations that move entries without computing: views and permutations are isometries, selections contract, copies stretch."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from equipoise.core.precision import up
from equipoise.lipschitz.rules.registry import Call, Signal, Step, copies, norm_of, root, rule
from equipoise.maps.linear import Padding

VIEWS = (
    "view.default", "reshape.default", "_unsafe_view.default", "view_as.default", "reshape_as.default", "flatten.using_ints",
    "unflatten.int", "permute.default", "transpose.int", "t.default", "numpy_T.default", "movedim.int", "movedim.intlist",
    "swapaxes.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default", "contiguous.default",
    "clone.default", "alias.default", "detach.default", "flip.default", "roll.default", "pixel_shuffle.default",
    "pixel_unshuffle.default", "channel_shuffle.default", "lift_fresh_copy.default", "ravel.default", "mT.default",
)  # fmt: skip
SELECTIONS = ("slice.Tensor", "select.int", "narrow.default", "diagonal.default")
PIECES = (
    "split.Tensor",
    "split.sizes",
    "split_with_sizes.default",
    "chunk.default",
    "unbind.int",
    "tensor_split.sections",
)


def _first(call: Call) -> Signal:
    return call.signal(next(iter(call.arguments)))


@rule(*(f"aten.{name}" for name in VIEWS))
def view(call: Call) -> Step:
    """The same entries in another order: an isometry. Rows stay inside old rows where the last dimension divides."""
    x = _first(call)
    rows = bool(x.shape) and bool(call.shape) and call.shape[-1] > 0
    same_rows = rows and x.shape[-1] % call.shape[-1] == 0 and _keeps_last(call, x)
    return Step(((x, 1.0),), "view", offset=0.0, row=x.row if same_rows else math.inf, peak=x.peak, moves=True)


def _keeps_last(call: Call, x: Signal) -> bool:
    """Whether every row of the output lies in one row of the input: reshapes that split, and moves of other dimensions."""
    name = str(call.node.target).split(".")[1]
    if name in (
        "view",
        "reshape",
        "_unsafe_view",
        "flatten",
        "unflatten",
        "contiguous",
        "clone",
        "unsqueeze",
        "squeeze",
    ):
        return call.shape[-1] <= x.shape[-1]
    if name in ("transpose", "permute"):
        order = list(range(len(x.shape)))
        if name == "transpose":
            a, b = call["dim0"] % len(order), call["dim1"] % len(order)
            order[a], order[b] = order[b], order[a]
        else:
            order = [d % len(order) for d in call["dims"]]
        return order[-1] == len(order) - 1
    return False


@rule(*(f"aten.{name}" for name in SELECTIONS))
def selection(call: Call) -> Step:
    """A choice of entries: a contraction. One component of a softmax: 1/(2√2) of its input, p_i(1 − p_i)·√2 at most."""
    x = _first(call)
    scores = _one_component(call, x)
    if scores is not None:
        return Step(((scores, up(math.sqrt(0.125))),), "softmax component", norm=x.norm, peak=1.0)
    return Step(((x, 1.0),), "selection", offset=0.0, peak=x.peak, row=_row(call, x), moves=True)


def _one_component(call: Call, x: Signal) -> Signal | None:
    """The input of a softmax of which this selection takes one component (`p[..., i]` or a slice of length 1)."""
    if str(x.node.target) not in ("aten.softmax.int", "aten._softmax.default"):
        return None
    dim = call.get("dim")
    if not isinstance(dim, int) or dim % len(x.shape) != int(x.node.args[1]) % len(x.shape):  # type: ignore[arg-type]
        return None
    name = str(call.node.target).split(".")[1]
    if name != "select" and not (name in ("slice", "narrow") and call.shape[dim] == 1):
        return None
    scores = call.lookup(x.node.args[0])  # type: ignore[arg-type]
    return scores if isinstance(scores, Signal) else None


def _row(call: Call, x: Signal) -> float:
    """A selection along another dimension than the last keeps rows; along the last it shortens them."""
    name = str(call.node.target).split(".")[1]
    if name in ("slice", "narrow", "split", "split_with_sizes", "chunk"):
        return x.row
    if name in ("select", "unbind"):
        return x.row if call["dim"] % len(x.shape) != len(x.shape) - 1 else math.inf
    return math.inf


@rule(*(f"aten.{name}" for name in PIECES))
def pieces(call: Call) -> Step:
    """All pieces together hold every entry once; `getitem` takes one."""
    x = _first(call)
    return Step(((x, 1.0),), "split", offset=0.0, peak=x.peak, row=_row(call, x))


@rule("getitem")
def getitem(call: Call) -> Step:
    """One piece of a split, or the values (never the indices) of a maximum or sort."""
    x = _first(call)
    value = call.node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        call.refuse("the position of a maximum jumps with the input", "use the values only")
    pieces_of = str(x.node.target).removeprefix("aten.")
    if pieces_of not in PIECES and call.node.args[1] != 0:
        call.refuse("only the first result of this operation has a rule", "use the result itself, not its statistics")
    return Step(((x, 1.0),), "piece", offset=math.inf, peak=x.peak, row=x.row, norm=x.norm, moves=True)


@rule("aten.tril.default", "aten.triu.default")
def triangle(call: Call) -> Step:
    """Entries set to zero: a contraction."""
    x = _first(call)
    return Step(((x, 1.0),), "selection", offset=0.0, peak=x.peak, row=x.row)


@rule("aten.zeros_like.default", "aten.ones_like.default", "aten.new_zeros.default", "aten.new_ones.default")
def filled(call: Call) -> Step:
    """Takes the shape of the input only: constant."""
    one = 0.0 if "zeros" in str(call.node.target) else 1.0
    return Step((), "constant", offset=up(math.sqrt(math.prod(call.shape))) * one, peak=one)


@rule(
    "aten.expand.default",
    "aten.expand_as.default",
    "aten.broadcast_to.default",
    "aten.repeat.default",
    "aten.tile.default",
)
def repetition(call: Call) -> Step:
    """Every entry n times: √n."""
    x = _first(call)
    grown = copies(x, call.shape)
    row = x.row if x.shape and call.shape[-1] == x.shape[-1] else math.inf
    return Step(((x, grown),), "repeat", offset=0.0, peak=x.peak, row=row)


@rule("aten.repeat_interleave.self_int")
def interleave(call: Call) -> Step:
    """Every entry n times: √n."""
    x = _first(call)
    return Step(((x, copies(x, call.shape)),), "repeat", offset=0.0, peak=x.peak)


@rule("aten.index.Tensor", "aten.index_select.default")
def index(call: Call) -> Step:
    """Entries at constant positions: √ of how often the most frequent one is read."""
    x = _first(call)
    indices = call.get("indices")
    if str(call.node.target) == "aten.index_select.default":
        indices = [None] * (call["dim"] % len(x.shape)) + [call.constant("index")]
    if any(isinstance(i, Signal) for i in indices or []):
        call.refuse("positions that depend on the input jump with it", "index with constants")
    flat = torch.arange(x.numel).reshape(x.shape)
    read = flat[tuple(slice(None) if i is None else i for i in indices)]
    most = int(torch.bincount(read.flatten(), minlength=1).max()) if read.numel() else 0
    return Step(((x, root(most)),), "index", offset=0.0, peak=x.peak)


@rule("aten.cat.default", "aten.concat.default", "aten.stack.default")
def concatenation(call: Call) -> Step:
    """Root of the sum of squares; a maximum next to the minimum of the same two tensors only reorders them (MaxMin)."""
    parts = [t for t in call["tensors"] if isinstance(t, Signal)]
    constant = math.hypot(*(norm_of(t) for t in call["tensors"] if isinstance(t, Tensor)))
    gains = _sorted_pairs(call, parts)
    peak = max(
        [t.peak for t in parts] + [float(t.abs().max()) for t in call["tensors"] if isinstance(t, Tensor) and t.numel()]
    )
    norm = up(math.hypot(*(t.norm for t in parts), constant))
    return Step(tuple(gains), "concatenation", "root", offset=up(constant), peak=peak, norm=norm)


def _sorted_pairs(call: Call, parts: list[Signal]) -> list[tuple[Signal, float]]:
    by_pair: dict[Any, list[Signal]] = {}
    for part in parts:
        name = str(part.node.target)
        if name in ("aten.maximum.default", "aten.minimum.default") and len(set(part.node.args)) == 2:
            by_pair.setdefault(frozenset(part.node.args), []).append(part)
    taken: set[Signal] = set()
    gains: list[tuple[Signal, float]] = []
    for pair, found in by_pair.items():
        names = [str(p.node.target) for p in found]
        inputs = [call.lookup(n) for n in pair]
        if sorted(names) == ["aten.maximum.default", "aten.minimum.default"] and all(
            isinstance(s, Signal) and s.shape == found[0].shape for s in inputs
        ):
            taken.update(found)
            gains += [(s, 1.0) for s in inputs]
    return gains + [(p, 1.0) for p in parts if p not in taken]


@rule(
    "aten.dropout.default",
    "aten.alpha_dropout.default",
    "aten.feature_dropout.default",
    "aten.feature_alpha_dropout.default",
)
def dropout(call: Call) -> Step:
    """The identity in evaluation; random in training."""
    if call["train"]:
        call.refuse("dropout is active, so the map is random", "call model.eval() first")
    x = _first(call)
    return Step(((x, 1.0),), "identity", offset=0.0, row=x.row, peak=x.peak, moves=True)


@rule(
    "aten.to.dtype",
    "aten._to_copy.default",
    "aten.to.dtype_layout",
    "aten.to.device",
    "aten.type_as.default",
    "aten.to.other",
)
def cast(call: Call) -> Step:
    """A change between float32 and float64 is the identity; other types round, which no constant covers."""
    x = _first(call)
    value = call.node.meta.get("val")
    kept = (torch.float32, torch.float64)
    if not isinstance(value, Tensor) or value.dtype not in kept or x.dtype not in kept:
        call.refuse("a cast to a narrow or integer type rounds, which is discontinuous", "keep float32 or float64")
    return Step(((x, 1.0),), "identity", offset=0.0, row=x.row, peak=x.peak, moves=True)


@rule("aten.pad.default", "aten.constant_pad_nd.default")
def pad(call: Call) -> Step:
    """Padding: √ of how often the most copied entry appears, per axis; zeros 1, reflect and circular ≤ √2, replicate √(p + 1)."""
    x = _first(call)
    mode = call.get("mode", "constant")
    value = float(call.get("value") or 0.0)
    twice = call["pad"]
    amounts = [(twice[2 * i], twice[2 * i + 1]) for i in range(len(twice) // 2)][::-1]
    sizes = x.shape[len(x.shape) - len(amounts) :]
    gain = 1.0
    if mode != "constant":
        if any(p < 0 for pair in amounts for p in pair):
            call.refuse("negative amounts in this padding mode", "slice first")
        top = math.prod(_most_copied(n, pair, mode) for n, pair in zip(sizes, amounts, strict=True))
        gain = root(top)
    negative = any(p < 0 for pair in amounts for p in pair)
    added = math.prod(call.shape) - (0 if negative else x.numel)
    form = None if negative or value else Padding(tuple(amounts), tuple(sizes), "zeros" if mode == "constant" else mode)
    spatial = len(amounts) == len(x.shape) - 2
    return Step(
        ((x, gain),), f"{mode} padding", offset=up(abs(value) * math.sqrt(added)), peak=max(x.peak, abs(value)),
        linear=form if spatial else None,
    )  # fmt: skip


def _most_copied(n: int, pair: tuple[int, int], mode: str) -> int:
    flat = torch.arange(float(n)).reshape(1, 1, n)
    padded = torch.nn.functional.pad(flat, pair, mode=mode).flatten().tolist()
    return max(Counter(padded).values())


@rule(
    "aten.where.self",
    "aten.where.ScalarOther",
    "aten.where.ScalarSelf",
    "aten.masked_fill.Scalar",
    "aten.masked_fill.Tensor",
)
def where_(call: Call) -> Step:
    """A constant mask chooses entries: root of the sum of squares over the branches."""
    mask = call.get("condition") if "condition" in call.arguments else call.get("mask")
    if isinstance(mask, Signal):
        call.refuse("the mask depends on the input, so the choice jumps", "use relu, clamp or maximum")
    branches = [v for k, v in call.arguments.items() if k not in ("condition", "mask")]
    signals = [v for v in branches if isinstance(v, Signal)]
    fixed = [
        float(v.abs().max()) if isinstance(v, Tensor) else abs(float(v)) for v in branches if not isinstance(v, Signal)
    ]
    peak = max([s.peak for s in signals] + fixed)
    gains = tuple((s, copies(s, call.shape)) for s in signals)
    finite = max(fixed, default=0.0)
    offset = up(finite * math.sqrt(math.prod(call.shape))) if math.isfinite(finite) else math.inf
    return Step(gains, "mask", "root", offset=offset, peak=peak)


@rule("aten.sort.default", "aten.sort.stable")
def sort(call: Call) -> Step:
    """Sorting along a dimension (GroupSort) is a contraction: the values only."""
    x = _first(call)
    same = call.get("dim", -1) in (-1, len(x.shape) - 1)
    return Step(((x, 1.0),), "sort", offset=0.0, peak=x.peak, row=x.row if same else math.inf)
