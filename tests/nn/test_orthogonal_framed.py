"""SOC, Cayley and BRO convolutions, also transposed, against the dense Jacobian in float64, over a grid of settings.

Shapes are those of the plain layer, no singular value exceeds 1 or the layer's own bound, and a transposed layer is an adjoint.
"""

import itertools

import pytest
import torch
from nn_parts import exported
from torch import nn

import equipoise.nn as o
from equipoise.norms import operator_matrix

PLAIN = {
    o.SOCConv2d: nn.Conv2d, o.CayleyConv2d: nn.Conv2d, o.BROConv2d: nn.Conv2d, o.SOCConvTranspose2d: nn.ConvTranspose2d,
    o.CayleyConvTranspose2d: nn.ConvTranspose2d,
}  # fmt: skip
#: (kernel, stride, dilation, padding, output_padding): even kernels, strides with dilations, padding none, half, full
SETTINGS = [
    (1, 1, 1, 0, 0), (2, 1, 1, 1, 0), (3, 1, 2, 2, 0), (4, 1, 1, 3, 0), (2, 2, 1, 0, 0), (3, 2, 1, 1, 1), (4, 2, 1, 1, 0),
    (3, 2, 2, 2, 1), (2, 3, 2, 1, 2), (3, 2, 3, 3, 0), (3, 3, 3, 2, 1), (2, 4, 2, 0, 3),
]  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("cls", PLAIN, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(("k", "s", "d", "p", "extra"), SETTINGS)
def test_no_singular_value_exceeds_one_or_the_bound(cls, k, s, d, p, extra):
    transposed, done = PLAIN[cls] is nn.ConvTranspose2d, 0
    more = {"output_padding": extra} if transposed else {}
    for (ins, out), groups, size, mode in itertools.product(
        [(4, 4), (2, 6), (6, 2)], (1, 2), [(3, 4), (6, 12)], ("zeros",) if transposed else ("zeros", "circular")
    ):
        torch.manual_seed(0)
        options = dict(stride=s, padding=p, dilation=d, groups=groups, bias=False, padding_mode=mode, **more)
        if mode == "circular" and (2 * p > d * (k - 1) or any(n % s or n < d * (k - 1) for n in size)):
            continue  # refused: see the tests of refusals
        layer = cls(ins, out, k, dtype=torch.float64, **options).eval()
        plain = PLAIN[cls](ins, out, k, dtype=torch.float64, **options)
        x = torch.randn(1, ins, *size, dtype=torch.float64)
        try:
            wanted = plain(x).shape
        except RuntimeError:  # an image smaller than the kernel
            continue
        assert layer(x).shape == wanted
        largest = float(torch.linalg.svdvals(operator_matrix(layer, (ins, *size)))[0])
        assert largest <= min(1 + 1e-12, float(layer.lipschitz_upper((ins, *size)).value) * (1 + 1e-13))
        done += 1
    assert done >= 6


@pytest.mark.parametrize(("k", "s", "d", "p", "extra"), SETTINGS)
def test_a_transposed_series_is_the_adjoint_of_one(k, s, d, p, extra):
    """`exp(A)ᵀ = exp(−A)`: the convolution back, with the raw kernel negated."""
    up = o.SOCConvTranspose2d(6, 4, k, s, p, extra, 2, False, d, dtype=torch.float64).eval()
    down = o.SOCConv2d(4, 6, k, s, p, d, 2, False, dtype=torch.float64).eval()
    with torch.no_grad():
        down.raw.copy_(-up.raw)
    image = up(torch.zeros(1, 6, 4, 5, dtype=torch.float64)).shape[1:]
    assert (operator_matrix(up, (6, 4, 5)) - operator_matrix(down, image).T).abs().max() < 1e-12


@pytest.mark.parametrize("cls", [o.BCOPConv1d, o.RKOConv1d, o.BCOPConv2d, o.RKOConv2d, o.BjorckConv2d])
@pytest.mark.parametrize(("k", "s"), [(3, 3), (2, 2), (3, 2), (4, 3)])
def test_a_strided_layer_on_a_circle_is_a_contraction_on_every_size(cls, k, s):
    """On a circle that the stride does not divide patches meet that do not meet elsewhere."""
    torch.manual_seed(0)
    options = {"padding_mode": "circular", "bias": False, "dtype": torch.float64}
    layer = cls(1, 4, k, stride=s, padding=(k - 1) // 2, **options).eval()
    for n in (4, 5, 6, 7):
        shape = (1, n) if cls.__name__.endswith("1d") else (1, n, n)
        assert float(torch.linalg.svdvals(operator_matrix(exported(layer), shape))[0]) <= 1


@pytest.mark.parametrize(("k", "s", "d"), [(2, 2, 1), (3, 3, 1), (2, 3, 1), (2, 2, 3), (1, 2, 1), (2, 4, 2)])
@pytest.mark.parametrize("cls", [o.BCOPConv2d, o.RKOConv2d])
def test_patches_that_do_not_meet_keep_lengths(cls, k, s, d):
    """Zero padding of none: every patch is read once, so that all singular values are 1."""
    for ins, out in [(4, 4), (1, 8), (8, 4)]:
        torch.manual_seed(0)
        layer = cls(ins, out, k, s, 0, d, bias=False, dtype=torch.float64).eval()
        n = 3 * s + d * (k - 1)
        singular = torch.linalg.svdvals(operator_matrix(exported(layer), (ins, n, n)))
        assert float((singular[singular > 1e-6] - 1).abs().max()) < 1e-6
