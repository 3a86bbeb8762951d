"""Convolutions in three dimensions: the operator written out as a matrix."""

from __future__ import annotations

import pytest
import torch
from nn_parts import exported, upper

import equipoise.nn as eqn
from equipoise.core import Refused
from equipoise.norms import operator_matrix

LAYERS = {"sn": eqn.SNConv3d, "aol": eqn.AOLConv3d, "sr": eqn.SRConv3d, "rko": eqn.RKOConv3d, "bcop": eqn.BCOPConv3d}
GEOMETRIES = {
    "zeros": {"kernel_size": 2, "padding": 1},
    "circle": {"kernel_size": (3, 1, 2), "padding": (1, 0, 0), "padding_mode": "circular"},
    "stride": {"kernel_size": 2, "stride": 2},
    "groups": {"kernel_size": (2, 1, 2), "groups": 2, "dilation": (2, 1, 1)},
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("name", LAYERS)
def test_norm_is_at_most_one_and_not_far_below(name, geometry):
    torch.manual_seed(0)
    layer = LAYERS[name](2, 4, bias=False, **GEOMETRIES[geometry])
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    shape = (2, 4, 3, 4)
    norm = float(torch.linalg.matrix_norm(operator_matrix(exported(layer).double(), shape), 2))
    assert 0.4 < norm <= 1 + 1e-5
    assert norm <= upper(layer, shape) <= 1 + 1e-5
    x = torch.randn(1, *shape)
    torch.testing.assert_close(layer(x), exported(layer)(x))


def test_tables_that_would_fill_the_memory_are_refused():
    layer = eqn.SRConv3d(2, 2, 3, t=5)
    with pytest.raises(Refused, match="fewer steps"):
        layer(torch.zeros(1, 2, 4, 4, 4))
