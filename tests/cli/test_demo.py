"""`equipoise demo --quick`, run once: what it writes, what it says, and that it can fail."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from equipoise import demo as showcase
from equipoise.attacks import pgd
from equipoise.cli.app import Command, build
from equipoise.models import load
from equipoise.report import Checked, ReportData, collect, load_margins
from equipoise.runs import open_run

NETWORKS, WAYS = ("lipschitz", "noise"), ("margin", "votes", "lvm")


def equipoise(*args):
    app = build((Command("demo", "equipoise.cli.demo", "demo"), Command("report", "equipoise.cli.report", "report")))
    return CliRunner().invoke(app, [str(a) for a in args], prog_name="equipoise")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    ran = equipoise("demo", "--quick", "--out", out)
    assert ran.exit_code == 0, (ran.stderr, ran.exception)
    return SimpleNamespace(out=out, ran=ran)


def test_it_writes_the_report_and_every_run(demo):
    page = (demo.out / "report.html").read_text(encoding="utf-8")
    assert len(page) < 10_000_000
    for words in (
        "1-Lipschitz network",
        "deterministic",
        "cohen",
        "rivals",
        "lvm + Lipschitz",
        "gallery-section",
        "spectra-0",
    ):
        assert words in page, words
    assert {f.name for f in (demo.out / "runs").iterdir()} == {f"{n}-{w}" for n in NETWORKS for w in WAYS}


def test_the_terminal_shows_steps_and_a_summary(demo):
    for words in ("train the", "audit the", "certify the", "attack the", "write the report"):
        assert words in demo.ran.stderr
    for words in ("no certificate broken", "report.html", "under attack", "best proved", "equipoise report"):
        assert words in demo.ran.stdout


def test_the_margin_certificates_rest_on_the_audit(demo):
    for name in NETWORKS:
        folder = demo.out / "runs" / f"{name}-margin"
        audit = json.loads((folder / "audit.json").read_text())
        margins = load_margins(folder)
        assert margins.lipschitz >= audit["bound"]["upper"] > 0
        assert max(p["lower"] for p in audit["local"]) <= audit["bound"]["upper"]
    audit = json.loads((demo.out / "runs" / "lipschitz-margin" / "audit.json").read_text())
    assert audit["bound"]["upper"] <= load("digits").certificate["upper"] * 1.001


def test_the_constant_of_the_lipschitz_aware_run_is_computed_not_claimed(demo):
    for name in NETWORKS:
        constant = open_run(demo.out / "runs" / f"{name}-lvm").manifest.lipschitz
        assert constant is not None
        assert not constant.assumed


def test_the_stored_runs_give_the_same_comparison(demo, tmp_path):
    folders = sorted((demo.out / "runs").iterdir())
    assert len(collect(folders).models) == 2  # every curve belongs to one of the two networks
    ran = equipoise("report", *folders, "-o", tmp_path / "again.html", "--json")
    assert ran.exit_code == 0, ran.stderr
    again = equipoise("demo", "--quick", "--out", demo.out, "--json")  # nothing is sampled twice
    assert again.exit_code == 0, again.stderr
    first, second = json.loads(again.stdout), json.loads(ran.stdout)
    order = [(s["run"], s["procedure"]) for s in first["series"]]
    assert sorted(order) == sorted((s["run"], s["procedure"]) for s in second["series"])
    radii = {(s["run"], s["procedure"]): s["average_radius"] for s in second["series"]}
    assert all(radii[s["run"], s["procedure"]] == s["average_radius"] for s in first["series"])
    assert first["tested"] == second["tested"] or first["tested"]["broken"] == second["tested"]["broken"] == 0
    assert len(first["series"]) == 10


def test_another_size_in_the_same_folder_is_refused(demo, monkeypatch):
    monkeypatch.setattr(showcase, "QUICK", showcase.Settings(inputs=8, epochs=1))
    ran = equipoise("demo", "--quick", "--out", demo.out)
    assert ran.exit_code == 2
    assert "Traceback" not in ran.stderr
    assert (demo.out / "report.html").exists()


def test_a_broken_certificate_fails_loudly(monkeypatch, tmp_path):
    broken = ReportData("t", tested=Checked(3, 1, ("input 7 of run",)))
    monkeypatch.setattr(showcase, "showcase", lambda out, settings, say: broken)
    ran = equipoise("demo", "--out", tmp_path)
    assert ran.exit_code == 1
    assert "input 7 of run" in ran.stderr


def test_the_attack_finds_certificates_that_are_too_large(tmp_path):
    """The check of the demonstration is able to fail: radii that are wrong by a factor are broken."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3).eval().requires_grad_(False)
    x = torch.randn(20, 4)
    y = net(x).argmax(1)

    def attack(x, y, epsilon, seed):
        return pgd(net, x, y, epsilon, 20, seed=seed)

    rows = showcase.inside(attack, "base", x, y, y.numpy(), np.full(20, 3.0), list(range(20)), (20, 0))
    assert sum(row.success for row in rows) > 5
    labels = y.numpy().astype(np.int64)
    showcase.Margins(
        {"source": "net"}, "toy", 1.0, tuple(map(str, range(20))), labels, labels, np.full(20, 3.0), tuple(rows)
    ).save(tmp_path / "m")
    assert collect([tmp_path / "m"]).tested.broken == sum(row.success for row in rows)


def test_bisection_comes_close_to_the_boundary():
    net = nn.Linear(2, 2, bias=False).eval().requires_grad_(False)
    net.weight.copy_(torch.eye(2))
    x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 0.0]]), torch.tensor([0, 0, 0])
    found = showcase.closest_adversarial(lambda x, y, e, seed: pgd(net, x, y, e, 20, seed=seed), x, y, 2.0, 8)
    assert 2**-0.5 <= float(found.distance[0]) <= 1.05 * 2**-0.5
    assert float(found.distance[1]) == 0.0  # misclassified as it is
    assert not bool(found.success[2])
    assert float(found.distance[2]) == float("inf")
