"""What is stored of one input: the sufficient statistics of its draws, never a radius; and how the file is opened."""

import sqlite3
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core.errors import one_line
from equipoise.smoothing import SimplexMap
from equipoise.smoothing.moments import Ints
from equipoise.smoothing.ramp import Floats

InputId = int | str
LARGEST = 1 << 26  # bytes of one stored array


@dataclass(frozen=True)
class Item:
    """One input on its way to a worker; `position` is its place in the data, `id` the key of its noise."""

    position: int
    id: InputId
    label: int
    x: Tensor


@dataclass(frozen=True, eq=False)
class Soft:
    """Soft votes of one input under one map: its buckets, drawn up on the selection sample, and their moments.

    `order` and `singles` are the `Partition`, `direct` whether margins are bounded directly; `moments` has the rows shift,
    Σ(Z−shift), Σ(Z−shift)² and Σ(Z₀−shift₀)(Z−shift) per bucket, as `smoothing.Moments`.
    """

    map: SimplexMap
    order: Ints
    singles: int
    direct: bool
    moments: Floats


@dataclass(frozen=True, eq=False)
class Row:
    """The result of one input: counts of selection and estimation votes, soft moments if any, or why it failed.

    `n0` and `draws` are the numbers of draws really made; `stopped` says why an adaptive input stopped. `key` is the first
    noise key (documentation of the seed); `seconds` is wall-clock time, the only column that differs between repetitions.
    """

    position: int
    id: InputId
    label: int
    n0: int = 0
    draws: int = 0
    selection: Ints | None = None
    estimation: Ints | None = None
    soft: Soft | None = None
    stopped: str | None = None
    failure: str | None = None
    key: int = 0
    seconds: float = 0.0


def failed(item: Item, reason: str, key: int = 0, seconds: float = 0.0) -> Row:
    """The row of an input that could not be sampled: it certifies nothing, and says why."""
    return Row(item.position, item.id, item.label, failure=reason, key=key, seconds=seconds)


def counts_matrix(values: list[Ints | None], classes: int) -> Ints:
    """Counts of many rows as one (N, classes) array; rows without counts are zero."""
    result = np.zeros((len(values), classes), dtype=np.int64)
    for i, value in enumerate(values):
        if value is not None:
            result[i] = value
    return result


def pack(array: NDArray[Any] | None, kind: str) -> bytes | None:
    """An array as it is stored: its bytes, compressed."""
    return None if array is None else zlib.compress(np.ascontiguousarray(array, dtype=kind).tobytes(), 1)


def unpack(blob: bytes | None, kind: str, as_: type) -> Any:
    """The inverse; damaged bytes are a ValueError."""
    if blob is None:
        return None
    reader = zlib.decompressobj()
    content = reader.decompress(blob, LARGEST)
    if not reader.eof:
        raise ValueError("cut short, or larger than any row we write")
    return np.frombuffer(content, dtype=kind).astype(as_)


def plain_id(value: Any) -> InputId:
    """A key that survives the store: a Python int or str."""
    return value if isinstance(value, str) else int(value)


def connect(path: Path, writable: bool) -> sqlite3.Connection:
    """For writing, with a log that survives a killed process; or for reading, of folders that cannot be written too."""
    if not writable:
        return _reading(path)
    db = sqlite3.connect(path, timeout=30, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing; a power cut the last inputs at most
    except sqlite3.Error:
        db.close()
        raise
    return db


def _reading(path: Path) -> sqlite3.Connection:
    """Read-only; a WAL file in a folder that cannot be written opens only as immutable, which is right if no log is left."""
    uri = path.resolve().as_uri()
    db = sqlite3.connect(f"{uri}?mode=ro", timeout=30, isolation_level=None, uri=True)
    try:
        db.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.OperationalError:
        db.close()
        log = path.with_name(path.name + "-wal")
        if log.exists() and log.stat().st_size:
            raise
        db = sqlite3.connect(f"{uri}?mode=ro&immutable=1", isolation_level=None, uri=True)
    return db


def explain(path: Path, error: sqlite3.Error) -> str:
    """What went wrong and what to do, in a sentence."""
    text, code = one_line(error), getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return f"cannot write {path} ({text}): free some space and run the same command again; what is stored is kept"
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return f"cannot open {path} for writing ({text}): check the permissions of the folder"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"{path} is in use by another process ({text}): wait for it or stop it"
    return f"{path} is damaged ({text}): move it away and run the same command again, or restore it from a copy"
