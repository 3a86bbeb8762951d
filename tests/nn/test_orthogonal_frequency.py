"""Matrices per frequency: functions with a derivative of their own against the operators they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise.nn as eqn
from equipoise.nn.orthogonal.frequency import LEAST, inverse
from equipoise.nn.orthogonal.sandwich import _Pair, pair

Outputs = tuple[Tensor, ...]


def matrices(dtype: torch.dtype, *shape: int) -> Tensor:
    """Z = I + X − X*."""
    X = 3 * torch.randn(*shape, dtype=dtype)
    return torch.eye(shape[-1]) + X - X.mH


def square(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any], Outputs]:
    return inverse, torch.linalg.inv, (matrices(dtype, 2, 4, 20, 20),)


def two(dtype: torch.dtype, rows: int, n: int) -> tuple[Callable[..., Any], Callable[..., Any], Outputs]:
    Y, psi = torch.randn(2, 3, rows, n, dtype=dtype), 0.5 + torch.rand(2, 1, n, dtype=dtype.to_real())
    return _Pair.apply, pair, (matrices(dtype, 2, 3, n, n), Y, psi)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "square": (square, ()),
    "two blocks": (two, (4, 6)),
    "two blocks, long": (two, (7, 3)),
}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("case", CASES)
def test_values_first_and_second_derivatives_are_those_of_the_operators(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, arguments = CASES[case]
    closed, plain, inputs = make(dtype, *arguments)
    inputs = tuple(tensor.requires_grad_() for tensor in inputs)
    found, expected = (as_tuple(f(*inputs)) for f in (closed, plain))
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.complex64 else {}
    torch.testing.assert_close(found, expected, **close)
    given = [torch.randn_like(value) for value in found]
    first = torch.autograd.grad(found, inputs, given, retain_graph=True)
    one, other = (torch.autograd.grad(values, inputs, given, create_graph=True) for values in (found, expected))
    torch.testing.assert_close(first, other, **close)
    twice = [
        torch.autograd.grad(sum(g.abs().square().sum() for g in some), inputs, allow_unused=True)
        for some in (one, other)
    ]
    torch.testing.assert_close(*twice, **close)


def as_tuple(value: Any) -> Outputs:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(9, LEAST), (9, LEAST + 1), (2, 8, 50), (3, 40), (64,), (8, 3, 2 * LEAST)])
def test_inverses_by_blocks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """As close as LAPACK's, up to a factor, also where the skew part is large and the leading blocks nearly vanish without it."""
    torch.manual_seed(0)
    X = 10 * torch.randn(*shape, shape[-1], dtype=dtype)
    Y = torch.randn(*shape, shape[-1], dtype=dtype)
    M = torch.eye(shape[-1]) + X - X.mH + Y.mH @ Y
    wide = M.to(torch.complex128)
    exact = torch.linalg.inv(wide)
    error, usual = ((V.to(wide) - exact).abs().amax() for V in (inverse(M), torch.linalg.inv(M)))
    assert error <= 100 * (usual + torch.finfo(dtype).eps)
    assert bool(inverse(torch.full_like(M, torch.nan)).isnan().all())


@pytest.mark.parametrize("name", ["Cayley", "BRO", "CHORD", "Sandwich"])
def test_layers_have_forward_derivatives_and_vectorise(name: str) -> None:
    torch.manual_seed(0)
    layer, x = getattr(eqn, f"{name}Conv2d")(2, 2, 3, padding=1).double(), torch.randn(3, 2, 4, 5, dtype=torch.float64)
    moved = torch.randn_like(x)
    y, forward = torch.func.jvp(layer, (x,), (moved,))
    outer = torch.randn_like(y)
    (backward,) = torch.autograd.grad(layer(x.requires_grad_()), x, outer)
    torch.testing.assert_close((forward * outer).sum(), (backward * moved).sum())
    torch.testing.assert_close(torch.func.vmap(lambda one: layer(one[None])[0])(x), y)
