"""A run is its model, data and parameters: a change of any is noticed and named."""

import functools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import runs_nets
import torch
from torch import nn

from equipoise.checkpoints import load_model
from equipoise.core import InputError, Refused
from equipoise.runs import certify, normalised, open_run, portable
from equipoise.smoothing import Denoised, SmoothedClassifier

pytestmark = pytest.mark.medium

BASE = {"sigma": 0.3, "n": 150, "n0": 50, "procedure": "lvm", "map": "softmax:1.0"}

#: other settings, and how the difference reads
CHANGES = [
    ({"sigma": 0.31}, "sigma: 0.3 → 0.31"),
    ({"alpha": 0.01}, r"alpha: 0.001 → 0.01\):.*equipoise derive"),
    ({"procedure": "direct"}, "procedure: lvm → direct.*equipoise derive"),
    ({"seed": 1}, "seed: 0 → 1"),
    ({"map": "softmax:2.0"}, r"map: softmax:1.0 → softmax:2.0"),
    ({"lipschitz": 3.0}, "lipschitz: unset → 3.0"),
    ({"skip": 1}, "inputs: .*'skip': 0.*'skip': 1.*; total: 12 → 11"),
    ({"sigma": 0.4, "n": 151, "seed": 2}, r"n: 150 → 151; seed: 0 → 2; sigma: 0.3 → 0.4"),
]


class Act(nn.Module):
    def __init__(self, slope=1.0, function=torch.relu, table=None):
        super().__init__()
        self.slope, self.function, self.table, self.plain = slope, function, table or {"a": [1, 2]}, torch.zeros(2)
        self._cache = object()

    def forward(self, x):
        return self.function(x) * self.slope


class Act2(Act):
    def forward(self, x):
        return self.function(x) * self.slope + 0.0


CONV = {"in_channels": 1, "out_channels": 1, "kernel_size": 3, "padding": 1}
#: the same networks as `Act()`, and others
VARIANTS = {
    "same": (Act, {}),
    "slope": (Act, {"slope": 2.0}),
    "function": (Act, {"function": torch.tanh}),
    "nested settings": (Act, {"table": {"a": [1, 3]}}),
    "code": (Act2, {}),
    "another tensor in a list": (Act, {"table": {"a": [torch.ones(3)]}}),
    "with another argument": (Act, {"function": functools.partial(torch.clamp, min=1)}),
    "a configuration": (Act, {"table": types.SimpleNamespace(depth=2)}),
    "an object": (Act, {"table": [object()]}),  # never an address
    "padding": (nn.Conv2d, CONV),
    "padding mode": (nn.Conv2d, {**CONV, "padding_mode": "circular"}),
    "an approximation": (nn.GELU, {"approximate": "tanh"}),
    "none": (nn.GELU, {}),
    "a type": (nn.Linear, {"in_features": 2, "out_features": 2, "dtype": torch.float64}),
    "another type": (nn.Linear, {"in_features": 2, "out_features": 2}),
}


