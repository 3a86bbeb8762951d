"""Linear maps against the layers they describe: applied, turned round, made non-negative, composed and added."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from cases import OPERATORS
from equipoise.maps import Diagonal, Linear, Matrix, Padding, add, compose, convolution, read
from equipoise.norms.induced import induced_norm, map_norm
from equipoise.norms.spectral import Cache, bracket


def dense(form: Linear, shape: tuple[int, ...]) -> torch.Tensor:
    """The matrix of a map, column by column."""
    basis = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    return form.apply(basis).flatten(1).mT


@pytest.mark.parametrize("case", OPERATORS[::2], ids=lambda case: case.id)
def test_a_layer_is_read_as_the_map_it_computes(case):
    form = read(case.layer.double(), case.size)
    x = torch.randn(2, *case.input_shape, dtype=torch.float64)
    y = case.layer(x)
    assert torch.allclose(form.apply(x), y, atol=1e-12)
    other = torch.randn_like(y)
    turned = form.adjoint()
    assert torch.allclose((form.apply(x) * other).sum(), (x * turned.apply(other)).sum(), atol=1e-9)
    assert turned.adjoint() == form
    assert bool((form.magnitude().apply(x.abs()) >= y.abs() - 1e-12).all())


@pytest.mark.parametrize("padding", ["zeros", "circular", "reflect", "replicate"])
def test_norms_of_a_padding_are_those_of_its_matrix(padding):
    form = Padding(((2, 1), (0, 3)), (4, 5), padding)
    M = dense(form, (1, 4, 5))
    assert torch.equal(dense(form.adjoint(), (1, 7, 8)), M.mT)
    found = bracket(form, Cache())
    assert float(found.lower) <= float(torch.linalg.matrix_norm(M, 2)) * (1 + 1e-12)
    assert float(found.upper) >= float(torch.linalg.matrix_norm(M, 2)) * (1 - 1e-14)
    assert float(map_norm(form, "l1").upper) == float(M.abs().sum(0).max())
    assert float(map_norm(form, "linf").upper) == float(M.abs().sum(1).max())


def _conv(*shape: int, size: tuple[int, int] = (5, 6), **options: object):
    return convolution(torch.randn(*shape, dtype=torch.float64), input_size=size, **options)  # type: ignore[arg-type]


def _channels(n: int):
    return Diagonal(torch.randn(n, dtype=torch.float64), 1)


NONE = [(0, 0), (0, 0)]
#: name: (first, then, whether there is one map for both, shape of the input)
PAIRS = {
    "matrices": (lambda: Matrix(torch.randn(4, 3)), lambda: Matrix(torch.randn(2, 4)), True, (3,)),
    "factor after matrix": (lambda: Matrix(torch.randn(4, 3)), lambda: Diagonal(torch.randn(4), -1), True, (3,)),
    "factor before matrix": (lambda: Diagonal(torch.randn(3), -1), lambda: Matrix(torch.randn(4, 3)), True, (3,)),
    "factors": (lambda: _channels(3), lambda: Diagonal(torch.randn(1), 1), True, (3, 5, 6)),
    "convolution then channels": (lambda: _conv(4, 3, 3, 3), lambda: _channels(4), True, (3, 5, 6)),
    "channels then grouped": (lambda: _channels(6), lambda: _conv(4, 3, 3, 3, groups=2), True, (6, 5, 6)),
    "1×1 after": (lambda: _conv(4, 3, 3, 3, padding="reflect"), lambda: _conv(2, 4, 1, 1), True, (3, 5, 6)),
    "1×1 before": (lambda: _conv(4, 3, 1, 1), lambda: _conv(2, 4, 3, 3, stride=2), True, (3, 5, 6)),
    "padding then valid": (lambda: Padding(((1, 2), (1, 1)), (5, 6), "circular"),
                           lambda: _conv(2, 3, 3, 3, amount=NONE, size=(8, 8)), True, (3, 5, 6)),
    "transposed then channels": (lambda: _conv(4, 3, 3, 3, stride=2).adjoint(), lambda: _channels(3), True, (4, 3, 3)),
    "channels then transposed": (lambda: _channels(4), lambda: _conv(4, 3, 3, 3, stride=2).adjoint(), True, (4, 3, 3)),
    "two convolutions": (lambda: _conv(4, 3, 3, 3), lambda: _conv(2, 4, 3, 3), False, (3, 5, 6)),
    "wrong channels": (lambda: _conv(4, 3, 3, 3), lambda: Diagonal(torch.randn(6), -1), False, (3, 5, 6)),
    "cropping": (lambda: Padding(((-1, 0), (0, 0)), (5, 6), "zeros"),
                 lambda: _conv(2, 3, 3, 3, amount=NONE, size=(4, 6)), False, (3, 5, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_composition_is_the_product_up_to_its_error(name):
    torch.manual_seed(0)
    first, then, possible, shape = (part() if callable(part) else part for part in PAIRS[name])
    found = compose(first, then)
    assert (found is not None) == possible
    if found is not None:
        one, two = (_wide(form) for form in (first, then))
        M = dense(two, one.apply(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:]) @ dense(one, shape)
        gap = torch.linalg.matrix_norm(dense(found, shape) - M, 2)
        assert float(gap) <= found.error + 1e-13 * float(torch.linalg.matrix_norm(M, 2))
        assert 0 <= found.error < 1e-9
        upper = float(bracket(found, Cache()).upper)
        assert upper >= float(torch.linalg.matrix_norm(M, 2)) * (1 - 1e-12)


def _wide(form: Linear) -> Linear:
    if isinstance(form, Matrix):
        return Matrix(form.matrix.double())
    return Diagonal(form.factor.double(), form.dim) if isinstance(form, Diagonal) else form


SUMS = {
    "matrices": (Matrix(torch.randn(3, 3)), Matrix(torch.eye(3)), (3,)),
    "grouped and channels": (_conv(6, 3, 3, 3, groups=2), Diagonal(torch.randn(6, dtype=torch.float64), 1), (6, 5, 6)),
    "two kernels, one stride": (_conv(4, 3, 5, 3, stride=2), _conv(4, 3, 1, 3, stride=2), (3, 5, 6)),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_one_map(name):
    a, b, shape = SUMS[name]
    for found in (add(a, b), add(b, a)):
        M = dense(_wide(a), shape) + dense(_wide(b), shape)
        assert float(torch.linalg.matrix_norm(dense(found, shape) - M, 2)) <= found.error + 1e-12
    assert add(_conv(4, 3, 3, 3), _conv(4, 3, 3, 3, padding="circular")) is None
    assert add(_conv(4, 3, 3, 3, dilation=2), _conv(4, 3, 3, 3)) is None


def _rewritten(**values: object) -> nn.Conv2d:
    layer = nn.Conv2d(2, 3, 3, padding=1, bias=False, dtype=torch.float64)
    for name, value in values.items():
        setattr(layer, name, value)
    return layer


#: attributes that were written to after the constructor: the reader must see what the forward pass sees
REWRITTEN = {
    "padding": _rewritten(padding=(2, 0)),
    "padding as one number": _rewritten(padding=2),
    "padding named": _rewritten(padding="same", dilation=2),
    "no padding": _rewritten(padding="valid"),
    "stride as one number": _rewritten(stride=2),
    "mode": _rewritten(padding_mode="circular", padding=(0, 0)),
    "private padding": _rewritten(_reversed_padding_repeated_twice=[0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_the_reader_sees_what_the_forward_pass_does(name):
    layer = REWRITTEN[name]
    x = torch.randn(1, 2, 6, 5, dtype=torch.float64)
    assert torch.allclose(read(layer, (6, 5)).apply(x), layer(x), atol=1e-12)


def test_sums_of_a_reflecting_layer_of_unknown_size_claim_no_more_than_they_reach():
    layer = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect", bias=False, dtype=torch.float64).requires_grad_(False)
    x = torch.sign(functional.pad(layer.weight.detach().flip(2, 3), (9, 9, 9, 9)))
    reached = float(layer(x).abs().max() / x.abs().max())
    top = float(layer.weight.abs().sum())
    for order in ("l1", "linf"):
        found = induced_norm(layer, order)
        assert float(found.lower) <= top * (1 + 1e-12)
        assert float(found.upper) >= max(reached, top) * (1 - 1e-12)
