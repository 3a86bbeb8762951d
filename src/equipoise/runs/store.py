"""The store of a run: one SQLite file in WAL mode, one transaction per input, keyed by the input's id.

A killed process loses at most the input in flight; a reader may look while a writer writes. Arrays are little-endian and
zlib-compressed. Every row carries a checksum of its columns and of the run it belongs to, the file counts its rows and knows the
digest of `run.json`, so that a flipped bit, an edit or a row from elsewhere is noticed. That is evidence against accidents and
naive edits, not a signature. Files of the first release have none of this and open as far as they make sense.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from equipoise.core import files
from equipoise.core.digests import Digest
from equipoise.core.errors import EquipoiseError, InputError
from equipoise.runs.manifest import Described
from equipoise.runs.rows import InputId, Row, Soft, connect, explain, pack, unpack
from equipoise.smoothing import SimplexMap

NAME = "store.sqlite"
#: a row of the table of inputs
R = TypeVar("R")
_SAMPLED = """
CREATE TABLE IF NOT EXISTS inputs (
  id PRIMARY KEY NOT NULL, position INTEGER NOT NULL, label INTEGER NOT NULL, n0 INTEGER NOT NULL, draws INTEGER NOT NULL,
  selection BLOB, estimation BLOB, map TEXT, buckets BLOB, singles INTEGER, direct INTEGER, moments BLOB,
  stopped TEXT, failure TEXT, key TEXT NOT NULL, seconds REAL NOT NULL, checksum TEXT)
"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS attacks (
  id NOT NULL, kind TEXT NOT NULL, epsilon REAL NOT NULL, success INTEGER NOT NULL, distance REAL, steps INTEGER NOT NULL,
  restarts INTEGER NOT NULL, seed INTEGER NOT NULL, checksum TEXT, PRIMARY KEY (id, kind, epsilon, steps, restarts, seed));
CREATE TABLE IF NOT EXISTS sessions (started TEXT NOT NULL, engine TEXT NOT NULL, device TEXT NOT NULL, versions TEXT NOT NULL,
  checksum TEXT);
"""
_TABLES = ("meta", "inputs", "attacks", "sessions")
_COLUMNS = (
    "id", "position", "label", "n0", "draws", "selection", "estimation", "map", "buckets", "singles", "direct", "moments",
    "stopped", "failure", "key", "seconds",
)  # fmt: skip
_SESSION = ("started", "engine", "device", "versions")


class Attacked(StrEnum):
    """What an attack was on: the network itself, or its smoothed version."""

    BASE = "base"
    SMOOTHED = "smoothed"


@dataclass(frozen=True)
class AttackRow:
    """One attack on one input: whether some x' with ‖x' − x‖₂ ≤ epsilon was misclassified, and at what distance.

    The key is everything but the outcome, so that repeating an attack
    replaces its row and changing it adds one.
    """

    id: InputId
    kind: Attacked
    epsilon: float
    success: bool
    distance: float | None
    steps: int
    restarts: int
    seed: int

    def __post_init__(self) -> None:
        if self.kind not in tuple(Attacked):
            raise InputError(
                f"an attack is on the network ('base') or on its smoothed version ('smoothed'), not {self.kind!r}"
            )
        object.__setattr__(self, "kind", Attacked(self.kind))


def locked(folder: Path) -> AbstractContextManager[None]:
    """Hold the run directory: one process at a time works on it, and a second holder is refused at once."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory")
    busy = f"another process is working on {folder}: wait for it, stop it, or use another run directory"
    return files.locked(folder / "lock", busy)


_ATTACK = tuple(f.name for f in fields(AttackRow))


