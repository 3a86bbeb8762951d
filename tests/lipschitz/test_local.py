"""Local bounds: the attack never passes the certificate, and both meet where the network is linear on the ball."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from lipschitz_attacks import stretch
from lipschitz_nets import Op, networks
from torch import nn

from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise.lipschitz.capture import capture
from equipoise.lipschitz.enclose import enclose
from equipoise.lipschitz.propagate import propagate
from equipoise.norms.spectral import Cache

pytestmark = pytest.mark.medium

NETS = networks()


@pytest.mark.parametrize("name", NETS)
def test_the_attack_stays_below_the_certificate(name):
    """Radii alternate from network to network."""
    net, shape, _ = NETS[name]
    radius = (0.5, 0.01)[list(NETS).index(name) % 2]
    torch.manual_seed(2)
    x = torch.randn(1, *shape) * 0.4
    bracket = local_lipschitz(net, x, radius, steps=4)
    reach = float(x.flatten(1).norm(dim=1).max()) + radius
    whole = lipschitz_bound(net, x, ball=reach * 1.001).upper
    assert bool((bracket.lower > 0).all()) or "an estimate" in bracket.note
    assert bool((bracket.upper <= whole * (1 + 1e-6)).all())
    doubled = copy.deepcopy(net).double()
    directions = nn.functional.normalize(torch.randn(64, x[0].numel(), dtype=torch.float64), dim=1).reshape(64, *shape)
    a = x.double() + radius * directions
    b = x.double() + radius * directions.flip(0) * 0.3
    assert float(stretch(doubled, a, b).max()) <= float(bracket.upper)


@pytest.mark.parametrize("name", ["hook", "parametrised", "mlp"])
def test_both_ends_meet_on_a_small_ball(name):
    net, shape, _ = NETS[name]
    torch.manual_seed(0)
    x = torch.randn(1, *shape)
    bracket = local_lipschitz(net, x, 1e-6, steps=60)
    assert float(bracket.upper) <= float(bracket.lower) * 1.01
    doubled = copy.deepcopy(net).double()
    exact = float(torch.linalg.matrix_norm(torch.func.jacrev(lambda v: doubled(v[None])[0])(x[0].double()), 2))
    multiplied = local_lipschitz(doubled, x.double(), 1e-7, effort="multipliers", steps=0)
    assert exact * (1 - 1e-12) <= float(multiplied.upper) <= exact * (1 + 1e-6)


@pytest.mark.parametrize("name", ["vgg", "resnet option A", "densenet", "mixer", "normalised"])
def test_every_node_stays_in_its_box(name):
    net, shape, _ = NETS[name]
    torch.manual_seed(4)
    x, radius = torch.randn(1, *shape) * 0.5, 0.3
    run = propagate(capture(net, x), float(x.norm()) + radius)
    boxes = enclose(run, x, radius, Cache())
    known = 0
    for trial in range(3):
        d = torch.randn(x.shape, dtype=torch.float64)
        inside = enclose(run, x.double() + radius * d / d.norm(), 1e-300, Cache())
        for node, box in boxes.items():
            if box.mid is None:
                continue
            known += trial == 0
            moved = (inside[node].mid - box.mid).abs()
            assert bool((moved <= box.half + 1e-9 * (1 + box.mid.abs())).all()), node
            assert float(moved.norm()) <= box.dev * (1 + 1e-9) + 1e-9
    assert known > 3


def _weighted(*weights):
    layer = nn.Linear(len(weights), 1, bias=False)
    layer.weight.data.copy_(torch.tensor([weights]))
    return layer


# name: (function, module, x, radius); a box that is too small here makes the certificate 0
MOVING = {
    "sorted next to constants": (
        lambda m, x: m(torch.cat([x, torch.full((len(x), 2), 10.0, dtype=x.dtype)], 1).sort(1).values),
        _weighted(1.0, 0.0, 0.0),
        torch.zeros(1, 1),
        0.5,
    ),
    "softsign": (lambda m, x: nn.functional.softsign(m(x)), _weighted(2.0, -1.0), torch.zeros(1, 2), 0.5),
    "weights whose squares vanish": (
        lambda m, x: F.linear(torch.relu(F.linear(x, m.weight * 1e-170)), m.weight.mT * 1e170),
        _weighted(1.0, 2.0).double(),
        torch.zeros(1, 2, dtype=torch.float64),
        0.5,
    ),
    "a piece": (lambda m, x: m(x.chunk(2, 1)[0]), _weighted(2.0, 1.0), torch.zeros(1, 4), 0.5),
    "a vector as weight": (
        lambda m, x: torch.relu(F.linear(x, m.weight[0])),
        _weighted(2.0, 1.0),
        torch.zeros(1, 3, 2),
        0.5,
    ),
    "an exponential beyond what the ball reaches": (
        lambda m, x: torch.relu(3.5 - m(torch.relu(x)).exp()),
        _weighted(*[0.1] * 100),
        torch.zeros(1, 100),
        1.0,
    ),
}


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("effort", ["fast", "multipliers"])
def test_what_moves_is_not_dropped(name, effort):
    function, module, x, radius = MOVING[name]
    net = Op(lambda m, x: function(m.module, x), module=module).eval()
    upper = float(local_lipschitz(net, x, radius, effort=effort, steps=0).upper)
    doubled = copy.deepcopy(net).double().requires_grad_(False)
    directions = nn.functional.normalize(torch.rand(64, x.numel(), dtype=torch.float64), dim=1).reshape(64, *x.shape)
    best = max(float(stretch(doubled, x + radius * d, x + 0.9 * radius * d)) for d in directions)
    assert 0.1 < best <= upper


def chain(*factors, activation=nn.ReLU):
    """`x ↦ … φ(f₂ φ(f₁ x))` of one number, in float64."""
    layers = []
    for factor in factors:
        layer = nn.Linear(1, 1, bias=False).double()
        layer.weight.data.fill_(factor)
        layers += [layer, activation()]
    return nn.Sequential(*layers[:-1]).eval()


def far_from_zero():
    net = chain(1.0, 1.0)
    net[0].bias = nn.Parameter(torch.full((1,), 2.0**60, dtype=torch.float64))
    return net


#: name: (network, centre); every constant on the ball of radius 0.5 is at least 1, and vanishes on the way in float64
VANISHING = {
    "neurons far from zero": (far_from_zero(), 0.0),
    "weights": (chain(1e-200, 1e-200, 1e200, 1e200), 1.0),
    "weights, at the kink": (chain(1e-200, 1e-200, 1e200, 1e200), 0.0),
    "a steep way back": (chain(1e-160, 1e-170, 1e250, 1e80), 1.0),
    "flat activations": (chain(1.0, 1e200, 1e100, activation=lambda: nn.LeakyReLU(1e-160)), -1.0),
    "a sigmoid's tail": (chain(1.0, 1e300, 1e300, 1e300, activation=nn.Sigmoid), -800.0),
}


@pytest.mark.parametrize("name", VANISHING)
@pytest.mark.parametrize("effort", ["fast", "multipliers"])
def test_half_widths_that_underflow_still_move(name, effort):
    net, centre = VANISHING[name]
    x = torch.full((1, 1), centre, dtype=torch.float64)
    bracket = local_lipschitz(net, x, 0.5, effort=effort)
    least = {"a sigmoid's tail": 1e-60, "flat activations": 1e-30}.get(name, 1.0)
    assert float(bracket.upper) >= least * (1 - 1e-9)


#: networks at a kink: (function, size of the input, its constant); autograd's Jacobian at 0 is another
KINKS = {
    "the zero map": (lambda x: torch.relu(x) - torch.relu(-x) - x, 1, 0.0),
    "a contraction": (lambda x: x - 0.5 * torch.relu(x) + 0.5 * torch.relu(-x), 1, 0.5),
    "no batch dimension": (lambda x: torch.tensor([[3.0], [6.0]], dtype=x.dtype) * x, 1, 45**0.5),
    "maximum of equals": (lambda x: torch.maximum(x, x * 1.0) * 0.5, 2, 0.5),
    "clamps": (lambda x: x.clamp(0, 1) - x.clamp(-1, 0) - x.clamp(0, 1) + x.clamp(-1, 0), 1, 0.0),
}


@pytest.mark.parametrize("name", KINKS)
@pytest.mark.parametrize("radius", [1e-6, 0.1])
def test_lower_ends_hold_at_kinks(name, radius):
    function, size, constant = KINKS[name]
    for dtype in (torch.float32, torch.float64):
        bracket = local_lipschitz(Op(function).eval(), torch.zeros(1, size, dtype=dtype), radius)
        assert float(bracket.lower) <= constant <= float(bracket.upper) + 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_lower_ends_are_stretches_of_pairs(seed):
    """In a linear network both ends meet: the lower one may lose what rounding can have added, and no more."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).double()
    W = net[1].weight @ net[0].weight
    bracket = local_lipschitz(net, torch.randn(1, 6, dtype=torch.float64), 10.0 ** -(2 * (seed % 3)), steps=60)
    exact = float(torch.linalg.matrix_norm(W.detach(), 2))
    assert exact * 0.999 <= float(bracket.lower) <= exact * (1 + 1e-12)


def test_multipliers_gain_on_deep_networks():
    torch.manual_seed(5)
    deep = [m for _ in range(5) for m in (nn.ReLU(), nn.Linear(24, 24))]
    net = nn.Sequential(nn.Linear(8, 24), *deep, nn.ReLU(), nn.Linear(24, 3))
    x = torch.randn(1, 8) * 0.5
    fast, full = (local_lipschitz(net, x, 0.05, steps=0, effort=e).upper for e in ("fast", "auto"))
    assert bool((full < 0.8 * fast).all())
    assert bool((fast < lipschitz_bound(net, x).upper).all())
