import numpy as np
import pytest
import smoothing_references as slow
from scipy import stats
from smoothing_laws import too_many

from equipoise.smoothing import betting, certify_scores, clopper_pearson, empirical_bernstein, hoeffding
from equipoise.smoothing.intervals import bet_sizes, lipschitz_interval, wealth

GRID = np.concatenate([[0.0, 1e-6, 1e-3], np.linspace(0.01, 0.99, 99), [0.999, 1 - 1e-6, 1.0]])


def _bernoulli_bounds(name, n, alpha, side):
    """The bound for every possible count: exact coverage is then a finite sum."""
    k = np.arange(n + 1)
    mean, var = k / n, k * (n - k) / (n * max(n - 1, 1))
    if name == "clopper_pearson":
        return clopper_pearson(k, n, alpha, side)
    if name == "hoeffding":
        return hoeffding(mean, n, alpha, side)
    return empirical_bernstein(mean, var, n, alpha, side)


@pytest.mark.parametrize("name", ["clopper_pearson", "hoeffding", "empirical_bernstein"])
@pytest.mark.parametrize("alpha", [0.2, 0.05, 0.001])
def test_exact_coverage_by_enumeration(name, alpha):
    for n in [2, 3, 5, 10, 30, 100, 200]:
        pmf = stats.binom.pmf(np.arange(n + 1)[None, :], n, GRID[:, None])
        low, up = (_bernoulli_bounds(name, n, alpha, s) for s in ("lower", "upper"))
        both = _bernoulli_bounds(name, n, alpha, "both")
        p = GRID[:, None]
        for covered in (low <= p, p <= up, (both[0] <= p) & (p <= both[1])):
            assert ((pmf * covered).sum(axis=1) >= 1 - alpha - 1e-12).all()


def test_clopper_pearson_large_and_extreme():
    low = clopper_pearson([0, 1, 99_999, 100_000], 100_000, 1e-3, "lower")
    assert low[0] == 0
    assert low[3] == pytest.approx(1e-3 ** (1 / 100_000), rel=1e-9)
    for k in (10, 50_000, 99_990):
        tail = slow.binomial_tail(k, 100_000, float(clopper_pearson(k, 100_000, 1e-3, "lower")))
        assert 1e-3 * (1 - 1e-8) <= tail <= 1e-3
    up = clopper_pearson([0, 100_000], 100_000, 1e-3, "upper")
    assert up[1] == 1
    assert up[0] == pytest.approx(1 - 1e-3 ** (1 / 100_000), rel=1e-9)


#: mean and draws of bounded laws
LAWS = {
    "coin 0.9": (0.9, lambda rng, s: (rng.random(s) < 0.9).astype(float)),
    "coin 0.02": (0.02, lambda rng, s: (rng.random(s) < 0.02).astype(float)),
    "uniform": (0.5, lambda rng, s: rng.random(s)),
    "beta(8, 1)": (8 / 9, lambda rng, s: rng.beta(8, 1, s)),
    "beta(.1, .1)": (0.5, lambda rng, s: rng.beta(0.1, 0.1, s)),
    "three atoms": (0.945, lambda rng, s: rng.choice([0.0, 0.5, 1.0], p=[0.01, 0.09, 0.9], size=s)),
    "narrow": (0.705, lambda rng, s: 0.7 + 0.01 * rng.random(s)),
}


@pytest.mark.medium
@pytest.mark.parametrize("law", LAWS)
def test_coverage_for_bounded_laws(law):
    rng = np.random.default_rng(len(law))
    reps, n, alpha = 4000, 80, 0.1
    truth, draw = LAWS[law]
    x = draw(rng, (reps, n))
    mean, var = x.mean(axis=1), x.var(axis=1, ddof=1)
    bounds = {
        "hoeffding": [hoeffding(mean, n, alpha, s) for s in ("lower", "upper")],
        "bernstein": [empirical_bernstein(mean, var, n, alpha, s) for s in ("lower", "upper")],
        "betting": [betting(x, alpha, s) for s in ("lower", "upper")],
    }
    for name, (low, up) in bounds.items():
        assert not too_many(low > truth, alpha), name
        assert not too_many(up < truth, alpha), name


def test_the_gambler_is_never_too_lucky():
    """Optional stopping: the wealth at the true mean reaches 1/α at *any* time with probability at most α."""
    rng = np.random.default_rng(5)
    reps, n, alpha = 4000, 300, 0.1
    for law in ("coin 0.9", "beta(.1, .1)", "three atoms"):
        truth, draw = LAWS[law]
        x = draw(rng, (reps, n))
        goal = np.full((reps, 1), np.log(1 / alpha))
        rich = wealth(x, bet_sizes(x, goal), np.full((reps, 1), truth)).max(axis=1) >= np.log(1 / alpha)
        assert not too_many(rich, alpha)
        assert rich.mean() > alpha / 10, "and the bets are not idle"


def test_the_lipschitz_interval_is_the_printed_one_and_covers():
    """`mean ± σL√(2 ln(1/α)/n)`: Gaussian scores, for which its tail is nearly sharp, and a wrong constant that is caught."""
    rng = np.random.default_rng(9)
    reps, n, alpha, sigma, L = 20_000, 50, 0.05, 0.2, 0.5
    scores = np.clip(0.5 + L * sigma * rng.standard_normal((reps, n)), 0, 1)  # clipping at 5 standard deviations
    mean = scores.mean(axis=1)
    low, up = (lipschitz_interval(mean, n, alpha, sigma * L, side) for side in ("lower", "upper"))
    np.testing.assert_allclose(mean - low, sigma * L * np.sqrt(2 * np.log(1 / alpha) / n), rtol=1e-9)
    assert not too_many(low > 0.5, alpha)
    assert not too_many(up < 0.5, alpha)
    assert too_many(lipschitz_interval(mean, n, alpha, sigma * L / 2, "lower") > 0.5, alpha)


def test_a_small_constant_shortens_the_bounds_of_soft_scores():
    """Where σL√(2 ln(1/α)/n) is below Bernstein's interval whatever the variance; a larger constant changes nothing."""
    scores = 0.5 + 0.05 * np.random.default_rng(10).uniform(-1, 1, (30, 400, 1))
    scores = np.concatenate([scores, 0.6 * (1 - scores), 0.4 * (1 - scores)], axis=2)
    pick = (scores[:, :50], scores, 0.25, 0.01, "lvm")
    bounds = {L: certify_scores(*pick, lipschitz=L, pair_lipschitz=2 * L) for L in (0.3, 3.0)}
    half_width = 0.25 * 0.3 * np.sqrt(2 * np.log(3 / 0.01) / 400)
    one = bounds[0.3].buckets == 3
    assert one.any()
    np.testing.assert_allclose(scores[one, :, 0].mean(axis=1) - bounds[0.3].p_lower[one], half_width, rtol=1e-6)
    assert (bounds[0.3].p_lower > bounds[3.0].p_lower).all()
