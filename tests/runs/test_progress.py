"""What is shown while a run works."""

import io
import re

import pytest
from rich.console import Console

from equipoise.core.accuracy import percent
from equipoise.runs import certify
from equipoise.runs.progress import Reporter


def report(folder, net, xy, every, terminal, **settings):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=150, highlight=False)
    with Reporter(folder, console, 0.05, every=every) as reporter:
        run = certify(net, xy, run_dir=folder, sigma=0.3, n=200, progress=reporter, **settings)
    return run, out.getvalue(), reporter


def test_plain_lines_carry_the_accuracy_so_far(tmp_path, net, xy):
    run, text, reporter = report(tmp_path / "a", net, xy, 0.0, False)
    lines = text.splitlines()
    assert len(lines) == 12
    assert re.fullmatch(r"1 of 12 inputs: certified [\d.]+% at ε = 0.05, [\d,]+ draws/s, .* left", lines[0])
    share = run.certificates().accuracy(run.labels, 0.05)
    assert f"12 of 12 inputs: certified {percent(float(share), 1)}%" in lines[-1]
    assert (reporter.derived, reporter.draws) == (12, 12 * 300)


def test_few_lines_when_not_asked_for_many(tmp_path, net, xy):
    _, text, _ = report(tmp_path / "a", net, xy, 1000.0, False)
    assert len(text.splitlines()) == 1


def test_a_terminal_gets_a_bar(tmp_path, net, xy):
    _, text, _ = report(tmp_path / "a", net, xy, 0.0, True)
    assert "━" in text
    assert "12/12" in text


def test_a_continued_run_counts_what_was_there(tmp_path, net, xy):
    def stop(row, done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=200, progress=stop)
    run, text, reporter = report(tmp_path / "a", net, xy, 1000.0, False)
    assert reporter.derived == 12
    assert reporter.draws == 7 * 300
    assert f"certified {percent(float(run.certificates().accuracy(run.labels, 0.05)), 1)}%" in text
