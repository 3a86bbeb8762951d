"""Deterministic runs: the radii of `certified_radius`, statuses, continued after a stop."""

import numpy as np
import pytest
import runs_nets
import torch
from runs_nets import table
from torch import nn

import equipoise as eq
from equipoise.core import InputError, Refused
from equipoise.runs import certify, merge_runs, prove


def small(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4)).eval()


def test_radii_are_those_of_certified_radius_and_every_output_agrees(tmp_path):
    net, (x, y) = small(), runs_nets.data(8)
    run = prove(net, (x, y), run_dir=tmp_path / "a")
    direct = eq.certified_radius(net, x, y)
    results, summary = run.results(), run.summary([0.0, 0.05])
    np.testing.assert_allclose(results.radius, direct.radius.numpy(), rtol=1e-9)
    right = (net(x).argmax(1) == y).numpy()
    assert results.right.tolist() == right.tolist()
    assert summary.clean == right.mean()
    assert summary.accuracy[0.0] == np.mean([s == "certified" for s in results.status])
    assert summary.accuracy[0.05] == direct.accuracy(0.05)
    assert run.contradictions(results)[1] == []


def test_right_but_nothing_proved_is_a_status_of_its_own(tmp_path):
    """A network whose margins drown in rounding: right answers that no bound proves are neither wrong nor certified."""
    net = small()
    with torch.no_grad():
        net[3].bias += 1e14
        net.double()
    x, _ = runs_nets.data(6)
    x = x.double()
    y = net(x).argmax(1)
    y[0] = (y[0] + 1) % 4
    run = prove(net, (x, y), run_dir=tmp_path / "a")
    results, summary = run.results(), run.summary([0.0])
    assert set(results.status) <= {"wrong", "right, not certified", "certified"}
    assert results.status[0] == "wrong"
    assert "right, not certified" in results.status
    assert summary.clean == 5 / 6
    assert summary.accuracy[0.0] == np.mean([s == "certified" for s in results.status]) < summary.clean
    assert f"{summary.results.statuses['right, not certified']} right, not certified" in summary.lines()[1]


def test_stopped_merged_and_continued_runs_have_the_same_table(tmp_path):
    net, data = small(), runs_nets.data(6)
    whole = prove(net, data, run_dir=tmp_path / "whole")

    def stop(row, done, total):
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            prove(net, data, run_dir=tmp_path / "a", progress=stop)
    again = prove(net, data, run_dir=tmp_path / "a")
    assert table(again) == table(whole)
    assert again.manifest.digest() == whole.manifest.digest()
    for k in range(2):
        prove(net, data, run_dir=tmp_path / str(k), skip=k, stride=2)
    assert table(merge_runs([tmp_path / "0", tmp_path / "1"], tmp_path / "joint")) == table(whole)


def test_the_deployed_pass_is_a_column_and_never_larger(tmp_path):
    run = prove(small(), runs_nets.data(4), run_dir=tmp_path / "a", deployed="float32")
    assert all(0 <= row.deployed <= row.radius for row in run.rows)
    assert "deployed" in table(run).splitlines()[0]
    assert run.summary([0.0]).deployed[0.0] <= run.summary([0.0]).accuracy[0.0]


def test_what_a_proved_run_refuses(tmp_path):
    net, data = small(), runs_nets.data(3)
    run = prove(net, data, run_dir=tmp_path / "a", effort="fast", limit=2)
    with pytest.raises(InputError, match="no risk"):
        run.results(alpha=0.1)
    with pytest.raises(InputError, match="proved run"):
        run.certificates()
    with pytest.raises(Refused, match="kind: proved → sampled"):
        certify(net, data, run_dir=tmp_path / "a", sigma=0.1, limit=2)
    for settings, words in (
        ({"norm": "l3"}, "norm"), ({"effort": "much"}, "effort"), ({"seconds": 0.0}, "seconds"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            prove(net, data, run_dir=tmp_path / "b", **settings)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sigma'"):
        prove(net, data, run_dir=tmp_path / "b", sigma=0.1)


def test_inputs_without_labels_keep_the_networks_own_answers(tmp_path):
    net, (x, _) = small(), runs_nets.data(4)
    results = prove(net, x, run_dir=tmp_path / "a", effort="fast").results()
    assert results.answer.tolist() == net(x).argmax(1).tolist()
    assert set(results.status) == {"certified"}
