"""Operations that move entries without computing: views and permutations are isometries, selections contract, copies stretch."""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from equipoise.core.precision import inflate
from equipoise.lipschitz.operations import Copy, Map, Padded, Piece, Pieces, Product
from equipoise.lipschitz.rules.registry import Call, Signal, Step, carried, copies, repeated, root, rule, unchanged
from equipoise.maps.linear import Padding

#: the same entries in another order of dimensions
VIEWS = (
    "movedim.int", "movedim.intlist", "swapaxes.default", "t.default", "numpy_T.default", "flip.default", "roll.default",
    "pixel_shuffle.default", "pixel_unshuffle.default", "channel_shuffle.default", "mT.default",
)  # fmt: skip
#: the same entries in the same order
RESHAPES = (
    "view.default", "reshape.default", "_unsafe_view.default", "view_as.default", "reshape_as.default", "flatten.using_ints",
    "unflatten.int", "squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default", "contiguous.default",
    "clone.default", "alias.default", "detach.default", "lift_fresh_copy.default", "ravel.default",
)  # fmt: skip
PIECES = (
    "split.Tensor",
    "split.sizes",
    "split_with_sizes.default",
    "chunk.default",
    "tensor_split.sections",
    "unsafe_split.Tensor",
    "unsafe_chunk.default",
)
_aten = torch.ops.aten
_SOFTMAX = (_aten.softmax.int, _aten._softmax.default)


def _view(x: Signal, keeps_rows: bool) -> Step:
    return carried(x, 1.0, "view", Copy(traced=True), x.row if keeps_rows else math.inf)


@rule(*(f"aten.{name}" for name in VIEWS))
def view(call: Call) -> Step:
    """The same entries in another order: an isometry."""
    return _view(call.x, False)


@rule(*(f"aten.{name}" for name in RESHAPES))
def reshape(call: Call) -> Step:
    """The same entries in the same order; rows stay inside old rows where the last dimension divides."""
    x = call.x
    rows = bool(x.shape) and bool(call.shape) and call.shape[-1] > 0 and x.shape[-1] % call.shape[-1] == 0
    return _view(x, rows)


@rule("aten.transpose.int")
def transpose(call: Call) -> Step:
    """Two dimensions exchanged."""
    x = call.x
    dims = len(x.shape)
    a, b = call["dim0"] % max(1, dims), call["dim1"] % max(1, dims)
    return _view(x, a == b or dims - 1 not in (a, b))


@rule("aten.permute.default")
def permute(call: Call) -> Step:
    """Dimensions in another order."""
    x = call.x
    return _view(x, bool(x.shape) and call["dims"][-1] % len(x.shape) == len(x.shape) - 1)


@rule("aten.slice.Tensor", "aten.narrow.default")
def stretch_of(call: Call) -> Step:
    """Some entries along a dimension: a contraction. One component of a softmax: 1/(2√2), p_i(1 − p_i)·√2 at most."""
    x, dim = call.x, call["dim"]
    return _component(call, x, dim if call.shape[dim] == 1 else None) or _chosen(x, x.row)


@rule("aten.select.int")
def select(call: Call) -> Step:
    """One position along a dimension."""
    x, dim = call.x, call["dim"]
    return _component(call, x, dim) or _chosen(x, x.row if dim % len(x.shape) != len(x.shape) - 1 else math.inf)


@rule("aten.diagonal.default")
def diagonal(call: Call) -> Step:
    """Some entries."""
    return _chosen(call.x, math.inf)


def _chosen(x: Signal, row: float) -> Step:
    return carried(x, 1.0, "selection", Copy(traced=True), row)


def _component(call: Call, x: Signal, dim: int | None) -> Step | None:
    """The step of a selection that takes one component of a softmax, `p[..., i]` or a slice of length 1."""
    if dim is None or x.node.target not in _SOFTMAX or dim % len(x.shape) != int(x.node.args[1]) % len(x.shape):  # type: ignore[arg-type]
        return None
    scores = call.lookup(x.node.args[0])  # type: ignore[arg-type]
    if not isinstance(scores, Signal):
        return None
    return Step(
        ((scores, inflate(math.sqrt(0.125))),), "softmax component", norm=x.norm, peak=1.0, low=0.0, map=Product()
    )


@rule(*(f"aten.{name}" for name in PIECES), "aten.unbind.int")
def pieces(call: Call) -> Step:
    """All pieces together hold every entry once; `getitem` takes one."""
    x = call.x
    removed = call["dim"] % len(x.shape) if call.node.target is _aten.unbind.int else None
    row = math.inf if removed == len(x.shape) - 1 else x.row
    return carried(x, 1.0, "split", Pieces(), row)


