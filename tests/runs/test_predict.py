"""`equipoise predict`: answers of the smoothed classifier, abstention at risk alpha, the noise of a run."""

import json

import numpy as np
import pytest
import runs_nets
import torch
from torch import nn
from typer.testing import CliRunner

from equipoise.cli.app import Command, build
from equipoise.runs import certify, describe, open_run
from equipoise.runs.predictions import predict

APP = (Command("predict", "equipoise.cli.predict", "predict"), Command("norm", "equipoise.cli.norm", "norm"))


class Coin(nn.Module):
    """Class 1 where the noise of one pixel exceeds a threshold: a vote of known probability."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold
        self.eval()

    def forward(self, x):
        return torch.stack([torch.zeros(len(x)), x[:, 0] - self.threshold], dim=1)


def test_a_wrong_majority_is_answered_at_most_at_the_risk():
    """P(class 1) = 0.45, alpha = 0.1, 40 draws, 1000 inputs: wrong answers stay below alpha, and abstention is the rule."""
    threshold = 0.12566  # Φ⁻¹(0.55)
    job = describe(Coin(threshold), torch.zeros(1000, 1), sigma=1.0, chunk_size=40, noise="float", seed=0)
    answers = np.array([a.answer for a in predict(job, n=40, alpha=0.1)])
    assert (answers == 1).mean() <= 0.1
    assert (answers == -1).mean() > 0.5
    assert (answers == 0).mean() > (answers == 1).mean()


@pytest.fixture
def equipoise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = runs_nets.data(6)
    np.savez("d.npz", x_test=x[:, 0].numpy(), y_test=y.numpy())
    np.savez("alone.npz", x=x[:, 0].numpy())
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\n")

    def call(*arguments):
        return CliRunner().invoke(build(APP), ["predict", *(str(a) for a in arguments)], prog_name="equipoise")

    return call


def test_answers_are_those_of_the_certified_classifier(equipoise, tmp_path):
    x, y = runs_nets.data(6)
    run = certify(runs_nets.net(), (x, y), run_dir="a", sigma=0.1, n=500)
    ran = equipoise("runs_nets:net", "--data", "alone.npz", "--run", "a", "--json")
    assert ran.exit_code == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert document["sigma"] == 0.1
    certified = open_run("a").certificates()
    for row, k, r in zip(document["answers"], certified.prediction, certified.radius, strict=True):
        assert r <= 0 or row["answer"] in (None, int(k))
    assert any(row["answer"] is not None for row in document["answers"])
    assert run.finished


def test_names_and_labels_are_shown(equipoise):
    ran = equipoise("runs_nets:net", "--data", "d.npz", "--sigma", 0.01, "--classes", "names.txt", "--n", 100)
    assert ran.exit_code == 0, ran.stderr
    assert "6 inputs, 6 right, 0 without an answer" in ran.stdout
    assert "│ 0     │" in ran.stdout


WRONG = {
    "no noise": ((), "say --sigma, or --run"),
    "another noise": (("--run", "a", "--sigma", 0.2), "certified with N(0, 0.1"),
    "another model": (("--run", "a", "--mean", 0.5), "certifies another model"),
    "no run": (("--run", "nowhere"), "not a run directory"),
    "no draws": (("--sigma", 0.1, "--n", 0), "must be positive"),
    "a risk of 2": (("--sigma", 0.1, "--alpha", 2), "between 0 and 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_sentence(equipoise, case):
    options, words = WRONG[case]
    certify(runs_nets.net(), runs_nets.data(2), run_dir="a", sigma=0.1, n=100)
    ran = equipoise("runs_nets:net", "--data", "d.npz", *options)
    assert ran.exit_code == 2
    assert words in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_an_input_that_fails_is_named(equipoise):
    ran = equipoise("runs_nets:sometimes", "--data", "d.npz", "--sigma", 0.3, "--n", 100)
    assert ran.exit_code == 1
    assert "failed:" in ran.stdout
