"""The engineer guide alone: its first commands, as they stand there, end in a certificate above 0 of a network from elsewhere."""

import re
import shlex
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from equipoise.cli.app import build
from equipoise.runs import open_run

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "engineer.md"


def commands():
    """The `equipoise` lines of the first block of the guide."""
    section = GUIDE.read_text(encoding="utf-8").partition("## The first ten minutes")[2].partition("\n## ")[0]
    block = re.search(r"```console\n(.*?)```", section, re.DOTALL)[1]
    lines = [line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines()]
    assert lines[0].startswith("git clone")
    assert "pip install" in lines[1]
    return [shlex.split(line, comments=True)[1:] for line in lines[2:]]


@pytest.fixture
def folder(data_dir, tmp_path, monkeypatch):
    """A network and pictures under the names of the guide."""
    pytest.importorskip("onnx")
    network, pictures = data_dir / "onnx" / "cifar-deep-kw.onnx", data_dir / "cifar10.npz"
    if not (network.exists() and pictures.exists()):
        pytest.skip("the network and its pictures are not in the data folder")
    shutil.copy(network, tmp_path / "model.onnx")
    shutil.copy(pictures, tmp_path / "pictures.npz")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def follow(lines):
    begin = time.monotonic()
    for arguments in lines:
        ran = CliRunner().invoke(build(wanted=arguments[0]), arguments, prog_name="equipoise")
        assert ran.exit_code == 0, (arguments, ran.stderr, ran.exception)
    assert time.monotonic() - begin < 600
    return open_run("runs/first").summary()


def test_the_first_commands_end_in_a_certificate(folder):
    """With fewer inputs and draws than the guide asks for."""
    changed = {"20": "4", "500": "60"}
    lines = [[changed.get(word, word) for word in line] for line in commands() if line[0] != "audit"]
    if not _plotly():
        lines = [line for line in lines if line[0] != "report"]
    summary = follow(lines)
    assert summary.accuracy[0.0] > 0
    assert summary.average_radius > 0


@pytest.mark.slow
def test_the_guide_as_it_stands(folder):
    summary = follow(commands())
    assert summary.accuracy[0.03] >= 0.3
    assert (folder / "first.html").exists()


def _plotly():
    try:
        import plotly  # noqa: F401
    except ImportError:
        return False
    return True
