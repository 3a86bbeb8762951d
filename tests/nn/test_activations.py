"""Activations: one row per activation, all rows through the same checks."""

import pytest
import torch
from nn_parts import jacobian_norm, worst_ratio
from torch import nn

from equipoise.core import InputError, Refused
from equipoise.lipschitz import lipschitz_bound
from equipoise.nn import activations as acts

CASES = {
    "maxmin": (lambda: acts.MaxMin(), True),
    "maxmin last": (lambda: acts.MaxMin(-1), True),
    "half abs": (lambda: acts.BetaAbs(), True),
    "abs": (lambda: acts.BetaAbs(1.0, -1), True),
    "groupsort 2": (lambda: acts.GroupSort(2), True),
    "groupsort 4": (lambda: acts.GroupSort(4), True),
    "fullsort": (lambda: acts.GroupSort(None), True),
    "householder": (lambda: turned(acts.HouseholderActivation(8)), True),
    **{
        f"contracted {curve!r}": (lambda curve=curve: acts.Contracted(curve), False)
        for curve in (nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.SELU(), nn.Hardswish())
    },
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
    assert lipschitz_bound(layer, torch.zeros(1, *shape)).upper <= 1 + 1e-6
    x = torch.randn(50, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if preserves:  # the Jacobian is orthogonal, and σ(0) = 0: norms stay, they are not scaled by 0.707
        assert torch.allclose(layer(x).flatten(1).norm(dim=1), x.flatten(1).norm(dim=1), rtol=1e-12)
        assert jacobian_norm(layer, x[0]) == pytest.approx(1, rel=1e-12)


def test_householder_is_continuous_learns_and_starts_as_maxmin():
    layer = acts.HouseholderActivation(8, dtype=torch.float64)
    x = torch.randn(30, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(layer(x), acts.MaxMin()(x))
    assert torch.autograd.gradcheck(layer, x[:2].clone().requires_grad_())
    layer(x).square()[:, 0].sum().backward()
    assert float(layer.theta.grad.abs().sum()) > 0


def test_refusals():
    with pytest.raises(InputError, match="divisible by 2"):
        acts.MaxMin()(torch.zeros(1, 3))
    with pytest.raises(InputError, match="even"):
        acts.HouseholderActivation(3)
    with pytest.raises(InputError, match="expected 4 channels"):
        acts.HouseholderActivation(4)(torch.zeros(1, 6))
    with pytest.raises(Refused, match="not known"):
        acts.Contracted(nn.Linear(2, 2))
    with pytest.raises(InputError, match="got 'swoosh'"):
        acts.activation("swoosh")
    assert acts.slopes(nn.Softplus(threshold=1)) is None
    assert all(isinstance(make(), nn.Module) for make in acts.ACTIVATIONS.values())
