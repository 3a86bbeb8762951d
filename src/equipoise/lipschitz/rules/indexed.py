"""Entries read from constant places and written to constant places: windows, gather, scatter, sampling grids."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.core.bounds import Bracket
from equipoise.core.precision import full_precision, inflate
from equipoise.lipschitz.operations import Average, Copy, Own
from equipoise.lipschitz.rules.registry import Call, Signal, Step, carried, copies, norm_of, root, rule
from equipoise.lipschitz.rules.shapes import entries
from equipoise.norms import spectral_norm

#: operations that are not of one sign are read off as a matrix up to this many entries
LARGEST_MATRIX = 4_000_000


def _fixed(call: Call, name: str) -> Tensor:
    """Places, which must be constant."""
    value = call.arguments[name]
    if isinstance(value, Signal):
        call.refuse("positions that depend on the input jump with it", "index with constants")
    found: Tensor = value
    return found


@rule("aten.gather.default")
def gather(call: Call) -> Step:
    """Entries at constant positions along a dimension."""
    x, flat = call.x, torch.arange(call.x.numel)
    return entries(x, flat.reshape(x.shape).gather(call["dim"], _fixed(call, "index")))


@rule("aten.unfold.default")
def windows(call: Call) -> Step:
    """Sliding windows along a dimension: √ of how many hold one entry."""
    x = call.x
    flat = torch.arange(x.numel).reshape(x.shape)
    return entries(x, flat.unfold(call["dimension"], call["size"], call["step"]))


@rule("aten.im2col.default")
def patches(call: Call) -> Step:
    """Patches of an image, with zeros around: √ of how many hold one pixel."""
    x = call.x
    count = _patches_holding(call, call.shape, x.shape[-2:])
    return Step(((x, root(count)),), "patches", offset=0.0, peak=x.peak, low=min(0.0, x.low), map=Copy())


@rule("aten.col2im.default")
def fold(call: Call) -> Step:
    """Patches added up, the adjoint of taking them: √ of how many hold one pixel."""
    x = call.x
    count = _patches_holding(call, x.shape, call["output_size"])
    return Step(((x, root(count)),), "fold", offset=0.0, peak=inflate(count * x.peak), map=Average())


def _patches_holding(call: Call, columns: tuple[int, ...], size: Any) -> int:
    """The largest number of patches that hold one pixel."""
    ones = torch.ones(1, math.prod(call["kernel_size"]), columns[-1], dtype=torch.float64)
    settings = (call["kernel_size"], call["dilation"], call["padding"], call["stride"])
    return round(float(torch.ops.aten.col2im(ones, list(size), *settings).max()))


def _merged(call: Call, base: Any, written: Any, gain: float, label: str, shared: bool) -> Step:
    """Entries of `base`, repeated by broadcasting, with those of `written` put among them, or (`shared`) added to them."""
    if isinstance(base, Tensor):
        base = torch.broadcast_to(base, call.shape)
    pairs = [(base, copies(base, call.shape) if isinstance(base, Signal) else 1.0), (written, gain)]
    signals = [(v, g) for v, g in pairs if isinstance(v, Signal)]
    fixed = [(v, g) for v, g in pairs if not isinstance(v, Signal)]
    offset, peak = 0.0, [s.peak for s, _ in signals]
    for value, g in fixed:
        size = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
        largest = float(size.abs().max()) if size.numel() else 0.0
        peak.append(largest)
        spread = norm_of(size) if isinstance(value, Tensor) else inflate(largest * math.sqrt(math.prod(call.shape)))
        offset = inflate(offset + g * spread)
    total = math.inf if shared else max(peak)
    return Step(tuple(signals), label, "sum" if shared else "root", offset=offset, peak=total)


def _twice(places: Tensor) -> bool:
    return places.unique().numel() != places.numel()


@rule("aten.scatter.src", "aten.scatter.value")
def scatter(call: Call) -> Step:
    """Entries written to constant positions along a dimension: root of the sum of squares."""
    index, dim = _fixed(call, "index"), call["dim"]
    places = torch.arange(math.prod(call.shape)).reshape(call.shape).gather(dim, index)
    written = call.get("src", call.get("value"))
    if "src" in call.arguments and _twice(places):
        call.refuse("two entries are written to one place, in no fixed order", "use scatter_add, or distinct positions")
    return _merged(call, call["self"], written, 1.0, "scatter", shared=False)


@rule("aten.scatter_add.default", "aten.scatter_reduce.two")
def scatter_add(call: Call) -> Step:
    """Entries added at constant positions: √ of how many meet in one place; maxima of them: root of the sum of squares."""
    index = _fixed(call, "index")
    places = torch.arange(math.prod(call.shape)).reshape(call.shape).gather(call["dim"], index).flatten()
    how = call.get("reduce", "sum")
    if how in ("amax", "amin"):
        if not call["include_self"]:
            call.refuse("a reduction without the entries that are there", "set include_self=True")
        return _merged(call, call["self"], call["src"], 1.0, "scatter", shared=False)
    if how != "sum" or not call.get("include_self", True):
        call.refuse(f"a scatter that takes the {how}", "use sum, amax or amin with include_self=True")
    most = int(torch.bincount(places, minlength=1).max()) if places.numel() else 0
    return _merged(call, call["self"], call["src"], root(most), "scatter", shared=True)


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(call: Call) -> Step:
    """Entries written to, or added at, constant places."""
    flat = torch.arange(math.prod(call.shape)).reshape(call.shape)
    indices = call["indices"]
    if any(isinstance(i, Signal) for i in indices):
        call.refuse("positions that depend on the input jump with it", "index with constants")
    places = flat[tuple(slice(None) if i is None else i for i in indices)]
    values = call["values"]
    spread = copies(values, tuple(places.shape)) if isinstance(values, Signal) else 1.0
    alike = isinstance(values, Tensor) and bool((values == values.flatten()[:1]).all())
    if not call["accumulate"] and _twice(places) and not alike:
        call.refuse("two entries are written to one place, in no fixed order", "use index_add, or distinct positions")
    if isinstance(values, Tensor):
        values = torch.broadcast_to(values, places.shape)
    most = int(torch.bincount(places.flatten(), minlength=1).max()) if call["accumulate"] and places.numel() else 1
    return _merged(call, call["self"], values, inflate(root(most) * spread), "scatter", shared=bool(call["accumulate"]))


@rule("aten.slice_scatter.default", "aten.select_scatter.default", "aten.masked_scatter.default")
def overwritten(call: Call) -> Step:
    """Some entries of one tensor, some of another, by constant choice: root of the sum of squares."""
    if isinstance(call.get("mask"), Signal):
        call.refuse("the mask depends on the input, so the choice jumps", "use relu, clamp or maximum")
    return _merged(call, call["self"], call.get("src", call.get("source")), 1.0, "overwritten", shared=False)


@rule("aten.copy.default")
def overwrite(call: Call) -> Step:
    """One tensor in the place of another, with broadcasting."""
    x = call.signal("src")
    return carried(x, copies(x, call.shape), "copy")


@rule("aten.diag_embed.default", "aten.trace.default")
def on_the_diagonal(call: Call) -> Step:
    """Entries put on a diagonal: 1; the sum of one: √n."""
    x = call.x
    if call.node.target is torch.ops.aten.trace.default:
        n = min(x.shape)
        return Step(((x, root(n)),), "trace", offset=0.0, peak=inflate(n * x.peak), map=Own())
    return Step(((x, 1.0),), "diagonal", offset=0.0, peak=x.peak, low=min(0.0, x.low))


@rule("aten.grid_sampler.default", "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def sampling(call: Call) -> Step:
    """Sampling at constant positions: the norm of the matrix of weights, which are not negative but for bicubic ones."""
    x, grid = call.x, _fixed(call, "grid")
    rest = (int(call["interpolation_mode"]), int(call["padding_mode"]), bool(call["align_corners"]))
    linear, sizes = rest[0], x.shape[2:]
    dtypes = (torch.float64, x.dtype) if linear == 1 else (torch.float64,)  # the nearest place depends on the precision
    upper = 0.0
    for dtype in dict.fromkeys(dtypes):
        points = grid.to(dtype)

        def run(t: Tensor, points: Tensor = points) -> Tensor:
            return torch.ops.aten.grid_sampler(t, points, *rest)

        one = (len(grid), 1, *sizes)
        upper = max(upper, _matrix_norm(call, run, one, dtype) if linear == 2 else _positive_norm(run, one, dtype))
    rounding = (
        1e-14 * max(sizes) * math.sqrt(math.prod(call.shape))
    )  # of the weights, which are differences of positions
    return Step(((x, inflate(upper * (1 + 1e-9) + rounding)),), "sampling", offset=0.0, map=Own())


def _positive_norm(run: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Norm of a linear map A with non-negative entries: `‖A‖² ≤ max (AᵀAv)_i/v_i` for every v > 0 (Collatz, Wielandt)."""
    v, best = torch.ones(shape, dtype=dtype), math.inf
    for _ in range(30):
        with torch.enable_grad():
            leaf = v.clone().requires_grad_()
            out = run(leaf)
            (w,) = torch.autograd.grad(out, leaf, out.detach())
        slack = 1 + 4 * max(out.numel(), v.numel()) * torch.finfo(dtype).eps
        best = min(best, inflate(math.sqrt(float((w / v).max()) * slack)))
        top = float(w.max())
        if top == 0:
            return 0.0
        v = w / top + 1e-6
    return best


def _matrix_norm(call: Call, run: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Norm of a linear map by its matrix."""
    n = math.prod(shape)
    if n * math.prod(call.shape[2:]) * shape[0] > LARGEST_MATRIX:
        call.refuse("bicubic sampling of an image this large", "sample bilinearly, or bound it on a smaller image")
    columns = [run(e.reshape(shape)).flatten() for e in torch.eye(n, dtype=dtype)]
    with torch.no_grad(), full_precision():
        found: Bracket = spectral_norm(torch.stack(columns, 1))
    return float(found.upper)
