"""A run directory opened for reading: rows, radii at any risk, a summary, attacks, exports.

What may be derived soundly from stored statistics. Buckets, class and map come from the selection sample (or earlier), so
another α or another procedure on the same counts keeps *its* risk. Votes serve every vote procedure. Soft moments were taken
for the buckets planned when sampling: α, the shares and the constant may change, the buckets not. A sample that was stopped by
looking at it admits anytime-valid bounds only. Each derivation keeps its own α; looking at many and publishing the best is not
covered.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core import (
    Floats,
    InputError,
    Ints,
    Mask,
    Refused,
    as_upper,
    average_certified_radius,
    certified_accuracy,
    explained,
    format_down,
    percent,
    round_levels,
)
from equipoise.core.files import atomic_write
from equipoise.runs.sources import InputId
from equipoise.runs.store import (
    AttackRow,
    Constant,
    Kind,
    Manifest,
    Row,
    Settings,
    Store,
    locked,
    read_manifest,
)
from equipoise.smoothing import Certificates
from equipoise.smoothing.bounds import Moments
from equipoise.smoothing.derive import Scores, Votes, derive, joined
from equipoise.smoothing.planning import stored_plan
from equipoise.smoothing.procedures import Partition, Procedure, find_procedure
from equipoise.smoothing.simplex import map_smoothness

STATUSES = ("wrong", "right, not certified", "certified", "abstained", "failed")
#: how the norm of a ball is written
BALLS = {"l2": "ℓ2", "linf": "ℓ∞", "l1": "ℓ1"}


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
    """

    labels: Ints
    answer: Ints
    prediction: Ints
    radius: Floats
    failed: Mask
    about: str
    procedure: str
    alpha: float = 0.0
    sigma: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def labelled(self) -> bool:
        """Whether any input has a label; where none has, every answer counts as right."""
        return bool((self.labels >= 0).any())

    @property
    def right(self) -> Mask:
        """Whose answer is the label."""
        return (self.answer >= 0) & ((self.answer == self.labels) | (not self.labelled))

    @property
    def correct(self) -> Mask:
        """Whose certified answer is the label: what counts for certified accuracy at ε = 0."""
        return self.right & (self.prediction == self.answer)

    @property
    def status(self) -> tuple[str, ...]:
        """`wrong`, `right, not certified`, `certified`, `abstained` or `failed`, for each input."""
        cases = [self.failed, self.answer < 0, self.correct, self.right]
        return tuple(np.select(cases, STATUSES[:0:-1], STATUSES[0]).tolist())

    @property
    def statuses(self) -> dict[str, int]:
        """How many inputs are wrong, right without a certificate, certified, abstained or failed."""
        counts = Counter(self.status)
        return {name: counts[name] for name in STATUSES if counts[name]}

    def accuracy(self, epsilon: Any = 0.0) -> Floats:
        """Certified accuracy at each ε."""
        return certified_accuracy(self.radius, self.correct, epsilon)

    @property
    def average_radius(self) -> float:
        """Average certified radius, 0 where the answer is not certified to be right."""
        return average_certified_radius(self.radius, self.correct)