@rule("getitem")
def getitem(call: Call) -> Step:
    """One piece of a split, or the values (never the indices) of a maximum or sort."""
    x, index = call.x, call.node.args[1]
    assert isinstance(index, int)
    value = call.node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        call.refuse("the position of a maximum jumps with the input", "use the values only")
    split = x.pieces
    if not split and index != 0:
        call.refuse("only the first result of this operation has a rule", "use the result itself, not its statistics")
    found: Map = Piece(index) if split else Copy(same=True, traced=True)
    return Step(((x, 1.0),), "piece", offset=math.inf, peak=x.peak, row=x.row, norm=x.norm, low=x.low, map=found)


@rule("aten.tril.default", "aten.triu.default")
def triangle(call: Call) -> Step:
    """Entries set to zero: a contraction."""
    x = call.x
    return Step(((x, 1.0),), "selection", offset=0.0, peak=x.peak, row=x.row, map=Copy())


@rule(
    "aten.expand.default",
    "aten.expand_as.default",
    "aten.broadcast_to.default",
    "aten.repeat.default",
    "aten.tile.default",
    "aten.repeat_interleave.self_int",
)
def repetition(call: Call) -> Step:
    """Every entry n times: √n."""
    x = call.x
    row = x.row if x.shape and call.shape[-1] == x.shape[-1] else math.inf
    return carried(x, copies(x, call.shape), "repeat", Copy(), row)


@rule("aten.index.Tensor")
def index(call: Call) -> Step:
    """Entries at constant positions: √ of how often the most frequent one is read."""
    return _indexed(call, call["indices"])


@rule("aten.index_select.default")
def index_select(call: Call) -> Step:
    """Entries at constant positions along one dimension."""
    x = call.x
    return _indexed(call, [None] * (call["dim"] % len(x.shape)) + [call.constant("index")])


def _indexed(call: Call, indices: list[Any]) -> Step:
    x = call.x
    if any(isinstance(i, Signal) for i in indices or []):
        call.refuse("positions that depend on the input jump with it", "index with constants")
    flat = torch.arange(x.numel).reshape(x.shape)
    return entries(x, flat[tuple(slice(None) if i is None else i for i in indices)])


def entries(x: Signal, places: Tensor) -> Step:
    """Entries of x at these places of its flat order: √ of how often the most frequent one is read."""
    most = int(torch.bincount(places.flatten(), minlength=1).max()) if places.numel() else 0
    return carried(x, root(most), "index", Copy())


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
    return unchanged(call.x)


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
    x = call.x
    value = call.node.meta.get("val")
    kept = (torch.float32, torch.float64)
    if not isinstance(value, Tensor) or value.dtype not in kept or x.dtype not in kept:
        call.refuse("a cast to a narrow or integer type rounds, which is discontinuous", "keep float32 or float64")
    return unchanged(x)


@rule("aten.constant_pad_nd.default", "aten.pad.default")
def pad(call: Call) -> Step:
    """Padding: √ of how often the most copied entry appears, per axis; zeros 1, reflect and circular ≤ √2, replicate √(p + 1)."""
    x, mode, value = call.x, call.get("mode", "constant"), float(call["value"] or 0.0)
    twice = list(call["pad"])
    amounts = [(twice[2 * i], twice[2 * i + 1]) for i in range(len(twice) // 2)][::-1]
    sizes = x.shape[len(x.shape) - len(amounts) :]
    fixed = mode == "constant"
    gain = 1.0
    if not fixed:
        if any(p < 0 for pair in amounts for p in pair):
            call.refuse("negative amounts in this padding mode", "slice first")
        top = math.prod(_most_copied(n, pair, mode) for n, pair in zip(sizes, amounts, strict=True))
        gain = root(top)
    negative = any(p < 0 for pair in amounts for p in pair)
    added = math.prod(call.shape) - (0 if negative else x.numel)
    form = None if negative or value else Padding(tuple(amounts), tuple(sizes), "zeros" if fixed else mode)
    spatial = len(amounts) == len(x.shape) - 2

    def run(t: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(t, twice, mode=mode, value=fill if fixed else None)

    return Step(
        ((x, gain),), f"{mode} padding", offset=inflate(abs(value) * math.sqrt(added)), peak=max(x.peak, abs(value)),
        low=min(value, x.low) if fixed else x.low, map=Padded(value if fixed else 0.0, run, form if spatial else None),
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
    gains, fixed, peak = repeated(call, (v for k, v in call.arguments.items() if k not in ("condition", "mask")))
    offset = inflate(fixed * math.sqrt(math.prod(call.shape)))
    return Step(gains, "mask", "root", offset=offset, peak=peak)
