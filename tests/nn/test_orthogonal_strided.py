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
    for k, s, d, groups in itertools.product((1, 2, 3, 4), (1,), (1, 2), (1, 2)):
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


@pytest.mark.parametrize("cls", [o.BCOPConv1d, o.RKOConv1d, o.BCOPConv2d, o.RKOConv2d, o.BjorckConv2d])
@pytest.mark.parametrize(("k", "s"), [(3, 3), (2, 2), (3, 2), (4, 3)])
def test_a_strided_layer_on_a_circle_is_a_contraction_on_every_size(cls, k, s):
    """On a circle that the stride does not divide patches meet that do not meet elsewhere."""
    torch.manual_seed(0)
    layer = cls(
        1, 4, k, stride=s, padding=(k - 1) // 2, padding_mode="circular", bias=False, dtype=torch.float64
    ).eval()
    for n in (4, 5, 6, 7):
        shape = (1, n) if cls.__name__.endswith("1d") else (1, n, n)
        assert float(torch.linalg.svdvals(operator_matrix(exported(layer), shape))[0]) <= 1


@pytest.mark.parametrize(("k", "s", "d"), [(2, 2, 1), (3, 3, 1), (2, 3, 1), (2, 2, 3), (1, 2, 1), (2, 4, 2)])
@pytest.mark.parametrize("cls", [o.BCOPConv2d, o.RKOConv2d])
def test_patches_that_do_not_meet_keep_lengths(cls, k, s, d):
    """Zero padding of none: every patch is read once, so that all singular values are 1."""
    for ins, out in CHANNELS:
        torch.manual_seed(0)
        layer = cls(ins, out, k, s, 0, d, bias=False, dtype=torch.float64).eval()
        n = 3 * s + d * (k - 1)
        singular = torch.linalg.svdvals(operator_matrix(exported(layer), (ins, n, n)))
        assert float((singular[singular > 1e-6] - 1).abs().max()) < 1e-6
