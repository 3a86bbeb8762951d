"""Random graphs of random operations: no attack may exceed the bound, fused or not, global or local."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from lipschitz_attacks import attack
from lipschitz_nets import Op, randomise
from torch import nn

from equipoise.lipschitz import lipschitz_bound, local_lipschitz

C, N = 4, 6


class Branches(nn.Module):
    """Two random branches of one input, joined by a sum, a difference, a maximum, a mean or a concatenation."""

    def __init__(self, rng, depth):
        super().__init__()
        self.a, self.b = stack(rng, depth), stack(rng, depth) if rng.random() < 0.7 else nn.Identity()
        self.join = rng.choice(["sum", "difference", "maximum", "cat", "mixture", "half"])
        self.mix = nn.Conv2d(2 * C, C, 1, bias=False)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        if self.join == "cat":
            return self.mix(torch.cat([a, b], 1))
        if self.join == "half":
            p, q = x.chunk(2, 1)
            return a + torch.cat([torch.maximum(p, q), torch.minimum(p, q)], 1) - 2 * b
        table = {"sum": a + b, "difference": 1 - a - b, "maximum": torch.maximum(a, b), "mixture": 0.7 * a + 0.3 * b}
        return table[self.join]


def operation(rng) -> nn.Module:
    scale = torch.randn(C, 1, 1, generator=torch.Generator().manual_seed(rng.randrange(10**6)))
    return rng.choice(
        [
            lambda: nn.Conv2d(C, C, 3, padding=1),
            lambda: nn.Conv2d(C, C, 1, bias=False),
            lambda: nn.Conv2d(C, C, 3, padding=1, groups=2),
            lambda: nn.Conv2d(C, C, 3, padding=1, padding_mode=rng.choice(["reflect", "circular", "replicate"])),
            lambda: nn.Conv2d(C, C, 3, padding=2, dilation=2),
            lambda: nn.Sequential(
                nn.Conv2d(C, C, 3, 2, 1), nn.Upsample(scale_factor=2, mode=rng.choice(["nearest", "bilinear"]))
            ),
            lambda: nn.BatchNorm2d(C),
            lambda: rng.choice([nn.ReLU(), nn.GELU(), nn.SiLU(), nn.LeakyReLU(-1.3), nn.Tanh(), nn.Mish()]),
            lambda: nn.MaxPool2d(3, 1, 1),
            lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=rng.random() < 0.5),
            lambda: nn.GroupNorm(2, C, eps=0.5),
            lambda: Op(lambda x: (x - 0.3) / scale.to(x.dtype).abs().clamp_min(0.2)),
            lambda: Op(lambda x: x * scale.to(x.dtype)),
            lambda: Op(lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2).flip(1)),
            lambda: Op(lambda x: x + x.mean((2, 3), keepdim=True)),
            lambda: Op(lambda x: F.pad(x[:, :, 1:, :-1], (1, 0, 0, 1))),
        ]
    )()


def stack(rng, depth) -> nn.Sequential:
    layers = [
        Branches(rng, depth - 1) if depth > 0 and rng.random() < 0.35 else operation(rng)
        for _ in range(rng.randint(2, 4))
    ]
    return nn.Sequential(*layers)


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(6))
def test_random_graph(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    net = randomise(nn.Sequential(stack(rng, 2), nn.Flatten(), nn.Linear(C * N * N, 5)), seed)
    report = lipschitz_bound(net, torch.zeros(1, C, N, N), rtol=1e-2)
    assert attack(net, (C, N, N), seed=seed, steps=25) <= report.upper * (1 + 1e-7)
    assert report.upper <= report.product
    x = torch.randn(1, C, N, N)
    for radius in (0.003, 0.3):  # an attack above the certificate raises
        assert float(local_lipschitz(net, x, radius, steps=8, rtol=1e-2).upper) <= report.upper * (1 + 1e-6)
