"""ONNX operators that read from and write to places: gather, scatter, order statistics, running sums, sampling."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.onnx.operators import Fixed, bounded, integers, operator
from equipoise.onnx.reading import Spec


def _axis(spec: Spec, value: int, x: Tensor) -> int:
    if not -x.dim() <= value < max(1, x.dim()):
        raise spec.refuse(f"axis {value} of a tensor of {x.dim()} dimensions")
    return value % max(1, x.dim())


@operator("CumSum", fixed=(1,))
def _cumsum(spec: Spec, x: Tensor, axis: np.ndarray) -> Tensor:
    spec.only("exclusive", "reverse")
    dim = _axis(spec, int(axis.reshape(()).item()), x)
    x = x.flip(dim) if spec.get("reverse", 0) else x
    if spec.get("exclusive", 0):
        zeros = torch.zeros_like(x.narrow(dim, 0, 1))
        x = torch.cat([zeros, x.narrow(dim, 0, x.shape[dim] - 1)], dim)
    found = torch.cumsum(x, dim)
    return found.flip(dim) if spec.get("reverse", 0) else found


@operator("TopK", fixed=(1,))
def _topk(spec: Spec, x: Tensor, count: Fixed = None) -> tuple[Tensor, Tensor]:
    spec.only("axis", "largest", "sorted", "k")
    k = spec.get("k") if count is None else int(count.reshape(()).item())
    dim = _axis(spec, spec.get("axis", -1), x)
    if k is None or not 0 <= k <= x.shape[dim]:
        raise spec.refuse(f"the {k} largest of {x.shape[dim]} entries")
    values, places = torch.topk(x, k, dim, bool(spec.get("largest", 1)), True)
    return values, places


@operator("ArgMax", "ArgMin")
def _place(spec: Spec, x: Tensor) -> Tensor:
    spec.only("axis", "keepdims", "select_last_index")
    if spec.get("select_last_index", 0):
        raise spec.refuse("select_last_index is not supported")
    run = torch.argmax if spec.kind == "ArgMax" else torch.argmin
    return run(x, _axis(spec, spec.get("axis", 0), x), bool(spec.get("keepdims", 1)))


@operator("Trilu", fixed=(1,))
def _triangle(spec: Spec, x: Tensor, k: Fixed = None) -> Tensor:
    spec.only("upper")
    offset = 0 if k is None else int(k.reshape(()).item())
    return torch.triu(x, offset) if spec.get("upper", 1) else torch.tril(x, offset)


def _wrapped(spec: Spec, index: np.ndarray, size: int) -> Tensor:
    """Indices with negative ones counted from the end, refused where one lies outside."""
    if index.dtype.kind not in "iu" or (index.size and (int(index.min()) < -size or int(index.max()) >= size)):
        raise spec.refuse(f"an index lies outside the {size} entries")
    return torch.from_numpy(np.where(index < 0, index + size, index).astype(np.int64))


@operator("OneHot", fixed=(0, 1, 2))
def _one_hot(spec: Spec, index: np.ndarray, depth: np.ndarray, values: np.ndarray) -> Tensor:
    spec.only("axis")
    count = int(depth.reshape(()).item())
    bounded(spec, [*index.shape, count])
    places = np.where(index < 0, index + count, index)
    hot = np.moveaxis(places[..., None] == np.arange(count), -1, spec.get("axis", -1))
    return torch.from_numpy(np.where(hot, values[1], values[0]))


@operator("NonZero", fixed=(0,))
def _nonzero(spec: Spec, x: np.ndarray) -> Tensor:
    spec.only()
    return torch.from_numpy(np.array(np.nonzero(x), dtype=np.int64))


@operator("ReverseSequence", fixed=(1,))
def _reversed(spec: Spec, x: Tensor, lengths: np.ndarray) -> Tensor:
    spec.only("batch_axis", "time_axis")
    batch, time = spec.get("batch_axis", 1), spec.get("time_axis", 0)
    if {batch, time} != {0, 1} or lengths.shape != (x.shape[batch],):
        raise spec.refuse("it needs the axes 0 and 1, and a length per sample")
    if any(not 0 <= int(n) <= x.shape[time] for n in lengths):
        raise spec.refuse(f"a length lies outside the {x.shape[time]} steps")
    rows = [x.select(batch, i) for i in range(len(lengths))]
    turned = [torch.cat([r[: int(n)].flip(0), r[int(n) :]]) for r, n in zip(rows, lengths, strict=True)]
    return torch.stack(turned, batch)


@operator("GatherND", fixed=(1,))
def _gather_nd(spec: Spec, x: Tensor, index: np.ndarray) -> Tensor:
    spec.only("batch_dims")
    if spec.get("batch_dims", 0) or index.ndim < 1 or index.shape[-1] > x.dim():
        raise spec.refuse("batch_dims, or indices longer than the shape, are not supported")
    return x[tuple(_wrapped(spec, index[..., i], x.shape[i]) for i in range(index.shape[-1]))]


@operator("ScatterElements", "Scatter", fixed=(1,))
def _scatter(spec: Spec, x: Tensor, index: np.ndarray, updates: Tensor) -> Tensor:
    spec.only("axis", "reduction")
    dim = _axis(spec, spec.get("axis", 0), x)
    places = _wrapped(spec, index, x.shape[dim])
    match spec.get("reduction", "none"):
        case "none":
            return x.scatter(dim, places, updates)
        case "add":
            return x.scatter_add(dim, places, updates)
        case "max" | "min" as how:
            return x.scatter_reduce(dim, places, updates, f"a{how}")
    raise spec.refuse(f"reduction {spec.get('reduction')!r} is not supported")


@operator("ScatterND", fixed=(1,))
def _scatter_nd(spec: Spec, x: Tensor, index: np.ndarray, updates: Tensor) -> Tensor:
    spec.only("reduction")
    how = spec.get("reduction", "none")
    if how not in ("none", "add") or index.ndim < 1 or index.shape[-1] > x.dim():
        raise spec.refuse(f"reduction {how!r}, or indices longer than the shape, are not supported")
    places = tuple(_wrapped(spec, index[..., i], x.shape[i]) for i in range(index.shape[-1]))
    return x.index_put(places, updates, accumulate=how == "add")


@operator("Compress", fixed=(1,))
def _compress(spec: Spec, x: Tensor, condition: np.ndarray) -> Tensor:
    spec.only("axis")
    axis = spec.get("axis")
    x = x.flatten() if axis is None else x
    dim = 0 if axis is None else _axis(spec, axis, x)
    kept = [i for i, keep in enumerate(condition.reshape(-1)[: x.shape[dim]]) if keep]
    return x.index_select(dim, torch.tensor(kept, dtype=torch.int64))


@operator("GridSample")
def _grid_sample(spec: Spec, x: Tensor, grid: Tensor) -> Tensor:
    spec.only("align_corners", "mode", "padding_mode")
    names = {
        "bilinear": "bilinear",
        "linear": "bilinear",
        "nearest": "nearest",
        "bicubic": "bicubic",
        "cubic": "bicubic",
    }
    mode = spec.get("mode", "bilinear" if spec.opset < 20 else "linear")
    if mode not in names:
        raise spec.refuse(f"mode {mode!r} is not supported")
    corners = bool(spec.get("align_corners", 0))
    return F.grid_sample(x, grid, names[mode], spec.get("padding_mode", "zeros"), corners)


@operator("Col2Im", fixed=(1, 2))
def _col2im(spec: Spec, x: Tensor, image: np.ndarray, block: np.ndarray) -> Tensor:
    spec.only("dilations", "pads", "strides")
    size, kernel = integers(spec, image, "the image's shape") or [], integers(spec, block, "the block's shape") or []
    pads = spec.get("pads", [0] * 4)
    if len(size) != 2 or pads[:2] != pads[2:]:
        raise spec.refuse("only images of two dimensions with even padding are supported")
    bounded(spec, [x.shape[0], max(1, x.shape[1] // max(1, math.prod(kernel))), *size])
    return F.fold(x, tuple(size), tuple(kernel), spec.get("dilations", [1, 1]), pads[:2], spec.get("strides", [1, 1]))
