"""The loop against obviously right loops, every row of every table for one epoch, and the figures."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.checkpoints import load_checkpoint
from equipoise.core import InputError
from equipoise.data import load_dataset
from equipoise.nn import losses
from equipoise.nn import models as builders
from equipoise.norms import spectral_norm
from equipoise.train import AUGMENTATIONS, LOSSES, OBJECTIVES, REGULARIZERS, build_data, read_recipe, run_recipe
from equipoise.train.metrics import Certified, evaluate

pytestmark = pytest.mark.medium

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


def test_batch_norm_statistics_move_once_per_step_under_sam(small):
    parts = {"model": {"factory": "equipoise_lab.models:resnet18", "arguments": {"width": 2}}}
    parts["optimizer"] = {"kind": "sam", "lr": 0.01}
    recipe = small("epochs=1", "metrics.bound=false", "data.limit=64", **parts)
    assert int(run_recipe(recipe).model.bn1.num_batches_tracked) == 2


@pytest.mark.parametrize("parts", ROWS, ids=str)
def test_every_row_trains(small, parts):
    result = run_recipe(small("epochs=1", "data.limit=64", **parts))
    assert result.final["step"] == 2
    assert math.isfinite(result.final["train_loss"])
    assert 0 <= result.final["accuracy"] <= 1
    assert not result.model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in result.model.modules())


def test_it_is_the_plain_loop(small):
    """SGD with momentum, cosine schedule, Frobenius penalty, all data in one batch: the weights of an obvious loop."""
    recipe = small(
        "model.arguments.dropout=0", "metrics.bound=false", "batch_size=1437", schedule={"kind": "cosine"},
        data={"path": "digits"}, regularizers=[{"kind": "frobenius", "weight": 0.01}],
    )  # fmt: skip
    result = run_recipe(recipe)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    x, y = load_dataset("digits", "train").batch(range(1437))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        loss = nn.functional.cross_entropy(model(x), y)
        loss = loss + 0.01 * (model[1].weight.square().sum() + model[3].weight.square().sum())
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * step / 3)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for ours, theirs in zip(result.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


#: a schedule, and the learning rates of four steps from 0.1
SCHEDULES = [
    ({"kind": "constant", "warmup": 0.5}, [0.05, 0.1, 0.1, 0.1]),
    ({"kind": "linear", "final": 0.2}, [0.1, 0.08, 0.06, 0.04]),
    ({"kind": "one-cycle"}, [0.1, 0.1, 0.075, 0.025]),
    ({"kind": "piecewise", "points": [(0, 0.1), (0.5, 1), (1, 0)]}, [0.01, 0.055, 0.1, 0.05]),
]


@pytest.mark.parametrize(("schedule", "rates"), SCHEDULES, ids=str)
def test_schedules(small, schedule, rates):
    """A batch larger than the data is the data: one step per epoch."""
    result = run_recipe(small("epochs=4", "batch_size=1000", "metrics.bound=false", schedule=schedule))
    assert [row["lr"] for row in result.history] == pytest.approx(rates)


def test_projections_and_penalties_act_on_the_network_that_is_kept(small):
    wild = run_recipe(small("optimizer.lr=0.5"))
    held = run_recipe(small("optimizer.lr=0.5", projections=[{"kind": "norm", "radius": 0.7}]))
    tame = run_recipe(small("optimizer.lr=0.5", regularizers=[{"kind": "spectral", "penalty": "hinge", "weight": 1}]))
    assert max(spectral_norm(m).upper for m in held.model if isinstance(m, nn.Linear)) <= 0.7 * (1 + 1e-3)
    assert tame.final["bound"] < wild.final["bound"]


def test_the_average_is_what_is_measured_and_kept(small, tmp_path):
    result = run_recipe(small(ema=0.9), tmp_path / "run")
    saved, shape = load_checkpoint(tmp_path / "run")
    assert shape == (1, 8, 8)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), result.model.parameters(), strict=True))
    assert not torch.equal(next(run_recipe(small()).model.parameters()), next(saved.parameters()))


@pytest.mark.parametrize("broken", [None, math.nan, math.inf])
def test_certified_accuracy_is_rounded_down_and_counts_every_input(broken):
    """√2 for class 0 is certified up to 1, not at 1; an input whose logits are no numbers is not certified."""

    def network(x):
        z = torch.zeros(len(x), 10, dtype=torch.float64)
        z[:, 0] = math.sqrt(2)
        if broken is not None:
            z[0, 3] = broken
        return z

    recipe = read_recipe("sll-sr-digits", ["metrics.batch_size=50", "metrics.epsilons=[0.0, 0.999999, 1.0]"])
    test = build_data(recipe.data).test
    figures = evaluate(network, test, LOSSES["ce"](), torch.device("cpu"), recipe.metrics, Certified(1.0))
    zero = test.batch(torch.arange(len(test)))[1] == 0
    kept = float((zero & (torch.arange(len(test)) % 50 != 0) if broken else zero).double().mean())
    assert figures["certified_accuracy"] == {"0.0": kept, "0.999999": kept, "1.0": 0.0}
    assert figures["accuracy"] >= kept


def test_data_of_any_shape_train_a_network_in_memory(tmp_path):
    """A time series (channels, length), and a network that no factory makes and no bundle holds."""
    x, y = np.random.default_rng(0).normal(size=(64, 3, 16)).astype(np.float32), np.arange(64) % 2
    np.savez(tmp_path / "series.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    net = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    data = {"path": str(tmp_path / "series.npz")}
    recipe = {"model": {"factory": "own:net"}, "data": data, "epochs": 2, "batch_size": 16}
    result = run_recipe(recipe, tmp_path / "run", model=net)
    assert result.model is net
    assert result.final["bound"] > 0
    assert (tmp_path / "run" / "model.safetensors").exists()


class Squared(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)).square()


def test_what_cannot_be_bounded_has_no_certificate(small):
    result = run_recipe(small("epochs=1", "data.limit=64"), model=Squared(64, 10))
    assert result.final["bound"] is None
    assert result.final["bound_reason"]
    assert "certified_accuracy" not in result.final
    assert "accuracy" not in run_recipe(small("epochs=1", "data.test=null", "data.limit=64")).final


def test_a_margin_loss_takes_the_constants_of_the_network_by_pairs():
    torch.manual_seed(0)
    model = builders.build("liresnet", in_channels=1, input_size=8, channels=8, depth=1, dense_depth=1, hidden=16)
    x, y = torch.rand(5, 1, 8, 8), torch.arange(5)
    task = LOSSES["emma"](epsilon=0.4, start=0.1, ramp=0.5, temperature=0.5).fit(model, None)
    assert (task.lipschitz, task.at(0.25).epsilon) == (1.0, pytest.approx(0.25))
    z = model(x)
    assert torch.equal(task.at(0.25).loss(z, y), losses.emma(z, y, 0.25, 1.0, model[-1].weight.detach(), 0.5))
    with pytest.raises(InputError, match="does not follow from its construction"):
        LOSSES["emma"]().fit(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), None)
