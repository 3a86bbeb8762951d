"""Python numbers in a graph are float64: a bound must not round them on the way."""

import math

import pytest
import torch
from torch import nn

import equipoise as eq


class Scaled(nn.Module):
    def __init__(self, form: str, number: float) -> None:
        super().__init__()
        self.form, self.number = form, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form == "mul":
            return x * self.number
        if self.form == "div":
            return x / self.number
        if self.form == "sub":
            return self.number * x - 3 * x
        return x.mul(torch.tensor(self.number, dtype=x.dtype))


@pytest.mark.parametrize("form", ["mul", "div", "sub", "tensor"])
@pytest.mark.parametrize("number", [0.7, 0.1, 1 / 3, 1e-3, math.pi, -2.3])
def test_scalars_are_not_rounded(form: str, number: float):
    net = Scaled(form, number).eval()
    x, y = torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)
    stretch = float((net(y) - net(x)).norm() / (y - x).norm())
    assert eq.lipschitz_bound(net, x).upper >= stretch * (1 - 1e-15)
