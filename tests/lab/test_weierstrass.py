import math

import pytest
import smoothing_references as slow
import torch

from equipoise_lab import weierstrass as theory


def _ramp_slope(width: float) -> float:
    """Largest slope of the Gaussian mean of a unit ramp, by differences in 50 digits."""
    step = slow.mp.mpf("1e-12")
    return float((slow.ramp_mean(step, width) - slow.ramp_mean(-step, width)) / (2 * step))


@pytest.mark.parametrize("sigma", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("lipschitz", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("mass", [1.0, 3.0])
def test_component_bound_is_attained_by_the_ramp(sigma, lipschitz, mass):
    attained = mass * _ramp_slope(mass / (lipschitz * sigma)) / sigma
    bound = theory.component_bound(sigma, lipschitz, mass=mass)
    assert attained <= bound * (1 + 1e-14)
    assert bound == pytest.approx(attained, rel=1e-9)
    assert bound <= min(lipschitz, theory.range_bound(sigma, mass=mass))


def test_optimal_sigma_is_where_the_gain_is_largest():
    for lipschitz, mass in [(1.0, 1.0), (3.0, 2.0)]:
        best = theory.optimal_sigma(lipschitz, mass=mass)
        assert best == pytest.approx(mass / (math.sqrt(2 * math.pi) * lipschitz))
        assert theory.optimal_sigma(lipschitz, mass=mass, vector=True) == pytest.approx(best * math.sqrt(2))
        top = theory.gap(best, lipschitz, mass=mass)
        assert all(theory.gap(best * f, lipschitz, mass=mass) < top for f in (0.5, 0.9, 1.1, 2.0))
    assert theory.optimal_sigma(0.0) == math.inf


def test_probit_is_the_exact_case():
    model, sigma = theory.Probit(torch.tensor([1.0, -2.0, 2.0]), 0.1, 1.5), 0.6
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for i in range(3):
        estimate = theory.smooth_value(model, x[i], sigma, 200_000, seed=i)
        truth = model.smoothed(x[i], sigma)
        assert estimate.lower <= truth <= estimate.upper
        assert abs(estimate.mean - truth) < 0.01
        slope = theory.smooth_gradient(model, x[i], sigma, 200_000, seed=i)
        exact = model.gradient(x[i], sigma)
        assert ((slope.lower <= exact) & (exact <= slope.upper)).all()
        torch.testing.assert_close(slope.mean, exact, atol=0.02, rtol=0)
    steep = model.gradient(x, sigma).norm(dim=1)
    p = model.smoothed(x, sigma)
    assert (steep <= theory.component_bound(sigma, model.lipschitz)).all()
    for s, value in zip(steep.tolist(), p.tolist(), strict=True):
        assert s <= theory.lipschitz_local_bound(value, sigma, model.lipschitz) * (1 + 1e-9)
        assert s <= theory.gaussian_bound(value, sigma) * (1 + 1e-9)
    torch.testing.assert_close(model.radius(x), (x @ model.weight.double() + 0.1).abs() / 3)


def test_stein_interval_covers():
    """A discontinuous function, no derivative used: coverage over repetitions, per coordinate."""
    sigma, x, misses = 0.5, torch.tensor([0.2, 0.0], dtype=torch.float64), 0
    exact = theory.Probit(torch.tensor([1.0, 0.0]), 0.0, 1e9).gradient(x, sigma)
    for seed in range(300):
        e = theory.smooth_gradient(lambda z: (z[:, 0] > 0).double(), x, sigma, 50, alpha=0.2, seed=seed)
        misses += int(((e.lower > exact) | (exact > e.upper))[0])
    assert misses <= 60 + 35
