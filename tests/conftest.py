"""Shared by all tests: the command line, where the real data is, and which tests belong on one process.

`medium` marks the tests, and with `pytestmark` the files, that take most of the time: `make check` leaves them out. `slow` marks
what takes minutes: only `make test-all` runs it. `pytest --durations=50` says what a mark is due to.
"""

import gc
import json
import os
import pathlib
import sys
import types

import pytest

#: tests of several files that share something costly: a cluster, a browser
TOGETHER = ("ray", "browser")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On several processes a file stays on one, since its fixtures are shared; files with long tests start first."""
    groups = {}
    for item in items:
        shared = [name for name in TOGETHER if item.get_closest_marker(name)]
        groups[item] = shared[0] if shared else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    long = {group for item, group in groups.items() if item.get_closest_marker("medium")}
    if os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=lambda item: groups[item] not in long)


def pytest_collection_finish() -> None:
    """Half a million objects of torch and of the collection live to the end: the collector need not look at them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The folder of real data (EQUIPOISE_DATA, or ../shared/data beside the repository); skips where absent."""
    root = pathlib.Path(__file__).resolve().parents[1]
    folder = pathlib.Path(os.environ.get("EQUIPOISE_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("the real data is not here: set EQUIPOISE_DATA to its folder")
    return folder


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(module, code, group, entries)`: what pip would leave of a package with one module and entry points."""
    installed = []

    def make(module, code, group, entries):
        folder = tmp_path / "site" / f"{module}-1.0.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / f"{module}.py").write_text(code)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = [f"{name} = {module}:{target}\n" for name, target in entries.items()]
        (folder / "entry_points.txt").write_text(f"[equipoise.{group}]\n" + "".join(lines))
        monkeypatch.syspath_prepend(str(folder.parent))
        installed.append(module)

    yield make
    for module in installed:
        sys.modules.pop(module, None)


class Ran:
    """Result of a command: exit code, stdout, stderr."""

    def __init__(self, result):
        self.code, self.out, self.err, self.error = result.exit_code, result.stdout, result.stderr, result.exception

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture(scope="session")
def equipoise():
    """Run the application: `equipoise("norm", path)`."""
    from typer.testing import CliRunner

    from equipoise.cli import app

    whole = app.build()

    def run(*args):
        return Ran(CliRunner().invoke(whole, [str(arg) for arg in args], prog_name="equipoise"))

    return run


@pytest.fixture
def as_if_large(monkeypatch: pytest.MonkeyPatch):
    """Small convolutions are bounded as large ones are: by their symbol, on its grid or, with `grid=False`, everywhere."""

    def switch(grid: bool = True) -> None:
        monkeypatch.setattr("equipoise.norms.convolution.DENSE_ENTRIES", 0)
        if not grid:
            monkeypatch.setattr("equipoise.norms.convolution.GRID_POINTS", (0, 0))

    return switch


@pytest.fixture(autouse=True)
def _same_seed_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds come from the operating system by default; in tests they are 0, so that a failure can be repeated."""
    monkeypatch.setattr("equipoise.smoothing.noise.secrets", types.SimpleNamespace(randbits=lambda bits: 0))
