"""The framework with an experiment of our own: verdicts, stored results, dry runs, failures, the page."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from equipoise.core.errors import InputError
from equipoise_lab.experiments import Context, Experiment, Label, Verdict, find, reproduce, reproduce_all, results
from equipoise_lab.experiments.figures import canvas, line
from equipoise_lab.experiments.intervals import Mean, combined, gain_label, mean_of, power_of, power_of_mean
from equipoise_lab.experiments.page import summary
from equipoise_lab.experiments.runner import plan

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


def test_a_result_is_written_and_not_measured_again(tmp_path: Path):
    counts: list[int] = []
    first = reproduce(experiment(counts), "laptop", Context(), tmp_path)
    second = reproduce(experiment(counts), "laptop", Context(), tmp_path)
    assert (first.stored, second.stored, len(counts)) == (False, True, 1)
    assert first.result is not None
    assert second.result is not None
    assert first.result.verdict.label is Label.REPRODUCED
    assert second.result.rows == first.result.rows
    assert {p.name for p in tmp_path.iterdir()} == {"result.json", "rows.parquet", "figure.svg", "figure.png"}
    reproduce(experiment(counts), "laptop", Context(seed=1), tmp_path)  # another seed is another result
    reproduce(experiment(counts), "laptop", Context(seed=1), tmp_path, again=True)
    assert len(counts) == 3


def test_parquet_holds_the_rows(tmp_path: Path):
    from pyarrow import parquet

    reproduce(experiment([]), "laptop", Context(), tmp_path)
    assert parquet.read_table(tmp_path / "rows.parquet").to_pylist()[4] == {"k": 4, "square": 16.0, "note": "a | b"}


def test_figures_are_the_same_bytes_for_the_same_rows(tmp_path: Path):
    for name in ("a", "b"):
        reproduce(experiment([]), "laptop", Context(), tmp_path / name)
    for file in ("figure.svg", "figure.png"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_dry_run_takes_two_steps_and_writes_nothing(tmp_path: Path):
    outcome = reproduce(experiment([]), "paper", Context(dry=True), tmp_path / "none")
    assert outcome.result is not None
    assert len(outcome.result.rows) == 2
    assert outcome.result.verdict.label is Label.DRY
    assert not (tmp_path / "none").exists()


def test_changed_settings_are_another_result(tmp_path: Path):
    counts: list[int] = []
    reproduce(experiment(counts), "laptop", Context(), tmp_path)
    stored = json.loads((tmp_path / "result.json").read_text())
    stored["settings"]["count"] = 7
    (tmp_path / "result.json").write_text(json.dumps(stored))
    reproduce(experiment(counts), "laptop", Context(), tmp_path)
    assert len(counts) == 2


def test_a_damaged_result_is_refused_and_kept(tmp_path: Path):
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(InputError, match="delete it"):
        reproduce(experiment([]), "laptop", Context(), tmp_path)
    assert (tmp_path / "result.json").read_text() == "{"


def test_one_failure_does_not_lose_the_others(tmp_path: Path):
    found = list(reproduce_all([experiment([], "x.npz"), experiment([])], "laptop", Context(), tmp_path))
    assert [outcome.result is None for outcome in found] == [True, False]
    assert "needs x.npz" in found[0].failure
    page = summary(found)
    assert "1 reproduced" in page
    assert "not run" in page
    assert "figure.svg" in page


def test_stored_verdicts_are_judged_anew(tmp_path: Path):
    reproduce(experiment([]), "laptop", Context(), tmp_path)
    stored = json.loads((tmp_path / "result.json").read_text())
    stored["rows"][-1]["square"] = 3.0
    (tmp_path / "result.json").write_text(json.dumps(stored))
    found = results.read(experiment([]), tmp_path)
    assert found is not None
    assert found.verdict.label is Label.REFUTED


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
    with pytest.raises(KeyboardInterrupt):
        reproduce(in_cells(made, 2), "laptop", Context(), tmp_path)
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"key": "k = 2", "ro')  # torn by the kill
    made.clear()
    outcome = reproduce(in_cells(made, None), "laptop", Context(), tmp_path)
    assert made == ["2"]
    assert outcome.result is not None
    assert [row["k"] for row in outcome.result.rows] == [0, 1, 2]
    assert "processor seconds" in outcome.result.machine
    assert not (tmp_path / "cells.jsonl").exists()


def test_cells_of_another_seed_are_not_taken(tmp_path: Path):
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        reproduce(in_cells(made, 1), "laptop", Context(), tmp_path)
    reproduce(in_cells(made, None), "laptop", Context(seed=1), tmp_path)
    assert made == ["0", "0", "1", "2"]


def test_power_counts_the_pairs_that_would_do():
    few = power_of_mean(Mean(1.0, 2.0, 10), 1.0, over="inputs")
    assert few.detectable > 2
    assert 40 < few.needed < 80
    assert "inputs would do" in str(few)
    assert "more than" in str(power_of_mean(Mean(0.0, 50.0, 3), 0.01))


def test_misspelt_identifiers_and_scales():
    with pytest.raises(InputError, match="did you mean 'readouts'"):
        find("readout")
    with pytest.raises(InputError, match="'laptop', 'desk', 'paper'"):
        find("readouts").settings("huge")


def test_means_have_student_intervals():
    mean = mean_of([1.0, 2.0, 3.0, 4.0])
    assert mean.low < 2.5 < mean.high
    assert mean.half == pytest.approx(2.054, abs=1e-3)
    assert mean_of([1.0]).half == float("inf")


GAINS = [  # mean, half width, published effect, label
    (2.5, 0.5, 2.63, Label.REPRODUCED),
    (0.5, 0.4, 2.63, Label.DIRECTION),
    (0.2, 0.3, 2.63, Label.REFUTED),
    (-1.0, 0.5, 2.63, Label.REFUTED),
    (1.0, 2.0, 2.63, Label.OPEN),
    (3.0, float("inf"), 2.63, Label.OPEN),
    (0.2, 0.3, None, Label.OPEN),
    (0.4, 0.3, None, Label.REPRODUCED),
]


@pytest.mark.parametrize(("mean", "half", "published", "label"), GAINS)
def test_a_gain_is_judged_by_its_interval(mean, half, published, label):
    assert gain_label(Mean(mean, half, 5), published) is label


def test_no_verdict_holds_both_nothing_and_the_published_effect():
    for mean in (-1.0, 0.0, 0.5, 1.0, 2.0):
        for half in (0.1, 1.0, 3.0):
            found = Mean(mean, half, 5)
            if found.low <= 0 <= found.high and found.low <= 1.5 <= found.high:
                assert gain_label(found, 1.5) is Label.OPEN


def test_one_open_case_leaves_a_claim_open_and_one_failure_refutes_it():
    assert combined([Label.REPRODUCED, Label.OPEN]) is Label.OPEN
    assert combined([Label.OPEN, Label.REFUTED]) is Label.REFUTED
    assert combined([Label.REPRODUCED, Label.DIRECTION]) is Label.DIRECTION


def test_power_says_how_many_seeds_would_do():
    weak = power_of([0.0, 2.0, 4.0], 0.5)
    assert weak.detectable > 0.5
    assert weak.needed > 100
    assert "seeds would do" in str(weak)
    assert "enough" in str(power_of([1.9, 2.0, 2.1], 2.0))
    assert "one seed" in str(power_of([1.0], 2.0))


def test_parts_power_settings_and_hardware_stand_on_the_page(tmp_path: Path):
    parts = (Verdict(Label.REPRODUCED, "1", "1", "value"), Verdict(Label.OPEN, "2", "3", "speed"))
    whole = replace(
        experiment([]), judge=lambda rows: parts, power=lambda rows: power_of([1.0, 2.0], 1.0), place="Table 9.9"
    )
    outcome = reproduce(whole, "desk", Context(), tmp_path)
    assert outcome.result is not None
    assert outcome.result.verdicts == parts
    page = summary([outcome])
    for words in (
        "1 open",
        "speed: *open.*",
        "Table 9.9",
        "Power:",
        "| count | `5` | `500` |",
        "threads",
    ):
        assert words in page, words
    assert results.read(whole, tmp_path).machine["cores"]
    (planned,) = plan([whole], "paper", 0, None, tmp_path.parent)
    assert planned.power == ""
    (tmp_path / whole.id).mkdir()
    (tmp_path / whole.id / "result.json").write_text((tmp_path / "result.json").read_text())
    (planned,) = plan([whole], "paper", 0, None, tmp_path)
    assert "seeds" in planned.power
