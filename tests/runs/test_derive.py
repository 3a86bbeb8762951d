"""What is derived again from stored counts: the same as sampling with those settings, or refused with the reason."""

from dataclasses import replace

import numpy as np
import pytest
import runs_nets

from equipoise.core import Bound, InputError, Kind, Refused
from equipoise.runs import certify, open_run
from equipoise.runs.run import derive
from equipoise.runs.store import DataRecord, Manifest, ModelRecord, Row, Settings
from equipoise.smoothing import PROCEDURES, SimplexMap, SmoothedClassifier
from equipoise.smoothing.intervals import log_e_value
from equipoise.smoothing.planning import target_probability

VOTES = ("cohen", "bonferroni", "cpm", "rivals", "direct")


class Counted(runs_nets.Net):
    def forward(self, x):
        self._calls = getattr(self, "_calls", 0) + 1
        return super().forward(x)


@pytest.mark.parametrize("alpha", [0.2, 0.001, 1e-9])
@pytest.mark.parametrize("procedure", VOTES)
def test_votes_serve_every_vote_procedure(tmp_path, xy, alpha, procedure):
    model = Counted().eval()
    run = certify(model, xy, run_dir=tmp_path / "a", sigma=0.3, n=400, procedure="cohen")
    before = model._calls
    derived = open_run(tmp_path / "a").certificates(alpha=alpha, procedure=procedure)
    assert model._calls == before
    smooth = SmoothedClassifier(model, 0.3, 4, map=SimplexMap("hardmax"))
    direct = smooth.certify(xy[0], n=400, alpha=alpha, procedure=procedure)
    assert np.array_equal(derived.radius, direct.radius)
    assert np.array_equal(derived.prediction, direct.prediction)
    assert (derived.alpha, derived.procedure) == (alpha, procedure)
    assert np.array_equal(run.certificates().radius, run.certificates(0.001, "cohen").radius)


@pytest.mark.parametrize("procedure", VOTES[:3])
def test_a_soft_run_also_carries_the_votes_of_its_draws(tmp_path, net, xy, procedure):
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=400, procedure="lvm", map="softmax:1.0")
    derived = run.certificates(procedure=procedure)
    votes = SmoothedClassifier(net, 0.3, 4).certify(xy[0], n=400, procedure=procedure)
    assert np.array_equal(derived.radius, votes.radius)
    assert "majority vote" in derived.about
    assert "softmax" in run.certificates().about


@pytest.mark.parametrize("sampled", ["lvm", "direct"])
def test_soft_moments_at_another_risk_keep_their_buckets(tmp_path, net, xy, sampled):
    """A smaller risk shrinks every radius, a larger one grows it; at the run's own risk nothing changes."""
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=400, procedure=sampled, map="softmax:1.0")
    radii = [run.certificates(alpha=a).radius for a in (0.2, 0.001, 1e-6)]
    assert (radii[0] >= radii[1]).all()
    assert (radii[1] >= radii[2]).all()
    assert radii[0].sum() > radii[2].sum()
    assert np.array_equal(radii[1], run.certificates().radius)
    assert np.array_equal(run.certificates(alpha=0.2).buckets, run.certificates().buckets)
    assert run.certificates(procedure="lvm").procedure == "lvm"
    assert (run.certificates(procedure="rivals").radius >= radii[1] * 0.97).all()


def test_another_constant_for_a_soft_run(tmp_path, net, xy):
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=400, procedure="lvm", map="softmax:4.0")
    plain, small, large = (run.certificates(lipschitz=v) for v in (None, 5.0, 500.0))
    assert (small.radius >= large.radius).all()
    assert (large.radius >= plain.radius * (1 - 1e-6)).all()
    assert small.radius.sum() > plain.radius.sum()
    assert "assumption" in small.details["lipschitz"]
    assert any("assumption" in note for note in run.results(lipschitz=5.0).notes)
    with pytest.raises(Refused, match="only estimate"):
        run.certificates(lipschitz=Bound(5.0, Kind.ESTIMATE))


