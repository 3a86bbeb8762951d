"""Certified radii by default: useful, honest about what was left out, and refused in one sentence where the call is wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.core import EquipoiseError


@pytest.mark.medium
def test_the_packaged_figures_come_out_of_the_plain_call(data_dir):
    if not (data_dir / "cifar10.npz").exists():
        pytest.skip("cifar10.npz is not there")
    trained, count = eq.models.load("cifar10"), 60
    with np.load(data_dir / "cifar10.npz") as stored:
        x = torch.from_numpy(stored["x_test"][:count]).permute(0, 3, 1, 2).float() / 255
        y = torch.from_numpy(stored["y_test"][:count]).long()
    found = eq.certified_radius(trained.model, x, y)
    advertised = trained.certificate["figures"]["certified_accuracy"]
    for epsilon, share in advertised.items():
        error = (share * (1 - share) / count) ** 0.5
        assert found.accuracy(float(epsilon)) == pytest.approx(share, abs=3 * error + 1 / count)
    assert float(found.right.double().mean()) > 0.6
    assert "float64" in found.note


def test_rounding_leaves_one_lipschitz_networks_their_radii():
    torch.manual_seed(0)
    blocks = (m for _ in range(12) for m in (eq.nn.SRLinear(24, 24), eq.nn.MaxMin()))
    net = nn.Sequential(*blocks, eq.nn.SRLinear(24, 3)).eval()
    found = eq.certified_radius(net, torch.randn(4, 24), effort="fast", deployed="float32")
    assert (found.radius > 0).all()
    assert (found.deployed > 0.9 * found.radius).all()
    assert (found.deployed < found.radius).all()


@pytest.mark.parametrize(("norm", "factor"), [("linf", 2.0), ("l1", 1.0), ("l2", 2.0)])
def test_bounds_in_the_norm_of_the_ball_are_used(norm, factor):
    """Rows of ℓ1 norm 1 (or columns, for ℓ1): the product bound is 1, the ℓ2 bound far above it."""
    torch.manual_seed(1)
    layers = []
    for _ in range(6):
        layer = nn.Linear(40, 40, bias=False)
        order = 1 if norm != "l1" else 0
        weight = torch.randn(40, 40).abs()
        layer.weight.data = weight / weight.sum(order, keepdim=True)
        layers += [layer, nn.ReLU()]
    net = nn.Sequential(*layers, nn.Flatten()).double().eval()
    found = eq.certified_radius(net, torch.rand(2, 40, dtype=torch.float64), norm=norm, effort="fast")
    assert (found.radius >= found.margins / factor * (1 - 1e-3)).all()


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.LayerNorm(64, eps=0.5), nn.Linear(64, 3)).eval()


def wide():
    """More neurons may switch than the integral and the common multipliers take."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 40, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(40 * 64, 3)).eval()


#: name: (network, keywords, what the note must say)
LEFT_OUT = {
    "integral of a wide network": (wide, {"effort": "integral"}, "neurons may switch"),
    "integral in linf": (wide, {"effort": "integral", "norm": "linf"}, "they are for ℓ2"),
    "layer norm": (normalised, {"effort": "integral"}, "no relaxation"),
    "no last layer": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.LeakyReLU()).eval(), {}, "by pairs"),
    "out of time": (wide, {"seconds": 1e-9}, "time was up"),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_said(name):
    make, keywords, text = LEFT_OUT[name]
    x = 5 * torch.ones(1, 1, 8, 8)
    x[..., ::2] *= -1
    found = eq.certified_radius(make(), x, **keywords)
    assert text in found.note
    assert float(found.radius) > 0


