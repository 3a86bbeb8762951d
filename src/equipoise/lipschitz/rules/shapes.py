"""Operations that move entries: views and permutations are isometries, selections contract, copies stretch, writes merge."""

from collections.abc import Iterable
from math import copysign, inf, isfinite, isinf, nan, prod, sqrt
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core import float64, inflate, root
from equipoise.lipschitz.operations import Choice, Copy, Padded, Product
from equipoise.lipschitz.rules.registry import (
    Call,
    Signal,
    Step,
    choice_step,
    copies,
    range_step,
    rule,
    unchanged,
)
from equipoise.lipschitz.values import aten_name, exactly
from equipoise.maps.linear import Padding

#: the same entries in the same order, in another shape
RESHAPES = (
    "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int", "squeeze.default",
    "squeeze.dim", "squeeze.dims", "unsqueeze.default",
)  # fmt: skip
#: the same entries in another shape or order
VIEWS = (
    *RESHAPES, "transpose.int", "permute.default", "t.default", "flip.default", "roll.default", "pixel_shuffle.default",
    "pixel_unshuffle.default", "channel_shuffle.default",
)  # fmt: skip
#: some entries, each once
SELECTIONS = ("slice.Tensor", "select.int", "diagonal.default")
#: entries read any number of times from constant places, zeros among them
INDEXED = (
    "expand.default", "repeat.default", "index.Tensor", "index_select.default", "gather.default", "unfold.default",
    "im2col.default", "tril.default", "triu.default", "diag_embed.default",
)  # fmt: skip

#: copies, which hold the same entries
COPIES = (
    "contiguous.default", "clone.default", "alias.default", "detach.default", "lift_fresh_copy.default",
)  # fmt: skip
#: the identity on what has a bound: casts to narrow types are refused for their result
IDENTITIES = (
    *COPIES,
    "dropout.default", "alpha_dropout.default", "feature_dropout.default", "feature_alpha_dropout.default",
    "nan_to_num.default", "to.dtype", "_to_copy.default", "to.dtype_layout", "to.device", "type_as.default", "to.other",
)  # fmt: skip
SOFTMAX = ("softmax.int", "_softmax.default", "_safe_softmax.default")


def named(operations: Iterable[str]) -> list[str]:
    """Operations of aten as `rule` takes them."""
    return [f"aten.{name}" for name in operations]


def require_constant_places(call: Call) -> None:
    """Refuse positions that depend on the input."""
    indices = [call.get("index"), *(call.get("indices") or ())]
    if any(isinstance(index, Signal) for index in indices):
        call.refuse("positions that depend on the input jump with it", "index with constants")


def places_of(call: Call, x: Signal) -> Tensor:
    """For every entry of the result its position in x, counted from 1; 0 where it is a constant zero.

    Args:
        call: an operation that moves entries.
        x: its argument.
    """
    numbers = torch.arange(1.0, x.numel + 1, dtype=torch.float64).reshape(x.shape)
    moved = exactly(call.node, {x.node: numbers}, call.lookup)
    return moved.long()


def _row(x: Signal, places: Tensor) -> float:
    """The row bound of x where every row of the result holds entries of one row of x, each at most once."""
    if not x.shape or places.dim() == 0 or places.numel() == 0:
        return inf
    rows = places.reshape(-1, places.shape[-1])
    sources = (rows - 1) // x.shape[-1]
    one_row = (sources == sources.amax(1, keepdim=True)) | (rows == 0)
    ordered = rows.sort(1)[0]
    repeats = (ordered.diff(dim=1) == 0) & (ordered[:, 1:] > 0)
    return x.row if one_row.all() and not repeats.any() else inf


@rule(*named(VIEWS))
def view(call: Call) -> Step:
    """The same entries in another order: an isometry."""
    return _selected(call, "view")


@rule(*named(SELECTIONS))
def selection(call: Call) -> Step:
    """Some entries: a contraction. One component of a softmax: 1/(2√2), p_i(1 − p_i)·√2 at most."""
    return _component(call) or _selected(call, "selection")


def _selected(call: Call, label: str) -> Step:
    x = call.x
    row = _row(x, places_of(call, x)) if isfinite(x.row) else inf
    return range_step(x, 1.0, label, Copy(traced=True), row)


def _component(call: Call) -> Step | None:
    """The step of a selection of one component of a softmax, `p[..., i]` or a slice of length 1."""
    x, dim = call.x, call.get("dim")
    if aten_name(x.node) not in SOFTMAX or dim is None:
        return None
    scores = call.lookup(x.node.args[0])  # type: ignore[arg-type]
    along: int = x.node.args[1]  # type: ignore[assignment]
    same = dim % len(x.shape) == along % len(x.shape)
    one = prod(call.shape) * x.shape[dim] == x.numel
    if not (same and one and isinstance(scores, Signal)):
        return None
    gains = ((scores, inflate(sqrt(0.125))),)
    return Step(gains, "softmax component", norm=x.norm, peak=1.0, low=0.0, map=Product())


@rule(*named(INDEXED))
def indexed(call: Call) -> Step:
    """Entries at constant positions: √ of how often the most frequent one is read."""
    require_constant_places(call)
    x = call.x
    places = places_of(call, x)
    gain = root(most_frequent(places))
    low = min(0.0, x.low) if (places == 0).any() else x.low
    return Step(
        ((x, gain),), "index", offset=0.0, peak=x.peak, row=_row(x, places), low=low, map=Copy()
    )


