"""The engineer guide alone: its first commands, as they stand there, end in a certificate above 0 of a network from elsewhere."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import equipoise as eq
from equipoise.conversion import export
from equipoise.runs import open_run

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "engineer.md"


def commands(heading="The first ten minutes"):
    """The `equipoise` lines of the first block under a heading of the guide."""
    section = GUIDE.read_text(encoding="utf-8").partition(f"## {heading}")[2].partition("\n## ")[0]
    block = re.search(r"```console\n(.*?)```", section, re.DOTALL)[1]
    lines = [line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines() if line[0] != "#"]
    others = [line for line in lines if not line.startswith("equipoise ")]
    assert [line.split()[0] for line in others] in ([], ["pip"])
    return [shlex.split(line, comments=True)[1:] for line in lines if line not in others]


@pytest.fixture
def folder(data_dir, tmp_path, monkeypatch):
    """A network and pictures under the names of the guide."""
    pytest.importorskip("onnx")
    network, pictures = data_dir / "onnx" / "cifar-deep-kw.onnx", data_dir / "cifar10.npz"
    if not (network.exists() and pictures.exists()):
        pytest.skip("the network and its pictures are not in the data folder")
    shutil.copy(network, tmp_path / "model.onnx")
    shutil.copy(pictures, tmp_path / "pictures.npz")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def follow(equipoise):
    def commands_in_turn(lines, run="runs/first"):
        for arguments in lines:
            ran = equipoise(*arguments)
            assert ran.code == 0, (arguments, ran.err, ran.error)
        return open_run(run).summary()

    return commands_in_turn


def test_the_installation_of_the_guide_is_enough_for_its_commands():
    """Reading .onnx files and drawing reports need packages of their own."""
    extras = re.search(r"pip install 'equipoise\[([\w,]+)\]'", GUIDE.read_text(encoding="utf-8"))[1].split(",")
    needed = {"onnx" for line in commands() if "model.onnx" in line} | {
        "report" for line in commands() if "report" in line
    }
    assert needed <= set(extras)


def test_the_first_commands_end_in_a_certificate(folder, follow):
    """With fewer inputs and draws than the guide asks for."""
    changed = {"20": "4", "500": "60"}
    lines = [[changed.get(word, word) for word in line] for line in commands() if line[0] != "audit"]
    summary = follow(lines)
    assert summary.accuracy[0.0] > 0
    assert summary.average_radius > 0


@pytest.mark.slow
def test_the_guide_as_it_is_written(folder, follow):
    summary = follow(commands())
    assert summary.accuracy[0.03] >= 0.3
    assert (folder / "first.html").exists()


@pytest.mark.slow
def test_the_five_steps_as_they_are_written(tmp_path, monkeypatch, follow):
    """On a program of batch one, as `torch.export` writes it, and a folder of pictures without labels."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    model, test = export(eq.models.load("digits").model), eq.data.load_dataset("digits#test")
    x, _ = test.batch(range(3))
    torch.export.save(torch.export.export(model, (x[:1],)), "model.pt2")
    (tmp_path / "photos").mkdir()
    for i, picture in enumerate(x[:, 0]):
        image.fromarray((picture * 255).round().byte().numpy()).save(f"photos/{i}.png")
    steps = commands("Five steps")
    assert [step[0] for step in steps] == ["audit", "prove", "certify", "attack", "report", "predict"]
    assert follow(steps, "runs/a").accuracy[0.0] > 0


def mnist_mlp():
    """The dense network of the SDP-CROWN release, without its weights."""
    layers = (nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    return nn.Sequential(nn.Flatten(), *layers).eval()


def hand_over(kind, data_dir, folder):
    """MODEL of a network from elsewhere, what the guide adds for it to audit and report, and to prove and certify, and DATA."""
    if kind == "hugging face":
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = transformers.ResNetConfig(
            num_channels=1, embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", num_labels=4
        )
        network = transformers.ResNetForImageClassification(config).eval()
        network.save_pretrained(folder / "hub")
        x = torch.rand(60, 1, 8, 8)
        np.savez(folder / "data.npz", x=x.numpy(), y=network(x).logits.argmax(1).numpy())
        return "hub", ["--input-shape", "1,8,8"], [], "data.npz"
    weights = data_dir / "l2-verification" / "mnist-mlp.safetensors"
    if not weights.exists():
        pytest.skip("the networks of the SDP-CROWN release are not in the data folder")
    shutil.copy(weights.with_name("mnist-200.npz"), folder / "data.npz")
    shape = np.load(folder / "data.npz")["x"].shape[1:]
    network = mnist_mlp()
    network.load_state_dict(load_file(weights))
    example = torch.zeros(1, *shape)
    if kind == "pt2":
        torch.export.save(torch.export.export(network, (example,)), "model.pt2")
        return "model.pt2", [], [], "data.npz"
    if kind == "onnx":
        pytest.importorskip("onnxscript")
        torch.onnx.export(network, (example,), "model.onnx", dynamo=True, dynamic_shapes=({0: "batch"},))
        return "model.onnx", [], [], "data.npz"
    shutil.copy(weights, folder / "w.safetensors")
    size = ",".join(map(str, shape))
    factory = ["--weights", "w.safetensors", "--input-shape", size]
    return "test_first_hour:mnist_mlp", factory, ["--set", "weights=w.safetensors"], "data.npz"


@pytest.mark.parametrize("kind", ["pt2", "onnx", "hugging face", "module"])
def test_the_five_steps_on_a_network_from_elsewhere(kind, data_dir, tmp_path, monkeypatch, follow):
    """Audit, proved radii, certificates, attack and report by the commands of the guide, with fewer inputs and draws."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    model, whole, run, data = hand_over(kind, data_dir, tmp_path)
    changed = {"model.pt2": model, "digits": data, "0.25": "0.1", "50": "4", "5": "2", "1000": "200", "0.25,0.5": "0.1"}
    lines = [[changed.get(word, word) for word in step] for step in commands("Five steps") if step[0] != "predict"]
    for line in lines:
        line += {"audit": whole, "report": whole, "prove": run, "certify": run}.get(line[0], [])
    summary = follow(lines, "runs/a")
    assert summary.average_radius > 0
    assert max(open_run("runs/p").results().radius) > 0 or kind == "hugging face"
    assert (tmp_path / "report.html").stat().st_size > 10_000
