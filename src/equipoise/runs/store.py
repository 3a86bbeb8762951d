"""The store of a run: one SQLite table, one transaction per input, every payload a JSON document.

SQLite's own transactions protect against killed processes and full disks: what is committed stays, what is not is rolled back.
The store holds the digest of its run, so that a store beside another `run.json` is refused. A file is not trusted: its schema
must be the one written here (no views or triggers), and every payload is read by a typed document.
"""

from __future__ import annotations

import json
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from equipoise.core import files
from equipoise.core.documents import Count, Document, NonNegative, parse_document
from equipoise.core.errors import InputError, one_line
from equipoise.runs.inputs import InputId
from equipoise.runs.settings import NAME as MANIFEST
from equipoise.runs.settings import Manifest, Settings, parse_map

NAME = "store.sqlite"
#: characters of one payload
LARGEST = 1 << 26
_SCHEMA = "CREATE TABLE entries (kind TEXT NOT NULL, key TEXT NOT NULL, payload TEXT NOT NULL, PRIMARY KEY (kind, key))"
_NOWHERE = "file::memory:"
_DAMAGED = "is damaged ({}): move it away and run the same command again, or restore it from a copy"
_FULL = "cannot be written ({}): free some space and run the same command again; what is stored is kept"
_CLOSED = "cannot be opened ({}): check the permissions of the folder"
_BUSY = "is in use by another process ({}): wait for it or stop it"
#: what an error of SQLite means; every other one is damage
_HINTS = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_IOERR: _FULL,
    sqlite3.SQLITE_READONLY: _CLOSED,
    sqlite3.SQLITE_CANTOPEN: _CLOSED,
    sqlite3.SQLITE_PERM: _CLOSED,
    sqlite3.SQLITE_BUSY: _BUSY,
    sqlite3.SQLITE_LOCKED: _BUSY,
}


class SoftVotes(Document):
    """Soft votes of one input under one map: its buckets, chosen on the selection sample, and their moments.

    `order` and `singles` are the `Partition`, `direct` whether margins are bounded directly; `moments` has the rows shift,
    Σ(Z−shift), Σ(Z−shift)² and Σ(Z₀−shift₀)(Z−shift) per bucket, as `smoothing.Moments`.
    """

    map: str
    order: tuple[Count, ...]
    singles: Count
    direct: bool
    moments: tuple[tuple[float, ...], ...] = Field(min_length=4, max_length=4)


class Row(Document):
    """The result of one input, or why it failed.

    Args:
        id: of the input, the key of its noise.
        position: its place in the data.
        label: −1 where the data has none.
        failure: why nothing is known of this input.
        seconds: time spent, the only field that differs between repetitions.
        n0: sampled: selection draws made.
        draws: sampled: estimation draws made.
        selection: sampled: votes per class of the selection draws.
        estimation: sampled: votes per class of the estimation draws.
        soft: sampled: soft votes, if the run samples scores.
        answer: proved: the network's own answer.
        radius: proved: no point strictly within it has another answer than the label.
        rival: proved: the class that limits the radius.
        margin: proved: of the input against the rival, rounded down where something is proved; None: not finite.
        method: proved: what proved the radius.
        deployed: proved: the radius of the forward pass in float32, if asked for.
    """

    id: InputId
    position: Count
    label: int
    failure: str | None = None
    seconds: NonNegative = 0.0
    n0: Count = 0
    draws: Count = 0
    selection: tuple[Count, ...] | None = None
    estimation: tuple[Count, ...] | None = None
    soft: SoftVotes | None = None
    answer: int = -1
    radius: NonNegative = 0.0
    rival: int = -1
    margin: float | None = None
    method: str = ""
    deployed: NonNegative | None = None

    def fits(self, settings: Settings, fixed_map: str | None) -> bool:
        """Whether a run with these settings can have produced this row.

        Args:
            settings: of the run.
            fixed_map: the map that the run fixed beforehand.
        """
        classes = settings.num_classes or 0
        if self.failure is not None:
            return self.selection is None and self.estimation is None and not self.radius
        if settings.kind == "proved":
            right = self.label < 0 or self.answer == self.label
            return -1 <= self.answer < classes and (right or not self.radius)
        if self.selection is None or self.estimation is None:
            return False

        drawn = (self.n0, self.draws)
        wanted = (settings.n0, self.draws if settings.adaptive else settings.n)
        sums = (sum(self.selection), sum(self.estimation))
        exact = settings.nonfinite == "refuse"
        counts = all(s == d if exact else s <= d for s, d in zip(sums, drawn, strict=True))
        lengths = len(self.selection) == len(self.estimation) == classes
        return (
            drawn == wanted and self.draws <= settings.n and counts and lengths and self._soft_fits(classes, fixed_map)
        )

    def _soft_fits(self, classes: int, fixed_map: str | None) -> bool:
        soft = self.soft
        if soft is None:
            return True
        if fixed_map is not None and parse_map(soft.map) != parse_map(fixed_map):
            return False
        widths = {len(moment) for moment in soft.moments}
        buckets = min(classes, soft.singles + 2)
        return sorted(soft.order) == list(range(classes)) and soft.singles < classes and widths == {buckets}


