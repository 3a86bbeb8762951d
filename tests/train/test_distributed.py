"""Two processes on the loopback address (gloo) share each global batch and get the result of one.

Starting processes costs more than what they compute, so a pair of them runs several recipes, one after the other.
"""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from equipoise.data import load_dataset
from equipoise.train import read_recipe, run_recipe
from equipoise_lab.models import resnet18

pytestmark = pytest.mark.medium

SCRIPT = """
import json, os, signal, sys, torch
from equipoise.core import EquipoiseError
from equipoise.train import run_recipe
torch.set_num_threads(1)
stop = int(sys.argv[2])
def progress(event):
    if event.row is None and event.step == stop:
        os.kill(os.getpid(), signal.SIGKILL)
for recipe, folder in json.loads(sys.argv[1]):
    try:
        result = run_recipe(recipe, folder, cpu=True, progress=progress if stop else None)
        print("done:", json.dumps([result.final["accuracy"], result.final["step"]]))
    except EquipoiseError as error:
        print("refused:", error)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # how an interpreter ends beside gloo's own threads is not ours to test
"""


def launch(jobs, world=2, stop=0):
    """Run recipes, each into its folder, on `world` processes; the lines each printed, one per recipe.

    Bounded in time, and only our own children are ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    work = json.dumps([(recipe.to_dict(), str(folder)) for recipe, folder in jobs])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, work, str(stop)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
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
    for rank, (child, (_, errors)) in enumerate(zip(children, outputs, strict=True)):
        assert child.returncode == 0, f"process {rank} ended with {child.returncode}:\n{errors[-3000:]}"
    return [[line for line in out.splitlines() if line.startswith(("done:", "refused:"))] for out, _ in outputs]


#: one row per way the batch enters the loss
KINDS = {
    "plain": {"data": {"path": "digits", "limit": 200, "test_limit": 61}},
    "penalties-sam-ema": {
        "optimizer": {"kind": "sam", "lr": 0.05}, "ema": 0.9,
        "regularizers": [{"kind": "activation-decay", "sigma": 0.3}, {"kind": "spectral", "weight": 0.1}],
    },
}  # fmt: skip
RESNET = {"factory": "equipoise_lab.models:resnet18", "arguments": {"width": 2}}


@pytest.fixture(scope="module")
def recipes(small):
    """Every recipe that is run on two processes, by name."""
    return {
        **{kind: small("model.arguments.dropout=0", "epochs=2", **parts) for kind, parts in KINDS.items()},
        "statistics": small("metrics.bound=false", "data.test_limit=null", "epochs=1", model=RESNET),
        "resumed": small("checkpoint_steps=2", "epochs=2", "metrics.bound=false"),  # dropout: own states
        "other": small("epochs=2", "metrics.bound=false"),
    }


@pytest.fixture(scope="module")
def pair(recipes, tmp_path_factory):
    """The folder with one run per recipe, by two processes, and what each process printed."""
    folder = tmp_path_factory.mktemp("pair")
    run_recipe(read_recipe(recipes["other"].to_dict(), ["epochs=1"]), folder / "other")  # in the way of the last one
    lines = launch([(recipe, folder / name) for name, recipe in recipes.items()])
    return folder, [dict(zip(recipes, each, strict=True)) for each in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_result_of_one(recipes, pair, tmp_path, figures, kind):
    run_recipe(recipes[kind], tmp_path / "one")
    folder, (first, second) = pair
    assert first[kind] == second[kind]  # both processes know the same figures
    assert first[kind].startswith("done:")
    one, two = load_file(tmp_path / "one" / "model.safetensors"), load_file(folder / kind / "model.safetensors")
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-5), name
    for a, b in zip(figures(tmp_path / "one"), figures(folder / kind), strict=True):
        assert a.keys() == b.keys()
        for name in ("train_loss", "train_accuracy", "loss", "accuracy"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name


def test_two_processes_measure_the_network_that_is_kept(pair, figures):
    """Batch statistics differ between processes; the figures are those of one network, the one that is saved."""
    folder, test = pair[0] / "statistics", load_dataset("digits", "test")
    # not a builder of the library: its weights alone are stored
    kept = resnet18(num_classes=10, in_channels=1, width=2).eval()
    kept.load_state_dict(load_file(folder / "model.safetensors"))
    x, y = test.batch(range(len(test)))
    with torch.no_grad():
        right = (kept(x).argmax(1) == y).double().mean().item()
    assert figures(folder)[-1]["accuracy"] == pytest.approx(right)


def test_two_processes_resume_exactly(recipes, pair, tmp_path, figures):
    launch([(recipes["resumed"], tmp_path)], stop=7)
    launch([(recipes["resumed"], tmp_path)])
    whole = pair[0] / "resumed"
    assert figures(whole) == figures(tmp_path)
    one, two = load_file(whole / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_one_process_refuses_all_refuse(pair):
    assert all("belongs to another recipe (epochs: 1 → 2)" in lines["other"] for lines in pair[1])
