"""Tracked proofs of matrices against float64 SVD, weights at the ends of the range, and headroom of the guard."""

import pytest
import torch
from torch import nn

from equipoise.core import full_precision
from equipoise.norms.tracking import TrackedMatrix
from equipoise.optim import SpectralGuard


@pytest.mark.parametrize("size", [1e-44, 1e-43, 1e-41, 1e-38, 1e-30, 1e18])
@pytest.mark.parametrize("module", [nn.Linear(30, 40, bias=False), nn.Conv2d(3, 4, 1, bias=False)], ids=repr)
def test_brackets_of_weights_at_the_ends_of_the_range_hold(module, size):
    """Scaling a weight rounds what underflows by more than its last digit."""

    def norm():
        return float(torch.linalg.svdvals(module.weight.detach().double().flatten(1) / size)[0]) * size

    torch.manual_seed(1)
    with torch.no_grad():
        module.weight.copy_(torch.randn(module.weight.shape).double() * size)
    guard = SpectralGuard(module, radius=0.7 * norm())
    for change in (0.0, 1e-2, 1e-5):
        with torch.no_grad():
            module.weight.add_(torch.randn(module.weight.shape).double().mul(change * size).float())
        guard.step()
        (bracket,) = guard.bounds().values()
        assert bracket.lower <= norm() * (1 + 1e-12)
        assert norm() <= bracket.upper * (1 + 1e-12)


@pytest.mark.parametrize("headroom", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("how", ["cap", "clip", "hammer"])
def test_headroom_says_how_far_below_the_radius_a_weight_is_put(how, headroom):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30, bias=False), nn.Linear(30, 90, bias=False))
    guard = SpectralGuard(model, radius=0.3, how=how, headroom=headroom)
    for _ in range(4):
        for layer in model:
            sigma = float(torch.linalg.svdvals(layer.weight.detach().double())[0])
            assert 0.3 * (1 - headroom) * (1 - 2e-3) <= sigma <= 0.3 * (1 + 1e-3)
        with torch.no_grad():
            for layer in model:
                layer.weight.mul_(1.3)
        guard.step()


def spiked(m, n, seed):
    """A matrix with few large singular values, as training under a cap makes them."""
    generator = torch.Generator().manual_seed(seed)
    bulk = torch.randn(m, n, generator=generator) * 0.4 / (m**0.5 + n**0.5)
    spikes = torch.randn(m, 3, generator=generator) @ torch.randn(3, n, generator=generator)
    return bulk + spikes / (m * n) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(96, 64), (40, 130), (64, 64)])
def test_directions_that_are_followed_save_proofs_and_hold(shape, dtype):
    """Steps along the top, at random and of low rank, rescaled now and then: every bracket against SVD, few new proofs."""
    W = spiked(*shape, seed=1).to(dtype)
    tracked, other = TrackedMatrix(), TrackedMatrix()
    with full_precision():
        for step in range(40):
            generator = torch.Generator().manual_seed(step)
            W += 0.01 * spiked(*shape, seed=1) + 4e-4 * torch.randn(shape, generator=generator)
            lower, upper = tracked.bracket(W, 1.0, 0.03)
            sigma = float(torch.linalg.svdvals(W.double())[0])
            assert lower <= sigma * (1 + 1e-12)
            assert sigma <= upper * (1 + 1e-12)
            assert upper <= max(1.0, 1.03 * lower)
            if step % 8 == 0:
                other.load_state_dict(tracked.state_dict())
                assert other.bracket(W, 10.0) == tracked.bracket(W, 10.0)
            if upper > 1:
                tracked.scale(W, 0.97 / upper)
        assert tracked.used["direct"] <= 6
