"""What is derived again from stored counts: the same as sampling with those settings, or refused with the reason."""

import numpy as np
import pytest
import runs_nets

from equipoise.core import Bound, InputError, Kind, Refused
from equipoise.runs import certify, open_run
from equipoise.smoothing import SimplexMap, SmoothedClassifier

pytestmark = pytest.mark.medium

VOTES = ("cohen", "bonferroni", "cpm", "rivals", "direct")


@pytest.mark.parametrize("alpha", [0.2, 0.001, 1e-9])
@pytest.mark.parametrize("procedure", VOTES)
def test_votes_serve_every_vote_procedure(tmp_path, net, xy, alpha, procedure):
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=400, procedure="cohen")
    derived = open_run(tmp_path / "a").certificates(alpha=alpha, procedure=procedure)
    smooth = SmoothedClassifier(net, 0.3, 4, map=SimplexMap("hardmax"))
    direct = smooth.certify(xy[0], n=400, alpha=alpha, procedure=procedure)
    assert np.array_equal(derived.radius, direct.radius)
    assert np.array_equal(derived.prediction, direct.prediction)
    assert (derived.alpha, derived.procedure) == (alpha, procedure)
    assert np.array_equal(run.certificates().radius, run.certificates(0.001, "cohen").radius)


#: (run, what is asked of it, words of the refusal)
REFUSED = [
    ({"procedure": "cohen"}, {"procedure": "lvm"}, Refused, "stored votes only"),
    ({"procedure": "cohen"}, {"lipschitz": 1.0}, Refused, "votes have no Lipschitz constant"),
    ({"procedure": "cohen"}, {"alpha": 0.0}, InputError, "risk alpha"),
    ({"procedure": "cohen"}, {"alpha": 1.0}, InputError, "risk alpha"),
    ({"procedure": "cohen"}, {"procedure": "kohen"}, InputError, "unknown procedure"),
    ({"procedure": "lvm", "map": "softmax:1.0"}, {"procedure": "cohen", "lipschitz": 1.0}, Refused, "no Lipschitz"),
    ({"procedure": "cohen", "target_radius": 0.1}, {"procedure": "lvm"}, Refused, "stored votes only"),
]


@pytest.mark.parametrize(("settings", "asked", "error", "words"), REFUSED)
def test_refusals(tmp_path, net, xy, settings, asked, error, words):
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=150, limit=3, **settings)
    with pytest.raises(error, match=words):
        run.certificates(**asked)


@pytest.mark.parametrize("sampled", ["lvm", "direct"])
def test_soft_runs_at_another_risk_by_other_procedures_and_as_votes(tmp_path, net, xy, sampled):
    """A smaller risk shrinks every radius, at the run's own nothing changes; buckets stay; votes of the draws are kept too."""
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=400, procedure=sampled, map="softmax:1.0")
    radii = [run.certificates(alpha=a).radius for a in (0.2, 0.001, 1e-6)]
    assert (radii[0] >= radii[1]).all()
    assert (radii[1] >= radii[2]).all()
    assert radii[0].sum() > radii[2].sum()
    assert np.array_equal(radii[1], run.certificates().radius)
    assert np.array_equal(run.certificates(alpha=0.2).buckets, run.certificates().buckets)
    assert (run.certificates(procedure="rivals").radius >= radii[1] * 0.97).all()
    for procedure in VOTES[:3]:
        derived = run.certificates(procedure=procedure)
        votes = SmoothedClassifier(net, 0.3, 4).certify(xy[0], n=400, procedure=procedure)
        assert np.array_equal(derived.radius, votes.radius)
        assert "majority vote" in derived.about
    assert "softmax" in run.certificates().about


def test_constants_given_later_claimed_and_computed(tmp_path, net, xy):
    common = {"sigma": 0.3, "n": 400, "procedure": "lvm", "map": "softmax:4.0"}
    run = certify(net, xy, run_dir=tmp_path / "a", **common)
    plain, small, large = (run.certificates(lipschitz=v) for v in (None, 5.0, 500.0))
    assert (small.radius >= large.radius).all()
    assert (large.radius >= plain.radius * (1 - 1e-6)).all()
    assert small.radius.sum() > plain.radius.sum()
    assert any("assumption" in note for note in run.results(lipschitz=5.0).notes)
    with pytest.raises(Refused, match="only estimate"):
        run.certificates(lipschitz=Bound(5.0, Kind.ESTIMATE))
    given = certify(net, xy, run_dir=tmp_path / "b", lipschitz=99.0, **common)
    assert "assumption" in given.certificates().details["lipschitz"]
    computed = certify(net, xy, run_dir=tmp_path / "c", lipschitz="auto", **common)
    norm = float(np.linalg.norm(net.linear.weight.detach().numpy(), 2))
    assert computed.manifest.lipschitz.value >= 4.0 * norm * (1 - 1e-6)
    assert "computed" in computed.certificates().details["lipschitz"]


def test_runs_without_inputs_and_runs_where_everything_failed(tmp_path, net, xy):
    certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=150, limit=1)
    (tmp_path / "a" / "store.sqlite").unlink()
    with pytest.raises(InputError, match="no finished inputs"):
        open_run(tmp_path / "a").certificates()
    broken = runs_nets.Sometimes(-100.0).eval()
    for name, settings in {"votes": {}, "adaptive": {"procedure": "cohen", "target_radius": 0.5}}.items():
        run = certify(broken, xy, run_dir=tmp_path / name, sigma=0.3, n=150, **settings)
        assert len(run.failures) == 12
        assert run.summary([0.0]).accuracy == {0.0: 0.0}
        assert run.certificates().abstain.all()
