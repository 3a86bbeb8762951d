"""Data in files: NumPy archives, pictures through pillow, Parquet and saved Hugging Face datasets through pyarrow.

Nothing in a file is executed: no pickles, no paths inside of cells, no extension types. Sizes that a file declares are held
against a cap before memory is taken.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import math
import os
import re
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from equipoise.core.errors import InputError, one_line
from equipoise.core.files import open_regular, read_json
from equipoise.data.dataset import Dataset
from equipoise.data.sources import (
    MAX_BYTES,
    Ints,
    Layout,
    Source,
    array_source,
    channels_ahead,
    default_scale,
    largest_label,
)

#: what the columns of inputs and labels are usually called
IMAGES = ("image", "img", "images", "pixel_values", "pixels", "x")
LABELS = ("label", "labels", "fine_label", "target", "targets", "class", "y")


def choose_split(split: str | None, available: Sequence[str], name: str) -> str:
    """The split asked for; without one, `test` if there is one, else the only one.

    >>> choose_split(None, ["train", "test"], "digits")
    'test'
    """
    if split is None:
        if "test" in available:
            return "test"
        if len(available) == 1:
            return available[0]
        raise InputError(f"{name} has the splits {', '.join(available)}: say which one")
    if split not in available and list(available) == ["all"]:
        raise InputError(f"{name} is not divided into splits, so there is no {split!r}: leave the split out")
    if split not in available:
        raise InputError(f"{name} has no split {split!r}; it has {', '.join(available)}")
    return split


def optional(module: str, package: str) -> Any:
    """An optional package, imported when it is needed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"reading this data needs {package}: pip install 'equipoise[data]'") from error


def data_file(name: str) -> Path:
    """A file of the folder that `EQUIPOISE_DATA` names; one sentence where it is not there."""
    folder = os.environ.get("EQUIPOISE_DATA")
    if not folder:
        raise InputError(f"{name} is not bundled: set EQUIPOISE_DATA to the folder that holds it")
    path = Path(folder) / name
    if not path.exists():
        raise InputError(f"{name} is not in the folder EQUIPOISE_DATA names, {folder}")
    return path


def _name_of(path: Path) -> str:
    """The last part of a path, also of `.` and `..`."""
    return path.name if path.name not in ("", "..") else path.resolve().name


# ---- NumPy archives ---------------------------------------------------------------------------------------------------

_BAD_HEADER = (ValueError, SyntaxError, TypeError, KeyError, tokenize.TokenError, RecursionError, MemoryError)


def load_archive(
    path: Path | IO[bytes],
    split: str | None = None,
    *,
    name: str | None = None,
    num_classes: int | None = None,
    layout: Layout = "auto",
    scale: float | None = None,
    max_bytes: int = MAX_BYTES,
) -> Dataset:
    """Arrays `x_SPLIT`, `y_SPLIT` (or `x`, `y`; `images`, `labels`) of a .npz; the classes are those of all its splits.

    Args:
        path: the file, or an open one.
        split: which arrays.
        name: of the dataset.
        num_classes: checked against the labels.
        layout: of images.
        scale: the number that stands for 1.
        max_bytes: an array declared larger is refused.
    """
    name = name or (path.name if isinstance(path, Path) else "the archive")
    try:
        with zipfile.ZipFile(open_regular(path) if isinstance(path, Path) else path) as archive:
            pairs = _pairs([entry.removesuffix(".npy") for entry in archive.namelist()])
            if not pairs:
                raise InputError(f"{name} has no arrays x_train and y_train, x_test and y_test, x and y, or x alone")
            chosen = choose_split(split, list(pairs), name)
            labels = {part: _array(archive, y, name, max_bytes) for part, (_, y) in pairs.items() if y is not None}
            inputs = _array(archive, pairs[chosen][0], name, max_bytes)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{name} is not a readable .npz: {one_line(error)}") from error

    source = array_source(inputs, f"{name} ({pairs[chosen][0]})", layout, scale)
    if num_classes is None:
        num_classes = largest_label(labels.values())
    return Dataset.from_source(source, labels.get(chosen), name=name, num_classes=num_classes)


