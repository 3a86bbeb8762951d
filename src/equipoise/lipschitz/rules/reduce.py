"""Reductions, pooling and resampling: exact norms of the 1-D matrices they are made of."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.core.bounds import Bracket
from equipoise.core.precision import full_precision, inflate
from equipoise.lipschitz.operations import Average, Largest, Map, Own
from equipoise.lipschitz.rules.registry import BALL, Call, Signal, Step, carried, lower, per_axis, root, rule
from equipoise.norms import spectral_norm


def _count(call: Call, x: Signal) -> int:
    """Number of entries that one output entry reads."""
    dim = call.get("dim")
    if dim is None or dim == []:
        return x.numel
    dims = {d % len(x.shape) for d in (dim if isinstance(dim, list | tuple) else [dim])}
    return math.prod(x.shape[d] for d in dims)


@rule("aten.mean.dim", "aten.mean.default")
def mean(call: Call) -> Step:
    """Mean over n entries: 1/√n. Exact."""
    x = call.x
    n = _count(call, x)
    return Step(
        ((x, inflate(1 / math.sqrt(n)) if n > 1 else 1.0),),
        "mean",
        offset=0.0,
        peak=x.peak,
        low=lower(x.low),
        map=Average(),
    )


@rule("aten.sum.dim_IntList", "aten.sum.default")
def total(call: Call) -> Step:
    """Sum over n entries: √n. Exact."""
    x = call.x
    n = _count(call, x)
    return Step(
        ((x, root(n)),), "sum over entries", offset=0.0, peak=inflate(n * x.peak), low=lower(n * x.low), map=Average()
    )


@rule("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim", "aten.norm.Scalar")
def vector_norm(call: Call) -> Step:
    """The ℓ2 norm is 1-Lipschitz, so is every ℓp with p ≥ 2; ℓ1 over n entries √n."""
    x = call.x
    order = call.get("ord", call.get("p", 2))
    order = 2.0 if order is None else float(order)
    if order < 1:
        call.refuse(f"the ℓ{order:g} «norm» is not Lipschitz")
    n = _count(call, x)
    gain = 1.0 if order >= 2 else inflate(float(n) ** (1 / order - 0.5))
    return Step(((x, gain),), "vector norm", offset=0.0, low=0.0)


@rule("aten.std.correction", "aten.std.dim", "aten.std.default", "aten.var.correction")
def deviation(call: Call) -> Step:
    """`‖x − mean‖/√(n − c)`: 1/√(n − c); its square on a bounded domain: 2·‖x − mean‖/(n − c)."""
    x = call.x
    n = _count(call, x)
    correction = call.get("correction")
    left = n - (float(call.get("unbiased", True)) if correction is None else float(correction))
    if left <= 0:
        call.refuse("the deviation of a single entry is not defined")
    if call.node.target is not torch.ops.aten.var.correction:
        return Step(((x, inflate(1 / math.sqrt(left))),), "standard deviation", offset=0.0, low=0.0)
    size = min(x.norm, inflate(root(n) * x.peak))
    if not math.isfinite(size):
        call.refuse("a variance is not Lipschitz on the whole space", BALL)
    return Step(((x, inflate(2 * size / left)),), "variance", offset=0.0, peak=inflate(size * size / left), low=0.0)


def _max_pool(call: Call, *, d: int) -> Step:
    """`√Π_axes ⌈k·gcd(s, dil)/s⌉`: the number of windows that hold one pixel; attained by a single spike."""
    k = per_axis(call["kernel_size"], d)
    s = per_axis(call["stride"], d, k)
    dil = per_axis(call["dilation"], d)
    out, sizes = call.shape[-d:], call.x.shape[-d:]
    for axis in zip(sizes, out, k, s, per_axis(call["padding"], d), dil, strict=True):
        if _has_empty_window(*axis):
            call.refuse("a window holds nothing but padding, so its maximum is −∞", "pad less, or dilate less")
    windows = math.prod(min(o, -(-a * math.gcd(b, c) // b)) for a, b, c, o in zip(k, s, dil, out, strict=True))
    return _pooled(call, windows, d)


def _has_empty_window(n: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether a window along one axis reads no pixel."""
    starts = (j * stride - padding for j in range(out))
    return any(not any(0 <= start + i * dilation < n for i in range(kernel)) for start in starts)


