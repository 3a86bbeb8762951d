"""Data in files: NumPy archives, pictures through pillow, Parquet and Arrow tables through pyarrow.

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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from equipoise.core.errors import InputError, one_line
from equipoise.core.files import open_regular
from equipoise.data.dataset import Dataset
from equipoise.data.sources import (
    Ints,
    Layout,
    Options,
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
    options: Options = Options(),  # noqa: B008 - it is frozen
    *,
    name: str | None = None,
    scale: float | None = None,
) -> Dataset:
    """Arrays `x_SPLIT`, `y_SPLIT` (or `x`, `y`; `images`, `labels`) of a .npz; the classes are those of all its splits.

    Args:
        path: the file, or an open one.
        split: which arrays.
        options: layout, num_classes and max_bytes of them.
        name: of the dataset.
        scale: the number that stands for 1.
    """
    name = name or (path.name if isinstance(path, Path) else "the archive")
    try:
        with zipfile.ZipFile(open_regular(path) if isinstance(path, Path) else path) as archive:
            pairs = _pairs([entry.removesuffix(".npy") for entry in archive.namelist()])
            if not pairs:
                raise InputError(f"{name} has no arrays x_train and y_train, x_test and y_test, x and y, or x alone")
            chosen = choose_split(split, list(pairs), name)
            labels = {
                part: _array(archive, y, name, options.max_bytes) for part, (_, y) in pairs.items() if y is not None
            }
            inputs = _array(archive, pairs[chosen][0], name, options.max_bytes)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{name} is not a readable .npz: {one_line(error)}") from error

    source = array_source(inputs, f"{name} ({pairs[chosen][0]})", options.layout, scale)
    classes = largest_label(labels.values()) if options.num_classes is None else options.num_classes
    return Dataset.from_source(source, labels.get(chosen), name=name, num_classes=classes)


def _pairs(keys: list[str]) -> dict[str, tuple[str, str | None]]:
    """Split → (key of the inputs, key of the labels); arrays without a split's name are the split "all"."""

    def named(usual: tuple[str, ...]) -> dict[str, str]:
        return {key.partition("_")[2] or "all": key for key in keys if key.partition("_")[0] in usual}

    inputs, labels = named(("inputs", "data", *IMAGES)), named(LABELS)
    if not labels:
        return {part: (key, None) for part, key in inputs.items()}
    return {part: (key, labels[part]) for part, key in inputs.items() if part in labels}


def _array(archive: zipfile.ZipFile, key: str, name: str, max_bytes: int) -> NDArray[Any]:
    """One array, after the size its header declares was checked against the cap."""
    entry = f"{key}.npy" if f"{key}.npy" in archive.namelist() else key
    try:
        with archive.open(entry) as file:
            first = npy.read_magic(file) == (1, 0)
            read_header = npy.read_array_header_1_0 if first else npy.read_array_header_2_0
            shape, fortran, dtype = read_header(file)
            if dtype.hasobject:
                raise InputError(f"{name}: {key} holds Python objects (a pickle), which are never loaded")
            if any(d < 0 for d in shape):
                raise InputError(f"{name}: {key} declares the shape {shape}")
            size = math.prod(shape) * dtype.itemsize
            if size > max_bytes:
                raise InputError(f"{name}: {key} declares {size:,} bytes, the cap is {max_bytes:,} (max_bytes=)")
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


