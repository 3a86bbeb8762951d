import json

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
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
    wrong = torch.arange(12) > 8
    proved = prove(net, (x, (y + wrong) % 3), run_dir=root / "proved", name="toy")
    proved.add_attacks([AttackRow(id=0, epsilon=1e-5, success=False)])
    proved.add_attacks([AttackRow(id=1, epsilon=9.0, success=True, distance=8.5)])
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
    assert np.allclose(12 * data.attacks[0].accuracy([0.0, 9.0]), [9, 8])  # of all inputs, as certified accuracy is
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


@pytest.fixture
def small_run(tmp_path):
    """`small_run(folder, worker, …)`: a run of a linear network on five inputs."""

    def make(folder, worker=certify, seed=0, labelled=True, **settings):
        torch.manual_seed(seed)
        net, x = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval(), torch.rand(5, 1, 2, 2)
        worker(net, (x, net(x).argmax(1)) if labelled else x, run_dir=tmp_path / folder, **settings)
        return tmp_path / folder

    return make


SAMPLED = {"sigma": 0.01, "n": 200}


def test_the_headline_is_the_runs_own_procedure_and_every_network_has_a_card(small_run, report_parts):
    data = collect([small_run("a", name="my pictures", **SAMPLED)])
    assert {s.data for s in data.series} == {"my pictures"}
    assert [s.own for s in data.series] == [True, False]
    page = render(data, "")
    assert f"{data.series[0].procedure}, 5 inputs of my pictures, run a" in page
    assert page.count('<div class="below">average certified radius') == 1
    runs = tuple(report_parts.series(5, f"net {i // 3}", f"run {i}", own=True) for i in range(15))
    assert render(ReportData("many", series=runs), "").count('<div class="below">average certified radius') == 8


def test_inputs_without_labels_are_not_called_wrong(small_run):
    data = collect([small_run("a", labelled=False, **SAMPLED)])
    assert float(data.series[0].results.accuracy()) == float((data.series[0].results.prediction >= 0).mean()) > 0
    assert "any answer" in render(data, "")
    assert as_document(data)["series"][0]["labelled"] is False


def test_networks_and_runs_of_one_name_are_told_apart(small_run):
    folders = [small_run("x/a", **SAMPLED), small_run("y/a", **SAMPLED), small_run("b", seed=1, **SAMPLED)]
    assert len(collect(folders[:2]).models) == 1
    data = collect(folders)
    assert len(data.models) == 2
    assert {run["model"] for run in data.runs} == set(data.models)
    assert {str(folder) for folder in folders[:2]} <= {s.run for s in data.series}


def test_radii_of_two_norms_share_no_axis(small_run):
    page = render(collect([small_run(norm, prove, norm=norm) for norm in ("l2", "linf")]), "p")
    charts = json.loads(page.partition('id="data">')[2].partition("</")[0])["charts"]
    titles = [charts[f"curves-{i}"]["layout"]["xaxis"]["title"]["text"] for i in range(2)]
    assert titles == ["perturbation ε (ℓ2)", "perturbation ε (ℓ∞)"]


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


def test_unfinished_runs_say_so(small_run, tmp_path):
    def stop(row, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_run("run", progress=stop, **SAMPLED)
    assert any("3 of 5 inputs are missing" in note for note in collect([tmp_path / "run"]).notes)


def test_the_command_writes_a_page_and_prints_numbers(equipoise, folder, tmp_path):
    root, votes, *_ = folder
    ran = equipoise("report", root / "votes", root / "proved", "-o", tmp_path / "a.html", "--json")
    assert ran.code == 0, ran.err
    document = ran.json
    assert document["series"][0]["average_radius"] == votes.certificates().average_radius(votes.labels)
    assert document["tested"]["broken"] == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "plotly.js" in page
