"""Recipes at paper scale: a dry run of each on tiny data with a small network, and what `--plan` says."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from equipoise.cli.app import Command, build
from equipoise.core.errors import InputError
from equipoise.train import bundled, read_recipe, run_recipe
from equipoise.train.plan import plan_recipe

#: arguments that make a network of the recipe small
SHRUNK = {
    "sll_small": ["depth=1", "channels=4", "dense_depth=1", "hidden=8"],
    "sll_medium": ["depth=1", "channels=4", "dense_depth=1", "hidden=8"],
    "liresnet": ["depth=1", "channels=8", "dense_depth=1", "hidden=16"],
    "lipschitz_cnn": ["channels=[4,8]", "depths=[1,1]", "hidden=16"],
}
PAPER = [name for name in bundled() if read_recipe(name).published]


@pytest.fixture
def images(tmp_path, monkeypatch):
    """Files of the names that the recipes ask for, with a few random images."""
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path))
    random = np.random.default_rng(0)
    for name, classes in (("cifar10-full", 10), ("cifar10-generated", 10), ("cifar100", 100)):
        x, y = random.integers(0, 256, (2 * classes, 32, 32, 3), np.uint8), np.arange(2 * classes) % classes
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])


def shrunk(name):
    recipe = read_recipe(name)
    arguments = SHRUNK[recipe.model.factory.rpartition(":")[2]]
    return read_recipe(name, [f"model.arguments.{a}" for a in arguments])


@pytest.mark.parametrize("name", PAPER)
def test_a_dry_run_of_every_recipe_at_paper_scale(name, images):
    small = shrunk(name).model_copy(update={"epochs": 1, "batch_size": 10})
    final = run_recipe(small).final
    assert final["bound"] is not None
    assert 0 <= final["certified_accuracy"]["0.1411764705882353"] <= final["accuracy"]


@pytest.mark.parametrize("name", ["sll-sr-small-cifar100", "liresnet-cifar10"])
def test_a_plan_needs_no_data(name, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path))
    recipe = shrunk(name)
    found = plan_recipe(recipe)
    assert found.steps == recipe.epochs * (recipe.data.examples // recipe.batch_size)
    assert found.hours == pytest.approx(found.steps * found.step_seconds / 3600)
    assert "not at hand" in found.where
    assert "clean / certified" in found.published
    without = recipe.model_copy(update={"data": recipe.data.model_copy(update={"examples": None})})
    with pytest.raises(InputError):
        plan_recipe(without)


def test_the_command_says_what_it_costs():
    app = build((Command("train", "equipoise.cli.train", "train"), Command("audit", "equipoise.cli.audit", "audit")))
    found = CliRunner().invoke(app, ["train", "sll-sr-digits", "--plan", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["steps"] == 660
