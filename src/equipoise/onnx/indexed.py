"""ONNX operators that read from and write to places: gather, scatter, order statistics, running sums, sampling."""

import math
from typing import Any

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
def _cumsum(spec: Spec, x: Tensor, axis: np.ndarray, *, reverse: int = 0, exclusive: int = 0) -> Tensor:
    dim = _axis(spec, int(axis.item()), x)
    x = x.flip(dim) if reverse else x
    if exclusive:
        zeros = torch.zeros_like(x.narrow(dim, 0, 1))
        x = torch.cat([zeros, x.narrow(dim, 0, x.shape[dim] - 1)], dim)
    found = torch.cumsum(x, dim)
    return found.flip(dim) if reverse else found


@operator("TopK", fixed=(1,))
def _topk(
    spec: Spec, x: Tensor, count: Fixed = None, *, k: Any = None, axis: int = -1, largest: int = 1
) -> tuple[Tensor, ...]:
    k = k if count is None else int(count.item())
    dim = _axis(spec, axis, x)
    if k is None or not 0 <= k <= x.shape[dim]:
        raise spec.refuse(f"the {k} largest of {x.shape[dim]} entries")
    return tuple(torch.topk(x, k, dim, bool(largest), True))


@operator("ArgMax", "ArgMin")
def _place(spec: Spec, x: Tensor, *, select_last_index: int = 0, axis: int = 0, keepdims: int = 1) -> Tensor:
    if select_last_index:
        raise spec.refuse("select_last_index is not supported")
    run = torch.argmax if spec.kind == "ArgMax" else torch.argmin
    return run(x, _axis(spec, axis, x), bool(keepdims))


@operator("Trilu", fixed=(1,))
def _triangle(spec: Spec, x: Tensor, k: Fixed = None, *, upper: int = 1) -> Tensor:
    offset = 0 if k is None else int(k.item())
    return torch.triu(x, offset) if upper else torch.tril(x, offset)


def _wrapped(spec: Spec, index: np.ndarray, size: int) -> Tensor:
    """Indices with negative ones counted from the end, refused where one lies outside."""
    if index.dtype.kind not in "iu" or (index.size and (int(index.min()) < -size or int(index.max()) >= size)):
        raise spec.refuse(f"an index lies outside the {size} entries")
    return torch.from_numpy(np.where(index < 0, index + size, index).astype(np.int64))


@operator("OneHot", fixed=(0, 1, 2))
def _one_hot(spec: Spec, index: np.ndarray, depth: np.ndarray, values: np.ndarray, *, axis: int = -1) -> Tensor:
    count = int(depth.item())
    bounded(spec, [*index.shape, count])
    places = np.where(index < 0, index + count, index)
    hot = np.moveaxis(places[..., None] == np.arange(count), -1, axis)
    return torch.from_numpy(np.where(hot, values[1], values[0]))


@operator("NonZero", fixed=(0,))
def _nonzero(spec: Spec, x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(np.nonzero(x), dtype=np.int64))


@operator("ReverseSequence", fixed=(1,))
def _reversed(spec: Spec, x: Tensor, lengths: np.ndarray, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    if {batch_axis, time_axis} != {0, 1} or lengths.shape != (x.shape[batch_axis],):
        raise spec.refuse("it needs the axes 0 and 1, and a length per sample")
    if any(not 0 <= int(n) <= x.shape[time_axis] for n in lengths):
        raise spec.refuse(f"a length lies outside the {x.shape[time_axis]} steps")
    rows = [x.select(batch_axis, i) for i in range(len(lengths))]
    turned = [torch.cat([r[: int(n)].flip(0), r[int(n) :]]) for r, n in zip(rows, lengths, strict=True)]
    return torch.stack(turned, batch_axis)


@operator("GatherND", fixed=(1,))
def _gather_nd(spec: Spec, x: Tensor, index: np.ndarray, *, batch_dims: int = 0) -> Tensor:
    if batch_dims or index.ndim < 1 or index.shape[-1] > x.dim():
        raise spec.refuse("batch_dims, or indices longer than the shape, are not supported")
    return x[tuple(_wrapped(spec, index[..., i], x.shape[i]) for i in range(index.shape[-1]))]


@operator("ScatterElements", "Scatter", fixed=(1,))
def _scatter(
    spec: Spec, x: Tensor, index: np.ndarray, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    dim = _axis(spec, axis, x)
    places = _wrapped(spec, index, x.shape[dim])
    match reduction:
        case "none":
            return x.scatter(dim, places, updates)
        case "add":
            return x.scatter_add(dim, places, updates)
        case "max" | "min" as how:
            return x.scatter_reduce(dim, places, updates, f"a{how}")
    raise spec.refuse(f"reduction {reduction!r} is not supported")


@operator("ScatterND", fixed=(1,))
def _scatter_nd(spec: Spec, x: Tensor, index: np.ndarray, updates: Tensor, *, reduction: str = "none") -> Tensor:
    if reduction not in ("none", "add") or index.ndim < 1 or index.shape[-1] > x.dim():
        raise spec.refuse(f"reduction {reduction!r}, or indices longer than the shape, are not supported")
    places = tuple(_wrapped(spec, index[..., i], x.shape[i]) for i in range(index.shape[-1]))
    return x.index_put(places, updates, accumulate=reduction == "add")


@operator("Compress", fixed=(1,))
def _compress(spec: Spec, x: Tensor, condition: np.ndarray, *, axis: Any = None) -> Tensor:
    x = x.flatten() if axis is None else x
    dim = 0 if axis is None else _axis(spec, axis, x)
    kept = [i for i, keep in enumerate(condition.reshape(-1)[: x.shape[dim]]) if keep]
    return x.index_select(dim, torch.tensor(kept, dtype=torch.int64))


@operator("GridSample")
def _grid_sample(
    spec: Spec, x: Tensor, grid: Tensor, *, mode: str = "linear", align_corners: int = 0, padding_mode: str = "zeros"
) -> Tensor:
    renamed = {"linear": "bilinear", "cubic": "bicubic"}
    return F.grid_sample(x, grid, renamed.get(mode, mode), padding_mode, bool(align_corners))


@operator("Col2Im", fixed=(1, 2))
def _col2im(
    spec: Spec,
    x: Tensor,
    image: np.ndarray,
    block: np.ndarray,
    *,
    pads: Any = None,
    dilations: Any = None,
    strides: Any = None,
) -> Tensor:
    size, kernel = integers(spec, image, "the image's shape") or [], integers(spec, block, "the block's shape") or []
    pads = pads or [0] * 4
    if len(size) != 2 or pads[:2] != pads[2:]:
        raise spec.refuse("only images of two dimensions with even padding are supported")
    bounded(spec, [x.shape[0], max(1, x.shape[1] // max(1, math.prod(kernel))), *size])
    return F.fold(x, tuple(size), tuple(kernel), dilations or 1, pads[:2], strides or 1)
