"""The dense matrix of a convolution, built pixel by pixel, is the operator applied to every unit vector."""

import itertools
import math

import pytest
import torch

from equipoise.maps.linear import convolution
from equipoise.norms.convolution import materialise


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("padding", ["zeros", "circular", "reflect", "replicate"])
def test_the_matrix_is_the_operator(padding: str, dims: int) -> None:
    size, dtypes = (6, 5, 4)[:dims], (torch.float64, torch.complex128)[: 3 - dims or 1]
    for stride, dilation, groups, dtype in itertools.product((1, 2), (1, 2), (1, 2), dtypes):
        weight = torch.randn(4, 3, *(3,) * dims, dtype=dtype, generator=torch.Generator().manual_seed(0))
        conv = convolution(weight, padding, stride, dilation, groups, [(1, 1)] * dims, size)
        basis = torch.eye(math.prod(conv.input_shape), dtype=dtype).reshape(-1, *conv.input_shape)
        assert torch.allclose(materialise(conv), conv.apply(basis).flatten(1).mT, atol=1e-13)
