import math

import numpy as np
import pytest
import smoothing_references as slow
from scipy.special import ndtri

from equipoise.core import Bracket
from equipoise.smoothing import radius_mono, radius_multi, radius_multi_lipschitz
from equipoise.smoothing.radii import radius_mono_lipschitz


@pytest.mark.medium
def test_never_above_the_definition_and_close_to_it():
    rng = np.random.default_rng(0)
    for _ in range(60):
        p1 = rng.uniform(0.3, 1)
        p2 = rng.uniform(0, min(p1, 1 - p1))
        sigma, lipschitz = 10 ** rng.uniform(-1, 0.5), 10 ** rng.uniform(-2, 2.5)
        truth = slow.spec_radius(p1, p2, sigma, lipschitz)
        ours = float(radius_multi_lipschitz(p1, p2, sigma, lipschitz))
        assert ours <= truth
        assert ours >= truth * (1 - 1e-8) - 1e-10
        cohen = sigma * (slow.quantile(p1) - slow.quantile(p2)) / 2
        assert float(radius_multi(p1, p2, sigma)) <= cohen
        assert float(radius_mono(p1, sigma)) <= max(sigma * slow.quantile(p1), 0)
        alone = max(slow.spec_radius(p1, 1 - p1, sigma, lipschitz), 0)
        assert alone * (1 - 1e-7) - 1e-10 <= float(radius_mono_lipschitz(p1, sigma, lipschitz)) <= alone


def test_limits_and_monotonicity_in_the_constant():
    rng = np.random.default_rng(1)
    p1 = rng.uniform(0.5, 1, 200)
    p2 = (1 - p1) * rng.uniform(0, 1, 200)
    cohen = radius_multi(p1, p2, 0.5)
    np.testing.assert_array_equal(radius_multi_lipschitz(p1, p2, 0.5, np.inf), cohen)
    np.testing.assert_allclose(radius_multi_lipschitz(p1, p2, 0.5, 1e8), cohen, rtol=1e-9)
    previous = np.full(200, np.inf)
    for lipschitz in np.geomspace(1e-3, 1e7, 60):
        now = radius_multi_lipschitz(p1, p2, 0.5, lipschitz)
        assert np.all(now <= previous * (1 + 1e-9))
        assert np.all(now >= cohen)
        weak = (p1 - p2) / (2 * lipschitz * math.erf(1 / (math.sqrt(2) * lipschitz)))
        assert np.all(now >= weak * (1 - 1e-9)), "the strong law is never weaker"
        previous = now
    assert np.all(radius_multi_lipschitz(p1, p2, 0.5, 1e-9) >= (p1 - p2) / 2e-9 * (1 - 1e-9))
    assert np.all(np.isinf(radius_multi_lipschitz(0.6, 0.4, 0.5, 0.0)))
    assert radius_multi_lipschitz(0.4, 0.4, 0.5, 0.0) == 0


def test_ends_are_safe():
    assert radius_multi_lipschitz(0.9, 0.1, 0.5, Bracket(0.5, 1.0)) == radius_multi_lipschitz(0.9, 0.1, 0.5, 1.0)
    assert radius_multi(1.0, 0.0, 0.5) == np.inf
    assert radius_multi(1.0, 1.0, 0.5) == 0
    assert radius_multi(0.0, 0.0, 0.5) == 0
    assert radius_multi(0.2, 0.8, 0.5) == 0
    assert radius_mono(0.5, 0.5) == 0
    for lipschitz in (0.1, 10.0):
        assert radius_multi_lipschitz(1.0, 1.0, 0.5, lipschitz) == 0
        assert radius_multi_lipschitz(0.3, 0.31, 0.5, lipschitz) == 0
        tiny = float(radius_multi_lipschitz(1 - 2**-53, 5e-324, 0.5, lipschitz))
        assert 0 < tiny < np.inf
    assert float(radius_multi_lipschitz(0.45, 0.2, 0.5, 1.0)) <= slow.spec_radius(0.45, 0.2, 0.5, 1.0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("sigma", "lipschitz"), [(1e-300, 1e-300), (1e-30, 1e-280), (1e300, 1e300), (1e120, 1e200)])
def test_constants_at_the_ends_of_the_floats_stay_sound(sigma, lipschitz):
    """A margin of 0.8 lasts at most as far as the steepest ramp: 0.4/L where L·σ is tiny, σ·Φ⁻¹(0.9) where it is huge."""
    tiny = lipschitz < 1
    limit = 0.4 / lipschitz if tiny else sigma * ndtri(0.9)
    found = [radius_multi_lipschitz(0.9, 0.1, sigma, lipschitz), radius_mono_lipschitz(0.9, sigma, lipschitz)]
    assert all(0 < float(r) <= limit * (1 + 1e-12) for r in found)