def decode_picture(
    data: bytes | Path, where: str, size: tuple[int, int] | None = None, shape: tuple[int, ...] | None = None
) -> NDArray[np.uint8]:
    """One picture as bytes (C, H, W); a rotation noted in EXIF is not applied.

    Args:
        data: its bytes, or its file.
        where: what error messages call it.
        size: (height, width) to resize and crop to; None: as the picture is.
        shape: of the first picture, which all others must have; grey joins colour without loss, not the other way.
    """
    pil = optional("PIL.Image", "pillow")
    try:
        with pil.open(data if isinstance(data, Path) else io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise InputError(f"{where} declares {width}×{height} pixels, more than {MAX_PIXELS:,}: not decoded")
            picture = _eight_bit(picture, where, None if shape is None else shape[0])
            if size is not None:
                picture = optional("PIL.ImageOps", "pillow").fit(picture, size[::-1], method=pil.Resampling.BILINEAR)
            pixels = np.asarray(picture, dtype=np.uint8)
    except InputError:
        raise
    except Exception as error:  # pillow has many ways to fail on a damaged file
        raise InputError(f"{where} cannot be decoded as {', '.join(FORMATS)}: {one_line(error)[:160]}") from error

    pixels = pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
    if shape is not None and pixels.shape != shape:
        raise InputError(
            f"{where} has shape {pixels.shape}, the first picture {shape}: say size= to resize and crop them all"
        )
    return pixels


def _eight_bit(picture: Any, where: str, channels: int | None) -> Any:
    """The picture in 8-bit grey or colour; transparency and deeper pixels are refused."""
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        if picture.getchannel("A").getextrema() != (255, 255):
            raise InputError(f"{where} is partly transparent: put it on a background first")
    if picture.mode.startswith(("I", "F")):
        raise InputError(f"{where} has the mode {picture.mode} (16 bit or floats?), expected 8-bit grey or colour")

    grey = picture.mode in ("L", "1")
    if channels == 1 and not grey:
        raise InputError(f"{where} is in colour, but the first picture is grey: convert them all to one of the two")
    return picture.convert("L" if grey and channels != 3 else "RGB")


def _decoded(
    files: list[Path], root: Path, size: tuple[int, int] | None, shape: tuple[int, ...] | None, rows: Ints
) -> NDArray[np.uint8]:
    return np.stack([decode_picture(files[row], str(files[row].relative_to(root)), size, shape) for row in rows])


def load_folder(root: Path, split: str | None, options: Options) -> Dataset:
    """Pictures by class: `root/class/…` or `root/split/class/…`, labels in the order of the sorted class names.

    Args:
        root: the folder; pictures that lie in it, with no folder beside them, have no labels.
        split: the folder of classes.
        options: num_classes; and size, which each picture is resized to cover and cropped to in the middle.
    """
    loose = [] if _folders(root) else _pictures(root)
    parts = {"all": {"": loose}} if loose else _splits(root)
    chosen = parts[choose_split(split, list(parts), str(root))]
    files = [path for name in sorted(chosen) for path in chosen[name]]
    labels = [label for label, name in enumerate(sorted(chosen)) for _ in chosen[name]]

    shape = _decoded(files, root, options.crop, None, np.zeros(1, np.int64)).shape[1:]
    read = functools.partial(_decoded, files, root, options.crop, shape)
    source = Source(len(files), shape, np.dtype(np.uint8), 255.0, read)
    return Dataset.from_source(
        source,
        None if loose else np.array(labels),
        name=_name_of(root),
        num_classes=options.num_classes,
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
            f"{root} is a folder of no known kind: expected .parquet files, Arrow files data-*.arrow, or pictures in "
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

_SHARD = re.compile(r"^(?P<split>[A-Za-z_]\w*?)(-\d+-of-(?P<count>\d+).*)?$")
_USUAL = ("train", "test", "validation", "valid", "val", "dev")
#: the end of an Arrow stream; without it, a stream cut between two batches would look whole
_END = b"\xff\xff\xff\xff\0\0\0\0"


def _pyarrow() -> Any:
    for reader in ("pyarrow.ipc", "pyarrow.parquet"):
        optional(reader, "pyarrow")
    return optional("pyarrow", "pyarrow")


def find_tables(folder: Path) -> dict[str, list[Path]]:
    """Split → files: `test-00000-of-00002.parquet` in the folder or in `data/`, or any table in a folder `test/`.

    Tables are Parquet files, and the Arrow files `data-*.arrow` that Hugging Face's `save_to_disk` writes.
    """
    found: dict[str, list[Path]] = {}
    for pattern in ("*.parquet", "*/*.parquet", "data-*.arrow", "*/data-*.arrow"):
        for path in sorted(folder.glob(pattern)):
            nested = path.parent != folder and path.parent.name != "data"
            found.setdefault(path.parent.name if nested else _split_of(path), []).append(path)
    return found


def _split_of(path: Path) -> str:
    match = _SHARD.match(path.stem)
    if match is None or match["split"] == "data":
        return "all"
    return match["split"] if match["split"] in _USUAL or match["count"] else "all"


def load_tables(path: Path, split: str | None, options: Options) -> Dataset:
    """A table or a folder of them: a column of pictures (bytes, or Hugging Face's struct) or lists, and one of labels.

    Args:
        path: the file or the folder.
        split: which files.
        options: all of them have a meaning here.
    """
    parts = find_tables(path) if path.is_dir() else {_split_of(path): [path]}
    files = parts[choose_split(split, list(parts), str(path))]
    for file in files if path.is_dir() else ():
        match = _SHARD.match(file.stem)
        if match and match["count"] and int(match["count"]) != len(files):
            raise InputError(f"{path}: {file.name} is one of {int(match['count'])} files, but there are {len(files)}")

    tables = [_read_table(file, options) for file in files]
    columns, first = tables[0]
    for file, (other, table) in zip(files, tables, strict=True):
        if other != columns or not table.schema.equals(first.schema):
            raise InputError(f"{file.name} has other columns or classes than {files[0].name}")

    num_classes = options.num_classes
    if num_classes is None and columns.classes is None and columns.label is not None:  # a part may lack the last class
        others = [file for part in parts.values() for file in part if file not in files]
        whole = [table for _, table in tables] + [_read_table(file, options, labels_only=True)[1] for file in others]
        num_classes = largest_label([_integers(table, columns.label) for table in whole])
    return _table_dataset([table for _, table in tables], columns, _name_of(path), options, num_classes)


def _read_table(path: Path, options: Options, labels_only: bool = False) -> tuple[Columns, Any]:
    """The columns of a file and the table of them; its offsets and lengths are verified, a file may lie about them."""
    pa = _pyarrow()
    try:
        with open_regular(path) as plain:
            if path.suffix == ".arrow":
                whole = _stream(path, plain)
                columns = find_columns(whole.schema, options.columns, path.name)
                table = whole.select(columns.names)
            else:
                file = pa.parquet.ParquetFile(plain)
                _require_small(file.metadata, path, options.max_bytes)
                columns = find_columns(file.schema_arrow, options.columns, path.name)
                table = file.read(columns=columns.names[labels_only:])
        table = table.replace_schema_metadata()
        table.validate(full=True)
    except InputError:
        raise
    except (OSError, pa.ArrowException, ValueError, LookupError, MemoryError) as error:
        raise InputError(f"{path.name} is not a readable Parquet or Arrow file: {one_line(error)}") from error
    return columns, table


def _require_small(metadata: Any, path: Path, max_bytes: int) -> None:
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    declared = sum(max(group.total_byte_size, 8 * group.num_rows) for group in groups)
    if declared > max_bytes:
        raise InputError(f"{path.name} declares {declared:,} bytes, the cap is {max_bytes:,} (max_bytes=)")


def _stream(path: Path, plain: IO[bytes]) -> Any:
    """The table of an Arrow stream, memory-mapped."""
    pa = _pyarrow()
    plain.seek(max(0, path.stat().st_size - len(_END)))
    if plain.read() != _END:
        raise InputError(f"{path.name} is cut short: the mark at the end of an Arrow stream is missing")
    return pa.ipc.open_stream(pa.memory_map(str(path), "r")).read_all()


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


def find_columns(schema: Any, asked: tuple[str, str] | None, where: str) -> Columns:
    """The columns asked for; else those of the features Image and ClassLabel; else the usual names.

    Args:
        schema: the Arrow schema, in which Hugging Face notes the features.
        asked: what the user says; an empty second name: there are no labels.
        where: what error messages call the data.
    """
    names = list(schema.names)
    if len(set(names)) < len(names):
        raise InputError(f"{where} has two columns of one name: {', '.join(names)}")
    features = _noted_features(schema)
    kinds = {name: feature.get("_type") for name, feature in features.items() if isinstance(feature, dict)}

    def find(place: int, kind: str, usual: tuple[str, ...]) -> str | None:
        if asked is not None:
            return asked[place] if asked[place] in names else None
        typed = [name for name in names if kinds.get(name) == kind]
        known = [name for name in usual if name in (typed or names)]
        return known[0] if known else typed[0] if len(typed) == 1 else None

    image, label = find(0, "Image", IMAGES), find(1, "ClassLabel", LABELS)
    types = _pyarrow().types
    others = [name for name in names if name != image and types.is_integer(schema.field(name).type)]
    unlabelled = asked[1] == "" if asked is not None else not others
    if image is None or (label is None and not unlabelled):
        raise InputError(f"{where} has the columns {', '.join(names)}: name the two to use, columns=(image, label)")
    feature = features.get(label or "")
    classes = feature.get("names") if isinstance(feature, dict) else None
    fine = isinstance(classes, list) and classes and all(isinstance(name, str) for name in classes)
    return Columns(image, label, tuple(classes) if fine and classes else None)


def _noted_features(schema: Any) -> dict[str, Any]:
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def _integers(table: Any, name: str) -> NDArray[Any]:
    types = _pyarrow().types
    if name not in table.schema.names or not types.is_integer(table.schema.field(name).type):
        return np.array([])
    return table.column(name).drop_null().to_numpy()


def _table_dataset(
    tables: list[Any], columns: Columns, name: str, options: Options, num_classes: int | None
) -> Dataset:
    """A dataset over tables of equal columns; the inputs stay encoded in memory, or in the mapped file, until they are read."""
    pa = _pyarrow()
    whole = pa.concat_tables(tables)
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
    first = _cells(cells, name, options.crop, None, options.layout, np.zeros(1, np.int64))
    read = functools.partial(_cells, cells, name, options.crop, first.shape[1:], options.layout)
    source = Source(len(cells), first.shape[1:], first.dtype, default_scale(first.dtype), read)
    return Dataset.from_source(source, labels, name=name, num_classes=num_classes, classes=columns.classes)


def _is_picture(kind: Any) -> bool:
    """Whether cells of this Arrow type hold an encoded picture: bytes, or Hugging Face's struct of bytes and path."""
    types = _pyarrow().types
    if types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _is_picture(kind.field(place).type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _cells(
    column: Any,
    name: str,
    size: tuple[int, int] | None,
    shape: tuple[int, ...] | None,
    layout: Layout,
    rows: Ints,
) -> NDArray[Any]:
    """Cells as (B, C, H, W) or (B, features): pictures are decoded, lists of numbers must have equal lengths."""
    values = column.take(_pyarrow().array(rows)).to_pylist()
    if _is_picture(column.type):
        found = []
        for row, cell in zip(rows, values, strict=True):
            data = cell.get("bytes") if isinstance(cell, dict) else cell  # a path inside a cell is never opened
            if data is None:
                raise InputError(
                    f"{name}: row {row} holds no bytes of a picture (only a path?): save the data with embedded pictures"
                )
            found.append(decode_picture(data, f"{name}: row {row}", size, shape))
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
    types = _pyarrow().types
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner = inner.value_type
    if inner is kind or not (types.is_integer(inner) or types.is_floating(inner)):
        raise InputError(f"{name} holds inputs of type {kind}, expected pictures or lists of bytes or floats")
    return np.dtype(inner.to_pandas_dtype())
