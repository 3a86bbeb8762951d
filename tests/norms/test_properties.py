"""Properties for arbitrary input, searched by hypothesis."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from equipoise import spectral_norm
from equipoise.norms import reference_norm

pytestmark = pytest.mark.medium

sizes = st.integers(1, 9)
seeds = st.integers(0, 2**31)
examples = settings(max_examples=60, deadline=None)


def _matrix(m: int, n: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    rank = 1 + seed % min(m, n)
    return (torch.randn(m, rank, generator=g, dtype=dtype) @ torch.randn(rank, n, generator=g, dtype=dtype)) * 10.0 ** (
        seed % 21 - 10
    )


@examples
@given(sizes, sizes, seeds, st.integers(-300, 300))
def test_scaling_by_a_power_of_two_is_exact(m: int, n: int, seed: int, power: int) -> None:
    W = _matrix(m, n, seed)
    a, b = spectral_norm(W), spectral_norm(W * 2.0**power)
    assert b.upper == a.upper * 2.0**power
    assert b.lower == a.lower * 2.0**power


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(4, 9), seeds)
def test_more_zero_padding_never_lowers_the_norm(kernel: int, channels: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    K = torch.randn(channels, channels, kernel, kernel, dtype=torch.float64)
    previous, truth = None, 0.0
    for padding in range(kernel + 1):
        layer = nn.Conv2d(channels, channels, kernel, padding=padding, bias=False, dtype=torch.float64)
        layer.weight.data = K
        now = reference_norm(layer, (channels, size, size))
        bracket = spectral_norm(layer, input_size=size, rtol=1e-3)
        assert now >= truth * (1 - 1e-12)
        assert bracket.lower <= now * (1 + 1e-12)
        assert bracket.upper >= now * (1 - 1e-12)
        if previous is not None:
            assert bracket.upper >= previous.lower
        previous, truth = bracket, now


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 12), seeds)
def test_transposed_convolution_is_the_adjoint(
    kernel: int, cin: int, cout: int, stride: int, size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = nn.ConvTranspose1d(cin, cout, kernel, stride=stride, bias=False)
    truth = reference_norm(layer, (cin, size))
    bracket = spectral_norm(layer, input_size=size, rtol=1e-3)
    assert bracket.lower <= truth * (1 + 1e-12)
    assert bracket.upper >= truth * (1 - 1e-12)
