"""The store of a run: one SQLite file in WAL mode, one transaction per input, keyed by the input's id.

A killed process loses at most the input in flight; a reader may look while a writer writes. Arrays are little-endian and
zlib-compressed, whose checksum finds flipped bits inside a row; `PRAGMA quick_check` finds a damaged file.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core import EquipoiseError, InputError
from equipoise.runs.rows import InputId, Row, Soft
from equipoise.smoothing import SimplexMap

NAME = "store.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS inputs (
  id PRIMARY KEY NOT NULL, position INTEGER NOT NULL, label INTEGER NOT NULL, n0 INTEGER NOT NULL, draws INTEGER NOT NULL,
  selection BLOB, estimation BLOB, map TEXT, buckets BLOB, singles INTEGER, direct INTEGER, moments BLOB,
  stopped TEXT, failure TEXT, key TEXT NOT NULL, seconds REAL NOT NULL);
CREATE TABLE IF NOT EXISTS attacks (
  id NOT NULL, kind TEXT NOT NULL, epsilon REAL NOT NULL, success INTEGER NOT NULL, distance REAL, steps INTEGER NOT NULL,
  restarts INTEGER NOT NULL, seed INTEGER NOT NULL, PRIMARY KEY (id, kind, epsilon, steps, restarts, seed));
CREATE TABLE IF NOT EXISTS sessions (started TEXT NOT NULL, engine TEXT NOT NULL, device TEXT NOT NULL, versions TEXT NOT NULL);
"""
_COLUMNS = (
    "id", "position", "label", "n0", "draws", "selection", "estimation", "map", "buckets", "singles", "direct", "moments",
    "stopped", "failure", "key", "seconds",
)  # fmt: skip
_LARGEST = 1 << 26  # bytes of one array
_INSERT = f"INSERT OR REPLACE INTO inputs ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"


@dataclass(frozen=True)
class AttackRow:
    """One attack on one input: whether some x' with ‖x' − x‖₂ ≤ epsilon was misclassified, and at what distance.

    `kind` is "base" (the plain network) or "smoothed". The key is everything but the outcome, so that repeating an attack
    replaces its row and changing it adds one.
    """

    id: InputId
    kind: str
    epsilon: float
    success: bool
    distance: float | None
    steps: int
    restarts: int
    seed: int


class Store:
    """The SQLite file of a run directory; `writable` creates it, otherwise it is opened read-only.

    `identity` is the digest of the manifest: a store that belongs to another run is refused.
    """

    def __init__(self, folder: str | Path, *, identity: str, writable: bool = False) -> None:
        self.path, self.writable = Path(folder) / NAME, writable
        self._db: sqlite3.Connection | None = None
        if not writable and not self.path.exists():
            return  # a run that was started and killed before its first input
        with self._translated():
            self._db = _connect(self.path, writable)
            self._check(identity, writable)

    def _check(self, identity: str, writable: bool) -> None:
        found = self.db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        if writable:
            with self._transaction():
                for statement in _SCHEMA.split(";"):
                    if statement.strip():
                        self.db.execute(statement)
                self.db.execute("INSERT OR IGNORE INTO meta VALUES ('identity', ?)", (identity,))
        stored = self.meta("identity")
        if stored is not None and stored != identity:
            raise InputError(
                f"{self.path} belongs to another run than the run.json beside it; put the right two together"
            )

    @property
    def db(self) -> sqlite3.Connection:
        """The open connection."""
        if self._db is None:
            raise InputError(f"{self.path} is closed or does not exist")
        return self._db

    def close(self) -> None:
        """Close the file; everything written is kept whether or not this is reached.

        A writer leaves one plain file behind if nobody else is looking, so that it can be copied and read from anywhere.
        """
        if self._db is None:
            return
        if self.writable:
            with suppress(sqlite3.Error):
                self._db.execute("PRAGMA busy_timeout = 0")
                self._db.execute("PRAGMA journal_mode = DELETE")
        self._db.close()
        self._db = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inputs ---------------------------------------------------------------------------------------------------

    def put(self, row: Row) -> None:
        """Store one input, durably against a killed process when this returns."""
        self.put_all([row])

    def put_all(self, rows: Iterable[Row]) -> None:
        """Store several inputs in one transaction: all or none."""
        with self._translated(), self._transaction():
            self.db.executemany(_INSERT, [_encode(row) for row in rows])

    def done(self) -> set[InputId]:
        """Ids of the stored inputs, failed ones included."""
        return {row[0] for row in self._select("SELECT id FROM inputs")}

    def rows(self) -> list[Row]:
        """Every stored input, in the order of the data."""
        found = self._select(f"SELECT {', '.join(_COLUMNS)} FROM inputs ORDER BY position, rowid")
        return [_decode(values, self.path) for values in found]

    def forget_failures(self) -> int:
        """Remove the failed inputs, so that they are tried again; returns how many."""
        with self._translated(), self._transaction():
            return int(self.db.execute("DELETE FROM inputs WHERE failure IS NOT NULL").rowcount)

    # ---- attacks --------------------------------------------------------------------------------------------------

    def put_attacks(self, rows: Iterable[AttackRow]) -> None:
        """Store attack results in one transaction."""
        with self._translated(), self._transaction():
            marks = ", ".join("?" * len(fields(AttackRow)))
            names = ", ".join(f.name for f in fields(AttackRow))
            self.db.executemany(
                f"INSERT OR REPLACE INTO attacks ({names}) VALUES ({marks})", [astuple(row) for row in rows]
            )

    def attacks(self) -> list[AttackRow]:
        """Every stored attack, by kind, epsilon and id."""
        names = ", ".join(f.name for f in fields(AttackRow))
        found = self._select(f"SELECT {names} FROM attacks ORDER BY kind, epsilon, id, steps, restarts, seed")
        return [AttackRow(a, b, c, bool(d), e, f, g, h) for a, b, c, d, e, f, g, h in found]

    # ---- about the run --------------------------------------------------------------------------------------------

    def meta(self, key: str) -> str | None:
        """A remark stored beside the inputs."""
        found = self._select("SELECT value FROM meta WHERE key = ?", (key,))
        return found[0][0] if found else None

    def add_session(self, started: str, engine: str, device: str, versions: dict[str, str]) -> None:
        """Note that some inputs were computed by this engine, device and software."""
        with self._translated(), self._transaction():
            values = (started, engine, device, json.dumps(versions, sort_keys=True))
            self.db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?)", values)

    def sessions(self) -> list[dict[str, Any]]:
        """When and with what the inputs were computed."""
        found = self._select("SELECT started, engine, device, versions FROM sessions ORDER BY rowid")
        return [{"started": a, "engine": b, "device": c, "versions": json.loads(d)} for a, b, c, d in found]

    # ---- plumbing -------------------------------------------------------------------------------------------------

    def _select(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        if self._db is None:
            return []
        with self._translated():
            try:
                return self.db.execute(query, values).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):  # killed between creating the file and its tables
                    return []
                raise

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except EquipoiseError:
            self.close()
            raise
        except sqlite3.Error as error:
            raise InputError(_explain(self.path, error)) from error


