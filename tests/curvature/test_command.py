"""`equipoise curvature`: a saved network, bundled data, as JSON and as a table."""

import pytest


@pytest.fixture
def run(equipoise, monkeypatch, tmp_path):
    (tmp_path / "own_nets.py").write_text(
        "from torch import nn\n\ndef linear():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda *args: equipoise("curvature", *args)


def test_all_numbers_as_json(run):
    options = "--data digits --split test --limit 60 --what top,trace,density,sharpness --json"
    ran = run("own_nets:linear", *options.split())
    assert ran.code == 0, ran.err
    found = ran.json
    assert found["samples"] == 60
    assert found["parameters"] == 650
    assert 0 < found["top"]["value"] <= found["trace"]["value"] + 6 * found["trace"]["standard_error"]
    assert found["top"]["kind"].startswith("lower")
    assert found["sharpness"]["value"] > 0
    assert sum(found["density"]["weights"]) == pytest.approx(1)


def test_a_negative_seed_is_refused(run):
    assert run("own_nets:linear", "--data", "digits", "--limit", "1", "--seed", "-1").code == 2


def test_one_layer_as_a_table(run):
    ran = run("own_nets:linear", "--data", "digits", "--limit", "20", "--layer", "1.bias", "--what", "top,trace")
    assert ran.code == 0, ran.err
    assert "parameters" in ran.out
    assert "top value" in ran.out
