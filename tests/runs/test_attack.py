"""Attacks on runs: none may break inside a certificate, power beyond it, stored and continued; another model is refused."""

import sqlite3

import pytest
import runs_nets

from equipoise.core import InputError, Refused
from equipoise.runs import attack_run, certify, open_run, prove

pytestmark = pytest.mark.medium

QUICK = {"steps": 5, "votes": 200}


@pytest.mark.parametrize("settings", [{}, {"procedure": "lvm", "map": "softmax:1.0"}])
def test_sampled_runs_are_attacked_inside_and_beyond(tmp_path, net, xy, settings):
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=500, seed=0, **settings)
    summary = attack_run(run, net, xy, epsilons=[0.2], **QUICK)
    certified = int(((run.results().radius > 0) & run.results().correct).sum())
    assert summary.kind == "smoothed"
    assert summary.inside == certified
    assert summary.broken == []
    (shares,) = summary.accuracy
    assert shares["certified"] == run.results().accuracy(0.2) <= shares["attacked"]
    assert "0 of" in summary.lines()[1]


@pytest.mark.parametrize("norm", ["l2", "linf", "l1"])
def test_proved_runs_show_the_power_of_the_attack(tmp_path, net, xy, norm):
    run = prove(net, xy, run_dir=tmp_path / "a", norm=norm)
    summary = attack_run(tmp_path / "a", net, xy, steps=20)
    assert summary.kind == "base"
    assert summary.broken == []
    assert summary.broken_beyond == summary.inside == len(xy[0])  # a linear network: radii are exact
    few = attack_run(tmp_path / "a", net, xy, steps=20, limit=2)
    assert (few.inputs, few.inside, few.broken_beyond) == (2, summary.inside, summary.broken_beyond)
    levels = {f * row.radius for row in run.rows for f in (0.99, 1.5)}
    assert {a.epsilon for a in open_run(tmp_path / "a").attacks()} == levels


def test_a_certificate_that_is_too_large_is_reported(tmp_path, net, xy):
    """A row edited to certify three times as much: the attack says so."""
    run = prove(net, xy, run_dir=tmp_path / "a")
    with sqlite3.connect(tmp_path / "a" / "store.sqlite") as db:
        changed = (3 * run.rows[2].radius, str(run.rows[2].id))
        db.execute(
            "UPDATE entries SET payload = json_set(payload, '$.radius', ?) WHERE kind = 'input' AND key = ?", changed
        )
    summary = attack_run(tmp_path / "a", net, xy)
    assert [v.id for v in summary.broken] == [run.rows[2].id]
    assert any("VIOLATION" in line for line in summary.lines())


def test_stopped_attacks_continue_to_the_same_rows(tmp_path, net, xy):
    for name in "ab":
        certify(net, xy, run_dir=tmp_path / name, sigma=0.3, n=300, seed=0)

    def stop(done, total):
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            attack_run(tmp_path / "a", net, xy, progress=stop, **QUICK)
    assert len(open_run(tmp_path / "a").attacks()) > 0
    one, two = (attack_run(tmp_path / n, net, xy, **QUICK) for n in "ab")
    assert open_run(tmp_path / "a").attacks() == open_run(tmp_path / "b").attacks()
    assert (one.inside, one.broken_beyond) == (two.inside, two.broken_beyond)


WRONG = {
    "another model": (lambda net, xy: (runs_nets.Net(scale=5.0).eval(), xy), {}, Refused, "another model"),
    "other data": (lambda net, xy: (net, (xy[0] + 0.1, xy[1])), {}, Refused, "data: sha256"),
    "fewer data": (lambda net, xy: (net, (xy[0][:5], xy[1][:5])), {}, Refused, "total: 12 → 5"),
    "a radius below 0": (lambda net, xy: (net, xy), {"epsilons": [-1.0]}, InputError, "non-negative"),
    "no steps": (lambda net, xy: (net, xy), {"steps": 0}, InputError, "steps must be"),
    "a limit below 0": (lambda net, xy: (net, xy), {"limit": -2}, InputError, "limit must be"),
    "huge votes": (lambda net, xy: (net, xy), {"votes": 10**15}, InputError, "votes must be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_sentence(tmp_path, net, xy, case):
    make, settings, error, words = WRONG[case]
    certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=100)
    with pytest.raises(error, match=words):
        attack_run(tmp_path / "a", *make(net, xy), **{**QUICK, **settings})