class Table(Generic[R]):
    """The SQLite file of a run directory; `writable` creates it, otherwise it is opened read-only.

    What is stored of an input is up to a kind of run: `schema` is the statement that makes the table `inputs`, with at least the
    columns id, position, failure and checksum, `columns` are those that are written, `encode` and `decode` turn rows into them
    and back. `identity` is the digest of what must not change, `seal` that of the whole `manifest`: a store that belongs to
    another run, or to another version of its manifest, is refused.
    """

    schema: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]
    #: the file beside the store that says what the run is
    manifest: ClassVar[str] = "run.json"

    def encode(self, row: R) -> tuple[Any, ...]:
        """The values of the columns."""
        raise NotImplementedError

    def decode(self, values: Sequence[Any]) -> R:
        """The inverse; a row that makes no sense is an InputError."""
        raise NotImplementedError

    def __init__(self, folder: str | Path, *, identity: str, seal: str | None = None, writable: bool = False) -> None:
        self.path, self.writable, self.identity = Path(folder) / NAME, writable, identity
        self._db: sqlite3.Connection | None = None
        self.checked = False
        log = self.path.with_name(f"{NAME}-wal")
        self._logged = log.exists() and log.stat().st_size > 0  # a reader may leave an empty one
        if not writable and not self.path.exists():
            return  # a run that was started and killed before its first input
        with self._translated():
            self._db = connect(self.path, writable)
            if self._tables() or writable:  # else killed between creating the file and its tables
                self._check(identity, seal, writable)
            else:
                self.close()

    @classmethod
    def of(cls, folder: str | Path, manifest: Described, *, writable: bool = False) -> Self:
        """The store of the run that a manifest describes."""
        return cls(folder, identity=manifest.digest(), seal=manifest.seal(), writable=writable)

    def _tables(self) -> set[str]:
        return {row[0] for row in self.db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def _check(self, identity: str, seal: str | None, writable: bool) -> None:
        """Refuse a damaged file and one that belongs to another run; make a new one complete."""
        problem = self.db.execute(f"PRAGMA {'integrity_check' if writable else 'quick_check'}(1)").fetchone()[0]
        there = self._tables()
        if problem != "ok" or (there and not there.issuperset(_TABLES)):
            raise sqlite3.DatabaseError(problem if problem != "ok" else "a table is missing")
        if not there:
            self._create(identity, seal)
        self.checked = self.meta("checksums") is not None
        if self.meta("identity") not in (None, identity):
            raise InputError(
                f"{self.path} belongs to another run than the {self.manifest} beside it; put the right two together"
            )
        if seal is not None and self.meta("manifest") not in (None, seal):
            raise InputError(
                f"the {self.manifest} beside {self.path} was changed after the run was begun: restore it, or start a new run"
            )
        if self.checked and self._tallied() != int(self.meta("rows") or 0):
            raise sqlite3.DatabaseError(f"it counts {self.meta('rows')} inputs and holds {self._tallied()}")
        if writable:
            self._note("open", "1")
            self.db.execute("PRAGMA wal_checkpoint(PASSIVE)")  # so that it stands in the file itself, see `remarks`

    def _create(self, identity: str, seal: str | None) -> None:
        with self._transaction():
            for statement in (*_SCHEMA.split(";"), self.schema):
                if statement.strip():
                    self.db.execute(statement)
            noted = {"identity": identity, "checksums": "sha256", "rows": "0"}
            noted |= {} if seal is None else {"manifest": seal}
            self.db.executemany("INSERT INTO meta VALUES (?, ?)", noted.items())

    def _tallied(self) -> int:
        return int(self.db.execute("SELECT count(*) FROM inputs").fetchone()[0])

    def _note(self, key: str, value: str) -> None:
        with self._transaction():
            self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    @property
    def remarks(self) -> list[str]:
        """What a reader must know about the file itself."""
        if self._db is None:
            return []
        found = []
        if not self.writable and self.meta("open") == "1" and not self._logged:
            found.append(
                f"{NAME} was copied from a run that was killed or still going, without {NAME}-wal: the inputs noted "
                "there are missing here. Copy it too, or run the same command again to compute them."
            )
        if not self.checked:
            found.append(
                "The run was begun by the first release, without checksums: a changed number in run.json or in the stored "
                "counts would not be noticed."
            )
        return found

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
                self._note("open", "0")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._db.execute("PRAGMA journal_mode = DELETE")
        self._db.close()
        self._db = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inputs ---------------------------------------------------------------------------------------------------

    def put(self, row: R) -> None:
        """Store one input, durably against a killed process when this returns."""
        self.put_all([row])

    def put_all(self, rows: Iterable[R]) -> None:
        """Store several inputs in one transaction: all or none."""
        with self._translated(), self._transaction():
            self._insert("inputs", self.columns, [self.encode(row) for row in rows])
            self._count()

    def done(self) -> set[InputId]:
        """Ids of the stored inputs, failed ones included."""
        return {row[0] for row in self._select("SELECT id FROM inputs")}

    def pending(self, positions: Iterable[int], ids: Sequence[InputId], *, retry_failed: bool) -> list[int]:
        """Positions of the data whose inputs (`ids` are those of all of it) are not stored; failed ones are, unless retried."""
        if retry_failed:
            self.forget_failures()
        done = self.done()
        return [int(p) for p in positions if ids[p] not in done]

    def rows(self) -> list[R]:
        """Every stored input, in the order of the data."""
        return [self.decode(values) for values in self._read("inputs", self.columns, "ORDER BY position, rowid")]

    def forget_failures(self) -> int:
        """Remove the failed inputs, so that they are tried again; returns how many."""
        with self._translated(), self._transaction():
            removed = int(self.db.execute("DELETE FROM inputs WHERE failure IS NOT NULL").rowcount)
            self._count()
            return removed

    # ---- attacks --------------------------------------------------------------------------------------------------

    def put_attacks(self, rows: Iterable[AttackRow]) -> None:
        """Store attack results in one transaction."""
        with self._translated(), self._transaction():
            self._insert("attacks", _ATTACK, [(row.id, row.kind.value, *astuple(row)[2:]) for row in rows])

    def attacks(self) -> list[AttackRow]:
        """Every stored attack, by kind, epsilon and id."""
        found = self._read("attacks", _ATTACK, "ORDER BY kind, epsilon, id, steps, restarts, seed")
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
            self._insert("sessions", _SESSION, [values])

    def sessions(self) -> list[dict[str, Any]]:
        """When and with what the inputs were computed."""
        found = self._read("sessions", _SESSION, "ORDER BY rowid")
        try:
            return [{"started": a, "engine": b, "device": c, "versions": dict(json.loads(d))} for a, b, c, d in found]
        except (ValueError, TypeError) as error:
            raise InputError(f"{self.path} is damaged in its list of sessions: restore it from a copy") from error

    # ---- plumbing -------------------------------------------------------------------------------------------------

    def _select(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        if self._db is None:
            return []
        with self._translated():
            return self.db.execute(query, values).fetchall()

    def _insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Put rows in, each with its checksum where the file has checksums."""
        names = (*columns, "checksum") if self.checked else columns
        filled = [(*row, self._checksum(table, columns, row)) if self.checked else tuple(row) for row in rows]
        marks = ", ".join("?" * len(names))
        self.db.executemany(f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({marks})", filled)

    def _read(self, table: str, columns: Sequence[str], order: str) -> list[tuple[Any, ...]]:
        """The rows of a table, each held against its checksum."""
        names = (*columns, "checksum") if self.checked else columns
        found = self._select(f"SELECT {', '.join(names)} FROM {table} {order}")
        if not self.checked:
            return found
        for *row, noted in found:
            if noted != self._checksum(table, columns, row):
                what = f"input {row[0]!r}" if table != "sessions" else "a session"
                raise InputError(
                    f"{self.path} is damaged at {what} of {table!r} (its checksum does not fit): restore it from a copy"
                )
        return [row[:-1] for row in found]

    def _checksum(self, table: str, columns: Sequence[str], row: Sequence[Any]) -> str:
        digest = Digest(f"{table} of {self.identity}")
        for name, value in zip(columns, row, strict=True):
            # as SQLite gives it back: truth values are numbers there
            digest.add(
                name, value if isinstance(value, bytes) else repr(int(value) if isinstance(value, bool) else value)
            )
        return digest.hex()[:32]

    def _count(self) -> None:
        """Note how many inputs there are, in the transaction that changes it."""
        if self.checked:
            self.db.execute("UPDATE meta SET value = ? WHERE key = 'rows'", (str(self._tallied()),))

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
            raise InputError(explain(self.path, error)) from error


class Store(Table[Row]):
    """What is drawn of every input, by `runs.rows`."""

    schema = _SAMPLED
    columns = _COLUMNS

    def encode(self, row: Row) -> tuple[Any, ...]:
        """Counts and moments as compressed arrays."""
        soft = row.soft
        described = None if soft is None else json.dumps([soft.map.name, soft.map.temperature, soft.map.mass])
        buckets = None if soft is None else pack(soft.order, "<i4")
        moments = None if soft is None else pack(soft.moments, "<f8")
        return (
            row.id, row.position, row.label, row.n0, row.draws, pack(row.selection, "<i8"), pack(row.estimation, "<i8"),
            described, buckets, None if soft is None else soft.singles, None if soft is None else int(soft.direct), moments,
            row.stopped, row.failure, f"{row.key:016x}", row.seconds,
        )  # fmt: skip

    def decode(self, values: Sequence[Any]) -> Row:
        """The row again."""
        v = dict(zip(_COLUMNS, values, strict=True))
        try:
            soft = None
            if v["moments"] is not None:
                moments = unpack(v["moments"], "<f8", np.float64).reshape(4, -1)
                order = unpack(v["buckets"], "<i4", np.int64)
                soft = Soft(SimplexMap(*json.loads(v["map"])), order, v["singles"], bool(v["direct"]), moments)
            selection, estimation = (unpack(v[name], "<i8", np.int64) for name in ("selection", "estimation"))
        except (zlib.error, ValueError, TypeError, IndexError, KeyError) as error:
            raise InputError(
                f"{self.path} is damaged at input {v['id']!r} ({error}): restore it from a copy"
            ) from error
        return Row(
            v["position"], v["id"], v["label"], v["n0"], v["draws"], selection, estimation, soft, v["stopped"], v["failure"],
            int(v["key"], 16), v["seconds"],
        )  # fmt: skip
