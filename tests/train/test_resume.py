"""A run that is stopped anywhere and started again gives the same bits; nothing half-written is ever left."""

import contextlib
import errno
import itertools
import os
import random

import numpy as np
import pytest
import torch
from safetensors import safe_open

from equipoise.core import InputError, Refused
from equipoise.train import Diverged, run_recipe

pytestmark = pytest.mark.medium

STATE = "state/state.safetensors"

#: one row per thing with a state of its own
KINDS = {
    "sgd": {},
    "adamw-ema-schedule": {"optimizer": {"kind": "adamw", "lr": 0.01}, "ema": 0.9,
                           "schedule": {"kind": "cosine", "warmup": 0.2}},
    "sam": {"optimizer": {"kind": "sam", "lr": 0.05}},
    "asam-adamw": {"optimizer": {"kind": "asam", "base": "adamw", "lr": 0.01}},
    "noise": {"noise": {"kind": "gaussian", "sigma": 0.1}, "data": {"path": "digits", "limit": 160, "augment": ["pad-crop"]}},
    "extra": {"data": {"path": "digits", "limit": 96, "test_limit": 60, "extra": "digits", "extra_ratio": 0.7}},
    "consistency": {"noise": {"kind": "consistency", "sigma": 0.1}},
    "spectral": {"regularizers": [{"kind": "spectral", "penalty": "hinge", "weight": 0.1}]},
    "spectral-gram": {"regularizers": [{"kind": "spectral", "bound": "gram", "weight": 0.1}]},
    "decay": {"regularizers": [{"kind": "activation-decay", "sigma": 0.3}],
              "data": {"path": "digits", "limit": 160, "validation": 0.2}},
    "projected": {"projections": [{"kind": "norm", "radius": 0.9}]},
    "margin": {"loss": {"kind": "emma", "lipschitz": 1.0, "epsilon": 0.5, "start": 0.1, "ramp": 0.8},
               "optimizer": {"kind": "nadam", "lr": 0.01, "lookahead": 3}},
    "muon": {"optimizer": {"kind": "muon", "lr": 0.01}, "ema": 0.9, "precision": "bf16",
             "model": {"factory": "equipoise.nn.models:lipschitz_cnn",
                       "arguments": {"channels": [4], "depths": [1], "hidden": 12, "dense": "bcop"}}},
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
    for stop in range(1, whole.final["step"] + 1, 2):
        folder = tmp_path / f"stopped{stop}"
        with pytest.raises(Stop):
            run_recipe(recipe, folder, progress=stop_at(stop))
        again = run_recipe(recipe, folder)
        assert figures(folder) == figures(tmp_path / "whole")
        assert same(weights(again), weights(whole))


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


@contextlib.contextmanager
def failing(monkeypatch, name, error, only=None):
    """Calls of a function of `os` raise: all of them, or one by its number."""
    real, numbers = getattr(os, name), itertools.count(1)

    def call(*args, **options):
        if only in (None, next(numbers)):
            raise error
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(f"os.{name}", call)
        yield


def test_a_crash_while_a_file_is_written_loses_nothing(small, tmp_path, monkeypatch, figures):
    recipe = small("checkpoint_steps=2")
    whole = run_recipe(recipe, tmp_path / "whole")
    for fatal in range(1, 12):  # the n-th rename never happens: as if the machine had gone
        folder = tmp_path / f"crash{fatal}"
        with failing(monkeypatch, "replace", Stop(), fatal), pytest.raises(Stop):
            run_recipe(recipe, folder)
        again = run_recipe(recipe, folder)
        assert figures(folder) == figures(tmp_path / "whole")
        assert same(weights(again), weights(whole))


@pytest.mark.parametrize("target", ["fsync", "replace"])
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(small, tmp_path, monkeypatch, target):
    recipe = small()
    with pytest.raises(Stop):
        run_recipe(recipe, tmp_path / "run", progress=stop_at(7))
    state = (tmp_path / "run" / STATE).read_bytes()
    full = OSError(errno.ENOSPC, "No space left on device")
    words = r"cannot write .*: No space left on device"
    with failing(monkeypatch, target, full), pytest.raises(InputError, match=words):
        run_recipe(recipe, tmp_path / "run")
    assert (tmp_path / "run" / STATE).read_bytes() == state
    assert run_recipe(recipe, tmp_path / "run").final["epoch"] == 3


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


def test_divergence_names_the_step_and_keeps_the_last_good_checkpoint(small, tmp_path):
    recipe = small("optimizer.momentum=0", "optimizer.lr=1e30", "schedule.kind=piecewise",
                   "schedule.points=[[0.5, 1e-32], [0.6, 1.0]]", "checkpoint_steps=1")  # fmt: skip
    with pytest.raises(Diverged, match=r"after step \d+ of 15 "):
        run_recipe(recipe, tmp_path / "run")
    last = tmp_path / "run" / STATE
    with safe_open(last, framework="pt") as file:
        assert all(torch.isfinite(file.get_tensor(n)).all() for n in file.keys() if n.startswith("model|"))  # noqa: SIM118
    assert not (tmp_path / "run" / "model.safetensors").exists()


def changed(state, place):
    """Another file: cut there, or with a bit flipped there (a place below 1 is a fraction of the length)."""
    if isinstance(place, int):
        return state[:place]
    at = int(place * len(state))
    return state[:at] + bytes([state[at] ^ 2]) + state[at + 1 :]


@pytest.mark.parametrize("place", [0.2, 0.9, 100, -1, 0])
def test_a_damaged_state_is_noticed_and_can_be_removed(small, tmp_path, place):
    """In the header or in the numbers; the safetensors format has no checksum of its own."""
    run_recipe(small(epochs=1), tmp_path / "run")
    state = tmp_path / "run" / STATE
    state.write_bytes(changed(state.read_bytes(), place))
    with pytest.raises(InputError, match="is damaged: remove it and the run starts over"):
        run_recipe(small(epochs=1), tmp_path / "run")
    state.unlink()
    assert run_recipe(small(epochs=1), tmp_path / "run").finished


def test_a_state_of_another_network_is_one_sentence(small, tmp_path):
    """A state that fits its digest but not the network: restored, or used in the first step, it ends in a sentence."""
    for width, name in ((12, "one"), (8, "two")):
        recipe = small(f"model.arguments.widths=[{width}]", "checkpoint_steps=2", optimizer={"kind": "adam"})
        with pytest.raises(Stop):
            run_recipe(recipe, tmp_path / name, progress=stop_at(3))
    (tmp_path / "two" / STATE).write_bytes((tmp_path / "one" / STATE).read_bytes())
    with pytest.raises(InputError, match="the stored state does not fit the recipe's network"):
        run_recipe(recipe, tmp_path / "two")


def test_a_finished_run_is_not_trained_again_and_belongs_to_its_recipe_and_data(small, tmp_path):
    def write(shift):
        x, y = np.arange(64 * 4, dtype=np.uint8).reshape(64, 2, 2) + np.uint8(shift), np.arange(64) % 10
        np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)

    write(0)
    # JSON has no infinity: the exponent is stored as text
    parts = {"data": {"path": str(tmp_path / "own.npz")}, "projections": [{"kind": "norm", "p": float("inf")}]}
    recipe, events = small(epochs=1, **parts), []
    first = run_recipe(recipe, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    again = run_recipe(recipe, tmp_path / "run", progress=events.append)
    assert (events, again.final) == ([], first.final)
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert same(weights(again), weights(first))

    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.name != ".lock"}
    with pytest.raises(InputError, match=r"optimizer: .*'lr': 0\.1.* → .*'lr': 0\.5.*another --run-dir"):
        run_recipe(small("optimizer.lr=0.5", epochs=1, **parts), tmp_path / "run")
    write(1)
    with pytest.raises(InputError, match="fingerprint: sha256"):
        run_recipe(recipe, tmp_path / "run")
    assert files == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.name != ".lock"}


def test_a_folder_with_other_things_is_left_alone_and_a_file_is_no_folder(small, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    for place in (tmp_path, tmp_path / "thesis.tex" / "run"):
        with pytest.raises(InputError, match=r"thesis\.tex"):
            run_recipe(small(), place)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_the_callers_randomness_is_left_alone(small):
    def draws(work):
        torch.manual_seed(1), np.random.seed(2), random.seed(3)
        return work(), torch.rand(1), np.random.rand(), random.random()

    a, *disturbed = draws(lambda: run_recipe(small(epochs=1)))
    _, *calm = draws(lambda: None)
    assert disturbed == calm
    assert same(weights(a), weights(run_recipe(small(epochs=1))))
    assert not same(weights(a), weights(run_recipe(small(epochs=1, seed=1))))
