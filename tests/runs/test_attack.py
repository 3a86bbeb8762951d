"""`attack_run` and `equipoise attack`: honest curves, one store, resumed work, and certificates held to what they say."""

import json

import numpy as np
import pytest
import runs_nets
import torch
from scipy.stats import binom
from torch import nn
from typer.testing import CliRunner

from equipoise.attacks import AttackResult
from equipoise.cli.app import Command, build
from equipoise.core import InputError, Refused
from equipoise.runs import certify, open_run
from equipoise.runs.attacks import search as attack_search
from equipoise.runs.attacks.run import attack_run
from equipoise.runs.attacks.search import outvoted
from equipoise.runs.manifest import read_manifest
from equipoise.runs.rows import Row
from equipoise.runs.store import AttackRow, Store, locked

LEVELS = [0.05, 0.1, 0.2]
QUICK = {"steps": 5, "samples": 4, "votes": 300}
CERTIFIED = {"sigma": 0.3, "n": 300}
COMMAND = Command("attack", "equipoise.cli.attack", "attack", optional=True, summary="Attack a dataset.")


class Counting(runs_nets.Net):
    """Counts its forward passes."""

    def __init__(self):
        super().__init__()
        self._calls = 0

    def forward(self, x):
        self._calls += 1
        return super().forward(x)


def exact_distance(net, x, y):
    """Distance of each input to the nearest decision boundary of linear logits, 0 where it is misclassified."""
    w, logits = net.linear.weight.detach().double(), net(x).detach().double() / net.scale
    found = []
    for k, row in zip(y.tolist(), logits, strict=True):
        gaps = [(row[k] - row[j]) / (w[k] - w[j]).norm() for j in range(len(w)) if j != k]
        found.append(max(0.0, float(min(gaps))))
    return np.array(found)


def outcomes(summary, kind):
    return {(r.id, r.epsilon): r.success for r in summary.rows if r.kind == kind}


def test_attacks_on_the_network_find_its_boundary_and_never_cross_the_truth(net, xy):
    x, y = runs_nets.data(30)
    summary = attack_run(net, (x, y), epsilons=LEVELS, steps=20)
    truth = exact_distance(net, x, y)
    assert any(a < e < b for e in LEVELS for a, b in [(truth.min(), truth.max())]), "the radii tell nothing apart"
    for row in summary.rows:
        assert row.kind == "base"
        if row.success:
            assert row.distance <= row.epsilon
            assert row.distance >= truth[row.id] * (1 - 1e-5)
        else:
            assert truth[row.id] > 0.95 * row.epsilon
    curve = list(summary.accuracy["base"].values())
    assert curve == sorted(curve, reverse=True)
    assert summary.folder is None


def test_misclassified_inputs_are_broken_at_distance_zero(net, xy):
    x, y = xy
    summary = attack_run(net, (x, (y + 1) % 4), epsilons=[0.1], sigma=0.05, **QUICK)
    assert {r.distance for r in summary.rows} == {0.0}
    assert summary.accuracy == {"base": {0.1: 0.0}, "smoothed": {0.1: 0.0}}


PROCEDURES = [
    {"procedure": "cpm"},
    {"procedure": "cohen", "relative": 0.2},
    {"procedure": "lvm"},
    {"procedure": "lvm", "map": "softmax:0.5"},
    {"procedure": "lvm", "map": "per-input"},
    {"procedure": "lvm", "map": "hardmax"},
]


@pytest.mark.parametrize("settings", PROCEDURES, ids=lambda s: " ".join(map(str, s.values())))
def test_certified_lies_beneath_attacked(tmp_path, net, xy, settings):
    run = certify(net, xy, run_dir=tmp_path, **CERTIFIED, **settings)
    summary = attack_run(net, xy, run_dir=tmp_path, epsilons=LEVELS, **QUICK)
    assert summary.violations == ()
    assert summary.tried > 0
    assert summary.certified_inputs == len(xy[0])
    for e in LEVELS:
        assert summary.certified[e] <= summary.accuracy["smoothed"][e]
        assert summary.certified[e] == run.certificates().accuracy(run.labels, e)
    stored = open_run(tmp_path)
    assert len(stored.attacks()) == 2 * len(LEVELS) * len(xy[0])
    assert np.array_equal(stored.certificates().radius, run.certificates().radius)


