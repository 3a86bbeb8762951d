"""Datasets that Hugging Face's `save_to_disk` wrote: JSON descriptions and Arrow streams, read without that package."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.errors import InputError, one_line
from equipoise.core.files import open_regular
from equipoise.data.columns import Columns, column_dataset, features_of, find_columns
from equipoise.data.dataset import Dataset
from equipoise.data.pictures import as_size
from equipoise.data.reading import choose_split, inside, name_of, optional, read_json
from equipoise.data.sources import Ints, Layout

#: the end of an Arrow stream; without it, a stream cut between two batches would look whole
_END = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True, eq=False)
class Batches:
    """The record batches of some memory-mapped Arrow files; a copy in another process opens them anew."""

    files: tuple[Path, ...]
    columns: Columns
    starts: Ints
    opened: list[Any] = field(default_factory=list, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": []}

    def block(self, index: int) -> Any:
        """The inputs' column of one batch."""
        if not self.opened:
            self.opened.extend(batch for file in self.files for batch in read_batches(file) if batch.num_rows)
        return checked(self.opened[index].column(self.columns.image), self.columns.image, self.files[0].parent.name)


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def load_saved(
    folder: Path, split: str | None = None, *, num_classes: int | None = None, layout: Layout = "auto",
    size: int | tuple[int, int] | None = None, columns: tuple[str, str] | None = None,
) -> Dataset:  # fmt: skip
    """A saved Dataset or DatasetDict; the label is the column with the feature ClassLabel."""
    optional("pyarrow", "pyarrow", "reading Arrow files")
    name = name_of(folder)
    if (folder / "dataset_dict.json").is_file():
        splits = read_json(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits:
            raise InputError(f"{folder / 'dataset_dict.json'} lists no splits")
        chosen = choose_split(split, [str(part) for part in splits], name)
        folder = inside(folder, chosen, "dataset_dict.json")
        if not (folder / "state.json").is_file():
            raise InputError(f"{name}: the split {chosen!r} has no state.json")
        state = read_json(folder / "state.json")
    else:
        state = read_json(folder / "state.json")
        choose_split(split, [str(state.get("_split") or "all")], name)
    return _load_state(folder, state, name, num_classes, layout, as_size(size), columns)


def _load_state(
    folder: Path, state: dict[str, Any], name: str, num_classes: int | None, layout: Layout,
    size: tuple[int, int] | None, asked: tuple[str, str] | None,
) -> Dataset:  # fmt: skip
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise InputError(
            f"{name} stores a selection of rows apart from the data: save dataset.flatten_indices() instead"
        )
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not listed:
        raise InputError(f"{name}: state.json lists no data files")
    files = [inside(folder, f.get("filename") if isinstance(f, dict) else None, "state.json") for f in listed]
    info = folder / "dataset_info.json"
    features = read_json(info).get("features") if info.is_file() else None
    found: Columns | None = None
    counts, labels, schema = [0], [], None
    for file in files:
        for batch in read_batches(file):
            if found is None:
                schema = batch.schema
                found = find_columns(schema, features or features_of(schema), asked, name)
            elif not batch.schema.equals(schema):
                raise InputError(f"{name}: {file.name} has another schema than {files[0].name}")
            if batch.num_rows:
                counts.append(batch.num_rows)
                labels += [checked(batch.column(found.label), found.label, name)] if found.label is not None else []
    if found is None or len(counts) == 1:
        raise InputError(f"{name} holds no data")
    pa = optional("pyarrow", "pyarrow", "Arrow")
    blocks = Batches(tuple(files), found, np.cumsum(np.array(counts, dtype=np.int64)))
    column = pa.chunked_array(labels).combine_chunks() if labels else None
    return column_dataset(blocks, column, found, name, size=size, layout=layout, num_classes=num_classes)


def read_batches(path: Path) -> list[Any]:
    """The record batches of an Arrow stream (or file), memory-mapped: nothing is copied until it is used."""
    pa, ipc = optional("pyarrow", "pyarrow", "Arrow"), optional("pyarrow.ipc", "pyarrow", "Arrow")
    try:
        with open_regular(path) as file:
            random_access = file.read(6) == b"ARROW1"
            file.seek(max(0, path.stat().st_size - len(_END)))
            ended = file.read() == _END
        if not random_access and not ended:
            raise InputError(f"{path.name} is cut short: the mark at the end of an Arrow stream is missing")
        mapped = pa.memory_map(str(path), "r")
        if random_access:
            reader = ipc.open_file(mapped)
            return [reader.get_batch(i) for i in range(reader.num_record_batches)]
        return list(ipc.open_stream(mapped))
    except InputError:
        raise
    except (OSError, pa.ArrowException, ValueError, MemoryError) as error:
        raise InputError(f"{path.name} is not a readable Arrow file: {one_line(error)}") from error


def checked(column: Any, name: str, where: str) -> Any:
    """A column whose offsets and lengths were verified: what a file says is not believed."""
    pa = optional("pyarrow", "pyarrow", "Arrow")
    try:
        column.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        raise InputError(f"{where}: the column {name!r} is damaged: {one_line(error)}") from error
    return column
