"""Networks in the package and folders that training writes: their certificates are those of the weights, attacked and edited."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise.attacks import pgd
from equipoise.core import InputError, files
from equipoise.data import load_dataset
from equipoise.models import CERTIFICATE, bundled, load
from equipoise.smoothing import margin_radius
from equipoise.train import run_recipe

pytestmark = pytest.mark.medium

FOLDER = Path(eq.models.__file__).parent
SLL = {"depth": 1, "channels": 4, "dense_depth": 1, "hidden": 8}


@pytest.mark.parametrize("name", bundled())
def test_a_bundled_network_is_what_its_certificate_says(name):
    found = load(name)
    upper, pairs = found.prove()
    assert upper <= found.certificate["upper"] * (1 + 1e-6)
    assert bool((pairs <= torch.tensor(found.certificate["pairs"]) * (1 + 1e-6)).all())
    assert name in found.card
    assert sum(f.stat().st_size for f in (FOLDER / name).iterdir()) < 7_000_000
    assert (FOLDER.parent / "train" / "recipes" / f"{found.certificate['made']['recipe']}.yaml").is_file()


def figures_hold(name, test, count, tolerance, attacks):
    """Accuracy and certified shares of the first inputs are those of the certificate, and no attack breaks a radius."""
    found, (x, y) = load(name), test.batch(range(count))
    _, pairs = found.prove()
    with torch.no_grad():
        z = found.model(x)
    radius = margin_radius(z, y, pairs)
    figures = found.certificate["figures"]
    assert float((z.argmax(1) == y).double().mean()) == pytest.approx(figures["accuracy"], abs=tolerance)
    for epsilon, share in figures["certified_accuracy"].items():
        assert float((radius >= float(epsilon)).double().mean()) == pytest.approx(share, abs=tolerance)
    sure = (radius > 0).nonzero().flatten()[:attacks]
    assert not bool(pgd(found.model, x[sure], y[sure], radius[sure].float() * 0.999, steps=20).success.any())
    return figures


def test_training_writes_a_folder_that_loads_and_a_finished_run_keeps_its_certificate(small, tmp_path):
    recipe = small("epochs=1", model={"factory": "equipoise.nn.models:sll", "arguments": SLL})
    for _ in range(2):
        run_recipe(recipe, tmp_path / "run")
        found = load(tmp_path / "run")
        assert len(found.certificate["pairs"]) == 10
        assert found.prove()[0] <= found.certificate["upper"] * (1 + 1e-6)
        assert found.certificate["figures"]["samples"] == 60


def edited(tmp_path, **changes):
    folder = tmp_path / "copy"
    shutil.copytree(FOLDER / "digits", folder)
    document = json.loads((folder / CERTIFICATE).read_text())
    document.pop("digest", None)
    (folder / CERTIFICATE).write_text(json.dumps(files.sealed({**document, **changes})))
    return folder


def test_a_certificate_of_another_network_is_refused(tmp_path):
    with pytest.raises(InputError, match="another network"):
        load(edited(tmp_path, network="sha256:0"))
    config = tmp_path / "copy" / "config.json"
    shutil.copy(FOLDER / "digits" / CERTIFICATE, tmp_path / "copy" / CERTIFICATE)
    load(tmp_path / "copy")
    document = json.loads(config.read_text())
    for changes in ({"arguments": {**document["arguments"], "mean": [0.4]}}, {}):  # sealed again, and without a digest
        document = {key: value for key, value in document.items() if key != "digest"} | changes
        config.write_text(json.dumps(files.sealed(document) if changes else document))
        with pytest.raises(InputError, match="another network"):
            load(tmp_path / "copy")
    with pytest.raises(InputError, match="did you mean 'digits'"):
        load("digit")


def test_the_networks_reach_their_figures_and_no_attack_breaks_their_radii(data_dir):
    test = load_dataset("digits", "test")
    assert figures_hold("digits", test, len(test), 0.01, 64)["samples"] == len(test)
    figures_hold("cifar10", load_dataset(str(data_dir / "cifar10.npz"), "test"), 200, 0.13, 16)