def test_a_report_shows_both(tmp_path, net, xy):
    from equipoise.report.collect import collect

    certify(net, xy, run_dir=tmp_path, **CERTIFIED)
    summary = attack_run(net, xy, run_dir=tmp_path, epsilons=LEVELS, **QUICK)
    data = collect([tmp_path])
    kinds = {a.kind: a for a in data.attacks}
    for kind in ("base", "smoothed"):
        for e in LEVELS:
            assert float(kinds[kind].accuracy(e)) == pytest.approx(summary.accuracy[kind][e])


def test_what_is_stored_is_not_attacked_again(tmp_path, xy):
    net = Counting().eval()
    first = attack_run(net, xy, run_dir=tmp_path, sigma=0.3, epsilons=[0.1], **QUICK)
    net._calls = 0
    again = attack_run(net, xy, run_dir=tmp_path, epsilons=[0.1], **QUICK)
    assert net._calls == 0
    assert again.rows == first.rows
    wider = attack_run(net, xy, run_dir=tmp_path, epsilons=[0.1, 0.3], **QUICK)
    assert net._calls > 0
    assert set(first.rows) <= set(wider.rows)
    net._calls = 0
    attack_run(net, xy, run_dir=tmp_path, epsilons=[0.1], again=True, **QUICK)
    assert net._calls > 0


class Stop(Exception):
    """An interruption."""


@pytest.mark.parametrize("blocks", [1, 2])
def test_an_interrupted_attack_ends_as_an_undisturbed_one(tmp_path, net, xy, blocks):
    left = blocks

    def stop(done, total):
        nonlocal left
        left -= 1
        if left == 0:
            raise Stop

    settings = {"sigma": 0.3, "epsilons": LEVELS, "batch_size": 5, **QUICK}
    with pytest.raises(Stop):
        attack_run(net, xy, run_dir=tmp_path / "a", progress=stop, **settings)
    assert 0 < len(open_run(tmp_path / "a").attacks()) < 2 * len(LEVELS) * len(xy[0])
    attack_run(net, xy, run_dir=tmp_path / "a", **settings)
    attack_run(net, xy, run_dir=tmp_path / "b", **settings)
    assert open_run(tmp_path / "a").attacks() == open_run(tmp_path / "b").attacks()


def test_a_directory_begun_by_an_attack_can_be_certified(tmp_path, net, xy):
    attack_run(net, xy, run_dir=tmp_path, sigma=0.3, epsilons=[0.1], **QUICK)
    run = certify(net, xy, run_dir=tmp_path, sigma=0.3)
    assert run.finished
    assert len(run.attacks()) == 2 * len(xy[0])


def test_only_inputs_of_the_run_are_attacked(tmp_path, net, xy):
    certify(net, xy, run_dir=tmp_path, skip=1, stride=3, **CERTIFIED)
    summary = attack_run(net, xy, run_dir=tmp_path, epsilons=[0.1], limit=3, **QUICK)
    assert sorted({r.id for r in summary.rows}) == [1, 4, 7]
    with pytest.raises(InputError, match="none of the selected inputs"):
        attack_run(net, xy, run_dir=tmp_path, epsilons=[0.1], skip=11)


def changed_model(net, x, y):
    return runs_nets.Net(scale=5.0).eval(), (x, y), {}


def changed_data(net, x, y):
    return net, (x + 1e-3, y), {}


def fewer_inputs(net, x, y):
    return net, (x[:5], y[:5]), {}


