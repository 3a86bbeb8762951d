"""The guard on convolutions: true padding, stride, groups and dilation, against the materialised operator."""

import copy

import pytest
import torch
from torch import nn

from cases import OPERATORS
from equipoise.core import Refused
from equipoise.norms import reference_norm
from equipoise.norms.tracking import TrackedConvolution
from equipoise.optim import SpectralGuard

pytestmark = pytest.mark.medium

#: rows of the one table of operators, each held by the guard at its size and for any size
LAYERS = {one.id: one for one in (*OPERATORS[:29:2], *[o for o in OPERATORS if "Transpose" in o.id][:4])}


def layer(name, seed=0):
    torch.manual_seed(seed)
    module = copy.deepcopy(LAYERS[name].layer)
    module.reset_parameters()
    return module, LAYERS[name].input_shape


@pytest.mark.parametrize("known", [True, False, "grid"], ids=["size", "any size", "frequencies"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_norm_of_the_layer_is_held(name, known, as_if_large):
    if known == "grid":
        as_if_large()
    module, shape = layer(name)
    model = nn.Sequential(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    example = torch.zeros(1, *shape) if known else None
    guard = SpectralGuard(model, radius=0.7, example_input=example, optimizer=optimizer)
    x, target = torch.randn(4, *shape), None
    for _ in range(4):
        y = model(x)
        target = torch.randn_like(y) if target is None else target
        (y - 3 * target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        bracket, sigma = guard.bounds()["0"], reference_norm(module, shape)
        assert sigma <= bracket.upper * (1 + 1e-12)
        assert bracket.upper <= 0.7 * (1 + 1e-3)
        if known:
            assert bracket.lower <= sigma * (1 + 1e-12)


def test_a_shared_kernel_is_refused():
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3))
    model[1].weight = model[0].weight
    with pytest.raises(Refused, match="share one kernel"):
        SpectralGuard(model)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_small_steps_use_the_carried_proof_and_resume(name, dense, as_if_large):
    if not dense:
        as_if_large()
    module, shape = layer(name, seed=1)
    tracked = TrackedConvolution(module, shape[1:])
    first = tracked.bracket(module.weight)[1]
    for _ in range(6):
        with torch.no_grad():
            module.weight.add_(1e-4 * torch.randn(module.weight.shape).sign())
            tracked.bracket(module.weight, enough=1e9)  # by Weyl alone, then scaled
            tracked.scale(module.weight, 0.999)
        lower, upper = tracked.bracket(module.weight, enough=1.02 * first)
        sigma = reference_norm(module, shape)
        assert lower <= sigma * (1 + 1e-12)
        assert sigma <= upper * (1 + 1e-12)
        other = TrackedConvolution(module, shape[1:])
        other.load_state_dict(tracked.state_dict())
        assert other.bracket(module.weight, enough=1.02 * first) == (lower, upper)
    assert tracked.used["direct"] < 6


@pytest.mark.parametrize("name", ["same-3x3", "stride-equals-kernel", "circular", "groups", "reflect"])
def test_what_is_enough_is_proved_only_where_it_is_true(name, as_if_large):
    as_if_large()
    module, shape = layer(name, seed=2)
    sigma = reference_norm(module, shape)
    tight = TrackedConvolution(module, shape[1:]).bracket(module.weight)[1]
    for enough in (0.5 * sigma, 0.999 * sigma, 1.01 * tight, 3 * tight):
        lower, upper = TrackedConvolution(module, shape[1:]).bracket(module.weight, enough=enough)
        assert lower <= sigma * (1 + 1e-12) <= upper * (1 + 2e-12)
        assert upper <= max(enough, tight * 1.002)
