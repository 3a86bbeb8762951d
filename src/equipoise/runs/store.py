"""What a run directory holds: `run.json` (settings, model and data, the digest over the three) and the store of rows.

A run is determined by its settings, its model and its data; `Manifest.digest` is the one digest over the three.

The store is one SQLite table with one transaction per input, every payload a JSON document. SQLite's own transactions protect
against killed processes and full disks: what is committed stays, what is not is rolled back. The store holds the digest of its
run, so that a store beside another `run.json` is refused. A file is not trusted: its schema must be the one written here (no
views or triggers), and every payload is read by a typed document.
"""

import json
import os
import platform
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field

from equipoise.attacks import Norm
from equipoise.core import InputError, Refused, did_you_mean, explained, files, format_up
from equipoise.core.files import (
    Count,
    Document,
    Model,
    NonNegative,
    PositiveCount,
    check_document,
    digest_document,
    open_regular,
    parse_json,
    read_json,
    write_json,
)
from equipoise.runs.sources import InputId, Selection
from equipoise.smoothing import SimplexMap
from equipoise.smoothing.noise import Levels, NoiseName, NoiseSpec
from equipoise.smoothing.procedures import DEFAULT, Procedure, find_procedure

MANIFEST = "run.json"

Kind = Literal["sampled", "proved"]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, lt=1)]


