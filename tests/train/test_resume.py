"""A run that is stopped anywhere and started again gives the same bits; nothing half-written is ever left."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from equipoise.core.errors import InputError, Refused
from equipoise.train import Diverged, read_recipe, run_recipe
from equipoise.train.journal import STATE

#: one row per thing with a state of its own
KINDS = {
    "sgd": {},
    "adamw-ema-schedule": {
        "optimizer": {"kind": "adamw", "lr": 0.01}, "ema": 0.9, "schedule": {"kind": "cosine", "warmup": 0.2},
    },
    "sam": {"optimizer": {"kind": "sam", "lr": 0.05}},
    "asam-adamw": {"optimizer": {"kind": "asam", "base": "adamw", "lr": 0.01}},
    "noise": {"noise": {"kind": "gaussian", "sigma": 0.1}, "data": {"path": "digits", "limit": 160, "augment": ["pad-crop"]}},
    "extra": {"data": {"path": "digits", "limit": 96, "test_limit": 60, "extra": "digits", "extra_ratio": 0.7}},
    "consistency": {"noise": {"kind": "consistency", "sigma": 0.1}},
    "spectral": {"regularizers": [{"kind": "spectral", "penalty": "hinge", "weight": 0.1}]},
    "spectral-gram": {"regularizers": [{"kind": "spectral", "bound": "gram", "weight": 0.1}]},
    "decay": {
        "regularizers": [{"kind": "activation-decay", "sigma": 0.3}],
        "data": {"path": "digits", "limit": 160, "validation": 0.2},
    },
    "projected": {"projections": [{"kind": "norm", "radius": 0.9}]},
    "margin": {
        "loss": {"kind": "emma", "lipschitz": 1.0, "epsilon": 0.5, "start": 0.1, "ramp": 0.8},
        "optimizer": {"kind": "nadam", "lr": 0.01, "lookahead": 3},
    },
    "muon": {
        "optimizer": {"kind": "muon", "lr": 0.01}, "ema": 0.9, "precision": "bf16",
        "model": {
            "factory": "equipoise.nn.models:lipschitz_cnn",
            "arguments": {"channels": [4], "depths": [1], "hidden": 12, "dense": "bcop"},
        },
    },
}  # fmt: skip


class Stop(BaseException):
    """Not an `Exception`: nothing may catch it and tidy up."""


def stop_at(step):
    def progress(event):
        if event.row is None and event.step == step:
            raise Stop

    return progress


def weights(result):
    return {name: value.clone() for name, value in result.model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_anywhere_it_goes_on_bit_by_bit(small, tmp_path, figures, kind):
    recipe = small("checkpoint_steps=3", epochs=2, **KINDS[kind])
    whole = run_recipe(recipe, tmp_path / "whole")
    steps = whole.final["step"]
    for stop in range(1, steps + 1, 2):
        folder = tmp_path / f"stopped{stop}"
        with pytest.raises(Stop):
            run_recipe(recipe, folder, progress=stop_at(stop))
        again = run_recipe(recipe, folder)
        assert figures(folder) == figures(tmp_path / "whole")
        assert same(weights(again), weights(whole))


def test_it_does_not_start_over(small, tmp_path):
    recipe = small("checkpoint_steps=2")
    with pytest.raises(Stop):
        run_recipe(recipe, tmp_path / "run", progress=stop_at(9))
    steps = []
    run_recipe(recipe, tmp_path / "run", progress=lambda e: steps.append(e.step))
    assert min(steps) == 9  # from step 8


@pytest.mark.parametrize("remembered", [False, True])
def test_a_run_stops_when_its_time_is_over_and_goes_on(small, tmp_path, figures, remembered):
    recipe = small()
    stopped = run_recipe(recipe, tmp_path / "run" if remembered else None, minutes=0)
    assert (stopped.finished, stopped.final["step"], stopped.history) == (False, 0, [])
    assert 0 <= stopped.final["accuracy"] <= 1
    if remembered:
        assert (tmp_path / "run" / "certificate.json").exists()
        again = run_recipe(recipe, tmp_path / "run", minutes=1000)
        whole = run_recipe(recipe, tmp_path / "whole")
        assert again.finished
        assert figures(tmp_path / "run") == figures(tmp_path / "whole")
        assert same(weights(again), weights(whole))


def test_a_finished_run_is_not_trained_again(small, tmp_path):
    first = run_recipe(small(), tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    events = []
    again = run_recipe(small(), tmp_path / "run", progress=events.append)
    assert events == []
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert again.final == first.final
    assert same(weights(again), weights(first))


def test_a_crash_while_a_file_is_written_loses_nothing(small, tmp_path, monkeypatch, figures):
    recipe = small("checkpoint_steps=2")
    whole = run_recipe(recipe, tmp_path / "whole")
    replace = os.replace
    for fatal in range(1, 12):  # the n-th rename never happens: as if the machine had gone
        folder, count = tmp_path / f"crash{fatal}", 0

        def dying(source, target, fatal=fatal):
            nonlocal count
            count += 1
            if count == fatal:
                raise Stop
            replace(source, target)

        monkeypatch.setattr("os.replace", dying)
        with pytest.raises(Stop):
            run_recipe(recipe, folder)
        monkeypatch.setattr("os.replace", replace)
        again = run_recipe(recipe, folder)
        assert figures(folder) == figures(tmp_path / "whole")
        assert same(weights(again), weights(whole))


SCRIPT = """
import json, sys
from equipoise.train import run_recipe
def tell(event):
    print("step", event.step, flush=True)
