"""Noise on inputs and on weights, and sharpness-aware steps."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from equipoise.core import InputError
from equipoise.regularizers import add_noise, consistency_loss, frozen_statistics, noisy_copies


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def data(n=12):
    g = torch.Generator().manual_seed(5)
    return torch.randn(n, 4, generator=g).double(), torch.randint(3, (n,), generator=g)


def test_noise_has_its_deviation_and_copies_differ():
    noisy = add_noise(torch.zeros(20_000), 0.5, torch.Generator().manual_seed(0))
    assert noisy.std().item() == pytest.approx(0.5, rel=0.03)
    copies = noisy_copies(torch.zeros(2, 3), 1.0, 3).reshape(3, 2, 3)
    assert not torch.equal(copies[0], copies[1])
    for wrong in (-0.1, math.inf):
        with pytest.raises(InputError):
            add_noise(torch.zeros(2), wrong)


def test_consistency_loss_is_its_formula():
    model, (x, y) = net(), data()
    drawn = torch.Generator().manual_seed(1)
    loss = consistency_loss(model, x, y, 0.5, copies=3, weight=2.0, entropy=0.7, generator=drawn)
    noisy = noisy_copies(x, 0.5, 3, torch.Generator().manual_seed(1))
    p = model(noisy).softmax(1).reshape(3, len(x), -1)
    mean = p.mean(0)
    expected = cross_entropy(model(noisy), y.repeat(3))
    expected = expected + 2.0 * sum((mean * (mean.log() - p[i].log())).sum(1).mean() for i in range(3)) / 3
    expected = expected + 0.7 * -(mean * mean.log()).sum(1).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    with pytest.raises(InputError, match="at least 2"):
        consistency_loss(model, x, y, 0.5, copies=1)


def batch_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def test_sam_under_frozen_statistics_moves_them_once():
    """The recipe of the documentation: pytorch-optimizer's SAM, its second pass under `frozen_statistics`."""
    sam = pytest.importorskip("pytorch_optimizer").SAM
    x, y = data()
    model, plain = batch_net(), batch_net()
    optimizer = sam(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.1)
    for k in range(3):
        plain.load_state_dict(model.state_dict())
        cross_entropy(model(x), y).backward()
        optimizer.first_step(zero_grad=True)
        with frozen_statistics(model):
            cross_entropy(model(x), y).backward()
        optimizer.second_step(zero_grad=True)
        plain(x)  # one training pass at the same parameters
        assert torch.equal(model[1].running_mean, plain[1].running_mean)
        assert int(model[1].num_batches_tracked) == k + 1


def test_frozen_statistics_leaves_evaluation_layers_and_survives_errors():
    model = batch_net()
    model[1].eval()
    x = torch.randn(5, 4).double()
    before = model(x)
    with frozen_statistics(model):
        assert torch.equal(model(x), before)
    model.train()
    with pytest.raises(ValueError, match="stop"), frozen_statistics(model):
        raise ValueError("stop")
    assert model[1].track_running_stats
