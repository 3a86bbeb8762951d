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
from equipoise.runs import Settings, certify, open_run
from equipoise.runs.sources import hash_module, normalised, portable
from equipoise.smoothing import Denoised, SmoothedClassifier

BASE = {"sigma": 0.3, "n": 150, "n0": 50, "procedure": "lvm", "map": "softmax:1.0"}

#: other settings, and how the difference reads
CHANGES = [
    ({"sigma": 0.31}, "sigma: 0.3 → 0.31"),
    ({"n": 200}, "n: 150 → 200"),
    ({"n0": 60}, "n0: 50 → 60"),
    ({"alpha": 0.01}, r"alpha: 0.001 → 0.01\): to change alpha without sampling.*equipoise derive"),
    ({"procedure": "direct"}, "procedure: lvm → direct.*equipoise derive"),
    ({"seed": 1}, "seed: 0 → 1"),
    ({"chunk_size": 50}, "chunk_size: 100 → 50"),
    ({"map": "softmax:2.0"}, r"map: softmax:1.0 → softmax:2.0"),
    ({"lipschitz": 3.0}, "lipschitz: unset → 3.0"),
    ({"nonfinite": "miss"}, "nonfinite: refuse → miss"),
    ({"skip": 1}, "inputs: .*'skip': 0.*'skip': 1.*; total: 12 → 11"),
    ({"limit": 3}, "inputs: .*'limit': 3"),
    ({"stride": 2}, "'stride': 1.*'stride': 2"),
    ({"sigma": 0.4, "n": 151, "seed": 2}, r"n: 150 → 151; seed: 0 → 2; sigma: 0.3 → 0.4"),
]


@pytest.mark.parametrize(("settings", "words"), CHANGES, ids=[",".join(settings) for settings, _ in CHANGES])
def test_a_changed_setting_is_refused_and_named(tmp_path, net, xy, settings, words):
    certify(net, xy, run_dir=tmp_path / "a", **BASE)
    before = (tmp_path / "a" / "run.json").read_bytes()
    with pytest.raises(Refused, match=words):
        certify(net, xy, run_dir=tmp_path / "a", **BASE | settings)
    assert (tmp_path / "a" / "run.json").read_bytes() == before
    assert open_run(tmp_path / "a").finished


def test_a_changed_model_or_dataset_is_refused_and_named(tmp_path, net, xy):
    certify(net, xy, run_dir=tmp_path / "a", **BASE)
    other = runs_nets.net()
    with torch.no_grad():
        other.linear.weight[0, 0] += 1e-6
    with pytest.raises(Refused, match=r"model: sha256:.*… → sha256:"):
        certify(other, xy, run_dir=tmp_path / "a", **BASE)
    x = xy[0].clone()
    x[11, 0, 3, 3] += 1e-6
    with pytest.raises(Refused, match="data: sha256:"):
        certify(net, (x, xy[1]), run_dir=tmp_path / "a", **BASE)
    with pytest.raises(Refused, match="data: sha256:"):
        certify(net, (xy[0], xy[1].flip(0)), run_dir=tmp_path / "a", **BASE)


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


VARIANTS = {
    "same": (Act, {}),
    "slope": (Act, {"slope": 2.0}),
    "function": (Act, {"function": torch.tanh}),
    "nested settings": (Act, {"table": {"a": [1, 3]}}),
    "code": (Act2, {}),
    "a tensor in a list": (Act, {"table": {"a": [torch.zeros(3)]}}),
    "another tensor in a list": (Act, {"table": {"a": [torch.ones(3)]}}),
    "a function with an argument": (Act, {"function": functools.partial(torch.clamp, min=0)}),
    "with another argument": (Act, {"function": functools.partial(torch.clamp, min=1)}),
    "a configuration": (Act, {"table": types.SimpleNamespace(depth=2)}),
    "another configuration": (Act, {"table": types.SimpleNamespace(depth=3)}),
    "keys of two kinds": (Act, {"table": {1: 2, "a": 3}}),
    "an object": (Act, {"table": [object()]}),
}


def test_the_hash_sees_settings_functions_and_code():
    hashes = {name: hash_module(kind(**settings).eval()) for name, (kind, settings) in VARIANTS.items()}
    assert len(set(hashes.values())) == len(VARIANTS)
    assert hashes["same"] == hash_module(Act().eval())
    for name, (kind, settings) in VARIANTS.items():
        assert hash_module(kind(**settings).eval()) == hashes[name]
    assert hash_module(Act(table=[object()]).eval()) == hashes["an object"]  # never an address
    moved = Act().eval()
    moved.plain[0] = 1.0
    moved_cache = Act().eval()
    moved_cache._cache = "other"
    assert hash_module(moved) != hashes["same"]
    assert hash_module(moved_cache) == hashes["same"]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")),
        (nn.Sequential(nn.ReLU(), nn.Flatten()), nn.Sequential(nn.Flatten(), nn.ReLU())),
        (nn.Sequential(nn.Linear(2, 2), nn.GELU()), nn.Sequential(nn.Linear(2, 2), nn.GELU("tanh"))),
        (nn.Linear(2, 2), nn.Linear(2, 2).double()),
    ],
)
def test_the_hash_sees_the_structure(one, two):
    with torch.no_grad():
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            q.copy_(p)
    assert hash_module(one.eval()) != hash_module(two.eval())