run_recipe(json.loads(sys.argv[1]), sys.argv[2], progress=tell)
"""


def test_sigkill(small, tmp_path, figures):
    recipe = small("checkpoint_steps=4", epochs=6)
    whole = run_recipe(recipe, tmp_path / "whole")
    command = [sys.executable, "-c", SCRIPT, json.dumps(recipe.to_dict()), str(tmp_path / "run")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in child.stdout:
            if line.strip() == "step 14":
                break
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait(timeout=60)
    assert child.returncode == -signal.SIGKILL
    again = run_recipe(recipe, tmp_path / "run")
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert same(weights(again), weights(whole))


def test_the_checkpoint_is_one_safetensors_file_with_json(small, tmp_path):
    run_recipe(small("checkpoint_steps=2"), tmp_path / "run")
    with safe_open(tmp_path / "run" / STATE, framework="pt") as file:
        position = json.loads(file.metadata()["position"])
        names = set(file.keys())
    assert position["epoch"] == len(position["history"]) == 3
    assert any(name.startswith("optimizer/0|") for name in names)
    assert not any(path.suffix in (".pt", ".pkl", ".bin") for path in (tmp_path / "run").rglob("*"))


def rewrite(path, change):
    """Change tensors and position of a state, with a digest that fits."""
    from safetensors.torch import save_file

    from equipoise.train.journal import _digest

    with safe_open(path, framework="pt") as file:
        position = json.loads(file.metadata()["position"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, position)
    text = json.dumps(position)
    save_file(tensors, path, metadata={"position": text, "digest": _digest(tensors, text)})


#: every tensor is left out or misshapen; every number of the position is changed or of another type
WRONG_POSITIONS = [("epoch", -1), ("epoch", "2"), ("step", 10**30), ("step", 3), ("batch", None), ("history", []),
                   ("history", [1]), ("plain", {"optimizer/0|x": [1]}), ("more", 1)]  # fmt: skip


@pytest.fixture(scope="module")
def stopped(make_small, tmp_path_factory):
    """A run in the middle of its second epoch."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    recipe = make_small("checkpoint_steps=2", optimizer={"kind": "adam", "lr": 0.01}, ema=0.9)
    with pytest.raises(Stop):
        run_recipe(recipe, folder, progress=stop_at(7))
    return recipe, folder


def resumed(stopped, tmp_path, change):
    recipe, folder = stopped
    shutil.copytree(folder, tmp_path / "run")
    rewrite(tmp_path / "run" / STATE, change)
    return run_recipe(recipe, tmp_path / "run")


@pytest.mark.parametrize(("key", "value"), WRONG_POSITIONS, ids=str)
def test_a_state_with_a_wrong_position_is_one_sentence(stopped, tmp_path, key, value):
    with pytest.raises(InputError, match=r"is damaged|does not fit"):
        resumed(stopped, tmp_path, lambda tensors, position: position.update({key: value}))


def test_a_state_with_missing_or_misshapen_tensors_is_one_sentence(stopped, tmp_path):
    with safe_open(stopped[1] / STATE, framework="pt") as file:
        names = [name for name in file.keys() if not name.startswith("totals")]  # noqa: SIM118
    for number, name in enumerate(names):
        for kind, change in enumerate((
            lambda tensors, _, name=name: tensors.pop(name),
            lambda tensors, _, name=name: tensors.update({name: torch.zeros(3, 3)}),
        )):  # fmt: skip
            with pytest.raises(InputError, match=r"is damaged|does not fit"):
                resumed(stopped, tmp_path / f"{number}-{kind}", change)


