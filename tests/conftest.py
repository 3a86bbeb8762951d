"""Shared by all floors: where the real data is, which tests are quick, and which belong on one process."""

from __future__ import annotations

import json
import os
import pathlib
import types

import pytest

from slower import listed

#: marked tests, or files, that share something costly: a cluster, a browser, a pair of processes
TOGETHER = ("ray", "browser")
FILES = ("train/test_distributed.py",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `slower.txt` lists as `medium` and start with it; keep on one process what shares something costly."""
    known = {name: place for place, name in enumerate(listed())}

    def place(item: pytest.Item) -> int:
        name = item.nodeid
        return min(known.get(name, len(known)), known.get(name.partition("[")[0], len(known)))

    for item in items:
        if place(item) < len(known):
            item.add_marker(pytest.mark.medium)
        groups = [name for name in TOGETHER if item.get_closest_marker(name)]
        groups += [name for name in FILES if item.nodeid.partition("::")[0].endswith(name)]
        if groups:
            item.add_marker(pytest.mark.xdist_group(groups[0]))
    if os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=place)


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


@pytest.fixture(autouse=True)
def _same_seed_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds come from the operating system by default; in tests they are 0, so that a failure can be repeated."""
    monkeypatch.setattr("equipoise.smoothing.noise.secrets", types.SimpleNamespace(randbits=lambda bits: 0))
