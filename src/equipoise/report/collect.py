"""From run directories to the data of one report: certificates, attacks, and bounds of networks."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import Floats, InputError, floats
from equipoise.lipschitz.report import Report
from equipoise.runs import Results, Run, is_run, open_run, versions
from equipoise.runs.run import BALLS
from equipoise.smoothing import read_log


@dataclass(frozen=True, eq=False)
class Series:
    """Certificates of one network by one procedure: a curve of the report.

    `results` are the run's own, so certified accuracy is computed by the same function as in every command. `assumption` is
    what they rest on without proof, `data` names the data, `total` is how many inputs the run is to have, `own` whether the
    run was made for this procedure: other curves of the run are derived beside it. `rivals` and `methods` are, for proved
    runs, the classes that limit the radii and what proved them. `norm` is that of the balls.
    """

    model: str
    run: str
    procedure: str
    ids: tuple[str, ...]
    results: Results
    assumption: str = ""
    data: str = ""
    total: int = 0
    own: bool = True
    rivals: tuple[int, ...] = ()
    methods: tuple[str, ...] = ()
    norm: str = "ℓ2"

    @property
    def inputs(self) -> str:
        """What shares are shares of: "20", or "3 of 20 so far"."""
        done = len(self.ids)
        return f"{done} of {self.total} so far" if done < self.total else str(done)


@dataclass(frozen=True, eq=False)
class Attacks:
    """The closest misclassified point an attack found for each input: `distance` is ∞ where it found none.

    Accuracy under attack is an upper bound of the true robust accuracy.
    """

    model: str
    run: str
    kind: str
    ids: tuple[str, ...]
    distance: Floats
    settings: str = ""

    def accuracy(self, epsilon: Any) -> Floats:
        """The share of the inputs with no misclassified point found within ε."""
        distances = np.sort(self.distance)
        within = np.searchsorted(distances, floats(epsilon), side="right")
        return np.asarray(1 - within / len(distances))


@dataclass(frozen=True)
class Checked:
    """How many certificates were attacked strictly inside their radius, and which broke."""

    tried: int
    where: tuple[str, ...] = ()

    @property
    def broken(self) -> int:
        """How many certificates broke."""
        return len(self.where)


@dataclass(frozen=True)
class ReportData:
    """Everything one report shows; `audits` and `sets` are by the name of their network.

    Audits are what `Report.to_dict` gives, sets the rows of `RobustConformal.coverage`.
    """

    title: str
    series: tuple[Series, ...] = ()
    attacks: tuple[Attacks, ...] = ()
    audits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    runs: tuple[Mapping[str, Any], ...] = ()
    tested: Checked | None = None
    intro: str = ""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: Mapping[str, str] = field(default_factory=versions)
    notes: tuple[str, ...] = ()
    sets: Mapping[str, Sequence[Mapping[str, float]]] = field(default_factory=dict)

    @property
    def models(self) -> tuple[str, ...]:
        """The networks, in order of appearance."""
        panels = [p.model for group in (self.series, self.attacks) for p in group]
        return tuple(dict.fromkeys([*self.audits, *panels]))


def collect(
    folders: Sequence[str | Path],
    *,
    title: str = "Certified robustness",
    intro: str = "",
    audits: Mapping[str, Report] | None = None,
    sets: Mapping[str, Sequence[Mapping[str, float]]] | None = None,
    notes: Iterable[str] = (),
) -> ReportData:
    """Read run directories and certification logs into the data of one report.

    Certificates are derived anew from stored counts, nothing is sampled.

    Args:
        folders: run directories, or logs in Cohen's format (.tsv).
        title: of the page.
        intro: its first paragraph.
        audits: bounds of networks, by name.
        sets: coverage of conformal sets, by name: what `RobustConformal.coverage` measured.
        notes: further sentences about what is not guaranteed.
    """
    paths = [Path(folder) for folder in folders]
    short = len({path.resolve().name for path in paths}) == len(paths)
    names = {path.resolve().name if short else str(path): path for path in paths}
    runs = {name: open_run(path) for name, path in names.items() if is_run(path)}
    for name, path in names.items():
        if name not in runs and not path.is_file():
            raise InputError(
                f"{path} is not a run: it holds no run.json, and is no certification log (.tsv)"
            )
    titles = _titles(runs)
    series: list[Series] = []
    attacks: list[Attacks] = []
    about: list[Mapping[str, Any]] = []
    remarks = list(notes)
    tried = 0
    broken: list[str] = []
    for name, path in names.items():
        if name not in runs:
            series.append(_published(name, path))
            about.append(
                {
                    "run": name,
                    "model": name,
                    "inputs": len(series[-1].ids),
                    "source": "certification log",
                }
            )
            continue
        run, model = runs[name], titles[name]
        norm = BALLS[run.settings.norm]
        panel = model if norm == "ℓ2" else f"{model}, {norm}"  # radii of two norms share no axis
        curves = _series(name, panel, run)
        attacks += closest(curves[0], run)
        for s in curves:
            series.append(s)
            count, violations = run.contradictions(s.results)
            tried += count
            # a smoothed success is a test on a few draws, one against the network a point that anyone can evaluate
            verdict = (
                "broken"
                if run.kind == "proved"
                else "suspected: `equipoise attack` confirms or withdraws it"
            )
            broken += [f"input {v.id} of {name} ({s.procedure}): {verdict}" for v in violations]
        about.append(_about(name, model, run))
        if not run.finished:
            remarks.append(
                f"{name} is not finished: {run.total - len(run.rows)} of {run.total} inputs are missing."
            )
    return ReportData(
        title,
        tuple(series),
        tuple(attacks),
        {name: bound.to_dict() for name, bound in (audits or {}).items()},
        tuple(about),
        Checked(tried, tuple(broken)) if tried else None,
        intro,
        notes=tuple(remarks),
        sets=sets or {},
    )


def _titles(runs: Mapping[str, Run]) -> dict[str, str]:
    """The title of every run's network; networks that share a name but not their weights get the start of their hash."""
    models = {name: run.manifest.model for name, run in runs.items()}
    namesakes = Counter(model.source for model in set(models.values()))
    return {
        name: model.source
        if namesakes[model.source] == 1
        else f"{model.source} ({model.hash.removeprefix('sha256:')[:8]})"
        for name, model in models.items()
    }


