"""`equipoise curvature`: a saved network, bundled data, JSON and complaints."""

import json

import pytest
from typer.testing import CliRunner

from equipoise.cli.app import Command, build

pytest.importorskip("equipoise.data")


@pytest.fixture
def run(monkeypatch, tmp_path):
    (tmp_path / "own_nets.py").write_text(
        "from torch import nn\n\ndef linear():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    app = build((Command("curvature", "equipoise.cli.curvature", "curvature"),))
    return lambda *args: CliRunner().invoke(app, ["curvature", *args])


def test_all_numbers_as_json(run):
    options = "--data digits --split test --limit 60 --what top,trace,density,sharpness --json"
    ran = run("own_nets:linear", *options.split())
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["samples"] == 60
    assert found["parameters"] == 650
    assert 0 < found["top"]["value"] <= found["trace"]["value"] + 6 * found["trace"]["standard_error"]
    assert found["top"]["kind"].startswith("lower")
    assert found["sharpness"]["value"] > 0
    assert sum(found["density"]["weights"]) == pytest.approx(1)


def test_one_layer_as_a_table(run):
    ran = run("own_nets:linear", "--data", "digits", "--limit", "20", "--layer", "1.bias", "--what", "top,trace")
    assert ran.exit_code == 0, ran.output
    assert "parameters" in ran.stdout
    assert "top value" in ran.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["own_nets:linear", "--data", "digits", "--what", "slope"], "--what"),
        (["own_nets:linear", "--data", "digits", "--layer", "fc"], "matches"),
        (["own_nets:nothing", "--data", "digits"], "nothing"),
        (["own_nets:linear", "--data", "no-such-data"], "no-such-data"),
    ],
)
def test_complaints_are_one_sentence(run, args, says):
    ran = run(*args)
    assert ran.exit_code == 2
    assert says in ran.output
    assert "Traceback" not in ran.output
