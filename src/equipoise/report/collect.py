"""From folders to a report: smoothing runs, margin certificates, and the audits and pictures that lie beside them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.bounds import format_up
from equipoise.core.errors import InputError
from equipoise.report import audits as audit_file
from equipoise.report import gallery as gallery_file
from equipoise.report.data import (
    MARGINS,
    PAIRS,
    Attacks,
    Audit,
    Checked,
    Floats,
    Ints,
    Margins,
    Picture,
    ReportData,
    Series,
    load_margins,
)
from equipoise.runs import Attacked, AttackRow, Run, is_run, open_run, versions
from equipoise.smoothing import read_log


def collect(
    folders: Sequence[str | Path],
    *,
    title: str = "Certified robustness",
    intro: str = "",
    alpha: float | None = None,
    audits: Iterable[Audit] = (),
    notes: Iterable[str] = (),
) -> ReportData:
    """Read run directories (and folders with `margins.json`) into the data of one report.

    Certificates are derived anew from stored counts, at the risk of each run or at `alpha`; nothing is sampled. Every folder
    may hold `audit.json` and `gallery.json`.
    """
    names = _names([Path(f) for f in folders])
    parts = _distinct([_part(name, folder, alpha) for name, folder in names.items()])
    found, pictures = list(audits), list[Picture]()
    for part, folder in zip(parts, names.values(), strict=True):
        if folder.is_file():
            continue
        if (folder / audit_file.NAME).is_file():
            found.append(replace(audit_file.load_audit(folder), model=part.model))
        if (folder / gallery_file.NAME).is_file():
            pictures += [replace(p, model=part.model) for p in gallery_file.load_gallery(folder)]
    return ReportData(
        title, tuple(s for p in parts for s in p.series), tuple(a for p in parts for a in p.attacks), tuple(found),
        tuple(pictures[: gallery_file.LIMIT]), tuple(p.about for p in parts), joined(p.tested for p in parts), intro,
        datetime.now(UTC).isoformat(timespec="seconds"), versions(), (*notes, *(n for p in parts for n in p.notes)),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Part:
    """What one folder adds; `hash` tells networks of one name apart."""

    model: str
    hash: str
    series: tuple[Series, ...]
    attacks: tuple[Attacks, ...]
    about: Mapping[str, Any]
    tested: Checked
    notes: tuple[str, ...] = ()


def _part(name: str, folder: Path, alpha: float | None) -> _Part:
    if folder.is_file():
        return _published(name, folder)
    if is_run(folder):
        run = open_run(folder)
        return _proved(name, run) if run.kind == "proved" else _smoothing(name, run, alpha)
    if (folder / MARGINS).is_file():
        return _deterministic(name, load_margins(folder))
    raise InputError(
        f"{folder} is not a run: it holds neither run.json nor {MARGINS}, and is no certification log (.tsv)"
    )


def _distinct(parts: Sequence[_Part]) -> list[_Part]:
    """Networks that share a name but not their weights get the beginning of their hash behind it."""
    hashes: dict[str, set[str]] = {}
    for part in parts:
        hashes.setdefault(part.model, set()).add(part.hash)

    def renamed(part: _Part) -> _Part:
        if len(hashes[part.model]) == 1:
            return part
        model = f"{part.model} ({part.hash.removeprefix('sha256:')[:8] or 'no hash'})"
        series = tuple(replace(s, model=model) for s in part.series)
        attacks = tuple(replace(a, model=model) for a in part.attacks)
        return replace(part, model=model, series=series, attacks=attacks, about={**part.about, "model": model})

    return [renamed(part) for part in parts]


def _described(name: str, run: Run, own: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What a run is, with its own settings; and a note where it is not finished."""
    manifest, done = run.manifest, len(run.rows)
    if not done:
        raise InputError(f"{run.folder} has no finished inputs yet")
    about = {
        "run": name, "model": manifest.model.source, "model hash": manifest.model.hash,
        "data": manifest.data.source, "data fingerprint": manifest.data.fingerprint,
        "inputs": f"{done} of {manifest.total}", **own, "failed inputs": len(run.failures),
        "started": manifest.created, "versions": ", ".join(f"{k} {v}" for k, v in manifest.versions.items()),
    }  # fmt: skip
    left = manifest.total - done
    return about, (f"{name} is not finished: {left} of {manifest.total} inputs are missing.",) if left > 0 else ()