def _about(name: str, model: str, run: Run) -> dict[str, Any]:
    """Parameters, seeds and versions of a run."""
    manifest = run.manifest
    facts = manifest.identity()
    return {
        "run": name,
        **facts,
        "model": model,
        "model hash": facts["model"],
        "data": manifest.data.source,
        "data fingerprint": facts["data"],
        "inputs": f"{len(run.rows)} of {run.total}",
        "note": manifest.note,
        "failed inputs": len(run.failures),
        "started": manifest.created,
        "versions": ", ".join(f"{k} {v}" for k, v in manifest.versions.items()),
    }


def _series(name: str, model: str, run: Run) -> list[Series]:
    """The curve of a run's own procedure, then the plainer one that its draws give too."""
    settings = run.settings
    constant = run.manifest.lipschitz
    own = run.results()
    ways = {own.procedure: own}
    proved = run.kind == "proved"
    if settings.soft and constant is not None:
        ways = {f"{own.procedure} + Lipschitz": own}
        ways[own.procedure] = run.results(lipschitz=math.inf)
    elif not (proved or settings.soft or settings.adaptive or own.procedure == "cohen"):
        ways["cohen"] = run.results(procedure="cohen")

    assumed = str(constant) if constant is not None and constant.assumed else ""
    return [
        Series(
            model,
            name,
            label,
            tuple(map(str, run.ids)),
            results,
            assumed if results is own else "",
            run.manifest.data.source,
            run.total,
            own=results is own,
            rivals=tuple(row.rival for row in run.rows) if proved else (),
            methods=tuple(row.failure or row.method for row in run.rows) if proved else (),
            norm=BALLS[settings.norm],
        )
        for label, results in ways.items()
    ]


def _published(name: str, path: Path) -> Series:
    """A certification log of somebody else, or of our own export: what it says, not what was checked."""
    log = read_log(path)
    about = "Read from a certification log: noise level, risk and procedure are not in it, and nothing of it was checked."
    # a right answer that is not marked correct is not certified
    prediction = np.where(~log.correct & (log.predict == log.label), -1, log.predict)
    radius = np.where(prediction >= 0, log.radius, 0.0)
    failed = np.zeros(len(radius), bool)
    results = Results(
        log.label, log.predict, prediction, radius, failed, about, "as published", alpha=math.nan
    )
    assumption = "unknown: the log does not say what it rests on"
    return Series(name, name, "as published", tuple(str(i) for i in log.idx), results, assumption)


def closest(own: Series, run: Run) -> list[Attacks]:
    """The distance of the closest misclassified point found for each input: 0 where it is answered wrong, ∞ where none was.

    Args:
        own: the curve of the run's own procedure.
        run: with its attacks.
    """
    rows = run.attacks()
    distances = {
        i: 0.0 if status == "wrong" else math.inf
        for i, status in zip(own.ids, own.results.status, strict=True)
    }
    for row in rows:
        if row.success:
            reached = row.epsilon if row.distance is None else row.distance
            distances[str(row.id)] = min(distances[str(row.id)], reached)
    settings = sorted({f"{row.steps} steps, seed {row.seed}" for row in rows})
    kind = "base" if run.kind == "proved" else "smoothed"
    distance = np.array([*distances.values()])
    about = "; ".join(settings)
    return [Attacks(own.model, own.run, kind, own.ids, distance, about)] if rows else []


def as_document(data: ReportData) -> dict[str, Any]:
    """Every number of a report as plain data, with every digit: for `--json`, and for the page's script."""
    series = []
    for s in data.series:
        r = s.results
        entry = {
            name: getattr(s, name)
            for name in ("model", "run", "procedure", "norm", "data", "total", "own", "ids")
        }
        entry |= {
            name: getattr(r, name)
            for name in (
                "sigma",
                "alpha",
                "about",
                "labelled",
                "average_radius",
                "status",
                "statuses",
            )
        }
        columns = {"label": r.labels, "prediction": r.prediction, "radius": r.radius}
        entry |= {name: column.tolist() for name, column in columns.items()}
        shares = {str(e): float(r.accuracy(e)) for e in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)}
        series.append({**entry, "inputs": len(s.ids), "certified_accuracy": shares})
    return {
        "title": data.title,
        "created": data.created,
        "versions": data.versions,
        "runs": data.runs,
        "series": series,
        "attacks": [
            asdict(a) | {"distance": a.distance.tolist(), "inputs": len(a.ids)}
            for a in data.attacks
        ],
        "audits": [{"model": name, **bound} for name, bound in data.audits.items()],
        "sets": data.sets,
        "tested": data.tested and {**asdict(data.tested), "broken": data.tested.broken},
    }
