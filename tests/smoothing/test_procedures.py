import numpy as np
import pytest
import smoothing_references as slow
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.smoothing import PROCEDURES, certify_counts, certify_scores, clopper_pearson, radius_mono, radius_multi

HARD = [name for name, row in PROCEDURES.items() if row.hard]

#: the buckets of each procedure as it is printed: the class first
PRINTED = {
    "cohen": lambda counts: [[np.argmax(counts)], np.delete(np.arange(len(counts)), np.argmax(counts))],
    "bonferroni": lambda counts: [[int(k)] for k in np.argsort(-np.array(counts), kind="stable")],
    "cpm": slow.cpm_buckets,
}


@pytest.mark.parametrize("procedure", PRINTED)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=12), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_radii_equal_the_printed_algorithm(procedure: str, selection: list[int], seed: int):
    """Word for word: the partition, every bucket at its share of α, the radius of the largest upper bound."""
    law = np.array(selection) + 0.1
    estimation = np.random.default_rng(seed).multinomial(2000, law / law.sum())
    buckets = PRINTED[procedure](selection)
    alpha = 0.01 if len(buckets) == 2 else 0.01 / len(buckets)
    votes = [estimation[bucket].sum() for bucket in buckets]
    low = clopper_pearson(votes[0], 2000, alpha, "lower")
    up = 1 - low
    if len(buckets) > 2:
        up = min(clopper_pearson(votes[1:], 2000, alpha, "upper").max(), up)
    ours = certify_counts(selection, estimation, 0.5, 0.01, procedure)
    assert float(ours.radius) == pytest.approx(float(radius_multi(low, up, 0.5)), abs=1e-9)


@pytest.mark.parametrize("procedure", HARD)
def test_odd_counts(procedure: str):
    zeros = certify_counts(np.zeros((2, 4)), np.zeros((2, 4)), 0.5, 0.01, procedure)
    assert zeros.abstain.all()
    assert (zeros.radius == 0).all()
    one = certify_counts([0, 100, 0], [0, 1000, 0], 0.5, 0.001, procedure)
    cohen = float(radius_mono(clopper_pearson(1000, 1000, 0.001, "lower"), 0.5))
    assert int(one.prediction) == 1
    assert float(one.radius) <= cohen * (1 + 1e-9)
    assert int(certify_counts([50, 50], [500, 500], 0.5, 0.001, procedure).prediction) == -1
    two = certify_counts([90, 10], [900, 100], 0.5, 0.001, procedure)
    assert float(two.radius) == pytest.approx(float(certify_counts([90, 10], [900, 100], 0.5, 0.001, "cohen").radius))
    many = np.zeros(1000)
    many[7], many[13] = 80, 20
    wide = certify_counts(many, many * 100, 0.5, 0.001, procedure)
    assert int(wide.prediction) == 7
    assert float(wide.radius) > 0
    assert int(certify_counts(many, np.zeros(1000), 0.5, 0.001, procedure).prediction) == -1


@pytest.mark.medium
@pytest.mark.parametrize("procedure", HARD)
def test_batch_equals_one_by_one(procedure: str):
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.full(10, 0.3), 40)
    first = np.stack([rng.multinomial(100, q) for q in p]).reshape(5, 8, 10)
    second = np.stack([rng.multinomial(1000, q) for q in p]).reshape(5, 8, 10)
    batch = certify_counts(first, second, 0.25, 0.001, procedure)
    assert batch.radius.shape == (5, 8)
    for i in range(5):
        for j in range(8):
            single = certify_counts(first[i, j], second[i, j], 0.25, 0.001, procedure)
            assert float(single.radius) == batch.radius[i, j]
            assert int(single.prediction) == batch.prediction[i, j]


def test_direct_margin_wins_when_two_classes_share_everything():
    """p_y + p_k ≈ 1 with soft scores: one interval for the margin beats two, and the plan notices."""
    top = np.random.default_rng(6).beta(6, 4, (20, 3000))
    scores = np.stack([top * 0.98, (1 - top) * 0.98, np.full_like(top, 0.01), np.full_like(top, 0.01)], axis=-1)
    two = certify_scores(scores[:, :100], scores[:, 100:], 0.5, 0.001, "lvm")
    one = certify_scores(scores[:, :100], scores[:, 100:], 0.5, 0.001, "direct")
    assert one.radius.mean() >= two.radius.mean()


def test_lipschitz_never_hurts():
    scores = np.random.default_rng(7).dirichlet([4, 2, 1, 1], (30, 600))
    plain = certify_scores(scores[:, :100], scores[:, 100:], 0.5, 0.001, "lvm")
    aware = certify_scores(scores[:, :100], scores[:, 100:], 0.5, 0.001, "lvm", lipschitz=1.0)
    assert (aware.radius >= plain.radius * (1 - 1e-9)).mean() > 0.9  # the plan may differ
    assert aware.radius.mean() > 1.05 * plain.radius.mean()


def test_constant_scores_have_an_infinite_radius_and_certificates_say_what_they_cover():
    scores = np.tile([[0.9, 0.1]], (9000, 1))[None]
    found = certify_scores(scores[:, :10], scores, 0.5, 0.01, lipschitz=0.0)
    assert np.isinf(found.radius[0])
    assert "Not covered" in found.about


@pytest.mark.parametrize("interval", ["bernstein", "betting"])
def test_scores_whose_sums_round_beyond_one_are_taken(interval):
    scores = np.random.default_rng(0).dirichlet([0.1] * 5, (50, 40))
    assert (scores[..., 1:].sum(axis=-1) > 1).any()
    assert (certify_scores(scores[:, :10], scores, 0.5, 0.5, interval=interval).p_upper <= 1).all()
