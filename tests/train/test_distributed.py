"""Two processes on the loopback address (gloo) share each global batch and get the result of one."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from equipoise.checkpoints import load_checkpoint
from equipoise.train import run_recipe
from equipoise.train.build import build_data
from equipoise.train.losses import cross_entropy
from equipoise.train.metrics import evaluate

SCRIPT = """
import json, os, signal, sys, torch
from equipoise.core.errors import EquipoiseError
from equipoise.train import run_recipe
torch.set_num_threads(1)
stop = int(sys.argv[3])
def progress(event):
    if event.row is None and event.step == stop:
        os.kill(os.getpid(), signal.SIGKILL)
try:
    result = run_recipe(json.loads(sys.argv[1]), sys.argv[2], cpu=True, progress=progress if stop else None)
    print(json.dumps([result.final["accuracy"], result.final["step"]]))
except EquipoiseError as error:
    print("refused:", error)
torch.distributed.destroy_process_group()
"""


def launch(recipe, folder, world=2, stop=0):
    """Run the recipe on `world` processes; their outputs. Bounded in time, and only our own children are ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, json.dumps(recipe.to_dict()), str(folder), str(stop)]
    children = [
        subprocess.Popen(
            command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        if stop:  # the first process dies; nobody waits for the other one
            children[0].communicate(timeout=300)
            return []
        outputs = [child.communicate(timeout=300) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait(timeout=30)
    assert all(child.returncode == 0 for child in children), outputs
    return [out.strip().splitlines()[-1] for out, _ in outputs]


#: one row per way the batch enters the loss
KINDS = {
    "noise-augment": {
        "noise": {"kind": "gaussian", "sigma": 0.1},
        "data": {"path": "digits", "limit": 200, "test_limit": 61, "augment": ["pad-crop"]},
    },
    "penalties-sam-ema": {
        "optimizer": {"kind": "sam", "lr": 0.05}, "ema": 0.9,
        "regularizers": [{"kind": "activation-decay", "sigma": 0.3}, {"kind": "spectral", "weight": 0.1}],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_result_of_one(small, tmp_path, figures, kind):
    recipe = small("model.arguments.dropout=0", "epochs=2", **KINDS[kind])
    run_recipe(recipe, tmp_path / "one")
    outputs = launch(recipe, tmp_path / "two")
    assert len(set(outputs)) == 1  # both processes know the same figures
    one, two = load_file(tmp_path / "one" / "model.safetensors"), load_file(tmp_path / "two" / "model.safetensors")
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-5), name
    for a, b in zip(figures(tmp_path / "one"), figures(tmp_path / "two"), strict=True):
        assert a.keys() == b.keys()
        for name in ("train_loss", "train_accuracy", "loss", "accuracy"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name


def test_two_processes_measure_the_network_that_is_kept(small, tmp_path, figures):
    """Batch statistics differ between processes; the figures are those of one network, the one that is saved."""
    model = {"factory": "equipoise.nn.models:resnet18", "arguments": {"width": 2}}
    launch(small("metrics.bound=false", "metrics.batch_size=10", "epochs=1", model=model), tmp_path / "run")
    kept, _ = load_checkpoint(tmp_path / "run")
    test = build_data(small().data).test
    found = evaluate(kept, test, cross_entropy(), torch.device("cpu"), 500)
    row = figures(tmp_path / "run")[-1]
    assert row["accuracy"] == found["accuracy"]
    assert row["loss"] == pytest.approx(found["loss"], rel=1e-5)


def test_two_processes_resume_exactly(small, tmp_path, figures):
    recipe = small("checkpoint_steps=2", "epochs=2", "metrics.bound=false")  # dropout: each process has its own state
    launch(recipe, tmp_path / "whole")
    launch(recipe, tmp_path / "stopped", stop=7)
    launch(recipe, tmp_path / "stopped")
    assert figures(tmp_path / "whole") == figures(tmp_path / "stopped")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_one_process_refuses_all_refuse(small, tmp_path):
    run_recipe(small("epochs=1", "metrics.bound=false"), tmp_path / "run")
    outputs = launch(small("epochs=2", "metrics.bound=false"), tmp_path / "run")
    assert all("belongs to another recipe (recipe.epochs: 1 → 2)" in out for out in outputs)
