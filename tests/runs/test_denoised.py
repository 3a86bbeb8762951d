"""Denoised smoothing: the pair is certified as one network; input-dependent noise is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.core import InputError, Refused
from equipoise.runs import certify
from equipoise.smoothing import Denoised, SmoothedClassifier


class Shrink(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 + 0.25 * (x - 0.5)


def test_a_run_with_a_denoiser_is_the_run_of_the_pair(tmp_path, net, xy):
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=200, seed=0, denoiser=Shrink().eval())
    pair = SmoothedClassifier(Denoised(Shrink(), net).eval(), 0.3, 4, seed=0).certify(xy[0], n=200)
    assert np.array_equal(run.certificates().radius, pair.radius)
    assert "Shrink" in run.manifest.model.source
    with pytest.raises(Refused, match="model"):
        certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=200, seed=0)


def test_what_is_no_denoiser_is_refused(tmp_path, net, xy):
    with pytest.raises(InputError, match="shape it was given"):
        certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=200, denoiser=nn.Flatten().eval())
    with pytest.raises(InputError, match=r"nn\.Module"):
        certify(net, xy, run_dir=tmp_path / "b", sigma=0.3, n=200, denoiser="blur")


@pytest.mark.parametrize("sigma", [lambda x: 0.1, torch.tensor([0.1, 0.2])])
def test_a_noise_level_that_depends_on_the_input_is_refused(tmp_path, net, xy, sigma):
    with pytest.raises(Refused, match="one number"):
        SmoothedClassifier(net, sigma, 4)
    with pytest.raises(Refused, match="one number"):
        certify(net, xy, run_dir=tmp_path / "a", sigma=sigma, n=200)
