"""Noise on a grid: its law against exact probabilities, its speed in bits, and the certificate that float noise gets wrong."""

import itertools

import mpmath as mp
import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from equipoise.core import InputError, Refused
from equipoise.smoothing import SimplexMap, SmoothedClassifier, Stream
from equipoise.smoothing.noise import Grid, is_image, noise_key, philox, power_of_two

pytestmark = pytest.mark.medium

GRIDS = [Grid(0.25, 255.0), Grid(1.0, 255.0), Grid(0.03, 255.0), Grid(0.5, power_of_two(0.5)), Grid(0.7, 2.0)]
IDS = [f"{g.sigma:g} on {g.cells:g}" for g in GRIDS]


def exact(grid: Grid, k: np.ndarray) -> np.ndarray:
    """P(k) with 50 digits, as floats."""
    with mp.workdps(50):
        scale = mp.mpf(grid.cells) * mp.mpf(grid.sigma)
        edges = [mp.ncdf((mp.mpf(int(j)) - mp.mpf(1) / 2) / scale) for j in [*k, k[-1] + 1]]
        return np.array([float(b - a) for a, b in itertools.pairwise(edges)])


@pytest.mark.parametrize("grid", GRIDS[:3], ids=IDS[:3])
def test_thresholds_are_the_distribution_function_to_64_bits(grid: Grid):
    """Every cell, tails included: the total variation of the table is within the bound that is counted."""
    law = grid.law
    edges = [0, *(int(t) for t in law.thresholds), 2**64]
    with mp.workdps(50):
        scale = mp.mpf(grid.cells) * mp.mpf(grid.sigma)
        cdf = [mp.ncdf((mp.mpf(law.lowest + j) + mp.mpf(1) / 2) / scale) for j in range(law.cells - 1)]
        true = [b - a for a, b in zip([mp.mpf(0), *cdf], [*cdf, mp.mpf(1)], strict=True)]
        probabilities = [mp.mpf(b - a) / 2**64 for a, b in itertools.pairwise(edges)]
        beyond = 2 * mp.ncdf((mp.mpf(law.lowest) - mp.mpf(1) / 2) / scale)
        variation = sum(abs(a - b) for a, b in zip(true, probabilities, strict=True)) / 2 + beyond
    assert float(variation) <= grid.variation(1)
    assert float(variation) > 0
    assert law.lowest * -1 / (grid.cells * grid.sigma) > 8.9, "nothing is cut off before 2^-64"


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    expected = p * counts.sum()
    return float(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(p) - 1))


