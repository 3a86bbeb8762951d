"""Order statistics, running sums and maxima, distances: operations that contract, or stretch by a known root."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.core.precision import up
from equipoise.lipschitz.operations import Average, Copy, Sorted
from equipoise.lipschitz.rules.registry import Call, Signal, Step, copies, norm_of, root, rule

_aten = torch.ops.aten


@rule("aten.sort.default", "aten.sort.stable", "aten.topk.default")
def sort(call: Call) -> Step:
    """Sorting along a dimension (GroupSort), or the k largest, is a contraction: the values only."""
    x = call.signal("self")
    if not call.get("sorted", True) and call["k"] > 1:
        call.refuse("the k largest in no fixed order jump where two of them change places", "ask for sorted=True")
    same = call.get("dim", -1) in (-1, len(x.shape) - 1)
    row = x.row if same else math.inf
    return Step(((x, 1.0),), "sort", offset=0.0, peak=x.peak, row=row, low=x.low, map=Sorted())


@rule("aten.kthvalue.default", "aten.median.dim", "aten.median.default", "aten.nanmedian.dim", "aten.nanmedian.default")
def rank(call: Call) -> Step:
    """One order statistic of every row: 1, the values only."""
    x = call.signal("self")
    return Step(((x, 1.0),), "order statistic", offset=0.0, peak=x.peak, low=x.low, map=Sorted())


@rule("aten.quantile.scalar", "aten.quantile.default")
def quantile(call: Call) -> Step:
    """Weighted means of neighbouring order statistics: √ of how many levels are asked for."""
    x, levels = call.signal("self"), call.constant("q")
    count = levels.numel() if isinstance(levels, Tensor) else 1
    return Step(((x, root(count)),), "quantile", offset=0.0, peak=x.peak, low=x.low)


@rule("aten.cumsum.default")
def running_sum(call: Call) -> Step:
    """Running sums over n entries: `1/(2·sin(π/(4n + 2)))`, the largest singular value of the triangle of ones."""
    x = call.signal("self")
    n = x.shape[call["dim"]] if x.shape else 1
    gain = 1.0 if n == 1 else up(0.5 / math.sin(math.pi / (4 * n + 2)))
    return Step(((x, gain),), "running sum", offset=0.0, peak=up(n * x.peak), map=Average())


@rule("aten.cummax.default", "aten.cummin.default", "aten.logcumsumexp.default")
def running_maximum(call: Call) -> Step:
    """Running maxima, or their smooth form: every output can follow the first of n entries, √n."""
    x = call.signal("self")
    n = x.shape[call["dim"]] if x.shape else 1
    smooth = call.node.target is _aten.logcumsumexp.default
    more = math.log(n + 1) if smooth else 0.0
    offset = up(more * math.sqrt(x.numel))
    return Step(((x, root(n)),), "running maximum", offset=offset, peak=up(x.peak + more), low=x.low)


@rule(
    "aten.logaddexp.default", "aten.logaddexp2.default", "aten.hypot.default", "aten.fmax.default", "aten.fmin.default"
)
def two_to_one(call: Call) -> Step:
    """Functions of two entries whose gradient has norm at most 1: root of the sum of squares."""
    values = [call["self"], call["other"]]
    signals = [v for v in values if isinstance(v, Signal)]
    fixed = max((float(v.abs().max()) for v in values if isinstance(v, Tensor)), default=0.0)
    most = up(max(fixed, *(s.peak for s in signals)))
    positive = call.node.target is _aten.hypot.default
    at_zero = up(fixed if positive else fixed + 1)
    return Step(
        tuple((s, copies(s, call.shape)) for s in signals), "function of two", "root",
        offset=up(at_zero * math.sqrt(math.prod(call.shape))), peak=up(1.5 * most + (0 if positive else 1)),
        low=0.0 if positive else -math.inf,
    )  # fmt: skip


@rule("aten._cdist_forward.default")
def distances(call: Call) -> Step:
    """All distances between the rows of two tensors: each is 1-Lipschitz in either of its rows."""
    order = float(call["p"])
    if order < 1:
        call.refuse(f"the ℓ{order:g} «distance» is not Lipschitz")
    gains = []
    for x in (v for v in (call["x1"], call["x2"]) if isinstance(v, Signal)):
        read = math.prod(call.shape) // max(1, x.numel // max(1, x.shape[-1]))
        inner = 1.0 if order >= 2 else up(float(x.shape[-1]) ** (1 / order - 0.5))
        gains.append((x, up(root(read) * inner)))
    fixed = [norm_of(v) for v in (call["x1"], call["x2"]) if isinstance(v, Tensor)]
    offset = up(
        max(fixed, default=0.0) * math.sqrt(math.prod(call.shape)) * (1 if order >= 2 else call["x1"].shape[-1])
    )
    return Step(tuple(gains), "distances", offset=offset, low=0.0)


@rule("aten.nan_to_num.default")
def numbers(call: Call) -> Step:
    """The identity on numbers."""
    x = call.signal("self")
    return Step(
        ((x, 1.0),), "identity", offset=0.0, row=x.row, peak=x.peak, low=x.low, map=Copy(same=True, traced=True)
    )