@dataclass(frozen=True, eq=False)
class Summary:
    """Figures over the finished inputs; failed ones count as not certified.

    Args:
        run: the run.
        results: its certificates.
        accuracy: ε → certified accuracy; without labels the share of inputs with such a certificate, whatever the answer.
        deployed: ε → that of the forward pass in float32, where the run has it.
    """

    run: Run
    results: Results
    accuracy: dict[float, float]
    deployed: dict[float, float]

    @property
    def clean(self) -> float:
        """The share of right answers, certified or not."""
        return float(self.results.right.mean())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        key = "certified_accuracy" if self.results.labelled else "certified_share"
        rows = self.run.rows
        names = (
            "labelled",
            "procedure",
            "alpha",
            "sigma",
            "about",
            "notes",
            "average_radius",
            "statuses",
        )
        figures = {name: getattr(self.results, name) for name in names}
        figures |= {name: getattr(self.run, name) for name in ("kind", "total", "finished")}
        for name in ("accuracy", "deployed"):
            shares = getattr(self, name).items()
            figures[name] = [{"epsilon": e, key: share} for e, share in shares]
        return figures | {
            "clean": self.clean,
            "done": len(rows),
            "failed": len(self.run.failures),
            "methods": Counter(row.method for row in rows if row.method),
            "verdicts": Counter(filter(None, map(self.run.verdict, rows))),
            "draws": sum(row.n0 + row.draws for row in rows),
            "seconds": sum(row.seconds for row in rows),
            "failures": {str(name): reason for name, reason in self.run.failures.items()},
        }

    def lines(self) -> list[str]:
        """The figures as sentences; shares and radii rounded down."""
        figures = self.to_dict()
        r = self.results
        progress = "" if self.run.finished else ", not finished: run the same command to continue"
        how = f"sigma {r.sigma:g}, {r.procedure} at alpha {r.alpha:g}" if r.sigma else r.procedure
        draws = f"{figures['draws']:,} draws, " if r.sigma else ""
        lines = [
            f"{figures['done']} of {figures['total']} inputs{progress}; {how}",
            f"{_listed(r.statuses)}; average certified radius {format_down(r.average_radius, 4)}; "
            f"{draws}{figures['seconds']:.1f} s of processor time",
        ]
        if r.labelled:
            lines.append(f"right answers: {percent(self.clean)} %, with or without a certificate")
        if figures["methods"]:
            lines.append(f"proved by: {_listed(figures['methods'])}")
        if figures["verdicts"]:
            lines.append(f"within {self.run.settings.epsilon}: {_listed(figures['verdicts'])}")
        for name, reason in [*figures["failures"].items()][:1]:
            lines.append(f"first failure, input {name}: {reason}")
        return [*lines, r.about, *r.notes]


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _votes(settings: Settings, rows: list[Row]) -> Votes:
    names = ("selection", "estimation", "draws")
    first, second, draws = (np.array([getattr(r, n) for r in rows], np.float64) for n in names)
    return Votes(first, second, draws, settings.target_radius)


def _scores(manifest: Manifest, rows: list[Row], row: Procedure, network: float | None) -> Scores:
    softs = [r.soft for r in rows if r.soft is not None]
    width = max(len(s.moments[0]) for s in softs)
    stacked = np.zeros((4, len(softs), width))
    for i, s in enumerate(softs):
        stacked[:, i, : len(s.moments[0])] = s.moments

    order = np.array([s.order for s in softs], dtype=np.int64)
    singles = np.array([s.singles for s in softs])
    direct = np.array([s.direct for s in softs])
    plan = stored_plan(row, Partition(order, singles), direct, stacked[0])
    assert manifest.simplex is not None
    smoothness = map_smoothness(manifest.simplex, manifest.settings.num_classes or 0, network)
    moments = Moments(np.array([float(r.draws) for r in rows]), *stacked)
    return Scores(plan, moments, smoothness)


@dataclass(frozen=True)
class Violation:
    """A certificate that an attack broke: a misclassified point nearer than its radius."""

    id: InputId
    distance: float
    radius: float