def _pairs(keys: list[str]) -> dict[str, tuple[str, str | None]]:
    """Split → (key of the inputs, key of the labels); arrays without a split's name are the split "all"."""
    inputs = {
        key.partition("_")[2] or "all": key for key in keys if key.partition("_")[0] in ("inputs", "data", *IMAGES)
    }
    labels = {key.partition("_")[2] or "all": key for key in keys if key.partition("_")[0] in LABELS}
    if not labels:
        return {part: (key, None) for part, key in inputs.items()}
    return {part: (key, labels[part]) for part, key in inputs.items() if part in labels}


def _array(archive: zipfile.ZipFile, key: str, name: str, max_bytes: int) -> NDArray[Any]:
    """One array, after its header was checked against the size the archive declares and the cap."""
    entry = f"{key}.npy" if f"{key}.npy" in archive.namelist() else key
    declared = archive.getinfo(entry).file_size
    try:
        with archive.open(entry) as file:
            version = npy.read_magic(file)
            if version not in ((1, 0), (2, 0), (3, 0)):
                raise InputError(f"{name}: {key} is an array of unknown version {version}")
            read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, fortran, dtype = read_header(file)
            if dtype.hasobject:
                raise InputError(f"{name}: {key} holds Python objects (a pickle), which are never loaded")
            if any(d < 0 for d in shape):
                raise InputError(f"{name}: {key} declares the shape {shape}")
            size = math.prod(shape) * dtype.itemsize
            if size > max_bytes:
                raise InputError(f"{name}: {key} declares {size:,} bytes, the cap is {max_bytes:,} (max_bytes=)")
            if declared - file.tell() != size:
                raise InputError(f"{name}: {key} declares shape {shape} of {dtype}, but {declared:,} bytes are stored")
            body = file.read(size)
            if len(body) != size or file.read(1):
                raise InputError(f"{name}: {key} is truncated, or longer than its header declares")
            return np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")
    except InputError:
        raise
    except _BAD_HEADER as error:
        raise InputError(f"{name}: {key} is not a readable array: {one_line(error)}") from error


# ---- pictures ---------------------------------------------------------------------------------------------------------

