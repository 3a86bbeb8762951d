"""Penalties on weights, projections and clipping: against dense matrices of the operators, like an attacker."""

import math

import pytest
import torch
from torch import nn

import equipoise.regularizers as reg
from cases import OPERATORS
from equipoise.core import InputError
from equipoise.norms import operator_matrix


def dense_norm(layer, size, p):
    shape = (layer.in_features,) if isinstance(layer, nn.Linear) else (layer.in_channels, *size)
    return float(torch.linalg.matrix_norm(operator_matrix(layer, shape), ord=p))


@pytest.mark.parametrize("p", [1, 2, math.inf])
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.id)
def test_operator_norm_is_an_upper_bound(operator, p):
    bound = float(reg.operator_norm(operator.layer, p, operator.size))
    assert bound >= dense_norm(operator.layer, operator.size, p) * (1 - 1e-12)
    if p != 2:
        assert float(reg.operator_norm(operator.layer, p)) >= bound * (
            1 - 1e-10
        )  # unknown size: less only by its rounding


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [1, 2, math.inf])
@pytest.mark.parametrize("radius", [0.1, 0.3, 1.0, 7.0])
def test_projection_keeps_its_promise(p, radius, dtype):
    torch.manual_seed(1)
    reflecting = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
    net = nn.Sequential(nn.Linear(9, 7), reflecting, nn.Conv2d(4, 4, 3, groups=2))
    net.to(dtype)
    before = [p.detach().clone() for p in net.parameters()]
    bounds = reg.project_(net, p, radius)
    again = reg.project_(net, p, radius)
    for name, bound in bounds.items():
        layer = net.get_submodule(name)
        assert float(bound) <= radius
        assert float(again[name]) == float(bound)  # a second projection changes nothing
        assert float(reg.operator_norm(layer, p)) <= radius
        size = None if isinstance(layer, nn.Linear) else (6, 6)
        assert dense_norm(layer, size, p) <= radius * (1 + 1e-12)
    if radius == 7.0 and p == 2:
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_projection_of_weights_near_the_end_of_the_numbers_keeps_their_direction(p):
    torch.manual_seed(0)
    layer = nn.Linear(5, 5, bias=False)
    direction = torch.empty_like(layer.weight).uniform_(-1, 1)
    layer.weight.data = direction * 3e38
    assert 0.69 < float(reg.project_(layer, p, 0.7)[""]) <= 0.7
    scale = layer.weight.detach().norm() / direction.norm()
    assert torch.allclose(layer.weight.detach(), direction * scale, rtol=1e-5)


def test_projection_refuses_before_it_changes_anything():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torch.nn.utils.parametrizations.weight_norm(net[1])
    before = net[0].weight.detach().clone()
    with pytest.raises(InputError, match="parametrisation"):
        reg.project_(net, 2, 1e-3)
    assert torch.equal(net[0].weight, before)
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="radius"):
            reg.project_(net, 2, wrong, names="0")
    with pytest.raises(InputError, match="p must be"):
        reg.project_(net, 3, 1.0, names="0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_clipping(dtype):
    net = nn.Linear(30, 30).to(dtype)
    reg.clip_weights_(net, 0.1)
    assert net.weight.abs().double().max().item() <= 0.1
    assert net.weight.abs().double().max().item() > 0.098


def test_frobenius_and_orthogonality():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 3), nn.Conv2d(2, 4, 3))
    total = (net[0].weight.square().sum() + net[1].weight.square().sum()).item()
    assert reg.FrobeniusPenalty(net, weight=2.0)().item() == pytest.approx(2 * total, rel=1e-6)
    W, K = net[0].weight.detach(), net[1].weight.detach().flatten(1)
    expected = sum(float((A @ A.mT - torch.eye(len(A))).square().sum()) for A in (W, K))
    assert reg.OrthogonalityPenalty(net)().item() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InputError, match="grouped"):
        reg.OrthogonalityPenalty(nn.Conv2d(4, 4, 3, groups=2))()


@pytest.mark.parametrize(
    ("target", "two_sided"), [(0.0, False), (0.5, False), (0.5, True), (100.0, False), (100.0, True)]
)
def test_input_gradient_penalty_is_that_of_every_sample_alone(target, two_sided):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(6, 4).double(), torch.randint(3, (6,))
    expected = 0.0
    for i in range(6):
        one = x[i : i + 1].clone().requires_grad_()
        (g,) = torch.autograd.grad(nn.functional.cross_entropy(net(one), y[i : i + 1]), one)
        excess = float(g.norm()) - target
        expected += (excess if two_sided else max(excess, 0.0)) ** 2 / 6
    penalty = reg.input_gradient_penalty(net, x, y, target=target, two_sided=two_sided)
    assert penalty.item() == pytest.approx(expected, rel=1e-9)
    if expected:
        penalty.backward()
        assert net[0].weight.grad.abs().sum() > 0


def test_input_gradient_penalty_at_a_flat_point_has_no_nan():
    net = nn.Linear(3, 1, bias=False)
    net.weight.data.zero_()
    penalty = reg.input_gradient_penalty(net, torch.ones(2, 3), target=1.0, two_sided=True)
    penalty.backward()
    assert penalty.item() == 1.0
    assert net.weight.grad.isfinite().all()
    with pytest.raises(InputError, match="one number per sample"):
        reg.input_gradient_penalty(nn.Linear(3, 2), torch.ones(2, 3))
