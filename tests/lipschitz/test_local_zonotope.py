"""The relational enclosure: no point of the ball leaves it, no pair of points stretches more than it says."""

# ruff: noqa: E501 - a table of networks, one to a line
from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lipschitz_nets import Block, DenseBlock, head, networks, randomise
from torch import nn

from equipoise.core import InputError
from equipoise.core.precision import full_precision
from equipoise.lipschitz import local_lipschitz, zonotope
from equipoise.lipschitz.attack import attacked, stretch
from equipoise.lipschitz.capture import capture
from equipoise.lipschitz.enclose import Box, enclose
from equipoise.lipschitz.linearise import secant_slopes
from equipoise.lipschitz.propagate import propagate
from equipoise.norms.spectral import Cache

NETS = networks()


class Shifted(nn.Module):
    """Arithmetic with constants on both sides, subsampling, padding with a constant that is not zero, a stack."""

    def forward(self, x):
        y = 2 - x * 3.0
        y = (y[:, :, ::2, ::2] / 4 - 0.5) - 0.25 * torch.nn.functional.pad(x[:, :, 1::2, 1::2], (0, 0, 0, 0))
        return torch.cat([torch.relu(y), nn.functional.pad(y, (1, 1, 1, 1), value=0.7)[:, :, 1:-1, 1:-1]], 1)


class Reshaped(nn.Module):
    """The batch dimension of one is folded into another shape and back."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(15, 2)

    def forward(self, x):
        return self.b(torch.relu(self.a(x.reshape(3, 4))).reshape(1, 15))


def cases():
    torch.manual_seed(5)
    deep = [nn.Linear(8, 24)] + [m for _ in range(5) for m in (nn.ReLU(), nn.Linear(24, 24))]
    own = {
        "deep mlp": (nn.Sequential(*deep, nn.ReLU(), nn.Linear(24, 3)), (8,)),
        "one input": (nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)), (1,)),
        "leaky": (nn.Sequential(nn.Linear(6, 20), nn.LeakyReLU(0.2), nn.Linear(20, 20), nn.LeakyReLU(3.0), nn.Linear(20, 2)), (6,)),
        "other activations": (nn.Sequential(nn.Linear(6, 12), nn.Sigmoid(), nn.Linear(12, 12), nn.Hardtanh(), nn.Linear(12, 12), nn.PReLU(), nn.Linear(12, 2)), (6,)),
        "two blocks": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.ReLU(), Block(4, 4), Block(4, 8, 2, "A"), head(8)), (3, 8, 8)),
        "projection": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.ReLU(), Block(4, 6, 2, "projection"), head(6)), (3, 8, 8)),
        "dense, pooled": (nn.Sequential(DenseBlock(3), nn.AvgPool2d(3, 2, 1), DenseBlock(6), head(9)), (3, 8, 8)),
        "arithmetic": (nn.Sequential(nn.Conv2d(3, 3, 3, 1, 1), nn.ReLU(), Shifted(), nn.ReLU(), head(6)), (3, 8, 8)),
        "reshaped": (Reshaped(), (12,)),
    }  # fmt: skip
    table = {name: (randomise(net, i), shape) for i, (name, (net, shape)) in enumerate(own.items())}
    kept = ("mlp", "gelu mlp", "cnn", "resnet identity", "resnet option A", "densenet", "repvgg", "normalised", "reflect",
            "hook", "autoencoder")  # fmt: skip
    return table | {name: NETS[name][:2] for name in kept}


CASES = cases()


def prepared(net, x, radius):
    program = capture(net, x)
    cache = Cache()
    return propagate(program, float(x.norm()) + radius, 1e-3, cache), cache


def watched(monkeypatch):
    """Record the cloud of every node."""
    clouds = {}
    for name in ("_activation", "_affine"):
        inner = getattr(zonotope, name)

        def outer(state, call, *rest, inner=inner):
            clouds[call.node] = inner(state, call, *rest)
            return clouds[call.node]

        monkeypatch.setattr(zonotope, name, outer)
    return clouds


def values(run, x):
    """Every node's value in float64."""
    known = {run.program.inputs[0]: x}

    def value(node):
        found = known[node] if node in known else run.program.constants[node]
        return found.double() if isinstance(found, torch.Tensor) and found.is_floating_point() else found

    for node in run.program.nodes:
        args = torch.fx.node.map_arg(node.args, lambda n: value(n).clone() if n in known else value(n))
        known[node] = node.target(*args, **torch.fx.node.map_arg(node.kwargs, value))
    return known