def _smoothing(name: str, run: Run, alpha: float | None) -> _Part:
    manifest, p = run.manifest, run.settings
    model, ids = manifest.model.source, tuple(str(i) for i in run.ids)
    constant = manifest.lipschitz
    about, notes = _described(name, run, {
        **{k: v for k, v in p.to_dict().items() if k not in ("kind", "inputs")}, "alpha": p.alpha if alpha is None else alpha,
        "map": manifest.map, "lipschitz": None if constant is None else str(constant),
    })  # fmt: skip
    series = []
    for position, (label, options) in enumerate(_ways(run).items()):
        found = run.certificates(alpha, **options)
        assumption = str(constant) if constant is not None and constant.assumed and "lipschitz" not in options else ""
        series.append(
            Series(
                model, name, label, ids, run.labels, found.prediction, found.radius, p.levels.sigma, found.alpha, found.about,
                assumption, len(run.failures), about["data"], manifest.total, position == 0,
            )
        )  # fmt: skip
    rows = run.attacks()
    key = f"{manifest.model.hash} {manifest.data.fingerprint}"
    attacks, tested = closest(model, name, ids, rows), contradictions(series, rows, Attacked.SMOOTHED, key)
    return _Part(model, manifest.model.hash, tuple(series), tuple(attacks), about, tested, notes)


def _ways(run: Run) -> dict[str, dict[str, Any]]:
    """The curves of a run by name, with how they are derived from its draws: its own, and the plainer ones beside it."""
    p = run.settings
    if p.adaptive:
        return {"adaptive": {}}
    if run.manifest.lipschitz is not None and p.soft:
        return {f"{p.procedure} + Lipschitz": {}, p.procedure: {"lipschitz": math.inf}}
    plainer = {} if p.soft else {"cohen": {"procedure": "cohen"}}
    return {p.procedure: {}, **plainer}


def _deterministic(name: str, found: Margins) -> _Part:
    model = found.model.get("source", "network")
    constant = format_up(found.lipschitz, 6)
    divided = f"√2 times the Lipschitz bound {constant}"
    if found.rule == PAIRS:
        divided = f"proved constants of pairs of classes, or by {divided} where that is better"
    about = f"Certifies the network itself: its margin divided by {divided}."
    certified = (found.ids, found.labels, found.prediction, found.radius)
    series = [Series(model, name, "deterministic", *certified, about=about, data=found.data)]
    described = {
        "run": name, "model": model, "model hash": found.model.get("hash", ""), "data": found.data, "inputs": len(found.ids),
        "procedure": "deterministic margin", "lipschitz": f"{constant}, computed by equipoise.lipschitz_bound",
    }  # fmt: skip
    rows, key = found.attacks, f"{found.model.get('hash', name)} {found.data} network"
    attacks, tested = closest(model, name, found.ids, rows), contradictions(series, rows, Attacked.BASE, key)
    return _Part(model, found.model.get("hash", ""), tuple(series), tuple(attacks), described, tested)


def _proved(name: str, run: Run) -> _Part:
    """A deterministic run: radii with rival and method, and the attacks beside them."""
    manifest, settings, rows = run.manifest, run.settings, run.rows
    model, ids = manifest.model.source, tuple(str(i) for i in run.ids)
    own = {k: v for k, v in settings.to_dict().items() if k not in ("kind", "inputs")}
    described, notes = _described(name, run, {**own, "note": manifest.note})
    results = run.results()
    described["procedure"] = results.procedure
    series = [
        Series(
            model, name, results.procedure, ids, run.labels, results.prediction, results.radius, about=results.about,
            failed=len(run.failures), data=described["data"], total=manifest.total,
            rivals=tuple(r.rival for r in rows), methods=tuple(r.failure or r.method for r in rows),
        )
    ]  # fmt: skip
    attacks = closest(model, name, ids, run.attacks())
    key = f"{manifest.model.hash} {manifest.data.fingerprint} network"
    tested = contradictions(series if settings.norm != "l1" else (), run.attacks(), Attacked.BASE, key)
    return _Part(model, manifest.model.hash, tuple(series), tuple(attacks), described, tested, notes)


def _published(name: str, path: Path) -> _Part:
    """A certification log of somebody else, or of our own export: what it says, not what was checked."""
    log = read_log(path)
    ids = tuple(str(i) for i in log.idx)
    about = (
        "Read from a certification log: noise level, risk and procedure are not in it, and nothing of it was checked."
    )
    prediction: Ints = np.where(log.correct, log.label, np.where(log.predict == log.label, -1, log.predict))
    series = Series(
        name, name, "as published", ids, log.label, prediction, np.where(prediction >= 0, log.radius, 0.0), alpha=math.nan,
        about=about, assumption="unknown: the log does not say what it rests on",
    )  # fmt: skip
    about_it = {"run": name, "model": name, "data": "unknown", "inputs": len(ids), "source": "certification log"}
    return _Part(name, "", (series,), (), about_it, Checked(0, 0))


