"""The framework with an experiment of our own: verdicts, stored results, dry runs, failures, the page."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from equipoise.core import InputError
from equipoise_lab.experiments import Context, Experiment, Label, Verdict, reproduce, reproduce_all, results
from equipoise_lab.experiments.experiment import Precondition
from equipoise_lab.experiments.figures import canvas, line
from equipoise_lab.experiments.intervals import Mean, combined, gain_label, mean_of, power_of
from equipoise_lab.experiments.page import stored, summary

pytestmark = pytest.mark.medium

pytest.importorskip("matplotlib")
pytest.importorskip("pyarrow")


@dataclass(frozen=True)
class Settings:
    count: int


def experiment(counts: list[int], needs: str | None = None) -> Experiment:
    def run(settings, context):
        counts.append(1)
        if needs:
            context.file(needs)
        for k in context.steps(range(settings.count)):
            yield {"k": k, "square": float(k * k), "note": "a | b"}

    def judge(rows):
        return Verdict(Label.REPRODUCED if rows[-1]["square"] == 16 else Label.REFUTED, f"{rows[-1]['square']}", "16")

    def draw(rows):
        figure, (axes,) = canvas()
        line(axes, [r["k"] for r in rows], [r["square"] for r in rows], "squares", 0)
        return figure

    return Experiment("squares", "Numbers", "Squares", "4² = 16", "16", Settings(5), Settings(500), run, judge, draw)


def test_a_result_is_written_and_measured_again_only_for_other_settings(tmp_path: Path):
    counts: list[int] = []
    first = reproduce(experiment(counts), "laptop", Context(), tmp_path)
    second = reproduce(experiment(counts), "laptop", Context(), tmp_path)
    assert (first.stored, second.stored, len(counts)) == (False, True, 1)
    assert first.result.verdict.label is Label.REPRODUCED
    assert second.result.rows == first.result.rows
    assert {p.name for p in tmp_path.iterdir()} == {"result.json", "rows.parquet", "figure.svg", "figure.png"}
    reproduce(experiment(counts), "laptop", Context(seed=1), tmp_path)  # another seed is another result
    reproduce(experiment(counts), "laptop", Context(seed=1), tmp_path, again=True)
    reproduce(replace(experiment(counts), laptop=Settings(7)), "laptop", Context(seed=1), tmp_path)
    assert len(counts) == 4


def test_a_dry_run_takes_two_steps_and_writes_nothing(tmp_path: Path):
    outcome = reproduce(experiment([]), "paper", Context(dry=True), tmp_path / "none")
    assert len(outcome.result.rows) == 2
    assert outcome.result.verdict.label is Label.DRY
    assert not (tmp_path / "none").exists()


def test_stored_results_are_judged_anew_and_damaged_ones_refused(tmp_path: Path):
    reproduce(experiment([]), "laptop", Context(), tmp_path)
    file = tmp_path / "result.json"
    document = json.loads(file.read_text())
    document["rows"][-1]["square"] = 3.0
    file.write_text(json.dumps(document))
    again = results.read(experiment([]), tmp_path).verdict
    assert again.label is Label.OPEN  # not the settings of the paper, so nothing is refuted
    assert "settings differ" in again.measured
    assert experiment([]).verdicts([{"square": 9}])[0].label is Label.REFUTED
    file.write_text("{")
    with pytest.raises(InputError, match="delete it"):
        reproduce(experiment([]), "laptop", Context(), tmp_path)
    assert file.read_text() == "{"


def test_one_failure_does_not_lose_the_others(tmp_path: Path):
    found = list(reproduce_all([experiment([], "x.npz"), experiment([])], "laptop", Context(), tmp_path))
    assert [outcome.result is None for outcome in found] == [True, False]
    assert "needs x.npz" in found[0].failure
    page = summary(found)
    for words in ("1 reproduced", "not run", "figure.svg", "| count | `5` | `500` |", "threads"):
        assert words in page


def in_cells(made: list[str], stop_at: int | None) -> Experiment:
    """Three cells; the run is stopped before cell `stop_at`."""

    def run(settings, context):
        for k in range(settings.count):
            if k == stop_at:
                raise KeyboardInterrupt
            yield from context.cell(f"k = {k}", lambda k=k: made.append(str(k)) or [{"k": k, "square": float(k * k)}])

    return replace(experiment([]), run=run, laptop=Settings(3), judge=lambda rows: Verdict(Label.REFUTED, "", ""))


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path):
    made: list[str] = []
    folder = tmp_path / "squares"
    with pytest.raises(KeyboardInterrupt):
        reproduce(in_cells(made, 2), "laptop", Context(), folder)
    (unfinished,) = stored([in_cells(made, 2)], tmp_path)
    assert "2 parts" in unfinished.failure
    with (folder / "cells.jsonl").open("a") as file:
        file.write('{"key": "k = 2", "ro')  # torn by the kill
    made.clear()
    outcome = reproduce(in_cells(made, None), "laptop", Context(), folder)
    assert made == ["2"]
    assert [row["k"] for row in outcome.result.rows] == [0, 1, 2]
    assert "processor seconds" in outcome.result.machine
    assert not (folder / "cells.jsonl").exists()
    with pytest.raises(KeyboardInterrupt):
        reproduce(in_cells(made, 1), "laptop", Context(seed=1), folder)
    reproduce(in_cells(made, None), "laptop", Context(seed=2), folder)  # the parts of another seed are not taken
    assert made == ["2", "0", "0", "1", "2"]


GAINS = [  # mean, half width, published effect, label
    (2.5, 0.5, 2.63, Label.REPRODUCED), (0.5, 0.4, 2.63, Label.DIRECTION), (0.2, 0.3, 2.63, Label.REFUTED),
    (-1.0, 0.5, 2.63, Label.REFUTED), (1.0, 2.0, 2.63, Label.OPEN), (3.0, float("inf"), 2.63, Label.OPEN),
    (0.2, 0.3, None, Label.OPEN), (0.4, 0.3, None, Label.REPRODUCED),
]  # fmt: skip


@pytest.mark.parametrize(("mean", "half", "published", "label"), GAINS)
def test_a_gain_is_judged_by_its_interval(mean, half, published, label):
    assert gain_label(Mean(mean, half, 5), published) is label


def test_means_and_power():
    assert mean_of([1.0, 2.0, 3.0, 4.0]).half == pytest.approx(2.054, abs=1e-3)
    assert mean_of([1.0]).half == float("inf")
    weak = power_of([0.0, 2.0, 4.0], 0.5)
    assert weak.detectable > 0.5
    assert weak.needed > 100


def test_below_its_precondition_an_experiment_says_nothing():
    small = Precondition("baseline", 40.0, 57.0)
    for label in Label:
        verdict = small.apply(Verdict(label, "1", "2"))
        assert verdict.label is (label if label is Label.NOT_COMPARABLE else Label.TOO_SMALL)
    assert combined([Label.OPEN, Label.REFUTED]) is Label.REFUTED
    assert combined([Label.REPRODUCED, Label.OPEN]) is Label.OPEN
    assert Precondition("baseline", 57.0, 57.0).apply(Verdict(Label.REFUTED, "1", "2")).label is Label.REFUTED
