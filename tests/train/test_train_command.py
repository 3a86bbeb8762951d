"""The command: one sentence on bad input, a folder that other commands read, JSON that is JSON."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading

import pytest
import torch
from typer.testing import CliRunner

from equipoise.cli.app import Command, build
from equipoise.cli.audit import audit_report
from equipoise.lipschitz import lipschitz_bound

APP = build((Command("train", "equipoise.cli.train", "train"), Command("audit", "equipoise.cli.audit", "audit")))
FAST = ["--set", "epochs=1", "--set", "data.limit=64", "--set", "data.test_limit=40", "--set", "batch_size=32"]


def run(*args):
    return CliRunner().invoke(APP, [str(a) for a in args])


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "model: {factory: 'equipoise.nn.models:mlp', arguments: {widths: [8]}}\n"
        "data: {path: digits, limit: 64, test_limit: 40}\nepochs: 2\nbatch_size: 32\n"
    )
    return path


def test_the_run_directory_is_a_checkpoint(recipe, tmp_path):
    done = run("train", recipe, "--run-dir", tmp_path / "run", "--json")
    assert done.exit_code == 0, done.stderr
    final = json.loads(done.stdout)
    assert final["epoch"] == 2
    audited = run("audit", tmp_path / "run", "--json")
    assert audited.exit_code == 0, audited.stderr
    assert json.loads(audited.stdout)["upper"] == pytest.approx(final["bound"], rel=1e-6)
    assert audit_report(str(tmp_path / "run")).upper == final["bound"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]


def test_a_line_per_epoch_and_a_table(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("train", recipe)
    assert done.exit_code == 0, done.stderr
    assert [line.split("  ")[0] for line in done.stderr.splitlines()] == ["epoch 1/2", "epoch 2/2"]
    assert "Lipschitz bound" in done.stdout
    assert "Next: equipoise audit runs/tiny" in done.stdout
    assert (tmp_path / "runs" / "tiny" / "config.json").exists()


def test_list():
    assert {"sll-sr-digits", "text-snips"} <= set(json.loads(run("train", "--list", "--json").stdout))
    assert "sll-sr-digits" in run("train", "--list").stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "which recipe?"),
        (["nothing.yaml"], "cannot read nothing.yaml"),
        (["sll-sr-digts"], "did you mean 'sll-sr-digits'"),
        (["sll-sr-digits", "--set", "optimizer.lrr=1"], "did you mean 'optimizer.lr'"),
        (["sll-sr-digits", "--set", "data.path=nowhere.npz"], "nowhere.npz"),
        (["sll-sr-digits", "--set", "model.factory=nowhere:net"], "No module named 'nowhere'"),
        (["sll-sr-digits", "--set", "loss=crossentropy"], "no kind 'crossentropy'"),
    ],
)
def test_bad_input_is_one_sentence(args, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("train", *args)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_a_users_own_factory(tmp_path, monkeypatch):
    (tmp_path / "ownnets.py").write_text(
        "from torch import nn\n"
        "def net(num_classes, width=4):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, num_classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "run"
    done = run("train", "sll-sr-digits", *FAST, "--set", "model={factory: 'ownnets:net', arguments: {width: 6}}",
               "--run-dir", folder)  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert not (folder / "config.json").exists()  # a file never names foreign code
    from safetensors.torch import load_file

    assert load_file(folder / "model.safetensors")["1.weight"].shape == (6, 64)


def test_progress_on_a_terminal(recipe, tmp_path):
    code = (
        "from equipoise.cli.app import Command, build\n"
        "build((Command('train', 'equipoise.cli.train', 'train'), Command('norm', 'equipoise.cli.norm', 'norm')))()\n"
    )
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", code, "train", str(recipe), "--run-dir", str(tmp_path / "run"), "--json"]
    pieces = []

    def listen():
        with contextlib.suppress(OSError):  # the other end is gone
            while piece := os.read(ours, 1 << 16):
                pieces.append(piece)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, timeout=300)
    os.close(theirs)
    listener.join(timeout=30)
    os.close(ours)
    seen = b"".join(pieces).decode(errors="replace")
    assert done.returncode == 0
    assert "epoch 2/2" in seen
    assert json.loads(done.stdout)["epoch"] == 2


def test_the_certified_figures_are_those_of_the_proved_bound(recipe, tmp_path):
    from equipoise.attacks import pgd
    from equipoise.data import load_dataset
    from equipoise.train import run_recipe

    result = run_recipe(recipe, overrides=["epochs=8", "optimizer.lr=0.3", "metrics.epsilons=[0.0, 0.05, 0.1]"])
    test = load_dataset("digits", "test")
    x, y = test.batch(range(len(test)))
    assert result.final["bound"] == lipschitz_bound(result.model, x[:1]).upper
    certified = result.final["certified_accuracy"]
    assert result.final["accuracy"] >= certified["0.0"] >= certified["0.05"] >= certified["0.1"]
    measured = run_recipe(
        recipe, overrides=["epochs=8", "optimizer.lr=0.3", "metrics.epsilons=[0.05]", "data.test_limit=null"]
    )
    attacked = pgd(measured.model, x, y, 0.05, steps=20)
    with torch.no_grad():
        standing = (measured.model(attacked.adversarial).argmax(1) == y).float().mean().item()
    assert measured.final["certified_accuracy"]["0.05"] <= standing + 1e-9
