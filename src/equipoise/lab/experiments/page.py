"""The summary page: every stored result next to what was published, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from equipoise.lab.experiments.experiment import Experiment
from equipoise.lab.experiments.results import Result, read
from equipoise.lab.experiments.runner import Outcome


def stored(experiments: Iterable[Experiment], folder: Path) -> list[Outcome]:
    """What a folder of results holds for these experiments, with their settings as they are now; nothing is run."""
    found = [(experiment, read(experiment, folder / experiment.id)) for experiment in experiments]
    return [Outcome(e, result, stored=True, failure="" if result else "no stored result") for e, result in found]


INTRODUCTION = (
    "Every table and figure of the thesis as a command, `equipoise reproduce ID`, at a scale that two cores finish in minutes. "
    "Such a scale tests directions, not published accuracies: networks are narrower, data smaller and training shorter, as the "
    "settings under each figure say. A claim that does not hold here is reported so. Settings or criteria of dense-convergence, "
    "readouts, weierstrass-gradient, bonferroni-counterexample, hessian-bound and reg-histogram were changed after a first look. "
    "`--scale paper` runs the settings of the thesis with the same code."
)


def summary(outcomes: Sequence[Outcome], folder: str = "results", heading: str = "# Experiments") -> str:
    """A table of verdicts, then each experiment with its claim, its figure and its settings; `folder` is linked, not read."""
    done = [outcome.result for outcome in outcomes if outcome.result is not None]
    missing = [outcome for outcome in outcomes if outcome.result is None]
    lines = [
        heading,
        "",
        INTRODUCTION,
        "",
        _counts(done),
        "",
        "| experiment | verdict | measured | published |",
        "|---|---|---|---|",
    ]
    for result in done:
        verdict, name = result.verdict, result.experiment.id
        lines.append(
            f"| [{name}](#{name}) | **{verdict.label}** | {_cell(verdict.measured)} | {_cell(verdict.published)} |"
        )
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


def _counts(results: Sequence[Result]) -> str:
    labels = [str(result.verdict.label) for result in results]
    counted = [f"{labels.count(label)} {label}" for label in dict.fromkeys(sorted(labels))]
    minutes = sum(result.seconds for result in results) / 60
    return f"{len(results)} experiments, {minutes:.0f} minutes in all: {', '.join(counted)}."


def _section(result: Result, folder: str) -> list[str]:
    experiment = result.experiment
    settings = ", ".join(f"{k} = {v}" for k, v in experiment.describe(result.scale)["settings"].items())
    return [
        f"### {experiment.id}",
        "",
        f"**{experiment.title}.** Claim: {experiment.claim}",
        "",
        f"*{result.verdict.label}.* Measured: {result.verdict.measured}. Published: {result.verdict.published}.",
        "",
        f"![{experiment.title}]({folder}/{experiment.id}/figure.svg)",
        "",
        f"`equipoise reproduce {experiment.id}` · {result.scale} scale, seed {result.seed}, {result.seconds:.0f} s · {settings}",
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
