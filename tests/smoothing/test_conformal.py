"""Robust conformal sets: the level of the theorem from above, coverage under the worst attack, refusals."""

import math

import mpmath
import numpy as np
import pytest
import torch
from smoothing_laws import HalfSpace
from torch import nn

import equipoise as eq
from equipoise import report

SIGMA, ALPHA = 0.5, 0.2
LINE = HalfSpace(-1.0, 0.0, 0.0, scale=4.0).eval()  # told apart by the first coordinate: its worst attack is known


@pytest.fixture(autouse=True)
def _same_seed_every_time():
    """Instead of the fixture of all tests: every call takes another seed, from the operating system."""


def examples(n, generator):
    y = torch.randint(2, (n,), generator=generator)
    x = torch.randn(n, 3, generator=generator)
    x[:, 0] = 0.5 * x[:, 0] + 2.0 * y - 1.0
    return x, y


@pytest.mark.medium
@pytest.mark.parametrize("noise", ["float", "grid"])
@pytest.mark.parametrize("radius", [0.0, 0.3, 0.6])
def test_coverage_under_the_worst_attack(radius, noise):
    """Every example is pushed against its label; 20 calibrations, 200 sets each: six standard errors are allowed."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(20):
        sets = eq.smoothing.RobustConformal(LINE, SIGMA, noise=noise).calibrate(*examples(60, generator))
        x, y = examples(200, generator)
        x[:, 0] -= 0.999 * radius * (2.0 * y - 1.0)
        shares.append(sets.predict(x, radius, ALPHA)[np.arange(200), y.numpy()].mean())
    assert np.mean(shares) >= 1 - ALPHA - 6 * np.std(shares) / math.sqrt(20)


@pytest.mark.parametrize("noise", ["float", "grid"])
def test_the_rank_is_never_below_that_of_the_theorem(noise):
    mpmath.mp.dps = 50
    seen = examples(2000, torch.Generator().manual_seed(2))
    sets = eq.smoothing.RobustConformal(LINE, SIGMA, noise=noise).calibrate(*seen)
    sets.scores = np.arange(1.0, 2001.0)  # so that a threshold is its own rank
    for alpha in (0.5, 0.1, 0.05, 0.01, 1e-3, 0.9):
        for radius in (0.0, 0.01, 0.25, 0.5, 1.5, 40.0):
            z = -mpmath.sqrt(2) * mpmath.erfinv(2 * mpmath.mpf(alpha) - 1) + mpmath.mpf(radius) / mpmath.mpf(SIGMA)
            exact = 2001 - 2001 * mpmath.ncdf(-z)
            rank = sets.threshold(radius, alpha)
            assert rank >= exact or (rank == math.inf and exact > 1999)
            assert rank <= exact + 1 + 12 * (noise == "grid") or exact > 1999
    assert sets.threshold(1.0, 1e-300) == math.inf


def test_ties_and_small_samples_give_larger_sets():
    constant = nn.Sequential(nn.Flatten(), nn.Linear(3, 4)).eval().requires_grad_(False)
    constant[1].weight.zero_()
    x, y = torch.randn(50, 3), torch.zeros(50, dtype=torch.int64)
    constant[1].bias.zero_()
    assert eq.smoothing.RobustConformal(constant, SIGMA).calibrate(x, y).predict(x, 0.1).all()  # all scores tie
    few = eq.smoothing.RobustConformal(LINE, SIGMA).calibrate(*examples(5, torch.Generator().manual_seed(3)))
    assert few.predict(x, 0.5).all()


def test_every_call_draws_anew():
    """An attack must not know the draw: nothing is repeated from call to call."""
    x, y = examples(400, torch.Generator().manual_seed(4))
    sets = eq.smoothing.RobustConformal(LINE, 2.0).calibrate(x, y)
    assert (sets.predict(x, 0.0, 0.3) != sets.predict(x, 0.0, 0.3)).any()


def test_refusals():
    x, y = examples(20, torch.Generator().manual_seed(5))
    sets = eq.smoothing.RobustConformal(LINE, SIGMA)
    with pytest.raises(eq.InputError, match="call calibrate"):
        sets.predict(x, 0.1)
    with pytest.raises(eq.InputError, match="labels must lie in 0 … 1"):
        sets.calibrate(x, y + 1)
    sets.calibrate(x, y)
    for bad in ({"radius": -1.0}, {"radius": math.nan}, {"radius": 0.1, "alpha": 0.0}, {"radius": 0.1, "alpha": 1.5}):
        with pytest.raises(eq.InputError):
            sets.predict(x, **bad)
    with pytest.raises(eq.InputError, match="calibrated on inputs of shape"):
        sets.predict(x[:, :2], 0.1)
    with pytest.raises(eq.Refused, match="training mode"):
        eq.smoothing.RobustConformal(HalfSpace(-1.0, 0.0, 0.0).train(), SIGMA).calibrate(x, y)
    images = (255 * torch.rand(20, 3)).round() / 255
    sets.calibrate(images, y)
    with pytest.raises(eq.Refused, match="grid of 8-bit images"):
        sets.predict(images + 1e-3, 0.1)


def test_counted_coverage_is_on_the_page():
    generator = torch.Generator().manual_seed(1)
    sets = eq.smoothing.RobustConformal(LINE, SIGMA).calibrate(*examples(200, generator))
    x, y = examples(300, generator)
    moved = x.clone()
    moved[:, 0] -= 0.3 * (2.0 * y - 1.0)
    (row,) = sets.coverage(x, y, {0.3: moved}, ALPHA)
    assert row["covered"] > row["attacked"] >= 1 - ALPHA - 0.1
    assert 0 < row["size"] <= 2
    page = report.render(report.collect([], sets={"line": [row]}), plotly="")
    assert "Prediction sets" in page
    assert f"{row['size']:.2f}" in page
