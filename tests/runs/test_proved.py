"""Deterministic runs: the same radii as `certified_radius`, stored, continued, attacked, reported, refused when changed."""

from __future__ import annotations

import json
import sqlite3

import pytest
import torch
from runs_command import app
from torch import nn
from typer.testing import CliRunner

import equipoise as eq
from equipoise.core import InputError, Refused
from equipoise.report.collect import collect
from equipoise.report.page import render
from equipoise.runs.proved import certify_proved, describe_proved, open_proved, start_proved


def problem(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)).eval().requires_grad_(False)
    x = torch.randn(4, 3)
    y = net(x).argmax(1)
    y[0] = (y[0] + 1) % 3
    return net, x, y


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    net, x, y = problem()
    folder = tmp_path_factory.mktemp("proved") / "run"
    seen = []
    run = certify_proved(
        net, (x, y), run_dir=folder, progress=lambda row, done, total: seen.append((row.id, done, total))
    )
    assert seen == [(i, i + 1, 4) for i in range(4)]
    return net, x, y, run


def test_rows_are_certified_radii_with_rival_and_method(finished):
    net, x, y, run = finished
    found = eq.certified_radius(net, x, y)
    assert run.radius.tolist() == pytest.approx(found.radius.tolist(), rel=1e-6)
    assert [row.rival for row in run.rows] == found.rivals.tolist()
    assert [row.method for row in run.rows] == list(found.methods)
    assert run.rows[0].radius == 0
    assert run.rows[0].prediction == int(net(x[:1]).argmax())
    assert run.accuracy(0.0) == 0.75


def test_attacks_lie_beside_and_contradict_nothing(finished):
    *_, run = finished
    inside = [a for a in run.attacks if a.epsilon < run.rows[a.id].radius]
    assert len(inside) == 3
    assert not any(a.success for a in inside)
    assert run.broken() == []
    assert any(a.success for a in run.attacks)


def test_a_killed_run_goes_on_and_another_network_is_refused(tmp_path):
    net, x, y = problem()

    class Killed(Exception):
        pass

    def stop(row, done, total):
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        certify_proved(net, (x, y), run_dir=tmp_path, effort="fast", attack_steps=0, progress=stop)
    assert len(open_proved(tmp_path).rows) == 2
    run = certify_proved(net, (x, y), run_dir=tmp_path, effort="fast", attack_steps=0)
    assert run.finished
    for changed in ((problem(1)[0], {}), (net, {"norm": "linf"}), (net, {"seconds": 1.0})):
        with pytest.raises(Refused, match="another run"):
            certify_proved(changed[0], (x, y), run_dir=tmp_path, effort="fast", attack_steps=0, **changed[1])


def test_a_changed_radius_is_noticed(tmp_path):
    net, x, y = problem()
    certify_proved(net, (x, y), run_dir=tmp_path, effort="fast", attack_steps=0)
    with sqlite3.connect(tmp_path / "store.sqlite") as db:
        db.execute("UPDATE inputs SET radius = 9.0 WHERE id = 1")
    with pytest.raises(InputError, match="damaged at input 1"):
        _ = open_proved(tmp_path).rows
    told = json.loads((tmp_path / "proved.json").read_text())
    told["asked"]["norm"] = "linf"
    (tmp_path / "proved.json").write_text(json.dumps(told))
    with pytest.raises(InputError, match="was changed after it was written"):
        open_proved(tmp_path)
    del told["digest"]
    (tmp_path / "proved.json").write_text(json.dumps(told))
    with pytest.raises(InputError, match=r"another run than the proved\.json beside it"):
        _ = open_proved(tmp_path).rows


def test_unlabelled_inputs_keep_the_networks_own_answer(tmp_path):
    net, x, _ = problem()
    run = certify_proved(net, x, run_dir=tmp_path, effort="fast", attack_steps=0)
    assert [row.prediction for row in run.rows] == net(x).argmax(1).tolist()
    assert (run.radius > 0).all()


def test_what_cannot_be_bounded_is_said(tmp_path):
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, eps=0.5), nn.Linear(4, 3)).eval()
    job = describe_proved(net, (torch.randn(2, 3), torch.zeros(2, dtype=torch.long)), attack_steps=0)
    said = []
    run = start_proved(job, tmp_path, tell=said.append)
    assert "global bounds" in said[0]
    assert "layer_norm" in run.manifest.note
    with pytest.raises(InputError, match="norm must be"):
        describe_proved(net, (torch.randn(2, 3), torch.zeros(2, dtype=torch.long)), norm="l3")


def test_the_report_shows_rivals_methods_and_attacks(finished):
    *_, run = finished
    page = render(collect([run.folder]), plotly="")
    for text in ("Rivals and methods", "limiting rival", "deterministic", "contradicted"):
        assert text in page


def test_the_command_shows_and_exports(finished, tmp_path):
    *_, run = finished
    table = tmp_path / "table.csv"
    done = CliRunner().invoke(
        app(), ["certify", str(run.folder), "--deterministic", "--epsilon", "0,0.1", "--export", str(table)]
    )
    assert done.exit_code == 0, done.output
    assert "limiting rivals" in done.output
    assert "0 radii contradicted" in done.output
    assert len(table.read_text().splitlines()) == 5
    for extra in (["--sigma", "0.5"], ["--export", "x.parquet"]):
        assert CliRunner().invoke(app(), ["certify", str(run.folder), "--deterministic", *extra]).exit_code == 2
    assert (
        CliRunner().invoke(app(), ["certify", "m.pt2", "--data", "digits", "--sigma", "1", "--norm", "linf"]).exit_code
        == 2
    )