#: only these readers of pillow are used
FORMATS = ("PNG", "JPEG", "BMP", "PPM", "WEBP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".webp")
#: a picture that declares more pixels is not decoded
MAX_PIXELS = 50_000_000


@dataclass(frozen=True)
class Pictures:
    """How pictures become bytes (C, H, W).

    Attributes:
        channels: 1 or 3; None: as the picture has them.
        size: (height, width) to resize and crop to; None: as the picture is.
        shape: what every picture must have; None: any.
    """

    channels: int | None = None
    size: tuple[int, int] | None = None
    shape: tuple[int, ...] | None = None

    def decode(self, data: bytes | Path, where: str) -> NDArray[np.uint8]:
        """One picture; a rotation noted in EXIF is not applied.

        Args:
            data: its bytes, or its file.
            where: what error messages call it.
        """
        pil = optional("PIL.Image", "pillow")
        try:
            with pil.open(data if isinstance(data, Path) else io.BytesIO(data), formats=FORMATS) as picture:
                width, height = picture.size
                if width * height > MAX_PIXELS:
                    raise InputError(f"{where} declares {width}×{height} pixels, more than {MAX_PIXELS:,}: not decoded")
                pixels = self._array(picture, where)
        except InputError:
            raise
        except Exception as error:  # pillow has many ways to fail on a damaged file
            raise InputError(f"{where} cannot be decoded as {', '.join(FORMATS)}: {one_line(error)[:160]}") from error

        if self.shape is not None and pixels.shape != self.shape:
            raise InputError(
                f"{where} has shape {pixels.shape}, the first picture {self.shape}: say size= to resize and crop them all"
            )
        return pixels

    def _array(self, picture: Any, where: str) -> NDArray[np.uint8]:
        if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            if picture.getchannel("A").getextrema() != (255, 255):
                raise InputError(f"{where} is partly transparent: put it on a background first")
        if picture.mode.startswith(("I", "F")):
            raise InputError(f"{where} has the mode {picture.mode} (16 bit or floats?), expected 8-bit grey or colour")
        grey = picture.mode in ("L", "1")
        if self.channels == 1 and not grey:
            raise InputError(f"{where} is in colour, but the first picture is grey: convert them all to one of the two")
        picture = picture.convert("L" if grey and self.channels != 3 else "RGB")

        if self.size is not None:
            resampling = optional("PIL.Image", "pillow").Resampling.BILINEAR
            picture = optional("PIL.ImageOps", "pillow").fit(picture, self.size[::-1], method=resampling)
        pixels = np.asarray(picture, dtype=np.uint8)
        return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def like(self, first: NDArray[np.uint8]) -> Pictures:
        """These rules, with the shape of the first picture: grey joins colour without loss, not the other way."""
        return replace(self, channels=int(first.shape[0]), shape=first.shape)


def as_size(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """(height, width) from one number or two."""
    if size is None:
        return None
    pair = size if isinstance(size, tuple) else (size, size)
    if len(pair) != 2 or not all(isinstance(s, int) and 1 <= s <= 4096 for s in pair):
        raise InputError(f"size must be one or two whole numbers between 1 and 4096, got {size!r}")
    return pair


def _decoded(files: list[Path], root: Path, rules: Pictures, rows: Ints) -> NDArray[np.uint8]:
    return np.stack([rules.decode(files[row], str(files[row].relative_to(root))) for row in rows])


def load_folder(
    root: Path, split: str | None = None, *, num_classes: int | None = None, size: int | tuple[int, int] | None = None
) -> Dataset:
    """Pictures by class: `root/class/…` or `root/split/class/…`, labels in the order of the sorted class names.

    Args:
        root: the folder; pictures that lie in it, with no folder beside them, have no labels.
        split: the folder of classes.
        num_classes: checked against the labels.
        size: each picture is resized to cover it and cropped in the middle; by default all must have one size.
    """
    loose = [] if _folders(root) else _pictures(root)
    parts = {"all": {"": loose}} if loose else _splits(root)
    chosen = parts[choose_split(split, list(parts), str(root))]
    files = [path for name in sorted(chosen) for path in chosen[name]]
    labels = [label for label, name in enumerate(sorted(chosen)) for _ in chosen[name]]

    rules = Pictures(size=as_size(size))
    rules = rules.like(rules.decode(files[0], str(files[0].relative_to(root))))
    read = functools.partial(_decoded, files, root, rules)
    source = Source(len(files), rules.shape or (), np.dtype(np.uint8), 255.0, read)
    return Dataset.from_source(
        source,
        None if loose else np.array(labels),
        name=_name_of(root),
        num_classes=num_classes,
        classes=None if loose else sorted(chosen),
    )


def _folders(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir() and child.name[0] not in "._")


def _pictures(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.name[0] != "." and p.is_file())


def _splits(root: Path) -> dict[str, dict[str, list[Path]]]:
    """Split → class → files. A folder with pictures in it is a class; one with such folders in it is a split."""
    nested = not any(_pictures(child) for child in _folders(root))
    homes = {child.name: child for child in _folders(root)} if nested else {"all": root}
    parts = {name: {child.name: _pictures(child) for child in _folders(home)} for name, home in homes.items()}
    parts = {name: classes for name, classes in parts.items() if any(classes.values())}
    if not parts:
        raise InputError(
            f"{root} is a folder of no known kind: expected .parquet files, a saved Hugging Face dataset, or pictures in "
            f"class folders ({', '.join(SUFFIXES)})"
        )
    for name, classes in parts.items():
        empty = [kind for kind, files in classes.items() if not files]
        if empty:
            raise InputError(f"{root}: the class {empty[0]!r} has no pictures ({', '.join(SUFFIXES)}) in it")
        differing = sorted(set(classes) ^ set(next(iter(parts.values()))))
        if differing:
            raise InputError(
                f"{root}: the splits {next(iter(parts))!r} and {name!r} differ in the class {differing[0]!r}, so that labels "
                "would not agree; give every split a folder of every class"
            )
    return parts


# ---- Parquet and Arrow ------------------------------------------------------------------------------------------------

_SHARD = re.compile(r"^(?P<split>[A-Za-z_]\w*?)(-\d+-of-\d+.*)?$")
_USUAL = ("train", "test", "validation", "valid", "val", "dev")
#: the end of an Arrow stream; without it, a stream cut between two batches would look whole
_END = b"\xff\xff\xff\xff\0\0\0\0"


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
    path: Path,
    split: str | None = None,
    *,
    num_classes: int | None = None,
    layout: Layout = "auto",
    size: int | tuple[int, int] | None = None,
    columns: tuple[str, str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Dataset:
    """A Parquet file or a folder of them: a column of pictures (bytes, or Hugging Face's struct) or lists, and labels.

    Args:
        path: the file or the folder.
        split: which files.
        num_classes: checked against the labels.
        layout: of lists of numbers.
        size: to which pictures are resized and cropped.
        columns: the names of inputs and labels; an empty second name: there are no labels.
        max_bytes: files that declare more are refused.
    """
    parquet = optional("pyarrow.parquet", "pyarrow")
    parts = find_parquet(path) if path.is_dir() else {_split_of(path): [path]}
    files = parts[choose_split(split, list(parts), str(path))]

    def read(file: Path, names: list[str] | None = None) -> Any:
        with open_regular(file), parquet.ParquetFile(file) as opened:
            groups = [opened.metadata.row_group(i) for i in range(opened.metadata.num_row_groups)]
            declared = sum(max(group.total_byte_size, 8 * group.num_rows) for group in groups)
            if declared > max_bytes:
                raise InputError(f"{file.name} declares {declared:,} bytes, the cap is {max_bytes:,} (max_bytes=)")
            if names is None:
                return opened.schema_arrow
            return opened.read(columns=[name for name in names if name in opened.schema_arrow.names])

    described = [find_columns(_arrow(lambda file=file: read(file), file), None, columns, file.name) for file in files]
    chosen = described[0]
    for file, here in zip(files, described, strict=True):
        if here != chosen:
            raise InputError(f"{file.name} has other columns or classes than {files[0].name}")
    tables = [_arrow(lambda file=file: read(file, chosen.names), file) for file in files]
    if num_classes is None and chosen.classes is None and chosen.label is not None:  # a part may lack the last class
        others = [file for part in parts.values() for file in part if file not in files]
        label = chosen.label
        stored = [_arrow(lambda file=file: read(file, [label]), file) for file in others]
        num_classes = largest_label([_integers(table, chosen.label) for table in (*tables, *stored)])
    return _table_dataset(tables, chosen, _name_of(path), files, as_size(size), layout, num_classes)


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def load_saved(
    folder: Path,
    split: str | None = None,
    *,
    num_classes: int | None = None,
    layout: Layout = "auto",
    size: int | tuple[int, int] | None = None,
    columns: tuple[str, str] | None = None,
) -> Dataset:
    """A Dataset or DatasetDict that Hugging Face's `save_to_disk` wrote, without that package.

    Args:
        folder: the folder.
        split: of a DatasetDict.
        num_classes: checked against the labels.
        layout: of lists of numbers.
        size: to which pictures are resized and cropped.
        columns: the names of inputs and labels.
    """
    name = _name_of(folder)
    if (folder / "dataset_dict.json").is_file():
        splits = _object(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits:
            raise InputError(f"{folder / 'dataset_dict.json'} lists no splits")
        folder = _inside(folder, choose_split(split, [str(part) for part in splits], name), "dataset_dict.json")
        if not (folder / "state.json").is_file():
            raise InputError(f"{name}: the split {folder.name!r} has no state.json")
        state = _object(folder / "state.json")
    else:
        state = _object(folder / "state.json")
        choose_split(split, [str(state.get("_split") or "all")], name)

    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise InputError(
            f"{name} stores a selection of rows apart from the data: save dataset.flatten_indices() instead"
        )
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not listed:
        raise InputError(f"{name}: state.json lists no data files")
    files = [_inside(folder, f.get("filename") if isinstance(f, dict) else None, "state.json") for f in listed]
    info = folder / "dataset_info.json"
    features = _object(info).get("features") if info.is_file() else None

    tables = [_arrow(lambda file=file: _stream(file), file) for file in files]
    chosen = find_columns(tables[0].schema, features, columns, name)
    return _table_dataset(tables, chosen, name, files, as_size(size), layout, num_classes)


def _object(path: Path) -> dict[str, Any]:
    document = read_json(path, 50_000_000)
    if not isinstance(document, dict):
        raise InputError(f"{path} holds a JSON {type(document).__name__}, expected an object")
    return document


def _inside(folder: Path, name: Any, where: str) -> Path:
    """The entry `name` of a folder; a name that leads anywhere else (separators, `..`, links) is refused."""
    fine = isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0:")
    if not fine or (folder / name).resolve().parent != folder.resolve():
        raise InputError(f"{where} names the file {name!r}, which does not lie inside {folder.name!r}: not opened")
    return folder / name


def _stream(path: Path) -> Any:
    """The table of an Arrow stream (or file), memory-mapped."""
    pa, ipc = optional("pyarrow", "pyarrow"), optional("pyarrow.ipc", "pyarrow")
    with open_regular(path) as file:
        random_access = file.read(6) == b"ARROW1"
        file.seek(max(0, path.stat().st_size - len(_END)))
        if not random_access and file.read() != _END:
            raise InputError(f"{path.name} is cut short: the mark at the end of an Arrow stream is missing")
    mapped = pa.memory_map(str(path), "r")
    return (ipc.open_file(mapped) if random_access else ipc.open_stream(mapped)).read_all()


def _arrow(work: Any, path: Path) -> Any:
    """What pyarrow reads; a table's offsets and lengths are verified, since what a file says is not believed."""
    pa = optional("pyarrow", "pyarrow")
    try:
        found = work()
        if isinstance(found, pa.Table):
            found.validate(full=True)
        return found
    except InputError:
        raise
    except (OSError, pa.ArrowException, ValueError, MemoryError) as error:
        raise InputError(f"{path.name} is not a readable Parquet or Arrow file: {one_line(error)}") from error


@dataclass(frozen=True)
class Columns:
    """The names of the two columns (None: there are no labels), and the class names if the file tells."""

    image: str
    label: str | None
    classes: tuple[str, ...] | None

    @property
    def names(self) -> list[str]:
        """Of the columns that are read."""
        return [self.image] if self.label is None else [self.image, self.label]


def find_columns(schema: Any, features: Any, asked: tuple[str, str] | None, where: str) -> Columns:
    """The columns asked for; else those of the features Image and ClassLabel; else the usual names.

    Args:
        schema: the Arrow schema.
        features: Hugging Face's features; None: those noted in the schema.
        asked: what the user says; an empty second name: there are no labels.
        where: what error messages call the data.
    """
    names = list(schema.names)
    features = _noted(schema) if features is None else features
    features = features if isinstance(features, dict) else {}
    kinds = {name: feature.get("_type") for name, feature in features.items() if isinstance(feature, dict)}

    def find(place: int, kind: str, usual: tuple[str, ...]) -> str | None:
        if asked is not None:
            return asked[place] if asked[place] in names else None
        typed = [name for name in names if kinds.get(name) == kind]
        known = [name for name in usual if name in (typed or names)]
        return known[0] if known else typed[0] if len(typed) == 1 else None

    image, label = find(0, "Image", IMAGES), find(1, "ClassLabel", LABELS)
    types = optional("pyarrow", "pyarrow").types
    others = [name for name in names if name != image and types.is_integer(schema.field(name).type)]
    unlabelled = asked[1] == "" if asked is not None else not others
    if image is None or (label is None and not unlabelled):
        raise InputError(f"{where} has the columns {', '.join(names)}: name the two to use, columns=(image, label)")
    feature = features.get(label)
    classes = feature.get("names") if isinstance(feature, dict) else None
    fine = isinstance(classes, list) and classes and all(isinstance(name, str) for name in classes)
    return Columns(image, label, tuple(classes) if fine and classes else None)


def _noted(schema: Any) -> Any:
    """The Hugging Face features noted in an Arrow schema, or None."""
    try:
        info = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]
        return info["features"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def _integers(table: Any, name: str) -> NDArray[Any]:
    types = optional("pyarrow", "pyarrow").types
    if name not in table.schema.names or not types.is_integer(table.schema.field(name).type):
        return np.array([])
    return table.column(name).drop_null().to_numpy()


def _table_dataset(
    tables: list[Any],
    columns: Columns,
    name: str,
    files: list[Path],
    size: tuple[int, int] | None,
    layout: Layout,
    num_classes: int | None,
) -> Dataset:
    """A dataset over tables of equal columns; the inputs stay encoded in memory, or in the mapped file, until they are read."""
    pa = optional("pyarrow", "pyarrow")
    for table, file in zip(tables, files, strict=True):
        types = (
            [table.schema.field(n).type for n in columns.names] if set(columns.names) <= set(table.schema.names) else []
        )
        if types != [tables[0].schema.field(n).type for n in columns.names]:
            raise InputError(f"{file.name} has another schema than {files[0].name}")
    whole = pa.concat_tables([table.select(columns.names).replace_schema_metadata() for table in tables])
    if whole.num_rows == 0:
        raise InputError(f"{name} holds no data")

    labels = None
    if columns.label is not None:
        column = whole.column(columns.label)
        if column.null_count or not pa.types.is_integer(column.type):
            row = int(np.argmax(column.is_null().to_numpy())) if column.null_count else 0
            raise InputError(f"{name}: row {row} has no label, or {column.type} where integer labels are expected")
        labels = column.to_numpy()

    cells = whole.column(columns.image)
    rules = Pictures(size=size)
    first = _cells(cells, name, rules, layout, np.zeros(1, np.int64))
    if _is_picture(cells.type):
        rules = rules.like(first[0])
    read = functools.partial(_cells, cells, name, rules, layout)
    source = Source(len(cells), first.shape[1:], first.dtype, default_scale(first.dtype), read)
    return Dataset.from_source(source, labels, name=name, num_classes=num_classes, classes=columns.classes)


def _is_picture(kind: Any) -> bool:
    """Whether cells of this Arrow type hold an encoded picture: bytes, or Hugging Face's struct of bytes and path."""
    types = optional("pyarrow", "pyarrow").types
    if types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _is_picture(kind.field(place).type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _cells(column: Any, name: str, rules: Pictures, layout: Layout, rows: Ints) -> NDArray[Any]:
    """Cells as (B, C, H, W) or (B, features): pictures are decoded, lists of numbers must have equal lengths."""
    values = column.take(optional("pyarrow", "pyarrow").array(rows)).to_pylist()
    if _is_picture(column.type):
        found = []
        for row, cell in zip(rows, values, strict=True):
            data = cell.get("bytes") if isinstance(cell, dict) else cell  # a path inside a cell is never opened
            if data is None:
                raise InputError(
                    f"{name}: row {row} holds no bytes of a picture (only a path?): save the data with embedded pictures"
                )
            found.append(rules.decode(data, f"{name}: row {row}"))
        return np.stack(found)

    dtype = _number_type(column.type, name)
    try:
        array = np.array(values, dtype=dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(
            f"{name}: rows {rows[0]} … {rows[-1]} have gaps or lists of different lengths: {one_line(error)}"
        ) from error
    return np.ascontiguousarray(channels_ahead(array, name, layout))


def _number_type(kind: Any, name: str) -> np.dtype[Any]:
    """The type of the numbers in nested lists."""
    inner = getattr(kind, "storage_type", kind)
    types = optional("pyarrow", "pyarrow").types
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner = inner.value_type
    if inner is kind or not (types.is_integer(inner) or types.is_floating(inner)):
        raise InputError(f"{name} holds inputs of type {kind}, expected pictures or lists of bytes or floats")
    return np.dtype(inner.to_pandas_dtype())
