"""BCOP and RKO on circles: every singular value is 0 or 1, and as many are 1 as the shape leaves room for.

A grid of settings, each against the singular values of the whole operator, in float64.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from nn_parts import exported

import equipoise.nn as o
from equipoise.core import Refused
from equipoise.norms.reference import operator_matrix

CHANNELS = [(4, 4), (1, 8), (8, 4)]


def room(k: int, s: int, d: int, ins: int, out: int) -> int:
    """Singular values per output pixel: the patch that is read without overlap has `min(k, s/gcd(s, d))²` pixels."""
    return min(out, ins * min(k, s // math.gcd(s, d)) ** 2)


def values(cls: type, ins: int, out: int, k: int, s: int, d: int, groups: int, n: int, p: int) -> torch.Tensor:
    torch.manual_seed(0)
    layer = cls(ins, out, k, s, p, d, groups, bias=False, padding_mode="circular", dtype=torch.float64).eval()
    return torch.linalg.svdvals(operator_matrix(exported(layer), (ins, n, n)))


def settings():
    """Kernel, stride, dilation, groups; padded so that every s-th pixel is returned, on the smallest circle that holds it."""
    for k, s, d, groups in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2), (1, 2)):
        p = d * (k - 1) // 2
        if 2 * p - d * (k - 1) - 1 >= -s:
            yield k, s, d, groups, p


@pytest.mark.parametrize(("k", "s", "d", "groups", "p"), list(settings()))
def test_bcop_on_a_circle_has_singular_values_one(k, s, d, groups, p):
    n = s * max(2, math.ceil(max(p, d * (k - 1) + 1) / s))
    for ins, out in CHANNELS if groups == 1 else CHANNELS[:1]:
        found = values(o.BCOPConv2d, ins, out, k, s, d, groups, n, p)
        ones = (n // s) ** 2 * groups * room(k, s, d, ins // groups, out // groups)
        assert float((found[:ones] - 1).abs().max()) < 1e-6
        assert float(found[0]) <= 1
        assert len(found) == ones or float(found[ones:].max()) < 1e-6


@pytest.mark.parametrize(("k", "s", "d"), [(2, 2, 1), (3, 3, 1), (2, 3, 1), (2, 2, 3), (1, 2, 1), (2, 4, 2)])
def test_rko_on_a_circle_has_singular_values_one_where_patches_do_not_meet(k, s, d):
    for p, n in ((0, 3 * s), (d * (k - 1) // 2, 3 * s)):
        for ins, out in CHANNELS:
            found = values(o.RKOConv2d, ins, out, k, s, d, 1, n, p)
            pixels = ((n + 2 * p - d * (k - 1) - 1) // s + 1) ** 2
            ones = pixels * min(out, ins * k * k)
            assert float((found[:ones] - 1).abs().max()) < 1e-6
            assert float(found[0]) <= 1


def test_without_padding_the_mode_does_not_matter():
    for cls, n in itertools.product((o.BCOPConv2d, o.RKOConv2d, o.BjorckConv2d), (4, 5)):
        layers = []
        for mode in ("zeros", "circular"):
            torch.manual_seed(0)
            layers.append(cls(3, 12, 2, 2, padding_mode=mode).eval())
        x = torch.randn(2, 3, n, n)
        assert torch.equal(layers[0](x), layers[1](x))


@pytest.mark.parametrize("cls", [o.BCOPConv1d, o.RKOConv1d])
def test_an_uneven_circle_is_refused_and_would_exceed_one(cls):
    """The exported kernel reaches beyond 1 on a circle that the stride does not divide: the refusal is no caution."""
    torch.manual_seed(0)
    layer = cls(1, 2, 3, stride=3, padding=1, padding_mode="circular", bias=False, dtype=torch.float64).eval()
    with pytest.raises(Refused, match="multiple of 3"):
        layer(torch.randn(1, 1, 4, dtype=torch.float64))
    assert float(torch.linalg.svdvals(operator_matrix(exported(layer), (1, 6)))[0]) <= 1
    assert float(torch.linalg.svdvals(operator_matrix(exported(layer), (1, 4)))[0]) > 1 + 1e-3
