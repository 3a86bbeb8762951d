"""Optimised slopes on the ball of every layer: valid for any parameters, never worse than lines, and attacked."""

import math

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.lipschitz.local import Certifier
from equipoise.lipschitz.local.backward import enclose_ball, lower_bounds
from equipoise.lipschitz.local.slopes import optimise, relaxed_bounds, usual_slopes


class Residual(nn.Module):
    """Two hinges read the same node, and rows meet there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        z = self.first(x)
        return self.last(torch.relu(z) + 0.5 * torch.relu(-z) + z)


NETWORKS = {
    "relu": lambda: nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3)),
    "leaky": lambda: nn.Sequential(nn.Linear(5, 12), nn.LeakyReLU(0.3), nn.Linear(12, 3)),
    "mixed": lambda: nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3)),
    "pooled": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 2), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(8, 3)
    ),
    "residual": Residual,
}


def samples(x, radius, norm, count=4000):
    """Points of the ball, many of them on its surface."""
    d = torch.randn(count, x.shape[1], dtype=torch.float64)
    if norm == "l2":
        d = d / d.norm(dim=1, keepdim=True)
    elif norm == "linf":
        d = torch.where(torch.rand(count, 1) < 0.7, d.sign(), torch.rand_like(d) * 2 - 1)
    else:
        d = nn.functional.one_hot(d.abs().argmax(1), x.shape[1]) * d.sign()
    return x.double() + radius * d * torch.rand(count, 1, dtype=torch.float64).pow(0.1)


@pytest.mark.medium
@pytest.mark.parametrize("norm", ["l2", "linf", "l1"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seed", range(3))
def test_bounds_hold_for_any_slopes_and_penalties(name, norm, seed):
    torch.manual_seed(seed)
    model, x, radius = NETWORKS[name]().eval(), torch.randn(1, 5), 0.3 + 0.4 * seed
    network = Certifier.of(model, x, norm=norm).network
    rows = torch.randn(6, 3, dtype=torch.float64)
    values = model.double()(samples(x, radius, norm)) @ rows.T
    last = len(network.nodes) - 1
    with torch.no_grad():
        ball = enclose_ball(network, x, radius, norm)
        plain = lower_bounds(ball, last, rows)
        best, _ = optimise(ball, last, rows, steps=25)
        wild = usual_slopes(ball, last, len(rows))
        for tensor in (*wild.lower.values(), *wild.upper.values(), *wild.log_penalty.values()):
            tensor.add_(torch.randn_like(tensor))
        arbitrary = relaxed_bounds(ball, last, rows, wild)
    least = values.amin(0)
    assert bool((best >= plain - 1e-9).all())
    assert bool((best <= least).all())
    assert bool((arbitrary <= least).all())


@pytest.mark.medium
def test_a_single_radius_is_proved_or_not():
    """`epsilon=` agrees with the largest radius, and no attack breaks what it proves."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4)).eval()
    x = torch.randn(12, 20)
    largest = eq.certified_radius(model, x)
    epsilon = float(largest.radius.median())
    asked = eq.certified_radius(model, x, epsilon=epsilon)
    proved = asked.radius >= epsilon
    assert bool(proved[largest.radius >= 1.05 * epsilon].all())
    inside = eq.attacks.pgd(model, x, asked.labels, epsilon=0.999 * asked.radius, steps=40, restarts=2)
    assert not bool((inside.success & (asked.radius > 0)).any())
    assert math.isfinite(float(asked.radius.max()))
