"""The procedure `rivals`: its risk, exactly and by simulation, with a check that catches the invalid shortcut."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import multinomial
from smoothing_laws import too_many

from equipoise.smoothing import certify_counts, clopper_pearson, radius_multi
from equipoise.smoothing.bounds import Gaussian
from equipoise.smoothing.planning import TargetTest
from equipoise.smoothing.procedures import PROCEDURES

pytestmark = pytest.mark.medium

SIGMA = 1.0
Certify = Callable[[np.ndarray, np.ndarray, float], tuple[np.ndarray, np.ndarray]]


def rivals(first: np.ndarray, second: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    found = certify_counts(first, second, SIGMA, alpha, "rivals")
    return found.selected, found.radius


def shortcut(first: np.ndarray, second: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Invalid: only the rival picked on the selection sample is bounded."""
    order, rows, n = np.argsort(-first, axis=1, kind="stable"), np.arange(len(first)), second.sum(axis=1)
    low = clopper_pearson(second[rows, order[:, 0]], n, alpha / 2, "lower")
    up = clopper_pearson(second[rows, order[:, 1]], n, alpha / 2, "upper")
    return order[:, 0], radius_multi(low, np.minimum(up, 1 - low), SIGMA)


def truth(p: np.ndarray) -> np.ndarray:
    """The radius of the worst classifier with these probabilities, by selected class."""
    return np.array([float(radius_multi(p[k], np.delete(p, k).max(), SIGMA)) for k in range(len(p))])


def outcomes(n: int) -> np.ndarray:
    return np.array([(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)])


def exact_risk(certify: Certify, n0: int, n: int, alpha: float) -> float:
    """The largest probability of a wrong certificate over a grid of laws on three classes."""
    first, second = outcomes(n0), outcomes(n)
    pairs = np.array(list(itertools.product(range(len(first)), range(len(second)))))
    selected, radius = certify(first[pairs[:, 0]], second[pairs[:, 1]], alpha)
    worst = 0.0
    for a, b in itertools.product(np.linspace(0, 1, 26), repeat=2):
        if a + b <= 1 + 1e-12:
            p = np.array([a, b, max(1 - a - b, 0.0)])
            wrong = radius > truth(p)[selected] * (1 + 1e-12)
            weights = multinomial.pmf(first, n0, p)[pairs[:, 0]] * multinomial.pmf(second, n, p)[pairs[:, 1]]
            worst = max(worst, float(weights[wrong].sum()))
    return worst


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5])
@pytest.mark.parametrize(("n0", "n"), [(1, 6), (3, 9), (5, 14)])
def test_the_risk_of_small_cases_is_at_most_alpha_by_enumeration(n0: int, n: int, alpha: float):
    assert exact_risk(rivals, n0, n, alpha) <= alpha


def test_the_enumeration_catches_the_shortcut():
    assert exact_risk(shortcut, 1, 14, 0.5) > 0.5


LAWS = {
    "two equal rivals": (0.5, 0.25, 0.25),
    "class and rival equal": (0.4, 0.4, 0.2),
    "many equal rivals": (0.28, *[0.08] * 9),
    "one hidden rival": (0.45, 0.25, *[0.01] * 30),
    "all equal": tuple([0.1] * 10),
    "nearly sure": (0.995, *[0.005 / 9] * 9),
    "two classes": (0.7, 0.3),
    "rival twice as strong as it looks": (0.35, 0.33, *[0.04] * 8),
}


def wrong_radii(certify: Certify, law: tuple[float, ...], n0: int, n: int, alpha: float, reps: int) -> np.ndarray:
    rng, p = np.random.default_rng(1), np.asarray(law) / np.sum(law)
    first, second = rng.multinomial(n0, p, reps), rng.multinomial(n, p, reps)
    selected, radius = certify(first, second, alpha)
    return radius > truth(p)[selected] * (1 + 1e-12)


