"""Reductions, pooling, resampling, order statistics and concatenations: exact norms, or contractions."""

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from equipoise.core import Bracket, Shape, inflate, proving, root
from equipoise.lipschitz.operations import Average, Join, Largest, Map, Opaque, Sorted
from equipoise.lipschitz.rules.registry import (
    Call,
    Signal,
    Step,
    choice_step,
    lower,
    per_axis,
    range_step,
    rule,
)
from equipoise.lipschitz.rules.shapes import named
from equipoise.lipschitz.values import aten_name
from equipoise.norms import spectral_norm

# --- sums, means and norms --------------------------------------------------------------------------------------------------


@rule("aten.mean.dim", "aten.mean.default")
def mean(call: Call) -> Step:
    """Mean over n entries: 1/√n. Exact."""
    x = call.x
    n = x.numel // max(1, prod(call.shape))
    gain = inflate(1 / sqrt(n)) if n > 1 else 1.0
    return Step(((x, gain),), "mean", offset=0.0, peak=x.peak, low=lower(x.low), map=Average())


@rule("aten.sum.dim_IntList", "aten.sum.default")
def total(call: Call) -> Step:
    """Sum over n entries: √n. Exact."""
    x = call.x
    n = x.numel // max(1, prod(call.shape))
    peak, low = inflate(n * x.peak), lower(n * x.low)
    return Step(((x, root(n)),), "sum over entries", offset=0.0, peak=peak, low=low, map=Average())


@rule("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim", "aten.norm.Scalar")
def vector_norm(call: Call) -> Step:
    """The ℓ2 norm is 1-Lipschitz, so is every ℓp with p ≥ 2."""
    order = call.get("ord", call.get("p"))
    if order is not None and order < 2:
        call.refuse(
            f"the ℓ{order:g} norm has no rule", "use the ℓ2 norm, or sums of absolute values"
        )
    return Step(((call.x, 1.0),), "vector norm", offset=0.0, low=0.0)


# --- pooling and resampling -------------------------------------------------------------------------------------------------


def _max_pool(call: Call, *, d: int) -> Step:
    """√ of the number of windows that hold one pixel, attained by a single spike: per axis ⌈k·gcd(s, dil)/s⌉ at most."""
    kernel = per_axis(call["kernel_size"], d)
    stride = per_axis(call["stride"], d, kernel)
    axes = zip(
        call.shape[-d:], kernel, stride, per_axis(call["padding"], d), per_axis(call["dilation"], d), strict=True
    )  # fmt: skip
    return _pooled(
        call,
        [
            [range(i * s - p, i * s - p + k * dilation, dilation) for i in range(out)]
            for out, k, s, p, dilation in axes
        ],
    )


