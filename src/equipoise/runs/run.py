"""A run directory opened for reading: rows, radii at any risk, a summary, attacks, exports."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core.accuracy import average_certified_radius, certified_accuracy, percent
from equipoise.core.bounds import format_down, format_up
from equipoise.core.errors import InputError
from equipoise.core.files import atomic_write
from equipoise.runs.derive import derive
from equipoise.runs.inputs import InputId
from equipoise.runs.settings import Kind, Manifest, Settings, as_path, read_manifest
from equipoise.runs.store import AttackRow, Row, Session, Store, locked
from equipoise.smoothing import Certificates

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WRONG, UNPROVED, PROVED, ABSTAINED, FAILED = STATUSES = (
    "wrong",
    "right, nothing proved",
    "proved",
    "abstained",
    "failed",
)
_BALL = {"l2": "ℓ2", "linf": "ℓ∞", "l1": "ℓ1"}


@dataclass(frozen=True, eq=False)
class Results:
    """What a run certifies, input by input, whatever its kind.

    Args:
        labels: of the data, −1 where there is none.
        answer: of the classifier, −1 where it gives none.
        prediction: the certified answer, −1 where nothing is certified.
        radius: certified, 0 where nothing is.
        failed: which inputs failed.
        about: what the certificates speak of, in a sentence.
        procedure: how they were derived.
        alpha: risk per input, 0 for proofs.
        sigma: noise level, 0 for proofs.
        notes: what a reader must know.
        p_lower: lower bounds of the winning class's probability, for sampled runs.
        p_upper: upper bounds of the rival's probability, for sampled runs.
    """

    labels: Ints
    answer: Ints
    prediction: Ints
    radius: Floats
    failed: NDArray[np.bool_]
    about: str
    procedure: str
    alpha: float = 0.0
    sigma: float = 0.0
    notes: tuple[str, ...] = ()
    p_lower: Floats | None = None
    p_upper: Floats | None = None

    def __len__(self) -> int:
        return len(self.radius)

    @property
    def labelled(self) -> bool:
        """Whether any input has a label; where none has, every answer counts as right."""
        return bool((self.labels >= 0).any())

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whose answer is the label."""
        return np.asarray((self.answer >= 0) & ((self.answer == self.labels) | (not self.labelled)))

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Whose certified answer is the label: what counts for certified accuracy at ε = 0."""
        return np.asarray(self.right & (self.prediction == self.answer))

    @property
    def status(self) -> tuple[str, ...]:
        """`wrong`, `right, nothing proved`, `proved`, `abstained` or `failed`, for each input."""
        found = np.where(self.right, np.where(self.correct, PROVED, UNPROVED), WRONG)
        found = np.where(self.answer < 0, ABSTAINED, found)
        return tuple(np.where(self.failed, FAILED, found).tolist())

    def accuracy(self, epsilon: Any = 0.0) -> Floats:
        """Certified accuracy at each ε."""
        return certified_accuracy(self.radius, self.correct, epsilon)

    @property
    def average_radius(self) -> float:
        """Average certified radius, 0 where the answer is not certified to be right."""
        return average_certified_radius(self.radius, self.correct)


@dataclass(frozen=True)
class Summary:
    """Figures over the finished inputs; failed ones count as not certified.

    Without labels `accuracy` is the share of inputs with a certificate of that radius, whatever the answer. `clean` is the
    share of right answers, certified or not.
    """

    kind: Kind
    total: int
    done: int
    labelled: bool
    accuracy: dict[float, float]
    clean: float
    average_radius: float
    statuses: dict[str, int]
    seconds: float
    procedure: str
    alpha: float
    sigma: float
    about: str
    draws: int = 0
    methods: dict[str, int] = field(default_factory=dict)
    deployed: dict[float, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether every input of the run was worked off."""
        return self.done == self.total

    @property
    def failed(self) -> int:
        """How many inputs failed."""
        return self.statuses.get(FAILED, 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        key = "certified_accuracy" if self.labelled else "certified_share"
        plain = asdict(self) | {"finished": self.finished, "failed": self.failed, "notes": list(self.notes)}
        for name in ("accuracy", "deployed"):
            plain[name] = [{"epsilon": e, key: share} for e, share in getattr(self, name).items()]
        return plain

    def lines(self) -> list[str]:
        """The figures as sentences; shares and radii rounded down."""
        head = f"{self.done} of {self.total} inputs"
        if not self.finished:
            head += ", not finished: run the same command to continue"
        how = f"sigma {self.sigma:g}, {self.procedure} at alpha {self.alpha:g}" if self.sigma else self.procedure
        counts = ", ".join(f"{count} {name}" for name, count in self.statuses.items())
        spent = f"{self.draws:,} draws, " * bool(self.draws) + f"{self.seconds:.1f} s of processor time"
        lines = [f"{head}; {how}", f"{counts}; average certified radius {format_down(self.average_radius, 4)}; {spent}"]
        if self.labelled:
            lines.append(f"right answers: {percent(self.clean)} %, with or without a certificate")
        if self.methods:
            lines.append("proved by: " + ", ".join(f"{name} {count}" for name, count in self.methods.items()))
        if self.failures:
            name, reason = next(iter(self.failures.items()))
            lines.append(f"first failure, input {name}: {reason}")
        return [*lines, self.about, *self.notes]


class Run:
    """A run as it is stored; reading never changes it and works while it is still being computed.

    Rows are read once and kept: open the directory again to see later inputs.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = as_path(folder)
        self.manifest: Manifest = read_manifest(folder)

    @property
    def settings(self) -> Settings:
        """Everything that decides the result, apart from model and data."""
        return self.manifest.settings

    @property
    def kind(self) -> Kind:
        """ "sampled" (randomized smoothing) or "proved" (deterministic radii)."""
        return self.settings.kind

    @cached_property
    def rows(self) -> list[Row]:
        """The stored inputs, in the order of the data."""
        with Store(self.folder, self.manifest) as store:
            return store.rows()

    @property
    def ids(self) -> list[InputId]:
        """Ids of the stored inputs."""
        return [row.id for row in self.rows]

    @property
    def positions(self) -> Ints:
        """Their places in the data."""
        return np.array([row.position for row in self.rows], dtype=np.int64)

    @property
    def labels(self) -> Ints:
        """Their labels."""
        return np.array([row.label for row in self.rows], dtype=np.int64)

    @property
    def failures(self) -> dict[InputId, str]:
        """Why inputs failed."""
        return {row.id: row.failure for row in self.rows if row.failure is not None}

    @property
    def total(self) -> int:
        """How many inputs the run has when it is finished."""
        return self.manifest.total

    @property
    def finished(self) -> bool:
        """Whether every input was worked off, failed ones included."""
        return len(self.rows) >= self.total

    def certificates(
        self,
        alpha: float | None = None,
        procedure: str | None = None,
        *,
        lipschitz: Any = None,
        target_radius: float | None = None,
    ) -> Certificates:
        """Certificates of a sampled run, without a forward pass.

        Args:
            alpha: risk per input; default that of the run.
            procedure: default that of the run; refused where the stored statistics do not carry it.
            lipschitz: another upper bound of the network's constant, for soft runs.
            target_radius: another target, for adaptive runs with a target.
        """
        return derive(self.manifest, self.rows, alpha, procedure, lipschitz, target_radius)

    def results(self, alpha: float | None = None, procedure: str | None = None, **changes: Any) -> Results:
        """What the run certifies, input by input.

        Args:
            alpha: risk per input, for sampled runs; default that of the run.
            procedure: for sampled runs; default that of the run.
            **changes: further changes of `certificates`.
        """
        if not self.rows:
            raise InputError(f"{self.folder} has no finished inputs yet")
        failed = np.array([row.failure is not None for row in self.rows])
        if self.kind == "proved":
            if any(value is not None for value in (alpha, procedure, *changes.values())):
                raise InputError("a proved run has no risk and no procedure: there is nothing to derive anew")
            return self._proved(failed)

        found = self.certificates(alpha, procedure, **changes)
        answer = found.prediction.astype(np.int64)
        return Results(
            self.labels,
            answer,
            answer,
            found.radius,
            failed,
            found.about,
            found.procedure,
            found.alpha,
            found.sigma,
            tuple(self._notes(found)),
            found.p_lower,
            found.p_upper,
        )

    def _proved(self, failed: NDArray[np.bool_]) -> Results:
        settings = self.settings
        ball = _BALL[settings.norm]
        answer = np.array([row.answer for row in self.rows], dtype=np.int64)
        radius = np.array([row.radius for row in self.rows], dtype=np.float64)
        certified = np.array([row.radius > 0 for row in self.rows])
        about = (
            f"Certifies the network itself, with certainty: its answer is proved on the whole {ball} ball, for the real "
            "function of the stored weights, evaluated in float64 with its rounding covered."
        )
        procedure = "deterministic" if settings.norm == "l2" else f"deterministic, {ball}"
        notes = (self.manifest.note,) if self.manifest.note else ()
        prediction = np.where(certified, answer, -1)
        return Results(self.labels, answer, prediction, radius, failed, about, procedure, notes=notes)

    def _notes(self, found: Certificates) -> list[str]:
        """Assumptions, another derivation than the run's own, and mixed software."""
        notes, settings = [], self.settings
        if found.alpha != settings.alpha or found.procedure not in (settings.procedure, "adaptive"):
            own = "adaptive" if settings.adaptive else settings.procedure
            notes.append(
                f"Derived again (the run was made for {own} at alpha {settings.alpha:g}): alpha covers one derivation "
                "fixed beforehand, not the best of several looked at."
            )
        if "lipschitz" in found.details:
            notes.append(f"Lipschitz constant of the network: {found.details['lipschitz']}.")
        used = sorted({s.versions.get("torch", "") for s in self.sessions()})
        if len(used) > 1:
            notes.append(f"Inputs were computed with torch {' and '.join(used)}: their noise may differ.")
        return notes

    def summary(self, epsilons: Sequence[float] | None = None, *, results: Results | None = None) -> Summary:
        """Certified accuracy at each ε and the rest.

        Args:
            epsilons: radii; by default 0, σ/2 … 3σ, and for proved runs a fifth of the largest radii at a time.
            results: what `results` returned; by default those of the run's own settings.
        """
        results = self.results() if results is None else results
        levels = self._levels(results) if epsilons is None else as_levels(epsilons)
        status = Counter(results.status)
        methods = Counter(row.method for row in self.rows if row.radius > 0 and row.method)
        deployed = {}
        if self.settings.deployed:
            radii = np.array([row.deployed or 0.0 for row in self.rows])
            sure = results.correct & (radii > 0)
            deployed = {e: float(certified_accuracy(radii, sure, e)) for e in levels}
        return Summary(
            kind=self.kind,
            total=self.total,
            done=len(results),
            labelled=results.labelled,
            accuracy={e: float(results.accuracy(e)) for e in levels},
            clean=float(results.right.mean()),
            average_radius=results.average_radius,
            statuses={name: status[name] for name in STATUSES if status[name]},
            seconds=float(sum(row.seconds for row in self.rows)),
            procedure=results.procedure,
            alpha=results.alpha,
            sigma=results.sigma,
            about=results.about,
            draws=sum(row.n0 + row.draws for row in self.rows),
            methods=dict(methods.most_common()),
            deployed=deployed,
            notes=(*results.notes, *self._attack_notes(results)),
            failures={str(name): reason for name, reason in self.failures.items()},
        )

    def _levels(self, results: Results) -> list[float]:
        if self.kind == "sampled":
            target = self.settings.target_radius
            if target is not None:
                return sorted({target, *results.radius[results.radius > 0].tolist()})
            return [k * results.sigma / 2 for k in range(7)]
        largest = float(np.quantile(results.radius, 0.98))
        return sorted({k * largest / 5 for k in range(6)})

    def _attack_notes(self, results: Results) -> list[str]:
        """Attacks that contradict a proved radius: bugs, if there are any."""
        if self.kind == "sampled":
            return []
        tried, broken = self.contradictions(results)
        if not tried:
            return []
        named = f": {', '.join(broken[:5])}; please report this bug of equipoise" if broken else ""
        return [f"{tried} inputs attacked inside their radius, {len(broken)} radii contradicted{named}"]

    def contradictions(self, results: Results) -> tuple[int, list[str]]:
        """How many inputs were attacked inside their certified radius, and those whose certificate broke.

        Args:
            results: the certificates.
        """
        if self.kind == "proved" and self.settings.norm == "l1":
            return 0, []  # ‖δ‖₁ may be larger than the ℓ2 distance of an attack
        speaks = "base" if self.kind == "proved" else "smoothed"
        radii = np.where(results.correct, results.radius, 0.0).tolist()
        radius = dict(zip(self.ids, radii, strict=True))
        tried, broken = set[InputId](), set[InputId]()
        for row in self.attacks():
            known = radius.get(row.id, 0.0)
            if row.kind != speaks or not known:
                continue
            if row.epsilon < known:
                tried.add(row.id)
            if row.success and row.distance is not None and row.distance * (1 + 1e-12) < known:
                broken.add(row.id)
        return len(tried | broken), sorted(str(name) for name in broken)

    def export(self, path: str | Path, *, results: Results | None = None) -> Path:
        """Write `.csv`, `.json` or `.tsv` (Cohen's log), whole or not at all; radii are rounded down.

        Args:
            path: the ending chooses the format.
            results: what `results` returned; by default those of the run's own settings.
        """
        path = as_path(path)
        if path.suffix not in _FORMATS:
            raise InputError(f"cannot export to {path.name!r}: expected an ending among {', '.join(_FORMATS)}")
        if not path.parent.is_dir():
            raise InputError(f"cannot write {path}: there is no folder {path.parent}")
        results = self.results() if results is None else results
        atomic_write(path, _FORMATS[path.suffix](self, results))
        return path

    def attacks(self) -> list[AttackRow]:
        """Attack results stored with the run."""
        with Store(self.folder, self.manifest) as store:
            return store.attacks()

    def add_attacks(self, rows: Iterable[AttackRow]) -> None:
        """Store attack results, keyed by the ids of the data. Refused while another process works on the run."""
        with locked(self.folder), Store(self.folder, self.manifest, writable=True) as store:
            store.put_attacks(rows)

    def sessions(self) -> list[Session]:
        """When and with which software inputs were computed."""
        with Store(self.folder, self.manifest) as store:
            return store.sessions()


def as_levels(values: Any) -> list[float]:
    """Radii as numbers; what is none, or negative, is refused."""
    try:
        levels = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise InputError(f"expected radii such as [0.25, 0.5], got {type(values).__name__}") from error
    if not all(0 <= level < math.inf for level in levels):
        raise InputError(f"radii must be finite and non-negative, got {levels}")
    return levels


def open_run(folder: str | Path) -> Run:
    """Open a run directory for reading."""
    return Run(folder)


def _records(run: Run, results: Results) -> list[dict[str, Any]]:
    """One record per input, without the time: the same for every repetition of a run."""
    records = []
    for i, (row, status) in enumerate(zip(run.rows, results.status, strict=True)):
        record: dict[str, Any] = {
            "id": row.id,
            "position": row.position,
            "label": row.label,
            "answer": int(results.answer[i]),
            "radius": format_down(float(results.radius[i]), 6),
            "status": status,
        }
        if results.p_lower is not None and results.p_upper is not None:
            record |= {
                "p_lower": format_down(float(results.p_lower[i]), 6),
                "p_upper": format_up(float(results.p_upper[i]), 6),
                "draws": row.draws,
            }
        else:
            margin = "" if row.margin is None else format_down(row.margin, 6)
            record |= {"rival": row.rival, "margin": margin, "method": row.method}
            if row.deployed is not None:
                record["deployed"] = format_down(row.deployed, 6)
        records.append(record | {"failure": row.failure or ""})
    return records


def _csv(run: Run, results: Results) -> str:
    records = _records(run, results)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return buffer.getvalue()


def _json(run: Run, results: Results) -> str:
    document = {"run": run.manifest.to_dict(), "about": results.about, "inputs": _records(run, results)}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _log(run: Run, results: Results) -> str:
    """Cohen's log, readable by `smoothing.read_log`: idx is the position in the data."""
    lines = ["idx\tlabel\tpredict\tradius\tcorrect\ttime"]
    for row, answer, radius, right in zip(
        run.rows, results.prediction, results.radius, results.prediction == results.labels, strict=True
    ):
        spent = timedelta(seconds=round(row.seconds, 6))
        correct = int(right and answer >= 0)
        lines.append(f"{row.position}\t{row.label}\t{answer}\t{format_down(float(radius), 4)}\t{correct}\t{spent}")
    return "\n".join(lines) + "\n"


_FORMATS = {".csv": _csv, ".json": _json, ".tsv": _log}
