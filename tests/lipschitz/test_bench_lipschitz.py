"""The rows of the benchmark have the shape the command prints."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equipoise_lab.bench import lipschitz as bench
from equipoise_lab.bench.lipschitz import ryu_norm


def test_power_iteration_finds_the_norm_from_below():
    torch.manual_seed(0)
    layer = nn.Linear(6, 5, bias=False)
    exact = float(torch.linalg.matrix_norm(layer.weight.detach(), ord=2))
    assert ryu_norm(layer, (6,)) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("depth", [18, 50])
def test_the_imagenet_resnets_have_the_published_size(depth):
    count = sum(p.numel() for p in bench.imagenet_resnet(depth).parameters())
    assert count == {18: 11_689_512, 50: 25_557_032}[depth]


@pytest.mark.slow
def test_audit_row():
    row = bench.audit_row(18, 10, 1)
    assert set(row) == {"name", "ours", "baseline", "ratio", "goal"}
