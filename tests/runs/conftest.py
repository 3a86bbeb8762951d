import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # runs_nets, also for `package.module:factory` on the command line

import runs_command
import runs_nets
from typer.testing import CliRunner


@pytest.fixture
def net():
    return runs_nets.net()


@pytest.fixture
def xy():
    return runs_nets.data()


@pytest.fixture
def equipoise(tmp_path, monkeypatch):
    """Run `equipoise certify …` in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*args):
        return CliRunner().invoke(runs_command.app(), ["certify", *(str(a) for a in args)], prog_name="equipoise")

    return call