def bins(grid: Grid, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts per value and exact probabilities; both tails beyond 2.8 σ as bins of their own."""
    edge = max(1, round(2.8 * grid.sigma * grid.cells))
    k = np.arange(-edge, edge + 1)
    inside = exact(grid, k)
    side = (1 - inside.sum()) / 2
    counts = np.array([(draws < -edge).sum(), *((draws == v).sum() for v in k), (draws > edge).sum()])
    return counts, np.array([side, *inside, side])


@pytest.mark.parametrize("grid", [GRIDS[0], GRIDS[2], GRIDS[4]], ids=[IDS[0], IDS[2], IDS[4]])
def test_draws_follow_the_law_tails_included_and_the_test_has_power(grid: Grid):
    out = np.empty((400, 1000), dtype=np.float32)
    grid.draw(philox(noise_key(1, 0, Stream.ESTIMATION, 0)), out)
    counts, p = bins(grid, out.ravel())
    assert chi_square(counts, p) > 1e-6
    wrong = Grid(grid.sigma * 1.02, grid.cells)
    wrong.draw(philox(noise_key(1, 0, Stream.ESTIMATION, 0)), out)
    assert chi_square(bins(grid, out.ravel())[0], p) < 1e-6, "two percent of σ are seen"
    assert abs(np.corrcoef(out[:, 0], out[:, 1])[0, 1]) < 0.25


def test_draws_of_cut_entries_follow_the_law():
    """Only the draws that needed more than 16 bits, as a law of their own."""
    grid, total = GRIDS[4], np.zeros(2**18, dtype=np.float64)
    grid.draw(philox(7), total)
    words = philox(7).random_raw(2**16).astype("<u8").view("<u2")
    cut = np.isnan(grid.law.guide[words])
    assert cut.any()
    for entry in np.unique(words[cut])[:4]:
        low, high = int(entry) << 48, (int(entry) + 1) << 48
        inside = [int(t) for t in grid.law.thresholds if low < int(t) < high]
        shares = np.diff([low, *inside, high]).astype(float) / 2**48
        values = total[cut & (words == entry)]
        first = np.searchsorted(grid.law.thresholds, np.uint64(low), side="right") + grid.law.lowest
        counts = np.array([(values == first + j).sum() for j in range(len(shares))])
        assert counts.sum() == len(values)
        assert chi_square(counts, shares) > 1e-6


class Multiples(nn.Module):
    """Class 0 iff every coordinate is a whole multiple of 2^-24: real noise never is, float32 sums near 1 always."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x.double() * 2**24
        whole = (scaled == scaled.round()).all(dim=1).double()
        return torch.stack([whole, 1 - whole], dim=1)


HERE, THERE = torch.ones(1, 16), torch.full((1, 16), 0.7)  # at distance 1.2


def test_float_noise_certifies_a_radius_inside_which_the_answer_flips():
    """σ = ½, d = 16: a false certificate, from a deterministic classifier that reads the rounding of x + δ."""
    smooth = SmoothedClassifier(Multiples().eval(), 0.5, 2, noise="float", seed=1)
    found = smooth.certify(HERE, n=100_000)
    assert found.prediction[0] == 0
    assert found.radius[0] == pytest.approx(1.906, abs=0.002)
    assert float((HERE - THERE).norm()) < 1.201
    assert smooth.predict(THERE, n=10_000).tolist() == [1]
    assert "Not covered: noise drawn in floating point" in found.about


@pytest.mark.parametrize("scale", [1.0, 1 + 2.0**-12], ids=["8-bit grid", "grid by a power of two"])
def test_the_grid_is_right_about_the_same_classifier(scale: float):
    """What is certified is F∘Q, and its answer does not change within the radius."""
    smooth = SmoothedClassifier(Multiples().eval(), 0.5, 2, noise="grid", seed=1)
    found = smooth.certify(HERE * scale, n=4000)
    answer = int(found.prediction[0])
    assert answer >= 0
    there = (HERE * 255 * 0.7).round() / 255 if scale == 1 else THERE
    if float((HERE * scale - there).norm()) < found.radius[0]:
        assert smooth.predict(there).tolist() == [answer]
    for k in range(20):
        step = torch.randn(1, 16, generator=torch.Generator().manual_seed(k))
        near = HERE * scale + 0.95 * float(found.radius[0]) * step / step.norm()
        near = (near * 255).round() / 255 if scale == 1 else near
        if float((near - HERE * scale).norm()) < found.radius[0]:
            assert smooth.predict(near, n=200).tolist() in ([answer], [-1])
    assert "floating point" not in found.about
    assert "total variation" in found.about


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = x.flatten(1).mean(dim=1) - 0.5
        return torch.stack([score, -score], dim=1)


def images(n: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (n, 1, 4, 4), generator=torch.Generator().manual_seed(0)).float() / 255


def test_eight_bit_inputs_get_exact_noise_by_default_and_others_do_not():
    x = images()
    exactly = SmoothedClassifier(Mean().eval(), 0.25, 2, seed=3)
    seen: list[torch.Tensor] = []
    exactly.model.register_forward_hook(lambda _, args, out: seen.append(args[0].clone()))
    found = exactly.certify(x, n=500)
    assert exactly.noise == "grid"
    steps = torch.cat(seen).double() * 255
    assert (steps - steps.round()).abs().max() < 1e-3
    assert "step 1/255" in found.about
    assert "Seed 3 was chosen by the user" in found.about
    plain = SmoothedClassifier(Mean().eval(), 0.25, 2)
    assert "operating system" in plain.certify(x + 0.001, n=500).about
    assert plain.noise == "float"
    with pytest.raises(Refused, match="beside"):
        exactly.predict(x + 0.001)


def test_variation_and_distance_are_subtracted():
    x = torch.rand(2, 4)
    grid = SmoothedClassifier(Mean().eval(), 0.5, 2, noise="grid", seed=0)
    spec = grid.noise_spec(x)
    assert spec.cells == 2048.0
    setting = spec.setting(0.01, "")
    assert setting.distance == pytest.approx(2 / 2048, rel=1e-9)
    assert 0 < setting.noise.variation < 1e-13
    with pytest.raises(Refused, match="not Lipschitz"):
        grid.certify(x, lipschitz=1.0, map=SimplexMap("softmax"))


def test_image_grids():
    bytes_ = np.arange(256)
    for written in (bytes_ / 255, bytes_ * (1 / 255), np.float32(bytes_) / np.float32(255)):
        assert is_image(written.astype(np.float64))
    assert not is_image(np.array([0.5, 1.0]))
    assert not is_image(bytes_ / 255 + 1e-6)
    for sigma, cells in ((0.5, 3.0), (1e-5, 255.0), (1e4, 255.0)):
        with pytest.raises(InputError):
            Grid(sigma, cells)
