"""The adversary of files: a sample of its cases in this process, and proof that it would notice what it looks for."""

import random
import shutil

import pytest

from equipoise.testing import find_suite, run
from equipoise_lab.fuzz import files
from equipoise_lab.fuzz.files import CANARY, Outcome, judge, opened
from equipoise_lab.fuzz.mutations import ACCIDENTS, INTENTS
from equipoise_lab.fuzz.subjects import SUBJECTS, Subject


@pytest.mark.parametrize("kind", files.kinds())
def test_damage_is_noticed_or_changes_nothing(kind, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    whole.mkdir()
    SUBJECTS[kind].make(whole)
    first = opened(kind, whole)
    assert first.kind == "opened", first.text
    assert opened(kind, whole) == first
    chance = random.Random(kind)
    for number in range(16):
        accident, folder = number % 2 == 0, tmp_path / str(number)
        shutil.copytree(whole, folder)
        monkeypatch.chdir(folder)
        said = chance.choice(ACCIDENTS if accident else INTENTS)(chance, folder)
        found = opened(kind, folder)
        assert judge(kind, accident, first.text, found) is None, (said, found)
        assert not (folder / CANARY).exists(), said


def trap(folder):
    """A subject that believes what it reads."""
    return str(eval((folder / "a.txt").read_text(), {}))


def careless(folder):
    (folder / "a.txt").write_text("1 + 1")


def test_what_it_looks_for_is_found(monkeypatch):
    monkeypatch.setitem(SUBJECTS, "trap", Subject(careless, trap))
    assert judge("trap", True, "2", Outcome("opened", "3"))
    assert not judge("trap", False, "2", Outcome("opened", "3"))
    assert not judge("trap", True, "2", Outcome("refused", "no"))
    assert judge("trap", False, "2", Outcome("failed", "Traceback"))


@pytest.mark.slow
def test_the_suite_runs_apart_without_violations():
    report = run(find_suite("files"), seconds=30, seed=11)
    assert report.violations == 0, report.tallies[0].examples
    assert report.comparisons >= 12