def test_a_computed_constant_is_not_called_an_assumption(tmp_path, net, xy):
    common = {"sigma": 0.3, "n": 200, "procedure": "lvm", "map": "softmax:4.0"}
    run = certify(net, xy, run_dir=tmp_path / "a", lipschitz="auto", **common)
    norm = float(np.linalg.norm(net.linear.weight.detach().numpy(), 2))
    assert run.manifest.lipschitz.value >= 4.0 * norm * (1 - 1e-6)
    assert "computed" in run.certificates().details["lipschitz"]
    given = certify(net, xy, run_dir=tmp_path / "b", lipschitz=99.0, **common)
    assert "assumption" in given.certificates().details["lipschitz"]


#: (run, what is asked of it, words of the refusal)
REFUSED = [
    ({"procedure": "cohen"}, {"procedure": "lvm"}, Refused, "stored votes only"),
    ({"procedure": "cohen"}, {"lipschitz": 1.0}, Refused, "votes have no Lipschitz constant"),
    ({"procedure": "cohen"}, {"alpha": 0.0}, InputError, "risk alpha"),
    ({"procedure": "cohen"}, {"alpha": 1.0}, InputError, "risk alpha"),
    ({"procedure": "cohen"}, {"procedure": "kohen"}, InputError, "unknown procedure"),
    ({"procedure": "cohen"}, {"target_radius": 0.1}, InputError, "adaptive runs"),
    ({"procedure": "lvm", "map": "softmax:1.0"}, {"procedure": "cohen", "lipschitz": 1.0}, Refused, "no Lipschitz"),
    ({"procedure": "cohen", "target_radius": 0.1}, {"procedure": "lvm"}, Refused, "stopped each input by looking"),
    ({"target_radius": 0.1}, {"target_radius": 0.0}, InputError, "must be a positive number, got 0.0"),
]


@pytest.mark.parametrize(("settings", "asked", "error", "words"), REFUSED)
def test_refusals(tmp_path, net, xy, settings, asked, error, words):
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=150, limit=3, **settings)
    with pytest.raises(error, match=words):
        run.certificates(**asked)


