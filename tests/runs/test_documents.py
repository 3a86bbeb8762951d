"""Stored documents edited, damaged or replaced: opened as they were, or one sentence; never a traceback, never a wait."""

import contextlib
import json
import os
import random
import shutil
import sqlite3

import pytest
import runs_nets

from equipoise.core import EquipoiseError, InputError
from equipoise.runs import AttackRow, certify, open_run, prove

NAME = "store.sqlite"

VALUES = [None, True, -1, 0, 10**30, 1e308, 0.5, "", "x", [], [1], {}, {"a": 1}, [[]], "NaN", -0.5]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    net, data = runs_nets.net(), runs_nets.data(4)
    settings = {"procedure": "lvm", "map": "softmax:1.0", "lipschitz": 30.0}
    certify(net, data, run_dir=folder / "soft", sigma=0.3, n=100, seed=0, **settings)
    prove(net, data, run_dir=folder / "proved", effort="fast")
    run = certify(net, data, run_dir=folder / "votes", sigma=0.3, n=100, seed=0)
    run.add_attacks([AttackRow(id=0, epsilon=0.1, success=False)])
    return folder


def read(folder):
    """Everything that is read of a run; what is wrong may only be an EquipoiseError."""
    with contextlib.suppress(EquipoiseError):
        run = open_run(folder)
        run.summary()
        run.export(folder / "table.csv")
        run.attacks()


def places(value, path=()):
    """The path of every value of a document."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def edited(document, path, value, drop):
    document = json.loads(json.dumps(document))
    if not path:
        return value
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    if drop and isinstance(inner, dict):
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return document


@pytest.mark.parametrize("kind", ["soft", "votes", "proved"])
def test_edited_manifests(originals, tmp_path, kind):
    shutil.copytree(originals / kind, tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    document, chance = json.loads(path.read_text()), random.Random(kind)
    for place in places(document):
        for value in chance.sample(VALUES, 3):
            path.write_text(json.dumps(edited(document, place, value, drop=chance.random() < 0.2)))
            read(tmp_path / "run")


@pytest.mark.parametrize("kind", ["soft", "votes", "proved"])
def test_edited_rows(originals, tmp_path, kind):
    shutil.copytree(originals / kind, tmp_path / "run")
    db = sqlite3.connect(tmp_path / "run" / NAME)
    chance = random.Random(kind)
    for name, key, payload in db.execute("SELECT kind, key, payload FROM entries").fetchall():
        document = json.loads(payload)
        for place in chance.sample(list(places(document)), min(20, len(list(places(document))))):
            changed = json.dumps(edited(document, place, chance.choice(VALUES), drop=chance.random() < 0.2))
            with db:
                db.execute("UPDATE entries SET payload = ? WHERE kind = ? AND key = ?", (changed, name, key))
            read(tmp_path / "run")
        with db:
            db.execute("UPDATE entries SET payload = ? WHERE kind = ? AND key = ?", (payload, name, key))
    for raw in (b"\xff\xfe", "not JSON", "[" * 100_000, 7):
        with db:
            db.execute("UPDATE entries SET payload = ? WHERE kind = 'input'", (raw,))
        with pytest.raises(InputError):
            _ = open_run(tmp_path / "run").rows


VIEW = "CREATE VIEW endless AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT x FROM c"
COUNTS = "UPDATE entries SET payload = json_set(payload, '$.draws', 90) WHERE kind = 'input'"


@pytest.mark.parametrize(("statement", "words"), [(VIEW, "other tables"), (COUNTS, "damaged at input 0")])
def test_views_and_counts_that_the_settings_cannot_give_are_refused(originals, tmp_path, statement, words):
    shutil.copytree(originals / "votes", tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / NAME) as db:
        db.execute(statement)
    with pytest.raises(InputError, match=words):
        _ = open_run(tmp_path / "run").rows


@pytest.mark.parametrize("name", [NAME, f"{NAME}-journal", "run.json"])
def test_a_named_pipe_is_refused_without_waiting(originals, tmp_path, name):
    shutil.copytree(originals / "votes", tmp_path / "run")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(InputError, match=r"regular file|not a run directory"):
        _ = open_run(tmp_path / "run").rows
