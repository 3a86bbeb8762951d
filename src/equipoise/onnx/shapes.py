"""ONNX operators that make constants, and that move, select, repeat, order and resample entries."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.onnx.operators import bounded, operator
from equipoise.onnx.reading import Spec

# ---- constants ----------------------------------------------------------------------------------------------------------


@operator("Constant")
def _constant(
    spec: Spec,
    *,
    value: Any = None,
    value_float: Any = None,
    value_floats: Any = None,
    value_int: Any = None,
    value_ints: Any = None,
) -> Tensor:
    [stored] = spec.attributes.values()
    return torch.as_tensor(stored)


@operator("ConstantOfShape")
def _constant_of_shape(spec: Spec, shape: list[int], *, value: Any = None) -> Tensor:
    value = torch.zeros(1) if value is None else value
    return value.reshape(()).expand(bounded(spec, shape)).clone()


@operator("Range")
def _range(spec: Spec, start: np.ndarray, limit: np.ndarray, step: np.ndarray) -> Tensor:
    first = start.item()
    last = limit.item()
    by = step.item()
    bounded(spec, [math.ceil(abs((last - first) / by))])
    return torch.from_numpy(np.arange(first, last, by, dtype=start.dtype))


# ---- shapes -------------------------------------------------------------------------------------------------------------


@operator("Flatten")
def _flatten(spec: Spec, x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Reshape")
def _reshape(spec: Spec, x: Tensor, shape: list[int], *, allowzero: int = 0) -> Tensor:
    if not allowzero:
        shape = [x.shape[i] if n == 0 and i < x.dim() else n for i, n in enumerate(shape)]
    return x.reshape(shape)


@operator("Transpose")
def _transpose(spec: Spec, x: Tensor, *, perm: list[int] | None = None) -> Tensor:
    return x.permute(perm or list(range(x.dim()))[::-1])


@operator("Squeeze")
def _squeeze(spec: Spec, x: Tensor, axes: list[int] | None = None) -> Tensor:
    if axes is None:
        axes = [i for i, n in enumerate(x.shape) if n == 1]
    axes = [axis % x.dim() for axis in axes]
    if any(x.shape[axis] != 1 for axis in axes):
        raise spec.refuse(f"axes {axes} of shape {tuple(x.shape)} are not of length 1")
    return x.reshape([n for i, n in enumerate(x.shape) if i not in axes])


@operator("Unsqueeze")
def _unsqueeze(spec: Spec, x: Tensor, axes: list[int]) -> Tensor:
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Expand")
def _expand(spec: Spec, x: Tensor, shape: list[int]) -> Tensor:
    return x.expand(bounded(spec, list(torch.broadcast_shapes(tuple(x.shape), tuple(shape)))))


@operator("Tile")
def _tile(spec: Spec, x: Tensor, repeats: list[int]) -> Tensor:
    bounded(spec, [n * times for n, times in zip(x.shape, repeats, strict=True)])
    return x.repeat(repeats)


@operator("Pad")
def _pad(
    spec: Spec,
    x: Tensor,
    pads: list[int],
    value: float | None = None,
    axes: list[int] | None = None,
    *,
    mode: str = "constant",
) -> Tensor:
    axes = axes or list(range(x.dim()))
    if len(pads) != 2 * len(axes):
        raise spec.refuse("it needs two amounts per axis")
    pairs = [(0, 0)] * x.dim()
    for place, axis in enumerate(axes):
        pairs[axis] = pads[place], pads[place + len(axes)]
    bounded(spec, [n + sum(pair) for n, pair in zip(x.shape, pairs, strict=True)])

    if mode == "constant":
        kept = next((i for i, pair in enumerate(pairs[:-1]) if pair != (0, 0)), len(pairs) - 1)
        return F.pad(x, [n for pair in reversed(pairs[kept:]) for n in pair], value=value or 0.0)
    names = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    if mode not in names or any(pair != (0, 0) for pair in pairs[:2]) or x.dim() not in (3, 4, 5):
        raise spec.refuse(f"padding mode {mode!r} of {x.dim()} dimensions is not supported")
    return F.pad(x, [n for pair in reversed(pairs[2:]) for n in pair], mode=names[mode])


@operator("DepthToSpace")
def _depth_to_space(spec: Spec, x: Tensor, *, blocksize: int = 1, mode: str = "DCR") -> Tensor:
    if mode != "CRD":
        raise spec.refuse(f"mode {mode!r} is not supported; export with mode CRD")
    return F.pixel_shuffle(x, blocksize)


# ---- entries by their place ---------------------------------------------------------------------------------------------


def _axis(spec: Spec, axis: int, x: Tensor) -> int:
    if not -x.dim() <= axis < x.dim():
        raise spec.refuse(f"axis {axis} of a tensor of {x.dim()} dimensions")
    return axis % x.dim()


def _indices(spec: Spec, index: np.ndarray, size: int) -> Tensor:
    """Indices with negative ones counted from the end, refused where one lies outside."""
    if index.dtype.kind not in "iu" or (
        index.size and (int(index.min()) < -size or int(index.max()) >= size)
    ):
        raise spec.refuse(f"an index lies outside the {size} entries")
    return torch.from_numpy(np.where(index < 0, index + size, index).astype(np.int64))


@operator("Split")
def _split(
    spec: Spec, x: Tensor, split: list[int] | None = None, *, axis: int = 0
) -> tuple[Tensor, ...]:
    if split is None:
        rest = len(spec.outputs) - 1
        step = -(-x.shape[axis] // (rest + 1))
        split = [step] * rest + [x.shape[axis] - step * rest]
    return torch.split(x, split, axis)


@operator("Slice")
def _slice(
    spec: Spec,
    x: Tensor,
    starts: list[int],
    ends: list[int],
    axes: list[int] | None = None,
    steps: list[int] | None = None,
) -> Tensor:
    axes = axes or list(range(len(starts)))
    steps = steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = _axis(spec, axis, x)
        kept = range(x.shape[axis])[start:end:step]
        if step > 0:
            x = x[(slice(None),) * axis + (slice(kept.start, kept.stop, step),)]
        else:
            x = x.index_select(axis, torch.from_numpy(np.array(kept, dtype=np.int64)))
    return x


@operator("Gather")
def _gather(spec: Spec, x: Tensor, index: np.ndarray, *, axis: int = 0) -> Tensor:
    axis = _axis(spec, axis, x)
    places = _indices(spec, index, x.shape[axis])
    if index.ndim == 0:
        return x.select(axis, int(index))
    return x.index_select(axis, places.reshape(-1)).reshape(
        [*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]]
    )


@operator("GatherND")
def _gather_nd(spec: Spec, x: Tensor, index: np.ndarray, *, batch_dims: int = 0) -> Tensor:
    if batch_dims:
        raise spec.refuse("batch_dims is not supported")
    parts = zip(np.moveaxis(index, -1, 0), x.shape, strict=False)
    return x[tuple(_indices(spec, part, n) for part, n in parts)]


@operator("Trilu")
def _triangle(spec: Spec, x: Tensor, k: float = 0.0, *, upper: int = 1) -> Tensor:
    return (torch.triu if upper else torch.tril)(x, int(k))


# ---- resampling ---------------------------------------------------------------------------------------------------------


@operator("Resize", "Upsample")
def _resize(
    spec: Spec,
    x: Tensor,
    roi: list[float] | None = None,
    scales: list[float] | None = None,
    sizes: list[int] | None = None,
    *,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "",
    nearest_mode: str = "",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    antialias: int = 0,
    keep_aspect_ratio_policy: str = "stretch",
) -> Tensor:
    """One axis after the other: a choice of entries for `nearest`, a product with the matrix of weights otherwise."""
    if exclude_outside or antialias or keep_aspect_ratio_policy != "stretch":
        raise spec.refuse(
            "antialiasing, exclude_outside and policies other than 'stretch' are not supported"
        )
    if spec.opset < 11:
        scales = roi or scales
    coordinates = coordinate_transformation_mode or (
        "half_pixel" if spec.opset >= 11 else "asymmetric"
    )
    rounding = nearest_mode or ("round_prefer_floor" if spec.opset >= 11 else "floor")
    if (
        mode not in ("nearest", "linear")
        or coordinates not in _COORDINATES
        or rounding not in _ROUNDING
    ):
        raise spec.refuse(f"resampling by {mode}, {coordinates} and {rounding} is not supported")

    if scales:
        sizes = [math.floor(n * scale) for n, scale in zip(x.shape, scales, strict=True)]
    else:
        sizes = sizes or list(x.shape)
        scales = [size / n for size, n in zip(sizes, x.shape, strict=True)]

    for axis, (size, scale) in enumerate(zip(sizes, scales, strict=True)):
        length = x.shape[axis]
        if size == length and scale == 1:
            continue
        bounded(spec, [*x.shape[:axis], size, *x.shape[axis + 1 :]])
        places = _COORDINATES[coordinates](np.arange(size, dtype=np.float64), scale, length, size)
        if mode == "nearest":
            nearest = np.clip(_ROUNDING[rounding](places), 0, length - 1).astype(np.int64)
            x = x.index_select(axis, torch.from_numpy(nearest))
        else:
            bounded(spec, [size, length])
            matrix = torch.from_numpy(_interpolation(places, length))
            x = torch.matmul(x.transpose(axis, -1), matrix.to(x.dtype)).transpose(axis, -1)
    return x


#: the places in the old axis that the entries `i` of the new one are read at
_COORDINATES: Mapping[str, Callable[[np.ndarray, float, int, int], np.ndarray]] = {
    "half_pixel": lambda i, scale, old, new: (i + 0.5) / scale - 0.5,
    "pytorch_half_pixel": lambda i, scale, old, new: (i + 0.5) / scale - 0.5 if new > 1 else 0 * i,
    "asymmetric": lambda i, scale, old, new: i / scale,
    "align_corners": lambda i, scale, old, new: i * (old - 1) / max(1, new - 1),
}
_ROUNDING: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": lambda places: np.ceil(places - 0.5),
    "round_prefer_ceil": lambda places: np.floor(places + 0.5),
}


def _interpolation(places: np.ndarray, length: int) -> np.ndarray:
    """The matrix `(length, len(places))` of the weights of linear interpolation."""
    left = np.floor(places)
    matrix = np.zeros((length, len(places)))
    for offset, weight in enumerate((left + 1 - places, places - left)):
        rows = np.clip(left + offset, 0, length - 1).astype(np.int64)
        np.add.at(matrix, (rows, np.arange(len(places))), weight)
    return matrix
