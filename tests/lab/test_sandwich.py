"""The lab's layers, Sandwich and LOT: constant at most 1 under attack, after rounding, for every raw weight."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.core import Kind
from equipoise.nn.orthogonal.frequency import FrequencyConv2d
from equipoise_lab.sandwich import SandwichConv2d, SandwichLinear, sandwich_bound
from equipoise_lab.scoreboard.networks import LOTConv2d, SpatialShift, polar_factor

LIMIT = 1 + 1e-5
Made = tuple[Callable[..., nn.Module], tuple[int, ...]]


def dense(ins: int, out: int, **options: Any) -> Made:
    return (lambda **k: SandwichLinear(ins, out, **options, **k)), (ins,)


def conv(*args: Any, size: int = 5, layer: Any = SandwichConv2d, **options: Any) -> Made:
    return (lambda **k: layer(*args, **options, **k)), (args[0], size, size)


CASES = {
    "dense": dense(4, 4),
    "dense-wide": dense(5, 3, activation=nn.Tanh()),
    "dense-tall": dense(3, 5, activation=nn.LeakyReLU(0.2), bias=False),
    "conv-zeros": conv(3, 3, 3, padding=1),
    "conv-circular": conv(3, 4, 3, padding=1, padding_mode="circular", activation=nn.Softplus()),
    "conv-valid": conv(4, 2, 3),
    "conv-stride-circular": conv(2, 4, 3, padding=1, stride=2, padding_mode="circular", size=6),
    "conv-groups-dilated": conv(4, 2, 3, padding=2, groups=2, dilation=2),
    "lot-zeros": conv(3, 3, 3, padding=1, layer=LOTConv2d),
    "lot-wide-circular": conv(5, 3, 3, padding=1, padding_mode="circular", layer=LOTConv2d),
    "lot-tall-stride": conv(2, 9, 2, stride=2, size=6, layer=LOTConv2d),
    "lot-groups-dilated": conv(4, 4, 3, padding=2, groups=2, dilation=2, layer=LOTConv2d),
}
cases = pytest.mark.parametrize("case", CASES)


def plain_of(layer: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    return layer.export(shape[-2:]) if isinstance(layer, FrequencyConv2d) else layer.export()


def steepest(module: nn.Module, shape: tuple[int, ...], tries: int = 12) -> float:
    """The largest norm of the Jacobian of the exported layer in float64, at random points."""
    module = copy.deepcopy(module).double().eval().requires_grad_(False)
    best = 0.0
    for scale in [0.1, 1.0, 10.0] * (tries // 3):
        x = torch.randn(shape, dtype=torch.float64) * scale
        J = torch.func.jacrev(lambda z: module(z[None])[0].flatten())(x).reshape(-1, math.prod(shape))
        best = max(best, float(torch.linalg.matrix_norm(J, 2)))
    return best


NORMAL = ("conv-zeros", "dense", "lot-zeros")
ATTACKED = [pytest.param(case, marks=() if case in NORMAL else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", ATTACKED)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_stays_1_lipschitz_under_attack(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, shape = CASES[case]
    layer = make(dtype=dtype)
    x = torch.randn(8, *shape, dtype=dtype).requires_grad_()
    v = torch.randn(8, *shape, dtype=dtype).requires_grad_()
    optimizer = torch.optim.Adam([*layer.parameters(), x, v], lr=0.05)
    for _ in range(200):
        unit = v / v.flatten(1).norm(dim=1).reshape(-1, *[1] * len(shape))
        optimizer.zero_grad()
        ratio = (layer(x + 0.5 * unit) - layer(x - 0.5 * unit)).flatten(1).norm(dim=1)
        (-ratio.amax()).backward()
        optimizer.step()
    assert float(ratio.amax().detach()) > 0.7
    plain = plain_of(layer.eval(), shape)
    assert steepest(plain, shape) <= LIMIT
    for module in (layer, plain):
        bound = module.lipschitz_upper(shape)
        assert bound.kind is Kind.UPPER
        assert float(bound) <= LIMIT


@cases
@pytest.mark.parametrize("size", [1e8, 1e30, 1e-20, 0.0])
def test_every_raw_weight(case: str, size: float) -> None:
    torch.manual_seed(1)
    make, shape = CASES[case]
    layer = make()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name != "bias":
                parameter.copy_(torch.randn_like(parameter) * size)
    layer(torch.randn(2, *shape)).square().sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in layer.parameters() if p.grad is not None)
    assert float(plain_of(layer, shape).lipschitz_upper(shape)) <= LIMIT


def test_the_bound_does_not_depend_on_psi_and_sees_a_changed_weight() -> None:
    torch.manual_seed(3)
    plain = SandwichLinear(4, 4).eval().export()
    before = float(plain.lipschitz_upper((4,)))
    with torch.no_grad():
        plain.effective_1 *= 3
    after = float(plain.lipschitz_upper((4,)))
    assert before <= LIMIT < after
    assert steepest(plain, (4,)) <= after
    first, second = torch.randn(3, 4), torch.randn(5, 3)
    for psi in (torch.ones(3), torch.tensor([0.1, 1.0, 7.0])):
        bound = float(sandwich_bound(first, second, psi))
        for j in torch.rand(200, 3).round():
            assert float(torch.linalg.matrix_norm(second @ torch.diag(j) @ first, 2)) <= bound


@pytest.mark.parametrize("shape", [(3, 3), (2, 5)])
def test_newtons_iteration_is_the_polar_factor_and_shifts_permute(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    V = torch.randn(4, *shape, dtype=torch.complex128)
    U, _, W = torch.linalg.svd(V, full_matrices=False)
    torch.testing.assert_close(polar_factor(V, steps=25), U @ W)
    x = torch.randn(2, 16, 3, 4)
    moved = SpatialShift()(x)
    assert torch.equal(moved.flatten(1).sort().values, x.flatten(1).sort().values)
    assert torch.equal(moved[:, 0], x[:, 0].roll(-1, 1))
    assert not torch.equal(moved[:, :8], x[:, :8])
    assert torch.equal(moved[:, 8:], x[:, 8:])
