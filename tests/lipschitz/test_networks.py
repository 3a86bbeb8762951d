"""Whole networks under attack: a bound that is exceeded fails the build."""

from __future__ import annotations

import json
import math

import pytest
import torch
from lipschitz_attacks import attack
from lipschitz_nets import networks
from torch import nn

from equipoise.lipschitz import lipschitz_bound

pytestmark = pytest.mark.medium

NETS = networks()


@pytest.mark.parametrize("name", NETS)
def test_no_attack_exceeds_the_bound(name):
    net, shape, ball = NETS[name]
    report = lipschitz_bound(net, torch.zeros(2, *shape), ball=ball)
    found = attack(net, shape, ball, 0, steps=30)
    assert found <= report.upper * (1 + 1e-7)
    assert report.upper <= report.fused <= report.product
    assert found > 0
    assert "at most" in str(report)


@pytest.mark.parametrize("name", ["vgg", "resnet projection", "repvgg", "normalised", "reflect", "bottleneck linear"])
def test_fusing_gains(name):
    net, shape, ball = NETS[name]
    report = lipschitz_bound(net, torch.zeros(1, *shape), ball=ball)
    assert report.fused < 0.98 * report.product


def test_the_hook_and_the_other_forward_are_seen():
    plain = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    before = lipschitz_bound(plain, torch.zeros(1, 6)).product
    plain[0].register_forward_hook(lambda module, args, output: output * 10)
    assert lipschitz_bound(plain, torch.zeros(1, 6)).product == pytest.approx(10 * before, rel=1e-6)


def test_a_shared_module_counts_twice_in_the_product():
    layer = nn.Linear(5, 5)
    one = lipschitz_bound(layer, torch.zeros(1, 5)).product
    two = lipschitz_bound(nn.Sequential(layer, nn.ReLU(), layer), torch.zeros(1, 5)).product
    assert two == pytest.approx(one**2, rel=1e-9)


def test_a_linear_run_is_as_good_as_its_product_matrix():
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    W = torch.eye(8, dtype=torch.float64)
    for layer in net:
        W = layer.weight.detach().double() @ W
    exact = float(torch.linalg.matrix_norm(W, ord=2))
    assert exact <= lipschitz_bound(net, torch.zeros(1, 8)).upper <= exact * 1.002


def test_parallel_linear_branches_keep_their_signs():
    class Signs(nn.Module):
        def __init__(self, sign):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.sign = sign

        def forward(self, x):
            y = self.a(x)
            return {
                "-": y + (1 - y),
                "+": y + (y + 1),
                "sub": y - (y - 1),
                "r": (2 - y) + (3 - y),
                "n": y.add(y, alpha=-1),
            }[self.sign]

    for sign, times in {"-": 0, "+": 2, "sub": 0, "r": 2, "n": 0}.items():
        net = Signs(sign).eval()
        exact = times * float(torch.linalg.matrix_norm(net.a.weight.detach().double(), ord=2))
        assert lipschitz_bound(net, torch.zeros(1, 4)).upper >= exact * (1 - 1e-9), sign


def test_unequal_pieces_on_a_ball():
    class Uneven(nn.Module):
        def forward(self, x):
            small, large = x.split([1, 7], 1)
            return large * large.flip(1) * small

    net = Uneven().eval()
    assert attack(net, (8,), 3.0) <= lipschitz_bound(net, torch.zeros(1, 8), ball=3.0).upper


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
    page = report.to_html("<audit>")
    assert "&lt;audit&gt;" in page
    assert page.count("<tr>") == len(report.layers) + 1


def test_the_exported_program_gives_the_same_bound(tmp_path):
    net, shape, _ = NETS["resnet identity"]
    program = torch.export.export(net, (torch.zeros(1, *shape),), strict=False)
    assert lipschitz_bound(program).upper == pytest.approx(lipschitz_bound(net, torch.zeros(1, *shape)).upper)
