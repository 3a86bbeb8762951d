"""Where the inputs of a dataset lie, and the rules for arrays: types, layouts, finite numbers, labels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core import InputError

Ints = NDArray[np.int64]
Layout = Literal["auto", "NHWC", "NCHW"]

#: data declared larger than this is not read unless the caller says so
MAX_BYTES = 8 * 2**30
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Options:
    """What a user may say about data in files.

    Attributes:
        num_classes: every label must be below it.
        layout: of arrays with three axes per input.
        size: to which pictures are resized and cropped.
        columns: the names of inputs and labels; an empty second name: there are no labels.
        max_bytes: what declares more is refused.
    """

    num_classes: int | None = None
    layout: Layout = "auto"
    size: int | tuple[int, int] | None = None
    columns: tuple[str, str] | None = None
    max_bytes: int = MAX_BYTES

    @property
    def crop(self) -> tuple[int, int] | None:
        """(height, width) from one number or two."""
        if self.size is None:
            return None
        pair = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        if len(pair) != 2 or not all(isinstance(s, int) and 1 <= s <= 4096 for s in pair):
            raise InputError(f"size must be one or two whole numbers between 1 and 4096, got {self.size!r}")
        return pair


@dataclass(frozen=True, eq=False)
class Source:
    """Inputs of equal shape and type that are read when asked for.

    Attributes:
        count: how many there are.
        shape: of one input: (channels, height, width) of an image, (features,) otherwise.
        dtype: uint8, float16, float32 or float64.
        scale: the number that stands for 1: 255 for bytes.
        read: from row numbers to the raw inputs, `(len(rows), *shape)`; it can be pickled.
    """

    count: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    scale: float
    read: Callable[[Ints], NDArray[Any]] = field(repr=False)

    def __len__(self) -> int:
        return self.count


def _rows_of(array: NDArray[Any], rows: Ints) -> NDArray[Any]:
    return np.ascontiguousarray(array[rows])


def array_source(inputs: NDArray[Any], where: str, layout: Layout = "auto", scale: float | None = None) -> Source:
    """A source around an array.

    Args:
        inputs: (N, features), (N, H, W), or images as `channels_first` decides.
        where: what error messages call it.
        layout: of images.
        scale: the number that stands for 1; by default 255 for bytes and 1 for floats.
    """
    inputs = channels_ahead(inputs, where, layout)
    for start in range(0, len(inputs), 1024):
        bad = first_non_finite(inputs[start : start + 1024])
        if bad is not None:
            raise InputError(f"{where}: row {start + bad} holds NaN, infinity or a number too large for float32")
    scale = default_scale(inputs.dtype) if scale is None else scale
    return Source(len(inputs), inputs.shape[1:], inputs.dtype, scale, functools.partial(_rows_of, inputs))


def channels_ahead(inputs: NDArray[Any], where: str, layout: Layout) -> NDArray[Any]:
    """The array as (N, features) or (N, C, H, W), in bytes or native floats; anything else is refused.

    Args:
        inputs: the array.
        where: what error messages call it.
        layout: of images.
    """
    dtype = inputs.dtype.newbyteorder("=")
    if dtype not in (np.dtype(np.uint8), np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)):
        raise InputError(
            f"{where} holds {inputs.dtype}; expected uint8 (0 … 255) or floats, so that the scale is not guessed"
        )
    if inputs.ndim not in (2, 3, 4) or 0 in inputs.shape:
        raise InputError(
            f"{where} has shape {tuple(inputs.shape)}, expected (N, features), (N, H, W) or a batch of images, not empty"
        )
    if inputs.ndim == 3:
        inputs = inputs[:, None]
    elif inputs.ndim == 4 and not channels_first(inputs.shape[1:], dtype, layout, where):
        inputs = inputs.transpose(0, 3, 1, 2)
    return inputs.astype(dtype, copy=False)


def default_scale(dtype: np.dtype[Any]) -> float:
    """255 for bytes; floats are kept as they are."""
    return 255.0 if dtype == np.uint8 else 1.0


def channels_first(shape: Sequence[int], dtype: np.dtype[Any], layout: Layout, where: str) -> bool:
    """Whether images are (C, H, W): bytes are (H, W, C) and floats (C, H, W), unless `layout` says.

    Refused where the axis named by the rule has a length no image has (1, 3 or 4 channels) while the other one does.

    Args:
        shape: of one image.
        dtype: of its numbers.
        layout: what the user says.
        where: what error messages call it.
    """
    if layout not in ("auto", "NHWC", "NCHW"):
        raise InputError(f"layout must be 'auto', 'NHWC' or 'NCHW', got {layout!r}")
    first = layout == "NCHW" if layout != "auto" else dtype != np.uint8
    ours, other = (shape[0], shape[2]) if first else (shape[2], shape[0])
    if layout == "auto" and ours not in _CHANNELS and other in _CHANNELS:
        rule, instead = ("floats are read as (N, C, H, W)", "NHWC") if first else ("bytes as (N, H, W, C)", "NCHW")
        raise InputError(
            f"{where} has inputs of shape {tuple(shape)} and type {dtype}: {rule}, which gives {ours} channels; "
            f"say layout={instead!r}, --layout {instead} (or layout={'NCHW' if first else 'NHWC'!r} if that is meant)"
        )
    return first


def first_non_finite(raw: NDArray[Any]) -> int | None:
    """Index of the first row that is not finite in float32, or None."""
    if raw.dtype == np.uint8:
        return None
    with np.errstate(over="ignore"):
        fine = np.isfinite(raw.astype(np.float32, copy=False)).reshape(len(raw), -1).all(axis=1)
    return None if bool(fine.all()) else int(np.argmin(fine))


def as_array(values: Any, what: str) -> NDArray[Any]:
    """A NumPy array of numbers from a tensor, an array or a list; objects are refused.

    Args:
        values: the numbers.
        what: what error messages call them.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InputError(f"{what} are not an array of numbers: {error}") from error
    if array.dtype.hasobject:
        raise InputError(f"{what} are not an array of numbers but of {array.dtype}")
    return array