def closest(model: str, run: str, ids: Sequence[str], rows: Iterable[AttackRow]) -> list[Attacks]:
    """For each kind of attack the distance of the closest misclassified point found, ∞ where none was."""
    kinds: dict[Attacked, dict[str, float]] = {}
    settings: dict[Attacked, set[str]] = {}
    for row in rows:
        best, key = kinds.setdefault(row.kind, {}), str(row.id)
        reached = (row.epsilon if row.distance is None else row.distance) if row.success else math.inf
        best[key] = min(best.get(key, math.inf), reached)
        settings.setdefault(row.kind, set()).add(f"{row.steps} steps, {row.restarts} start(s), seed {row.seed}")
    return [
        Attacks(model, run, kind, (kept := tuple(i for i in ids if i in best)),
                np.array([best[i] for i in kept], dtype=np.float64), "; ".join(sorted(settings[kind])))
        for kind, best in kinds.items() if any(i in best for i in ids)
    ]  # fmt: skip


def contradictions(series: Iterable[Series], rows: Iterable[AttackRow], kind: Attacked, key: str = "") -> Checked:
    """How many inputs were attacked strictly inside a certified radius, by the kind it speaks of, and which certificates broke.

    An input counts once, however many curves certify it; `key` tells inputs of other data apart.

    A success is a misclassified point, so only certificates of the right label can be contradicted. A smoothed success is a
    test on a few draws and the store does not say whether fresh draws confirmed it: it is worded as suspected, and
    `equipoise attack` repeats it and decides. A success against the network itself is a point that anyone can evaluate.
    """
    tried, fallen, broken = set[tuple[str, str]](), set[tuple[str, str]](), list[str]()
    rows = [row for row in rows if row.kind == kind]
    for s in series:
        radius: Floats = np.where(s.correct, s.radius, 0.0)
        known = dict(zip(s.ids, radius.tolist(), strict=True))
        attacked, hit = set[str](), dict[str, float]()
        for row in rows:
            name, reached = str(row.id), row.epsilon if row.distance is None else row.distance
            r = known.get(name, 0.0)
            if row.success and reached < r:
                hit[name] = min(reached, hit.get(name, reached))
            if row.epsilon < r or name in hit:
                attacked.add(name)
        tried |= {(key, name) for name in attacked}
        fallen |= {(key, name) for name in hit}
        broken += [
            f"input {i} of {s.run} ({s.procedure}): radius {known[i]:.6g}, {_verdict(kind, d)}" for i, d in hit.items()
        ]
    return Checked(len(tried), len(fallen), tuple(broken), frozenset(tried), frozenset(fallen))


def _verdict(kind: Attacked, distance: float) -> str:
    if kind == Attacked.BASE:
        return f"broken at {distance:.6g}"
    return f"suspected at {distance:.6g}: `equipoise attack` confirms or withdraws it"


def joined(parts: Iterable[Checked]) -> Checked | None:
    """Several together, inputs that they share counted once; None where nothing was tried."""
    found = list(parts)
    tried, hit = (
        frozenset[tuple[str, str]]().union(*sets) for sets in ((t.attacked for t in found), (t.hit for t in found))
    )
    whole = Checked(len(tried), len(hit), tuple(w for t in found for w in t.where), tried, hit)
    return whole if whole.tried else None


def _names(folders: Sequence[Path]) -> dict[str, Path]:
    """Short names: the folder's own, with as many parents as tell them apart."""
    if not folders:
        raise InputError("name at least one run directory")
    resolved = [f.resolve() for f in folders]
    if len(set(resolved)) != len(resolved):
        raise InputError("the same run directory was named twice")
    depth = 1
    while True:
        names = ["/".join(f.parts[-depth:]) for f in resolved]
        if len(set(names)) == len(names) or depth > 20:
            return dict(zip(names, folders, strict=True))
        depth += 1


def audits_only(audits: Sequence[Audit], title: str) -> ReportData:
    """A report without certificates."""
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return ReportData(title, audits=tuple(audits), created=made, versions=versions())


def as_document(data: ReportData) -> dict[str, Any]:
    """Every number of a report as plain data, for `--json`; radii keep every digit."""
    return {
        "title": data.title, "created": data.created, "versions": dict(data.versions),
        "series": [
            {
                "model": s.model, "run": s.run, "procedure": s.procedure, "sigma": s.sigma, "alpha": s.alpha, "about": s.about,
                "data": s.data, "inputs": len(s.ids), "total": s.total, "labelled": s.labelled, "own": s.own,
                "accuracy": float(s.accuracy()), "average_radius": s.average_radius,
                "certified_accuracy": [
                    {"epsilon": e, "certified_accuracy": float(s.accuracy(e))} for e in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
                ],
            }
            for s in data.series
        ],
        "attacks": [
            {"model": a.model, "run": a.run, "kind": a.kind, "inputs": len(a.ids), "found": int(np.isfinite(a.distance).sum())}
            for a in data.attacks
        ],
        "audits": [{"model": a.model, **a.bound, "local": list(a.local)} for a in data.audits],
        "tested": None if data.tested is None else {k: getattr(data.tested, k) for k in ("tried", "broken", "where")},
    }  # fmt: skip
