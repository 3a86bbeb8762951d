"""certify, prove, derive, merge, export, attack, predict, report on the bundled digits: no two outputs contradict each other."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.data import load_dataset
from equipoise.report import as_document, collect
from equipoise.runs import open_run

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def call(equipoise):
    def run(*words, code=0):
        done = equipoise(*words)
        assert done.code == code, (words, done.out, done.err, repr(done.error))
        return done.out

    return run


def shown(text):
    """ε → share, from the printed table."""
    return {float(e): float(a) for e, a in re.findall(r"│ +([\d.e-]+) │ +([\d.]+) %", text)}


@pytest.fixture(scope="module")
def place(call, tmp_path_factory):
    """A network trained for a moment on scaled digits, saved as a program with a dynamic batch; its runs."""
    folder = tmp_path_factory.mktemp("commands")
    x, y = load_dataset("digits", "train").batch(np.arange(600))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        scaled = (x + 0.2 * torch.randn_like(x) - 0.5) / 0.25
        loss = nn.functional.cross_entropy(net(scaled), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    shapes = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(net, (x[:2],), dynamic_shapes=shapes), folder / "net.pt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        common = ("net.pt2", "--data", "digits", "--mean", 0.5, "--std", 0.25, "--limit", 12)
        call("certify", *common, "--sigma", 0.25, "--n", 300, "--set", "seed=0", "--run", "sampled")
        call("prove", *common, "--run", "proved")
        yield folder


@pytest.mark.parametrize("kind", ["sampled", "proved"])
def test_every_output_says_the_same(call, place, kind):
    printed = call("derive", kind)
    document = json.loads(call("derive", kind, "--json"))
    run = open_run(kind)
    results, summary = run.results(), run.summary()
    exact = {row["epsilon"]: row["certified_accuracy"] for row in document["accuracy"]}
    assert exact == summary.accuracy
    for (shown_epsilon, share), (epsilon, accuracy) in zip(sorted(shown(printed).items()), exact.items(), strict=True):
        assert shown_epsilon <= epsilon  # never rounded up beside a certified share
        assert share <= 100 * accuracy < share + 0.01

    call("export", kind, f"{kind}.csv")
    with open(f"{kind}.csv") as file:
        table = list(csv.DictReader(file))
    assert [row["status"] for row in table] == list(results.status)
    for epsilon, accuracy in exact.items():
        counted = [row["status"] == "certified" and float(row["radius"]) >= epsilon * (1 - 1e-5) for row in table]
        assert np.mean(counted) == pytest.approx(accuracy, abs=1 / len(table))
    (series,) = [s for s in collect([kind]).series if s.own]
    assert [float(series.results.accuracy(e)) for e in exact] == list(exact.values())
    reported = as_document(collect([kind]))["series"][0]
    assert reported["average_radius"] == pytest.approx(summary.results.average_radius)
    assert reported["certified_accuracy"]["0.0"] == exact[0.0]
    assert reported["statuses"] == summary.results.statuses

    attacked = json.loads(call("attack", kind, "--epsilon", 0.25, "--json", "--steps", 5))
    assert attacked["broken"] == []
    assert attacked["inside"] == sum(s == "certified" for s in results.status)
    assert attacked["accuracy"][0]["certified"] == pytest.approx(float(results.accuracy(0.25)), abs=1 / len(table))
    assert attacked["accuracy"][0]["attacked"] >= attacked["accuracy"][0]["certified"]

    if kind == "proved":
        call("predict", kind, "--data", "digits", code=2)
        return
    answers = json.loads(call("predict", kind, "--data", "digits", "--json", "--n", 500))["answers"]
    for row, status, answer in zip(run.rows, results.status, results.answer, strict=True):
        if status == "certified":
            assert answers[row.position]["answer"] in (None, int(answer))


def test_another_derivation_says_so_and_costs_nothing(call, place):
    text = call("derive", "sampled", "--alpha", 0.05, "--procedure", "cohen", "--epsilon", "0.1,0.2")
    assert list(shown(text)) == [0.1, 0.2]
    assert "Derived again" in text
    call("derive", "sampled", "--procedure", "lvm", code=2)
    call("export", "sampled", "table.xls", code=2)
    call("predict", "sampled", "--data", "digits", "--n", 0, code=2)
    call("derive", "proved", "--alpha", 0.1, code=2)


def test_shards_merge_into_the_whole(call, place):
    common = ("net.pt2", "--data", "digits", "--mean", 0.5, "--std", 0.25, "--sigma", 0.25, "--n", 100)
    for k in (1, 2):
        call("certify", *common, "--set", "seed=0", "--shard", f"{k}/60", "--run", f"part{k}")
    document = json.loads(call("merge", "part1", "part2", "-o", "joint", "--json"))
    assert document["done"] == document["total"] == sum(open_run(f"part{k}").total for k in (1, 2))
    call("merge", "part1", "part1", "-o", "twice", code=2)


def test_a_single_epsilon_is_the_only_radius_asked_about(call, place):
    """`prove --epsilon r` agrees with the largest radii at r, up to the last few per cent."""
    words = ("net.pt2", "--data", "digits", "--mean", 0.5, "--std", 0.25, "--limit", 12, "--run", "asked")
    call("prove", *words, "--epsilon", 0.2, "--seconds", 20)
    asked, largest = open_run(place / "asked"), open_run(place / "proved").results().radius
    assert asked.settings.epsilon == 0.2
    assert (asked.results().radius[largest >= 0.21] >= 0.2).all()
    assert (asked.results().radius[largest == 0] == 0).all()
