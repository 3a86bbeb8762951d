"""Certified at ε means `correct and R ≥ ε` wherever it is said: one row per place that says it."""

import numpy as np
import pytest
import torch

from equipoise.core import InputError
from equipoise.nn import CertifiedAccuracy
from equipoise.smoothing import certified_accuracy
from equipoise_lab.experiments.shared.smoothed_networks import Rated

RADIUS = np.array([0.0, 0.25, 0.5, 0.75, np.inf, 0.5])
CORRECT = np.array([True, True, True, True, True, False])
LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
EXPECTED = [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]


def from_logits(level):
    """Logits of a network with constant 1/√2·: the margin is the radius; the first input is a tie, which is no decision."""
    radius = np.where(np.isinf(RADIUS), 1e30, RADIUS)
    z = np.stack([np.where(CORRECT, 1, -1) * radius * (1 + 1e-9), np.zeros(6)], axis=1)
    metric = CertifiedAccuracy((level,))
    metric.update(torch.from_numpy(z), torch.zeros(6, dtype=torch.int64), 0.5**0.5)
    return metric.compute()["certified"][level] + (1 / 6 if level == 0 else 0)


PLACES = {
    "core": lambda e: float(certified_accuracy(RADIUS, CORRECT, e)),
    "experiments": lambda e: float(Rated(RADIUS, CORRECT).hits(e).mean()),
    "logits": from_logits,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_the_radius_itself_is_certified(place):
    assert [place(level) for level in LEVELS] == pytest.approx(EXPECTED)


def test_a_curve_is_its_points():
    assert certified_accuracy(RADIUS, CORRECT, np.array([LEVELS, LEVELS])).tolist() == [EXPECTED, EXPECTED]


@pytest.mark.parametrize("epsilon", [-0.1, float("nan")])
def test_no_negative_level(epsilon):
    with pytest.raises(InputError, match="non-negative"):
        certified_accuracy(RADIUS, CORRECT, epsilon)
