"""The benchmark runs and has its rows; the figures themselves are measured, never asserted."""

import torch

from equipoise_lab.bench.training import sections
from equipoise_lab.models import resnet18


def test_quick_sections_have_all_rows():
    steps, memory, control = sections(quick=True)
    assert [row["step"] for row in steps.rows][:4] == ["plain", "plain, again", "activation decay", "spectral, tracked"]
    assert all(row["seconds"] > 0 for row in steps.rows)
    assert all(row["explicit MB"] > 0 and row["autodiff MB"] > 0 for row in memory.rows)
    assert control.rows
    assert steps.to_dict()["goals"] == []


def test_the_network_is_the_usual_one():
    net = resnet18()
    assert sum(p.numel() for p in net.parameters()) == 11_173_962  # the usual ResNet-18 for CIFAR-10
    assert net.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
