"""What the thesis prints, against what the experiments compute: arms, penalties, rivals, places, verdicts."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from equipoise.regularizers import SpectralPenalty
from equipoise.train.terms import Context as TermContext
from equipoise_lab.experiments import Context, Label, every, find
from equipoise_lab.experiments.experiment import Cells
from equipoise_lab.experiments.generalisation import reg_accuracy
from equipoise_lab.experiments.networks import training_stability as stability
from equipoise_lab.experiments.page import stored
from equipoise_lab.experiments.shared.training import run
from equipoise_lab.models import build

COMMITTED = Path(__file__).parents[3] / "lab" / "results" / "experiments"


def context_of(model: nn.Module) -> TermContext:
    return TermContext(model, None, torch.zeros(1, 3, 8, 8))


def test_one_batch_norm_is_left_before_the_last_dense_layer():
    net = stability.one_batch_norm(width=4)
    assert [m for m in net.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)] == [net.fc[0]]
    assert isinstance(net.fc[1], nn.Linear)


def test_batch_norms_are_regularised_by_their_norm_in_evaluation():
    """`μ Σ max(σ, 1)`, σ the norm that a batch norm has as an affine map."""
    torch.manual_seed(0)
    net, expected = build("resnet18", width=4).eval(), 0.0
    for layer in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        layer.weight.data.normal_(0, 2)
        layer.running_var.uniform_(0.1, 3)
        channels = torch.eye(layer.num_features)[:, :, None, None]
        columns = (layer(channels) - layer(torch.zeros_like(channels)))[..., 0, 0]
        expected += 0.1 * max(float(torch.linalg.matrix_norm(columns.detach(), 2)), 1.0)
    penalty = stability.batch_norm_penalty(context_of(net), 0.1)
    assert float(penalty(None, None).detach()) == pytest.approx(expected)


def test_rivals_are_the_printed_formulas():
    torch.manual_seed(0)
    K = torch.randn(3, 2, 3, 3, dtype=torch.float64)
    unfoldings = [K.permute(order).flatten(2).flatten(0, 1) for order in ((0, 2, 1, 3), (0, 3, 1, 2))]
    unfoldings += [K.flatten(1), K.transpose(0, 1).flatten(1)]
    norms = [float(torch.linalg.matrix_norm(matrix, 2)) for matrix in unfoldings]
    assert float(reg_accuracy.singla(K)) == pytest.approx(3 * min(norms))
    grid = 2 * math.pi * torch.arange(10, dtype=torch.float64) / 10
    waves = torch.exp(-1j * grid[:, None] * torch.arange(3))
    symbol = torch.einsum("oikl,ak,bl->aboi", K.to(waves.dtype), waves, waves)
    largest = float(symbol.abs().square().sum((2, 3)).max().sqrt())
    assert float(reg_accuracy.araujo(K)) == pytest.approx(largest)


def test_ryu_takes_ten_power_iterations_a_batch():
    """At fixed weights ten calls of one iteration are one call of ten."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 3, padding=1))
    once = SpectralPenalty(net, "squares", only=nn.Conv2d, example_input=torch.zeros(1, 3, 8, 8))
    for _ in range(9):
        once()
    torch.testing.assert_close(reg_accuracy.ryu(context_of(net), penalty="squares")(None, None), once())


def test_places_and_verdicts_are_listed(equipoise):
    assert {e.id for e in every(["Table 5.1"])} == {"sll-aol-sr"}
    assert {e.id for e in every(["figure 4.7"])} == {"training-stability"}
    assert {e.id for e in every(["Table c.1"])} == {"imagenet-tables", "lvm-rs"}
    (row,) = [row for row in equipoise("reproduce", "--list", "--json").json if row["place"] == "Table 4.1"]
    assert row["verdicts"]


def test_no_refutation_of_networks_at_chance_and_own_claims_apart():
    for outcome in stored(every(), COMMITTED):
        if outcome.result is None:
            continue
        for verdict in outcome.result.verdicts:
            own = verdict.label in (Label.HOLDS, Label.PARTLY, Label.FAILS)
            assert not own or verdict.own, outcome.experiment.id
        baselines = [r["accuracy"] for r in outcome.result.rows if r.get("variant") == "baseline"]
        if baselines and any(v.label is Label.REFUTED for v in outcome.result.verdicts):
            assert min(baselines) > 0.5, outcome.experiment.id


def test_the_empirical_constant_is_a_mean_of_maxima_and_rivals_are_on_trained_networks():
    local, ratio = (stored([find(name)], COMMITTED)[0].result for name in ("local-vs-pub", "pub-ratio"))
    assert all(row["local"] < row["largest"] for row in local.rows)
    assert ratio.verdict.measured.count("(trained)") == ratio.verdict.measured.count("(random weights)") == 2


def test_trainings_of_a_sibling_are_taken_from_its_result(tmp_path):
    settings = replace(find("ad-baek").laptop, seeds=1)
    rows = [{"variant": name, "seed": 0, "accuracy": 0.5} for name in settings.variants]
    (tmp_path / "ad-mlp").mkdir()
    document = {"settings": asdict(settings), "seed": 0, "rows": rows}
    (tmp_path / "ad-mlp" / "result.json").write_text(json.dumps(document))
    context = Context(cells=Cells(tmp_path / "ad-baek" / "cells.jsonl"))
    assert list(run(settings, context, sibling="ad-mlp")) == rows