def changed_sigma(net, x, y):
    return net, (x, y), {"sigma": 0.25}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed_model, "model: sha256"),
        (changed_data, "data: sha256"),
        (fewer_inputs, "inputs: 12 → 5"),
        (changed_sigma, "sigma: 0.3 → 0.25"),
    ],
)
def test_another_model_or_other_data_is_refused_with_the_difference(tmp_path, net, xy, change, words):
    certify(net, xy, run_dir=tmp_path, **CERTIFIED)
    model, data, settings = change(net, *xy)
    with pytest.raises(Refused, match=words):
        attack_run(model, data, run_dir=tmp_path, epsilons=[0.1], **settings, **QUICK)
    assert open_run(tmp_path).attacks() == []


def forge(folder, net, xy):
    """A run whose stored votes claim that every draw was right, whatever the network does."""
    certify(net, xy, run_dir=folder, limit=None, **CERTIFIED)
    manifest = read_manifest(folder)
    p, (_, y) = manifest.parameters, xy
    with Store(folder, identity=manifest.digest(), writable=True) as store:
        for row in store.rows():
            votes = np.zeros(p.num_classes, dtype=np.int64)
            votes[int(y[row.position])] = 1
            store.put(Row(row.position, row.id, row.label, p.n0, p.n, votes * p.n0, votes * p.n))


def test_a_false_certificate_is_found_and_confirmed(tmp_path, net, xy):
    forge(tmp_path, net, xy)
    radius = open_run(tmp_path).certificates().radius.min()
    summary = attack_run(net, xy, run_dir=tmp_path, epsilons=[0.3], **(QUICK | {"steps": 20}))
    assert summary.violations
    broken = {r.id for r in summary.rows if r.kind == "smoothed" and r.success}
    assert {v.id for v in summary.violations} == broken
    assert all(v.distance < radius for v in summary.violations)
    assert any("up to" in line for line in summary.lines())
    again = attack_run(net, xy, run_dir=tmp_path, epsilons=[0.3], **(QUICK | {"steps": 20}))
    assert again.violations == summary.violations, "a stored break is tested anew and reported again"


def test_a_stored_break_that_is_not_found_again_stays_suspected(tmp_path, net, xy):
    run = certify(net, xy, run_dir=tmp_path, **CERTIFIED)
    found = run.certificates()
    sure = int(np.argmax(np.where(found.prediction == run.labels, found.radius, 0)))
    run.add_attacks([AttackRow(sure, "smoothed", 0.01, True, 0.01, 5, 1, 0)])
    summary = attack_run(net, xy, run_dir=tmp_path, epsilons=[0.01], kind="smoothed", **QUICK)
    assert [v.id for v in summary.suspected] == [sure]
    assert summary.violations == ()
    assert any("SUSPECTED" in line for line in summary.lines())
    assert [r.success for r in open_run(tmp_path).attacks() if r.id == sure] == [True]


def test_attacks_on_the_network_are_not_held_against_the_smoothed_classifier(tmp_path, net, xy):
    forge(tmp_path, net, xy)
    summary = attack_run(net, xy, run_dir=tmp_path, epsilons=[0.3], kind="base", **QUICK)
    assert summary.accuracy["base"][0.3] < 1
    assert summary.violations == ()


@pytest.mark.parametrize("procedure", ["cpm", "lvm"])
def test_a_false_alarm_is_withdrawn(tmp_path, net, xy, monkeypatch, procedure):
    """An attack that claims success everywhere, without moving: fresh draws do not confirm it."""

    def liar(classifier, x, y, epsilon, *args, **kwargs):
        return AttackResult(x.clone(), torch.ones(len(x), dtype=torch.bool), torch.zeros(len(x), dtype=torch.float64))

    run = certify(net, xy, run_dir=tmp_path, procedure=procedure, **CERTIFIED)
    found = run.certificates()
    sure = (found.prediction == run.labels) & (found.radius > 0)
    monkeypatch.setattr(attack_search, "smooth_pgd", liar)
    summary = attack_run(net, xy, run_dir=tmp_path, epsilons=[0.01], kind="smoothed", **QUICK)
    assert summary.withdrawn == sure.sum() > 0
    assert summary.violations == ()
    for row in open_run(tmp_path).attacks():
        assert row.success == (not sure[row.id])


