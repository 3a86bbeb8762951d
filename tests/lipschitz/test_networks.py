"""Whole networks under attack: a bound that is exceeded fails the build."""

import json
import math

import pytest
import torch
from lipschitz_attacks import attack
from lipschitz_nets import Op, networks
from torch import nn

from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise_lab.bench import lipschitz as bench

pytestmark = pytest.mark.medium

NETS = networks()
#: networks whose adjacent linear maps are better bounded together
FUSED = ("vgg", "resnet projection", "repvgg", "normalised", "reflect", "bottleneck linear")


@pytest.mark.parametrize("name", NETS)
def test_no_attack_exceeds_the_bound(name):
    net, shape, ball = NETS[name]
    report = lipschitz_bound(net, torch.zeros(2, *shape), ball=ball)
    found = attack(net, shape, ball, 0, steps=30)
    assert found <= report.upper * (1 + 1e-7)
    assert report.upper <= report.fused <= report.product * (0.98 if name in FUSED else 1)
    assert found > 0
    assert "at most" in str(report)
    if ball is None and name != "shared, tuple":
        program = torch.export.export(net, (torch.zeros(1, *shape),), strict=False)
        assert lipschitz_bound(program, rtol=1e-3).upper == pytest.approx(report.upper, rel=1e-6)


def test_a_linear_run_is_as_good_as_its_product_matrix():
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    W = torch.eye(8, dtype=torch.float64)
    for layer in net:
        W = layer.weight.detach().double() @ W
    exact = float(torch.linalg.matrix_norm(W, ord=2))
    assert exact <= lipschitz_bound(net, torch.zeros(1, 8)).upper <= exact * 1.002


@pytest.mark.parametrize(
    ("times", "function"),
    [(0, lambda y: y + (1 - y)), (2, lambda y: y + (y + 1)), (0, lambda y: y - (y - 1)), (2, lambda y: (2 - y) + (3 - y)),
     (0, lambda y: y.add(y, alpha=-1))],
)  # fmt: skip
def test_parallel_linear_branches_keep_their_signs(times, function):
    layer = nn.Linear(4, 4, bias=False)
    exact = times * float(torch.linalg.matrix_norm(layer.weight.detach().double(), ord=2))
    net = nn.Sequential(layer, Op(function)).eval()
    assert lipschitz_bound(net, torch.zeros(1, 4)).upper >= exact * (1 - 1e-9)


def test_totals_beyond_the_floats_stay_finite_in_the_log_domain():
    layer = nn.Linear(4, 4)
    layer.weight.data.mul_(1e6)
    net = nn.Sequential(*[m for _ in range(100) for m in (layer, nn.ReLU())])
    report = lipschitz_bound(net, torch.zeros(1, 4))
    assert report.upper == math.inf
    assert 1000 < report.log_upper < 2000
    assert "e+" in str(report)
    assert json.loads(report.to_json())["upper"] is None


def test_two_inputs_count_jointly():
    class Sum(nn.Module):
        def forward(self, a, b):
            return 3 * a - b

    report = lipschitz_bound(Sum().eval(), (torch.zeros(1, 4), torch.zeros(1, 4)))
    assert math.sqrt(10) <= report.upper <= 4.0001


def test_the_shares_add_up_and_name_the_worst_layer():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[2].weight.data.mul_(1000)
    report = lipschitz_bound(net, torch.zeros(1, 4))
    assert sum(abs(r.share) for r in report.layers) == pytest.approx(1)
    assert report.fix_first(1)[0].name == "2"
    net, shape, _ = NETS["resnet identity"]
    assert "sum" not in {row.kind for row in lipschitz_bound(net, torch.zeros(1, *shape)).fix_first(99)}
    assert report.to_dict()["fix_first"][0] == "2"


def test_fusing_wins_orders_of_magnitude_and_brackets_agree(data_dir, monkeypatch):
    if not (data_dir / "cifar10-resnet20.safetensors").exists():
        pytest.skip("no trained CIFAR ResNets: set EQUIPOISE_DATA")
    monkeypatch.setenv("EQUIPOISE_DATA", str(data_dir))
    net = bench.trained_resnet(20)
    torch.manual_seed(0)
    x = torch.randn(1, 3, 32, 32)
    report = lipschitz_bound(net, x, rtol=1e-2)
    assert report.log_upper < report.log_product - 5
    assert len([r for r in report.layers if r.kind == "convolution"]) == 19
    bracket = local_lipschitz(net, x, 0.05, steps=3, rtol=1e-2)
    assert 0 < float(bracket.lower) <= float(bracket.upper) < report.upper
