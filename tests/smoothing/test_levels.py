"""One noise level per channel: draws of that law, radii by the smallest, an ellipsoid that is attacked at its corners."""

import json

import numpy as np
import pytest
import torch
from smoothing_laws import HalfSpace
from torch import nn

from equipoise.core import Refused
from equipoise.runs import certify, open_run
from equipoise.smoothing import SimplexMap, SmoothedClassifier, Stream

LEVELS = [0.5, 0.125, 0.25]


class Plane(nn.Module):
    """A half-space in one channel: its smoothed decision is where the plane is, whatever the noise."""

    def __init__(self, channel: int, at: float = 0.5):
        super().__init__()
        self.channel, self.at = channel, at

    def forward(self, x):
        score = x[:, self.channel].flatten(1).sum(1) / x[0, 0].numel() ** 0.5 - self.at
        return torch.stack([-score, score], 1)


@pytest.mark.parametrize(
    ("noise", "dtype"), [("float", torch.float32), ("float", torch.float64), ("grid", torch.float32)]
)
def test_every_channel_has_gaussian_noise_of_its_own_level(noise, dtype):
    net, drawn = HalfSpace(*[1.0] * 48).eval(), []
    net.register_forward_pre_hook(lambda _, args: drawn.append(args[0].clone()))
    smooth = SmoothedClassifier(net, LEVELS, 2, seed=0, noise=noise)
    smooth.counts(torch.full((3, 4, 4), 128 / 255, dtype=dtype), 2000, input_id=0, stream=Stream.ESTIMATION)
    _, _, *rest = drawn  # the first two calls ask whether rows see each other
    drawn = torch.cat(rest) - 128 / 255
    assert drawn.std(dim=(0, 2, 3)).tolist() == pytest.approx(LEVELS, rel=0.02)
    standard = drawn / torch.tensor(LEVELS)[:, None, None]
    assert standard.mean().abs() < 0.015
    assert (standard**4).mean() == pytest.approx(3, abs=0.1)
    if noise == "grid":
        assert (drawn * 255).sub((drawn * 255).round()).abs().max() < 1e-4
    flat = drawn.reshape(2000, -1)
    assert np.abs(np.corrcoef(flat.T.numpy()) - np.eye(48)).max() < 0.11, "and they are independent"


@pytest.mark.parametrize("channel", range(3))
@pytest.mark.parametrize("noise", ["float", "grid"])
def test_the_ellipsoid_is_certified_and_the_ball_is_what_is_reported(channel, noise):
    x = torch.zeros(1, 3, 1, 1)
    smooth = SmoothedClassifier(Plane(channel, 0.3).eval(), LEVELS, 2, seed=1, noise=noise)
    found = smooth.certify(x, n=4000)
    axis = float(found.radius[0]) * LEVELS[channel] / min(LEVELS)
    assert 0.8 * 0.3 < axis <= 0.3, "the semi-axis of the channel in which the plane stands"
    assert "ellipsoid of semi-axes R·(4, 1, 2)" in found.about
    assert found.sigma == min(LEVELS)


def test_a_lipschitz_constant_is_stretched():
    """In the coordinates of round noise the network is σ_max/σ_min times as steep: without it the radius is too large."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3, 2, bias=False)).eval().requires_grad_(False)
    # 1-Lipschitz; moves along the first channel
    net[1].weight.copy_(torch.tensor([[-1.0, 0, 0], [1.0, 0, 0]]) / 2**0.5)
    x = torch.tensor([-0.3, 0, 0]).reshape(1, 3, 1, 1)
    smooth = SmoothedClassifier(net, LEVELS, 2, seed=1, map=SimplexMap("sparsemax", 1.0))
    found = smooth.certify(x, n=4000, lipschitz=1.0)
    assert 0 < float(found.radius[0]) * 4 <= 0.3
    alone = SmoothedClassifier(net, 0.5, 2, seed=1, map=SimplexMap("sparsemax", 1.0)).certify(x, n=4000, lipschitz=1.0)
    assert float(found.radius[0]) * 4 == pytest.approx(float(alone.radius[0]), rel=0.05)  # the noise that matters


def test_equal_levels_are_one_level_and_runs_keep_them(tmp_path):
    x = torch.randint(0, 256, (4, 3, 2, 2), generator=torch.Generator().manual_seed(0)).float() / 255
    y, net = torch.zeros(4, dtype=torch.int64), Plane(0, 1.0).eval()
    one, same = (
        certify(net, (x, y), run_dir=tmp_path / n, sigma=s, n=300, seed=0) for n, s in (("a", 0.25), ("b", [0.25] * 3))
    )
    assert one.manifest.digest() == same.manifest.digest()
    run = certify(net, (x, y), run_dir=tmp_path / "c", sigma=LEVELS, n=300, seed=0)
    assert json.loads((tmp_path / "c" / "run.json").read_text())["settings"]["channels"] == LEVELS
    direct = SmoothedClassifier(net, LEVELS, 2, seed=0, noise="grid").certify(x, n=300)
    assert np.array_equal(open_run(tmp_path / "c").certificates().radius, direct.radius)
    assert "ellipsoid" in run.certificates(procedure="cohen").about
    with pytest.raises(Refused, match="channels"):
        certify(net, (x, y), run_dir=tmp_path / "c", sigma=[0.5, 0.125, 0.5], n=300, seed=0)
