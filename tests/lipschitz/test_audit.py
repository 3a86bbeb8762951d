"""The command: every kind of model, every kind of bad file; nothing a file says is executed."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from equipoise.checkpoints import load_program
from equipoise.cli.app import Command, build
from equipoise.cli.audit import audit_report
from equipoise.core import EquipoiseError
from equipoise.lipschitz import lipschitz_bound

pytestmark = pytest.mark.medium

app = build((Command("audit", "equipoise.cli.audit", "audit"),))


def invoke(args):
    return CliRunner().invoke(app, ["audit", *args])


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)
    ).eval()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(small(), (torch.zeros(1, 2, 4, 4),), strict=False), path)
    return path


def rewritten(path: Path, change) -> Path:
    """A copy of the archive with `change(name, content)` applied to every entry (None drops it)."""
    out = path.with_name("changed.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            content = change(info.filename, old.read(info))
            if content is not None:
                new.writestr(info.filename, content)
    return out


class Bomb:
    """Unpickling it creates a file: proof that something was executed."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_program_is_audited(program):
    expected = lipschitz_bound(small(), torch.zeros(1, 2, 4, 4), rtol=1e-3).upper
    assert audit_report(str(program)).upper == pytest.approx(expected)
    result = invoke([str(program)])
    assert result.exit_code == 0
    assert "at most" in result.output


def test_a_smaller_tolerance_and_a_chain_can_be_asked_for(program):
    loose = audit_report(str(program)).upper
    assert audit_report(str(program), rtol=1e-3).upper <= loose
    result = invoke([str(program), "--chain", "magic"])
    assert result.exit_code != 0
    result = invoke([str(program), "--rtol", "0"])
    assert result.exit_code != 0


def test_json_and_html(program, tmp_path):
    page = tmp_path / "report.html"
    result = invoke([str(program), "--json", "--html", str(page)])
    assert json.loads(result.output)["kind"] == "upper"
    assert page.read_text().startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_factory_with_weights(tmp_path, monkeypatch):
    (tmp_path / "my_audit_nets.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(3, 2), nn.ReLU())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    save_file({"0.weight": 5 * torch.eye(2, 3), "0.bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    args = ["my_audit_nets:net", "--weights", str(tmp_path / "w.safetensors"), "--input-shape", "3", "--json"]
    result = invoke(args)
    assert json.loads(result.output)["upper"] == pytest.approx(5, rel=0.06)


def test_a_checkpoint_directory(tmp_path):
    from equipoise.nn.models import build

    net = build("cnn", input_size=8, channels=[4])
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    config = {
        "factory": "equipoise.nn.models:cnn",
        "arguments": {"input_size": 8, "channels": [4]},
        "input_shape": [3, 8, 8],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert audit_report(str(tmp_path)).upper == pytest.approx(
        lipschitz_bound(net.eval(), torch.zeros(1, 3, 8, 8), rtol=1e-3).upper
    )


@pytest.mark.parametrize("entry", ["constants", "weights", "opaque"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_hostile_pickle_is_refused_and_not_run(program, tmp_path, entry, wrapped):
    mark = tmp_path / "executed"
    if wrapped:
        torch.save(Bomb(mark), tmp_path / "bomb")
        bomb = (tmp_path / "bomb").read_bytes()
    else:
        bomb = pickle.dumps(Bomb(mark))

    def change(name, content):
        if entry in name and name.endswith("_config.json"):  # ask the reader to unpickle this one
            meta = {
                "path_name": "tensor_0" if entry == "constants" else "weight_0",
                "is_param": False,
                "use_pickle": True,
            }
            return json.dumps({"config": {"bomb": meta}})
        if entry == "opaque" and name.endswith("constants_config.json"):
            return json.dumps(
                {"config": {"bomb": {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": False}}}
            )
        return content

    changed = rewritten(program, change)
    with zipfile.ZipFile(changed, "a") as archive:
        archive.writestr("net/data/constants/" + ("opaque_obj_0" if entry == "opaque" else "tensor_0"), bomb)
    with pytest.raises(EquipoiseError, match="pickle"):
        load_program(changed)
    assert not mark.exists()


def test_duplicate_and_foreign_entries_are_refused(program):
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(program, "a") as archive:
        archive.writestr(archive.infolist()[0].filename, b"other")
    with pytest.raises(EquipoiseError, match="twice"):
        load_program(program)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04broken"])
def test_broken_files_give_one_sentence(tmp_path, content):
    path = tmp_path / "bad.pt2"
    path.write_bytes(content)
    result = invoke([str(path)])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1


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
def test_bad_arguments_give_one_sentence(arguments):
    result = invoke(arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_checkpoint_cannot_name_foreign_code(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"factory": "os:system", "arguments": {"command": "true"}}))
    with pytest.raises(EquipoiseError, match="no registered model"):
        audit_report(str(tmp_path))