class Settings(Document):
    """Everything that changes the numbers of a run, apart from the model and the data.

    Args:
        kind: "sampled" (randomized smoothing) or "proved" (deterministic radii).
        inputs: which inputs of the data; several for merged runs.
        num_classes: number of logits; None: read off the model.
        sigma: noise level in the units of the model's input, the smallest one where channels differ.
        channels: the noise level of every channel, where they differ.
        n0: selection draws per input.
        n: estimation draws per input (the most, for adaptive runs).
        alpha: risk per input.
        procedure: a row of `smoothing.PROCEDURES`.
        seed: of the noise; None: drawn from the operating system.
        seed_source: "user" or "system".
        chunk_size: draws per noise key; part of the key.
        map: of soft procedures: "global" (calibrated once, on 32 inputs), or such as "softmax:0.5".
        lipschitz: None, a number (the user's own claim), or "auto" (`equipoise.lipschitz_bound`).
        target_radius: adaptive: stop an input as soon as it is certified or hopeless at this radius.
        noise: "grid" (exact integers) or "float"; None: the grid for 8-bit data.
        cells: points per unit of the grid.
        dimension: numbers in one input.
        device: kind of device the network runs on.
        norm: proved: of the ball.
        effort: proved: as in `eq.certified_radius`.
        epsilon: proved: the only radius asked about; methods stop at the first that proves it.
        complete: proved: with epsilon, branch until it is proved or an input breaks it.
        seconds: proved: budget of processor time per input; the best radius so far counts when it ends.
        deployed: proved: "float32" adds radii of the forward pass in float32.
    """

    kind: Kind = "sampled"
    inputs: tuple[Selection, ...] = (Selection(),)
    num_classes: Annotated[int, Field(ge=2, le=10**7)] | None = None
    device: str = "cpu"

    sigma: Positive | None = None
    channels: tuple[Positive, ...] | None = None
    n0: Annotated[int, Field(ge=1, le=10**7)] = 100
    n: Annotated[int, Field(ge=1, le=10**10)] = 10_000
    alpha: Share = 1e-3
    procedure: str = DEFAULT
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    seed_source: Literal["user", "system"] = "user"
    chunk_size: Annotated[int, Field(ge=1, le=10**6)] = 100
    map: str | None = None
    lipschitz: NonNegative | Literal["auto"] | None = None
    target_radius: Positive | None = None
    noise: NoiseName | None = None
    cells: Positive | None = None
    dimension: PositiveCount | None = None

    norm: Norm = "l2"
    effort: Literal["auto", "fast", "relaxation", "integral"] = "auto"
    epsilon: Positive | None = None
    complete: bool = False
    seconds: Positive | None = None
    deployed: Literal["float32"] | None = None

    @classmethod
    def of(cls, kind: Kind, keywords: Mapping[str, Any]) -> Self:
        """Settings from the keywords of `certify` or `prove`, checked.

        Args:
            kind: of the run.
            keywords: fields of `Settings`, and skip, limit, stride, balanced; sigma may be a list, map a `SimplexMap`.
        """
        command = _COMMAND[kind]
        values = {name: _plain(value) for name, value in keywords.items()}
        selection = {name: values.pop(name) for name in Selection.model_fields if name in values}
        for name in values:
            if name not in _FIELDS[kind]:
                hint = did_you_mean(name, _FIELDS[kind])
                raise TypeError(f"{command}() got an unexpected keyword argument {name!r}{hint}")

        if kind == "sampled":
            if values.get("sigma") is None:
                raise TypeError(
                    "certify() needs sigma, the noise level in the units of the model's input"
                )
            levels = Levels.of(values["sigma"])
            values |= {"sigma": float(levels.sigma), "channels": levels.channels}
        settings = check_document(
            {"kind": kind, "inputs": [selection], **values}, cls, f"{command}()"
        )
        settings.check()
        return settings

    def check(self) -> None:
        """Refuse combinations of settings that mean nothing, or that no certificate covers."""
        if self.kind == "proved":
            if self.complete and self.epsilon is None:
                raise InputError("--complete decides about one radius: give one --epsilon")
            return
        procedure = self.row
        fixed = parse_map(self.map)
        if self.noise == "grid" and self.lipschitz is not None:
            raise Refused(
                "the Lipschitz-aware radius needs Lipschitz scores, and rounding to the grid is not Lipschitz: use "
                "--noise float, whose gap the certificates state"
            )
        if self.adaptive and procedure.soft and not procedure.hard:
            raise Refused(
                f"adaptive runs test the majority vote, {self.procedure!r} works on soft scores: use a vote procedure (cohen)"
            )
        if not procedure.soft and self.map is not None:
            raise InputError(
                f"{self.procedure!r} counts votes and takes no map: leave map out, or use 'rivals', 'lvm' or 'direct'"
            )
        votes = not procedure.soft or self.adaptive or (fixed is not None and fixed.votes)
        if self.lipschitz is not None and votes:
            raise InputError(
                "votes have no Lipschitz constant: --lipschitz goes with soft scores, --procedure rivals, lvm or direct"
            )
        _ = self.noise_law().grids  # refuses a grid too coarse for the noise

    @property
    def levels(self) -> Levels:
        """The noise levels."""
        return Levels.of(self.channels or self.sigma)

    @property
    def row(self) -> Procedure:
        """The procedure."""
        return find_procedure(self.procedure)

    @property
    def adaptive(self) -> bool:
        """Whether inputs stop as soon as their answer is certain."""
        return self.target_radius is not None

    @property
    def soft(self) -> bool:
        """Whether scores rather than votes are sampled (unless the map turns out to be the hardmax)."""
        wanted = self.map is not None or self.lipschitz is not None
        return self.row.soft and not self.adaptive and (wanted or self.row.map != "hardmax")

    def noise_law(self) -> NoiseSpec:
        """The law of the noise that is sampled."""
        return NoiseSpec(
            self.levels,
            self.noise,
            self.cells,
            self.dimension or 0,
            self.chunk_size,
            self.seed or 0,
            self.seed_source == "user",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data of the settings that belong to this kind of run and are set."""
        return self.model_dump(
            mode="json", include=_FIELDS[self.kind] | {"kind", "inputs"}, exclude_none=True
        )


_COMMAND: dict[Kind, str] = {"sampled": "certify", "proved": "prove"}
_PROVED = {"norm", "effort", "epsilon", "complete", "seconds", "deployed"}
_FIELDS: dict[Kind, set[str]] = {
    "sampled": set(Settings.model_fields) - _PROVED - {"kind", "inputs"},
    "proved": _PROVED | {"num_classes", "device", "dimension"},
}


def _plain(value: Any) -> Any:
    """NumPy numbers as Python numbers, maps as text."""
    if isinstance(value, SimplexMap):
        return map_text(value)
    return value.item() if isinstance(value, np.generic) else value


def parse_map(text: str | None) -> SimplexMap | None:
    """The map that a text fixes, None for "global".

    >>> parse_map("softmax:0.5")
    SimplexMap(name='softmax', temperature=0.5, mass=1.0)
    """
    if text in (None, "global"):
        return None
    name, _, temperature = str(text).partition(":")
    try:
        return SimplexMap(name, float(temperature or 1.0))  # type: ignore[arg-type]
    except ValueError as error:
        raise InputError(
            f"map must be 'global', 'hardmax', 'softmax:T' or 'sparsemax:T' with T > 0, got {text!r}"
        ) from error


def map_text(value: SimplexMap) -> str:
    """The text of a map, which `parse_map` reads.

    Mass r at temperature T certifies what mass 1 at temperature r·T does (see `smoothing.simplex`).

    >>> map_text(SimplexMap("softmax", 0.5))
    'softmax:0.5'
    """
    return f"{value.name}:{value.temperature * value.mass!r}"


class Constant(Document):
    """A Lipschitz constant of the network and where it comes from: computed here, or claimed by the user."""

    value: NonNegative
    source: Literal["computed", "given"]

    @property
    def assumed(self) -> bool:
        """Whether it is the user's claim rather than a proved bound."""
        return self.source == "given"

    def __str__(self) -> str:
        origin = "given by the user: an assumption, not checked"
        return f"{format_up(self.value)}, {origin if self.assumed else 'computed by equipoise.lipschitz_bound'}"


class ModelRecord(Document):
    """The model: its name, the digest of the stored network."""

    source: str
    hash: str


class DataRecord(Document):
    """The data: its name, its fingerprint, how many inputs it has, and the class names where it has some."""

    source: str
    fingerprint: str
    inputs: Count
    classes: tuple[str, ...] | None = None


class Recipe(Document):
    """How a command loads model and data again: sources and preprocessing, as the options were given."""

    model: str
    data: str
    weights: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[Positive, ...] | None = None
    split: str | None = None
    layout: str | None = None
    size: tuple[PositiveCount, PositiveCount] | None = None
    columns: tuple[str, str] | None = None


def versions() -> dict[str, str]:
    """The software that computes."""
    names = ("equipoise", "torch", "numpy", "scipy")
    return {name: metadata.version(name) for name in names} | {"python": platform.python_version()}


class Manifest(Document):
    """`run.json`: what a run is. Written once, before the first input."""

    format: Literal[1] = 1
    created: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    model: ModelRecord
    data: DataRecord
    settings: Settings
    total: PositiveCount
    map: str | None = None
    lipschitz: Constant | None = None
    note: str = ""
    recipe: Recipe | None = None
    versions: dict[str, str] = Field(default_factory=versions)

    @property
    def simplex(self) -> SimplexMap | None:
        """The map of soft votes, fixed before the run."""
        return parse_map(self.map)

    @property
    def scored(self) -> bool:
        """Whether soft votes are sampled: the run is soft, and its map is not the majority vote."""
        return self.settings.soft and self.simplex is not None and not self.simplex.votes

    def identity(self) -> dict[str, Any]:
        """What must not change while a run is continued, flat, with readable names."""
        return {
            "model": self.model.hash,
            "data": self.data.fingerprint,
            "total": self.total,
            "fixed map": self.map,
            "constant": str(self.lipschitz),
            **self.settings.to_dict(),
        }

    def digest(self) -> str:
        """The digest of the run: settings, model, data, and the map and the constant that were fixed beforehand."""
        return digest_document(self.identity())

    def reseeded(self, seed: int | None) -> Self:
        """The same run with noise of another seed."""
        return self.model_copy(update={"settings": self.settings.model_copy(update={"seed": seed})})

    def stretched(self, constant: Constant | None) -> float | None:
        """The constant in the coordinates in which the noise is round (see `smoothing.noise`)."""
        return None if constant is None else constant.value * self.settings.levels.stretch

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: what `run.json` holds."""
        return self.model_dump(mode="json") | {
            "settings": self.settings.to_dict(),
            "digest": self.digest(),
        }

    def write(self, folder: Path) -> None:
        """Write `run.json`, whole or not at all."""
        write_json(folder / MANIFEST, self.to_dict())


def is_run(folder: str | Path) -> bool:
    """Whether a directory holds a run."""
    return (Path(folder) / MANIFEST).is_file()


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a run directory; one that was changed after it was written is refused.

    Args:
        folder: the run directory.
    """
    path = Path(folder) / MANIFEST
    if not is_run(folder):
        raise InputError(f"{folder} is not a run directory: it has no {MANIFEST}")

    plain = read_json(path)
    stored = plain.pop("digest", None) if isinstance(plain, dict) else None
    manifest = check_document(plain, Manifest, str(path))
    settings = manifest.settings
    settings.check()
    if settings.num_classes is None or settings.dimension is None or stored != manifest.digest():
        raise InputError(
            f"{path} was changed after it was written (its digest does not fit): restore it"
        )
    return manifest


def differences(old: Manifest, new: Manifest, ignore: Iterable[str]) -> list[str]:
    """`name: old → new` for everything that differs, but for seeds that were drawn from the operating system.

    Args:
        old: a manifest.
        new: another one.
        ignore: names that may differ.
    """
    before = old.identity()
    after = new.identity()
    skipped = {"seed_source", *ignore}
    if old.settings.seed_source == new.settings.seed_source == "system":
        skipped.add("seed")
    return [
        f"{name}: {_short(before.get(name))} → {_short(after.get(name))}"
        for name in sorted(before.keys() | after.keys())
        if name not in skipped and before.get(name) != after.get(name)
    ]


def require_same(folder: Path, old: Manifest, new: Manifest) -> None:
    """Refuse to continue a run with another model, other data or other settings.

    Args:
        folder: of the run.
        old: its manifest.
        new: the manifest of the command, whose map and constant are not fixed yet.
    """
    changes = differences(old, new, ("fixed map", "constant"))
    if changes:
        raise Refused(
            f"{folder} holds another run ({'; '.join(changes)}): give another --run directory; another alpha or procedure "
            f"needs no sampling: equipoise derive {folder}"
        )


def _short(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text[:19] + "…" if text.startswith("sha256:") else text


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
        broken: proved: an input within epsilon, flat, at which another class is proved to be at least as large as the label.
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
    broken: tuple[float, ...] | None = None

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
        counted = (sum(self.selection), sum(self.estimation)) == (self.n0, self.draws)
        lengths = len(self.selection) == len(self.estimation) == classes
        soft = not manifest.scored or (self.soft is not None and self.soft.fits(classes))
        return self.n0 == settings.n0 and complete and counted and lengths and soft


class AttackRow(Document):
    """One attack on one input: whether some x' with ‖x' − x‖ ≤ epsilon was misclassified, and at what distance (run's norm).

    What is attacked is what the run certifies: the network itself, or its smoothed version.
    The key is everything but the outcome: repeating an attack replaces its row, changing it adds one.

    Args:
        id: of the input.
        epsilon: radius of the attack.
        success: whether a misclassified point was found.
        distance: of that point.
        steps: gradient steps.
        seed: of starts and noise.
    """

    id: InputId
    epsilon: NonNegative
    success: bool
    distance: NonNegative | None = None
    steps: Count = 20
    seed: int = 0


def locked(folder: Path) -> AbstractContextManager[None]:
    """Hold the run directory: one process at a time works on it, and a second holder is refused at once."""
    busy = f"another process is working on {folder}: wait for it, stop it, or use another run directory"
    return files.locked(folder / "lock", busy)


class Store(AbstractContextManager["Store"]):
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
            if os.path.exists(path):
                open_regular(path).close()

        empty = not (self.path.exists() and self.path.stat().st_size)
        # a reader opens for writing too, where it may: a killed writer's last transaction has to be rolled back
        uri = f"{self.path.resolve().as_uri()}?mode={'rwc' if writable else 'rw'}"
        if empty and not writable:
            uri = "file::memory:"
        digest = json.dumps(manifest.digest())
        with self._explained():
            self.db = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)
            query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"
            schema = [sql for (sql,) in self.db.execute(query)]
            # a writer that was killed before its first commit leaves a journal, which opening has just rolled back
            if not schema and (empty or not self.path.stat().st_size):
                self._insert("run", [("digest", digest)], _SCHEMA)
                return
        if schema != [_SCHEMA]:
            raise InputError(f"{self.path} is not the store of a run: it has other tables")
        if self._texts("run") != [digest]:
            raise InputError(
                f"{self.path} belongs to another run than {MANIFEST} beside it: restore the two together"
            )

    def __exit__(self, *_: object) -> None:
        self.db.close()

    def put(self, rows: Iterable[Row]) -> None:
        """Store inputs in one transaction: all or none, durably when this returns."""
        # JSON text as key keeps 1 and "1" apart
        self._insert(
            "input",
            ((json.dumps(row.id), row.model_dump_json(exclude_defaults=True)) for row in rows),
        )

    def rows(self) -> list[Row]:
        """Every stored input, in the order of the data."""
        rows = self._read("input", Row)
        for row in rows:
            if not row.fits(self.manifest):
                raise InputError(
                    f"{self.path} is damaged at input {row.id!r}: restore it from a copy"
                )
        return sorted(rows, key=lambda row: row.position)

    def put_attacks(self, rows: Iterable[AttackRow]) -> None:
        """Store attack results in one transaction."""
        outcome = {"success", "distance"}
        self._insert(
            "attack",
            ((row.model_dump_json(exclude=outcome), row.model_dump_json()) for row in rows),
        )

    def attacks(self) -> list[AttackRow]:
        """Every stored attack, by epsilon and id."""
        rows = self._read("attack", AttackRow)
        return sorted(rows, key=lambda row: (row.epsilon, str(row.id)))

    def _texts(self, kind: str) -> list[str]:
        """The payloads of one kind; sizes are checked before anything is read into memory."""
        with self._explained():
            query = "FROM entries WHERE kind = ?"
            wrong = (
                f"SELECT 1 {query} AND (length(payload) > {LARGEST} OR typeof(payload) != 'text')"
            )
            if self.db.execute(wrong, (kind,)).fetchone():
                raise InputError(f"{self.path} is damaged: an entry is too long, or not text")
            texts = self.db.execute(f"SELECT payload {query} ORDER BY key", (kind,))
            return [text for (text,) in texts]

    def _read(self, kind: str, model: type[Model]) -> list[Model]:
        """The payloads of one kind as typed documents."""
        where = f"{self.path}, an entry of kind {kind}"
        return [check_document(parse_json(text, where), model, where) for text in self._texts(kind)]

    def _insert(self, kind: str, pairs: Iterable[tuple[str, str]], schema: str = "") -> None:
        """All entries are committed, or none."""
        values = [(kind, key, payload) for key, payload in pairs]
        with self._explained(), self.db:
            self.db.execute("BEGIN IMMEDIATE")
            if schema:
                self.db.execute(schema)
            self.db.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", values)

    def _explained(self) -> AbstractContextManager[None]:
        """Errors of SQLite as one sentence: what went wrong and what to do."""
        return explained(
            f"{self.path} cannot be used",
            ": if the disk is full, free some space and run the same command again, what is stored is kept; if the file is "
            "damaged, restore it from a copy",
        )
