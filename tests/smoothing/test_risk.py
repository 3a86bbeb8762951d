"""Risk end to end: certificates above the true radius are at most a share α, for every row of the table."""

import functools

import numpy as np
import pytest
import torch
from smoothing_laws import SCORE_LAWS, SIGMA, VOTE_LAWS, HalfSpace, ScoreLaw, VoteLaw, too_many

from equipoise.smoothing import PROCEDURES, SimplexMap, SmoothedClassifier, certify_counts, certify_scores

REPS, ALPHA = 6_000, 0.1
HARD = [name for name, row in PROCEDURES.items() if row.hard]
SOFT = [name for name, row in PROCEDURES.items() if row.soft]


def wrong_radius(certificates, law: VoteLaw | ScoreLaw) -> np.ndarray:
    return certificates.radius > law.truth(certificates.selected)


@functools.cache
def votes_of(law: VoteLaw, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Selection votes and estimation votes of a law: the same for every row of the table."""
    rng = np.random.default_rng(n)
    return law.draw(rng, 20, REPS), law.draw(rng, n, REPS)


@pytest.mark.medium
@pytest.mark.parametrize("law", VOTE_LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("procedure", HARD)
@pytest.mark.parametrize("n", [30, 400])
def test_votes(procedure: str, law: VoteLaw, n: int):
    result = certify_counts(*votes_of(law, n), SIGMA, ALPHA, procedure)
    assert not too_many(wrong_radius(result, law), ALPHA)
    p = np.asarray(law.p)
    rival = np.array([np.delete(p, k).max() for k in range(len(p))])[result.selected]
    direct = result.direct
    misses = ~direct & ((result.p_lower > p[result.selected]) | (result.p_upper < rival))
    assert not too_many(misses, ALPHA), "the bounds themselves, not only the radius"


@functools.cache
def scores_of(law: int, n: int, reps: int) -> tuple[np.ndarray, np.ndarray]:
    """Selection and estimation scores of a law, the same for every row."""
    rng = np.random.default_rng(n)
    return SCORE_LAWS[law].draw(rng, 10, reps), SCORE_LAWS[law].draw(rng, n, reps)


def score_cases():
    """Every law and row; the quick ones are each row at two laws of its own, each law at one row."""
    for i, law in enumerate(SCORE_LAWS):
        for j, procedure in enumerate(SOFT):
            for aware in (False, True):
                if aware and law.lipschitz is None:
                    continue
                quick = (i + j) % 3 == 0 and aware == (i < 4 and law.lipschitz is not None)
                marks = () if quick else (pytest.mark.slow,)
                yield pytest.param(i, procedure, aware, marks=marks, id=f"{law.name}-{procedure}-{aware}")


@pytest.mark.parametrize(("law", "procedure", "aware"), [*score_cases()])
def test_scores(law: int, procedure: str, aware: bool):
    first, second = scores_of(law, 60, 2000)
    constant = SCORE_LAWS[law].lipschitz if aware else None
    pair = 2 * constant if aware else None
    found = certify_scores(first, second, SIGMA, ALPHA, procedure, lipschitz=constant, pair_lipschitz=pair)
    assert not too_many(wrong_radius(found, SCORE_LAWS[law]), ALPHA)


@pytest.mark.parametrize(("law", "reps"), [(0, 800), pytest.param(4, 5000, marks=pytest.mark.slow),
                                           pytest.param(5, 5000, marks=pytest.mark.slow)])  # fmt: skip
def test_scores_with_betting(law: int, reps: int):
    first, second = scores_of(law, 100, reps)
    constant = SCORE_LAWS[law].lipschitz
    found = certify_scores(first, second, SIGMA, ALPHA, lipschitz=constant, interval="betting")
    assert not too_many(wrong_radius(found, SCORE_LAWS[law]), ALPHA)


def test_the_check_has_power_no_split():
    """Bonferroni with every interval at α instead of α/c, which is what 3α gives three classes, must be caught."""
    law = VoteLaw("", (0.4, 0.35, 0.25))
    rng = np.random.default_rng(3)
    found = certify_counts(law.draw(rng, 20, REPS), law.draw(rng, 400, REPS), SIGMA, 3 * ALPHA, "bonferroni")
    rival = np.array([0.35, 0.4, 0.4])[found.selected]
    assert too_many((found.p_lower > np.asarray(law.p)[found.selected]) | (found.p_upper < rival), ALPHA)


def test_the_check_has_power_wrong_constant():
    """A Lipschitz constant that is too small gives certificates beyond the boundary."""
    law = SCORE_LAWS[1]
    first, second = scores_of(1, 200, 800)
    assert too_many(wrong_radius(certify_scores(first, second, SIGMA, ALPHA, lipschitz=law.lipschitz / 10), law), ALPHA)


def whole_cases():
    """Rows that count votes ignore the map; each soft row is quick with one choice of it."""
    for name, row in PROCEDURES.items():
        for choice in ("global", "per-input") if row.soft else ("global",):
            quick = not row.soft or (name, choice) in (("rivals", "global"), ("lvm", "per-input"))
            yield pytest.param(name, choice, 40 if quick else 120, marks=() if quick else (pytest.mark.slow,))


@pytest.mark.medium
@pytest.mark.parametrize(("procedure", "choice", "count"), [*whole_cases()])
def test_the_whole_classifier_keeps_the_risk(procedure: str, choice: str, count: int):
    """From the network to the radius, maps chosen on the way: inputs at a known distance, each with its own noise."""
    smooth = SmoothedClassifier(HalfSpace(1.0, 0.0, scale=2.0).eval(), SIGMA, 2, chunk_size=50)
    x = torch.zeros(count, 2)
    x[:, 0] = 0.3
    grid = [SimplexMap("hardmax"), *(SimplexMap(m, t) for m in ("softmax", "sparsemax") for t in (0.3, 10.0))]
    aware = 2 * 2**0.5 * (1 + 1e-6) if PROCEDURES[procedure].soft else None
    result = smooth.certify(x, 50, 200, ALPHA, procedure, map=choice, grid=grid, lipschitz=aware)
    assert not too_many((result.radius > 0.3) | ((result.radius > 0) & (result.selected == 1)), ALPHA)
    assert result.radius.mean() > 0.1
