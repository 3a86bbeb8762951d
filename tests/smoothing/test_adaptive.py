import numpy as np
import pytest
import torch
from scipy import stats
from smoothing_laws import HalfSpace, too_many

from equipoise.smoothing import SmoothedClassifier, certify_adaptive, radius_mono
from equipoise.smoothing.intervals import log_e_value
from equipoise.smoothing.planning import target_probability

pytestmark = pytest.mark.medium

ALPHA = 0.05


@pytest.mark.parametrize("p0", [0.5, 0.8, 0.99])
def test_e_value_has_mean_at_most_one_exactly(p0):
    """E[e_t] under p ≤ p0, summed over all outcomes: at most 1, and close to 1 at p0."""
    for t in (1, 5, 40, 150):
        k = np.arange(t + 1)
        e = np.exp(log_e_value(k, t, p0))
        for p in (p0, p0 * 0.99, p0 * 0.8, p0 / 2):
            assert (stats.binom.pmf(k, t, p) * e).sum() <= 1 + 1e-9
        assert (stats.binom.pmf(k, t, p0) * e).sum() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(
    ("hits", "draws", "p0"), [(160577, 160577, 0.9984), (1278632, 1278633, 0.9945), (9980, 10000, 0.99)]
)
def test_e_value_is_rounded_down(hits, draws, p0):
    """Against thirty digits: ln B(a, b) cancels, and was too large by 2e-9."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(30):
        p = mpmath.mpf(p0)
        least = mpmath.log(mpmath.betainc(0.5, 0.5, 0, 1 - p))
        mixture = mpmath.loggamma(hits + 0.5) + mpmath.loggamma(draws - hits + 0.5) - mpmath.loggamma(draws + 1)
        truth = mixture - least - hits * mpmath.log(p) - (draws - hits) * mpmath.log1p(-p)
        assert truth - 1e-5 < float(log_e_value(hits, draws, p0)) <= truth


def test_risk_at_any_stopping_time():
    """Look after every chunk for a long time: a true p at p0 is certified at most a share α of the time."""
    rng = np.random.default_rng(0)
    for p0 in (0.55, 0.9):
        steps = rng.binomial(50, p0, (4_000, 60)).cumsum(axis=1)
        draws = 50 * np.arange(1, 61)
        certified = (log_e_value(steps, draws, p0) >= np.log(1 / ALPHA)).any(axis=1)
        assert not too_many(certified, ALPHA)
        assert certified.mean() > ALPHA / 20, "and it is not idle"


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5, 1.0])
def test_target_probability_reaches_the_radius_and_no_smaller_one_does(epsilon):
    p0 = target_probability(epsilon, 0.5)
    assert radius_mono(p0, 0.5) >= epsilon
    assert epsilon == 0 or radius_mono(p0 - 1e-6, 0.5) < epsilon


def _points(*d: float) -> torch.Tensor:
    return torch.tensor([[v, 0.0] for v in d])


def test_target_mode():
    smooth = SmoothedClassifier(HalfSpace(1.0, 0.0, scale=10.0).eval(), 0.5, 2)
    x = _points(0.8, 0.3, -0.8, 0.5)
    result = certify_adaptive(smooth, x, target_radius=0.5, n_max=5000)
    assert result.details["verdicts"][:3] == ["certified", "hopeless", "certified"]
    assert result.prediction[:3].tolist() == [0, -1, 1]
    assert result.radius[:3].tolist() == [0.5, 0.0, 0.5]
    assert (result.draws[:3] < 1500).all()
    again = certify_adaptive(smooth, x[1:2], target_radius=0.5, n_max=5000, ids=[1])
    assert again.draws[0] == result.draws[1]
