"""The store of a run: one SQLite table, one transaction per input, every payload a JSON document.

SQLite's own transactions protect against killed processes and full disks: what is committed stays, what is not is rolled back.
The store holds the digest of its run, so that a store beside another `run.json` is refused. A file is not trusted: its schema
must be the one written here (no views or triggers), and every payload is read by a typed document.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field

from equipoise.core import files
from equipoise.core.errors import InputError, one_line
from equipoise.core.files import Count, Document, NonNegative, parse_document
from equipoise.runs.inputs import InputId
from equipoise.runs.settings import NAME as MANIFEST
from equipoise.runs.settings import Manifest

Entry = TypeVar("Entry", bound=Document)

NAME = "store.sqlite"
#: characters of one payload
LARGEST = 1 << 26
_SCHEMA = "CREATE TABLE entries (kind TEXT NOT NULL, key TEXT NOT NULL, payload TEXT NOT NULL, PRIMARY KEY (kind, key))"


class SoftVotes(Document):
    """Soft votes of one input under the run's map: its buckets, chosen on the selection sample, and their moments.

    `order` and `singles` are the `Partition`, `direct` whether margins are bounded directly; `moments` has the rows shift,
    Σ(Z−shift), Σ(Z−shift)² and Σ(Z₀−shift₀)(Z−shift) per bucket, as `smoothing.Moments`.
    """

    order: tuple[Count, ...]
    singles: Count
    direct: bool
    moments: tuple[tuple[float, ...], ...] = Field(min_length=4, max_length=4)

    def fits(self, classes: int) -> bool:
        """Whether a run with so many classes can have produced these moments."""
        widths = {len(moment) for moment in self.moments}
        partition = sorted(self.order) == list(range(classes)) and self.singles < classes
        return partition and widths == {min(classes, self.singles + 2)}


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
        method: proved: what proved the radius.
        deployed: proved: the radius of the forward pass in float32, if wanted.
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
    method: str = ""
    deployed: NonNegative | None = None

    def fits(self, manifest: Manifest) -> bool:
        """Whether this run can have produced this row."""
        settings = manifest.settings
        classes = settings.num_classes or 0
        if self.failure is not None:
            return self.selection is None and self.estimation is None and not self.radius
        if settings.kind == "proved":
            right = self.label < 0 or self.answer == self.label
            return -1 <= self.answer < classes and (right or not self.radius)
        if self.selection is None or self.estimation is None:
            return False

        complete = self.draws <= settings.n if settings.adaptive else self.draws == settings.n
        missing = (self.n0 - sum(self.selection), self.draws - sum(self.estimation))
        counted = min(missing) >= 0 if settings.nonfinite == "miss" else missing == (0, 0)
        lengths = len(self.selection) == len(self.estimation) == classes
        soft = self.soft.fits(classes) if self.soft is not None and manifest.scored else not manifest.scored
        return self.n0 == settings.n0 and complete and counted and lengths and soft


class AttackRow(Document):
    """One attack on one input: whether some x' with ‖x' − x‖₂ ≤ epsilon was misclassified, and at what distance.

    The key is everything but the outcome: repeating an attack replaces its row, changing it adds one.

    Args:
        id: of the input.
        kind: what was attacked, the network ("base") or its smoothed version ("smoothed").
        epsilon: radius of the attack.
        success: whether a misclassified point was found.
        distance: of that point.
        steps: gradient steps per start.
        restarts: random starts.
        seed: of starts and noise.
    """

    id: InputId
    kind: Literal["base", "smoothed"]
    epsilon: NonNegative
    success: bool
    distance: NonNegative | None = None
    steps: Count = 20
    restarts: Count = 1
    seed: int = 0


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
        writable: create the file if need be; otherwise an absent one is empty.
    """

    def __init__(self, folder: str | Path, manifest: Manifest, *, writable: bool = False) -> None:
        self.path = Path(folder) / NAME
        self.manifest = manifest
        for ending in ("", "-journal", "-wal", "-shm"):
            # SQLite waits for ever for a named pipe
            path = f"{self.path}{ending}"
            if os.path.exists(path) and not os.path.isfile(path):
                raise InputError(f"cannot read {path}: it is not a regular file")

        empty = not (self.path.exists() and self.path.stat().st_size)
        # a reader opens for writing too, where it may: a killed writer's last transaction has to be rolled back
        uri = f"{self.path.resolve().as_uri()}?mode={'rwc' if writable else 'rw'}"
        if empty and not writable:
            uri = "file::memory:"
        with self._explained():
            self.db = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)
        try:
            self._open(empty)
        except BaseException:
            self.db.close()
            raise

    def _open(self, empty: bool) -> None:
        digest = self.manifest.digest()
        with self._explained():
            schema = [sql for (sql,) in self.db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
            # a writer that was killed before its first commit leaves a journal, which opening has just rolled back
            if not schema and (empty or not self.path.stat().st_size):
                with self._transaction():
                    self.db.execute(_SCHEMA)
                    self._insert("run", [("digest", digest)])
                return
        if schema != [_SCHEMA]:
            raise InputError(f"{self.path} is not the store of a run: it has other tables")
        if self._texts("run") != [json.dumps(digest)]:
            raise InputError(f"{self.path} belongs to another run than {MANIFEST} beside it: restore the two together")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.db.close()

    def put(self, rows: Iterable[Row]) -> None:
        """Store inputs in one transaction: all or none, durably when this returns."""
        # JSON text as key keeps 1 and "1" apart
        pairs = ((json.dumps(row.id), row.model_dump(mode="json", exclude_defaults=True)) for row in rows)
        with self._transaction():
            self._insert("input", pairs)

    def rows(self) -> list[Row]:
        """Every stored input, in the order of the data."""
        rows = self._read("input", Row)
        for row in rows:
            if not row.fits(self.manifest):
                raise InputError(f"{self.path} is damaged at input {row.id!r}: restore it from a copy")
        return sorted(rows, key=lambda row: row.position)

    def forget_failures(self) -> None:
        """Remove the failed inputs, so that they are tried again."""
        failed = [(json.dumps(row.id),) for row in self.rows() if row.failure is not None]
        with self._transaction():
            self.db.executemany("DELETE FROM entries WHERE kind = 'input' AND key = ?", failed)

    def put_attacks(self, rows: Iterable[AttackRow]) -> None:
        """Store attack results in one transaction."""
        pairs = ((row.model_dump_json(exclude={"success", "distance"}), row.model_dump()) for row in rows)
        with self._transaction():
            self._insert("attack", pairs)

    def attacks(self) -> list[AttackRow]:
        """Every stored attack, by kind, epsilon and id."""
        rows = self._read("attack", AttackRow)
        return sorted(rows, key=lambda row: (row.kind, row.epsilon, str(row.id), row.steps, row.restarts, row.seed))

    def _texts(self, kind: str) -> list[str]:
        """The payloads of one kind; sizes are checked before anything is read into memory."""
        with self._explained():
            query = "SELECT coalesce(max(length(payload)), 0), coalesce(max(typeof(payload)), 'text') FROM entries"
            longest, typed = self.db.execute(f"{query} WHERE kind = ?", (kind,)).fetchone()
            if longest > LARGEST or typed != "text":
                raise InputError(f"{self.path} is damaged: an entry has {longest} letters of {typed}")
            texts = self.db.execute("SELECT payload FROM entries WHERE kind = ? ORDER BY key", (kind,)).fetchall()
        return [text for (text,) in texts]

    def _read(self, kind: str, model: type[Entry]) -> list[Entry]:
        """The payloads of one kind as typed documents."""
        return [parse_document(text, model, f"{self.path}, an entry of kind {kind}") for text in self._texts(kind)]

    def _insert(self, kind: str, pairs: Iterable[tuple[str, Any]]) -> None:
        values = [(kind, key, json.dumps(payload, allow_nan=False)) for key, payload in pairs]
        self.db.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", values)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Everything inside is committed, or nothing."""
        with self._explained(), self.db:
            self.db.execute("BEGIN IMMEDIATE")
            yield

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of SQLite as one sentence: what went wrong and what to do."""
        try:
            yield
        except sqlite3.Error as error:
            raise InputError(
                f"{self.path} cannot be used ({one_line(error)}): if the disk is full, free some space and run the same command "
                "again, what is stored is kept; if the file is damaged, restore it from a copy"
            ) from error
