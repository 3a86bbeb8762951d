"""Audit-grade norms of convolutions: above the tight bracket's lower end, alone and with scaled rows, and not far above."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equipoise.lipschitz import lipschitz_bound
from equipoise.maps.algebra import compose
from equipoise.maps.linear import Convolution, Diagonal, convolution
from equipoise.norms.spectral import Cache, bracket
from equipoise.norms.coarse import pair, spectrum
from equipoise.norms.convolution import conv_bracket

# name: (out, in, kernel, input, stride, dilation, padding)
SHAPES = {
    "3x3 on a small image": (48, 48, (3, 3), (6, 6), 1, 1, 1),
    "3x3 on a large image": (32, 32, (3, 3), (30, 30), 1, 1, 1),
    "strided": (48, 32, (3, 3), (12, 12), 2, 1, 1),
    "dilated": (32, 36, (3, 3), (14, 14), 1, 2, 2),
    "no padding": (32, 48, (3, 3), (9, 9), 1, 1, 0),
    "oblong": (32, 32, (1, 5), (6, 30), 1, 1, 0),
    "one dimension": (48, 48, (5,), (50,), 1, 1, 2),
}
ROWS = {
    "constant": lambda n: torch.full((n,), -3.0),
    "spread": lambda n: torch.exp(torch.randn(n)),
    "zeros": lambda n: torch.arange(n).remainder(2).double(),
    "one large": lambda n: torch.cat([torch.full((1,), 1e3), torch.rand(n - 1)]),
    "tiny": lambda n: 1e-30 * torch.rand(n, dtype=torch.float64),
}


def kernel(out, inside, size, low_rank=False):
    K = torch.randn(out, inside, *size)
    return K.mean(0, keepdim=True) * torch.rand(out, 1, *[1] * len(size)) + 0.01 * K if low_rank else K


@pytest.mark.parametrize(
    ("name", "rows"), [(name, "spread") for name in SHAPES] + [("3x3 on a small image", rows) for rows in ROWS]
)
def test_both_ends_hold(name, rows):
    torch.manual_seed(0)
    co, ci, k, n, stride, dilation, padding = SHAPES[name]
    for low_rank in (False, True) if rows == "spread" else (False,):
        K = kernel(co, ci, k, low_rank)
        factor = ROWS[rows](co).double()
        geometry = ("zeros", stride, dilation, 1, [(padding, padding)] * len(k), n)
        spec = spectrum(convolution(K, *geometry), 0.05)
        assert spec is not None
        alone, together = pair(spec, factor, 0.05)
        scaled = K.double() * factor.reshape(-1, *[1] * (K.dim() - 1))
        for found, weight in ((alone, K), (together, scaled)):
            truth = conv_bracket(convolution(weight, *geometry), 1e-2)
            assert found.upper >= truth.lower
            assert found.lower <= truth.upper
            assert found.upper <= 1.15 * truth.upper


@pytest.mark.parametrize(
    "conv",
    [
        convolution(torch.randn(40, 40, 3, 3), "circular", input_size=8),
        convolution(torch.randn(40, 40, 3, 3), "zeros"),
        convolution(torch.randn(64, 32, 3, 3), "zeros", groups=2, input_size=8),
        convolution(torch.randn(64, 32, 3, 3), "zeros", input_size=8),
        convolution(torch.randn(64, 64, 1, 1), "zeros", input_size=8),
        convolution(torch.randn(40, 40, 3, 3), "zeros", input_size=2),
    ],
    ids=["circular", "unknown size", "grouped", "tall", "1x1", "small"],
)
def test_what_it_does_not_cover_is_left_to_the_general_route(conv):
    assert spectrum(conv, 0.05) is None


def test_a_changed_geometry_or_weight_has_no_origin():
    from dataclasses import replace

    form = convolution(torch.randn(32, 32, 3, 3), input_size=8)
    factor = torch.rand(32, dtype=torch.float64)
    made = compose(form, Diagonal(factor, 1))
    assert isinstance(made, Convolution)
    assert made.origin is not None
    assert made.unpadded().origin is None
    assert replace(made, weight=made.weight.clone()).origin is None


def test_a_prepared_bracket_serves_its_own_factors_only():
    torch.manual_seed(0)
    form = convolution(torch.randn(32, 32, 3, 3), input_size=8)
    cache = Cache(0.05)
    one, other = torch.rand(32, dtype=torch.float64), 5 * torch.rand(32, dtype=torch.float64)
    bracket(form, cache, one)
    for factor in (one, other):
        made = compose(form, Diagonal(factor, 1))
        tight = bracket(made, Cache(1e-3))
        assert tight.lower <= bracket(made, cache).upper <= 1.15 * tight.upper


def test_a_coarse_audit_stays_above_the_tight_one_and_fused_below_product():
    torch.manual_seed(0)
    layers = []
    for _ in range(3):
        norm = nn.BatchNorm2d(32)
        norm.running_var.copy_(torch.rand(32) + 0.1)
        norm.weight.data.copy_(torch.randn(32))
        layers += [nn.Conv2d(32, 32, 3, padding=1, bias=False), norm, nn.ReLU()]
    net, x = nn.Sequential(*layers).eval(), torch.zeros(1, 32, 10, 10)
    tight, coarse = lipschitz_bound(net, x, rtol=1e-3), lipschitz_bound(net, x, rtol=0.05)
    assert coarse.upper <= coarse.product
    for a, b in ((coarse.upper, tight.upper), (coarse.product, tight.product)):
        assert b / 1.001 <= a <= 1.15**3 * b