def test_the_hash_sees_weights_settings_functions_and_code_in_every_process():
    def hashed(kind, settings):
        torch.manual_seed(0)
        return portable(kind(**settings).eval()).hash

    hashes = {name: hashed(*variant) for name, variant in VARIANTS.items()}
    assert len(set(hashes.values())) == len(VARIANTS)
    assert hashes == {name: hashed(*variant) for name, variant in VARIANTS.items()}
    moved, cached = Act().eval(), Act().eval()
    moved.plain[0] = 1.0
    cached._cache = "other"
    assert portable(moved).hash != hashes["same"] == portable(cached).hash

    code = "import runs_nets; from equipoise.runs import portable; print(portable(runs_nets.net()).hash)"
    paths = os.pathsep.join([str(Path(runs_nets.__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "123"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == portable(runs_nets.net()).hash, done.stderr


def test_the_hash_of_a_program_sees_graph_weights_and_preprocessing_but_no_batch(tmp_path):
    shapes = ({0: torch.export.Dim("batch")},)
    one, same, scaled = (
        torch.export.export(model.eval(), (torch.zeros(4, *runs_nets.SHAPE),), dynamic_shapes=shapes)
        for model in (runs_nets.Net(), runs_nets.Net(), runs_nets.Net(scale=5.0))
    )
    assert portable(one).hash == portable(same).hash != portable(scaled).hash
    torch.export.save(one, tmp_path / "m.pt2")
    small, large = (load_model(tmp_path / "m.pt2", batch=batch) for batch in (1, 100))
    assert portable(small).hash == portable(large).hash
    assert normalised(small, [0.5], [2.0]).hash == normalised(large, [0.5], [2.0]).hash
    assert normalised(small, [0.5], [2.0]).hash != normalised(large, [0.5], [1.0]).hash


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run and its folder."""
    folder = tmp_path_factory.mktemp("identity") / "a"
    return certify(runs_nets.net(), runs_nets.data(), run_dir=folder, seed=0, **BASE), folder


@pytest.mark.parametrize(("settings", "words"), CHANGES, ids=[",".join(settings) for settings, _ in CHANGES])
def test_a_changed_setting_is_refused_and_named(finished, net, xy, settings, words):
    run, folder = finished
    before = (folder / "run.json").read_bytes()
    with pytest.raises(Refused, match=words):
        certify(net, xy, run_dir=folder, **{"seed": 0, **BASE, **settings})
    assert (folder / "run.json").read_bytes() == before
    assert open_run(folder).finished
    plain = json.loads(before)
    assert plain["model"]["hash"] == portable(net).hash
    assert {"equipoise", "torch", "numpy", "python"} <= set(plain["versions"])
    assert run.manifest.to_dict() == plain


def test_a_changed_model_or_dataset_is_refused_and_named(finished, net, xy):
    other, x = runs_nets.net(), xy[0].clone()
    with torch.no_grad():
        other.linear.weight[0, 0] += 1e-6
        x[11, 0, 3, 3] += 1e-6
    for model, data, words in (
        (other, xy, r"model: sha256:.*… → sha256:"), (net, (x, xy[1]), "data: sha256:"),
        (net, (xy[0], xy[1].flip(0)), "data: sha256:"),
    ):  # fmt: skip
        with pytest.raises(Refused, match=words):
            certify(model, data, run_dir=finished[1], seed=0, **BASE)


#: settings that make no sense, and the words they get
WRONG = [
    ({"sigma": 0.0}, "sigma"),
    ({"sigma": lambda x: 0.1}, "one number"),
    ({"n": 10**20}, "'n' must be"),
    ({"procedure": "choen"}, "unknown procedure"),
    ({"procedure": "cohen", "map": "softmax:1"}, "counts votes"),
    ({"procedure": "cohen", "lipschitz": 1.0}, "votes have no Lipschitz"),
    ({"procedure": "lvm", "lipschitz": 1.0, "noise": "grid"}, "not Lipschitz"),
    ({"procedure": "lvm", "map": "softmin"}, "map must be"),
    ({"procedure": "lvm", "target_radius": 0.1}, "majority vote"),
    ({"skip": 12}, "leaves none"),
    ({"batch_size": 0}, "batch_size"),
    ({"device": "cuda:99"}, "device"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_settings_that_make_no_sense(tmp_path, net, xy, settings, words):
    with pytest.raises((InputError, Refused), match=words):
        certify(net, xy, run_dir=tmp_path / "a", **{"sigma": 0.3, **settings})
    assert not (tmp_path / "a").exists()


class Shrink(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 + 0.25 * (x - 0.5)


def test_a_run_with_a_denoiser_is_the_run_of_the_pair(tmp_path, net, xy):
    pair = Denoised(Shrink(), net).eval()
    run = certify(pair, xy, run_dir=tmp_path / "a", sigma=0.3, n=200, seed=0)
    smoothed = SmoothedClassifier(pair, 0.3, 4, seed=0).certify(xy[0], n=200)
    assert np.array_equal(run.certificates().radius, smoothed.radius)
    assert portable(pair).hash != portable(Denoised(nn.Identity(), net).eval()).hash
