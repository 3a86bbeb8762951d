"""The loop against obviously right loops, every row of every table for one epoch, and the figures."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.core.errors import InputError
from equipoise.data import load_dataset
from equipoise.nn import losses
from equipoise.nn.models import build
from equipoise.norms import spectral_norm
from equipoise.train import read_recipe, run_recipe
from equipoise.train.build import Part, build_data
from equipoise.train.config import Metrics
from equipoise.train.losses import LOSSES, OBJECTIVES
from equipoise.train.metrics import Certified, certified_bound, evaluate
from equipoise.train.terms import AUGMENTATIONS, REGULARIZERS

CPU = torch.device("cpu")
#: arguments of rows that have no default
NEEDED = {"clip": {"limit": 0.1}, "gaussian": {"sigma": 0.1}, "consistency": {"sigma": 0.1},
          "soft-vote": {"sigma": 0.1},
          **{k: {"lipschitz": 1.0} for k in ("lmt", "gloro", "emma", "la")}}  # fmt: skip


def row(kind):
    return {"kind": kind, **NEEDED.get(kind, {})}


ROWS = [
    *({"loss": row(k)} for k in LOSSES),
    *({"regularizers": [row(k)]} for k in REGULARIZERS),
    *({"projections": [row(k)]} for k in ("norm", "clip")),
    *({"noise": row(k)} for k in OBJECTIVES),
    *({"data": {"path": "digits", "limit": 64, "augment": [row(k)]}} for k in AUGMENTATIONS),
    *({"optimizer": {"kind": k, "lr": 0.01}} for k in ("sgd", "adam", "adamw", "nadam", "muon", "sam", "asam")),
    {"optimizer": {"kind": "nadam", "lr": 0.01, "lookahead": 2}},
    {"loss": {"kind": "emma", "lipschitz": 1.0, "epsilon": 0.3, "start": 0.1, "temperature": 0.25}},
    {"optimizer": {"kind": "sgd", "decay": "matrices", "weight_decay": 0.1, "clip": 0.5}},
    {"noise": {"kind": "soft-vote", "sigma": 0.1, "target": 0.2}},
    {"precision": "bf16"},
    {"ema": 0.5},
]


@pytest.mark.parametrize("parts", ROWS, ids=str)
def test_every_row_trains(small, parts):
    result = run_recipe(small("epochs=1", "data.limit=64", **parts))
    assert result.final["step"] == 2
    assert math.isfinite(result.final["train_loss"])
    assert 0 <= result.final["accuracy"] <= 1
    assert not result.model.training


def test_it_is_the_plain_loop(small):
    """SGD with momentum, cosine schedule, Frobenius penalty: the same weights as twenty obvious lines."""
    recipe = small(
        "model.arguments.dropout=0", "metrics.bound=false", schedule={"kind": "cosine"},
        regularizers=[{"kind": "frobenius", "weight": 0.01}],
    )  # fmt: skip
    result = run_recipe(recipe)
    parts = build_data(recipe.data)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step, steps = 0, 15
    for epoch in range(3):
        for rows in parts.train.order(0, epoch).split(32):
            x, y = parts.train.batch(rows)
            loss = nn.functional.cross_entropy(model(x), y)
            loss = loss + 0.01 * (model[1].weight.square().sum() + model[3].weight.square().sum())
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * step / steps)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    for ours, theirs in zip(result.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_the_orders_of_epochs_are_permutations_and_differ():
    part = Part(None, torch.arange(50))
    orders = [part.order(0, epoch) for epoch in range(3)]
    assert all(order.sort().values.equal(torch.arange(50)) for order in orders)
    assert not orders[0].equal(orders[1])
    assert not part.order(1, 0).equal(orders[0])


def test_projections_hold_for_the_network_that_is_kept(small):
    recipe = small("optimizer.lr=0.5", projections=[{"kind": "norm", "radius": 0.7}])
    result = run_recipe(recipe)
    for layer in result.model:
        if isinstance(layer, nn.Linear):
            assert spectral_norm(layer).upper <= 0.7 * (1 + 1e-3)


def test_the_spectral_hinge_pulls_norms_down(small):
    wild = run_recipe(small("optimizer.lr=0.5", "epochs=6"))
    tame = run_recipe(
        small("optimizer.lr=0.5", "epochs=6", regularizers=[{"kind": "spectral", "penalty": "hinge", "weight": 1}])
    )
    assert tame.final["bound"] < wild.final["bound"]


def test_the_average_is_what_is_measured_and_kept(small, tmp_path):
    from equipoise.checkpoints import load_checkpoint

    result = run_recipe(small(ema=0.9), tmp_path / "run")
    saved, shape = load_checkpoint(tmp_path / "run")
    assert shape == (1, 8, 8)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), result.model.parameters(), strict=True))
    plain = run_recipe(small())
    assert not torch.equal(next(plain.model.parameters()), next(saved.parameters()))
    assert certified_bound(saved, (1, 8, 8), 1e-3).upper == result.final["bound"]


def test_penalties_leave_no_hooks_behind(small):
    result = run_recipe(small(regularizers=["activation-decay", "layerwise-decay"]))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in result.model.modules())


def test_batch_norm_statistics_move_once_per_step_under_sam(small):
    model = {"factory": "equipoise_lab.models:resnet18", "arguments": {"width": 2}}
    recipe = small(
        "epochs=1", "metrics.bound=false", "data.limit=64", model=model, optimizer={"kind": "sam", "lr": 0.01}
    )
    result = run_recipe(recipe)
    assert int(result.model.bn1.num_batches_tracked) == 2


def test_what_cannot_be_bounded_has_no_certificate(small, monkeypatch, tmp_path):
    (tmp_path / "oddnets.py").write_text(
        "from torch import nn\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(64, 10)\n"
        "    def forward(self, x):\n"
        "        z = self.fc(x.flatten(1))\n"
        "        return z * z\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = run_recipe(small("epochs=1", model={"factory": "oddnets:Odd"}))
    assert result.final["bound"] is None
    assert result.final["bound_reason"]
    assert "certified_accuracy" not in result.final


def test_certified_accuracy_is_rounded_down_and_counts_ties_as_wrong():
    class Constant(nn.Module):
        def forward(self, x):
            return (
                torch.tensor([[math.sqrt(2), 0.0]], dtype=torch.float64).expand(len(x), 2)
                * (x.sum((1, 2, 3)) >= 0)[:, None]
            )

    parts = build_data(read_recipe("sll-sr-digits").data).test
    zero = type(parts)(
        parts.source, parts.indices[torch.tensor([int(y) == 0 for y in load_dataset("digits", "test").labels])]
    )
    measured = Metrics(batch_size=50, epsilons=[0.0, 0.999999, 1.0])
    found = evaluate(Constant(), zero, LOSSES["ce"](), CPU, measured, Certified(1.0))
    assert found["accuracy"] == 1
    assert found["certified_accuracy"] == {"0.0": 1.0, "0.999999": 1.0, "1.0": 0.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_input_whose_logits_are_no_numbers_counts_as_not_certified(bad):
    """It stays in the denominator with its whole batch: certified accuracy never exceeds accuracy."""

    class Broken(nn.Module):
        def forward(self, x):
            z = torch.zeros(len(x), 10, dtype=torch.float64)
            z[:, 0] = 10.0
            z[0, 3] = bad
            return z

    parts = build_data(read_recipe("sll-sr-digits").data).test
    measured = Metrics(batch_size=50, epsilons=[0.0, 1.0])
    found = evaluate(Broken(), parts, LOSSES["ce"](), CPU, measured, Certified(1.0))
    zero = torch.tensor([int(y) == 0 for y in parts.batch(torch.arange(len(parts)))[1]])
    kept = zero & (torch.arange(len(parts)) % 50 != 0)
    assert found["certified_accuracy"] == {"0.0": float(kept.double().mean()), "1.0": float(kept.double().mean())}
    assert found["accuracy"] >= found["certified_accuracy"]["0.0"]


def test_a_batch_larger_than_the_data_is_the_data(small):
    result = run_recipe(small("batch_size=1000", "epochs=1"))
    assert result.final["step"] == 1


def test_data_of_any_shape_train_a_network_in_memory(tmp_path):
    """A time series (channels, length) and a network that no factory makes."""
    x, y = np.random.default_rng(0).normal(size=(64, 3, 16)).astype(np.float32), np.arange(64) % 2
    np.savez(tmp_path / "series.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    net = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    recipe = {
        "model": {"factory": "own:net"},
        "data": {"path": str(tmp_path / "series.npz")},
        "epochs": 2,
        "batch_size": 16,
    }
    result = run_recipe(recipe, tmp_path / "run", model=net)
    assert result.model is net
    assert result.final["bound"] > 0
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_margin_loss_takes_the_constants_of_the_network_by_pairs():
    torch.manual_seed(0)
    model = build("liresnet", in_channels=1, input_size=8, channels=8, depth=1, dense_depth=1, hidden=16)
    x, y = torch.rand(5, 1, 8, 8), torch.arange(5)
    task = LOSSES["emma"](epsilon=0.4, start=0.1, ramp=0.5, temperature=0.5).fit(model, None)
    assert (task.lipschitz, task.at(0.25).epsilon) == (1.0, pytest.approx(0.25))
    z = model(x)
    expected = losses.emma(z, y, 0.25, 1.0, model[-1].weight.detach(), 0.5)
    assert torch.equal(task.at(0.25).loss(z, y), expected)
    with pytest.raises(InputError, match="does not follow from its construction"):
        LOSSES["emma"]().fit(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), None)
