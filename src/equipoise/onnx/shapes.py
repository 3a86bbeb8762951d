"""ONNX operators that move, select, repeat and resample entries."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.onnx.operators import Fixed, bounded, integers, number, operator
from equipoise.onnx.reading import DTYPES, Spec


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
    if len(spec.attributes) != 1:
        raise spec.refuse("it does not hold one value")
    if value is not None:
        return value
    floats = value_floats if value_float is None else value_float
    if floats is not None:
        return torch.tensor(floats, dtype=torch.float32)
    return torch.tensor(value_ints if value_int is None else value_int, dtype=torch.int64)


@operator("ConstantOfShape", fixed=(0,))
def _constant_of_shape(spec: Spec, shape: np.ndarray, *, value: Any = None) -> Tensor:
    value = torch.zeros(1) if value is None else value
    return value.reshape(()).expand(bounded(spec, integers(spec, shape, "the shape") or [])).clone()


@operator("EyeLike")
def _eye(spec: Spec, x: Tensor, *, k: int = 0, dtype: int = 0) -> Tensor:
    if x.dim() != 2 or k != 0:
        raise spec.refuse("only the main diagonal of a matrix is supported")
    return torch.eye(*x.shape, dtype=DTYPES.get(dtype, x.dtype))


@operator("Range", fixed=(0, 1, 2))
def _range(spec: Spec, start: np.ndarray, limit: np.ndarray, step: np.ndarray) -> Tensor:
    first, last, by = (v.item() for v in (start, limit, step))
    if by == 0:
        raise spec.refuse("its step is 0")
    bounded(spec, [max(0, math.ceil((last - first) / by))])
    return torch.from_numpy(np.arange(first, last, by, dtype=start.dtype))


@operator("Flatten")
def _flatten(spec: Spec, x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Reshape", fixed=(1,))
def _reshape(spec: Spec, x: Tensor, shape: np.ndarray, *, allowzero: int = 0) -> Tensor:
    wanted = integers(spec, shape, "the shape") or []
    if not allowzero:
        wanted = [x.shape[i] if n == 0 and i < x.dim() else n for i, n in enumerate(wanted)]
    return x.reshape(wanted)


@operator("Transpose")
def _transpose(spec: Spec, x: Tensor, *, perm: Any = None) -> Tensor:
    return x.permute(list(range(x.dim()))[::-1] if perm is None else perm)


@operator("Squeeze", fixed=(1,))
def _squeeze(spec: Spec, x: Tensor, given: Fixed = None, *, axes: Any = None) -> Tensor:
    chosen = axes if given is None else integers(spec, given, "axes")
    chosen = [i for i, n in enumerate(x.shape) if n == 1] if chosen is None else [a % x.dim() for a in chosen]
    if any(x.shape[a] != 1 for a in chosen):
        raise spec.refuse(f"axes {chosen} of shape {tuple(x.shape)} are not of length 1")
    return x.reshape([n for i, n in enumerate(x.shape) if i not in chosen])


@operator("Unsqueeze", fixed=(1,))
def _unsqueeze(spec: Spec, x: Tensor, given: Fixed = None, *, axes: Any = None) -> Tensor:
    chosen = axes if given is None else integers(spec, given, "axes")
    rank = x.dim() + len(chosen or [])
    for axis in sorted(a % rank for a in chosen or []):
        x = x.unsqueeze(axis)
    return x


@operator("Split", fixed=(1,))
def _split(spec: Spec, x: Tensor, sizes: Fixed = None, *, axis: int = 0, split: Any = None) -> tuple[Tensor, ...]:
    count = len(spec.outputs)
    chosen = split if sizes is None else integers(spec, sizes, "split")
    if chosen is None:
        step = -(-x.shape[axis] // count)
        chosen = [step] * (count - 1) + [x.shape[axis] - step * (count - 1)]
    return torch.split(x, chosen, axis)


@operator("Slice", fixed=(1, 2, 3, 4))
def _slice(spec: Spec, x: Tensor, *limits: Fixed, starts: Any = None, ends: Any = None, axes: Any = None) -> Tensor:
    given = [integers(spec, v, "starts, ends, axes and steps") for v in (*limits, *[None] * 4)[:4]]
    starts, ends = given[0] or starts or [], given[1] or ends or []
    axes, steps = given[2] or axes or list(range(len(starts))), given[3]
    for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(starts), strict=True):
        size = x.shape[axis]
        places = range(size)[_clamped(start, size, step) : _clamped(end, size, step, end=True) : step]
        if step > 0:
            x = x[(slice(None),) * (axis % x.dim()) + (slice(places.start, places.stop, step),)]
        else:
            chosen = np.arange(places.start, places.stop, step, dtype=np.int64)
            x = x.index_select(axis, torch.from_numpy(chosen))
    return x


def _clamped(value: int, size: int, step: int, end: bool = False) -> int | None:
    """ONNX's limits, which may lie far outside, as Python's."""
    value = value + size if value < 0 else value
    if step < 0 and value < 0:
        return None if end else 0
    return max(0, min(value, size))


@operator("Gather", fixed=(1,))
def _gather(spec: Spec, x: Tensor, index: np.ndarray, *, axis: int = 0) -> Tensor:
    axis = axis % max(1, x.dim())
    if index.dtype.kind not in "iu":
        raise spec.refuse("its indices are not whole numbers")
    chosen = np.where(index < 0, index + x.shape[axis], index).astype(np.int64).reshape(-1)
    if index.ndim == 0:
        return x.select(axis, int(chosen[0]))
    found = x.index_select(axis, torch.from_numpy(chosen))
    return found.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])


@operator("GatherElements")
def _gather_elements(spec: Spec, x: Tensor, index: Tensor, *, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, torch.where(index < 0, index + x.shape[axis], index))


@operator("Expand", fixed=(1,))
def _expand(spec: Spec, x: Tensor, shape: np.ndarray) -> Tensor:
    wanted = torch.broadcast_shapes(tuple(x.shape), tuple(integers(spec, shape, "the shape") or []))
    return x.expand(bounded(spec, list(wanted)))


@operator("Tile", fixed=(1,))
def _tile(spec: Spec, x: Tensor, repeats: np.ndarray) -> Tensor:
    times = integers(spec, repeats, "repeats") or []
    bounded(spec, [n * t for n, t in zip(x.shape, times, strict=True)])
    return x.repeat(times)


@operator("Pad", fixed=(1, 2, 3))
def _pad(
    spec: Spec,
    x: Tensor,
    amounts: Fixed = None,
    fill: Fixed = None,
    axes: Fixed = None,
    *,
    mode: str = "constant",
    pads: Any = None,
    value: float = 0.0,
) -> Tensor:
    pads = pads if amounts is None else integers(spec, amounts, "pads")
    chosen = integers(spec, axes, "axes") or list(range(x.dim()))
    padding = value if fill is None else number(spec, fill, "the value padded with")
    if pads is None or len(pads) != 2 * len(chosen):
        raise spec.refuse("it needs two amounts per axis")
    before = {a % x.dim(): (pads[i], pads[i + len(chosen)]) for i, a in enumerate(chosen)}
    bounded(spec, [n + sum(before.get(i, (0, 0))) for i, n in enumerate(x.shape)])
    pairs = [before.get(i, (0, 0)) for i in range(x.dim())]
    if mode == "constant":
        while len(pairs) > 1 and pairs[0] == (0, 0):
            pairs = pairs[1:]
        return F.pad(x, [n for pair in reversed(pairs) for n in pair], value=padding)
    names = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    spatial = pairs[2:]
    if mode not in names or any(p != (0, 0) for p in pairs[:2]) or not 1 <= len(spatial) <= 3:
        raise spec.refuse(f"padding mode {mode!r} of {x.dim()} dimensions is not supported")
    return F.pad(x, [n for pair in reversed(spatial) for n in pair], mode=names[mode])


@operator("DepthToSpace")
def _depth_to_space(spec: Spec, x: Tensor, *, blocksize: int = 1, mode: str = "DCR") -> Tensor:
    b, (n, c, h, w) = blocksize, x.shape
    if mode == "CRD":
        return F.pixel_shuffle(x, b)
    parts = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // (b * b), h * b, w * b)


@operator("SpaceToDepth")
def _space_to_depth(spec: Spec, x: Tensor, *, blocksize: int = 1) -> Tensor:
    b, (n, c, h, w) = blocksize, x.shape
    parts = x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, c * b * b, h // b, w // b)


@operator("Upsample", fixed=(1,))
def _upsample(spec: Spec, x: Tensor, given: Fixed = None, *, scales: Any = None, mode: str = "nearest") -> Tensor:
    factors = scales if given is None else [float(s) for s in given.tolist()]
    if factors is None:
        raise spec.refuse("it has no scales")
    sizes = [math.floor(n * s) for n, s in zip(x.shape, factors, strict=True)]
    return _resampled(spec, x, sizes, factors, mode, -0.75, "asymmetric", "floor")


@operator("Resize", fixed=(1, 2, 3))
def _resize(
    spec: Spec,
    x: Tensor,
    roi: Fixed = None,
    scales: Fixed = None,
    sizes: Fixed = None,
    *,
    mode: str = "nearest",
    coordinate_transformation_mode: Any = None,
    nearest_mode: Any = None,
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    antialias: int = 0,
    keep_aspect_ratio_policy: str = "stretch",
) -> Tensor:
    if spec.opset < 11:
        scales, roi = roi, None
    if exclude_outside or antialias or keep_aspect_ratio_policy != "stretch":
        raise spec.refuse("antialiasing, exclude_outside and policies other than 'stretch' are not supported")
    if scales is not None and scales.size:
        factors = [float(s) for s in scales.tolist()]
        wanted = [math.floor(n * s) for n, s in zip(x.shape, factors, strict=True)]
    else:
        wanted = integers(spec, sizes, "sizes") or list(x.shape)
        factors = [w / n for w, n in zip(wanted, x.shape, strict=True)]
    how = coordinate_transformation_mode or ("half_pixel" if spec.opset >= 11 else "asymmetric")
    rounding = nearest_mode or ("round_prefer_floor" if spec.opset >= 11 else "floor")
    return _resampled(spec, x, wanted, factors, mode, cubic_coeff_a, how, rounding)


def _resampled(
    spec: Spec, x: Tensor, sizes: list[int], factors: list[float], mode: str, cubic: float, how: str, rounding: str
) -> Tensor:
    """One axis after the other: a choice of entries for `nearest`, a product with the matrix of weights otherwise."""
    bounded(spec, sizes)
    for axis, (size, factor) in enumerate(zip(sizes, factors, strict=True)):
        length = x.shape[axis]
        if size == length and factor == 1:
            continue
        bounded(spec, [*x.shape[:axis], size, *x.shape[axis + 1 :]])
        places = _coordinates(spec, length, size, factor, how)
        if mode == "nearest":
            chosen = np.clip(_rounded(spec, places, rounding), 0, length - 1).astype(np.int64)
            x = x.index_select(axis, torch.from_numpy(chosen))
        elif mode in ("linear", "cubic"):
            bounded(spec, [size, length])
            weights = np.zeros((size, length))
            for near, weight in _weights(places, mode, cubic):
                np.add.at(weights, (np.arange(size), np.clip(near, 0, length - 1).astype(np.int64)), weight)
            x = torch.matmul(x.transpose(axis, -1), torch.from_numpy(weights.T).to(x.dtype)).transpose(axis, -1)
        else:
            raise spec.refuse(f"mode {mode!r} is not supported")
    return x


def _coordinates(spec: Spec, old: int, new: int, factor: float, how: str) -> np.ndarray:
    """The places in the old axis that the entries of the new one are read at."""
    i = np.arange(new, dtype=np.float64)
    match how:
        case "half_pixel":
            return (i + 0.5) / factor - 0.5
        case "pytorch_half_pixel":
            return (i + 0.5) / factor - 0.5 if new > 1 else 0 * i
        case "asymmetric":
            return i / factor
        case "align_corners":
            return i * (old - 1) / (new - 1) if new > 1 else 0 * i
    raise spec.refuse(f"coordinate_transformation_mode {how!r} is not supported")


def _rounded(spec: Spec, places: np.ndarray, rounding: str) -> np.ndarray:
    match rounding:
        case "floor":
            return np.floor(places)
        case "ceil":
            return np.ceil(places)
        case "round_prefer_floor":
            return np.ceil(places - 0.5)
        case "round_prefer_ceil":
            return np.floor(places + 0.5)
    raise spec.refuse(f"nearest_mode {rounding!r} is not supported")


def _weights(places: np.ndarray, mode: str, a: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """The entries next to the places, with their weights."""
    left = np.floor(places)
    t = places - left
    if mode == "linear":
        return [(left, 1 - t), (left + 1, t)]
    near = [((a + 2) * s - (a + 3)) * s * s + 1 for s in (t, 1 - t)]
    far = [((a * s - 5 * a) * s + 8 * a) * s - 4 * a for s in (1 + t, 2 - t)]
    return [(left - 1, far[0]), (left, near[0]), (left + 1, near[1]), (left + 2, far[1])]