def _connect(path: Path, writable: bool) -> sqlite3.Connection:
    if not writable:
        return _connect_reading(path)
    db = sqlite3.connect(path, timeout=30, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing; a power cut the last inputs at most
    except sqlite3.Error:
        db.close()
        raise
    return db


def _connect_reading(path: Path) -> sqlite3.Connection:
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


def _explain(path: Path, error: sqlite3.Error) -> str:
    text = str(error)
    if "full" in text or "disk I/O" in text:
        return f"cannot write {path} ({text}): free some space and run the same command again; what is stored is kept"
    if "readonly" in text or "read-only" in text or "unable to open" in text:
        return f"cannot open {path} for writing ({text}): check the permissions of the folder"
    if "locked" in text or "busy" in text:
        return f"{path} is in use by another process ({text}): wait for it or stop it"
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(
        error, sqlite3.OperationalError | sqlite3.ProgrammingError
    ):
        return f"{path} is damaged ({text}): move it away and run the same command again, or restore it from a copy"
    return f"{path}: {text}"


def _pack(array: NDArray[Any] | None, kind: str) -> bytes | None:
    return None if array is None else zlib.compress(np.ascontiguousarray(array, dtype=kind).tobytes(), 1)


def _unpack(blob: bytes | None, kind: str, as_: type) -> Any:
    if blob is None:
        return None
    reader = zlib.decompressobj()
    content = reader.decompress(blob, _LARGEST)
    if not reader.eof:
        raise ValueError("cut short, or larger than any row we write")
    return np.frombuffer(content, dtype=kind).astype(as_)


def _encode(row: Row) -> tuple[Any, ...]:
    soft = row.soft
    described = None if soft is None else json.dumps([soft.map.name, soft.map.temperature, soft.map.mass])
    buckets = None if soft is None else _pack(soft.order, "<i4")
    moments = None if soft is None else _pack(soft.moments, "<f8")
    return (
        row.id, row.position, row.label, row.n0, row.draws, _pack(row.selection, "<i8"), _pack(row.estimation, "<i8"),
        described, buckets, None if soft is None else soft.singles, None if soft is None else int(soft.direct), moments,
        row.stopped, row.failure, f"{row.key:016x}", row.seconds,
    )  # fmt: skip


def _decode(values: Sequence[Any], path: Path) -> Row:
    v = dict(zip(_COLUMNS, values, strict=True))
    try:
        soft = None
        if v["moments"] is not None:
            moments = _unpack(v["moments"], "<f8", np.float64).reshape(4, -1)
            order = _unpack(v["buckets"], "<i4", np.int64)
            soft = Soft(SimplexMap(*json.loads(v["map"])), order, v["singles"], bool(v["direct"]), moments)
        selection, estimation = (_unpack(v[name], "<i8", np.int64) for name in ("selection", "estimation"))
    except (zlib.error, ValueError, TypeError) as error:
        raise InputError(f"{path} is damaged at input {v['id']!r} ({error}): restore it from a copy") from error
    return Row(
        v["position"], v["id"], v["label"], v["n0"], v["draws"], selection, estimation, soft, v["stopped"], v["failure"],
        int(v["key"], 16), v["seconds"],
    )  # fmt: skip
