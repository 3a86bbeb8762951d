import math
from types import SimpleNamespace

import pytest
import torch

from equipoise.testing import REFERENCE_ROUNDING, SUITES, Check, Tally, run
from equipoise_lab.fuzz import trained_suite


@pytest.mark.medium
@pytest.mark.parametrize("check", sum(SUITES.values(), trained_suite()), ids=lambda check: check.name)
def test_every_check_runs_without_violations(check):
    report = run((check,), seconds=1.0, seed=5)
    assert report.violations == 0, report.tallies[0].examples
    if check.name.startswith(("matrices", "convolutions")):
        assert report.tallies[0].refused == 0, report.tallies[0].examples
    assert report.comparisons > 0
    assert report.tallies[0].closest_upper >= -REFERENCE_ROUNDING


def test_the_same_seed_tests_the_same_operators():
    seen = []

    def look(batch):
        seen.append(torch.randn((), generator=batch.generator).item())
        batch.tally.record(1.0, 1.0, 1.0, "")

    for seed in (0, 0, 1):
        run((Check("look", look),), seconds=1e-9, seed=seed)
    assert seen[0] == seen[1] != seen[2]


def test_violations_are_counted_and_described():
    tally = Tally("x")
    tally.record(torch.tensor([0.5, 1.1, 0.0]), torch.tensor([0.9, 2.0, math.nan]), torch.ones(3), "here")
    assert tally.comparisons == 3
    assert tally.violations == 3
    assert all("here" in example for example in tally.examples)
    fair = Tally("y")
    fair.record(1 + 1e-13, 1 - 1e-13, 1.0, "rounding of the reference")
    assert fair.violations == 0
    fair.record(1 + 1e-11, 2.0, 1.0, "python floats are not rounded to float32")
    assert fair.violations == 1


@pytest.mark.medium
def test_command(equipoise):
    ran = equipoise("selfcheck", "--minutes", "0.05", "--seed", "2", "--json")
    assert ran.code == 0
    assert ran.json["violations"] == 0
    assert ran.json["comparisons"] > 1000
    assert ran.json["seed"] == 2
    assert len(ran.json["tallies"]) == len(SUITES["norms"])


def test_command_prints_a_table_and_fails_on_violations(equipoise, monkeypatch):
    def wrong(batch):
        batch.tally.record(0.0, 0.5, 1.0, "by construction")

    monkeypatch.setitem(SUITES, "norms", (Check("wrong on purpose", wrong),))
    ran = equipoise("selfcheck", "--minutes", "0.0001")
    assert ran.code == 1
    assert "wrong on purpose" in ran.out
    assert "by construction" in ran.out
    assert "violations" in ran.err


def test_a_layer_or_network_that_breaks_its_bound_is_caught(monkeypatch):
    """Bounds too small by a half: the suites of layers and networks see it, one batch per seed."""
    import equipoise.testing.networks as attacked

    real = attacked.lipschitz_bound

    def halved(*args, **options):
        return SimpleNamespace(upper=0.5 * real(*args, **options).upper)

    monkeypatch.setattr(attacked, "lipschitz_bound", halved)
    for name in ("layers", "networks"):
        assert any(run(SUITES[name], seconds=1e-9, seed=seed).violations for seed in range(20)), name
