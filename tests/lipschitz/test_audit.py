"""The command: programs and factories with weights, and a program with a hostile pickle."""

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


def test_a_hostile_pickle_is_refused_and_not_run(equipoise, path, tmp_path):
    """Among the constants; weights and opaque objects are in `checkpoints/test_hostile_models.py`."""
    asked = json.dumps({"config": {"b": {"path_name": "tensor_0", "is_param": False, "use_pickle": True}}})
    changed = tmp_path / "changed.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, asked if name.endswith("constants_config.json") else old.read(name))
        with new.open("net/data/constants/tensor_0", "w") as file:
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
