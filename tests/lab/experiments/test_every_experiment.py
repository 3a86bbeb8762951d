"""Every experiment of the table: described, rehearsed at both scales, and its committed result judged and drawn again."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from equipoise.core import InputError
from equipoise_lab.experiments import Context, Label, catalogue, every, find, reproduce, results
from equipoise_lab.experiments.page import stored, summary

pytest.importorskip("matplotlib")
pytest.importorskip("pyarrow")

IDENTIFIERS = list(catalogue())
COMMITTED = Path(__file__).parents[3] / "lab" / "results" / "experiments"


def data() -> Path | None:
    named = os.environ.get("EQUIPOISE_DATA")
    folder = Path(named) if named else Path(__file__).parents[4] / "shared" / "data"
    return folder if folder.is_dir() else None


#: they train or audit larger networks, as other tests do: rehearsed by `make test-all`
LONG = ("ad-text", "local-vs-pub", "local-tightness", "pub-ratio")


UNDECIDED = {Label.TOO_SMALL, Label.OPEN}
OF_OURS = {Label.HOLDS, Label.PARTLY, Label.FAILS} | UNDECIDED
OF_THE_THESIS = {Label.REPRODUCED, Label.DIRECTION, Label.CORRECTED, Label.REFUTED, Label.NOT_COMPARABLE} | UNDECIDED
REHEARSALS = [
    pytest.param(identifier, scale, marks=[pytest.mark.slow] * (scale == "paper" or identifier in LONG))
    for identifier in IDENTIFIERS
    for scale in ("laptop", "paper")
]


@pytest.mark.parametrize(("identifier", "scale"), REHEARSALS)
def test_rehearsal(identifier: str, scale: str, tmp_path: Path):
    experiment = find(identifier)
    assert not re.search(r"/(root|home|work|tmp)/", repr(experiment.describe(scale)))
    try:
        outcome = reproduce(experiment, scale, Context(data=data(), dry=True), tmp_path)
    except InputError as error:
        if "this experiment needs" not in str(error):
            raise
        pytest.skip(str(error))
    assert outcome.result is not None
    assert outcome.result.rows
    assert not list(tmp_path.iterdir())


@pytest.mark.medium
@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_committed_result(identifier: str):
    """A committed result belongs to the settings as they are, and says what it is said to say."""
    experiment = find(identifier)
    if not (COMMITTED / identifier / "result.json").exists():
        pytest.skip("no committed result")
    stored = results.read(experiment, COMMITTED / identifier)
    assert stored is not None, "the committed result has other settings: run `equipoise reproduce` again"
    for verdict in stored.verdicts:
        assert verdict.label in (OF_OURS if verdict.own else OF_THE_THESIS)
        assert verdict.label is not Label.REFUTED or not experiment.deviations(stored.scale)
    assert experiment.draw(stored.rows).axes


def test_the_page_is_that_of_the_committed_results():
    """`equipoise reproduce -o lab/results/experiments --page docs/experiments/index.md`."""
    page = COMMITTED.parents[2] / "docs" / "experiments" / "index.md"
    links = os.path.relpath(COMMITTED, page.parent)
    assert page.read_text(encoding="utf-8") == summary(stored(every(), COMMITTED), links)


@pytest.mark.slow
def test_imagenet_tables_with_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Images of noise in the folders that are asked for, and a network without training: rows, verdicts and a figure."""
    image = pytest.importorskip("PIL.Image")
    for name in ("n01", "n02"):
        (tmp_path / "imagenet-val" / name).mkdir(parents=True)
        for k in range(3):
            image.effect_noise((8, 8), 60 + k).convert("RGB").save(tmp_path / "imagenet-val" / name / f"{k}.png")

    def network(sigma: float) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 1000))

    stand_in = SimpleNamespace(denoised_vit=network, smooth_adversarial=network)
    monkeypatch.setitem(sys.modules, "imagenet_networks", stand_in)
    experiment = find("imagenet-tables")
    settings = experiment.laptop
    votes = replace(settings.votes, sampling=replace(settings.votes.sampling, n=40), temperatures=3)
    small = replace(settings, votes=votes, inputs=3, calibration=2)
    rows = list(experiment.run(small, Context(data=tmp_path)))
    assert {row["network"] for row in rows} == set(settings.networks)
    assert len(experiment.verdicts(rows)) == 2
    assert len(experiment.draw(rows).axes) == 2
