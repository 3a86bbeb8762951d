"""A run gives the numbers of `SmoothedClassifier`, whatever the order, the batches, the shards or the restarts."""

import numpy as np
import pytest
import runs_nets
import torch
from runs_nets import table
from torch.utils.data import TensorDataset

from equipoise.data import Dataset
from equipoise.runs import Settings, certify, merge_runs, open_run, prepare
from equipoise.smoothing import SmoothedClassifier, certify_adaptive

pytestmark = pytest.mark.medium

#: (procedure, settings): one row puts a kind of run through every check
KINDS = [
    ("cohen", {}), ("bonferroni", {}), ("cpm", {}), ("direct", {"map": "hardmax"}), ("direct", {"map": "softmax:1.0"}),
    ("lvm", {}), ("lvm", {"map": "softmax:2.0", "lipschitz": "auto"}),
    ("lvm", {"map": "sparsemax:3.0", "lipschitz": 20.0}), ("cohen", {"target_radius": 0.1}), ("rivals", {}),
    ("rivals", {"map": "softmax:1.0"}), ("rivals", {"target_radius": 0.1}), ("rivals", {"noise": "grid"}),
]  # fmt: skip
IDS = [f"{p}-{'-'.join(str(v) for v in s.values())}" for p, s in KINDS]


@pytest.mark.parametrize(("procedure", "settings"), KINDS, ids=IDS)
def test_equal_to_the_classifier(tmp_path, net, xy, procedure, settings):
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=400, procedure=procedure, **settings)
    ours = run.certificates()
    smooth = SmoothedClassifier(net, 0.3, 4, map=run.manifest.simplex, noise=run.settings.noise)
    if run.settings.adaptive:
        theirs = certify_adaptive(smooth, xy[0], n_max=400, procedure=procedure, **settings)
    else:
        constant = None if run.manifest.lipschitz is None else run.manifest.lipschitz.value
        kind = "global" if procedure in ("lvm", "direct") or "map" in settings else None
        theirs = smooth.certify(xy[0], n=400, procedure=procedure, lipschitz=constant, map=kind)
    for name in ("prediction", "selected", "draws"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert np.array_equal(ours.radius, theirs.radius)
    assert np.array_equal(ours.p_lower, theirs.p_lower)
    assert len(set(ours.radius.tolist())) > 1 or settings.get("target_radius")


@pytest.mark.parametrize(("procedure", "settings"), KINDS, ids=IDS)
def test_same_table_after_restarts_and_in_shards(tmp_path, net, xy, procedure, settings):
    common = {"sigma": 0.3, "n": 300, "procedure": procedure, **settings}
    whole = table(certify(net, xy, run_dir=tmp_path / "whole", **common))

    def stop(row, done, total):
        if done in (1, 4, 9):
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            certify(net, xy, run_dir=tmp_path / "stopped", progress=stop, **common)
    assert table(certify(net, xy, run_dir=tmp_path / "stopped", **common)) == whole

    for k in range(3):
        certify(net, xy, run_dir=tmp_path / f"{k}", skip=k, stride=3, **common)
    merged = merge_runs([tmp_path / f"{k}" for k in (2, 0, 1)], tmp_path / "merged")
    assert merged.finished
    assert table(merged) == whole


@pytest.mark.parametrize("batch", [1, 32, 100])
def test_an_exported_program_with_any_batch(tmp_path, net, xy, batch):
    program = torch.export.export(net, (torch.zeros(batch, *runs_nets.SHAPE),))
    plain = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=150)
    run = certify(program, xy, run_dir=tmp_path / "b", sigma=0.3, n=150)
    assert table(run) == table(plain)
    assert run.manifest.model.hash != plain.manifest.model.hash


@pytest.mark.parametrize("kind", ["pair", "arrays", "tensors", "items", "dataset", "known", "names"])
def test_any_dataset(tmp_path, net, xy, kind):
    x, y = xy
    form = {
        "pair": (x, y),
        "arrays": (x.numpy(), y.numpy()),
        "tensors": TensorDataset(x, y),
        "items": runs_nets.Items(x, y),
        "dataset": Dataset.from_arrays(x.numpy(), y.numpy(), layout="NCHW"),
        "known": runs_nets.Known(x, y),
        "names": runs_nets.Known(x, y, ids=[str(i) for i in range(12)]),
    }[kind]
    ids = {"known": [101, 103, 105, 107], "names": ["1", "3", "5", "7"]}.get(kind, [1, 3, 5, 7])
    run = certify(net, form, run_dir=tmp_path / "a", sigma=0.3, n=150, skip=1, limit=4, stride=2)
    assert run.positions.tolist() == [1, 3, 5, 7]
    assert run.ids == open_run(tmp_path / "a").ids == ids
    assert run.labels.tolist() == y[[1, 3, 5, 7]].tolist()
    smooth = SmoothedClassifier(net, 0.3, 4).certify(x[[1, 3, 5, 7]], n=150, ids=run.ids)
    assert np.array_equal(run.certificates().radius, smooth.radius)


def test_preparing_writes_nothing_and_the_same_command_finds_its_run(tmp_path, net, xy, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [prepare(net, xy, Settings.of("sampled", {"sigma": s})).default_folder() for s in (0.3, 0.3, 0.31)]
    assert folders[0] == folders[1] != folders[2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_the_batch_size_bounds_what_the_network_sees_and_no_number_depends_on_it(tmp_path, net, xy, size):
    passes = []
    one = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=250)
    watched = runs_nets.net()
    watched.linear.register_forward_pre_hook(lambda _, args: passes.append(len(args[0])))
    assert table(one) == table(certify(watched, xy, run_dir=tmp_path / "b", sigma=0.3, n=250, batch_size=size))
    assert max(passes) == min(size, 100)