def test_another_recipe_is_refused_with_the_difference(small, tmp_path):
    run_recipe(small(epochs=1), tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.name != ".lock"}
    with pytest.raises(InputError, match=r"optimizer: .*'lr': 0\.1.* → .*'lr': 0\.5.*another --run-dir"):
        run_recipe(small("optimizer.lr=0.5", epochs=1), tmp_path / "run")
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.name != ".lock"}


def test_other_data_under_the_same_name_is_refused(small, tmp_path):
    import numpy as np

    def write(shift):
        x, y = np.arange(64 * 4, dtype=np.uint8).reshape(64, 2, 2) + np.uint8(shift), np.arange(64) % 10
        np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)

    write(0)
    recipe = small(data={"path": str(tmp_path / "own.npz")}, epochs=1)
    run_recipe(recipe, tmp_path / "run")
    write(1)
    with pytest.raises(InputError, match="fingerprint: sha256"):
        run_recipe(recipe, tmp_path / "run")


def test_a_folder_with_other_things_is_left_alone(small, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        run_recipe(small(), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_two_runs_in_one_folder_are_refused(small, tmp_path):
    recipe = small(epochs=1)
    seen = []

    def intrude(event):
        if event.step == 2 and event.row is None:
            with pytest.raises(Refused, match="another process trains"):
                run_recipe(recipe, tmp_path / "run")
            seen.append(event)

    run_recipe(recipe, tmp_path / "run", progress=intrude)
    assert seen


@pytest.mark.parametrize("target", ["fsync", "replace"])
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(small, tmp_path, monkeypatch, target):
    import errno

    recipe = small()
    with pytest.raises(Stop):
        run_recipe(recipe, tmp_path / "run", progress=stop_at(7))
    state = (tmp_path / "run" / STATE).read_bytes()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"os.{target}", full)
    with pytest.raises(InputError, match=r"cannot write .*: No space left on device"):
        run_recipe(recipe, tmp_path / "run")
    monkeypatch.undo()
    assert (tmp_path / "run" / STATE).read_bytes() == state
    assert run_recipe(recipe, tmp_path / "run").final["epoch"] == 3


def test_a_place_that_cannot_be_written_is_one_sentence(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot train in"):
        run_recipe(small(), tmp_path / "file" / "run")


def test_divergence_names_the_step_and_keeps_the_last_good_checkpoint(small, tmp_path):
    recipe = small("optimizer.momentum=0", "optimizer.lr=1e30", "schedule.kind=piecewise",
                   "schedule.points=[[0.5, 1e-32], [0.6, 1.0]]", "checkpoint_steps=1")  # fmt: skip
    with pytest.raises(Diverged, match=r"after step \d+ of 15 "):
        run_recipe(recipe, tmp_path / "run")
    last = tmp_path / "run" / STATE
    with safe_open(last, framework="pt") as file:
        assert all(torch.isfinite(file.get_tensor(n)).all() for n in file.keys() if n.startswith("model|"))  # noqa: SIM118
    assert not (tmp_path / "run" / "model.safetensors").exists()


def flip(place):
    def damage(content):
        content[int(place * len(content))] ^= 2
        return content

    return damage


@pytest.mark.parametrize("damage", [flip(0.2), flip(0.9), lambda c: c[:100], lambda c: c[:-1], lambda c: b""])
def test_a_damaged_state_is_noticed_and_can_be_removed(small, tmp_path, damage):
    """In the header or in the numbers; the safetensors format has no checksum of its own."""
    run_recipe(small(epochs=1), tmp_path / "run")
    state = tmp_path / "run" / STATE
    state.write_bytes(damage(bytearray(state.read_bytes())))
    with pytest.raises(InputError, match="is damaged: remove it and the run starts over"):
        run_recipe(small(epochs=1), tmp_path / "run")
    state.unlink()
    assert run_recipe(small(epochs=1), tmp_path / "run").finished


def test_an_infinite_exponent_survives_the_run_directory(small, tmp_path):
    """JSON has no infinity: `p: .inf` became null between the command line and the projection."""
    recipe = small(epochs=1, projections=[{"kind": "norm", "p": float("inf")}])
    assert read_recipe(recipe).projections[0].arguments["p"] == float("inf")
    run_recipe(recipe, tmp_path / "run")
    assert run_recipe(recipe, tmp_path / "run").final["epoch"] == 1


def test_the_callers_randomness_is_left_alone(small):
    import random

    import numpy as np

    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    a = run_recipe(small(epochs=1))
    assert (torch.rand(1), np.random.rand(), random.random()) == expected
    b = run_recipe(small(epochs=1))
    assert same(weights(a), weights(b))
    assert not same(weights(a), weights(run_recipe(small(epochs=1, seed=1))))
