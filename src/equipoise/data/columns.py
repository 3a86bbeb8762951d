"""Arrow columns to inputs and labels: which column is which, and what a cell may hold."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from equipoise.core import InputError
from equipoise.data.dataset import Dataset
from equipoise.data.pictures import Pictures, stack
from equipoise.data.reading import optional
from equipoise.data.sources import Ints, Layout, channels_first, default_scale, require_dtype

#: what the columns of inputs and labels are usually called
IMAGES = ("image", "img", "images", "pixel_values", "pixels", "x")
LABELS = ("label", "labels", "fine_label", "target", "targets", "class", "y")
_KEPT = 4


class Columns(NamedTuple):
    """The names of the two columns (None: there are no labels), and the class names if the file tells."""

    image: str
    label: str | None
    classes: tuple[str, ...] | None


def find_columns(schema: Any, features: Any, asked: tuple[str, str] | None, where: str) -> Columns:
    """The columns asked for; else those of the features Image and ClassLabel; else the usual names.

    There are no labels where the second name asked for is empty, or where no other column could hold them.
    """
    names, features = list(schema.names), features if isinstance(features, dict) else {}
    kinds = {n: f.get("_type") for n, f in features.items() if isinstance(f, dict) and n in names}
    found: list[str] = []
    for position, (kind, usual) in enumerate((("Image", IMAGES), ("ClassLabel", LABELS))):
        if asked is not None:
            candidates = [asked[position]] if asked[position] in names else []
        else:
            typed = [name for name, its in kinds.items() if its == kind]
            candidates = [name for name in usual if name in (typed or names)] or (typed if len(typed) == 1 else [])
        if not candidates and position == 1 and _unlabelled(schema, asked, found[0]):
            return Columns(found[0], None, None)
        if not candidates:
            raise InputError(f"{where} has the columns {', '.join(names)}: name the two to use, columns=(image, label)")
        found.append(candidates[0])
    classes = features.get(found[1], {}).get("names") if isinstance(features.get(found[1]), dict) else None
    fine = isinstance(classes, list) and all(isinstance(name, str) for name in classes) and len(classes) > 0
    return Columns(found[0], found[1], tuple(classes) if fine and classes is not None else None)


def _unlabelled(schema: Any, asked: tuple[str, str] | None, image: str) -> bool:
    """Whether nothing but the inputs was asked for, or no other column holds integers."""
    if asked is not None:
        return asked[1] == ""
    types = optional("pyarrow", "pyarrow", "Arrow data").types
    return not any(types.is_integer(schema.field(name).type) for name in schema.names if name != image)


def features_of(schema: Any) -> Any:
    """The Hugging Face features noted in an Arrow schema, or None."""
    try:
        noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    except (ValueError, RecursionError):
        return None
    info = noted.get("info") if isinstance(noted, dict) else None
    return info.get("features") if isinstance(info, dict) else None


class Blocks(Protocol):
    """The inputs' column in pieces: block i holds rows `starts[i] … starts[i+1] − 1`."""

    @property
    def starts(self) -> Ints:
        """First row of each block, and at the end the number of rows."""

    def block(self, index: int) -> Any:
        """The Arrow array of one piece."""


