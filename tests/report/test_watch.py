"""`equipoise report --watch`: the page follows a run, on this machine only and not for ever."""

import http.client
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from equipoise.cli.app import Command, build
from equipoise.report.watch import LOOPBACK, follow
from equipoise.runs import Settings, prepare, start


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x.flatten(1))


def data(count=6):
    x = torch.rand(count, 4, generator=torch.Generator().manual_seed(0))
    return x, torch.zeros(count, dtype=torch.int64)


def get(address, path=None, host=None):
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=5)
    connection.request("GET", parts.path if path is None else path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_a_page_follows_a_run_and_is_written_when_it_ends(tmp_path):
    job = prepare(Slow(4, 2).eval(), data(), Settings.of("sampled", {"sigma": 0.1, "n": 200, "seed": 0}))
    go, pages, addresses = threading.Event(), [], []

    def work():
        start(job, tmp_path / "a", progress=lambda row, done, total: go.wait(5) if done == 2 else None)

    worker = threading.Thread(target=work)
    worker.start()
    while not (tmp_path / "a" / "store.sqlite").exists():
        time.sleep(0.01)

    def announce(address):
        addresses.append(address)
        for _ in range(200):
            status, page = get(address)
            if "of 6 so far" in page:
                break
            time.sleep(0.02)
        pages.append(page)
        assert status == 200
        assert get(address, "/")[0] == get(address, "/report.html")[0] == 404
        assert get(address, host="evil.example")[0] == 404
        go.set()

    threading.Timer(5, go.set).start()
    why = follow([tmp_path / "a"], tmp_path / "r.html", every=0.05, seconds=60, announce=lambda a: threading.Thread(
        target=announce, args=(a,)).start())  # fmt: skip
    worker.join()
    assert why == "the runs are finished"
    assert addresses[0].startswith(f"http://{LOOPBACK}:")
    assert pages and 'http-equiv="refresh"' in pages[0]  # noqa: PT018
    final = (tmp_path / "r.html").read_text()
    assert 'http-equiv="refresh"' not in final
    assert "mean of 6 inputs" in final
    with socket.socket() as probe, pytest.raises(OSError, match="refused"):
        probe.connect((LOOPBACK, urlsplit(addresses[0]).port))


def test_it_ends_when_its_time_is_up(tmp_path):
    begin = time.monotonic()
    job = prepare(
        nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval(),
        data(3),
        Settings.of("sampled", {"sigma": 0.1, "n": 100, "seed": 1}),
    )
    (tmp_path / "c").mkdir()
    job.manifest.write(tmp_path / "c")  # begun, nothing stored yet
    assert "minutes are over" in follow([tmp_path / "c"], tmp_path / "r.html", every=0.05, seconds=0.2)
    assert time.monotonic() - begin < 20
    assert "Nothing to show yet" in (tmp_path / "r.html").read_text()


WRONG = {
    "no run": (["--watch", "nowhere"], "not a run directory yet"),
    "another folder": (["--watch", "."], "is not a run directory"),
    "nothing": (["--watch"], "name at least one run directory"),
    "a port": (["--watch", "a", "--port", "70000"], "port lies between"),
    "a time": (["--watch", "a", "--minutes", "-1"], "--minutes must be positive"),
    "an audit": (["--watch", "a", "--audit", "x.pt2"], "leave --audit"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_sentence(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    arguments, words = WRONG[case]
    app = build((Command("report", "equipoise.cli.report", "report"), Command("norm", "equipoise.cli.norm", "norm")))
    ran = CliRunner().invoke(app, ["report", *arguments])
    assert ran.exit_code == 2
    assert words in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*.html"))