def ball(x, radius, count, seed):
    """Points of the ball, most of them on its surface, some along coordinates, some inside."""
    g = torch.Generator().manual_seed(seed)
    d = torch.randn(count, *x.shape[1:], generator=g, dtype=torch.float64)
    d[: count // 4] *= (torch.rand(d[: count // 4].shape, generator=g) < 0.1).double()
    d = d / d.flatten(1).norm(dim=1).clamp_min(1e-9).reshape(-1, *[1] * (d.dim() - 1))
    d[count // 2 :] *= torch.rand(count - count // 2, *[1] * (d.dim() - 1), generator=g, dtype=torch.float64)
    return x.double() + radius * (1 - 1e-12) * d


#: how the enclosure is pressed: all symbols, five more than the input has, or forgetting at every ReLU it can
BUDGETS = ["full", "few symbols", "restarts"]


@pytest.mark.parametrize("name", CASES)
def test_no_point_and_no_pair_leaves_the_enclosure(name, monkeypatch):
    net, shape = CASES[name]
    torch.manual_seed(3)
    x = torch.randn(1, *shape) * 0.5
    run, cache = prepared(net, x, 0.3)
    clouds = watched(monkeypatch)
    for radius, budget in ((0.02, "full"), *((0.3, b) for b in BUDGETS)):
        boxes = enclose(run, x, radius, cache)
        if budget == "few symbols":  # without a product to compare with, the remainder is carried to the end
            boxes = {node: replace(box, log=math.inf) for node, box in boxes.items()}
        widest = max(f.signal.numel for f in run.facts.values())
        entries = (x.numel() + 5) * widest if budget == "few symbols" else 10**7
        monkeypatch.setattr(zonotope, "ENTRIES", entries)
        monkeypatch.setattr(zonotope, "FRESH", 0 if budget == "restarts" else 10**9)
        with torch.no_grad(), full_precision():
            upper, state = zonotope.zonotope_bound(run, boxes, x, radius, cache)
        assert math.isfinite(upper)
        check_points(run, state, clouds, upper, [values(run, p[None]) for p in ball(x, radius, 8, 1)])
        assert float(attacked(net, x, radius, 8, 0)) <= upper


def check_points(run, state, clouds, upper, points):
    """Points of the ball lie in every cloud, and differences stay below what every cloud says of them."""
    source, out = run.program.inputs[0], run.program.outputs[0]
    bounds = {node: (state.half(cloud), state.reach(cloud) + cloud.tau) for node, cloud in clouds.items()}
    for point, other in zip(points, points[1:] + points[:1], strict=True):
        gap = float((point[source] - other[source]).norm()) * (1 + 1e-9)
        assert float((point[out] - other[out]).norm()) <= upper * gap
        for node, (half, reach) in bounds.items():
            assert bool(((point[node] - clouds[node].centre).abs() <= half).all()), node
            assert bool(((point[node] - other[node]).abs() <= reach * gap).all()), node


def test_the_relu_of_an_interval():
    """`|relu(z) − λz − m| ≤ μ` on the whole interval, with equality somewhere, and every secant slope within the width."""
    c, h = torch.meshgrid(torch.linspace(-2, 2, 41).double(), torch.linspace(0, 3, 31).double(), indexing="ij")
    slope, centre, mu, width = zonotope._relu(c, h)
    z = c + h * torch.linspace(-1, 1, 201).double().reshape(-1, 1, 1)
    gap = (torch.relu(z) - slope * z - (centre - slope * c)).abs()
    assert bool((gap <= mu + 1e-15).all())
    assert float((mu - gap.amax(0)).max()) <= 1e-9
    secant = (torch.relu(z[1:]) - torch.relu(z[:-1])) / (z[1:] - z[:-1]).clamp_min(1e-12)
    assert bool(((secant - slope).abs() <= width + 1e-9)[:, h > 0].all())


def test_weights_far_from_one_do_not_vanish():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    net[0].weight.data, net[0].bias.data = torch.eye(2).double() * 1e-170, torch.zeros(2).double()
    net[2].weight.data = torch.ones(1, 2).double() * 1e170
    x = torch.tensor([[-1.0, 1.0]]).double()
    run, cache = prepared(net, x, 2.0)
    upper, _ = zonotope.zonotope_bound(run, enclose(run, x, 2.0, cache), x, 2.0, cache)
    assert upper >= math.sqrt(2)


@pytest.mark.parametrize("name", ["mlp", "gelu mlp", "cnn", "densenet", "repvgg", "vgg", "shared, tuple"])
def test_never_above_the_fast_bound(name):
    net, shape, _ = NETS[name]
    torch.manual_seed(7)
    x = torch.randn(1, *shape) * 0.5
    fast = local_lipschitz(net, x, 0.05, steps=0, effort="fast").upper
    assert bool((local_lipschitz(net, x, 0.05, steps=0).upper <= fast).all())


@pytest.mark.parametrize(
    ("name", "radius"), [("deep mlp", 0.05), ("two blocks", 0.05), ("resnet identity", 0.05), ("resnet option A", 0.2)]
)
def test_deep_networks_gain(name, radius):
    net, shape = CASES[name]
    torch.manual_seed(1)
    x = torch.randn(1, *shape) * 0.5
    fast = local_lipschitz(net, x, radius, steps=0, effort="fast").upper
    assert bool((local_lipschitz(net, x, radius, steps=0).upper < 0.8 * fast).all())


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 12), min_size=2, max_size=6), st.floats(1e-4, 3.0))
def test_random_dense_networks(seed, widths, radius):
    torch.manual_seed(seed)
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(widths[-1], 3)).requires_grad_(False)
    for p in net.parameters():
        p.data *= 2.0
    x = torch.randn(1, widths[0])
    upper = float(local_lipschitz(net, x, radius, steps=0).upper)
    assert float(attacked(net, x, radius, 15, seed)) <= upper
    a, b = ball(x, radius, 64, seed), ball(x, radius, 64, seed + 1)
    assert float(stretch(copy.deepcopy(net).double(), a, b).max()) <= upper


