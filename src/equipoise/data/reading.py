"""What readers of data share: bytes of files that may lie about their size, parts, optional packages, the user's folder."""

from __future__ import annotations

import gzip
import importlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from equipoise.core import InputError, files
from equipoise.core.files import open_regular

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
