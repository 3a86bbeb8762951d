"""A dataset: inputs read on demand, labels and ids in memory, and a fingerprint of the content."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core import InputError, Ints, Shape, explained, fresh_strides, guarded
from equipoise.core.files import Digest

Array = NDArray[Any]
Names = tuple[str, str]
Layout = Literal["auto", "NHWC", "NCHW", "NHW", "as-is"]

#: the label of an input without one
UNKNOWN = -1
#: usual names of the inputs and of the labels
IMAGES = ("image", "x")
LABELS = ("label", "y")
_CHUNK_BYTES = 16 * 2**20
_LARGEST_LABEL = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class Source:
    """Inputs of equal shape and type.

    Attributes:
        count: the number of inputs.
        shape: the shape of one input, (channels, height, width) for an image.
        dtype: uint8, float16, float32 or float64.
        read: maps row numbers to the raw inputs of these rows, an array or a list of arrays; can be pickled.
        scale: the value that means 1; by default 255 for bytes and 1 for floats.
    """

    count: int
    shape: Shape
    dtype: np.dtype[Any]
    read: Callable[[Ints], Any] = field(repr=False)
    scale: float | None = None

    @property
    def divisor(self) -> float:
        """What raw inputs are divided by."""
        return self.scale or (255.0 if self.dtype == np.uint8 else 1.0)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Labelled inputs: `ds[i]` is (float32 tensor, int), `ds.batch(indices)` is (float32 (B, …), int64 (B,)).

    Images are (channels, height, width). Bytes are divided by 255, floats are kept; NaN and infinity are refused.
    Data without labels has `num_classes` 0 and the label −1 everywhere (`labelled` is False).

    >>> import numpy as np
    >>> ds = Dataset.from_arrays(np.zeros((5, 4, 4), np.uint8), np.array([0, 1, 2, 0, 1]), name="zeros")
    >>> ds
    Dataset('zeros', 5 inputs of 1×4×4, 3 classes)
    """

    name: str
    source: Source
    num_classes: int
    labels: Ints
    classes: tuple[str, ...] | None = None

    @classmethod
    def from_source(
        cls, source: Source, labels: Any, *, name: str, classes: Sequence[str] | None = None
    ) -> Dataset:
        """A dataset of all rows of a source.

        Args:
            source: the inputs.
            labels: one integer per input; None if there are none.
            name: used in messages and reports.
            classes: the class names in the order of the labels.
        """
        if labels is None:
            return cls(name, source, 0, np.full(source.count, UNKNOWN, dtype=np.int64))
        checked = check_labels(labels, source.count, name)
        if classes is not None:
            return cls(name, source, len(classes), checked, tuple(classes))
        return cls(name, source, int(checked.max()) + 1, checked)

    @classmethod
    def from_arrays(
        cls,
        inputs: Any,
        labels: Any,
        *,
        name: str = "arrays",
        layout: Layout = "auto",
        scale: float | None = None,
    ) -> Dataset:
        """A dataset of arrays or tensors in memory, which are copied.

        Args:
            inputs: (N, …), bytes or floats.
            labels: (N,) integers; None if there are none.
            name: used in messages and reports.
            layout: which axes are channels, height and width; see `arrange`.
            scale: the value that means 1.
        """
        array = arrange(as_array(inputs, f"{name}: the inputs").copy(), name, layout)
        for start in range(0, len(array), 1024):
            _require_finite(array[start : start + 1024], np.arange(start, start + 1024), name)
        source = Source(len(array), array.shape[1:], array.dtype, array.__getitem__, scale)
        labels = None if labels is None else as_array(labels, f"{name}: the labels")
        return cls.from_source(source, labels, name=name)

    def __repr__(self) -> str:
        shape = "×".join(str(d) for d in self.input_shape)
        labels = f"{self.num_classes} classes" if self.labelled else "no labels"
        return f"Dataset({self.name!r}, {len(self)} inputs of {shape}, {labels})"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = self.batch([range(len(self))[index]])
        return x[0], int(y[0])

    @property
    def labelled(self) -> bool:
        """Whether the inputs have labels."""
        return self.num_classes > 0

    @property
    def input_shape(self) -> Shape:
        """Shape of one input."""
        return self.source.shape

    def batch(self, indices: Sequence[int] | Ints | Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions, in this order."""
        positions = as_array(indices, "indices").reshape(-1)
        x = torch.from_numpy(self._raw(positions)).to(torch.float32) / self.source.divisor
        return fresh_strides(x), torch.from_numpy(self.labels[positions])

    def fingerprint(self) -> str:
        """`sha256:…` of the content: shape, dtype, scale, every input byte and label in order; no path, no date.

        The same pictures as PNG files, Parquet or an array have the same fingerprint. Computed once.
        """
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        dtype = self.source.dtype.newbyteorder("<")
        digest = Digest(
            repr(
                ["equipoise-data-1", dtype.str, (len(self), *self.input_shape), self.source.divisor]
            )
        )
        chunk = max(1, _CHUNK_BYTES // (dtype.itemsize * int(np.prod(self.input_shape))))
        for start in range(0, len(self), chunk):
            positions = np.arange(start, min(start + chunk, len(self)))
            digest.feed(np.ascontiguousarray(self._raw(positions), dtype=dtype).data)
        for numbers in (self.labels, np.arange(len(self))):
            digest.feed(np.ascontiguousarray(numbers, dtype="<i8").data)
        return str(digest)

    def _raw(self, rows: Array) -> Array:
        inputs = self.source.read(rows)
        for row, x in zip(rows, inputs, strict=True):
            if x.shape != self.input_shape or x.dtype != self.source.dtype:
                raise InputError(
                    f"{self.name}: row {row} is {x.dtype} of shape {x.shape}, the first row is {self.source.dtype} of "
                    f"shape {self.input_shape}: all must agree (for pictures, size= resizes them)"
                )
        raw = np.stack(inputs)
        _require_finite(raw, rows, self.name)
        return raw


def _require_finite(raw: Array, rows: Ints, name: str) -> None:
    if raw.dtype == np.uint8:
        return
    with np.errstate(over="ignore"):
        finite = np.isfinite(raw.astype(np.float32, copy=False)).reshape(len(raw), -1).all(axis=1)
    if not finite.all():
        row = rows[np.argmin(finite)]
        raise InputError(f"{name}: row {row} holds NaN, infinity or a number too large for float32")


def arrange(inputs: Array, where: str, layout: Layout = "auto") -> Array:
    """A batch of inputs in native byte order, images as (N, C, H, W).

    Bytes are images, (N, H, W, C) or gray ones (N, H, W); floats are (N, C, H, W) if they have four axes, and keep any other
    shape (features, time series, volumes). `layout` overrides: "NHWC", "NCHW", "NHW" (gray images) or "as-is". Without it,
    an axis of channels with a length other than 1, 3 and 4 is refused if the opposite reading has such a length.

    Args:
        inputs: (N, …).
        where: what messages call the data.
        layout: the order of the axes.
    """
    dtype = inputs.dtype.newbyteorder("=")
    if dtype not in (np.uint8, np.float16, np.float32, np.float64):
        raise InputError(
            f"{where} holds {inputs.dtype}; expected uint8 (0 … 255) or floats, so that the scale is not guessed"
        )
    if inputs.ndim < 2 or 0 in inputs.shape:
        raise InputError(f"{where} has shape {inputs.shape}, expected (N, …), not empty")

    axes = inputs.ndim
    order: str = layout
    if layout == "auto":
        usual = {3: "NHW", 4: "NHWC"} if dtype == np.uint8 else {4: "NCHW"}
        order = usual.get(axes, "as-is")
        channels, opposite = (inputs.shape[i] for i in ((1, -1) if order == "NCHW" else (-1, 1)))
        if axes == 4 and channels not in (1, 3, 4) and opposite in (1, 3, 4):
            raise InputError(
                f"{where} has {dtype} inputs of shape {inputs.shape[1:]}, which read as {order} have {channels} channels: "
                "say layout='NHWC' or 'NCHW' (--set layout=NHWC)"
            )
    if axes != {"NHWC": 4, "NCHW": 4, "NHW": 3, "as-is": axes}.get(order):
        raise InputError(
            f"{where} has {axes} axes, expected layout NHWC, NCHW, NHW or as-is to fit, got {layout!r}"
        )
    if order == "NHW":
        inputs = inputs[:, None]
    if order == "NHWC":
        inputs = inputs.transpose(0, 3, 1, 2)
    return inputs.astype(dtype, copy=False)


def as_array(values: Any, what: str) -> Array:
    """A NumPy array of numbers from a tensor, an array or a list; objects are refused.

    Args:
        values: the numbers.
        what: what messages call them.
    """
    with explained(f"{what} are not an array of numbers"):
        array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    if array.dtype.hasobject:
        raise InputError(f"{what} are not an array of numbers but of {array.dtype}")
    return array


def check_labels(labels: Array, count: int, where: str) -> Ints:
    """Labels as int64 (count,).

    Args:
        labels: one integer per input.
        count: how many inputs there are.
        where: what messages call the data.
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise InputError(
            f"{where}: labels must be one integer per row, got {labels.dtype} of shape {labels.shape}"
        )
    if len(labels) != count:
        raise InputError(f"{where}: {count} inputs but {len(labels)} labels")
    if count == 0:
        raise InputError(f"{where} holds no data")

    outside = (labels < 0) | (labels >= _LARGEST_LABEL)  # before int64 turns a uint64 into −1
    if outside.any():
        row = int(np.argmax(outside))
        raise InputError(f"{where}: row {row} has label {labels[row]}, expected 0 or more")
    return labels.astype(np.int64)


def as_dataset(
    data: Any, name: str, layout: Layout = "auto", columns: Names | None = None
) -> Dataset:
    """A `Dataset` from what a user has.

    Args:
        data: a `Dataset`; a pair of arrays or tensors, or a dictionary of them; an array or tensor alone (inputs without
            labels); or a map-style dataset of pairs or of dictionaries.
        name: used in messages and reports.
        layout: as in `Dataset.from_arrays`.
        columns: the names of inputs and labels, for dictionaries.
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, np.ndarray | Tensor):
        return Dataset.from_arrays(data, None, name=name, layout=layout)
    is_pair = (
        isinstance(data, tuple | list)
        and len(data) == 2
        and all(hasattr(part, "shape") for part in data)
    )
    if is_pair or isinstance(data, Mapping):
        inputs, labels = pair_of(data, columns, name)
        return Dataset.from_arrays(inputs, labels, name=name, layout=layout)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise InputError(
            f"{name} is a {type(data).__name__}; expected a Dataset, a pair (inputs, labels) of arrays, or a "
            "map-style dataset with a length"
        )
    if len(data) == 0:
        raise InputError(f"{name} holds no data")

    first, again = (_item(data, 0, name, layout, columns)[0] for _ in range(2))
    if not np.array_equal(first, again, equal_nan=True):
        raise InputError(
            f"{name} gives another input each time it is read: leave the augmentation out"
        )
    labels = getattr(data, "targets", getattr(data, "labels", None))
    if labels is None or np.shape(labels) != (len(data),):
        labels = [_item(data, row, name, layout, columns)[1] for row in range(len(data))]
    read = functools.partial(_read_items, data, name, layout, columns)
    source = Source(len(data), first.shape, first.dtype, read)
    return Dataset.from_source(source, as_array(labels, f"{name}: the labels"), name=name)


def _item(
    data: Any, row: int, name: str, layout: Layout, columns: Names | None
) -> tuple[Array, Array]:
    """One input and its label of a map-style dataset."""
    where = f"{name}: row {row}"
    x, y = pair_of(guarded(lambda: data[row], f"row {row} of {name}"), columns, where)
    return arrange(as_array(x, where)[None], where, layout)[0], as_array(
        y, f"{where}, its label"
    ).reshape(-1)[0]


def _read_items(
    data: Any, name: str, layout: Layout, columns: Names | None, rows: Ints
) -> list[Array]:
    return [_item(data, int(row), name, layout, columns)[0] for row in rows]


def pair_of(item: Any, columns: Names | None, where: str) -> tuple[Any, Any]:
    """(input, label) of an item that is a pair, or a dictionary with the two columns; None for a column that is not there.

    Args:
        item: the pair or the dictionary.
        columns: the names of the two; None: the usual ones.
        where: what messages call it.

    >>> pair_of({"idx": 3, "image": "x", "label": 7}, None, "row 0")
    ('x', 7)
    """
    if isinstance(item, Mapping):
        image, label = find_columns(list(item), columns, where)
        return item[image], item.get(label)
    with explained(f"{where} is not a pair (input, label)"):
        x, y = item
    return x, y


def find_columns(names: Sequence[str], columns: Names | None, where: str) -> tuple[str, str | None]:
    """The columns of inputs and labels: the given ones, else those with the usual names; None if there are no labels.

    Args:
        names: the columns that there are.
        columns: the names of the two; an empty second name: no labels.
        where: what messages call the data.
    """
    usual = (IMAGES, LABELS) if columns is None else tuple((name,) for name in columns)
    image, label = (next((name for name in some if name in names), None) for some in usual)
    missing = columns is not None and columns[1] != "" and label is None
    if image is None or missing or len(set(names)) < len(names):
        raise InputError(
            f"{where} has the columns {', '.join(names)[:200]}: name two of them, columns=(image, label)"
        )
    return image, label