LONG = [(n0, n, alpha, 200_000) for n0, n in ((8, 120), (100, 1000)) for alpha in (0.05, 0.001)]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("draws", [(8, 120, 0.05, 10_000), *(pytest.param(d, marks=pytest.mark.slow) for d in LONG)])
def test_the_risk_over_adversarial_laws(law: str, draws: tuple[int, int, float, int]):
    n0, n, alpha, reps = draws
    assert not too_many(wrong_radii(rivals, LAWS[law], n0, n, alpha, reps), alpha)


def test_the_same_check_catches_the_shortcut():
    assert too_many(wrong_radii(shortcut, LAWS["one hidden rival"], 8, 120, 0.05, 10_000), 0.05)


@pytest.mark.parametrize(("c", "p1", "share", "n"), [
    (1000, 0.3, 0.1, 1000), (1000, 0.5, 0.5, 1000), (100, 0.9, 0.1, 1000), (10, 0.9, 0.5, 1000), (10, 0.7, 1.0, 1000),
    (10, 0.999, 1.0, 10_000), (3, 0.6, 1.0, 10_000), (3, 0.99, 0.2, 1000), (10, 0.99, 0.1, 100_000),
])  # fmt: skip
def test_never_below_the_better_of_the_others_by_more_than_planning_noise(c, p1, share, n):
    rng = np.random.default_rng(0)
    rest = np.full(c, (1 - p1) * (1 - share) / max(c - 2, 1))
    rest[:2] = p1, (1 - p1) * share
    first, second = rng.multinomial(100, rest / rest.sum(), 300), rng.multinomial(n, rest / rest.sum(), 300)
    names = ("cohen", "bonferroni", "cpm", "rivals")
    mean = {name: certify_counts(first, second, 1.0, 1e-3, name).radius.mean() for name in names}
    assert mean["rivals"] >= 0.994 * max(mean.values())
    if c == 1000:
        assert mean["rivals"] >= 1.15 * mean["cpm"]


@pytest.mark.parametrize("p", [(0.5, 0.25, 0.25), (0.4, 0.2, 0.2, 0.2), (0.6, 0.4, 0.0), (0.3, 0.1, *[0.06] * 10)])
def test_a_target_just_out_of_reach_is_certified_at_most_a_share_alpha_of_the_time(p):
    """H0 true at its edge: the target equals the true radius; looked at after every 20 draws."""
    rng, alpha, reps, steps = np.random.default_rng(0), 0.1, 300, 60
    p = np.asarray(p) / np.sum(p)
    epsilon = float(radius_multi(p[0], p[1:].max(), SIGMA)) + 1e-9
    wrong, used = [], 0
    for _ in range(reps):
        ranked = -np.sort(-rng.multinomial(50, p)[1:]).astype(float)
        first = np.concatenate([[float(rng.binomial(50, p[0]))], ranked])
        test = TargetTest.of(PROCEDURES["rivals"], first, epsilon, Gaussian(SIGMA))
        used += len(test.levels) > 1
        votes = np.cumsum(rng.multinomial(20, p, steps), axis=0)
        at = (5, 15, 30, 59)
        wrong.append(any(test.log_e(votes[k, 0], votes[k, 1:].max(), 20 * (k + 1)) >= np.log(1 / alpha) for k in at))
    assert not too_many(wrong, alpha)
    assert used > 0 or p[0] + p[1] == 1


def test_a_class_below_one_half_is_certified_adaptively():
    test = TargetTest.of(PROCEDURES["rivals"], np.array([40.0, 8, *[6] * 9]), 0.2, Gaussian(SIGMA))
    assert test.log_e(4000, 800, 10_000) > np.log(1e3)
    alone = TargetTest.of(PROCEDURES["cohen"], np.array([40.0, 8, *[6] * 9]), 0.2, Gaussian(SIGMA))
    assert alone.log_e(4000, 800, 10_000) < 0