def _adaptive_max_pool(call: Call, *, d: int) -> Step:
    """Windows `[⌊i·n/o⌋, ⌈(i + 1)·n/o⌉)`: √ of how many hold the most covered pixel, per axis."""
    windows = 1
    for n, o in zip(call.x.shape[-d:], call.shape[-d:], strict=True):
        cover = [0] * n
        for i in range(o):
            for j in range(i * n // o, -(-(i + 1) * n // o)):
                cover[j] += 1
        windows *= max(cover, default=0)
    return _pooled(call, windows, d)


def _pooled(call: Call, windows: int, d: int) -> Step:
    return carried(call.x, root(windows), "max pooling", Largest(windows, sliding=True, dims=d))


def separable(matrices: list[Tensor], factor: float = 1.0) -> Bracket:
    """Norm of a Kronecker product of 1-D matrices: the product of their norms."""
    lower, upper = abs(factor), inflate(abs(factor))
    with torch.no_grad(), full_precision():
        for matrix in matrices:
            found = spectral_norm(matrix.double(), rtol=1e-6)
            lower, upper = lower * float(found.lower) * (1 - 2.0**-49), inflate(upper * float(found.upper))
    return Bracket(lower, upper, method="1-D matrices")


def _avg_pool(call: Call, *, d: int) -> Step:
    """Average pooling, exactly: overlap, `ceil_mode`, `count_include_pad` and `divisor_override` change its norm."""
    x = call.x
    k = per_axis(call["kernel_size"], d)
    s = per_axis(call["stride"], d, k)
    p = per_axis(call["padding"], d)
    divisor = call.get("divisor_override")
    matrices = []
    for size, *axis in zip(x.shape[-d:], k, s, p, strict=True):
        eye = torch.eye(size, dtype=torch.float64)[:, None]
        settings: Any = (*axis, bool(call["ceil_mode"]), bool(call["count_include_pad"]))
        one = torch.nn.functional.avg_pool1d(eye, *settings)
        matrices.append((one if divisor is None else (one > 0).double())[:, 0].mT)
    found = separable(matrices, 1.0 if divisor is None else 1.0 / divisor)
    row_sum = math.prod(float(m.sum(1).max()) for m in matrices) / (divisor or 1)
    return Step(
        ((x, float(found.upper)),), "average pooling", bracket=found, offset=0.0, peak=inflate(abs(row_sum) * x.peak),
        low=0.0 if x.low >= 0 and (divisor or 1) > 0 else -math.inf, map=Average() if divisor is None or divisor > 0 else Own(),
    )  # fmt: skip


_UPSAMPLERS = (
    *(f"upsample_{m}{d}d" for m, d in (("nearest", 1), ("nearest", 2), ("nearest", 3), ("linear", 1), ("bilinear", 2),
                                       ("trilinear", 3), ("bicubic", 2))),
    *(f"_upsample_nearest_exact{d}d" for d in (1, 2, 3)), "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip


def _resampling(call: Call, *, d: int, label: str, known: Map) -> Step:
    """Interpolation and adaptive average pooling: the operation itself gives the 1-D matrix of every axis.

    Their weights sum to 1 along every axis, so an input that is constant along the other axes shows one axis alone.
    """
    x = next(v for v in call.arguments.values() if isinstance(v, Signal))
    sizes = x.shape[-d:]
    rest = call.node.args[1:]
    apply: Callable[[Tensor], Tensor] = lambda t: call.node.target(t, *rest, **call.node.kwargs)  # type: ignore[operator] # noqa: E731
    matrices = []
    for axis in range(d):
        n = sizes[axis]
        if n * math.prod(sizes) > 60_000_000:
            call.refuse("the input is too large to read off the resampling matrix", "bound it on a smaller input")
        shape = [n, 1, *[1] * d]
        shape[2 + axis] = n
        probe = torch.eye(n, dtype=x.dtype).reshape(shape).expand(n, 1, *sizes)
        with torch.no_grad():
            seen = apply(probe.contiguous()).movedim(2 + axis, 1).flatten(2)
        if bool((seen.amax(-1) - seen.amin(-1) > 1e-5).any()):
            call.refuse("this resampling is not separable")
        matrices.append(seen[..., 0].mT)
    found = separable(matrices, 1 + 1e-6)  # weights read off in the model's precision
    peak = math.prod(float(m.double().abs().sum(1).max()) for m in matrices)
    return Step(
        ((x, float(found.upper)),), label, bracket=found, offset=0.0, peak=inflate(peak * x.peak * (1 + 1e-5)),
        map=known,
    )  # fmt: skip


for _d in (1, 2, 3):
    rule(f"aten.max_pool{_d}d.default", f"aten.max_pool{_d}d_with_indices.default")(functools.partial(_max_pool, d=_d))
    rule(f"aten.adaptive_max_pool{_d}d.default")(functools.partial(_adaptive_max_pool, d=_d))
    rule(f"aten.avg_pool{_d}d.default")(functools.partial(_avg_pool, d=_d))
    rule(f"aten.adaptive_avg_pool{_d}d.default")(
        functools.partial(_resampling, d=_d, label="average pooling", known=Average())
    )
    for _up in _UPSAMPLERS:
        if f"{_d}d" in _up:
            rule(f"aten.{_up}.vec", f"aten.{_up}.default")(
                functools.partial(_resampling, d=_d, label="resampling", known=Own())
            )
