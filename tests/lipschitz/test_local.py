"""Local bounds: the attack never passes the certificate, and both meet where the network is linear on the ball."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from lipschitz_nets import networks
from torch import nn

from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise.lipschitz.attack import stretch
from equipoise.lipschitz.capture import capture
from equipoise.lipschitz.enclose import enclose
from equipoise.lipschitz.propagate import propagate
from equipoise.norms.spectral import Cache

pytestmark = pytest.mark.medium

NETS = networks()


def flat(net):
    """All outputs of a network side by side, one row per sample."""
    return lambda x: torch.cat([t.flatten(1) for t in torch.utils._pytree.tree_leaves(net(x))], 1)


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
    assert float(stretch(flat(doubled), a, b).max()) <= float(bracket.upper)


@pytest.mark.parametrize("name", ["hook", "parametrised", "mlp"])
def test_both_ends_meet_on_a_small_ball(name):
    net, shape, _ = NETS[name]
    torch.manual_seed(0)
    x = torch.randn(1, *shape)
    bracket = local_lipschitz(net, x, 1e-6, steps=60)
    assert float(bracket.upper) <= float(bracket.lower) * 1.01


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


def _uneven():
    conv = nn.Conv2d(1, 4, 3, padding=1)
    conv.weight.data.fill_(0.01)
    conv.weight.data[0] = 1.0
    conv.bias.data.fill_(-0.5)
    return conv


# name: (function, module, x, radius); a box that is too small here makes the certificate 0
MOVING = {
    "sorted next to constants": (
        lambda m, x: m(torch.cat([x, torch.full((len(x), 2), 10.0, dtype=x.dtype)], 1).sort(1).values),
        _weighted(1.0, 0.0, 0.0),
        torch.zeros(1, 1),
        0.5,
    ),
    "one image, as many channels as rows": (
        lambda m, x: torch.relu(m(x[0]))[None, 0, 1:],
        _uneven(),
        torch.zeros(1, 1, 4, 4),
        0.4,
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


class _Applied(nn.Module):
    def __init__(self, function, module):
        super().__init__()
        self.function, self.module = function, module

    def forward(self, x):
        return self.function(self.module, x)


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("effort", ["fast", "multipliers"])
def test_what_moves_is_not_dropped(name, effort):
    function, module, x, radius = MOVING[name]
    net = _Applied(function, module).eval()
    upper = float(local_lipschitz(net, x, radius, effort=effort, steps=0).upper)
    doubled = copy.deepcopy(net).double().requires_grad_(False)
    directions = nn.functional.normalize(torch.rand(64, x.numel(), dtype=torch.float64), dim=1).reshape(64, *x.shape)
    best = max(float(stretch(flat(doubled), x + radius * d, x + 0.9 * radius * d)) for d in directions)
    assert 0.1 < best <= upper


def chain(*factors, activation=nn.ReLU):
    """`x ↦ … φ(f₂ φ(f₁ x))` of one number, in float64."""
    layers = []
    for factor in factors:
        layer = nn.Linear(1, 1, bias=False).double()
        layer.weight.data.fill_(factor)
        layers += [layer, activation()]
    return nn.Sequential(*layers[:-1]).eval()


#: name: (network, centre); every constant on the ball of radius 0.5 is at least 1, and vanishes on the way in float64
VANISHING = {
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


class Zero(nn.Module):
    """0 everywhere; automatic differentiation returns −1 at the kink."""

    def forward(self, x):
        return torch.relu(x) - torch.relu(-x) - x


class Half(nn.Module):
    """`x/2`: a contraction whose autograd Jacobian at 0 is 1."""

    def forward(self, x):
        return x - 0.5 * torch.relu(x) + 0.5 * torch.relu(-x)


#: networks at a kink: (network, centre, their constant)
KINKS = {
    "the zero map": (Zero(), 1, 0.0),
    "a contraction": (Half(), 1, 0.5),
    "maximum of equals": (_Applied(lambda m, x: torch.maximum(x, x * 1.0) * 0.5, None), 2, 0.5),
    "clamps": (_Applied(lambda m, x: x.clamp(0, 1) - x.clamp(-1, 0) - x.clamp(0, 1) + x.clamp(-1, 0), None), 1, 0.0),
}


@pytest.mark.parametrize("name", KINKS)
@pytest.mark.parametrize("radius", [1e-6, 0.1])
def test_lower_ends_hold_at_kinks(name, radius):
    net, size, constant = KINKS[name]
    for dtype in (torch.float32, torch.float64):
        bracket = local_lipschitz(net.eval(), torch.zeros(1, size, dtype=dtype), radius)
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


def test_an_output_without_a_batch_dimension_counts_once():
    columns = torch.tensor([[1.0], [2.0]])
    net = _Applied(lambda m, x: columns.to(x.dtype) * m(x), _weighted(3.0)).eval()
    bracket = local_lipschitz(net, torch.zeros(1, 1), 0.5)
    assert float(bracket.lower) <= 3 * 5**0.5 <= float(bracket.upper)


def test_neurons_far_from_zero_move():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).double()
    net[0].weight.data.copy_(torch.eye(2))
    net[0].bias.data.fill_(2.0**60)
    x = torch.zeros(1, 2, dtype=torch.float64)
    boxes = enclose(propagate(capture(net, x), 1.0), x, 1.0, Cache())
    assert all(bool((box.half >= 1).all()) for box in boxes.values())


@pytest.mark.parametrize(("blocks", "radius"), [(5, 0.05)])
def test_multipliers_gain_on_deep_networks(blocks, radius):
    torch.manual_seed(5)
    deep = [m for _ in range(blocks) for m in (nn.ReLU(), nn.Linear(24, 24))]
    net = nn.Sequential(nn.Linear(8, 24), *deep, nn.ReLU(), nn.Linear(24, 3))
    x = torch.randn(1, 8) * 0.5
    fast, full = (local_lipschitz(net, x, radius, steps=0, effort=e).upper for e in ("fast", "auto"))
    assert bool((full < 0.8 * fast).all())
    assert bool((fast < lipschitz_bound(net, x).upper).all())
