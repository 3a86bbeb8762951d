"""`proved.json` and the run it describes: what is kept of an input, what was asked for, opened again, summed up, exported."""

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from equipoise.core import InputError, Refused, format_down
from equipoise.core.accuracy import average_certified_radius, certified_accuracy
from equipoise.core.digests import unsealed
from equipoise.core.errors import require_one_of
from equipoise.core.files import as_input_error, atomic_write, read_json
from equipoise.lipschitz.local import radius as methods
from equipoise.lipschitz.local.backward import Norm
from equipoise.runs.inputs import Selection
from equipoise.runs.manifest import Described, versions
from equipoise.runs.rows import InputId, Item
from equipoise.runs.store import AttackRow, Table, locked

NAME = "proved.json"
FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS inputs (
  id PRIMARY KEY NOT NULL, position INTEGER NOT NULL, label INTEGER NOT NULL, prediction INTEGER NOT NULL, radius REAL NOT NULL,
  rival INTEGER NOT NULL, margin REAL NOT NULL, method TEXT NOT NULL, failure TEXT, seconds REAL NOT NULL, checksum TEXT)
"""


@dataclass(frozen=True)
class ProvedRow:
    """One input: no point strictly within `radius` has another answer; `rival` is the class that limits it.

    `prediction` is the network's own answer, −1 where rounding leaves it open; `margin` is a lower bound of the margin at the
    input against `rival`; `method` proved the radius. The radius is 0 where the answer is not the label
    (−1: unlabelled, and the answer is the network's own).
    """

    id: InputId
    position: int
    label: int
    prediction: int = -1
    radius: float = 0.0
    rival: int = -1
    margin: float = 0.0
    method: str = ""
    failure: str | None = None
    seconds: float = 0.0


def failed_row(item: Item, reason: str, seconds: float = 0.0) -> ProvedRow:
    """An input about which nothing is proved, and why."""
    return ProvedRow(item.id, item.position, item.label, failure=reason, seconds=seconds)


class ProvedStore(Table[ProvedRow]):
    """The store of a deterministic run."""

    schema = _SCHEMA
    columns = tuple(f.name for f in fields(ProvedRow))
    manifest = NAME

    def encode(self, row: ProvedRow) -> tuple[Any, ...]:
        """The row's own fields."""
        return astuple(row)

    def decode(self, values: Sequence[Any]) -> ProvedRow:
        """The row again, held against what a row can be."""
        row = ProvedRow(*values)
        numbers = (row.radius, row.margin, row.seconds)
        sound = all(isinstance(v, float) for v in numbers) and row.radius >= 0 and not math.isnan(row.margin)
        wrong = row.failure is not None or row.prediction != (row.label if row.label >= 0 else max(row.prediction, 0))
        if not sound or (row.radius > 0 and wrong):
            raise InputError(f"{self.path} is damaged at input {row.id!r}: restore it from a copy")
        return row


@dataclass(frozen=True)
class Asked:
    """Everything that changes the radii.

    Args:
        classes: number of logits.
        norm: of the ball, `l2`, `linf` or `l1`.
        effort: as in `eq.certified_radius`.
        seconds: budget per input; the best radius proved so far counts when it ends.
        attack_steps: of the ℓ2 attack beside each radius (at 0.99, 2, 4, 8 and 16 times it); 0: no attacks.
        attack_seed: of its starts.
    """

    classes: int
    norm: Norm = "l2"
    effort: methods.Effort = "auto"
    seconds: float | None = None
    attack_steps: int = 40
    attack_seed: int = 0

    def __post_init__(self) -> None:
        require_one_of(get_args(Norm), norm=self.norm)
        require_one_of(get_args(methods.Effort), effort=self.effort)
        if self.seconds is not None and not self.seconds > 0:
            raise InputError(f"seconds must be positive, got {self.seconds}")
        if self.attack_steps < 0 or self.classes < 2:
            raise InputError(f"expected attack steps ≥ 0 and two classes, got {self.attack_steps} and {self.classes}")


@dataclass(frozen=True)
class ProvedManifest(Described):
    """Model, data, inputs and what was asked; written once, before the first input."""

    model: dict[str, str]
    data: dict[str, Any]
    selection: Selection
    total: int
    asked: Asked
    note: str = ""
    versions: dict[str, str] = field(default_factory=versions)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    file = NAME

    def identity(self) -> dict[str, Any]:
        """Format, model, data, inputs and what was asked."""
        return {
            "format": FORMAT, "model": self.model["hash"], "data": self.data["fingerprint"], "total": self.total,
            **asdict(self.selection), **asdict(self.asked),
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """What the file holds, without its digest."""
        return {"format": FORMAT, **asdict(self)}


def is_proved(folder: str | Path) -> bool:
    """Whether a directory holds a deterministic run."""
    return (Path(folder) / NAME).is_file()


def read_proved(folder: str | Path) -> ProvedManifest:
    """The manifest of a deterministic run; one that was changed after it was written is refused."""
    path = Path(folder) / NAME
    if not is_proved(folder):
        raise InputError(f"{folder} is not a deterministic run: no readable {NAME}")
    with as_input_error(path, "restore it, or start a new run"):
        plain = unsealed(read_json(path), str(path))
        if plain["format"] != FORMAT:
            raise InputError(f"{path} has format {plain['format']!r}, this version reads {FORMAT}")
        texts = {"model": plain["model"]["hash"], "data": plain["data"]["fingerprint"], "note": plain["note"]}
        if not all(isinstance(t, str) for t in texts.values()) or not isinstance(plain["total"], int):
            raise TypeError("a field is of another kind than this version writes")
        return ProvedManifest(
            dict(plain["model"]), dict(plain["data"]), Selection(**plain["selection"]), plain["total"],
            Asked(**plain["asked"]), plain["note"], dict(plain["versions"]), str(plain["created"]),
        )  # fmt: skip


def require_same(folder: Path, old: ProvedManifest, new: ProvedManifest) -> None:
    """Refuse to continue a run with another model, other data or other settings."""
    before, after = old.identity(), new.identity()
    found = [f"{k}: {before.get(k)} → {after.get(k)}" for k in sorted(after) if before.get(k) != after.get(k)]
    if found:
        raise Refused(f"{folder} holds another run ({'; '.join(found)}): give another --run directory")


class ProvedRun:
    """A deterministic run as it is stored; reading never changes it and works while it is being computed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_proved(folder)

    def store(self, writable: bool = False) -> ProvedStore:
        """The store, open."""
        return ProvedStore(self.folder, identity=self.manifest.digest(), seal=self.manifest.seal(), writable=writable)

    @cached_property
    def rows(self) -> list[ProvedRow]:
        """The stored inputs, in the order of the data."""
        with self.store() as store:
            return store.rows()

    @cached_property
    def attacks(self) -> list[AttackRow]:
        """The closest misclassified points found, ℓ2."""
        with self.store() as store:
            return store.attacks()

    def add_attacks(self, rows: Iterable[AttackRow]) -> None:
        """Store more of them; refused while another process works on the run."""
        with locked(self.folder), self.store(writable=True) as store:
            store.put_attacks(rows)
        self.__dict__.pop("attacks", None)

    @property
    def failures(self) -> dict[InputId, str]:
        """Why inputs failed."""
        return {row.id: row.failure for row in self.rows if row.failure is not None}

    @property
    def finished(self) -> bool:
        """Whether every input was worked off, failed ones included."""
        return len(self.rows) >= self.manifest.total

    @property
    def radius(self) -> NDArray[np.float64]:
        """Proved radii; 0 for failed inputs and wrong answers."""
        return np.array([row.radius for row in self.rows], dtype=np.float64)

    def accuracy(self, epsilon: float = 0.0) -> float:
        """Certified accuracy: the share of the inputs with the right answer and `R ≥ ε`; failed ones count as wrong."""
        return float(certified_accuracy(self.radius, self._right(), epsilon))

    def _right(self) -> NDArray[np.bool_]:
        return np.array([row.radius > 0 for row in self.rows], dtype=np.bool_)

    def summary(self, epsilons: Sequence[float] | None = None) -> dict[str, Any]:
        """Certified accuracy at each ε, average radius, methods, limiting pairs and failures, as plain data."""
        if not self.rows:
            raise InputError(f"{self.folder} has no finished inputs yet")
        largest = float(np.quantile(self.radius[np.isfinite(self.radius)], 0.98)) if len(self.rows) else 0.0
        levels = [k * largest / 5 for k in range(6)] if epsilons is None else list(epsilons)
        known = self._comparable()
        return {
            "inputs": len(self.rows), "total": self.manifest.total, "failed": len(self.failures),
            "norm": self.manifest.asked.norm, "note": self.manifest.note,
            "accuracy": {float(e): self.accuracy(e) for e in levels},
            "average_radius": average_certified_radius(self.radius, self._right()),
            "methods": dict(Counter(row.method for row in self.rows if row.radius > 0).most_common()),
            "limiting": [
                {"answer": a, "rival": b, "inputs": n}
                for (a, b), n in Counter((r.prediction, r.rival) for r in self.rows if r.radius > 0).most_common(5)
            ],
            "seconds": float(sum(row.seconds for row in self.rows)),
            "attacked_inside": sum(0 < a.epsilon < known.get(a.id, 0.0) for a in self.attacks),
            "broken": [str(i) for i in self.broken()],
        }  # fmt: skip

    def _comparable(self) -> dict[InputId, float]:
        """Radii that an ℓ2 attack can contradict: ‖δ‖_∞ ≤ ‖δ‖₂, but ‖δ‖₁ may be larger."""
        return {row.id: row.radius for row in self.rows} if self.manifest.asked.norm != "l1" else {}

    def broken(self) -> list[InputId]:
        """Inputs with a misclassified point strictly within their radius: a bug, if there is one."""
        known = self._comparable()
        found = {a.id for a in self.attacks if a.success and (a.distance or 0.0) < known.get(a.id, 0.0)}
        return sorted(found, key=str)

    def export(self, path: str | Path) -> Path:
        """Write a `.csv`, one line per input, whole or not at all; radii and margins rounded down."""
        path = check_export(path)
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        names = ("id", "position", "label", "prediction", "radius", "rival", "margin", "method", "failure")
        writer.writerow((*names, "attack"))
        reached: dict[InputId, float] = {}
        for a in self.attacks:
            if a.success and a.distance is not None:
                reached[a.id] = min(a.distance, reached.get(a.id, float("inf")))
        for row in self.rows:
            plain = asdict(row) | {"radius": format_down(row.radius, 6), "margin": format_down(row.margin, 6)}
            found = reached.get(row.id)
            writer.writerow((*(plain[n] for n in names), "" if found is None else f"{found:.6g}"))
        atomic_write(path, buffer.getvalue())
        return path


def check_export(path: str | Path) -> Path:
    """Refuse a name that cannot be written later, before a long run begins."""
    path = Path(path)
    if path.suffix != ".csv" or not path.parent.is_dir():
        raise InputError(f"a deterministic run is exported to a .csv file in a folder that exists, got {path}")
    return path


def open_proved(folder: str | Path) -> ProvedRun:
    """Open a deterministic run for reading."""
    return ProvedRun(folder)