def test_the_hash_is_the_same_in_every_process():
    code = "import runs_nets; from equipoise.runs.sources import hash_module; print(hash_module(runs_nets.net()))"
    paths = os.pathsep.join([str(Path(runs_nets.__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "123"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == hash_module(runs_nets.net()), done.stderr


def test_the_hash_of_a_program_sees_graph_and_weights(net):
    one = torch.export.export(net, (torch.zeros(2, *runs_nets.SHAPE),))
    scaled = torch.export.export(runs_nets.Net(scale=5.0).eval(), (torch.zeros(2, *runs_nets.SHAPE),))
    same = torch.export.export(runs_nets.net(), (torch.zeros(2, *runs_nets.SHAPE),))
    assert portable(one).hash == portable(same).hash
    assert portable(one).hash != portable(scaled).hash


def test_the_hash_of_a_stored_program_does_not_depend_on_the_batch_it_is_loaded_for(tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()).eval()
    shapes = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(model, (torch.zeros(4, 1, 5, 5),), dynamic_shapes=shapes), tmp_path / "m.pt2")
    one, many = (load_model(tmp_path / "m.pt2", batch=batch) for batch in (1, 100))
    assert portable(one).hash == portable(many).hash
    assert portable(normalised(one, [0.5], [2.0])).hash == portable(normalised(many, [0.5], [2.0])).hash
    assert portable(normalised(one, [0.5], [2.0])).hash != portable(normalised(many, [0.5], [1.0])).hash


def test_the_manifest_is_readable_and_complete(tmp_path, net, xy):
    run = certify(net, xy, run_dir=tmp_path / "a", **BASE)
    plain = json.loads((tmp_path / "a" / "run.json").read_text())
    assert plain["model"]["hash"] == hash_module(net)
    assert plain["data"]["fingerprint"].startswith("sha256:")
    assert plain["settings"]["sigma"] == 0.3
    assert {"equipoise", "torch", "numpy", "python"} <= set(plain["versions"])
    assert plain["map"] == "softmax:1.0"
    assert run.manifest.to_dict() == plain


#: settings that make no sense, and the words they get
WRONG = [
    ({"sigma": 0.0}, "sigma"),
    ({"sigma": float("nan")}, "sigma"),
    ({"n": 0}, "'n' must be"),
    ({"n0": -1}, "'n0' must be"),
    ({"alpha": 1.5}, "alpha"),
    ({"procedure": "choen"}, "unknown procedure"),
    ({"procedure": "cohen", "map": "softmax:1"}, "counts votes"),
    ({"procedure": "cohen", "lipschitz": 1.0}, "votes have no Lipschitz"),
    ({"procedure": "lvm", "lipschitz": -1.0}, "lipschitz"),
    ({"procedure": "lvm", "lipschitz": float("inf")}, "lipschitz"),
    ({"procedure": "lvm", "map": "softmin"}, "map must be"),
    ({"procedure": "lvm", "map": "softmax:0"}, "map must be|temperature"),
    ({"procedure": "lvm", "map": "softmax:x"}, "map must be"),
    ({"procedure": "lvm", "target_radius": 0.1}, "majority vote"),
    ({"target_radius": -0.1}, "target_radius"),
    ({"nonfinite": "ignore"}, "nonfinite"),
    ({"num_classes": 1}, "num_classes"),
    ({"n": 10**20}, "'n' must be"),
    ({"chunk_size": 10**12}, "chunk_size"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_settings_that_make_no_sense(settings, words):
    with pytest.raises((InputError, Refused), match=words):
        Settings.of("sampled", {"sigma": 0.3, "num_classes": 4, **settings})


@pytest.mark.parametrize("settings", [{"limit": 0}, {"skip": 12}, {"skip": -1}, {"stride": 0}, {"batch_size": 0}])
def test_selections_that_make_no_sense(tmp_path, net, xy, settings):
    with pytest.raises(InputError):
        certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=100, **settings)
    assert not (tmp_path / "a").exists()


def test_a_device_that_is_not_there(tmp_path, net, xy):
    with pytest.raises(InputError, match="device"):
        certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, device="cuda:99")


class Shrink(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 + 0.25 * (x - 0.5)


def test_a_run_with_a_denoiser_is_the_run_of_the_pair(tmp_path, net, xy):
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=200, seed=0, denoiser=Shrink().eval())
    pair = SmoothedClassifier(Denoised(Shrink(), net).eval(), 0.3, 4, seed=0).certify(xy[0], n=200)
    assert np.array_equal(run.certificates().radius, pair.radius)
    assert "Shrink" in run.manifest.model.source
    with pytest.raises(Refused, match="model"):
        certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=200, seed=0)


def test_what_is_no_denoiser_is_refused(tmp_path, net, xy):
    with pytest.raises(InputError, match=r"nn\.Module"):
        certify(net, xy, run_dir=tmp_path / "b", sigma=0.3, n=200, denoiser="blur")


@pytest.mark.parametrize("sigma", [lambda x: 0.1, torch.tensor([0.1, 0.2])])
def test_a_noise_level_that_depends_on_the_input_is_refused(tmp_path, net, xy, sigma):
    with pytest.raises(Refused, match="one number"):
        SmoothedClassifier(net, sigma, 4)
    with pytest.raises(Refused, match="one number"):
        certify(net, xy, run_dir=tmp_path / "a", sigma=sigma, n=200)
