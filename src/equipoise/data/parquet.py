"""Parquet files: labels at once, inputs one row group at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core.errors import InputError, one_line
from equipoise.core.files import open_regular
from equipoise.data.columns import column_dataset, features_of, find_columns
from equipoise.data.dataset import Dataset
from equipoise.data.pictures import as_size
from equipoise.data.reading import choose_split, name_of, optional
from equipoise.data.sources import MAX_BYTES, Ints, Layout, largest_label

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
