"""From an existing network to a certified one: before and after on the same data, resumed, refused where it cannot be."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from equipoise.checkpoints import load_model, load_weights, save_checkpoint
from equipoise.cli.app import Command, build
from equipoise.conversion import make_lipschitz
from equipoise.core.errors import InputError
from equipoise.data import load_dataset
from equipoise.models import load
from equipoise.train import run_recipe
from equipoise.train.robustify import plan_robustify, robustify

QUICK = [
    "epochs=8",
    "optimizer.lr=0.02",
    "batch_size=32",
    "data.limit=320",
    "data.test_limit=100",
    "metrics.epsilons=[0.1]",
]


@pytest.fixture(scope="module")
def plain(make_small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "mlp"
    recipe = make_small("epochs=8", "optimizer.lr=0.3", "data.limit=320")
    run_recipe(recipe, folder)
    return folder


def test_before_and_after(plain, tmp_path):
    found = robustify(plain, tmp_path / "run", data="digits", changes=QUICK, cpu=True)
    assert found.before["bound"] > found.after["bound"]
    assert found.after["bound"] <= 1.001
    assert found.after["certified_accuracy"]["0.1"] > found.before["certified_accuracy"]["0.1"]
    assert found.after["certified_accuracy"]["0.1"] > 0.2
    test = load_dataset("digits", "test")
    x, _ = test.batch(range(4))
    again = load(tmp_path / "run")
    assert torch.equal(again.model(x), found.result.model(x))
    assert again.prove()[0] <= 1.001
    stored = json.loads((tmp_path / "run" / "before-after.json").read_text())
    assert stored["before"]["accuracy"] == found.before["accuracy"]


def test_it_starts_from_the_weights_that_are_there_and_goes_on(plain, tmp_path):
    first = robustify(plain, tmp_path / "run", data="digits", changes=QUICK, cpu=True)
    again = robustify(plain, tmp_path / "run", data="digits", changes=QUICK, cpu=True)
    assert again.after == first.after
    raw, old = dict(again.result.model.named_parameters()), dict(load(plain).model.named_parameters())
    moved = (raw["module.1.parametrizations.weight.original"] - old["1.weight"]).norm() / old["1.weight"].norm()
    assert 0 < float(moved.detach()) < 0.9


def test_the_command(plain, tmp_path):
    app = build((Command("train", "equipoise.cli.train", "train"), Command("audit", "equipoise.cli.audit", "audit")))
    sets = [part for change in [*QUICK, "epochs=1"] for part in ("--set", change)]
    where = ["--from", str(plain), "--data", "digits", "--run-dir", str(tmp_path / "r"), "--method", "aol"]
    done = CliRunner().invoke(app, ["train", *where, "--json", *sets])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["after"]["bound"] <= 1.001


def test_what_cannot_be_done_is_said(plain, tmp_path):
    with pytest.raises(InputError, match=r"data\.path"):
        robustify(plain, tmp_path / "a")
    from equipoise.checkpoints import register_model

    register_model("flat", lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    save_checkpoint(tmp_path / "own", nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "flat", {}, (1, 8, 8))
    with pytest.raises(InputError, match="make_lipschitz"):
        robustify(tmp_path / "own", tmp_path / "c", data="digits")


@pytest.mark.parametrize("name", ["net.pt2", "net.onnx", "net.pt"])
def test_a_network_that_cannot_be_built_again_is_refused_in_one_sentence(name, tmp_path):
    for _ in range(2):
        with pytest.raises(InputError, match=r"expected a checkpoint folder"):
            robustify(tmp_path / name, tmp_path / "run", data="digits")
        (tmp_path / name).write_bytes(b"anything")
    assert not (tmp_path / "run").exists()


def test_a_factory_and_its_weights(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    (tmp_path / "factorynets.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import factorynets

    net = factorynets.net()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    found = robustify(
        "factorynets:net", tmp_path / "run", weights=tmp_path / "net.safetensors", data="digits",
        changes=[*QUICK, "epochs=1"], cpu=True,
    )  # fmt: skip
    assert found.after["bound"] <= 1.001
    test = load_dataset("digits", "test")
    assert found.before["bound"] > 0
    again = make_lipschitz(factorynets.net(), method="sr", example_input=torch.zeros(1, 1, 8, 8), side="smaller")
    load_weights(again, tmp_path / "run" / "model.safetensors")
    x, _ = test.batch(range(4))
    assert torch.allclose(again.eval()(x), found.result.model(x))
    program = load_model(tmp_path / "run").model.module()  # model.pt2, with plain layers
    assert torch.allclose(program(x[:1]), found.result.model(x[:1]), atol=1e-5)


def test_a_hugging_face_folder_and_what_it_would_cost(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        num_channels=1, embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", num_labels=10
    )
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path / "hub")
    changes = ["epochs=1", "batch_size=32", "data.limit=64", "data.test_limit=32"]
    assert plan_robustify(tmp_path / "hub", data="digits", changes=changes)["steps"] == 2
    found = robustify(tmp_path / "hub", tmp_path / "run", data="digits", changes=changes, cpu=True)
    assert found.after["bound"] <= 1.05 < found.before["bound"]
