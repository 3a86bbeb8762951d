"""The engineer guide alone: its first commands, as they stand there, end in a certificate above 0 of a network from elsewhere."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import equipoise as eq
from equipoise.conversion import export
from equipoise.runs import open_run

pytestmark = pytest.mark.medium

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
    def commands_in_turn(lines, run=None):
        for arguments in lines:
            ran = equipoise(*arguments)
            assert ran.code == 0, (arguments, ran.err, ran.error)
        return run and open_run(run).summary()

    return commands_in_turn


def test_the_installation_of_the_guide_is_enough_for_its_commands():
    """Reading .onnx files and drawing reports need packages of their own."""
    extras = re.search(r"pip install 'equipoise\[([\w,]+)\]'", GUIDE.read_text(encoding="utf-8"))[1].split(",")
    words = {"model.onnx": "onnx", "report": "report"}
    assert {words[word] for line in commands() for word in words if word in line} <= set(extras)


def test_the_first_commands_end_in_a_certificate(folder, follow):
    """With fewer inputs and draws than the guide asks for."""
    changed = {"20": "4", "500": "60"}
    lines = [[changed.get(word, word) for word in line] for line in commands() if line[0] != "audit"]
    summary = follow(lines, "runs/first")
    assert summary.accuracy[0.0] > 0
    assert summary.results.average_radius > 0


def test_a_network_of_ones_own_is_made_robust(tmp_path, monkeypatch, follow):
    """The training of the guide, on few pictures: planned, trained, and its bound accepted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    (tmp_path / "guide_nets.py").write_text(code)
    parts = {}
    for split, count in (("train", 200), ("test", 50)):
        x, y = eq.data.load_dataset("digits", split).batch(range(count))
        parts |= {f"x_{split}": x.numpy(), f"y_{split}": y.numpy()}
    np.savez("pictures.npz", **parts)
    save_file({"1.weight": torch.randn(10, 64), "1.bias": torch.zeros(10)}, "w.safetensors")
    quick = ["--set", "epochs=1", "--set", "batch_size=50"]
    plan, train, audit = commands("1 · Audit")
    lines = ([*plan, *quick], [*train, *quick], audit)
    follow([word.replace("package.module:factory", "guide_nets:net") for word in line] for line in lines)


@pytest.mark.slow
def test_the_guide_as_it_is_written(folder, follow):
    assert follow(commands(), "runs/first").accuracy[0.03] >= 0.3
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


@pytest.mark.slow
def test_the_five_steps_on_a_hugging_face_folder(tmp_path, monkeypatch, follow):
    """With fewer inputs and draws; the last step reads pictures, which the test above does."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=10)
    net = transformers.ViTForImageClassification(config)
    x, y = eq.data.load_dataset("digits#train").batch(range(1437))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(eq.regularizers.add_noise(x, 0.25)).logits, y).backward()
        optimizer.step()
    net.save_pretrained("folder")
    changed = {"model.pt2": "folder", "50": "4", "1000": "100", "0.25,0.5": "0.25"}
    steps = [[changed.get(word, word) for word in step] for step in commands("Five steps")[:-1]]
    assert follow(steps, "runs/a").accuracy[0.0] > 0
    assert open_run("runs/p").results().average_radius > 0