@pytest.mark.parametrize("slope", [0.25, 3.0, -0.5, 1.0, 0.0])
def test_secant_slopes_of_leaky_relu(slope):
    net = nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(slope))
    run, _ = prepared(net, torch.zeros(1, 3), 1.0)
    mid, half = torch.tensor([[2.0, -2.0, 0.5]], dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)
    middle, width = secant_slopes(run.steps[run.program.nodes[-1]], Box(mid, half, 9.0, 0.0, 0.0))
    assert middle[0, :2].tolist() == [1.0, slope]
    assert float(width[0, :2].max()) <= 1e-15
    low, high = float(middle[0, 2] - width[0, 2]), float(middle[0, 2] + width[0, 2])
    assert low <= min(1.0, slope) + 1e-12
    assert high >= max(1.0, slope) - 1e-12


def test_joint_norm_is_at_most_the_sum_and_at_least_every_choice():
    torch.manual_seed(0)
    parts = {k: torch.randn(m, 6, dtype=torch.float64) for k, m in (("a", 9), ("b", 4), ("c", 30))}
    lip = {"a": 1.0, "b": 3.0, "c": 0.2}
    joint = zonotope._joint(parts, lip)
    total = sum(lip[k] * float(torch.linalg.matrix_norm(m, 2)) for k, m in parts.items())
    assert joint <= total * 1.02
    for _ in range(500):
        v = torch.randn(6, dtype=torch.float64)
        v /= v.norm()  # the best choice of directions along v
        assert sum(lip[k] * float((m @ v).norm()) for k, m in parts.items()) <= joint


def test_effort_is_checked():
    with pytest.raises(InputError, match="effort"):
        local_lipschitz(nn.Linear(3, 2), torch.zeros(1, 3), 0.1, effort="slow")
