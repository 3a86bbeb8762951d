"""Certificates seen from the other side: no attack succeeds inside a certified radius of a trained network."""

import pytest
import torch
from torch import nn

from equipoise.attacks import pgd, smooth_pgd
from equipoise.data import load_dataset
from equipoise.models import load
from equipoise.smoothing import PROCEDURES, SimplexMap, SmoothedClassifier, margin_radius

pytestmark = pytest.mark.medium


def _train(model, sigma, epochs):
    torch.manual_seed(0)
    digits, test = (load_dataset("digits", split) for split in ("train", "test"))
    train_x, train_y = digits.batch(range(1400))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(1400).split(100):
            noisy = train_x[rows] + sigma * torch.randn_like(train_x[rows])
            loss = nn.functional.cross_entropy(8 * model(noisy), train_y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval().requires_grad_(False), *test.batch(range(100))


@pytest.fixture(scope="module")
def lipschitz_net():
    """The packaged network and the test digits."""
    test = load_dataset("digits", "test")
    return load("digits").model.requires_grad_(False), *test.batch(range(200))


@pytest.fixture(scope="module")
def plain_net():
    torch.manual_seed(2)
    return _train(nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), 0.3, 12)


def test_margins_hold_against_pgd(lipschitz_net):
    model, x, y = lipschitz_net
    z = model(x)
    assert (z.argmax(1) == y).float().mean() > 0.8
    upper, pairs = load("digits").prove()
    for epsilon in (margin_radius(z, y, upper), margin_radius(z, y, pairs)):
        rows = epsilon > 0
        assert epsilon[rows].mean() > 0.05
        result = pgd(model, x[rows], y[rows], epsilon[rows], steps=30, restarts=2)
        assert not result.success.any()
    beyond = pgd(model, x[rows], y[rows], 6 * epsilon[rows] + 0.5, steps=30)
    assert beyond.success.float().mean() > 0.5, "the attack is not harmless"


@pytest.mark.parametrize("procedure", PROCEDURES)
def test_smoothed_certificates_hold_against_smooth_pgd(plain_net, procedure):
    model, x, y = plain_net
    smooth = SmoothedClassifier(model, 0.3, 10)
    if PROCEDURES[procedure].soft:
        smooth.map = SimplexMap("softmax", 0.5)
    result = smooth.certify(x[:24], n=2000, procedure=procedure)
    assert (result.prediction == y[:24].numpy()).mean() > 0.7
    rows = torch.tensor(~result.abstain)
    epsilon = torch.tensor(result.radius)[rows]
    guess = torch.tensor(result.prediction)[rows]
    attacked = smooth_pgd(smooth, x[:24][rows], guess, epsilon, steps=8, draws=16, check_draws=2000, alpha=1e-6)
    assert not attacked.success.any()


def test_lipschitz_aware_certificates_hold(lipschitz_net):
    """The largest radii of all: softmax scores of a 1-Lipschitz network, smoothed."""
    model, x, _ = lipschitz_net
    smooth = SmoothedClassifier(model, 0.2, 10, map=SimplexMap("softmax", 0.05))
    aware = smooth.certify(x[:24], n=2000, lipschitz=load("digits").certificate["upper"])
    plain = smooth.certify(x[:24], n=2000)
    assert aware.radius.mean() >= plain.radius.mean()
    rows = torch.tensor(~aware.abstain)
    guess = torch.tensor(aware.prediction)[rows]
    attacked = smooth_pgd(smooth, x[:24][rows], guess, torch.tensor(aware.radius)[rows], steps=8, alpha=1e-6)
    assert not attacked.success.any()
