import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.app import Command, build
from equipoise.report import ReportData, as_document, collect, render
from equipoise.runs import AttackRow, certify, prove


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Smoothing runs and a proved run of a small network, with attacks."""
    root = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval().requires_grad_(False)
    x = torch.rand(12, 1, 2, 2)
    y = net(x).argmax(1)
    common = {"sigma": 0.25, "n": 200, "n0": 20}
    lvm = {"procedure": "lvm", "map": "softmax:0.5", **common}
    votes = certify(net, (x, y), run_dir=root / "votes", **common)
    soft = certify(net, (x, y), run_dir=root / "soft", lipschitz="auto", **lvm)
    plain = certify(net, (x, y), run_dir=root / "plain", **lvm)
    votes.add_attacks([AttackRow(id=i, epsilon=9.0, success=True, distance=8.5) for i in range(6)])
    votes.add_attacks([AttackRow(id=i, epsilon=1e-6, success=False) for i in range(12)])
    proved = prove(net, (x, y), run_dir=root / "proved", name="toy")
    proved.add_attacks(
        [
            AttackRow(id=0, epsilon=1e-5, success=False),
            AttackRow(id=1, epsilon=9.0, success=True, distance=8.5),
        ]
    )
    return root, votes, soft, plain


def test_runs_attacks_and_audits_come_together(folder):
    root, votes, soft, plain = folder
    bound = eq.lipschitz_bound(nn.Linear(3, 2), torch.zeros(1, 3))
    data = collect([root / "proved", root / "votes", root / "soft"], audits={"net": bound})
    assert [s.procedure for s in data.series] == ["deterministic", "rivals", "cohen", "lvm + Lipschitz", "lvm"]
    assert np.array_equal(data.series[1].results.radius, votes.certificates().radius)
    assert np.array_equal(data.series[2].results.radius, votes.certificates(procedure="cohen").radius)
    assert np.array_equal(data.series[3].results.radius, soft.certificates().radius)
    # the same draws without the constant
    assert np.array_equal(data.series[4].results.radius, plain.certificates().radius)
    assert bool((data.series[3].results.radius >= data.series[4].results.radius).all())
    assert [a.kind for a in data.attacks] == ["base", "smoothed"]
    assert np.isfinite(data.attacks[1].distance).sum() == 6
    assert data.audits["net"]["upper"] == bound.upper
    assert data.tested is not None
    assert data.tested.broken == 0
    assert data.tested.tried > 0
    assert {run["run"] for run in data.runs} == {"proved", "votes", "soft"}
    assert not data.series[3].assumption  # computed, not claimed


@pytest.mark.parametrize(("share", "success", "broken"), [(0.99, True, 1), (1.0, True, 0), (0.5, False, 0)])
def test_an_attack_inside_a_certificate_is_found(tmp_path, share, success, broken):
    net = nn.Linear(2, 2, bias=False).eval().requires_grad_(False)
    net.weight.copy_(torch.eye(2))
    run = prove(net, (torch.tensor([[3.0, 1.0]]), torch.tensor([0])), run_dir=tmp_path / "run")
    radius = float(run.results().radius[0])
    distance = share * radius if success else None
    run.add_attacks([AttackRow(id=0, epsilon=2 * radius, success=success, distance=distance)])
    tested = collect([tmp_path / "run"]).tested
    assert (0 if tested is None else tested.broken) == broken


def test_the_data_is_named_and_the_headline_is_the_runs_own_procedure(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval()
    x = torch.rand(5, 1, 2, 2)
    certify(net, (x, net(x).argmax(1)), run_dir=tmp_path / "a", sigma=0.1, n=100, name="my pictures")
    data = collect([tmp_path / "a"])
    assert {s.data for s in data.series} == {"my pictures"}
    assert [s.own for s in data.series] == [True, False]
    page = render(data, "")
    assert f"{data.series[0].procedure}, 5 inputs of my pictures, run a" in page
    assert page.count('<div class="below">average certified radius') == 1
    assert "<td>my pictures</td>" in page


def test_every_network_has_a_card_and_what_is_left_is_counted(report_parts):
    runs = tuple(report_parts.series(5, f"net {i // 3}", f"run {i}", own=True) for i in range(15))
    page = render(ReportData("many", series=runs), "")
    assert page.count('<div class="below">average certified radius') == 8
    assert '<div class="number">7</div>' in page


def test_inputs_without_labels_are_not_called_wrong(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval()
    certify(net, torch.rand(5, 1, 2, 2), run_dir=tmp_path / "a", sigma=0.01, n=200)
    data = collect([tmp_path / "a"])
    assert float(data.series[0].results.accuracy()) == float((data.series[0].results.prediction >= 0).mean()) > 0
    assert "any answer" in render(data, "")
    assert as_document(data)["series"][0]["labelled"] is False


def test_a_published_log_is_a_curve_whose_risk_is_unknown(tmp_path):
    log = tmp_path / "cohen.tsv"
    rows = ["0\t1\t1\t0.5\t1\t0:01", "1\t2\t-1\t0.0\t0\t0:01", "2\t2\t0\t0.3\t0\t0:01"]
    log.write_text("idx\tlabel\tpredict\tradius\tcorrect\ttime\n" + "\n".join(rows) + "\n")
    data = collect([log])
    (curve,) = data.series
    assert curve.results.accuracy([0.0, 0.5, 0.6]).round(4).tolist() == [0.3333, 0.3333, 0.0]
    page = render(data, plotly="")
    assert ">unknown</td>" in page
    assert "Deterministic certificates hold always" not in page
    assert "nothing of it was checked" in page


def test_names_tell_runs_apart(folder, tmp_path):
    root, *_ = folder
    for name in "xy":
        shutil.copytree(root / "votes", tmp_path / name / "votes")
    data = collect([tmp_path / "x" / "votes", tmp_path / "y" / "votes"])
    assert {s.run for s in data.series} == {str(tmp_path / "x" / "votes"), str(tmp_path / "y" / "votes")}


def test_networks_of_one_name_are_not_mixed_up(tmp_path):
    x, y = torch.rand(4, 3), torch.tensor([0, 1, 0, 1])
    for seed in (0, 1):
        torch.manual_seed(seed)
        certify(nn.Sequential(nn.Linear(3, 2)).eval(), (x, y), run_dir=tmp_path / str(seed), sigma=0.5, n=50)
    assert len(collect([tmp_path / "0"]).models) == 1
    both = collect([tmp_path / "0", tmp_path / "1"])
    assert len(both.models) == 2
    assert {run["model"] for run in both.runs} == set(both.models)


def test_unfinished_runs_say_so(tmp_path):
    class Stop(Exception):
        pass

    def stop(row, done, total):
        if done == 2:
            raise Stop

    net, data = nn.Linear(3, 2).eval(), (torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(Stop):
        certify(net, data, run_dir=tmp_path / "run", sigma=0.5, n=50, progress=stop)
    assert any("2 of 4 inputs are missing" in note for note in collect([tmp_path / "run"]).notes)


def test_radii_of_two_norms_share_no_axis(folder, tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval()
    x = torch.rand(5, 1, 2, 2)
    for norm in ("l2", "linf"):
        prove(net, (x, net(x).argmax(1)), run_dir=tmp_path / norm, norm=norm)
    charts = json.loads(
        render(collect([tmp_path / "l2", tmp_path / "linf"]), "p").partition('id="data">')[2].partition("</")[0]
    )["charts"]
    titles = [charts[f"curves-{i}"]["layout"]["xaxis"]["title"]["text"] for i in range(2)]
    assert titles == ["perturbation ε (ℓ2)", "perturbation ε (ℓ∞)"]


def run(*args):
    app = build((Command("report", "equipoise.cli.report", "report"),))
    return CliRunner().invoke(app, ["report", *map(str, args)], prog_name="equipoise")


def test_the_command_writes_a_page_and_prints_numbers(folder, tmp_path):
    root, votes, *_ = folder
    ran = run(root / "votes", root / "proved", "-o", tmp_path / "a.html", "--json")
    assert ran.exit_code == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert document["series"][0]["average_radius"] == votes.certificates().average_radius(votes.labels)
    assert document["tested"]["broken"] == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "plotly.js" in page


def test_the_command_audits_a_network_without_runs(tmp_path):
    ran = run("--audit", "equipoise.nn.models:mlp", "--input-shape", "1,8,8", "-o", tmp_path / "a.html")
    assert ran.exit_code == 0, ran.stderr
    assert "L ≤" in (tmp_path / "a.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name at least one run"),
        (["nowhere"], "is not a run"),
        (["--audit", "nonsense"], "neither a .pt2"),
        (["--audit", "equipoise.nn.models:mlp"], "--input-shape"),
        (["--audit", "equipoise.nn.models:mlp", "--input-shape", "7"], "does not"),
        (["{votes}", "-o", "report.pdf"], "ends in .html"),
        (["{votes}", "-o", "no/such/folder/a.html"], "cannot write"),
    ],
)
def test_bad_input_gets_one_sentence(folder, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    ran = run(*[a.format(votes=folder[0] / "votes") for a in arguments])
    assert ran.exit_code == 2
    assert words in ran.stderr.replace("\n", " ")
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []
