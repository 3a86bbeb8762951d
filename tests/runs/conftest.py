import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # runs_nets, also for `package.module:factory` on the command line

import runs_nets
from typer.testing import CliRunner

from equipoise.cli.app import build


@pytest.fixture
def net():
    return runs_nets.net()


@pytest.fixture
def xy():
    return runs_nets.data()


@pytest.fixture
def equipoise(tmp_path, monkeypatch):
    """Run `equipoise …` in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        words = [str(word) for word in words]
        return CliRunner().invoke(build(wanted=words[0]), words, prog_name="equipoise")

    return call
