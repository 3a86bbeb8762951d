"""From an existing network to a certified one: before and after on the same data, resumed, refused where it cannot be."""

import json

import pytest
import torch
from safetensors.torch import save_file

from equipoise.checkpoints import load_model, load_weights
from equipoise.conversion import make_lipschitz
from equipoise.core import InputError
from equipoise.data import load_dataset
from equipoise.models import load
from equipoise.train import plan_robustify, robustify, run_recipe

pytestmark = pytest.mark.medium

QUICK = ["epochs=8", "optimizer.lr=0.02", "batch_size=32", "metrics.epsilons=[0.1]"]
QUICK += ["data.limit=320", "data.test_limit=100"]


@pytest.fixture(scope="module")
def plain(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "mlp"
    run_recipe(small("epochs=8", "optimizer.lr=0.3", "data.limit=320"), folder)
    return folder


def test_before_and_after(plain, tmp_path):
    first, again = (robustify(plain, tmp_path / "run", data="digits", changes=QUICK, cpu=True) for _ in range(2))
    assert again.after == first.after
    assert first.before["bound"] > first.after["bound"]
    assert first.after["bound"] <= 1.001
    assert first.after["certified_accuracy"]["0.1"] > max(0.2, first.before["certified_accuracy"]["0.1"])
    x, _ = load_dataset("digits", "test").batch(range(4))
    stored = load(tmp_path / "run")
    assert torch.equal(stored.model(x), first.result.model(x))
    assert stored.prove()[0] <= 1.001
    table = json.loads((tmp_path / "run" / "before-after.json").read_text())
    assert table["before"]["accuracy"] == first.before["accuracy"]
    # it starts from the weights that are there
    raw, old = dict(again.result.model.named_parameters()), dict(load(plain).model.named_parameters())
    moved = (raw["module.1.parametrizations.weight.original"] - old["1.weight"]).norm() / old["1.weight"].norm()
    assert 0 < float(moved.detach()) < 0.9


def test_what_cannot_be_done_is_said(plain, tmp_path):
    (tmp_path / "net.pt2").write_bytes(b"anything")
    for source, data, words in (
        (plain, None, r"data\.path"),
        (tmp_path / "net.pt2", "digits", "expected a checkpoint folder"),
        (tmp_path / "missing.onnx", "digits", "expected a checkpoint folder"),
    ):
        with pytest.raises(InputError, match=words):
            robustify(source, tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


FACTORY = """
from torch import nn
def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
"""


def test_a_factory_and_its_weights(tmp_path, install):
    install("factorynets", FACTORY, "none", {})
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
