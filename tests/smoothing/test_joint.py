"""Class and rival in one test: its risk by enumeration of every sample, with a check that has power, and what it gains."""

import numpy as np
import pytest
from scipy.special import ndtri
from scipy.stats import multinomial

from equipoise.smoothing.joint import joint_radius

N = 24
#: every sample of N draws among a class and two rivals
SAMPLES = np.array([(a, b, N - a - b) for a in range(N + 1) for b in range(N + 1 - a)], dtype=float)
SEEN = [(12.0, 5.0, 24.0), (40.0, 30.0, 100.0), (80.0, 19.0, 100.0), (8.0, 0.0, 20.0), (3.0, 3.0, 9.0)]


def radii(alpha: float, seen: tuple[float, float, float]) -> np.ndarray:
    same = tuple(np.full(len(SAMPLES), v) for v in seen)
    return joint_radius(SAMPLES[:, 0], SAMPLES[:, 1:].max(1), np.full(len(SAMPLES), float(N)), same, alpha)


def worst_risk(alpha: float, found: np.ndarray) -> float:
    """The largest probability, over laws of votes, of a radius beyond the true one."""
    worst = 0.0
    for p in np.linspace(0.05, 0.95, 37):
        for share in (0.5, 0.6, 0.75, 0.9, 0.999):
            law = np.array([p, (1 - p) * share, (1 - p) * (1 - share)])
            truth = 0.5 * (ndtri(law[0]) - ndtri(law[1]))
            chance = multinomial.pmf(SAMPLES, N, law)
            worst = max(worst, float(chance[found > max(truth, 0.0)].sum()))
    return worst


@pytest.mark.parametrize("seen", SEEN, ids=str)
@pytest.mark.parametrize("alpha", [0.2, 0.05, 0.001])
def test_the_risk_by_enumeration(alpha, seen):
    assert worst_risk(alpha, radii(alpha, seen)) <= alpha


def test_the_enumeration_has_power():
    found = [worst_risk(0.05, radii(0.05, seen)) for seen in SEEN]
    assert max(found) > 0.01, "the risk is spent, as far as 24 draws can"
    assert max(worst_risk(0.05, radii(0.5, seen)) for seen in SEEN) > 0.05, "and one that is too large is seen"


def test_votes_for_the_class_help_and_votes_for_the_rival_hurt():
    hits, rival = (v.ravel().astype(float) for v in np.meshgrid(np.arange(200, 500, 20), np.arange(0, 200, 20)))
    n, seen = np.full(len(hits), 1000.0), tuple(np.full(len(hits), v) for v in (33.0, 8.0, 100.0))
    base = joint_radius(hits, rival, n, seen, 1e-3)
    assert (joint_radius(hits + 1, rival, n, seen, 1e-3) >= base - 2e-3).all()
    assert (joint_radius(hits, rival + 1, n, seen, 1e-3) <= base + 1e-12).all()
    assert (joint_radius(hits, rival, n, seen, 1e-3, variation=1e-4) <= base + 1e-12).all()
    assert (joint_radius(hits, rival, n, seen, 1e-2) >= base).all()
