"""Backward relaxation, switching neurons, multipliers, integrated certificates: attacked like every other bound."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from lipschitz_nets import ACTIVATIONS, HARM, picture, random_network
from torch import nn

import equipoise as eq
from equipoise.core import Refused
from equipoise.lipschitz.capture import capture
from equipoise.lipschitz.local.backward import enclose_ball, lower_bounds, slope_ranges
from equipoise.lipschitz.local.graph import Activation, Affine, read_network
from equipoise.lipschitz.local.multipliers import Reduced, best_multipliers, proves, reduced_maps
from equipoise.lipschitz.propagate import propagate
from equipoise.norms.spectral import Cache

pytestmark = pytest.mark.medium


def read(net, shape):
    x = torch.zeros(1, *shape, dtype=next((p.dtype for p in net.parameters()), torch.float64))
    cache = Cache()
    return read_network(propagate(capture(net, x), None, 1e-3, cache), cache)


def points(x, radius, count=64, seed=0):
    """Inputs of the ball, most of them on its surface."""
    g = torch.Generator().manual_seed(seed)
    d = torch.randn(count, x.numel(), generator=g, dtype=torch.float64)
    lengths = torch.rand(count, generator=g, dtype=torch.float64).clamp_min(0.5).mul(1.5).clamp_max(1)
    return x.double() + (radius * d / d.norm(dim=1, keepdim=True) * lengths[:, None]).reshape(count, *x.shape[1:])


INTERVALS = torch.tensor(
    [(-1.0, 2.0), (-3.0, 0.5), (0.0, 1.0), (-1.0, 0.0), (0.5, 0.6), (-9.0, -8.0), (-40.0, 60.0), (0.0, 0.0), (2.0, 2.0),
     (-1e-9, 1e-9), (-1e-9, 5.0), (2.9, 3.1), (-3.2, -2.9), (5.5, 6.5), (19.0, 21.0)], dtype=torch.float64
)  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_lines_and_slopes_hold_on_intervals(name):
    act = ACTIVATIONS[name]().double().eval()
    nodes = read(nn.Sequential(act), (len(INTERVALS),)).nodes
    curve = next(n.curve for n in nodes if isinstance(n, Activation))
    low, high = INTERVALS.T.contiguous()
    lines = curve.lines(low, high)
    with torch.no_grad():
        for share in torch.linspace(0, 1, 301, dtype=torch.float64):
            z = low + share * (high - low)
            value, slack = act(z[None])[0], 1e-12 * (1 + z.abs())
            assert bool((lines.lower * z + lines.below <= value + slack).all())
            assert bool((lines.upper * z + lines.above >= value - slack).all())
        near = (low + 0.3 * (high - low), low + 0.6 * (high - low))
        least, most = curve.secants(near, low, high)
        for i in torch.linspace(0.3, 0.6, 13, dtype=torch.float64):
            for j in torch.linspace(0, 1, 41, dtype=torch.float64):
                a, b = low + i * (high - low), low + j * (high - low)
                slope = (act(a[None])[0] - act(b[None])[0]) / (a - b)
                known = (a - b).abs() > 1e-4 * (1 + a.abs())
                assert bool((slope[known] >= least[known] - 1e-8).all())
                assert bool((slope[known] <= most[known] + 1e-8).all())


@pytest.mark.parametrize("seed", range(9))
def test_every_value_lies_in_its_interval(seed):
    norm = ("l2", "linf", "l1")[seed % 3]
    net, shape = random_network(seed)
    network = read(net, shape)
    x, radius = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed)), 0.3
    ball = enclose_ball(network, x, radius, norm)
    scale = {"l2": 1.0, "linf": 1.0, "l1": 1 / math.sqrt(x.numel())}[norm]
    rows = torch.randn(4, network.sizes[-1], dtype=torch.float64)
    least = lower_bounds(ball, len(network.nodes) - 1, rows)
    for a in points(x, radius * scale, 20):
        values = [a.flatten().double()]
        for node in network.nodes[1:]:
            if isinstance(node, Affine):
                values.append(node.forward([values[s] for s in node.sources], offset=True))
            else:
                values.append(node.curve.value(values[node.source]))
        for value, low, high in zip(values, ball.low, ball.high, strict=True):
            slack = 1e-12 * (1 + value.abs())
            assert bool((value >= low - slack).all() & (value <= high + slack).all())
        assert bool((rows @ values[-1] >= least - 1e-12 * (1 + (rows @ values[-1]).abs())).all())
        with torch.no_grad():
            own = copy.deepcopy(net).double()(a[None])[0]
        torch.testing.assert_close(values[-1], own, rtol=1e-9, atol=1e-9 * float(own.abs().max()) + 1e-12)


def random_maps(seed, counts=(3, 4, 2), inputs=5, outputs=2):
    g = torch.Generator().manual_seed(seed)
    n = sum(counts)
    C = torch.randn(n + outputs, inputs, generator=g, dtype=torch.float64)
    D = torch.randn(n + outputs, n, generator=g, dtype=torch.float64) * 0.5
    first = 0
    for count in counts:
        D[first : first + count, first:] = 0
        first += count
    return Reduced(C, D, torch.full((n + outputs,), 1e-13, dtype=torch.float64), counts)


@pytest.mark.parametrize("seed", range(6))
def test_multipliers_bound_every_switching(seed):
    maps = random_maps(seed)
    found = best_multipliers(maps)
    n, reached = maps.switching, 0.0
    g = torch.Generator().manual_seed(seed)
    for _ in range(300):
        d = torch.randn(maps.C.shape[1], generator=g, dtype=torch.float64)
        v = torch.zeros(n, dtype=torch.float64)
        signs = torch.randint(0, 2, (n,), generator=g) * 2 - 1
        for j in range(n):
            v[j] = signs[j] * (maps.C[j] @ d + maps.D[j] @ v).abs()
        reached = max(reached, float((maps.C[n:] @ d + maps.D[n:] @ v).norm() / d.norm()))
    assert reached <= found.bound <= 20 * reached
    assert found.bound <= best_multipliers(maps, steps=0).bound * (1 + 1e-9)
    assert not proves(maps, found.s.sqrt(), found.bound * 0.9)


def attack_margin(net, x, label, radius, norm, steps=25):
    """The smallest margin met by projected gradient descent in the ball; starts on its surface."""
    net = copy.deepcopy(net).double()
    d = points(x, radius, 6) - x.double()
    eye = torch.eye(3, dtype=torch.bool)[label]

    def inside(d):
        flat = d.flatten(1)
        if norm == "linf":
            return d.clamp(-radius, radius)
        size = flat.norm(dim=1) if norm == "l2" else flat.abs().sum(1)
        return d * (radius / size.clamp_min(1e-300)).clamp_max(1).reshape(-1, *[1] * (d.dim() - 1))

    worst = math.inf
    for step in range(steps):
        d = inside(d).detach().requires_grad_()
        with torch.enable_grad():
            out = net(x.double() + d)
            margin = out[:, label] - out.masked_fill(eye, -math.inf).amax(1)
            (g,) = torch.autograd.grad(margin.sum(), d)
        worst = min(worst, float(margin.detach().min()))
        size = g.flatten(1).norm(dim=1).clamp_min(1e-300).reshape(-1, *[1] * (d.dim() - 1))
        d = d.detach() - radius * (1 - step / steps) * (g.sign() if norm == "linf" else g / size)
    return worst


def attacked(net, x, radius, seed=0, **options):
    """Local bounds and radii of a network, attacked; returns the bracket."""
    bracket = eq.local_lipschitz(net, x, radius, **options)  # raises where the attack wins
    own = copy.deepcopy(net).double()
    a, b = points(x, radius, 40, seed), points(x, radius, 40, seed + 1)
    with torch.no_grad():
        rise = (own(a) - own(b)).norm(dim=1) - 1e-11 * own(a).norm(dim=1)
    assert bool((rise <= float(bracket.upper) * (a - b).flatten(1).norm(dim=1)).all()), seed
    norm = ("l2", "linf", "l1")[seed % 3]
    radii = eq.certified_radius(net, x, norm=norm)
    R = float(radii.radius)
    if 0 < R < 1e6:
        noise = 1e-11 * float(own(x.double()).abs().max())
        assert attack_margin(net, x, int(radii.labels), R * (1 - 1e-9), norm) >= -noise, (seed, norm)
    return bracket


def attacked_once(seed, radius):
    net, shape = random_network(seed)
    x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed)).to(next(net.parameters()).dtype)
    attacked(net, x, radius, seed, steps=12)


@pytest.mark.parametrize("seed", [1, 2, 6, 7, 8, 9, 12, 15])
def test_attacks_stay_below_bounds_and_beyond_radii(seed):
    attacked_once(seed, (1e-6, 0.1, 0.7, 30.0)[seed % 4])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 1100, 100))
def test_two_thousand_attacked_bounds_and_radii(first):
    """Ten times a hundred networks, so that no part runs into the limit of time of a test."""
    for seed in range(first, first + 100):
        attacked_once(seed, (1e-9, 1e-3, 0.05, 0.3, 1.0, 50.0)[seed % 6])


#: every harm in one layer, the layer going round
HARMED = [(harm, (0, 2, 4)[i % 3]) for i, harm in enumerate(HARM)]


@pytest.mark.parametrize(("harm", "layer"), HARMED)
def test_hostile_weights(harm, layer):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    HARM[harm](net[layer])
    x = torch.zeros(1, 3) if harm == "at the kink" else torch.tensor([[0.3, -0.2, 0.5]])
    bracket = attacked(net, x, 0.4, effort="multipliers", steps=4)
    assert float(bracket.lower) <= float(bracket.upper) <= eq.lipschitz_bound(net, x).upper * (1 + 1e-6)
    assert "multipliers of" in bracket.note or harm == "zero"


@pytest.mark.parametrize("seed", [0, 2, 5, 9])
def test_multipliers_bound_the_whole_space(seed):
    net, shape = random_network(seed)
    x = torch.zeros(1, *shape, dtype=next(net.parameters()).dtype)
    upper = eq.lipschitz_bound(net, x, chain="multipliers").upper
    assert upper < 0.9 * eq.lipschitz_bound(net, x, chain="closed").upper
    assert eq.lipschitz_bound(net, x).upper == upper
    own, g = copy.deepcopy(net).double(), torch.Generator().manual_seed(seed)
    a = 3 * torch.randn(200, *shape, generator=g, dtype=torch.float64)
    b = a + 0.3 * torch.randn(200, *shape, generator=g, dtype=torch.float64)
    with torch.no_grad():
        rise = (own(a) - own(b)).norm(dim=1) - 1e-11 * own(a).norm(dim=1)
    assert bool((rise <= upper * (a - b).flatten(1).norm(dim=1)).all())


def test_multipliers_of_the_whole_space_are_refused_by_name():
    for net, x, text in (
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=0.5)), torch.zeros(1, 4), "layer_norm"),
        (nn.Sequential(nn.Linear(2, 4000), nn.ReLU(), nn.Linear(4000, 2)), torch.zeros(1, 2), "4,000"),
    ):
        with pytest.raises(Refused, match=text):
            eq.lipschitz_bound(net.eval(), x, chain="multipliers")


def test_certificates_pass_the_global_ones():
    torch.manual_seed(0)
    net = picture(nn.ReLU(), nn.MaxPool2d(2))
    x = torch.randn(1, 1, 4, 4)
    radii = {effort: eq.certified_radius(net, x, effort=effort).radius for effort in ("fast", "relaxation", "auto")}
    assert bool((radii["fast"] < radii["relaxation"]).all() & (radii["relaxation"] <= radii["auto"]).all())


def test_labels_and_rivals():
    net = nn.Sequential(nn.Linear(2, 3, bias=False))
    net[0].weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
    found = eq.certified_radius(net, torch.tensor([[3.0, 1.0], [3.0, 1.0]]), torch.tensor([0, 1]))
    assert found.radius.numpy().round(4).tolist() == [1.4142, 0.0]
    assert found.rivals.tolist() == [1, 0]
    assert found.methods[1] == "not classified as labelled"
    assert found.accuracy(1.0) == 0.5


def test_a_budget_ends_with_a_bound():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 5))
    x = torch.randn(1, 10)
    full = eq.local_lipschitz(net, x, 1.0, effort="multipliers", steps=0)
    short = eq.local_lipschitz(net, x, 1.0, effort="multipliers", steps=0, seconds=1e-9)
    assert float(full.upper) <= float(short.upper) < math.inf
    assert "time was up" in short.note
    assert float(eq.certified_radius(net, x, seconds=1e-9).radius) > 0


# layers × width, ball/√5: the constant to stay below
TABLE = {
    ("5x10", 1.0): 2.38, ("5x40", 1.0): 2.71, ("5x40", 0.2): 0.346, ("5x40", 0.04): 0.1843, ("10x20", 1.0): 0.00197,
    ("10x40", 1.0): 0.043, ("20x20", 1.0): 0.0024,
}  # fmt: skip


@pytest.mark.parametrize(("name", "r"), TABLE)
def test_random_networks_of_the_literature(name, r, data_dir):
    if not (data_dir / "random-relu-nets.npz").exists():
        pytest.skip("random-relu-nets.npz is not there")
    stored = np.load(data_dir / "random-relu-nets.npz")
    keys = sorted((k for k in stored.files if k.startswith(f"{name}/W")), key=lambda k: int(k.split("/W")[1]))
    layers = []
    for key in keys:
        W, b = (torch.from_numpy(stored[k]).double() for k in (key, key.replace("/W", "/b")))
        layer = nn.Linear(W.shape[1], W.shape[0]).double()
        layer.weight.data, layer.bias.data = W, b.flatten()
        layers += [layer, nn.ReLU()]
    x = torch.from_numpy(stored["center"]).double().reshape(1, -1)
    network = read(nn.Sequential(*layers[:-1]), x.shape[1:])
    ball = enclose_ball(network, x, r * math.sqrt(5))
    maps = reduced_maps(ball, slope_ranges(ball), torch.eye(network.sizes[-1], dtype=torch.float64))
    assert best_multipliers(maps).bound <= TABLE[name, r]
