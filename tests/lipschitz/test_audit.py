"""The command: every kind of model that it audits; bad arguments end in a sentence."""

from __future__ import annotations

import json
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from equipoise.lipschitz import lipschitz_bound

pytestmark = pytest.mark.medium


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)]
    return nn.Sequential(*layers).eval()


@pytest.fixture
def path(net, tmp_path):
    torch.export.save(torch.export.export(net, (torch.zeros(1, 2, 4, 4),), strict=False), tmp_path / "net.pt2")
    return tmp_path / "net.pt2"


class Bomb:
    """Unpickling it creates a file: proof that something was executed."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("entry", ["constants", "weights", "opaque"])
def test_a_hostile_pickle_is_refused_and_not_run(equipoise, path, tmp_path, entry):
    stored = {"constants": "tensor_0", "weights": "weight_0", "opaque": "opaque_obj_0"}[entry]
    asked = json.dumps({"config": {"b": {"path_name": stored, "is_param": False, "use_pickle": entry != "opaque"}}})
    config = "weights_config.json" if entry == "weights" else "constants_config.json"
    changed = tmp_path / "changed.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for name in (n for n in old.namelist() if not n.endswith(f"/{stored}")):
            new.writestr(name, asked if name.endswith(config) else old.read(name))
        folder = "weights" if entry == "weights" else "constants"
        with new.open(f"net/data/{folder}/{stored}", "w") as file:
            torch.save(Bomb(tmp_path / "executed"), file)
    assert "pickle" in equipoise("audit", changed).err
    assert not (tmp_path / "executed").exists()


def test_a_program_is_audited(equipoise, net, path, tmp_path):
    page = tmp_path / "report.html"
    expected = lipschitz_bound(net, torch.zeros(1, 2, 4, 4), rtol=1e-3).upper
    result = equipoise("audit", path, "--json", "--html", page)
    assert result.json["kind"] == "upper"
    assert result.json["upper"] == pytest.approx(expected)
    assert page.read_text().startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert "at most" in equipoise("audit", path).out
    for wrong in (("--chain", "magic"), ("--rtol", "0")):
        assert equipoise("audit", path, *wrong).code != 0


def test_a_factory_with_weights(equipoise, tmp_path, monkeypatch):
    (tmp_path / "my_audit_nets.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(3, 2), nn.ReLU())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    save_file({"0.weight": 5 * torch.eye(2, 3), "0.bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    args = ["my_audit_nets:net", "--weights", tmp_path / "w.safetensors", "--input-shape", "3", "--json"]
    assert equipoise("audit", *args).json["upper"] == pytest.approx(5, rel=0.06)


def test_a_checkpoint_directory(equipoise, tmp_path):
    from equipoise.nn.models import build

    settings = {"input_size": 8, "channels": [4]}
    net = build("cnn", **settings)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    config = {"factory": "equipoise.nn.models:cnn", "arguments": settings, "input_shape": [3, 8, 8]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = lipschitz_bound(net.eval(), torch.zeros(1, 3, 8, 8)).upper
    assert equipoise("audit", tmp_path, "--json").json["upper"] == pytest.approx(expected)
    (tmp_path / "config.json").write_text(json.dumps({"factory": "os:system", "arguments": {"command": "true"}}))
    assert "no registered model" in equipoise("audit", tmp_path).err


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.pt2"], ["nowhere"], ["torch.nn:Linear", "--input-shape", "3"], ["torch.nn:Nothing", "--input-shape", "3"],
        ["no_such_package:net", "--input-shape", "3"], ["torch.nn:Identity"], ["torch.nn:Identity", "--input-shape", "3,x"],
        ["torch.nn:Identity", "--input-shape", "3", "--weights", "w.pt"],
        ["torch.nn:Identity", "--input-shape", "3", "--ball", "-1"],
        ["torch.nn:Identity", "--input-shape", "3", "--html", "/no/such/folder/x.html"],
    ],
)  # fmt: skip
def test_bad_arguments_give_one_sentence(equipoise, arguments):
    result = equipoise("audit", *arguments)
    assert result.code == 2
    assert "Traceback" not in result.out + result.err
