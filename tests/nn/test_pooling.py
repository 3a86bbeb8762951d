"""Pooling and rearrangements: norm at most 1 on every input size, exactly 1 where the formula says so."""

import copy

import pytest
import torch
from nn_parts import jacobian_norm, raw, worst_ratio

import equipoise.nn as eqn
from equipoise.core import InputError, Refused
from equipoise.lipschitz import lipschitz_bound

CASES = {  # layer, input shape
    "max 2": (eqn.MaxPool2d(2), (3, 6, 7)),
    "max 2 stride 3": (eqn.MaxPool2d(2, 3), (3, 6, 7)),
    "max (1, 3) padded": (eqn.MaxPool2d((2, 3), padding=1, ceil_mode=True), (2, 5, 7)),
    "average 2": (eqn.ScaledAvgPool2d(2), (3, 6, 7)),
    "average (2, 3)": (eqn.ScaledAvgPool2d((2, 3)), (2, 5, 9)),
    "average 3 stride 4": (eqn.ScaledAvgPool2d(3, 4), (1, 9, 9)),
    "norm (2, 3)": (eqn.L2NormPool2d((2, 3)), (2, 5, 9)),
    "norm 2 stride 3": (eqn.L2NormPool2d(2, 3), (2, 5, 9)),
    "global": (eqn.ScaledGlobalAvgPool2d(), (3, 5, 7)),
    "space to depth": (eqn.SpaceToDepth(2), (3, 4, 6)),
    "depth to space": (eqn.DepthToSpace(2), (8, 2, 3)),
    "pad channels": (eqn.PadChannels(5), (3, 4, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_norm(name):
    layer, shape = CASES[name]
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert 1 - 1e-7 <= jacobian_norm(layer, x) <= 1 + 1e-12
    assert worst_ratio(layer, shape, pairs=50) <= 1 + 1e-12
    assert lipschitz_bound(layer.eval(), x.float()[None]).upper <= 1 + 1e-5
    assert eqn.known_constant(layer) == 1.0


@pytest.mark.parametrize("kind", [eqn.MaxPool2d, eqn.ScaledAvgPool2d, eqn.L2NormPool2d])
def test_overlap_is_refused(kind):
    for window, stride in ((3, 2), (3, 1), ((2, 3), (2, 2))):
        with pytest.raises(Refused, match="overlaps"):
            kind(window, stride)


@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 2, 3)])
def test_batch_centering_in_training_is_a_projection_of_the_batch(shape):
    layer = eqn.BatchCentering(4, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    jacobian = torch.autograd.functional.jacobian(layer, x).reshape(x.numel(), -1)
    assert torch.allclose(jacobian @ jacobian, jacobian, atol=1e-12)
    assert torch.allclose(jacobian, jacobian.mT)
    assert float(torch.linalg.matrix_norm(jacobian, ord=2)) == pytest.approx(1)
    y = layer(x)
    assert torch.allclose(y.transpose(0, 1).flatten(1).mean(1), torch.zeros(4, dtype=torch.float64), atol=1e-12)


def test_batch_centering_in_evaluation_is_an_isometry_without_side_effects():
    layer = eqn.BatchCentering(4)
    for _ in range(200):
        layer(torch.randn(16, 4, 3, 3) + 5)
    layer.eval()
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(4, 3, 3)
    assert jacobian_norm(layer, x) == pytest.approx(1, abs=1e-6)
    assert float((layer(x[None]) - (x - 5)).detach().abs().max()) < 0.3  # the running mean was learned
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    assert lipschitz_bound(layer, x[None]).upper <= 1 + 1e-12
    with pytest.raises(InputError, match="momentum"):
        eqn.BatchCentering(4, momentum=0)
    with pytest.raises(InputError, match="expected"):
        layer(torch.zeros(2, 3))


def test_layer_centering_is_a_projection():
    for layer in (eqn.LayerCentering(), eqn.LayerCentering(3).double(), eqn.LayerCentering(3, bias=False)):
        assert jacobian_norm(layer, torch.randn(3, 2, 2, dtype=torch.float64)) == pytest.approx(1)
        with pytest.raises(InputError, match="batch dimension"):
            layer(torch.randn(3))
    with pytest.raises(InputError, match="pixels"):
        eqn.LayerCentering(3)(torch.randn(2, 4, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_rows_have_norm_one_whatever_the_raw_weight(dtype, scale):
    layer = eqn.LastLayerNormalised(7, 5, dtype=dtype)
    with torch.no_grad():
        raw(layer).mul_(scale)
    assert torch.allclose(layer.weight.double().norm(dim=1), torch.ones(5, dtype=torch.float64), atol=1e-6)
    with torch.no_grad():
        raw(layer)[2] = 0
    assert float(layer.weight[2].detach().abs().max()) == 0
    layer(torch.randn(3, 7, dtype=dtype)).sum().backward()
    assert bool(torch.isfinite(raw(layer).grad).all())