def largest_label(parts: Iterable[NDArray[Any]]) -> int | None:
    """Largest label + 1 over the splits of a dataset, or None where no split has labels; they are checked later."""
    largest = np.iinfo(np.int32).max  # larger ones are refused with their row when the labels are checked
    counts = [min(int(labels.max()), largest) + 1 for labels in parts if labels.size and labels.dtype.kind in "iu"]
    return max(counts) if counts and max(counts) >= 1 else None


def check_labels(labels: Any, count: int, num_classes: int | None, where: str) -> tuple[Ints, int]:
    """Labels as int64 (count,), and the number of classes.

    Args:
        labels: one integer per input.
        count: how many inputs there are.
        num_classes: every label must be below it; None: the largest label + 1.
        where: what error messages call the data.
    """
    array = np.asarray(labels)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise InputError(f"{where}: labels must be one integer per row, got {array.dtype} of shape {array.shape}")
    if len(array) != count:
        raise InputError(f"{where}: {count} inputs but {len(array)} labels")
    if count == 0:
        raise InputError(f"{where} holds no data")

    bad = (array > np.iinfo(np.int32).max) | (array < 0)  # before int64 turns the largest uint64 into −1
    if num_classes is not None:
        bad = bad | (array >= num_classes)
    if bool(bad.any()):
        row = int(np.argmax(bad))
        wanted = "0 or more" if num_classes is None else f"in 0 … {num_classes - 1}"
        raise InputError(f"{where}: row {row} has label {int(array[row])}, expected {wanted}")

    checked = array.astype(np.int64)
    checked.flags.writeable = False
    return checked, int(checked.max()) + 1 if num_classes is None else num_classes
