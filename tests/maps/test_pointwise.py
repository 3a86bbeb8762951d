"""The one table of activations: every row is attacked on a grid, and against PyTorch's own module."""

import math

import pytest
import torch
from torch import nn

from equipoise.maps import pointwise
from equipoise.maps.pointwise import TABLE, Pointwise, read_activation

X = torch.cat([torch.linspace(-40, 40, 40_001), torch.linspace(-1e-3, 1e-3, 401)]).double().unique()
ROWS: dict[str, Pointwise] = {
    **TABLE,
    "gelu": pointwise.gelu(), "gelu tanh": pointwise.gelu("tanh"), "leaky": pointwise.hinge(0.1),
    "steep": pointwise.hinge(-2.0), "elu": pointwise.elu(), "elu 2": pointwise.elu(2.0),
    "scaled elu": pointwise.elu(0.5, 1.5, 2.0),
    "celu": pointwise.celu(0.5), "softplus": pointwise.softplus(), "sharp softplus": pointwise.softplus(7.0),
    "clamp": pointwise.clamp(-1.0, 2.0), "clamp above": pointwise.clamp(0.5, None), "softshrink": pointwise.softshrink(),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_the_row_holds_on_a_grid(name):
    curve = ROWS[name]
    y = curve.value(X)
    low, high = curve.slopes
    gap = X[1:] - X[:-1]
    room = 1e-12 * (1 + y.abs().amax())
    assert bool((y[1:] - y[:-1] <= high * gap + room).all())
    assert bool((y[1:] - y[:-1] >= low * gap - room).all())
    assert abs(float(curve.value(torch.zeros(1, dtype=torch.float64)))) <= curve.at_zero
    assert float(y.abs().max()) <= curve.peak
    at = X.clone().requires_grad_()
    (tangent,) = torch.autograd.grad(curve.value(at).sum(), at)
    if math.isfinite(curve.curvature):
        assert bool(((tangent[1:] - tangent[:-1]).abs() <= curve.curvature * gap + 1e-9).all())
    if curve.homogeneous:
        assert torch.allclose(curve.value(3 * X), 3 * y, rtol=1e-14)


MODULES = [
    nn.Identity(), nn.ReLU(), nn.ReLU6(), nn.Tanh(), nn.Sigmoid(), nn.Softsign(), nn.LogSigmoid(), nn.Hardsigmoid(), nn.SiLU(),
    nn.Mish(), nn.SELU(), nn.Hardswish(), nn.Tanhshrink(), nn.LeakyReLU(0.3), nn.ELU(1.5), nn.CELU(0.7), nn.GELU(),
    nn.GELU("tanh"),     nn.Softplus(2.0), nn.Hardtanh(-0.5, 2.0), nn.Softshrink(0.3),
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=repr)
def test_modules_are_read_as_what_they_compute(module):
    curve = read_activation(module)
    assert curve is not None
    assert torch.allclose(curve.value(X), module(X), rtol=1e-12, atol=3e-9)


class Other(nn.ReLU):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize(
    "module", [nn.Softplus(threshold=10), nn.CELU(-1.0), nn.Linear(1, 1), nn.Hardshrink(), Other()], ids=repr
)
def test_other_modules_are_not(module):
    assert read_activation(module) is None
