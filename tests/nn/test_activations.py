"""Activations: one row per activation, all rows through the same checks."""

from __future__ import annotations

import pytest
import torch
from nn_parts import jacobian_norm, worst_ratio
from torch import nn

from equipoise.core import InputError, Refused
from equipoise.lipschitz import lipschitz_bound
from equipoise.nn.activations import (
    ACTIVATIONS,
    BetaAbs,
    Contracted,
    GroupSort,
    HouseholderActivation,
    MaxMin,
    activation,
    slopes,
)

CASES = {
    "maxmin": (lambda: MaxMin(), True),
    "maxmin last": (lambda: MaxMin(-1), True),
    "half abs": (lambda: BetaAbs(), True),
    "abs": (lambda: BetaAbs(1.0, -1), True),
    "groupsort 2": (lambda: GroupSort(2), True),
    "groupsort 4": (lambda: GroupSort(4), True),
    "fullsort": (lambda: GroupSort(None), True),
    "householder": (lambda: turned(HouseholderActivation(8)), True),
    "contracted gelu": (lambda: Contracted(nn.GELU()), False),
    "contracted gelu tanh": (lambda: Contracted(nn.GELU("tanh")), False),
    "contracted silu": (lambda: Contracted(nn.SiLU()), False),
    "contracted mish": (lambda: Contracted(nn.Mish()), False),
    "contracted selu": (lambda: Contracted(nn.SELU()), False),
    "contracted hardswish": (lambda: Contracted(nn.Hardswish()), False),
}


def turned(layer):
    """Random angles, so that nothing is accidentally MaxMin."""
    with torch.no_grad():
        layer.theta.copy_(torch.linspace(-9, 7, layer.theta.numel()))
    return layer


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(8,), (8, 3, 8)])
def test_one_lipschitz(name, shape):
    make, preserves = CASES[name]
    layer = make().double().eval()
    assert worst_ratio(layer, shape) <= 1 + 1e-12
    x = torch.randn(50, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if preserves:  # the Jacobian is orthogonal, and σ(0) = 0: norms stay, they are not scaled by 0.707
        assert torch.allclose(layer(x).flatten(1).norm(dim=1), x.flatten(1).norm(dim=1), rtol=1e-12)
        assert jacobian_norm(layer, x[0]) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_audit_sees_one(name):
    layer = CASES[name][0]().eval()
    assert lipschitz_bound(layer, torch.zeros(1, 8, 4, 8)).upper <= 1 + 1e-6


def test_householder_is_continuous_learns_and_starts_as_maxmin():
    layer = HouseholderActivation(8, dtype=torch.float64)
    x = torch.randn(30, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(layer(x), MaxMin()(x))
    assert torch.autograd.gradcheck(layer, x[:2].clone().requires_grad_())
    layer(x).square()[:, 0].sum().backward()
    assert float(layer.theta.grad.abs().sum()) > 0


@pytest.mark.parametrize(
    "name", ["gelu", "silu", "mish", "selu", "elu", "softplus", "celu", "hardswish", "tanh", "gelu tanh"]
)
def test_slopes_enclose_what_a_fine_grid_shows(name):
    layers = {
        "mish": nn.Mish(),
        "selu": nn.SELU(),
        "celu": nn.CELU(),
        "hardswish": nn.Hardswish(),
        "gelu tanh": nn.GELU("tanh"),
    }
    layer = layers.get(name) or activation(name)
    x = torch.linspace(-12, 12, 400_001, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(layer(x).sum(), x)
    low, high = slopes(layer)
    assert low <= float(g.min()) + 1e-12
    assert high >= float(g.max()) - 1e-12
    assert high <= float(g.max()) + 1e-4


def test_refusals():
    with pytest.raises(InputError, match="divisible by 2"):
        MaxMin()(torch.zeros(1, 3))
    with pytest.raises(InputError, match="even"):
        HouseholderActivation(3)
    with pytest.raises(InputError, match="expected 4 channels"):
        HouseholderActivation(4)(torch.zeros(1, 6))
    with pytest.raises(Refused, match="not known"):
        Contracted(nn.Linear(2, 2))
    with pytest.raises(InputError, match="got 'swoosh'"):
        activation("swoosh")
    assert slopes(nn.Softplus(threshold=1)) is None
    assert all(isinstance(make(), nn.Module) for make in ACTIVATIONS.values())
