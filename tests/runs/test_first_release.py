"""Runs of the first release: they open, say what they do not cover, and are derived again with `rivals`; no more is drawn."""

import json

import numpy as np
import pytest

from equipoise.core import Refused
from equipoise.runs import certify, open_run
from equipoise.runs.manifest import Manifest
from equipoise.runs.parameters import Parameters
from equipoise.runs.store import Store

#: what `parameters` of its run.json held
FIRST = {
    "sigma": 0.3, "num_classes": 4, "n0": 100, "n": 300, "alpha": 0.001, "procedure": "cpm", "seed": 0, "chunk_size": 100,
    "nonfinite": "refuse", "device": "cpu",
}  # fmt: skip


@pytest.fixture
def first_release(tmp_path, net, xy):
    """A finished run as the first release wrote it: today's rows under a manifest without the newer parameters."""
    now = certify(net, xy, run_dir=tmp_path / "now", sigma=0.3, n=300)
    old = Manifest(
        now.manifest.model, now.manifest.data, now.manifest.selection, now.manifest.total, Parameters(**FIRST)
    )
    folder = tmp_path / "old"
    folder.mkdir()
    plain = json.loads(json.dumps(old.to_dict()))
    plain.pop("digest", None)
    (folder / "run.json").write_text(json.dumps(plain))
    with Store(folder, identity=old.digest(), writable=True) as store:
        store.put_all(now.rows)
    return folder


def test_it_opens_and_says_what_it_does_not_cover(first_release):
    run = open_run(first_release)
    assert run.manifest.parameters.to_dict() == FIRST
    found = run.certificates()
    assert found.procedure == "cpm"
    assert "noise drawn in floating point" in found.about


def test_it_is_derived_again_with_rivals_without_a_forward_pass(first_release):
    run = open_run(first_release)
    before, after = run.certificates(), run.certificates(procedure="rivals")
    assert after.radius.sum() > before.radius.sum()
    assert np.isfinite(run.certificates(procedure="randomized").radius).all()


def test_it_is_not_continued(first_release, net, xy):
    with pytest.raises(Refused, match="first release"):
        certify(net, xy, run_dir=first_release, sigma=0.3, n=300, procedure="cpm", seed=0)
