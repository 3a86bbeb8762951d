"""What readers of data share (bytes of files that may lie about their size, parts, the user's folder), and NumPy archives."""

import gzip
import importlib
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from equipoise.core import InputError, files
from equipoise.core.errors import one_line
from equipoise.core.files import open_regular
from equipoise.data.dataset import Dataset
from equipoise.data.sources import MAX_BYTES, Layout, array_source, largest_label

_PIECE = 2**20
_LARGEST_JSON = 50_000_000


def read_exactly(file: IO[bytes] | gzip.GzipFile, size: int, where: str, *, last: bool = True) -> bytearray:
    """`size` bytes, allocated as they come; refused if fewer are there, or more where this is the `last` part."""
    body = bytearray()
    while len(body) < size:
        piece = file.read(min(_PIECE, size - len(body)))
        if not piece:
            raise InputError(f"{where} is truncated: it ends after {len(body):,} of {size:,} bytes")
        body += piece
    if last and file.read(1):
        raise InputError(f"{where} is longer than the {size:,} bytes its header declares")
    return body


def open_plain_or_gzip(path: Path) -> IO[bytes] | gzip.GzipFile:
    """The file, decompressed on the fly if its name ends in .gz."""
    file = open_regular(path)
    return gzip.GzipFile(fileobj=file, mode="rb") if path.suffix == ".gz" else file


#: what reading a damaged compressed file raises
DAMAGED = (OSError, EOFError, zlib.error)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of sensible size."""
    found = files.read_json(path, _LARGEST_JSON)
    if not isinstance(found, dict):
        raise InputError(f"{path} holds a JSON {type(found).__name__}, expected an object")
    return found


def inside(folder: Path, name: Any, where: str) -> Path:
    """The entry `name` of a folder; a name that leads anywhere else (separators, `..`, links) is refused."""
    fine = isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0:")
    if not fine or (folder / name).resolve().parent != folder.resolve():
        raise InputError(f"{where} names the file {name!r}, which does not lie inside {folder.name!r}: not opened")
    return folder / name


def name_of(path: Path) -> str:
    """The last part of a path, also of `.` and `..`."""
    return path.name if path.name not in ("", "..") else path.resolve().name


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


def optional(module: str, package: str, purpose: str) -> Any:
    """An optional package, imported when it is needed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{purpose} needs {package}: pip install 'equipoise[data]'") from error


def data_file(name: str) -> Path:
    """A file of the folder that `EQUIPOISE_DATA` names; one sentence where it is not there."""
    folder = os.environ.get("EQUIPOISE_DATA")
    if not folder:
        raise InputError(f"{name} is not bundled: set EQUIPOISE_DATA to the folder that holds it")
    path = Path(folder) / name
    if not path.exists():
        raise InputError(f"{name} is not in the folder EQUIPOISE_DATA names, {folder}")
    return path


_INPUTS, _LABELS = ("x", "images", "inputs", "data"), ("y", "labels", "targets")
#: what NumPy's reader of headers raises for a damaged one
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
    """Arrays `x_SPLIT`, `y_SPLIT` (or `x`, `y`; `images`, `labels`) of a .npz; the classes are those of all its splits."""
    name = name or (path.name if isinstance(path, Path) else "the archive")
    try:
        with zipfile.ZipFile(open_regular(path) if isinstance(path, Path) else path) as archive:
            pairs = _pairs([entry.removesuffix(".npy") for entry in archive.namelist()])
            if not pairs:
                raise InputError(f"{name} has no arrays x_train and y_train, x_test and y_test, x and y, or x alone")
            chosen = choose_split(split, list(pairs), name)
            labels = {part: _read(archive, y, name, max_bytes) for part, (_, y) in pairs.items() if y is not None}
            inputs = _read(archive, pairs[chosen][0], name, max_bytes)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{name} is not a readable .npz: {one_line(error)}") from error
    source = array_source(inputs, f"{name} ({pairs[chosen][0]})", layout, scale)
    if num_classes is None:
        num_classes = largest_label(labels.values())
    return Dataset.from_source(source, labels.get(chosen), name=name, num_classes=num_classes)


def _pairs(keys: list[str]) -> dict[str, tuple[str, str | None]]:
    """Split → (key of the inputs, key of the labels); arrays without a split's name are the split "all".

    Where no array of labels is there at all, the inputs have none.
    """
    found: dict[str, tuple[str, str | None]] = {}
    for key in keys:
        stem, _, part = key.partition("_")
        if stem not in _INPUTS:
            continue
        partner = [other for other in keys if other in {y + (f"_{part}" if part else "") for y in _LABELS}]
        if partner:
            found.setdefault(part or "all", (key, partner[0]))
    if not found and not any(key.partition("_")[0] in _LABELS for key in keys):
        return {key.partition("_")[2] or "all": (key, None) for key in keys if key.partition("_")[0] in _INPUTS}
    return found


def _read(archive: zipfile.ZipFile, key: str, name: str, max_bytes: int) -> NDArray[Any]:
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
            body = read_exactly(file, size, f"{name}: {key}")
            return np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")
    except _BAD_HEADER as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name}: {key} is not a readable array: {one_line(error)}") from error