def _adaptive_max_pool(call: Call, *, d: int) -> Step:
    """Windows `[⌊i·n/o⌋, ⌈(i + 1)·n/o⌉)`: √ of how many hold the most covered pixel, per axis."""
    axes = zip(call.x.shape[-d:], call.shape[-d:], strict=True)
    return _pooled(
        call, [[range(i * n // o, -(-(i + 1) * n // o)) for i in range(o)] for n, o in axes]
    )


def _pooled(call: Call, axes: list[list[range]]) -> Step:
    """Maxima over windows, given per axis as the pixels of each."""
    d, most = len(axes), 1
    for n, windows in zip(call.x.shape[-d:], axes, strict=True):
        inside = [[i for i in window if 0 <= i < n] for window in windows]
        if not all(inside):
            call.refuse(
                "a window holds nothing but padding, so its maximum is −∞",
                "pad less, or dilate less",
            )
        most *= max(Counter(itertools.chain.from_iterable(inside)).values())
    return range_step(call.x, root(most), "max pooling", Largest(most, sliding=True, dims=d))


def _linear_step(
    call: Call, x: Signal, matrices: list[Tensor], label: str, map: Map, factor: float = 1.0
) -> Step:
    """A Kronecker product of 1-D matrices, `factor` times: the product of their norms."""
    below, above = abs(factor), inflate(abs(factor))
    peak = above
    with proving():
        for matrix in matrices:
            bracket = spectral_norm(matrix.double(), rtol=1e-6)
            below *= float(bracket.lower) * (1 - 2.0**-49)
            above = inflate(above * float(bracket.upper))
            rounding = 1 + 100 * torch.finfo(matrix.dtype).eps
            peak = inflate(peak * float(matrix.double().abs().sum(1).max()) * rounding)
    low = 0.0 if isinstance(map, Average) and x.low >= 0 else -inf
    bracket = Bracket(below, above, method="1-D matrices")
    return Step(
        ((x, above),),
        label,
        bracket=bracket,
        offset=0.0,
        peak=inflate(peak * x.peak),
        low=low,
        map=map,
    )


def _avg_pool(call: Call, *, d: int) -> Step:
    """Average pooling, exactly: overlap, `ceil_mode` and `count_include_pad` change its norm."""
    kernel = per_axis(call["kernel_size"], d)
    stride = per_axis(call["stride"], d, kernel)
    if call.get("divisor_override") is not None:
        call.refuse("an average with another divisor", "divide by a constant after a plain average")
    matrices = []
    for size, *axis in zip(
        call.x.shape[-d:], kernel, stride, per_axis(call["padding"], d), strict=True
    ):
        eye = torch.eye(size, dtype=torch.float64)[:, None]
        settings: Any = (*axis, bool(call["ceil_mode"]), bool(call["count_include_pad"]))
        matrices.append(torch.nn.functional.avg_pool1d(eye, *settings)[:, 0].mT)
    return _linear_step(call, call.x, matrices, "average pooling", Average())


def _resampling(call: Call, *, d: int, label: str, map: Map) -> Step:
    """Interpolation and adaptive average pooling: the operation itself gives the 1-D matrix of every axis.

    Their weights sum to 1 along every axis, so an input that is constant along the other axes shows one axis alone. Weights
    that are short binary fractions, the same in float64, are free of rounding: enlarging by powers of two, nearest neighbours.
    """
    x = call.source
    sizes = x.shape[-d:]
    matrices, exact = [], True
    for axis, n in enumerate(sizes):
        if n * prod(sizes) > 60_000_000:
            call.refuse(
                "the input is too large to read off the resampling matrix",
                "bound it on a smaller input",
            )
        answer = _along(call, sizes, axis, x.dtype)
        if (answer.amax(-1) - answer.amin(-1) > 1e-5).any():
            call.refuse("this resampling is not separable")
        matrices.append(answer[..., 0].mT)
        exact = exact and _is_dyadic(answer)
        exact = exact and torch.equal(answer.double(), _along(call, sizes, axis, torch.float64))
    if exact:
        map = Average()
    rounding = 10 * torch.finfo(x.dtype).eps  # weights are read off in the model's precision
    return _linear_step(call, x, matrices, label, map, 1 + rounding)


def _along(call: Call, sizes: Shape, axis: int, dtype: torch.dtype) -> Tensor:
    """The operation on every unit vector of one axis, constant along the others: (in, out, the others)."""
    n = sizes[axis]
    shape = [n, 1, *[1] * len(sizes)]
    shape[2 + axis] = n
    probe = torch.eye(n, dtype=dtype).reshape(shape).expand(n, 1, *sizes).contiguous()
    operation: Callable[..., Tensor] = call.node.target  # type: ignore[assignment]
    with torch.no_grad():
        answer = operation(probe, *call.node.args[1:], **call.node.kwargs)
    return answer.movedim(2 + axis, 1).flatten(2)


def _is_dyadic(weights: Tensor) -> bool:
    """Whether all weights are multiples of 2⁻¹² in [0, 1]."""
    scaled = weights * 4096
    return bool(((scaled == scaled.round()) & (weights >= 0) & (weights <= 1)).all())


_UPSAMPLERS = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
)  # fmt: skip
for _d in (1, 2, 3):
    rule(f"aten.max_pool{_d}d.default", f"aten.max_pool{_d}d_with_indices.default")(
        functools.partial(_max_pool, d=_d)
    )
    rule(f"aten.adaptive_max_pool{_d}d.default")(functools.partial(_adaptive_max_pool, d=_d))
    rule(f"aten.avg_pool{_d}d.default")(functools.partial(_avg_pool, d=_d))
    rule(f"aten.adaptive_avg_pool{_d}d.default")(
        functools.partial(_resampling, d=_d, label="average pooling", map=Average())
    )
    for _name in _UPSAMPLERS:
        if f"{_d}d" in _name:
            rule(f"aten.{_name}.vec", f"aten.{_name}.default")(
                functools.partial(_resampling, d=_d, label="resampling", map=Opaque())
            )


# --- order statistics, maxima and concatenations ----------------------------------------------------------------------------


@rule("aten.sort.default", "aten.sort.stable")
def sort(call: Call) -> Step:
    """Sorting along a dimension (GroupSort) is a contraction: the values only."""
    x = call.x
    by_rows = call.get("dim", -1) in (-1, len(x.shape) - 1)
    return range_step(x, 1.0, "sort", Sorted(), x.row if by_rows else inf)


@rule(*named(f"{name}.{kind}" for name in ("max", "min") for kind in ("dim", "default")))
@rule("aten.amax.default", "aten.amin.default")
def extreme(call: Call) -> Step:
    """The largest or smallest of disjoint sets of entries: 1, the values only."""
    return range_step(call.x, 1.0, "order statistic", Largest())


@rule("aten.maximum.default", "aten.minimum.default", "aten.max.other", "aten.min.other")
def two_to_one(call: Call) -> Step:
    """The larger or smaller of two entries: root of the sum of squares."""
    return choice_step(call, (call["self"], call["other"]), "maximum", Largest())


@rule("aten.cat.default", "aten.concat.default", "aten.stack.default")
def concatenation(call: Call) -> Step:
    """Root of the sum of squares; a maximum next to the minimum of the same entries only reorders them (MaxMin)."""
    join = torch.stack if aten_name(call.node) == "stack.default" else torch.cat
    tensors = call["tensors"]
    signals = [t for t in tensors if isinstance(t, Signal)]
    fixed = tuple(t.detach().double() if isinstance(t, Tensor) else None for t in tensors)
    map = Join(fixed, functools.partial(join, dim=call["dim"]))
    step = choice_step(call, tensors, "concatenation", map, spread=False)
    sources = _without_max_min(call, signals)
    if sources == signals:
        return step
    return replace(step, gains=tuple((s, 1.0) for s in sources), map=Sorted())


#: maxima, and minima, of two tensors and of a set of entries
_LARGER = ("maximum.default", "max.other", "amax.default", "max.dim")
_SMALLER = ("minimum.default", "min.other", "amin.default", "min.dim")


def _without_max_min(call: Call, parts: list[Signal]) -> list[Signal]:
    """The parts, with the maximum and the minimum of the same entries replaced by what they are taken of.

    Of two or more entries, maximum and minimum are two different ones of them, so together they hold each at most once.
    """
    compared = [_compared(call, part) for part in parts]
    keys = [key for key, _ in compared]
    left = dict(enumerate(parts))
    paired: list[Signal] = []
    for i, ((kind, *of), operands) in enumerate(compared):
        if kind == "larger" and ("smaller", *of) in keys:
            place = keys.index(("smaller", *of))
            keys[place] = ("paired",)  # each minimum goes with one maximum
            del left[i], left[place]
            paired += operands
    return paired + list(left.values())


def _compared(call: Call, part: Signal) -> tuple[tuple[Any, ...], list[Signal]]:
    """Whether a part is the larger or the smaller of some entries, and of which, as a key and as signals."""
    node: Any = part.node
    if node.target is operator.getitem:
        node = node.args[0]
    name = aten_name(node)
    operands = [call.lookup(n) for n in node.all_input_nodes if name in _LARGER + _SMALLER]
    match operands:
        case [Signal(shape=a), Signal(shape=b)] if a == b == part.shape:  # maximum(a, b)
            of = frozenset(_identity(node.args))
        case [Signal(numel=n)] if part.numel < n and len(node.args) > 1:
            of = _identity(node.args)
        case _:
            return ("other",), []
    return ("larger" if name in _LARGER else "smaller", of), operands


def _identity(argument: Any, depth: int = 4) -> Any:
    """What a tensor is computed from, so that `x[:, :2]` taken twice is one thing: every operation here is a function."""
    if isinstance(argument, list | tuple):
        return tuple(_identity(a, depth) for a in argument)
    if not aten_name(argument) or argument.kwargs or not depth:
        return argument
    return argument.target, _identity(argument.args, depth - 1)
