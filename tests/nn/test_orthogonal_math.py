"""The functions under the orthogonal layers, against slow references; peers' failures as regressions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_parts import exported, method, raw
from torch import nn

import equipoise.nn as o
from equipoise.core import Refused
from equipoise.nn.orthogonal.polar import CONVERGING, by_steps, last_step, orthonormal
from equipoise.nn.orthogonal.soc import exponential_series, largest_modulus
from equipoise.norms import operator_matrix, reference_norm

sizes = st.integers(1, 7)


@given(sizes, sizes, st.integers(0, 10_000), st.floats(-12, 12), st.floats(0, 12))
@settings(max_examples=60, deadline=None)
def test_the_last_step_makes_any_matrix_a_contraction(m: int, extra: int, seed: int, size: float, spread: float):
    g = torch.Generator().manual_seed(seed)
    W = torch.randn(m, m + extra, generator=g) * 10**size * torch.logspace(-spread, 0, m)[:, None]
    assert float(torch.linalg.matrix_norm(last_step(W).float().double(), 2)) <= 1


@pytest.mark.medium
@pytest.mark.parametrize("nearly", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 4, 4), (1, 1), (130, 140)])
def test_the_polar_factor_and_its_gradient_are_those_of_the_converged_steps(shape: tuple[int, ...], nearly: bool):
    W, direction = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if nearly:  # as an optimizer keeps it: the last step is enough
        U, _, Vh = torch.linalg.svd(W, full_matrices=False)
        W = U @ Vh + 1e-9 * W
    W.requires_grad_()
    stepped = by_steps(W.mT, CONVERGING).mT if shape[-2] > shape[-1] else by_steps(W, CONVERGING)
    torch.testing.assert_close(orthonormal(W), stepped, rtol=0, atol=1e-8)
    found, expected = (torch.autograd.grad(f, W, direction)[0] for f in (orthonormal(W), stepped))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    if W.numel() < 40:
        assert torch.autograd.gradgradcheck(orthonormal, W, atol=1e-4)
        hessian = torch.func.hessian(lambda W: (orthonormal(W) * direction).sum())(W.detach())
        again = torch.autograd.functional.hessian(lambda W: (orthonormal(W) * direction).sum(), W.detach())
        torch.testing.assert_close(hessian, again, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("spread", [1e-2, 1e-3, 1e-6, 0.0])
def test_gradients_of_nearly_singular_matrices_keep_their_digits_and_stay_finite(spread: float) -> None:
    W, direction = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    W[3] = W[2] + spread * W[3]
    exact, found = W.double().requires_grad_(), W.requires_grad_()
    orthonormal(exact).backward(direction.double())
    orthonormal(found).backward(direction)
    assert exact.grad is not None
    assert found.grad is not None
    torch.testing.assert_close(found.grad.double(), exact.grad, rtol=1e-3, atol=1e-4 * float(exact.grad.abs().max()))


def test_a_matrix_that_is_not_finite_has_no_polar_factor_and_leaves_its_neighbours_alone() -> None:
    W = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    W[1, 0, 0], W[2, 1, 1] = math.nan, math.inf
    found = orthonormal(W)
    torch.testing.assert_close(found[0], orthonormal(W[0]))
    assert bool(found[1:].isnan().all())


@pytest.mark.parametrize("kind", [o.CayleyLinear, o.BROLinear])
@pytest.mark.parametrize("shape", [(3, 2), (2, 3)])
def test_derivatives_do_not_miss_the_last_step(kind: type[nn.Module], shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = kind(*shape, dtype=torch.float64)
    start = (raw(layer).detach() + 0.1 * torch.randn_like(raw(layer))).requires_grad_()
    assert torch.autograd.gradcheck(method(layer), start, atol=1e-5)
    assert torch.autograd.gradgradcheck(method(layer), start, atol=1e-4)


@pytest.mark.parametrize(("angle", "terms"), [(1.0, 4), (0.5, 2), (3.0, 8), (math.pi, 12), (1.0, 1)])
def test_the_series_has_modulus_at_most_one_and_is_close_to_the_exponential(angle: float, terms: int) -> None:
    theta = np.linspace(0, 1.01 * angle, 12_345)
    p = sum(c * (1j * theta) ** m for m, c in enumerate(exponential_series(angle, terms)))
    assert abs(p).max() <= 1
    missing = 4 * (angle / 2) ** (terms + 1) / math.factorial(terms + 1)
    assert abs(p - np.exp(1j * theta)).max() <= 2.5 * missing
    assert largest_modulus(exponential_series(angle, terms), 1.01 * angle) >= abs(p).max()


def test_peer_failure_skewness_lost_by_rescaling_channels() -> None:
    """A peer divides a skew kernel per channel: the series then exceeds 1. One factor for all does not."""
    torch.manual_seed(0)
    layer = o.SOCConv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False).eval()
    with torch.no_grad():
        raw(layer).mul_(torch.tensor([0.01, 1.0, 1.0, 3.0])[None, :, None, None, None])
    plain = exported(layer)
    assert reference_norm(plain, (4, 5, 5)) <= 1 + 1e-5
    with torch.no_grad():
        plain.effective_0.mul_(torch.tensor([3.0, 1.0, 0.3, 0.1])[None, :, None, None, None])
    assert reference_norm(plain, (4, 5, 5)) > 1.05
    with pytest.raises(Refused, match="not skew"):
        plain.lipschitz_upper((4, 5, 5))


def test_errata_7_an_orthogonal_kernel_of_the_circle_is_no_contraction_among_zeros() -> None:
    """The full 3×3 kernel of a Cayley layer on 3×3, zero padded, exceeds 1; the layer with zero padding does not."""
    torch.manual_seed(0)
    worst, ours = 0.0, 0.0
    for _ in range(10):
        circular = o.CayleyConv2d(3, 3, 3, padding=1, padding_mode="circular", bias=False, dtype=torch.float64).eval()
        raw(circular).data.normal_()
        M = operator_matrix(circular, (3, 3, 3)).reshape(3, 3, 3, 3, 3, 3)
        kernel = M[:, 1, 1]  # what the middle output reads of every pixel: (out, in, 3, 3)
        naive = nn.Conv2d(3, 3, 3, padding=1, bias=False, dtype=torch.float64)
        naive.weight.data = kernel.contiguous()
        worst = max(worst, reference_norm(naive, (3, 3, 3)))
        zeros = o.CayleyConv2d(3, 3, 3, padding=1, bias=False, dtype=torch.float64).eval()
        zeros.load_state_dict(circular.state_dict())
        ours = max(ours, reference_norm(zeros, (3, 3, 3)))
    assert worst > 1.1
    assert ours <= 1 + 1e-5


@pytest.mark.parametrize(("rows", "columns", "condition", "scale", "whole"), [
    (129, 129, 1e2, 1.0, True), (256, 1024, 5.0, 1e30, True), (200, 400, 1.0, 1e-30, True), (150, 150, 3e4, 1.0, False),
])  # fmt: skip
def test_polar_factors_of_large_matrices_are_contractions(rows, columns, condition, scale, whole):
    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(n, rows, dtype=torch.float64))[0] for n in (rows, columns))
    W = (scale * (U * torch.logspace(0, -math.log10(condition), rows, dtype=torch.float64)) @ V.mT).float()
    values = torch.linalg.svdvals(orthonormal(W).double())
    assert float(values[0]) <= 1
    assert not whole or float(values[-1]) > 1 - 1e-5