class OnBallsOnly(nn.Module):
    """A gate, a power and attention: no constant of the whole space."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        self.kind, self.a, self.b, self.end = kind, nn.Linear(12, 16), nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        match self.kind:
            case "gate":
                return self.end(torch.sigmoid(a) * b)
            case "power":
                return self.end(a**2 + b)
            case _:
                t = a.reshape(-1, 4, 4)
                weights = (t @ b.reshape(-1, 4, 4).mT).softmax(-1)
                return self.end((weights @ t).flatten(1))


@pytest.mark.parametrize("norm", ["l2", "linf", "l1"])
@pytest.mark.parametrize("kind", ["gate", "power", "attention"])
def test_networks_with_constants_of_balls_only_have_radii_that_hold(kind, norm):
    net, x = OnBallsOnly(kind).eval(), torch.cat([torch.randn(6, 12), torch.zeros(1, 12)])
    with pytest.raises(EquipoiseError, match="ball"):
        eq.lipschitz_bound(net, x[:1])
    found = eq.certified_radius(net, x, norm=norm)
    assert (found.radius > 0).all()
    assert "balls only" in found.note
    assert torch.equal(eq.certified_radius(net, x[2:3], norm=norm).radius, found.radius[2:3])
    assert not eq.attacks.pgd(net, x, found.labels, 0.999 * found.radius, norm=norm, steps=30).success.any()
    asked = float(found.radius[0]) * 0.9
    assert eq.certified_radius(net, x[:1], norm=norm, epsilon=asked, complete=True).verdicts == ("proved",)
    far = eq.certified_radius(net, x[:1], norm=norm, epsilon=50.0, complete=True, seconds=1.0)
    assert far.verdicts != ("proved",)


def test_right_without_a_proof_is_not_wrong():
    """A deep network whose float64 rounding cannot be bounded below its margin."""
    torch.manual_seed(0)
    layers = [part for _ in range(30) for part in (nn.Linear(50, 50), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(50, 2)).eval().requires_grad_(False)
    for part in net[:-1:2]:
        part.weight.normal_(std=0.4)
        part.weight.sub_(part.weight.mean(1, keepdim=True))
        part.bias.fill_(1.0)
    x = torch.full((1, 50), 1e-3)
    y = net.double()(x.double()).argmax(1)
    net[-1].weight.mul_(1e-3)
    found = eq.certified_radius(net, x.double(), y, effort="fast")
    if float(found.radius) == 0:
        assert found.methods == ("classified as labelled, nothing proved",)
        assert "nothing proved" in found.note
    assert bool(found.right)
    assert float(found.margins) > 0
    wrong = eq.certified_radius(net, x.double(), 1 - y, effort="fast")
    assert wrong.methods == ("not classified as labelled",)
    assert not bool(wrong.right)


NET = nn.Sequential(nn.Linear(2, 3)).eval()
ONE = torch.zeros(1, 2)
LABELS = {
    "out of range": torch.tensor([3]),
    "negative": torch.tensor([-1]),
    "too many": torch.tensor([0, 1]),
    "floats": torch.tensor([0.5]),
    "booleans": torch.tensor([True]),
    "a list": [0],
}
SETTINGS = {"ball": ["a", ONE, -1.0, math.inf], "rtol": [0.0, math.nan], "chain": ["best"], "batch_dim": [7]}
#: calls that are wrong, and a word of the sentence; None, strings and empty tensors are in `tests/test_bad_calls.py`
BAD = {
    "two inputs": (lambda: eq.certified_radius(NET, (ONE, ONE)), "one input"),
    "two inputs, local": (lambda: eq.local_lipschitz(NET, (ONE, ONE), 0.1), "one input"),
    "integer images": (lambda: eq.certified_radius(NET, ONE.byte()), "uint8"),
    "no batch": (lambda: eq.local_lipschitz(NET, ONE[0], 0.1), "batch dimension"),
    "wrong shape": (lambda: eq.certified_radius(NET, torch.zeros(1, 5)), ""),
    "seconds": (lambda: eq.certified_radius(NET, ONE, seconds="soon"), "seconds"),
    "norm": (lambda: eq.certified_radius(NET, ONE, norm="l3"), "norm"),
    "effort": (lambda: eq.certified_radius(NET, ONE, effort="more"), "effort"),
    "one class": (lambda: eq.certified_radius(nn.Sequential(nn.Linear(2, 1)), ONE), "classes"),
    "complete without a radius": (lambda: eq.certified_radius(NET, ONE, complete=True), "epsilon"),
    **{f"labels {n}": (lambda y=y: eq.certified_radius(NET, ONE, y), "labels") for n, y in LABELS.items()},
    **{f"radius {r}": (lambda r=r: eq.local_lipschitz(NET, ONE, r), "radius") for r in (math.inf, -1.0, True)},
    **{
        f"{name} {value}": (lambda name=name, value=value: eq.lipschitz_bound(NET, ONE, **{name: value}), name)
        for name, values in SETTINGS.items()
        for value in values
    },
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_refused_in_a_sentence(name):
    call, text = BAD[name]
    with pytest.raises(EquipoiseError, match=text):
        call()
