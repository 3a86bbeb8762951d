"""Kills, full disks, damaged files, two processes, bad data, NaN: a clear error or a recorded failure, nothing lost."""

import contextlib
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import runs_lives
import runs_nets
import torch
from runs_nets import table

from equipoise.core import InputError, Refused
from equipoise.runs import attack_run, certify, merge_runs, open_run, prove

pytestmark = pytest.mark.medium

SETTINGS = {"sigma": 0.3, "n": 150}


def test_killed_at_fifty_random_moments(tmp_path):
    """SIGKILL many times; then the table is, byte for byte, that of a run nobody disturbed."""
    command = [sys.executable, runs_lives.__file__, str(tmp_path / "killed"), "50", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    runs, worked = (int(v) for v in done.stdout.split())
    assert worked > 10, "too few lives got anywhere for the kills to mean much"
    calm = runs_lives.run(tmp_path / "calm")
    for number in range(runs):
        finished = runs_lives.run(tmp_path / "killed" / str(number))
        assert finished.finished
        assert table(finished) == table(calm)
        assert finished.manifest.digest() == calm.manifest.digest()


def forked(function, *args):
    """Run in a forked child; the sentence of the error it ended with, or "" if it did not."""
    parent, child = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # a pool of threads does not survive a fork
            function(*args)
            child.send("")
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent shall see it
            child.send(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    text = parent.recv()
    os.waitpid(pid, 0)
    return text


def short_of_space(limit, net, data, folder):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    certify(net, data, run_dir=folder, **SETTINGS)


def test_disk_full(tmp_path, net):
    data = runs_nets.data(300)
    certify(net, data, run_dir=tmp_path / "a", limit=2, **SETTINGS)  # before the fork: what is set up once
    said = forked(short_of_space, 40_000, net, data, tmp_path / "b")
    assert "free some space" in said, said
    assert 0 < len(open_run(tmp_path / "b").rows) < 300
    whole = certify(net, data, run_dir=tmp_path / "b", **SETTINGS)
    assert table(whole) == table(certify(net, data, run_dir=tmp_path / "c", **SETTINGS))

    assert "InputError: cannot write" in forked(short_of_space, 64, net, data, tmp_path / "d")
    assert certify(net, data, run_dir=tmp_path / "d", limit=2, **SETTINGS).finished


@pytest.fixture
def open_folder():
    """A folder that every user may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        with contextlib.suppress(OSError):
            path.chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)


def test_read_only_folder(open_folder, net, xy):
    """Writing is refused clearly; a finished run in a folder that cannot be written still opens."""
    certify(net, xy, run_dir=open_folder / "done", **SETTINGS)
    empty = open_folder / "empty"
    empty.mkdir()
    for path in (open_folder / "done", empty, open_folder):
        path.chmod(0o555)
    for path in (open_folder / "done").iterdir():
        path.chmod(0o444)

    def as_nobody(function):
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        function()

    for folder in (empty, open_folder / "new"):
        said = forked(as_nobody, lambda folder=folder: certify(net, xy, run_dir=folder, **SETTINGS))
        assert said.startswith("InputError: cannot"), said

    def read():
        run = open_run(open_folder / "done")
        assert run.finished
        assert run.certificates(alpha=0.01).alpha == 0.01

    assert forked(as_nobody, read) == ""


DAMAGES = {
    "not a database": lambda b: b"this is not a database" * 400,
    "a page overwritten": lambda b: b[:4096] + os.urandom(4096) + b[8192:],
    "cut in the middle": lambda b: b[: len(b) // 2 // 4096 * 4096],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_store(tmp_path, net, damage):
    data = runs_nets.data(200)
    certify(net, data, run_dir=tmp_path / "a", **SETTINGS)
    path = tmp_path / "a" / "store.sqlite"
    damaged = DAMAGES[damage](path.read_bytes())
    path.write_bytes(damaged)
    for attempt in (
        lambda: certify(net, data, run_dir=tmp_path / "a", **SETTINGS),
        lambda: open_run(tmp_path / "a").rows,
    ):
        with pytest.raises(InputError, match=r"damaged|not the store"):
            attempt()
        assert path.read_bytes()[4096:] == damaged[4096:], "what is left of the rows must stay as it was"
    path.unlink()
    assert certify(net, data, run_dir=tmp_path / "a", **SETTINGS).finished


def test_nan_for_some_noise(tmp_path):
    """The input is recorded as failed, abstains, and the run goes on."""
    x, y = runs_nets.data()
    x[:, 0, 0, 0] = 0.0
    x[5, 0, 0, 0] = 1.4  # above the threshold 2 for some noise only
    model = runs_nets.Sometimes(2.0).eval()
    run = certify(model, (x, y), run_dir=tmp_path / "a", **SETTINGS)
    assert run.finished
    assert list(run.failures) == [5]
    assert "NaN" in run.failures[5]
    found = run.certificates()
    assert (found.prediction[5], found.radius[5], found.draws[5]) == (-1, 0.0, 0)
    assert (found.prediction[:5] >= 0).any()
    summary = run.summary([0.0])
    assert (len(run.failures), summary.results.statuses.get("abstained", 0)) == (1, int(found.abstain.sum()) - 1)


def test_failed_inputs_can_be_tried_again(tmp_path, xy):
    calls = []

    class Broken(runs_nets.Items):
        def __getitem__(self, index):
            calls.append(index)
            if index == 3 and len(calls) < 40:
                raise OSError("the cable is out")
            return super().__getitem__(index)

        def fingerprint(self):
            return "sha256:0"

    data, net = Broken(*xy), runs_nets.net()
    run = certify(net, data, run_dir=tmp_path / "a", **SETTINGS)
    assert list(run.failures) == [3]
    assert "cable" in run.failures[3]
    assert certify(net, data, run_dir=tmp_path / "a", **SETTINGS).failures
    calls.extend([0] * 40)
    again = certify(net, data, run_dir=tmp_path / "a", **SETTINGS)
    assert not again.failures
    assert table(again) == table(certify(net, xy, run_dir=tmp_path / "b", **SETTINGS))


def test_a_manifest_that_is_damaged_missing_or_of_another_run_is_refused(tmp_path, net, xy):
    folder = tmp_path / "a"
    certify(net, xy, run_dir=folder, **SETTINGS)
    certify(net, xy, run_dir=tmp_path / "b", seed=1, **SETTINGS)
    for text in ("", "{", "[]", '{"format": 1}', '{"format": 99}'):
        (folder / "run.json").write_text(text)
        with pytest.raises(InputError, match=r"run\.json"):
            certify(net, xy, run_dir=folder, **SETTINGS)
    shutil.copy(tmp_path / "b" / "run.json", folder / "run.json")
    with pytest.raises(InputError, match="another run"):
        certify(net, xy, run_dir=folder, seed=1, **SETTINGS)
    (folder / "run.json").unlink()
    with pytest.raises(Refused, match=r"no run\.json"):
        certify(net, xy, run_dir=folder, **SETTINGS)


def test_two_processes(tmp_path, net, xy):
    """The second is refused while the first lives; a reader is not; after a kill the lock is gone."""
    started, hold = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)

        def wait(row, done, total):
            hold.send("held")
            signal.pause()

        certify(net, xy, run_dir=tmp_path / "a", progress=wait, **SETTINGS)
    assert started.recv() == "held"
    try:
        with pytest.raises(Refused, match="another process"):
            certify(net, xy, run_dir=tmp_path / "a", **SETTINGS)
        assert len(open_run(tmp_path / "a").rows) == 1
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert certify(net, xy, run_dir=tmp_path / "a", **SETTINGS).finished


BAD_DATA = {
    "bytes": (lambda x, y: (x.byte(), y), "expected floats"),
    "nan": (lambda x, y: (x * float("nan"), y), "NaN"),
    "shape": (lambda x, y: (x[:, :, :2], y), r"on inputs of shape \(1, 1, 2, 4\)"),
    "lengths": (lambda x, y: (x, y[:3]), "as many labels"),
    "empty": (lambda x, y: (x[:0], y[:0]), "no inputs"),
    "text": (lambda x, y: "digits", "expected a dataset|not a pair"),
    "nothing": (lambda x, y: None, "expected a dataset"),
    "label below": (lambda x, y: runs_nets.Known(x, y - 1), "label -1, but the model tells 4 classes apart"),
    "label above": (lambda x, y: runs_nets.Known(x, y + 1), "label 4, but the model tells 4 classes apart"),
    "more classes": (lambda x, y: runs_nets.Known(x, y, num_classes=10), "10 classes, the model returns 4"),
}


@pytest.mark.parametrize("kind", BAD_DATA)
def test_data_that_does_not_fit(tmp_path, net, xy, kind):
    make, words = BAD_DATA[kind]
    with pytest.raises(InputError, match=words):
        certify(net, make(*xy), run_dir=tmp_path / "a", **SETTINGS)
    assert not (tmp_path / "a").exists()


def test_models_that_fail_in_the_middle_or_are_in_training_mode(tmp_path, xy):
    class Fails(runs_nets.Net):
        def forward(self, x):
            self._calls = getattr(self, "_calls", 0) + 1
            if self._calls == 13:
                raise RuntimeError("out of memory\nmany lines")
            return super().forward(x)

    model = Fails().eval()
    with pytest.raises(InputError, match=r"on input 3 of shape \(1, 4, 4\) failed with RuntimeError: out of memory$"):
        certify(model, xy, run_dir=tmp_path / "a", **SETTINGS)
    assert len(open_run(tmp_path / "a").rows) == 3
    whole = certify(runs_nets.net(), xy, run_dir=tmp_path / "b", **SETTINGS)
    assert table(certify(model, xy, run_dir=tmp_path / "a", **SETTINGS)) == table(whole)

    training = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4), torch.nn.Dropout())
    for model in (training, torch.export.export(training, (xy[0],))):
        with pytest.raises(Refused, match="training mode"):
            certify(model, xy, run_dir=tmp_path / "c", **SETTINGS)


@pytest.mark.parametrize("value", [None, 3, torch.zeros(2, 3), [], {}, b"x", lambda: 1], ids=lambda v: type(v).__name__)
def test_bad_calls_of_the_python_interface_get_one_sentence(tmp_path, net, xy, value):
    run = certify(net, xy, run_dir=tmp_path / "a", limit=2, **SETTINGS)
    for call in (
        lambda: certify(value, xy, run_dir=tmp_path / "b", **SETTINGS),
        lambda: prove(net, value, run_dir=tmp_path / "b"),
        lambda: certify(net, xy, run_dir=value, **SETTINGS),
        lambda: open_run(value),
        lambda: attack_run(run, value, xy),
        lambda: attack_run(run, net, value),
        lambda: run.export(value),
        lambda: merge_runs(value, tmp_path / "m"),
    ):
        with pytest.raises((InputError, Refused, TypeError)) as caught:
            call()
        assert "\n" not in str(caught.value)
