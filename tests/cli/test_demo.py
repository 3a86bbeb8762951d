"""`equipoise demo --quick`, run once: what it writes, what it says, and that it can fail."""

import json
import shutil
import sqlite3
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from equipoise.cli.app import Command, build
from equipoise.models import load
from equipoise.report import collect
from equipoise.runs import open_run

pytestmark = pytest.mark.medium

NETWORKS, WAYS = ("lipschitz", "noise"), ("proved", "votes", "lvm")


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
    sections = ("layers-section", "shares-0", "proofs-section")
    for words in ("1-Lipschitz network", "deterministic", "cohen", "rivals", "lvm + Lipschitz", *sections):
        assert words in page, words
    assert {f.name for f in (demo.out / "runs").iterdir()} == {f"{n}-{w}" for n in NETWORKS for w in WAYS}
    for name in NETWORKS:
        assert not open_run(demo.out / "runs" / f"{name}-lvm").manifest.lipschitz.assumed
    assert "no certificate broken" in demo.ran.stdout


def test_a_broken_certificate_fails_loudly(demo, tmp_path):
    """A stored radius that is far too large is attacked when the demo goes on, and the attack wins."""
    shutil.copytree(demo.out, tmp_path / "demo")
    with sqlite3.connect(tmp_path / "demo" / "runs" / "lipschitz-proved" / "store.sqlite") as db:
        db.execute("UPDATE entries SET payload = json_set(payload, '$.radius', 9.0) WHERE kind = 'input' AND key = '0'")
    ran = equipoise("demo", "--quick", "--out", tmp_path / "demo")
    assert ran.exit_code == 1
    assert "contradicts a certificate" in ran.stderr


def test_the_stored_runs_give_the_same_comparison_and_the_commands_agree(demo, tmp_path):
    folders = sorted((demo.out / "runs").iterdir())
    data = collect(folders)
    assert len(data.models) == 2  # every curve belongs to one of the two networks
    ran = equipoise("report", *folders, "-o", tmp_path / "again.html", "--json")
    assert ran.exit_code == 0, ran.stderr
    again = equipoise("demo", "--quick", "--out", demo.out, "--json")  # nothing is sampled twice
    assert again.exit_code == 0, again.stderr
    first, second = json.loads(again.stdout), json.loads(ran.stdout)
    radii = {(s["run"], s["procedure"]): s["average_radius"] for s in second["series"]}
    assert radii == {(s["run"], s["procedure"]): s["average_radius"] for s in first["series"]}
    assert len(first["series"]) == 10
    assert first["audits"][0]["upper"] == pytest.approx(load("digits").certificate["upper"], rel=1e-3)
    for s in data.series:  # the page, `--json` and the run's own summary: one certified accuracy
        run = open_run(demo.out / "runs" / s.run)
        if s.own:
            assert run.summary([0.0, 0.1]).accuracy == {e: float(s.results.accuracy(e)) for e in (0.0, 0.1)}