class Run:
    """A run as it is stored; reading never changes it and works while it is still being computed.

    Rows are read once and kept: open the directory again to see later inputs.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(folder)

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
        return self._column("position")

    @property
    def labels(self) -> Ints:
        """Their labels."""
        return self._column("label")

    def _column(self, name: str) -> NDArray[Any]:
        return np.array([getattr(row, name) for row in self.rows])

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
        self, alpha: float | None = None, procedure: str | None = None, lipschitz: Any = None
    ) -> Certificates:
        """Certificates of a sampled run, without a forward pass; failed inputs abstain.

        Args:
            alpha: risk per input; default that of the run.
            procedure: default that of the run; refused where the stored statistics do not carry it.
            lipschitz: another upper bound of the network's constant, for soft runs.

        Guarantee: each certificate is wrong with probability at most alpha, for one derivation fixed beforehand.
        """
        manifest = self.manifest
        rows = self.rows
        settings = self.settings
        if self.kind == "proved" or not rows:
            raise InputError(
                "a proved run holds radii without risk, and a run with no finished inputs has none: there is nothing to derive"
            )
        alpha = settings.alpha if alpha is None else alpha
        own = procedure is None or (settings.adaptive and procedure == "adaptive")
        row = settings.row if own else find_procedure(str(procedure))
        if row.soft and not row.hard and not settings.soft:
            raise Refused(
                f"{row.name!r} needs soft scores, this run stored votes only: sample again with --procedure {row.name}"
            )
        soft = settings.soft and row.soft
        if lipschitz is not None and not soft:
            raise Refused(
                "votes have no Lipschitz constant: it can be given for runs and procedures of soft scores only"
            )

        constant = manifest.lipschitz
        if lipschitz is not None:
            bound = as_upper(lipschitz, "Lipschitz constant of the network")
            constant = Constant.model_construct(value=bound, source="given")
        noise = settings.noise_law()
        places = [i for i, stored in enumerate(rows) if stored.failure is None]
        parts = []
        if places:
            members = [rows[i] for i in places]
            if manifest.scored and row.soft:
                network = manifest.stretched(constant)
                sample: Scores | Votes = _scores(manifest, members, row, network)
            else:
                sample = _votes(settings, members)
            parts = [(places, derive(sample, row, noise.setting(alpha, "")))]

        about = f"the majority vote of the network under {noise}"
        if soft:
            about = (
                f"the classifier smoothed with {noise} and {manifest.simplex}, fixed before the run"
            )
        name = "adaptive" if settings.adaptive else row.name
        certificates = joined(parts, len(rows), name, noise.setting(alpha, about))
        if constant is not None and soft:
            certificates.details["lipschitz"] = str(constant)
        return certificates

    def results(
        self, alpha: float | None = None, procedure: str | None = None, lipschitz: Any = None
    ) -> Results:
        """What the run certifies, input by input.

        Args:
            alpha: risk per input, for sampled runs; default that of the run.
            procedure: for sampled runs; default that of the run.
            lipschitz: another upper bound of the network's constant, for soft runs.
        """
        if not self.rows:
            raise InputError(f"{self.folder} has no finished inputs yet")
        failed = np.array([row.failure is not None for row in self.rows])
        if self.kind == "sampled":
            c = self.certificates(alpha, procedure, lipschitz)
            answer = c.prediction.astype(np.int64)
            rest = (c.about, c.procedure, c.alpha, c.sigma, self._notes(c))
            return Results(self.labels, answer, answer, c.radius, failed, *rest)

        if any(value is not None for value in (alpha, procedure, lipschitz)):
            raise InputError(
                "a proved run has no risk and no procedure: there is nothing to derive anew"
            )
        ball = BALLS[self.settings.norm]
        about = f"Certifies the network itself, with certainty: its answer is proved on the whole {ball} ball."
        procedure = "deterministic" if ball == "ℓ2" else f"deterministic, {ball}"
        answer = self._column("answer")
        radius = self._column("radius").astype(np.float64)
        prediction = np.where(radius > 0, answer, -1)
        notes = tuple(filter(None, [self.manifest.note]))
        return Results(
            self.labels, answer, prediction, radius, failed, about, procedure, notes=notes
        )

    def _notes(self, certificates: Certificates) -> tuple[str, ...]:
        """Another derivation than the run's own, and what it assumes."""
        settings = self.settings
        own = "adaptive" if settings.adaptive else settings.procedure
        notes = []
        if (certificates.alpha, certificates.procedure) != (settings.alpha, own):
            notes.append(
                f"Derived again (the run was made for {own} at alpha {settings.alpha:g}): alpha covers one derivation "
                "fixed beforehand, not the best of several looked at."
            )
        if "lipschitz" in certificates.details:
            notes.append(f"Lipschitz constant of the network: {certificates.details['lipschitz']}.")
        return tuple(notes)

    def summary(
        self, epsilons: Sequence[float] | None = None, *, results: Results | None = None
    ) -> Summary:
        """Certified accuracy at each ε and the rest.

        Args:
            epsilons: radii; by default 0, σ/2 … 3σ, and for proved runs round numbers up to the largest radii.
            results: what `results` returned; by default those of the run's own settings.
        """
        results = results or self.results()
        levels = self._levels(results) if epsilons is None else as_levels(epsilons)
        deployed = {}
        if self.settings.deployed:
            radii = np.array([row.deployed or 0.0 for row in self.rows])
            certified = results.correct & (radii > 0)
            deployed = {e: float(certified_accuracy(radii, certified, e)) for e in levels}
        return Summary(self, results, {e: float(results.accuracy(e)) for e in levels}, deployed)

    def _levels(self, results: Results) -> list[float]:
        if self.settings.target_radius is not None:
            return [self.settings.target_radius]
        if self.kind == "sampled":
            return [round(k * results.sigma / 2, 12) for k in range(7)]
        return list(round_levels(float(np.quantile(results.radius, 0.98))))

    def verdict(self, row: Row) -> str:
        """Whether a row is `proved`, `broken` or `undecided` at the one radius of a proved run; empty where it has none."""
        epsilon = self.settings.epsilon
        if epsilon is None or row.failure is not None:
            return ""
        if row.radius >= epsilon:
            return "proved"
        return "undecided" if row.broken is None else "broken"

    def certified(self, results: Results) -> dict[InputId, float]:
        """The radius of every input whose certified answer is right, 0 for the others.

        Args:
            results: the certificates.
        """
        return dict(
            zip(self.ids, np.where(results.correct, results.radius, 0.0).tolist(), strict=True)
        )

    def contradictions(self, results: Results) -> tuple[int, list[Violation]]:
        """How many inputs were attacked inside their certified radius, and the certificates that broke.

        Args:
            results: the certificates.
        """
        certified = self.certified(results)
        nearest: dict[InputId, float] = {}
        for row in self.attacks():
            distance = row.distance if row.success and row.distance is not None else inf
            if min(distance * (1 + 1e-12), row.epsilon) < certified.get(row.id, 0.0):
                nearest[row.id] = min(distance, nearest.get(row.id, inf))
        broken = [
            Violation(name, distance, certified[name])
            for name, distance in nearest.items()
            if distance * (1 + 1e-12) < certified[name]
        ]
        return len(nearest), broken

    def export(self, path: str | Path, *, results: Results | None = None) -> Path:
        """Write a table (.csv), whole or not at all; radii are rounded down.

        Args:
            path: ends in .csv.
            results: what `results` returned; by default those of the run's own settings.
        """
        path = Path(path)
        if path.suffix != ".csv":
            raise InputError(f"cannot export to {path.name!r}: expected a name that ends in .csv")
        records = self._records(results or self.results())
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, records[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        atomic_write(path, buffer.getvalue())
        return path

    def _records(self, results: Results) -> list[dict[str, Any]]:
        """One record per input, without the time: the same for every repetition of a run."""
        records = []
        for row, answer, radius, status in zip(
            self.rows, results.answer, results.radius, results.status, strict=True
        ):
            own = ("rival", "method") if self.kind == "proved" else ("draws",)
            record = row.model_dump(include={"id", "position", "label"})
            record |= {"answer": int(answer), "status": status, "radius": format_down(radius)}
            record |= {name: getattr(row, name) for name in own}
            if self.settings.epsilon is not None:
                record["verdict"] = self.verdict(row)
            if self.settings.deployed:
                record["deployed"] = format_down(row.deployed or 0.0)
            records.append(record | {"failure": row.failure or ""})
        return records

    def attacks(self) -> list[AttackRow]:
        """Attack results stored with the run."""
        with Store(self.folder, self.manifest) as store:
            return store.attacks()

    def add_attacks(self, rows: Iterable[AttackRow]) -> None:
        """Store attack results, keyed by the ids of the data. Refused while another process works on the run."""
        with locked(self.folder), Store(self.folder, self.manifest, writable=True) as store:
            store.put_attacks(rows)


def as_levels(values: Any) -> list[float]:
    """Radii as numbers; anything else, and negative ones, are refused."""
    with explained("expected radii such as [0.25, 0.5]"):
        levels = [float(value) for value in values]
    if not all(0 <= level < inf for level in levels):
        raise InputError(f"radii must be finite and non-negative, got {levels}")
    return levels


def open_run(folder: str | Path) -> Run:
    """Open a run directory for reading."""
    return Run(folder)
