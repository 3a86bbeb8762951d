"""Pooling and rearrangements: norm at most 1 on every input size, exactly 1 where the formula says so."""

from __future__ import annotations

import pytest
import torch
from nn_parts import jacobian_norm, worst_ratio

from equipoise.core.errors import InputError, Refused
from equipoise.lipschitz import lipschitz_bound
from equipoise.nn.constants import known_constant
from equipoise.nn.pooling import (
    DepthToSpace,
    FirstFeatures,
    L2NormPool2d,
    MaxPool2d,
    PadChannels,
    ScaledAvgPool2d,
    ScaledGlobalAvgPool2d,
    SpaceToDepth,
    SpatialShift,
)

CASES = {  # layer, input shape, norm exactly 1
    "max 2": (MaxPool2d(2), (3, 6, 7), True),
    "max 2 stride 3": (MaxPool2d(2, 3), (3, 6, 7), True),
    "max (1, 3) padded": (MaxPool2d((2, 3), padding=1, ceil_mode=True), (2, 5, 7), True),
    "average 2": (ScaledAvgPool2d(2), (3, 6, 7), True),
    "average (2, 3)": (ScaledAvgPool2d((2, 3)), (2, 5, 9), True),
    "average 3 stride 4": (ScaledAvgPool2d(3, 4), (1, 9, 9), True),
    "norm (2, 3)": (L2NormPool2d((2, 3)), (2, 5, 9), True),
    "norm 2 stride 3": (L2NormPool2d(2, 3), (2, 5, 9), True),
    "global": (ScaledGlobalAvgPool2d(), (3, 5, 7), True),
    "space to depth": (SpaceToDepth(2), (3, 4, 6), True),
    "depth to space": (DepthToSpace(2), (8, 2, 3), True),
    "shift, circle": (SpatialShift(5), (7, 4, 5), True),
    "shift, zeros": (SpatialShift(9, "zeros"), (10, 3, 4), True),
    "pad channels": (PadChannels(5), (3, 4, 4), True),
    "first features": (FirstFeatures(3), (7,), True),
}


@pytest.mark.parametrize("name", CASES)
def test_norm(name):
    layer, shape, exact = CASES[name]
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = jacobian_norm(layer, x)
    assert found <= 1 + 1e-12
    assert not exact or found >= 1 - 1e-12
    assert worst_ratio(layer, shape, pairs=50) <= 1 + 1e-12
    assert lipschitz_bound(layer.eval(), x.float()[None]).upper <= 1 + 1e-5
    assert known_constant(layer) == 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: MaxPool2d(3, 2),
        lambda: MaxPool2d((2, 3), (2, 2)),
        lambda: ScaledAvgPool2d(3, 1),
        lambda: L2NormPool2d(3, 2),
    ],
)
def test_overlap_is_refused(make):
    with pytest.raises(Refused, match="overlaps"):
        make()


def test_the_refusal_names_the_true_constant():
    with pytest.raises(Refused, match="√4"):
        MaxPool2d(3, 2)


def test_bad_sizes():
    with pytest.raises(InputError, match="do not fit"):
        PadChannels(2)(torch.zeros(1, 3, 2, 2))
    with pytest.raises(InputError, match="fewer"):
        FirstFeatures(5)(torch.zeros(1, 3))
