"""The map of the thesis is complete and right: every experiment is on it, and every name on it exists."""

import importlib
import re
from pathlib import Path

import pytest

import equipoise as eq
from equipoise.smoothing import PROCEDURES
from equipoise_lab.experiments import every

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "reader.md"
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?[\w.]*`")
MODULE_OF = {"norms": "equipoise.norms", "functional": "equipoise.functional"}


def names():
    """Names in the column «here», with the module they were last qualified by: `smoothing.a`, `b` are both of smoothing."""
    found = []
    for row in ROWS:
        module = ""
        for match in NAME.finditer(row.split("|")[2]):
            name = match[1]
            if "." in name:
                module = name.rpartition(".")[0]
            if name not in PROCEDURES and not name.startswith("sll"):
                found.append((module, name.rpartition(".")[2]))
    return sorted(set(found))


def test_every_experiment_is_on_the_map():
    on_it = {word for row in ROWS for word in re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)*)`", row)}
    of_the_thesis = {e.id for e in every() if e.place}
    assert len(of_the_thesis) >= 39
    assert len(names()) > 30
    assert of_the_thesis <= on_it, f"missing: {sorted(of_the_thesis - on_it)}"


@pytest.mark.parametrize(("module", "name"), names())
def test_every_name_exists(module, name):
    homes = [eq, eq.smoothing, eq.nn]
    full = module if module.startswith("equipoise") else MODULE_OF.get(module, f"equipoise.{module}")
    if module:
        homes.insert(0, importlib.import_module(full))
    homes = [home for home in homes if hasattr(home, name)]
    assert homes or importlib.util.find_spec(f"{full}.{name}"), f"{module}.{name} is not there"
