"""Fixtures shared by all floors: where the real data is, and a quiet number of threads."""

from __future__ import annotations

import json
import os
import pathlib

import pytest


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The folder of real data (EQUIPOISE_DATA, or ../shared/data beside the repository); skips where absent."""
    root = pathlib.Path(__file__).resolve().parents[1]
    folder = pathlib.Path(os.environ.get("EQUIPOISE_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("the real data is not here: set EQUIPOISE_DATA to its folder")
    return folder


class Ran:
    """Result of a command: exit code, stdout, stderr."""

    def __init__(self, result):
        self.code, self.out, self.err, self.error = result.exit_code, result.stdout, result.stderr, result.exception

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def equipoise():
    """Run the application: `equipoise("norm", path)`."""
    from typer.testing import CliRunner

    from equipoise.cli.app import build

    app = build()

    def run(*args):
        return Ran(CliRunner().invoke(app, [str(arg) for arg in args], prog_name="equipoise"))

    return run
