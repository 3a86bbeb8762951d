"""The closed form for chains: product ≥ chain ≥ attack, against a dense grid of slopes, and in floating point."""

import itertools
import math

import pytest
import torch
from lipschitz_attacks import attack
from torch import nn

from equipoise.core import InputError
from equipoise.lipschitz import chain_bound, lipschitz_bound

ACTIVATIONS = {
    "relu": (nn.ReLU(), (0.0, 1.0)),
    "leaky": (nn.LeakyReLU(0.2), (0.2, 1.0)),
    "gelu": (nn.GELU(), (-0.1289041452, 1.1289041452)),
    "silu": (nn.SiLU(), (-0.0998393202, 1.0998393202)),
    "mish": (nn.Mish(), (-0.112526123, 1.0884981613)),
    "sigmoid": (nn.Sigmoid(), (0.0, 0.25)),
    "tanh": (nn.Tanh(), (0.0, 1.0)),
}


def mlp(widths, activation, seed=0):
    torch.manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), activation]
    return nn.Sequential(*layers[:-1]).eval()


def product(weights, slopes):
    top = max(map(abs, slopes))
    return math.prod(float(torch.linalg.matrix_norm(w.double(), ord=2)) for w in weights) * top ** (len(weights) - 1)


@pytest.mark.medium
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("widths", [(8, 12, 4), (6, 16, 16, 3), (5, 10, 10, 10, 10, 2)])
def test_product_chain_attack(name, widths):
    activation, slopes = ACTIVATIONS[name]
    net = mlp(widths, activation)
    weights = [m.weight.detach() for m in net if isinstance(m, nn.Linear)]
    bound = chain_bound(weights, slopes)
    assert bound < product(weights, slopes) * 0.999
    assert attack(net, widths[:1]) <= bound * (1 + 1e-7)


@pytest.mark.parametrize("spread", [0, 12])
@pytest.mark.parametrize("slopes", [(0.0, 1.0), (-0.13, 1.13), (0.2, 1.0), (-0.5, 1.5)])
def test_every_admissible_pattern_of_slopes_stays_below(slopes, spread):
    """The chain is linear for fixed slopes: the worst corner found by coordinate ascent must not exceed the bound."""
    torch.manual_seed(3)
    scale = torch.logspace(3 - spread, 3, 7)  # ill conditioned
    W = [torch.randn(7, 5) * scale[:5], torch.randn(7, 7) * scale[:, None], torch.randn(3, 7)]
    W = [w.double() for w in W]
    bound = chain_bound(W, slopes)
    corners = torch.tensor(slopes, dtype=torch.float64)
    best = 0.0
    for trial in range(5):
        pick = torch.randint(0, 2, (14,), generator=torch.Generator().manual_seed(trial))
        value = -1.0
        improved = True
        while improved:
            improved = False
            for i in range(14):
                trial_pick = pick.clone()
                trial_pick[i] = 1 - trial_pick[i]
                d = corners[trial_pick]
                norm = float(torch.linalg.matrix_norm(W[2] * d[7:] @ W[1] * d[:7] @ W[0], ord=2))
                if norm > value:
                    value, pick, improved = norm, trial_pick, True
        best = max(best, value)
    assert best <= bound * (1 + 1e-9)
    assert spread or best >= 0.4 * bound


@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e150, 1e300])
def test_the_scale_of_a_layer_is_a_factor_of_the_bound(scale):
    torch.manual_seed(0)
    W = [torch.randn(6, 6, dtype=torch.float64) for _ in range(3)]
    assert chain_bound([W[0] * scale, *W[1:]]) / scale == pytest.approx(chain_bound(W), rel=1e-9)


def test_the_report_uses_the_chain():
    net = mlp((6, 20, 20, 3), nn.ReLU())
    whole = nn.Sequential(nn.Flatten(), net, nn.Sigmoid()).eval()
    report = lipschitz_bound(whole, torch.zeros(1, 2, 3), chain="closed")
    assert report.method == "chain"
    assert report.upper < report.fused
    weights = [m.weight.detach() for m in net if isinstance(m, nn.Linear)]
    assert report.upper == pytest.approx(chain_bound(weights) / 4, rel=1e-6)
    other = lipschitz_bound(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=0.5)).eval(), torch.zeros(1, 4))
    assert other.log_chain is None
    assert "chain" not in str(other)


def test_deep_chains_gain_most_and_activations_outside_the_theory_nothing():
    torch.manual_seed(0)
    W = [torch.randn(60, 60) for _ in range(20)]
    assert chain_bound(W) < 0.05 * product(W, (0, 1))
    assert chain_bound([torch.eye(3), torch.eye(3)], (-1.0, 1.0)) == pytest.approx(1, rel=2e-3)
    with pytest.raises(InputError):
        chain_bound([torch.zeros(2, 3), torch.zeros(2, 3)])
