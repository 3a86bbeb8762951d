"""The notebooks of `examples/notebooks` run from top to bottom; they are stored without outputs."""

import contextlib
import io
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_some():
    assert [path.stem for path in NOTEBOOKS] == ["audits", "layers", "norms", "smoothing"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run_in_order(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == []
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), namespace)
