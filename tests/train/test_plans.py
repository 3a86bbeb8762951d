"""Recipes at paper scale: a dry run of each on tiny data with a small network, and what `--plan` says."""

import numpy as np
import pytest

from equipoise.train import bundled, read_recipe, run_recipe

pytestmark = pytest.mark.medium

_SLL = ["depth=1", "channels=4", "dense_depth=1", "hidden=8"]
_RESIDUAL = ["depth=1", "channels=8", "dense_depth=1", "hidden=16"]
#: arguments that make a network of the recipe small
SHRUNK = {
    **{f"sll_{size}": _SLL for size in ("small", "medium", "large", "xlarge")},
    "liresnet": _RESIDUAL,
    "bronet": _RESIDUAL,
    "lipschitz_cnn": ["channels=[4,8]", "depths=[1,1]", "hidden=16"],
}
PAPER = [name for name in bundled() if name.endswith(("cifar10", "cifar100", "tinyimagenet", "-generated"))]
#: file of the recipes → (classes, side)
FILES = {"cifar10-full": (10, 32), "cifar10-generated": (10, 32), "cifar100": (100, 32), "tinyimagenet": (200, 64)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of the names that the recipes ask for, with a few random images."""
    found = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for name, (classes, side) in FILES.items():
        x, y = random.integers(0, 256, (classes, side, side, 3), np.uint8), np.arange(classes)
        np.savez(found / f"{name}.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    return found


def test_every_family_has_a_recipe_for_every_data_set():
    families = [f"sll-sr-{size}" for size in ("small", "medium", "large", "xlarge")]
    families += ["cpl", "liresnet", "bronet", "soc", "bcop"]
    assert {f"{f}-{d}" for f in families for d in ("cifar10", "cifar100", "tinyimagenet")} <= set(PAPER)


@pytest.mark.parametrize("name", PAPER)
def test_a_dry_run_of_every_recipe_at_paper_scale(name, folder, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_DATA", str(folder))
    arguments = SHRUNK[read_recipe(name).model.factory.rpartition(":")[2]]
    small = read_recipe(name, ["epochs=1", *(f"model.arguments.{a}" for a in arguments)])
    size = {10: 10, 100: 50}.get(small.model.arguments.get("num_classes", 10), 100)
    final = run_recipe(small.model_copy(update={"batch_size": size})).final
    assert final["bound"] is not None
    assert 0 <= final["certified_accuracy"]["0.1411764705882353"] <= final["accuracy"]


def test_the_command_says_what_it_costs(equipoise):
    assert equipoise("train", "sll-sr-digits", "--plan", "--json").json["steps"] == 660
