"""The command: one sentence on bad input, a folder that other commands read, JSON that is JSON, several processes."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.medium


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "model: {factory: 'equipoise.nn.models:mlp', arguments: {widths: [8]}}\n"
        "data: {path: digits, limit: 64, test_limit: 40}\nepochs: 2\nbatch_size: 32\n"
    )
    return path


def test_the_run_directory_is_a_checkpoint(equipoise, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = equipoise("train", recipe, "--json")
    assert done.code == 0, done.err
    assert done.json["epoch"] == 2
    audited = equipoise("audit", "runs/tiny", "--json")
    assert audited.code == 0, audited.err
    assert audited.json["upper"] == pytest.approx(done.json["bound"], rel=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert {"sll-sr-digits", "text-snips"} <= set(equipoise("train", "--list", "--json").json)


def test_a_users_own_factory(equipoise, recipe, tmp_path, monkeypatch):
    (tmp_path / "ownnets.py").write_text(
        "from torch import nn\n"
        "def net(num_classes, width=4):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, num_classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = "model={factory: 'ownnets:net', arguments: {width: 6}}"
    done = equipoise("train", recipe, "--set", model, "--run-dir", tmp_path / "run")
    assert done.code == 0, done.err
    assert not (tmp_path / "run" / "config.json").exists()  # a file never names foreign code
    assert load_file(tmp_path / "run" / "model.safetensors")["1.weight"].shape == (6, 64)


def test_two_processes_by_torchrun(recipe, tmp_path):
    """One of them reports, and the network is where other commands find it."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "equipoise"]
    command = [*launch, "train", str(recipe), "--cpu", "--json", "--run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["epoch"] == 2
    assert (tmp_path / "run" / "certificate.json").exists()
