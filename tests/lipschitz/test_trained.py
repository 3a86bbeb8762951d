"""Trained CIFAR ResNets: real weights, real images; and the rows of the benchmark."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise_lab.bench import lipschitz as bench


@pytest.fixture
def trained(data_dir, monkeypatch):
    if not (data_dir / "cifar10-resnet20.safetensors").exists():
        pytest.skip("no trained CIFAR ResNets: set EQUIPOISE_DATA")
    monkeypatch.setenv("EQUIPOISE_DATA", str(data_dir))
    return bench.trained_resnet(20)


@pytest.mark.medium
def test_fusing_wins_orders_of_magnitude_and_stays_above_the_attack(trained):
    net = trained
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    report = lipschitz_bound(net, x, rtol=1e-2)
    assert report.log_upper < report.log_product - 5
    assert float(local_lipschitz(net, x, 0.25, steps=5).lower.max()) <= report.upper
    assert len([r for r in report.layers if r.kind == "convolution"]) == 19


@pytest.mark.medium
def test_the_local_certificate_is_below_the_global_one(trained):
    net = trained
    torch.manual_seed(0)
    x = torch.randn(1, 3, 32, 32)
    bracket = local_lipschitz(net, x, 0.05, steps=3, rtol=1e-2)
    assert float(bracket.lower) <= float(bracket.upper) < lipschitz_bound(net, x, rtol=1e-2).upper


def test_power_iteration_finds_the_norm_from_below():
    torch.manual_seed(0)
    layer = nn.Linear(6, 5, bias=False)
    exact = float(torch.linalg.matrix_norm(layer.weight.detach(), ord=2))
    assert bench.ryu_norm(layer, (6,)) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("depth", [18, 50])
def test_the_imagenet_resnets_have_the_published_size(depth):
    count = sum(p.numel() for p in bench.imagenet_resnet(depth).parameters())
    assert count == {18: 11_689_512, 50: 25_557_032}[depth]


@pytest.mark.slow
def test_audit_row():
    row = bench.audit_row(18, 10, 1)
    assert set(row) == {"name", "ours", "baseline", "ratio", "goal"}
