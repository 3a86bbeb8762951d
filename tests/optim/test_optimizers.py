"""Lookahead and Muon against their formulas."""

import pytest
import torch
from torch import nn

from equipoise.optim import Muon, add_lookahead


def trained(optimizer, layer, steps):
    x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.ones(8, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        (layer(x) - y).square().mean().backward()
        optimizer.step()
    return layer.weight.detach().clone()


def fresh(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def test_lookahead_is_k_steps_forward_and_one_back():
    layer, slow = fresh(), fresh()
    plain = torch.optim.Adam(layer.parameters(), lr=0.1)
    fast = []
    for _ in range(3):
        trained(plain, layer, 2)
        with torch.no_grad():
            for p, s in zip(layer.parameters(), slow.parameters(), strict=True):
                s.lerp_(p, 0.5)
                p.copy_(s)
        fast.append(layer.weight.detach().clone())
    ahead = fresh()
    assert torch.equal(trained(add_lookahead(torch.optim.Adam(ahead.parameters(), lr=0.1), 2), ahead, 6), fast[-1])


def test_lookahead_goes_on_from_its_state():
    one, two = fresh(), fresh()
    whole = trained(add_lookahead(torch.optim.NAdam(one.parameters(), lr=0.1), 3), one, 8)
    first = add_lookahead(torch.optim.NAdam(two.parameters(), lr=0.1), 3)
    trained(first, two, 4)
    again = add_lookahead(torch.optim.NAdam(two.parameters(), lr=0.1), 3)
    again.load_state_dict(first.state_dict())
    assert torch.equal(trained(again, two, 4), whole)


def test_muon_is_torchs_on_matrices():
    W = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(W.clone()), nn.Parameter(W.clone())
    mine = Muon([ours], lr=0.1, momentum=0.95, weight_decay=0.1)
    torchs = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, momentum=0.95)
    for step in range(3):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        torchs.step()
    assert (ours - theirs).norm() < 0.05 * (theirs - W).norm()  # bfloat16, added in another order


@pytest.mark.parametrize("shape", [(4, 6), (3, 6, 4), (2, 1, 5, 5)])
def test_muon_keeps_stacks_of_matrices_orthonormal_and_finds_the_nearest(shape):
    W, noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    U, _, Vh = torch.linalg.svd(W, full_matrices=False)
    target = U @ Vh
    U, _, Vh = torch.linalg.svd(target + 0.2 * noise, full_matrices=False)
    p = nn.Parameter(U @ Vh)
    optimizer = Muon([{"params": [p], "orthonormal": True}], momentum=0.9)
    assert (p - target).abs().max() > 0.1
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 200)
        optimizer.zero_grad()
        (p - target).square().sum().backward()
        optimizer.step()
        gram = p.mT @ p if shape[-2] > shape[-1] else p @ p.mT
        torch.testing.assert_close(gram, torch.eye(min(shape[-2:])).expand_as(gram), rtol=0, atol=1e-5)
    assert (p - target).abs().max() < 0.02


def test_muon_trains_kernels_groups_and_biases():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    grouped = nn.Parameter(torch.randn(2, 3, 3))
    optimizer = Muon([*net.parameters(), grouped], lr=0.02)
    x, losses = torch.randn(16, 1, 4, 4), []
    for _ in range(60):
        loss = (net(x) - x[:, 0, :2, 0]).square().mean() + grouped.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.9