@pytest.mark.parametrize("rivals", [1, 2, 4])
def test_outvoted_is_a_family_of_binomial_tests(rivals):
    rng = np.random.default_rng(rivals)
    counts = np.concatenate([rng.integers(0, most, (150, rivals + 1)) for most in (3, 30, 400)])
    for votes in counts:
        tails = binom.sf(votes[1:] - 1, votes[1:] + votes[0], 0.5) * rivals
        for level in (1e-9, 1e-3, 0.2, *tails * 1.001, *tails * 0.999):
            assert outvoted(votes, 0, float(level)) == (tails <= level).any()


@pytest.mark.parametrize("kind", ["smoothed", "base"])
def test_nan_logits_leave_the_other_inputs_their_outcome(tmp_path, xy, kind):
    x, y = xy[0].clone(), xy[1]
    x[:, 0, 0, 0] = 0.2
    x[3, 0, 0, 0] = 5.0
    model = runs_nets.Sometimes(4.0).eval()
    summary = attack_run(model, (x, y), run_dir=tmp_path, sigma=0.1, kind=kind, epsilons=[0.1], **QUICK)
    assert list(summary.failures) == ["3"]
    assert summary.inputs == len(x) - 1
    assert len(open_run(tmp_path).attacks()) == len(x) - 1


def test_a_network_without_gradients_gets_one_sentence(xy):
    class Rounded(runs_nets.Net):
        def forward(self, x):
            return super().forward(x).detach()

    with pytest.raises(InputError, match="the network cannot be attacked at inputs of shape"):
        attack_run(Rounded().eval(), xy, epsilons=[0.01], **QUICK)


def test_an_exported_program_of_a_fixed_batch(tmp_path, net, xy):
    program = torch.export.export(net, (torch.rand(5, *runs_nets.SHAPE),))
    plain = attack_run(net, xy, epsilons=LEVELS, kind="both", sigma=0.3, **QUICK)
    found = attack_run(program, xy, epsilons=LEVELS, kind="both", sigma=0.3, **QUICK)
    assert outcomes(found, "base") == outcomes(plain, "base")
    assert found.accuracy["smoothed"] == pytest.approx(plain.accuracy["smoothed"], abs=0.2)


MISTAKES = [
    ({"epsilons": []}, "positive radii"),
    ({"epsilons": [0.0]}, "positive radii"),
    ({"epsilons": [float("nan")]}, "positive radii"),
    ({"kind": "sideways"}, "kind must be one of"),
    ({"kind": "smoothed"}, "needs the noise level"),
    ({"run_dir": "new"}, "is not a run yet"),
    ({"steps": 0}, "steps must be positive"),
    ({"restarts": -1}, "restarts must be positive"),
    ({"votes": 0}, "votes must be positive"),
    ({"alpha": 1.0}, "alpha must lie"),
    ({"batch_size": 0}, "batch_size must be positive"),
    ({"limit": 0}, "limit ≥ 1"),
    ({"sigma": -1.0}, "sigma must be"),
]


@pytest.mark.parametrize(("settings", "words"), MISTAKES, ids=str)
def test_mistakes(tmp_path, monkeypatch, net, xy, settings, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        attack_run(net, xy, **({"epsilons": [0.1]} | settings))
    assert list(tmp_path.iterdir()) == []


def test_labels_the_network_has_no_logit_for(net, xy):
    with pytest.raises(InputError, match="label 9"):
        attack_run(net, runs_nets.Known(xy[0], xy[1] * 0 + 9), epsilons=[0.1])


def test_a_training_network_is_refused(xy):
    with pytest.raises(Refused, match="training mode"):
        attack_run(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), xy, epsilons=[0.1])


