"""Semidefinite programs: product ≥ closed form ≥ ECLipsE, LipSDP ≥ attack; a solver that lies is never believed."""

from __future__ import annotations

import builtins
import itertools
import math

import pytest
import torch
from lipschitz_attacks import attack
from torch import nn

from equipoise.core import InputError, Refused
from equipoise.lipschitz import chain_bound, lipschitz_bound, sdp_bound
from equipoise.lipschitz import sdp as module
from equipoise.norms import spectral_norm

pytest.importorskip("cvxpy")
GELU = (-0.128904146, 1.128904146)

# name: (sizes, activation, slopes)
CHAINS = {
    "one hidden layer": ((4, 12, 3), nn.ReLU, (0.0, 1.0)),
    "wide input": ((60, 12, 3), nn.ReLU, (0.0, 1.0)),
    "three layers": ((6, 14, 14, 2), nn.ReLU, (0.0, 1.0)),
    "deep": ((5, 8, 8, 8, 8, 2), nn.Tanh, (0.0, 1.0)),
    "leaky": ((5, 10, 10, 2), lambda: nn.LeakyReLU(0.2), (0.2, 1.0)),
    "gelu": ((5, 10, 10, 2), nn.GELU, GELU),
}


def net_of(sizes, act, seed=0):
    torch.manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
        layers[-2].weight.data.mul_(3)
    return nn.Sequential(*layers[:-1]).eval()


@pytest.mark.parametrize("name", CHAINS)
def test_the_order_of_the_bounds(name):
    sizes, act, slopes = CHAINS[name]
    net = net_of(sizes, act)
    weights = [m.weight for m in net if isinstance(m, nn.Linear)]
    product = math.prod(float(spectral_norm(w).upper) for w in weights) * slopes[1] ** (len(weights) - 1)
    fast = chain_bound(weights, slopes)
    eclipse, lipsdp = (float(sdp_bound(weights, slopes, method)) for method in ("eclipse", "lipsdp"))
    assert product >= fast > eclipse
    assert eclipse >= lipsdp * (1 - 1e-3)
    assert attack(net, sizes[:1]) <= lipsdp * (1 + 1e-7)
    assert lipschitz_bound(net, torch.zeros(1, sizes[0]), chain="sdp").upper == pytest.approx(lipsdp, rel=1e-4)


def test_layers_folded_from_batch_norm_are_covered():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    net[1].running_var.copy_(torch.rand(8) + 0.1)
    report = lipschitz_bound(net, torch.zeros(1, 4), chain="lipsdp")
    assert attack(net, (4,)) <= report.upper * (1 + 1e-7)
    assert report.upper < lipschitz_bound(net, torch.zeros(1, 4)).upper


@pytest.mark.parametrize("lie", ["zero", "negative", "huge", "random", "nothing"])
def test_a_lying_solver_costs_tightness_only(lie, monkeypatch):
    sizes, act, slopes = CHAINS["three layers"]
    net = net_of(sizes, act)
    weights = [m.weight for m in net if isinstance(m, nn.Linear)]
    honest = float(sdp_bound(weights, slopes))

    def answer(chain, solver):
        hidden = [w.shape[0] for w in chain.weights[:-1]]
        return {
            "zero": [torch.zeros(n, dtype=torch.float64) for n in hidden],
            "negative": [torch.full((n,), -1.0, dtype=torch.float64) for n in hidden],
            "huge": [torch.full((n,), 1e9, dtype=torch.float64) for n in hidden],
            "random": [torch.rand(n, dtype=torch.float64) for n in hidden],
            "nothing": None,
        }[lie]

    monkeypatch.setattr(module, "_lipsdp", answer)
    found = float(sdp_bound(weights, slopes))
    assert honest * (1 - 1e-6) <= found <= chain_bound(weights, slopes)


def test_bad_requests_are_refused(monkeypatch):
    weights = [torch.randn(3, 3)] * 3
    with pytest.raises(InputError, match="method"):
        sdp_bound(weights, method="magic")
    with pytest.raises(InputError, match="chain must be"):
        lipschitz_bound(nn.Linear(3, 3), torch.zeros(1, 3), chain="magic")
    with pytest.raises(InputError, match="not installed"):
        sdp_bound(weights, solver="NOSUCH")
    with pytest.raises(Refused, match="slopes"):
        sdp_bound(weights, (-1.0, 1.0))
    with pytest.raises(Refused, match="too large"):
        sdp_bound([torch.randn(400, 400)] * 2)
    plain = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "cvxpy":
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InputError, match="equipoise\\[sdp\\]"):
        sdp_bound(weights)
