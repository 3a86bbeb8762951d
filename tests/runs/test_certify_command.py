"""`equipoise certify` from the outside."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import runs_command
import runs_nets
import torch

from equipoise.data import load_dataset
from equipoise.runs import certify, open_run
from equipoise.smoothing import SmoothedClassifier, read_log

FACTORY = "runs_nets:net"


@pytest.fixture
def data(tmp_path):
    x, y = runs_nets.data(10)
    np.savez(tmp_path / "d.npz", x_test=(x[:, 0] * 255).round().byte().numpy(), y_test=y.numpy())
    return tmp_path / "d.npz"


@pytest.fixture
def first(equipoise, data):
    """The command of most tests."""

    def call(*more):
        return equipoise(FACTORY, "--data", data, "--sigma", 0.3, "--n", 300, "--run", "a", *more)

    return call


def test_a_run_its_summary_and_its_repetition(first, data, tmp_path):
    ran = first("--epsilon", "0,0.1")
    assert ran.exit_code == 0, ran.stderr
    assert "certified accuracy" in ran.stdout
    assert "10 of 10 inputs" in ran.stdout
    assert "Not covered" in ran.stdout
    assert re.search(r"10 of 10 inputs: certified [\d.]+% at ε = 0, [\d,]+ draws/s", ran.stderr)
    before = (tmp_path / "a" / "run.json").read_bytes()
    again = first("--epsilon", "0,0.1")
    assert again.stdout == ran.stdout
    assert again.stderr == ""
    assert (tmp_path / "a" / "run.json").read_bytes() == before
    x = torch.stack([load_dataset(data)[i][0] for i in range(10)])
    smooth = SmoothedClassifier(runs_nets.net(), 0.3, 4).certify(x, n=300)
    assert np.array_equal(open_run(tmp_path / "a").certificates().radius, smooth.radius)


def test_json_is_one_document(first, equipoise):
    refused = equipoise("nowhere", "--json")
    assert refused.stderr == f"equipoise: {json.loads(refused.stdout)['error']}\n"
    document = json.loads(first("--json", "--epsilon", "0.1").stdout)
    assert document["finished"]
    assert document["accuracy"][0]["epsilon"] == 0.1
    assert document["manifest"]["parameters"]["sigma"] == 0.3


def test_a_finished_run_prints_its_summary_by_its_directory_alone(first, equipoise):
    ran = first()
    for ways in (["a"], ["--run", "a"]):
        assert equipoise(*ways).stdout == ran.stdout


def test_re_derive(first, equipoise, tmp_path):
    first()
    run = open_run(tmp_path / "a")
    ran = equipoise("a", "--re-derive", "--alpha", 0.05, "--procedure", "cohen", "--epsilon", "0.05", "--json")
    document = json.loads(ran.stdout)
    expected = run.certificates(0.05, "cohen")
    assert (document["alpha"], document["procedure"]) == (0.05, "cohen")
    assert document["accuracy"][0]["certified_accuracy"] == expected.accuracy(run.labels, 0.05)
    assert equipoise("a", "--re-derive", "--export", "o.tsv", "--alpha", 0.05, "--procedure", "cohen").exit_code == 0
    assert np.allclose(read_log(tmp_path / "o.tsv").radius, expected.radius, rtol=2e-3)


def test_without_run_the_same_command_finds_its_directory(equipoise, data, tmp_path):
    command = (FACTORY, "--data", data, "--sigma", 0.3, "--n", 150, "--limit", 3)
    assert equipoise(*command).exit_code == 0
    assert equipoise(*command).stderr == ""
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert equipoise(*command, "--seed", 1).exit_code == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_merge_and_export(equipoise, data, tmp_path):
    base = (FACTORY, "--data", data, "--sigma", 0.3, "--n", 150)
    whole = equipoise(*base, "--run", "whole", "--export", "whole.csv")
    assert whole.exit_code == 0
    for k in (0, 1):
        assert equipoise(*base, "--run", f"s{k}", "--skip", k, "--stride", 2).exit_code == 0
    ran = equipoise("--merge", "s1", "s0", "-o", "m", "--export", "m.csv")
    assert ran.exit_code == 0, ran.stderr
    assert (tmp_path / "m.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_plan_runs_nothing(equipoise, data, tmp_path):
    ran = equipoise(FACTORY, "--data", data, "--sigma", 0.3, "--n", 100_000, "--plan", "--workers", 8)
    assert ran.exit_code == 0, ran.stderr
    for words in ("forward passes", "10,010", "time, 8 workers", "adaptive", "memory of one worker"):
        assert words in ran.stdout
    document = json.loads(equipoise(FACTORY, "--data", data, "--sigma", 0.3, "--plan", "--json").stdout)
    assert document["forward_passes"] == 10 * 101
    assert [p.name for p in tmp_path.iterdir()] == ["d.npz"]


def test_soft_and_adaptive_runs(equipoise, data):
    base = (FACTORY, "--data", data, "--sigma", 0.3, "--n", 300, "--limit", 4)
    soft = equipoise(*base, "--procedure", "lvm", "--map", "softmax:3", "--lipschitz", "auto", "--run", "l")
    assert soft.exit_code == 0, soft.stderr
    assert "computed by equipoise.lipschitz_bound" in soft.stdout
    given = equipoise(*base, "--procedure", "lvm", "--map", "softmax:3", "--lipschitz", "7", "--run", "g")
    assert "an assumption, not checked" in given.stdout
    adaptive = equipoise(*base, "--adaptive", "--target-radius", 0.1, "--run", "t")
    assert "adaptive at alpha" in adaptive.stdout
    assert equipoise(*base, "--adaptive", "--run", "r").exit_code == 0


def test_failed_inputs_show_in_the_exit_code(equipoise, tmp_path):
    x, y = runs_nets.data(6)
    x[:, 0, 0, 0] = 0.0
    x[2, 0, 0, 0] = 1.0
    np.savez(tmp_path / "e.npz", x_test=(x[:, 0] * 255).round().byte().numpy(), y_test=y.numpy())
    ran = equipoise("runs_nets:sometimes", "--data", tmp_path / "e.npz", "--sigma", 0.1, "--n", 150, "--run", "e")
    assert ran.exit_code == 1
    assert "1 failed" in ran.stdout
    assert "first failure, input 2" in ran.stdout
    assert equipoise("e").exit_code == 1


#: arguments and the one sentence they get
WRONG = [
    ([], "expected one MODEL"),
    (["x", "y"], "expected one MODEL"),
    ([FACTORY], "--data and --sigma"),
    ([FACTORY, "--data", "nowhere", "--sigma", 0.3], "nowhere"),
    (["nowhere", "--data", "d.npz", "--sigma", 0.3], "nowhere"),
    ([FACTORY, "--re-derive"], "not a run directory"),
    (["--run", "nowhere"], "nowhere"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--engine", "rae"], "unknown engine"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--workers", 2], "--engine ray"),
    ([FACTORY, "--data", "d.npz", "--sigma", -1], "sigma"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--target-radius", 0.1], "--adaptive"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--lipschitz", "big"], "number or auto"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--epsilon", "a"], "--epsilon takes"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--epsilon=-1"], "--epsilon takes"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--epsilon", "0,nan"], "--epsilon takes"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--workers", 0], "workers must be positive"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--gpus-per-worker", 0], "GPUs per worker"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--gpus-per-worker", 1.5], "GPUs per worker"),
    (["runs_nets:Unkind", "--data", "d.npz", "--sigma", 0.3], "does not take inputs of shape (1, 4, 4): Guard failed"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--nonfinite", "x"], "nonfinite"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--device", "quantum"], "device"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--export", "o.xls"], "expected an ending"),
    ([FACTORY, "--data", "d.npz", "--sigma", 0.3, "--export", "no/o.tsv"], "no folder"),
    (["--merge", "a", "b"], "--output"),
    (["--merge", "a", "b", "-o", "c"], "not a run directory"),
]


@pytest.mark.parametrize(("args", "words"), WRONG, ids=lambda v: " ".join(map(str, v)) if isinstance(v, list) else None)
def test_bad_requests_get_one_sentence(equipoise, data, tmp_path, args, words):
    ran = equipoise(*args)
    assert ran.exit_code == 2, ran.stdout
    assert words in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert "Traceback" not in ran.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["d.npz"]


def test_a_run_directory_is_not_changed_by_accident(first, equipoise):
    first()
    for args, words in (
        (["a", "--alpha", 0.1], "add --re-derive"),
        (["a", "--re-derive", "--procedure", "lvm"], "stored votes only"),
        (["a", "--re-derive", "--lipschitz", "auto"], "needs the model"),
        (["a", "--sigma", 0.5], "--sigma needs the network"),
        (["--run", "a", "--adaptive"], "--adaptive needs the network"),
        (["a", "--retry-failed"], "--retry-failed needs the network"),
    ):
        ran = equipoise(*args)
        assert (ran.exit_code, words in ran.stderr) == (2, True), ran.stderr
    changed = first("--seed", 5)
    assert changed.exit_code == 2
    assert "seed: 0 → 5" in changed.stderr


def test_ctrl_c_leaves_a_run_that_can_be_continued(tmp_path):
    x, y = runs_nets.data(60)
    np.savez(tmp_path / "d.npz", x_test=(x[:, 0] * 255).round().byte().numpy(), y_test=y.numpy())
    command = [sys.executable, runs_command.__file__, "certify", "runs_nets:slow", "--data", str(tmp_path / "d.npz")]
    command += ["--sigma", "0.3", "--n", "3000", "--run", str(tmp_path / "a")]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background inherits it ignored
    )  # fmt: skip
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        if (tmp_path / "a" / "run.json").exists() and len(open_run(tmp_path / "a").rows) >= 2:
            break
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130, said
    assert re.search(r"interrupted: \d+ of 60 inputs are stored in .*; run the same command to continue", said)
    assert "Traceback" not in said
    assert 2 <= len(open_run(tmp_path / "a").rows) < 60
    data = load_dataset(tmp_path / "d.npz")
    assert certify(runs_nets.slow(), data, run_dir=tmp_path / "a", sigma=0.3, n=3000).finished


def test_help_has_examples(equipoise):
    ran = equipoise("--help")
    assert ran.exit_code == 0
    assert "Examples" in ran.stdout
    assert "--re-derive" in ran.stdout