def test_a_run_in_use_is_refused_before_any_work(tmp_path, net, xy):
    certify(net, xy, run_dir=tmp_path, **CERTIFIED)
    with locked(tmp_path), pytest.raises(Refused, match="another process"):
        attack_run(net, xy, run_dir=tmp_path, epsilons=[0.1], **QUICK)


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def equipoise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = runs_nets.data(6)
    np.savez(tmp_path / "d.npz", x_test=(x[:, 0] * 255).round().byte().numpy(), y_test=y.numpy())

    def call(*args, factory="runs_nets:net"):
        common = [factory, "--data", "d.npz", "--steps", 4, "--samples", 2, "--votes", 200]
        words = ["attack", *(str(a) for a in (*common, *args))]
        return CliRunner().invoke(build((COMMAND,)), words, prog_name="equipoise")

    return call


def certified(folder, tmp_path):
    from equipoise.data import load_dataset

    return certify(runs_nets.net(), load_dataset(str(tmp_path / "d.npz")), run_dir=folder, **CERTIFIED)


def test_the_table_and_its_repetition(equipoise, tmp_path):
    certified(tmp_path / "a", tmp_path)
    ran = equipoise("--run", "a", "--epsilon", "0.1,0.05")
    assert ran.exit_code == 0, ran.output
    for words in ("certified", "attacked, smoothed", "attacked, base", "6 inputs attacked, stored in a", "0 broke"):
        assert words in ran.stdout
    assert equipoise("--run", "a", "--epsilon", "0.1,0.05").stdout == ran.stdout


def test_without_a_noise_level_the_network_alone_is_attacked_and_nothing_is_written(equipoise, tmp_path):
    before = sorted(tmp_path.iterdir())
    ran = equipoise("--epsilon", "0.1", "--json")
    document = json.loads(ran.stdout)
    assert ran.exit_code == 0
    assert document["run"] is None
    assert list(document["accuracy"][0]) == ["epsilon", "certified", "base"]
    assert len(document["attacks"]) == 6
    assert sorted(tmp_path.iterdir()) == before
    assert "not stored" in equipoise("--epsilon", "0.1").stdout


def test_without_run_the_same_command_finds_its_directory(equipoise, tmp_path):
    for _ in range(2):
        assert equipoise("--epsilon", "0.1", "--sigma", 0.3).exit_code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("attack-")
    assert len(open_run(folder).attacks()) == 12


def test_a_broken_certificate_names_its_inputs_and_exits_with_one(equipoise, tmp_path):
    from equipoise.data import load_dataset

    data = load_dataset(str(tmp_path / "d.npz"))
    certify(runs_nets.net(), data, run_dir=tmp_path / "a", **CERTIFIED)
    manifest = read_manifest(tmp_path / "a")
    with Store(tmp_path / "a", identity=manifest.digest(), writable=True) as store:
        for row in store.rows():
            votes = np.eye(4, dtype=np.int64)[row.label]
            store.put(Row(row.position, row.id, row.label, 100, 300, votes * 100, votes * 300))
    ran = equipoise("--run", "a", "--epsilon", "0.3", "--kind", "smoothed", "--json")
    document = json.loads(ran.stdout)
    assert ran.exit_code == 1
    assert document["violations"]
    shown = equipoise("--run", "a", "--epsilon", "0.3", "--kind", "smoothed")
    assert shown.exit_code == 1
    for violation in document["violations"]:
        assert f"VIOLATION at input {violation['id']}:" in shown.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--epsilon", "a"), "--epsilon takes numbers"),
        (("--epsilon", "0.1", "--kind", "smoothed"), "needs the noise level"),
        (("--epsilon", "0.1", "--run", "new"), "is not a run yet"),
        (("--epsilon", "-1"), "positive radii"),
    ],
)
def test_mistakes_on_the_command_line(equipoise, args, words):
    ran = equipoise(*args)
    assert ran.exit_code == 2
    assert words in ran.stderr
    assert "Traceback" not in ran.output
