"""The standing adversary: a fixed sample finds nothing, a wrong rule is found, and what it prints shows the violation."""

import random
from dataclasses import replace

import pytest
import torch

from equipoise.lipschitz.operations import Opaque
from equipoise.lipschitz.rules import registry
from equipoise.testing import run
from equipoise_lab.fuzz import programs_suite
from equipoise_lab.fuzz.adversary import Target, Witness, assault, confirmed
from equipoise_lab.fuzz.networks import Question, Trial, examine, minimised, script
from equipoise_lab.fuzz.programs import Program, Statement
from equipoise_lab.fuzz.statements import expressions, random_program

pytestmark = pytest.mark.medium

ROWS = expressions()


def written(text: str, *setup: str, inputs=((1, 4),), dtype="float64", ball=None) -> Program:
    """A program from its lines, each binding a new name `vN` made of the one before."""
    body, last = [], "x0"
    for i, line in enumerate(text.split("; ")):
        body.append(Statement(f"v{i} = {line.replace('_', last)}", f"v{i}", last))
        last = f"v{i}"
    return Program(setup, tuple(body), (last,), inputs, dtype, ball=ball)


@pytest.mark.parametrize("seed", range(6))
def test_a_fixed_sample_of_programs_keeps_its_bounds(seed):
    rng = random.Random(seed)
    verdicts = examine(random_program(rng, ROWS, longest=5), rng, seed)
    assert [str(v.violation) for v in verdicts if v.violation] == []


def halved(step):
    return replace(step, gains=tuple((signal, gain / 2) for signal, gain in step.gains), map=Opaque(), slopes=None)


def forgetful(step):
    return replace(step, gains=step.gains[:1], map=Opaque())


WRONG = {
    "half of a dense layer": ("aten.linear.default", halved, "self.m0(_); F.relu(_)"),
    "one term of a sum": ("aten.add.Tensor", forgetful, "F.relu(_ + torch.sin(_)); self.m0(_)"),
    "half of a view": ("aten.flatten.using_ints", halved, "self.m0(_); F.relu(_); _.flatten(1)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_rule_is_caught_and_its_script_shows_it(case, monkeypatch):
    name, spoil, text = WRONG[case]
    right = registry._RULES[name]
    monkeypatch.setitem(registry._RULES, name, lambda call: spoil(right(call)))
    program = written(text, "m0 = fill(nn.Linear(4, 4), 3)")
    rng = random.Random(0)
    found = [v.violation for v in examine(program, rng, 1) if v.violation]
    assert found, "the adversary missed it"
    shown = script(found[0], 1, case)
    space: dict = {}
    exec(compile(shown, "script", "exec"), space)  # the wrong rule is still registered in this process
    assert space["reached"] > space["upper"]


def test_random_programs_catch_a_wrong_rule(monkeypatch):
    right = registry._RULES["aten.linear.default"]
    monkeypatch.setitem(registry._RULES, "aten.linear.default", lambda call: halved(right(call)))
    for seed in range(40):
        rng = random.Random(seed)
        program = random_program(rng, ROWS, longest=4)
        if "nn.Linear" not in program.source:
            continue
        found = [v.violation for v in examine(program, rng, seed) if v.violation]
        if found:
            small = minimised(found[0], seed)
            assert len(small.program.body) <= len(program.body)
            assert small.witness is not None or "check_facts" in str(small)
            return
    raise AssertionError("forty programs did not show it")


def test_an_exception_that_is_no_refusal_is_a_violation(monkeypatch):
    def broken(call):
        raise KeyError("a bug")

    monkeypatch.setitem(registry._RULES, "aten.relu.default", broken)
    verdict = Trial(written("F.relu(_)"), 1).judge(Question("lipschitz_bound(network, example).upper"))
    assert verdict.violation is not None
    assert "KeyError" in str(verdict.violation)


def test_rounding_is_no_violation_and_a_millionth_is():
    shift = Trial(written("_ + 1e12; _ - 1e12"), 1).target
    x = torch.zeros(4, dtype=torch.float64)
    y = x.clone()
    y[0] = 1e-4  # the difference of the outputs is a multiple of 2⁻¹³
    assert float((shift.one(x) - shift.one(y)).norm() / 1e-4) > 1.1
    assert confirmed(shift, Witness("pair", x, y), "l2").value < 1
    scaled = Trial(written("1.000001 * _"), 1).target
    assert confirmed(scaled, Witness("pair", x, x + 1), "l2").value > 1 + 0.9e-6
    assert confirmed(scaled, Witness("jacobian", x, y), "l2").value > 1 + 0.9e-6


def test_attacks_reach_the_norm_of_a_matrix_in_every_norm():
    program = written("self.m0(_)", "m0 = fill(nn.Linear(4, 3), 5)")
    W = program.build().m0.weight
    target = Target(program.build(), program.inputs)
    points = torch.randn(4, 4, dtype=torch.float64)
    best = assault(target, points, norms=("l2", "l1", "linf")).best
    for norm, order in (("l2", 2), ("l1", 1), ("linf", float("inf"))):
        assert best[norm, "jacobian"].value == pytest.approx(float(torch.linalg.matrix_norm(W, order)), rel=1e-9)


@pytest.mark.slow
def test_two_minutes_without_violations():
    report = run(programs_suite(), seconds=120, seed=3)
    assert report.violations == 0, report.tallies[0].examples
    assert report.tallies[0].refused < 0.6 * (report.comparisons + report.tallies[0].refused)
