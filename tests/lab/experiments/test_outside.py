"""Experiments from outside: another package adds one through its entry point, and the command line sees it."""

import json
from pathlib import Path

import pytest

from equipoise.core import InputError
from equipoise_lab.experiments import catalogue, find
from equipoise_lab.experiments.runner import plan

pytest.importorskip("matplotlib")
pytest.importorskip("pyarrow")

MODULE = """
from dataclasses import dataclass
from equipoise_lab.experiments import Experiment, Label, Verdict
from equipoise_lab.experiments.figures import canvas

@dataclass(frozen=True)
class Settings:
    count: int

EXPERIMENT = Experiment(
    "outside-squares", "Numbers", "Squares", "They grow.", "growth", Settings(3), Settings(9),
    lambda settings, context: ({"k": k, "square": k * k} for k in range(settings.count)),
    lambda rows: Verdict(Label.REPRODUCED, str(rows[-1]["square"]), "growth"),
    lambda rows: canvas()[0],
    needs=("absent.npz",),
)
"""


@pytest.fixture
def announce(install):
    """Install a package that announces its experiment under a name."""
    return lambda name: install("outside_squares", MODULE, "experiments", {name: "EXPERIMENT"})


def test_another_package_adds_an_experiment_and_a_plan_says_what_would_run(announce, equipoise, tmp_path: Path):
    announce("outside-squares")
    assert list(catalogue())[-1] == "outside-squares"
    folder = tmp_path / "results"
    (planned,) = plan([find("outside-squares")], "laptop", 0, None, folder)
    assert "absent.npz" in planned.action
    ran = equipoise("reproduce", "outside-squares", "-o", str(folder), "--json")
    assert ran.code == 0
    assert json.loads((folder / "outside-squares" / "result.json").read_text())["rows"][-1]["square"] == 4
    ran = equipoise("reproduce", "outside-squares", "-o", str(folder), "--plan", "--json")
    assert ran.json[0]["action"] == "keep the stored result"


@pytest.mark.parametrize(("name", "look"), [("readouts", lambda: catalogue()), ("squares", lambda: find("squares"))])
def test_a_taken_name_and_a_name_that_is_not_its_own_are_refused(announce, name, look):
    announce(name)
    with pytest.raises(InputError, match=name):
        look()
