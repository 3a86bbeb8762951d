"""Trained CIFAR ResNets from the shared data: real weights, real images."""

from __future__ import annotations

import pytest
import torch

from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise_lab.bench import lipschitz as bench


@pytest.fixture(autouse=True)
def _data(data_dir, monkeypatch):
    if not (data_dir / "cifar10-resnet20.safetensors").exists():
        pytest.skip("no trained CIFAR ResNets: set EQUIPOISE_DATA")
    monkeypatch.setenv("EQUIPOISE_DATA", str(data_dir))


def test_fusing_wins_orders_of_magnitude_and_stays_above_the_attack():
    net = bench.trained_resnet(20)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    report = lipschitz_bound(net, x, rtol=1e-2)
    assert report.log_upper < report.log_product - 5
    assert float(local_lipschitz(net, x, 0.25, steps=5).lower.max()) <= report.upper
    assert len([r for r in report.layers if r.kind == "convolution"]) == 19


def test_the_local_certificate_is_below_the_global_one():
    net = bench.trained_resnet(20)
    torch.manual_seed(0)
    x = torch.randn(1, 3, 32, 32)
    bracket = local_lipschitz(net, x, 0.05, steps=3, rtol=1e-2)
    assert float(bracket.lower) <= float(bracket.upper) < lipschitz_bound(net, x, rtol=1e-2).upper