@dataclass(frozen=True, eq=False)
class ColumnSource:
    """Inputs from an Arrow column, block by block; the last few blocks are kept."""

    blocks: Blocks
    name: str
    pictures: Pictures
    layout: Layout
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kept: OrderedDict[int, Any] = field(default_factory=OrderedDict, repr=False)

    @property
    def scale(self) -> float:
        """255 for bytes and pictures."""
        return default_scale(self.dtype)

    def __len__(self) -> int:
        return int(self.blocks.starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept": OrderedDict()}

    def read(self, rows: Ints) -> NDArray[Any]:
        """The inputs of these rows; each block is opened once."""
        starts = self.blocks.starts
        home = np.searchsorted(starts, rows, side="right") - 1
        found = np.empty((len(rows), *self.shape), self.dtype)
        for index in np.unique(home):
            here = np.flatnonzero(home == index)
            cells = self._block(int(index)).take(
                optional("pyarrow", "pyarrow", "Arrow").array(rows[here] - starts[index])
            )
            values = cell_values(cells, rows[here], self.name, self.pictures, self.layout, self.shape)
            if values.shape[1:] != self.shape or values.dtype != self.dtype:
                raise InputError(
                    f"{self.name}: rows {rows[here][0]} … {rows[here][-1]} are {values.dtype} of shape {values.shape[1:]}, "
                    f"the first row is {self.dtype} of shape {self.shape}"
                )
            found[here] = values
        return found

    def _block(self, index: int) -> Any:
        if index not in self.kept:
            self.kept[index] = self.blocks.block(index)
            if len(self.kept) > _KEPT:
                self.kept.popitem(last=False)
        self.kept.move_to_end(index)
        return self.kept[index]


def column_dataset(
    blocks: Blocks, labels: Any, columns: Columns, name: str, *, size: tuple[int, int] | None, layout: Layout,
    num_classes: int | None,
) -> Dataset:  # fmt: skip
    """A dataset over an Arrow column of inputs; shape and type are those of the first row. `labels=None`: there are none."""
    numbers = None if labels is None else _label_numbers(labels, columns, name)
    count = int(blocks.starts[-1])
    if count == 0 or (numbers is not None and len(numbers) != count):
        raise InputError(f"{name} holds {count} inputs and {0 if numbers is None else len(numbers)} labels")
    rules = Pictures(size=size)
    first = blocks.block(0).slice(0, 1)
    cell = cell_values(first, np.zeros(1, np.int64), name, rules, layout, None)
    if is_picture(first.type):
        rules = rules.like(cell[0])
    source = ColumnSource(blocks, name, rules, layout, cell.shape[1:], cell.dtype)
    return Dataset.from_source(source, numbers, name=name, num_classes=num_classes, classes=columns.classes)


def _label_numbers(labels: Any, columns: Columns, name: str) -> NDArray[Any]:
    if labels.null_count:
        row = int(np.argmax(labels.is_null().to_numpy(False)))
        raise InputError(f"{name}: row {row} has no label")
    if not optional("pyarrow", "pyarrow", "Arrow data").types.is_integer(labels.type):
        raise InputError(f"{name}: the column {columns.label!r} holds {labels.type}, expected integer labels")
    found: NDArray[Any] = labels.to_numpy()
    return found


def is_picture(kind: Any) -> bool:
    """Whether cells of this Arrow type hold an encoded picture: bytes, or Hugging Face's struct of bytes and path."""
    types = optional("pyarrow", "pyarrow", "Arrow data").types
    if types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _is_binary(kind.field(place).type)
    return _is_binary(kind)


def _is_binary(kind: Any) -> bool:
    types = optional("pyarrow", "pyarrow", "Arrow data").types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def cell_values(
    cells: Any, rows: Ints, name: str, pictures: Pictures, layout: Layout, shape: tuple[int, ...] | None
) -> NDArray[Any]:
    """Cells as (B, C, H, W) or (B, features): pictures are decoded, lists must have equal lengths."""
    if not is_picture(cells.type):
        return _numbers(cells, rows, name, layout)
    # a path inside a cell is never opened: only the bytes count
    compute = optional("pyarrow.compute", "pyarrow", "Arrow data")
    data = compute.struct_field(cells, "bytes") if cells.type.num_fields else cells
    names = [f"{name}: row {row}" for row in rows]
    found = []
    for cell, where in zip(data.to_pylist(), names, strict=True):
        if cell is None:
            raise InputError(
                f"{where} holds no bytes of a picture (only a path?): save the data with embedded pictures"
            )
        found.append(pictures.decode(cell, where))
    return stack(found, shape or found[0].shape, names)


def _numbers(cells: Any, rows: Ints, name: str, layout: Layout) -> NDArray[Any]:
    """Nested lists of numbers as one array; the layout rule of arrays applies to three levels."""
    pa, compute = optional("pyarrow", "pyarrow", "Arrow"), optional("pyarrow.compute", "pyarrow", "Arrow")
    lengths: list[int] = []
    level = cells.storage if isinstance(cells, pa.ExtensionArray) else cells
    per_row = 1
    while _is_list(level.type):
        if level.null_count:
            raise InputError(f"{name}: row {rows[int(np.argmax(level.is_null().to_numpy(False))) // per_row]} is empty")
        counts = compute.list_value_length(level).to_numpy(zero_copy_only=False)
        if len(counts) == 0 or counts[0] == 0 or bool((counts != counts[0]).any()):
            row = rows[int(np.argmax(counts != counts[0])) // per_row] if len(counts) else rows[0]
            raise InputError(f"{name}: row {row} has lists of another length than the rows before it, or empty ones")
        lengths.append(int(counts[0]))
        per_row *= lengths[-1]
        level = level.flatten()
    if not lengths or len(lengths) > 3 or not (pa.types.is_integer(level.type) or pa.types.is_floating(level.type)):
        raise InputError(f"{name} holds inputs of type {cells.type}, expected pictures or lists of bytes or floats")
    if level.null_count:
        raise InputError(f"{name}: row {rows[int(np.argmax(level.is_null().to_numpy(False))) // per_row]} has a gap")
    values = level.to_numpy(zero_copy_only=False).reshape(len(rows), *lengths)
    dtype = require_dtype(values.dtype, name)
    if len(lengths) == 2:
        values = values[:, None]
    elif len(lengths) == 3 and not channels_first(lengths, dtype, layout, name):
        values = values.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(values, dtype=dtype)


def _is_list(kind: Any) -> bool:
    types = optional("pyarrow", "pyarrow", "Arrow data").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
