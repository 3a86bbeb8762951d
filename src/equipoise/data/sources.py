"""Where the inputs of a dataset lie: a source answers `read(rows)` with raw numbers and knows no labels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from equipoise.core import InputError

Ints = NDArray[np.int64]
Layout = Literal["auto", "NHWC", "NCHW"]

#: an array declared larger than this is not read unless the caller says so
MAX_BYTES = 8 * 2**30
_CHANNELS = (1, 3, 4)


class Source(Protocol):
    """Rows of equal shape and dtype; `scale` is the number that stands for 1 (255 for bytes)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input: (channels, height, width) of an image, (features,) otherwise."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8, float16, float32 or float64."""

    @property
    def scale(self) -> float:
        """Inputs are divided by it: 255 for bytes, 1 for floats."""

    def __len__(self) -> int: ...

    def read(self, rows: Ints) -> NDArray[Any]:
        """The raw inputs of these rows, in this order, `(len(rows), *shape)`."""


@dataclass(frozen=True, eq=False)
class ArraySource:
    """Inputs in memory: (N, C, H, W) or (N, features)."""

    inputs: NDArray[Any]
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(int(d) for d in self.inputs.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the stored numbers."""
        return self.inputs.dtype

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, rows: Ints) -> NDArray[Any]:
        """The raw inputs of these rows."""
        return np.ascontiguousarray(self.inputs[rows])


def array_source(inputs: NDArray[Any], where: str, layout: Layout = "auto", scale: float | None = None) -> ArraySource:
    """A source around an array (N, features), (N, H, W), or (N, H, W, C) / (N, C, H, W) as `channels_first` decides."""
    dtype = require_dtype(inputs.dtype, where)
    if inputs.ndim not in (2, 3, 4) or 0 in inputs.shape:
        raise InputError(
            f"{where} has shape {tuple(inputs.shape)}, expected (N, features), (N, H, W) or a batch of images, not empty"
        )
    if inputs.ndim == 3:
        inputs = inputs[:, None]
    elif inputs.ndim == 4 and not channels_first(inputs.shape[1:], dtype, layout, where):
        inputs = inputs.transpose(0, 3, 1, 2)
    source = ArraySource(inputs.astype(dtype, copy=False), default_scale(dtype) if scale is None else scale)
    require_finite_rows(source, where)
    return source


def require_dtype(dtype: np.dtype[Any], where: str) -> np.dtype[Any]:
    """The native-endian dtype of inputs: bytes or floats, anything else is refused."""
    native = dtype.newbyteorder("=")
    if native not in (np.dtype(np.uint8), np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)):
        raise InputError(f"{where} holds {dtype}; expected uint8 (0 … 255) or floats, so that the scale is not guessed")
    return native


def default_scale(dtype: np.dtype[Any]) -> float:
    """255 for bytes; floats are kept as they are."""
    return 255.0 if dtype == np.uint8 else 1.0


def channels_first(shape: Sequence[int], dtype: np.dtype[Any], layout: Layout, where: str) -> bool:
    """The layout rule for inputs with three axes: bytes are (H, W, C), floats are (C, H, W), unless `layout` says.

    Refused where the axis named by the rule has a length no image has (1, 3 or 4 channels) while the other one does.
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


def require_finite_rows(source: Source, where: str, chunk: int = 1024) -> None:
    """Refuse NaN, infinities and what overflows float32, naming the first bad row."""
    if source.dtype == np.uint8:
        return
    for start in range(0, len(source), chunk):
        rows = np.arange(start, min(start + chunk, len(source)), dtype=np.int64)
        bad = first_non_finite(source.read(rows))
        if bad is not None:
            raise InputError(f"{where}: row {start + bad} holds NaN, infinity or a number too large for float32")


def first_non_finite(raw: NDArray[Any]) -> int | None:
    """Index of the first row that is not finite in float32, or None."""
    if raw.dtype == np.uint8:
        return None
    with np.errstate(over="ignore"):
        fine = np.isfinite(raw.astype(np.float32, copy=False)).reshape(len(raw), -1).all(axis=1)
    return None if bool(fine.all()) else int(np.argmin(fine))


def largest_label(parts: Iterable[NDArray[Any]]) -> int | None:
    """Largest label + 1 over the splits of a dataset, or None where no split has labels; they are checked later."""
    largest = np.iinfo(np.int32).max  # larger ones are refused with their row when the labels are checked
    counts = [min(int(labels.max()), largest) + 1 for labels in parts if labels.size and labels.dtype.kind in "iu"]
    return max(counts) if counts and max(counts) >= 1 else None


def check_labels(labels: Any, count: int, num_classes: int | None, where: str) -> tuple[Ints, int]:
    """Labels as int64 (count,), and the number of classes (largest label + 1 where it is not known)."""
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
    found = array.astype(np.int64)
    found.flags.writeable = False
    return found, int(found.max()) + 1 if num_classes is None else num_classes
