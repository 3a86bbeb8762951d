"""The summary page: every stored result next to what was published, as Markdown."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from equipoise_lab.experiments.experiment import Experiment, Verdict, flattened
from equipoise_lab.experiments.results import Result, read
from equipoise_lab.experiments.runner import Outcome


def stored(experiments: Iterable[Experiment], folder: Path) -> list[Outcome]:
    """What a folder of results holds for these experiments, with their settings as they are now; nothing is run."""
    found = [(experiment, read(experiment, folder / experiment.id)) for experiment in experiments]
    return [Outcome(e, result, stored=True, failure="" if result else "no stored result") for e, result in found]


INTRODUCTION = (
    "Every table and figure of the thesis as a command, `equipoise reproduce ID`, at three scales: `laptop` (minutes "
    "on two cores), `desk` (up to forty minutes) and `paper` (the thesis' settings with the same code). A claim with "
    "parts has a verdict for each. **Inconclusive** means that the interval holds both 0 and the published effect, "
    "or, where «equal» is claimed, reaches beyond the margin: the sign of a mean decides nothing. Under each figure "
    "stand what the design could detect, and the settings beside those of paper scale, which a page of the "
    "documentation compares with the thesis line by line. Smaller scales test directions, "
    "not published accuracies. Settings or criteria of dense-convergence, readouts, weierstrass-gradient, "
    "bonferroni-counterexample, hessian-bound, ad-montecarlo, zero-padding, sr-conditioning and sll-aol-sr were changed "
    "after a first look, those of cpm, lvm-rs, multi-vs-multilip, rs-new-bound, reg-histogram, reg-accuracy and the "
    "trainings with activation decay before they were run again; results stored before these rules are judged by them. "
    "Desk results were measured beside other work on two cores, within minutes of processor time each, as the line "
    "under the figure says: networks and data are far below the thesis', and what they cannot decide is inconclusive."
)


def summary(outcomes: Sequence[Outcome], folder: str = "results", heading: str = "# Experiments") -> str:
    """A table of verdicts, then each experiment with its claim, its figure and its settings; `folder` is linked, not read."""
    done = [outcome.result for outcome in outcomes if outcome.result is not None]
    missing = [outcome for outcome in outcomes if outcome.result is None]
    head = ["| experiment | verdict | measured | published |", "|---|---|---|---|"]
    lines = [heading, "", INTRODUCTION, "", _counts(done), "", *head]
    lines += [_line(result, verdict) for result in done for verdict in result.verdicts]
    lines += [
        f"| {o.experiment.id} | not run | {_cell(o.failure)} | {_cell(o.experiment.published)} |" for o in missing
    ]
    chapter = ""
    for result in done:
        if result.experiment.chapter != chapter:
            chapter = result.experiment.chapter
            lines += ["", f"## {chapter}"]
        lines += ["", *_section(result, folder)]
    return "\n".join(lines) + "\n"


def _line(result: Result, verdict: Verdict) -> str:
    name, part = result.experiment.id, f", {verdict.part}" if verdict.part else ""
    shown = f"| [{name}](#{name}){part} | **{verdict.label}** |"
    return f"{shown} {_cell(verdict.measured)} | {_cell(verdict.published)} |"


def _counts(results: Sequence[Result]) -> str:
    labels = [str(verdict.label) for result in results for verdict in result.verdicts]
    counted = [f"{labels.count(label)} {label}" for label in dict.fromkeys(sorted(labels))]
    minutes = sum(result.seconds for result in results) / 60
    return (
        f"{len(results)} experiments with {len(labels)} verdicts, {minutes:.0f} minutes in all: {', '.join(counted)}."
    )


def _section(result: Result, folder: str) -> list[str]:
    experiment = result.experiment
    place = f" ({experiment.place} of the thesis)" if experiment.place else ""
    lines = [f"### {experiment.id}", "", f"**{experiment.title}**{place}. Claim: {experiment.claim}", ""]
    for verdict in result.verdicts:
        part = f"{verdict.part}: " if verdict.part else ""
        lines.append(f"* {part}*{verdict.label}.* Measured: {verdict.measured}. Published: {verdict.published}.")
    if experiment.power is not None:
        lines += ["", f"Power: {experiment.power(result.rows)}."]
    lines += ["", f"![{experiment.title}]({folder}/{experiment.id}/figure.svg)", ""]
    lines += [f"`equipoise reproduce {experiment.id}` · {_circumstances(result)}", "", *_settings(result)]
    return lines


def _circumstances(result: Result) -> str:
    here = result.machine
    text = f"{result.scale} scale, seed {result.seed}, {result.seconds:.0f} s"
    if not here:
        return f"{text}; hardware and threads were not recorded"
    busy = here.get("load before")
    beside = f", beside other work (load {busy})" if busy is not None and busy > 0.5 else ""
    used = f", {here['processor seconds'] / 60:.1f} core minutes" if "processor seconds" in here else ""
    where = f"{here.get('processor')}, {here.get('cores')} cores, {here.get('threads')} threads"
    return f"{text}{used} on {where}{beside}"


def _settings(result: Result) -> list[str]:
    """The settings as a table, the thesis' beside wherever they differ, and deviations that no setting shows."""
    experiment = result.experiment
    other = {name: there for name, there, _ in experiment.deviations(result.scale)}
    used = flattened(experiment.describe(result.scale)["settings"])
    rows = [
        f"| {name} | {_cell(_value(value))} | {_cell(_value(other.get(name, value)))} |" for name, value in used.items()
    ]
    rows += [f"| {name} | | {_cell(_value(there))} |" for name, there in other.items() if name not in used]
    notes = [f"Deviation: {note}" for note in experiment.notes]
    title = f"settings, {len(other)} of them other than at paper scale"
    table = ["| setting | here | paper scale |", "|---|---|---|", *rows, *(["", *notes] if notes else [])]
    return [f'??? note "{title}"', "", *(f"    {row}" if row else "" for row in table)]


def _value(value: object) -> str:
    return f"`{value}`" if value != "" else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
