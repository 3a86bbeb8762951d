"""Bytes from files that may lie about their size: read what was promised, in pieces, and notice when it is not there."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import IO, Any

from equipoise.core import files
from equipoise.core.errors import InputError
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