@pytest.mark.parametrize("aimed", [0.05, 0.2])
@pytest.mark.parametrize("asked", [0.05, 0.2])
def test_stopped_samples_keep_the_risk_at_another_alpha(aimed, asked):
    """Worst case p = p0: inputs that stop when e ≥ 1/aimed are certified at level `asked` no more often than that."""
    rng, epsilon, n, step, count = np.random.default_rng(0), 0.3, 1500, 50, 1500
    p0 = target_probability(epsilon, 0.5)
    hits = np.cumsum(rng.binomial(step, p0, size=(count, n // step)), axis=1)
    draws = np.arange(step, n + 1, step)
    crossed = log_e_value(hits, draws, p0) >= np.log(1 / aimed)
    at = np.where(crossed.any(axis=1), crossed.argmax(axis=1), len(draws) - 1)
    rows = [
        Row(id=i, position=i, label=0, n0=10, draws=int(draws[k]), selection=(10, 0),
            estimation=(int(hits[i, k]), int(draws[k] - hits[i, k])))
        for i, k in enumerate(at)
    ]  # fmt: skip
    keywords = {"sigma": 0.5, "num_classes": 2, "n0": 10, "n": n, "procedure": "cohen", "target_radius": epsilon}
    manifest = Manifest(
        model=ModelRecord(source="", hash=""),
        data=DataRecord(source="", fingerprint="", inputs=count),
        settings=Settings.of("sampled", keywords | {"seed": 0}),
        total=count,
    )
    found = derive(manifest, rows, alpha=asked)
    assert (~found.abstain).mean() <= asked + 3 * np.sqrt(asked / count)
    if asked >= aimed:
        assert (~found.abstain).sum() >= crossed.any(axis=1).sum()


def test_a_target_can_be_changed_after_the_fact(tmp_path, net, xy):
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=1000, procedure="cohen", target_radius=0.2)
    lower, same, higher = (run.certificates(target_radius=t) for t in (0.05, 0.2, 0.5))
    assert set(lower.radius[~lower.abstain]) <= {0.05}
    assert np.array_equal(same.radius, run.certificates(procedure="adaptive").radius)
    assert list(run.summary().accuracy) == [0.2]
    assert list(run.summary(results=run.results(target_radius=0.05)).accuracy) == [0.05, 0.2]
    assert (~lower.abstain).sum() >= (~same.abstain).sum() >= (~higher.abstain).sum()


def test_an_empty_run_has_no_certificates_and_says_so(tmp_path, net, xy):
    certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=150, limit=1)
    (tmp_path / "a" / "store.sqlite").unlink()
    run = open_run(tmp_path / "a")
    assert run.rows == []
    with pytest.raises(InputError, match="no finished inputs"):
        run.certificates()


def test_a_run_where_everything_failed_still_has_a_table(tmp_path, xy):
    net = runs_nets.Sometimes(-100.0).eval()
    for name, settings in {"votes": {}, "adaptive": {"procedure": "cohen", "target_radius": 0.5}}.items():
        run = certify(net, xy, run_dir=tmp_path / name, sigma=0.3, n=150, **settings)
        assert len(run.failures) == 12
        assert run.summary([0.0]).accuracy == {0.0: 0.0}
        assert run.certificates().abstain.all()


@pytest.mark.parametrize("procedure", ["cpm", "direct", "lvm"])
def test_a_row_never_depends_on_its_neighbours(tmp_path, net, xy, procedure):
    soft = {} if procedure == "cpm" else {"map": "softmax:1.0"}
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=300, procedure=procedure, **soft)
    whole = run.certificates(alpha=0.05)
    rng = np.random.default_rng(0)
    for _ in range(5):
        some = np.sort(rng.choice(12, size=rng.integers(1, 7), replace=False))
        part = derive(run.manifest, [run.rows[i] for i in some], alpha=0.05)
        for name in ("prediction", "radius", "p_lower", "p_upper", "buckets"):
            assert np.array_equal(getattr(part, name), getattr(whole, name)[some]), name


@pytest.mark.parametrize("name", ["direct", "rivals", "lvm", "cpm"])
@pytest.mark.parametrize("map", [None, "softmax:1.0", "hardmax"])
def test_a_copied_row_under_another_name_gives_the_same_certificates(tmp_path, net, xy, name, map):
    """Nothing decides by the name: sampled, classified and derived again, a copy equals its original."""
    if map is not None and not PROCEDURES[name].soft:
        pytest.skip("takes no map")
    PROCEDURES["copied"] = replace(PROCEDURES[name], name="copied")
    try:
        runs = [
            certify(net, xy, run_dir=tmp_path / p, sigma=0.3, n=200, limit=4, seed=0, procedure=p, map=map)
            for p in (name, "copied")
        ]
        one, two = (r.certificates() for r in runs)
        assert np.array_equal(one.radius, two.radius)
        assert np.array_equal(runs[0].certificates(procedure="copied").radius, one.radius)
        chosen = None if map is None else SimplexMap(*map.split(":")[:1])
        smooth = SmoothedClassifier(net, 0.3, 4, seed=0, map=chosen)
        each = [smooth.certify(xy[0][:4], n=200, procedure=p, grid=[SimplexMap("softmax")]) for p in (name, "copied")]
        assert np.array_equal(each[0].radius, each[1].radius)
        if map is not None:
            np.testing.assert_allclose(each[0].radius, one.radius, rtol=1e-9)
    finally:
        del PROCEDURES["copied"]
