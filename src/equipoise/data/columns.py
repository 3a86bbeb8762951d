"""Arrow columns to inputs and labels: which column is which, and what a cell may hold; Parquet files, one row group at a time."""

import json
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from equipoise.core import InputError
from equipoise.core.errors import one_line
from equipoise.core.files import open_regular
from equipoise.data.dataset import Dataset
from equipoise.data.pictures import Pictures, as_size, stack
from equipoise.data.reading import choose_split, name_of, optional
from equipoise.data.sources import MAX_BYTES, Ints, Layout, channels_first, default_scale, largest_label, require_dtype

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


_SHARD = re.compile(r"^(?P<split>[A-Za-z_]\w*?)(-\d+-of-\d+.*)?$")
_USUAL = ("train", "test", "validation", "valid", "val", "dev")


@dataclass(frozen=True, eq=False)
class RowGroups:
    """The row groups of some files, in order; files are opened per call, so that workers can share nothing."""

    groups: tuple[tuple[Path, int], ...]
    starts: Ints
    column: str

    def block(self, index: int) -> Any:
        """The inputs' column of one row group."""
        path, group = self.groups[index]
        return _column(path, self.column, [group])


def find_parquet(folder: Path) -> dict[str, list[Path]]:
    """Split → files: `test-00000-of-00002.parquet` in the folder or in `data/`, or any .parquet in a folder `test/`."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.parquet")) + sorted(folder.glob("*/*.parquet")):
        nested = path.parent != folder and path.parent.name != "data"
        found.setdefault(path.parent.name if nested else _split_of(path), []).append(path)
    return found


def _split_of(path: Path) -> str:
    match = _SHARD.match(path.stem)
    split = match["split"] if match else "all"
    return split if split in _USUAL or (match and match[2]) else "all"


def load_parquet(
    path: Path, split: str | None = None, *, num_classes: int | None = None, layout: Layout = "auto",
    size: int | tuple[int, int] | None = None, columns: tuple[str, str] | None = None, max_bytes: int = MAX_BYTES,
) -> Dataset:  # fmt: skip
    """A Parquet file or a folder of them: a column of pictures (bytes, or Hugging Face's struct) or lists, and labels."""
    pa = optional("pyarrow", "pyarrow", "reading Parquet files")
    parts = find_parquet(path) if path.is_dir() else {_split_of(path): [path]}
    files = parts[choose_split(split, list(parts), str(path))]
    groups: list[tuple[Path, int]] = []
    counts = [0]
    chosen, labels = None, []
    for file in files:
        meta, schema = _metadata(file)
        here = find_columns(schema, features_of(schema), columns, file.name)
        chosen = here if chosen is None else chosen
        if here[:2] != chosen[:2] or here.classes != chosen.classes:
            raise InputError(f"{file.name} has other columns or classes than {files[0].name}")
        for group in range(meta.num_row_groups):
            about = meta.row_group(group)
            if about.total_byte_size > max_bytes or about.num_rows * 8 > max_bytes:
                declared = max(about.total_byte_size, about.num_rows * 8)
                raise InputError(
                    f"{file.name}: row group {group} declares {declared:,} bytes, the cap is {max_bytes:,} (max_bytes=)"
                )
            if about.num_rows:
                groups.append((file, group))
                counts.append(about.num_rows)
        labels += [_column(file, chosen.label, None)] if chosen.label is not None else []
    if not groups or chosen is None:
        raise InputError(f"{path} holds no data")
    blocks = RowGroups(tuple(groups), np.cumsum(np.array(counts, dtype=np.int64)), chosen.image)
    column = pa.chunked_array(labels).combine_chunks() if labels else None
    if num_classes is None and chosen.classes is None and chosen.label is not None:  # a part may lack the last class
        others = [_labels(file, chosen.label) for part in parts.values() for file in part if file not in files]
        num_classes = largest_label([_integers(column), *others])
    return column_dataset(
        blocks, column, chosen, name_of(path), size=as_size(size), layout=layout, num_classes=num_classes
    )  # fmt: skip


def _labels(path: Path, name: str) -> NDArray[Any]:
    """The labels of another split, as far as they are any."""
    return _integers(_column(path, name, None)) if name in _metadata(path)[1].names else np.array([])


def _integers(column: Any) -> NDArray[Any]:
    types = optional("pyarrow", "pyarrow", "Parquet").types
    return column.drop_null().to_numpy(False) if types.is_integer(column.type) else np.array([])


def _metadata(path: Path) -> tuple[Any, Any]:
    pa, pq = optional("pyarrow", "pyarrow", "Parquet"), optional("pyarrow.parquet", "pyarrow", "Parquet")
    try:
        with open_regular(path), pq.ParquetFile(path) as file:
            return file.metadata, file.schema_arrow
    except InputError:
        raise
    except (OSError, pa.ArrowException, ValueError) as error:
        raise InputError(f"{path.name} is not a readable Parquet file: {one_line(error)}") from error


def _column(path: Path, name: str, groups: list[int] | None) -> Any:
    pa, pq = optional("pyarrow", "pyarrow", "Parquet"), optional("pyarrow.parquet", "pyarrow", "Parquet")
    try:
        with pq.ParquetFile(path) as file:
            wanted = list(range(file.num_row_groups)) if groups is None else groups
            column = file.read_row_groups(wanted, columns=[name]).column(name)
        column.validate(full=True)
        return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    except (OSError, pa.ArrowException, ValueError, MemoryError) as error:
        raise InputError(f"{path.name}: the column {name!r} cannot be read: {one_line(error)}") from error
