"""NumPy archives (.npz): plain arrays only, and no more bytes than the header promises."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from equipoise.core.errors import InputError, one_line
from equipoise.core.files import open_regular
from equipoise.data.dataset import Dataset
from equipoise.data.reading import choose_split, read_exactly
from equipoise.data.sources import MAX_BYTES, Layout, array_source, largest_label

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
