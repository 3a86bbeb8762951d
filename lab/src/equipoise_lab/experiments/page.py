"""The summary page: every stored result next to what was published, as Markdown."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from equipoise_lab.experiments.experiment import (
    NEEDS_GPU,
    Context,
    Experiment,
    Label,
    Verdict,
    flattened,
)
from equipoise_lab.experiments.results import Result, read
from equipoise_lab.experiments.runner import Outcome, find


def stored(experiments: Iterable[Experiment], folder: Path) -> list[Outcome]:
    """What a folder of results holds for these experiments, with their settings as they are now; nothing is run."""
    outcomes = []
    for experiment in experiments:
        result = read(experiment, folder / experiment.id)
        failure = "" if result else _begun(folder / experiment.id / "cells.jsonl")
        outcomes.append(Outcome(experiment, result, stored=True, failure=failure))
    return outcomes


def _begun(cells: Path) -> str:
    """How far a run without a result came."""
    if not cells.exists():
        return "no stored result"
    lines = cells.read_text(encoding="utf-8").splitlines()
    owner = json.loads(lines[0])
    return f"begun at {owner['scale']} scale: {len(lines) - 1} parts are stored"


INTRODUCTION = (
    'Every table and figure of the thesis as a command, `equipoise reproduce ID` or `equipoise reproduce "Table 5.1"`, at '
    "three scales: `laptop` (minutes on two cores), `desk` (an hour or more of one core) and `paper` (the thesis' settings "
    "with the same code). A claim with parts has a verdict for each."
)
LEGEND = (
    "* **reproduced**, **reproduced in direction**: the interval of the measured effect lies above 0; the effect is at "
    "least half of the published one, or less.",
    "* **corrected**: the published statement is wrong as printed and right as the errata have it.",
    "* **refuted**: the same setting, enough power, and the published effect lies outside the interval.",
    "* **not comparable**: other hardware or missing data; the text says what would be needed.",
    "* **too small to say**: the baseline trained here is below what the question needs, so nothing is said about the claim.",
    "* **open**: the interval holds both 0 and the published effect, the setting differs from the thesis', or nothing was run "
    "yet.",
)
HEAD = ["| experiment | place | verdict | measured | published |", "|---|---|---|---|---|"]
OWN_HEAD = ["| experiment | verdict | measured | compared with |", "|---|---|---|---|"]


def summary(
    outcomes: Sequence[Outcome], folder: str = "results", heading: str = "# Experiments"
) -> str:
    """A table of verdicts, then each experiment with its claim, its figure and its settings; `folder` is linked, not read."""
    done = [outcome.result for outcome in outcomes if outcome.result is not None]
    missing = [outcome for outcome in outcomes if outcome.result is None]
    pairs = [(result, verdict) for result in done for verdict in result.verdicts]
    published = [(result, verdict) for result, verdict in pairs if not verdict.own]
    own = [(result, verdict) for result, verdict in pairs if verdict.own]
    lines = [heading, "", INTRODUCTION, "", *LEGEND, "", _counts(published), "", *HEAD]
    lines += [
        _line(result, verdict, f" {result.experiment.place} |") for result, verdict in published
    ]
    lines += [_missing(o, f" {o.experiment.place} |") for o in missing if not o.experiment.own]
    own_missing = [_missing(o) for o in missing if o.experiment.own]
    if own or own_missing:
        lines += [
            "",
            "## Claims of our own",
            "",
            "None of these is a claim of the thesis.",
            "",
            *OWN_HEAD,
        ]
        lines += [*(_line(result, verdict) for result, verdict in own), *own_missing]
    chapter = ""
    for result in done:
        if result.experiment.chapter != chapter:
            chapter = result.experiment.chapter
            lines += ["", f"## {chapter}"]
        lines += ["", *_section(result, folder)]
    return "\n".join(lines) + "\n"


#: experiments whose claims about speed need a GPU
SPEEDS = ("conv-kernel", "conv-channels", "conv-input", "dense-error-time")


def speed_rows(device: str, names: Sequence[str] = SPEEDS) -> Iterator[str]:
    """The claims about speed measured on a device, as rows of the table of verdicts; every contestant waits for its result."""
    yield from HEAD
    for name in names:
        experiment = find(name)
        rows = list(experiment.run(experiment.laptop, Context(device=device)))
        (speed,) = [verdict for verdict in experiment.verdicts(rows) if verdict.part == "speed"]
        measured = speed.measured.replace(NEEDS_GPU, f"on {device}")
        cells = (name, experiment.place, "", _cell(measured), _cell(speed.published))
        yield f"| {' | '.join(cells)} |"


def _line(result: Result, verdict: Verdict, place: str = "") -> str:
    name = result.experiment.id
    part = f", {verdict.part}" if verdict.part else ""
    shown = f"| [{name}](#{name}){part} |{place} **{verdict.label}** |"
    return f"{shown} {_cell(verdict.measured)} | {_cell(verdict.published)} |"


def _missing(outcome: Outcome, place: str = "") -> str:
    experiment = outcome.experiment
    label, why = undecided(outcome)
    row = f"| {experiment.id} |{place} **{label}** | {_cell(why)} |"
    return f"{row} {_cell(experiment.published)} |"


def undecided(outcome: Outcome) -> tuple[Label, str]:
    """The label of an experiment without a result, and why there is none."""
    lacking = outcome.experiment.lacking
    if lacking:
        return Label.NOT_COMPARABLE, f"not run: {lacking}"
    return Label.OPEN, f"not run: {outcome.failure or 'no stored result'}"


def _counts(published: Sequence[tuple[Result, Verdict]]) -> str:
    labels = [verdict.label for _, verdict in published]
    counted = [f"{labels.count(label)} {label}" for label in Label if label in labels]
    experiments = {result.experiment.id for result, _ in published}
    return f"{len(experiments)} experiments with {len(labels)} verdicts: {', '.join(counted)}."


def _section(result: Result, folder: str) -> list[str]:
    experiment = result.experiment
    place = f" ({experiment.place} of the thesis)" if experiment.place else ""
    lines = [
        f"### {experiment.id}",
        "",
        f"**{experiment.title}**{place}. Claim: {experiment.claim}",
        "",
    ]
    for verdict in result.verdicts:
        part = f"{verdict.part}: " if verdict.part else ""
        lines.append(
            f"* {part}*{verdict.label}.* Measured: {verdict.measured}. Published: {verdict.published}."
        )
    too_small = any(verdict.label is Label.TOO_SMALL for verdict in result.verdicts)
    if experiment.power is not None and not too_small:
        lines += ["", f"Power: {experiment.power(result.rows)}."]
    lines += ["", f"![{experiment.title}]({folder}/{experiment.id}/figure.svg)", ""]
    lines += [
        f"`equipoise reproduce {experiment.id}` · {_circumstances(result)}",
        "",
        *_settings(result),
    ]
    return lines


def _circumstances(result: Result) -> str:
    here = result.machine
    text = f"{result.scale} scale, seed {result.seed}, {result.seconds:.0f} s"
    if not here:
        return f"{text}; hardware and threads were not recorded"
    busy = here.get("load before")
    beside = f", beside other work (load {busy})" if busy is not None and busy > 0.5 else ""
    used = (
        f", {here['processor seconds'] / 60:.1f} core minutes"
        if "processor seconds" in here
        else ""
    )
    where = f"{here.get('processor')}, {here.get('cores')} cores, {here.get('threads')} threads"
    return f"{text}{used} on {where}{beside}"


def _settings(result: Result) -> list[str]:
    """The settings as a table, the thesis' beside wherever they differ, and deviations that no setting shows."""
    experiment = result.experiment
    other = {name: there for name, there, _ in experiment.deviations(result.scale)}
    used = flattened(experiment.describe(result.scale)["settings"])
    rows = [
        f"| {name} | {_cell(_value(value))} | {_cell(_value(other.get(name, value)))} |"
        for name, value in used.items()
    ]
    rows += [
        f"| {name} | | {_cell(_value(there))} |"
        for name, there in other.items()
        if name not in used
    ]
    notes = [f"Deviation: {note}" for note in experiment.notes]
    title = f"settings, {len(other)} of them other than at paper scale"
    table = [
        "| setting | here | paper scale |",
        "|---|---|---|",
        *rows,
        *(["", *notes] if notes else []),
    ]
    return [f'??? note "{title}"', "", *(f"    {row}" if row else "" for row in table)]


def _value(value: object) -> str:
    return f"`{value}`" if value != "" else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