class Attacked(StrEnum):
    """What an attack was on: the network itself, or its smoothed version."""

    BASE = "base"
    SMOOTHED = "smoothed"


@dataclass(frozen=True)
class AttackRow:
    """One attack on one input: whether some x' with ‖x' − x‖₂ ≤ epsilon was misclassified, and at what distance.

    The key is everything but the outcome: repeating an attack replaces its row, changing it adds one.
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


class _AttackDocument(Document):
    """An `AttackRow` as it is stored."""

    id: InputId
    kind: Attacked
    epsilon: NonNegative
    success: bool
    distance: NonNegative | None
    steps: Count
    restarts: Count
    seed: int


class Session(Document):
    """When and with what some inputs were computed."""

    started: str
    engine: str
    device: str
    versions: dict[str, str]


def locked(folder: Path) -> AbstractContextManager[None]:
    """Hold the run directory: one process at a time works on it, and a second holder is refused at once."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory")
    busy = f"another process is working on {folder}: wait for it, stop it, or use another run directory"
    return files.locked(folder / "lock", busy)


class Store:
    """The store of a run directory, to be used in a `with` block.

    Args:
        folder: the run directory.
        manifest: of the run.
        writable: create the file if need be; otherwise it is opened read-only, and an absent one is empty.
    """

    def __init__(self, folder: str | Path, manifest: Manifest, *, writable: bool = False) -> None:
        self.path = Path(folder) / NAME
        self.manifest = manifest
        self._require_regular()

        exists = self.path.exists()
        # a reader opens for writing too, where it may: a killed writer's last transaction has to be rolled back
        uri = f"{self.path.resolve().as_uri()}?mode={'rwc' if writable else 'rw'}" if exists or writable else _NOWHERE
        with self._explained():
            self.db = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)
        try:
            self._open(writable)
        except BaseException:
            self.close()
            raise

    def _require_regular(self) -> None:
        """SQLite waits for ever for a named pipe: only regular files are opened."""
        for ending in ("", "-journal", "-wal", "-shm"):
            path = self.path.with_name(NAME + ending)
            try:
                mode = path.stat().st_mode
            except FileNotFoundError:
                continue
            except OSError as error:
                raise InputError(f"cannot read {path}: {error.strerror}") from error
            if not stat.S_ISREG(mode):
                raise InputError(f"cannot read {path}: it is not a regular file")

    def _open(self, writable: bool) -> None:
        digest = self.manifest.digest()
        with self._explained():
            found = [sql for (sql,) in self.db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
            if not found:
                if self.path.exists() and self.path.stat().st_size:
                    raise InputError(f"{self.path} is not the store of a run: it holds no table of entries")
                if not writable:
                    self.db.close()
                    self.db = sqlite3.connect(_NOWHERE, uri=True, isolation_level=None)
                with self._transaction():
                    self.db.execute(_SCHEMA)
                    self._insert("run", [("digest", digest)])
                return
        if found != [_SCHEMA]:
            raise InputError(f"{self.path} is not the store of a run: it has other tables")

        stored = self._read("run")
        if stored != [json.dumps(digest)]:
            raise InputError(f"{self.path} belongs to another run than {MANIFEST} beside it: restore the two together")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.db.close()

    def put(self, rows: Iterable[Row]) -> None:
        """Store inputs in one transaction: all or none, durably when this returns."""
        self._put("input", ((_key(row.id), row.model_dump(mode="json", exclude_defaults=True)) for row in rows))

    def rows(self) -> list[Row]:
        """Every stored input, in the order of the data."""
        manifest = self.manifest
        rows = [parse_document(text, Row, f"{self.path}, an input") for text in self._read("input", manifest.total)]
        for row in rows:
            if not row.fits(manifest.settings, manifest.map):
                raise InputError(f"{self.path} is damaged at input {row.id!r}: restore it from a copy")
        return sorted(rows, key=lambda row: row.position)

    def forget_failures(self) -> None:
        """Remove the failed inputs, so that they are tried again."""
        failed = [(_key(row.id),) for row in self.rows() if row.failure is not None]
        with self._explained(), self._transaction():
            self.db.executemany("DELETE FROM entries WHERE kind = 'input' AND key = ?", failed)

    def put_attacks(self, rows: Iterable[AttackRow]) -> None:
        """Store attack results in one transaction."""
        pairs = []
        for row in rows:
            plain = asdict(row) | {"kind": row.kind.value}
            name = [value for field, value in plain.items() if field not in ("success", "distance")]
            pairs.append((json.dumps(name), plain))
        self._put("attack", pairs)

    def attacks(self) -> list[AttackRow]:
        """Every stored attack, by kind, epsilon and id."""
        texts = self._read("attack")
        found = [parse_document(text, _AttackDocument, f"{self.path}, an attack") for text in texts]
        rows = [AttackRow(**row.model_dump()) for row in found]
        return sorted(rows, key=lambda row: (row.kind, row.epsilon, str(row.id), row.steps, row.restarts, row.seed))

    def add_session(self, session: Session) -> None:
        """Note that some inputs were computed by this engine, device and software."""
        count = len(self._read("session"))
        self._put("session", [(f"{count:06d}", session.model_dump(mode="json"))])

    def sessions(self) -> list[Session]:
        """When and with what the inputs were computed."""
        return [parse_document(text, Session, f"{self.path}, a session") for text in self._read("session")]

    def _read(self, kind: str, most: int | None = None) -> list[str]:
        """The payloads of one kind; sizes are checked before anything is read into memory."""
        with self._explained():
            query = "SELECT count(*), coalesce(max(length(payload)), 0), coalesce(max(typeof(payload)), 'text') "
            count, longest, typed = self.db.execute(query + "FROM entries WHERE kind = ?", (kind,)).fetchone()
            if longest > LARGEST or typed != "text" or (most is not None and count > most):
                raise InputError(f"{self.path} is damaged: {count} entries, the longest {longest} letters of {typed}")
            found = self.db.execute("SELECT payload FROM entries WHERE kind = ? ORDER BY key", (kind,)).fetchall()
        return [payload for (payload,) in found]

    def _put(self, kind: str, pairs: Iterable[tuple[str, Any]]) -> None:
        with self._explained(), self._transaction():
            self._insert(kind, pairs)

    def _insert(self, kind: str, pairs: Iterable[tuple[str, Any]]) -> None:
        values = [(kind, key, json.dumps(payload, allow_nan=False)) for key, payload in pairs]
        self.db.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", values)

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
    def _explained(self) -> Iterator[None]:
        """Errors of SQLite as one sentence: what went wrong and what to do."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            hint = _HINTS.get(code, _DAMAGED)
            raise InputError(f"{self.path} {hint.format(one_line(error))}") from error


def _key(name: InputId) -> str:
    """Keeps 1 and "1" apart."""
    return json.dumps(name)
