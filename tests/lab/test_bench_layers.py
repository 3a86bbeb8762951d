"""The benchmark of layers runs, every layer in it, and the conditioning figure shows what it should."""

from __future__ import annotations

import pytest
import torch

from equipoise_lab.bench import layers


def test_quick_sections_hold_every_layer():
    costs, whole, profile = layers.sections(quick=True)
    assert [row["network"] for row in whole.rows] == ["plain", *layers.NETWORKS]
    assert all(row["train ratio"] > 0 for row in whole.rows)
    names = [row["layer"] for row in costs.rows]
    assert names[: 1 + len(layers.LAYERS)] == ["nn.Conv2d", *layers.LAYERS]
    assert all(row["train ratio"] > 0 and row["eval ratio"] > 0 for row in costs.rows[: 1 + len(layers.LAYERS)])
    exports = {row["layer"]: row["export"] for row in costs.rows if "export" in row}
    assert all(exports[name] == "Conv2d" for name in ("SN", "AOL", "SR t=2", "RKO", "BCOP"))
    assert len(profile.rows) == 9
    assert costs.to_dict()["goals"] == []


def test_goals_are_stated_for_real_sizes():
    section = layers.costs(1, channels=4, size=8, batch=2, only=("AOL", "SOC"))
    assert [goal.what for goal in section.goals] == [
        "AOL, exported, evaluation",
        "AOL, training step",
        "SOC, training step",
    ]


@pytest.mark.parametrize("method", [None, "aol", "bcop"])
def test_whole_networks_differ_in_their_layers_only(method):
    """Four convolutions and a dense layer of 4096 inputs, of one method throughout."""
    net = layers.network(method)
    kinds = [type(layer).__name__ for layer in net if not isinstance(layer, torch.nn.ReLU | torch.nn.Flatten)]
    prefix = {None: "", "aol": "AOL", "bcop": "BCOP"}[method]
    assert kinds == [f"{prefix}Conv2d"] * 4 + [f"{prefix}Linear"] * 2
    assert (net[9].in_features, net[9].out_features) == (4096, 512)


def test_singular_values_after_rescaling():
    found = layers.conditioning(torch.randn(60, 30, generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(found["AOL"], found["SR t=1"])
    tops = [float(found[f"SR t={t}"][0]) for t in (1, 2, 3, 4, 5, 6, 8)]
    assert tops == sorted(tops)
    assert tops[-1] <= 1
    assert tops[-1] > 0.99


def test_rescaling_is_flatter_than_aol_and_sn_on_a_trained_layer(data_dir, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_DATA", str(data_dir))
    weight, what = layers.dense_weight()
    if "trained" not in what:
        pytest.skip("no trained last layer in the data folder")
    section = layers.profiles(weight, what)
    assert all(goal.reached for goal in section.goals)
