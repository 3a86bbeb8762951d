"""The guard on convolutions: true padding, stride, groups and dilation, against the materialised operator."""

import pytest
import torch
from torch import nn

from equipoise.core import Refused
from equipoise.norms import convolution, reference_norm
from equipoise.norms.tracking import TrackedConvolution
from equipoise.optim import SpectralGuard

pytestmark = pytest.mark.medium

#: layer and the spatial size it sees; a row is held by the guard at that size and for any size
LAYERS = {
    "zeros": (lambda: nn.Conv2d(3, 4, 3, padding=1), (6, 5)),
    "valid": (lambda: nn.Conv2d(3, 2, 3), (5, 5)),
    "stride": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (6, 6)),
    "stride is the kernel": (lambda: nn.Conv2d(2, 5, 2, stride=2), (6, 6)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (5, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), (5, 5)),
    "dilation": (lambda: nn.Conv2d(2, 2, 3, padding=2, dilation=2), (7, 7)),
    "circular": (lambda: nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), (5, 6)),
    "reflect": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (5, 5)),
    "replicate": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), (5, 5)),
    "line": (lambda: nn.Conv1d(3, 4, 5, padding=2), (9,)),
    "volume": (lambda: nn.Conv3d(2, 2, 3, padding=1), (3, 4, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1), (4, 4)),
    "transposed line": (lambda: nn.ConvTranspose1d(2, 3, 4, stride=2), (5,)),
}


def layer(name, seed=0):
    torch.manual_seed(seed)
    make, size = LAYERS[name]
    module = make()
    return module, (module.in_channels, *size)


@pytest.mark.parametrize("known", [True, False, "grid"], ids=["size", "any size", "frequencies"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_norm_of_the_layer_is_held(name, known, monkeypatch):
    if known == "grid":
        monkeypatch.setattr(convolution, "DENSE_ENTRIES", 0)  # by the symbol, however small
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
def test_small_steps_use_the_carried_proof_and_resume(name, dense, monkeypatch):
    if not dense:
        monkeypatch.setattr(convolution, "DENSE_ENTRIES", 0)
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


@pytest.mark.parametrize("name", ["zeros", "stride", "circular", "groups", "reflect"])
def test_what_is_enough_is_proved_only_where_it_is_true(name, monkeypatch):
    monkeypatch.setattr(convolution, "DENSE_ENTRIES", 0)
    module, shape = layer(name, seed=2)
    sigma = reference_norm(module, shape)
    tight = TrackedConvolution(module, shape[1:]).bracket(module.weight)[1]
    for enough in (0.5 * sigma, 0.999 * sigma, 1.01 * tight, 3 * tight):
        lower, upper = TrackedConvolution(module, shape[1:]).bracket(module.weight, enough=enough)
        assert lower <= sigma * (1 + 1e-12) <= upper * (1 + 2e-12)
        assert upper <= max(enough, tight * 1.002)