def most_frequent(places: Tensor) -> int:
    """How often the most frequent of these positive integers occurs; zeros do not count."""
    return int(torch.bincount(places.flatten(), minlength=2)[1:].max())


@rule("getitem")
def getitem(call: Call) -> Step:
    """The values (never the indices) of a maximum or sort."""
    if not call.node.meta["val"].is_floating_point():
        call.refuse("the position of a maximum jumps with the input", "use the values only")
    if call.node.args[1] != 0:
        call.refuse(
            "only the first result of this operation has a rule",
            "use the result itself, not its statistics",
        )
    return unchanged(call.x)


@rule(*named(IDENTITIES))
def identity(call: Call) -> Step:
    """The identity in evaluation, on finite numbers, between float32 and float64."""
    if call.get("train"):
        call.refuse("dropout is active, so the map is random", "call model.eval() first")
    return unchanged(call.x)


@rule("aten.constant_pad_nd.default", "aten.pad.default")
def pad(call: Call) -> Step:
    """Padding: √ of how often the most copied entry appears; zeros 1, reflect and circular ≤ √2 per axis, replicate √(p + 1)."""
    x, mode = call.x, call.get("mode", "constant")
    if isinstance(call["value"], complex):
        call.refuse("padding by a complex number")
    value = float(call["value"] or 0.0)
    twice = list(call["pad"])
    fixed = mode == "constant"

    def run(t: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(t, twice, mode=mode, value=fill if fixed else None)

    gain = 1.0 if fixed else root(most_frequent(places_of(call, x)))
    negative = min(twice) < 0
    added = prod(call.shape) - (0 if negative else x.numel)
    amounts = tuple(zip(twice[::2], twice[1::2], strict=True))[::-1]
    form = None
    if not negative and not value and len(amounts) == len(x.shape) - 2:
        form = Padding(amounts, x.shape[2:], "zeros" if fixed else mode)
    offset = inflate(abs(value) * sqrt(added))
    low = min(value, x.low) if fixed else x.low
    map = Padded(value if fixed else 0.0, run, form)
    return Step(
        ((x, gain),),
        f"{mode} padding",
        offset=offset,
        peak=max(x.peak, abs(value)),
        low=low,
        map=map,
    )


@rule("aten.where.self", "aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def mask(call: Call) -> Step:
    """A constant mask chooses entries: root of the sum of squares over the branches."""
    values = dict(call.arguments)
    if isinstance(values.pop("condition" if "condition" in values else "mask"), Signal):
        call.refuse(
            "the mask depends on the input, so the choice jumps", "use relu, clamp or maximum"
        )
    return choice_step(call, values.values(), "mask", Choice())


@rule("aten.copy.default")
def overwrite(call: Call) -> Step:
    """One tensor in the place of another, with broadcasting."""
    x = call.signal("src")
    return range_step(x, copies(x, call.shape), "copy")


@rule("aten.slice_scatter.default", "aten.select_scatter.default")
def overwrite_part(call: Call) -> Step:
    """Some entries of one tensor, the others of another: root of the sum of squares."""
    return choice_step(call, (call["self"], call["src"]), "overwritten", spread=False)


# --- a NaN or infinite constant has no bound, masks of −∞ before a softmax apart ----------------------------------------------

#: a constant −∞ may enter here …
_MASKING = (
    "add.Tensor", "add.Scalar", "where.self", "masked_fill.Scalar", "masked_fill.Tensor",
)  # fmt: skip
#: … be carried on by these, and must end in a softmax, where it is a weight of 0
_CARRYING = (*_MASKING, *VIEWS, *COPIES, "expand.default")
#: limits that may be open on this side, and orders of norms
_OPEN = {"min": -1, "min_val": -1, "max": 1, "max_val": 1, "ord": 1, "p": 1}


def refuse_nonfinite(call: Call) -> None:
    """Refuse NaN and infinite constants among the arguments, naming the one."""
    for name, value in call.arguments.items():
        for one in value if isinstance(value, list | tuple) else (value,):
            wrong = _nonfinite(one)
            if wrong is None or (isinf(wrong) and _OPEN.get(name) == copysign(1, wrong)):
                continue
            masks = wrong == -inf and aten_name(call.node) in _MASKING
            if not masks or not _absorbed(call.node):
                call.refuse(
                    f"its constant argument {name!r} holds a non-finite number ({wrong})",
                    "check the weights and the checkpoint",
                )


def _nonfinite(value: Any) -> float | None:
    """NaN or +∞ if there is one among the numbers, else −∞ if there is one, else None."""
    if isinstance(value, float):
        value = float64(value)
    if not isinstance(value, Tensor) or torch.isfinite(value).all():
        return None
    rest = value[~torch.isfinite(value)]
    return nan if rest.is_complex() else float(rest.max())


def _absorbed(node: fx.Node) -> bool:
    """Whether everything that reads this node turns −∞ into a weight of 0."""
    return bool(node.users) and all(
        aten_name(user) in (*SOFTMAX, "logsumexp.default")
        or (aten_name(user) in _CARRYING and _absorbed(user))
        for user in node.users
    )
