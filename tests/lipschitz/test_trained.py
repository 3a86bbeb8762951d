"""Trained CIFAR ResNets: real weights."""

from __future__ import annotations

import pytest
import torch

from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise_lab.bench import lipschitz as bench

pytestmark = pytest.mark.medium


def test_fusing_wins_orders_of_magnitude_and_brackets_agree(data_dir, monkeypatch):
    if not (data_dir / "cifar10-resnet20.safetensors").exists():
        pytest.skip("no trained CIFAR ResNets: set EQUIPOISE_DATA")
    monkeypatch.setenv("EQUIPOISE_DATA", str(data_dir))
    net = bench.trained_resnet(20)
    torch.manual_seed(0)
    x = torch.randn(1, 3, 32, 32)
    report = lipschitz_bound(net, x, rtol=1e-2)
    assert report.log_upper < report.log_product - 5
    assert len([r for r in report.layers if r.kind == "convolution"]) == 19
    bracket = local_lipschitz(net, x, 0.05, steps=3, rtol=1e-2)
    assert 0 < float(bracket.lower) <= float(bracket.upper) < report.upper
