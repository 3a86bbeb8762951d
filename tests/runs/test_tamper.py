"""A run directory that was edited, damaged or cut: noticed in one sentence, or the same numbers as before."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.core import EquipoiseError
from equipoise.core.digests import digest_document
from equipoise.runs import certify, open_run
from equipoise.runs.store import Store

BASE = {"sigma": 0.3, "n0": 20, "n": 100, "procedure": "lvm", "map": "softmax:1.0", "lipschitz": "auto"}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 3)).eval()


@pytest.fixture(scope="module")
def data():
    return torch.rand(6, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.fixture(scope="module")
def finished(model, data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    certify(model, data, run_dir=folder, **BASE)
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def edit(folder: Path, change, *, reseal: bool = False, drop: bool = False) -> None:
    path = folder / "run.json"
    document = json.loads(path.read_text())
    change(document)
    noted = document.pop("digest")
    if not drop:
        document["digest"] = digest_document(document) if reseal else noted
    path.write_text(json.dumps(document))


def smaller(document) -> None:
    document["lipschitz"]["value"] = 0.01


@pytest.mark.parametrize("how", [{}, {"drop": True}, {"reseal": True}])
def test_an_edited_constant_is_noticed(run, model, data, how):
    """From 15.6 to 0.01: the digest in the file, its copy in the store, and the recomputation each notice it."""
    edit(run, smaller, **how)
    with pytest.raises(EquipoiseError, match="was changed after"):
        open_run(run).certificates()
    with pytest.raises(EquipoiseError, match=r"was changed after|can be proved"):
        certify(model, data, run_dir=run, **BASE)


def first_release(folder: Path) -> None:
    """The same directory as the first release would have written it."""
    edit(folder, lambda document: None, drop=True)
    db = sqlite3.connect(folder / "store.sqlite")
    db.execute("DELETE FROM meta WHERE key != 'identity'")
    for table in ("inputs", "attacks", "sessions"):
        columns = [c[1] for c in db.execute(f"PRAGMA table_info({table})") if c[1] != "checksum"]
        db.execute(f"CREATE TABLE copy AS SELECT {', '.join(columns)} FROM {table}")
        db.execute(f"DROP TABLE {table}")
        db.execute(f"ALTER TABLE copy RENAME TO {table}")
    db.execute("CREATE UNIQUE INDEX own ON inputs (id)")
    db.commit()
    db.close()


def test_a_run_of_the_first_release_opens_and_says_what_is_not_covered(run, finished, model, data):
    first_release(run)
    old = open_run(run)
    assert np.array_equal(old.certificates().radius, open_run(finished).certificates().radius)
    assert any("first release" in note for note in old.summary().notes)
    assert certify(model, data, run_dir=run, **BASE).finished
    edit_constant = json.loads((run / "run.json").read_text())
    edit_constant["lipschitz"]["value"] = 0.01
    (run / "run.json").write_text(json.dumps(edit_constant))
    with pytest.raises(EquipoiseError, match="can be proved"):
        certify(model, data, run_dir=run, **BASE)
    edit_constant["lipschitz"]["source"] = "given"
    (run / "run.json").write_text(json.dumps(edit_constant))
    with pytest.raises(EquipoiseError, match="was asked for"):
        open_run(run)


def everything(folder: Path) -> tuple:
    run = open_run(folder)
    found = run.certificates()
    return run.ids, run.labels.tolist(), found.prediction.tolist(), found.radius.tolist(), run.attacks()


def test_flipped_bits_are_noticed_or_change_nothing(run):
    """Every outcome of a flipped bit is the same numbers or one sentence; `equipoise selfcheck files` tries thousands."""
    true, noticed, chance = everything(run), 0, random.Random(7)
    for name in ("store.sqlite", "run.json"):
        content = (run / name).read_bytes()
        for _ in range(60):
            damaged = bytearray(content)
            damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            (run / name).write_bytes(damaged)
            try:
                assert everything(run) == true
            except EquipoiseError:
                noticed += 1
        (run / name).write_bytes(content)
    assert noticed > 40


def test_a_row_from_elsewhere_is_noticed(run, model, data, tmp_path):
    certify(model, data, run_dir=tmp_path / "other", **{**BASE, "seed": 5})
    db = sqlite3.connect(run / "store.sqlite")
    db.execute("ATTACH ? AS other", (str(tmp_path / "other" / "store.sqlite"),))
    db.execute("REPLACE INTO inputs SELECT * FROM other.inputs WHERE id = 2")
    db.commit()
    db.close()
    with pytest.raises(EquipoiseError, match="input 2"):
        open_run(run).certificates()


def test_a_removed_row_is_noticed(run):
    with sqlite3.connect(run / "store.sqlite") as db:
        db.execute("DELETE FROM inputs WHERE id = 2")
    with pytest.raises(EquipoiseError, match="counts 6 inputs and holds 5"):
        open_run(run).certificates()


def test_a_killed_run_copied_without_its_log_says_so(finished, tmp_path):
    whole = open_run(finished)
    killed, copied = tmp_path / "killed", tmp_path / "copied"
    killed.mkdir()
    copied.mkdir()
    shutil.copy(finished / "run.json", killed)
    shutil.copy(finished / "run.json", copied)
    with Store(killed, identity=whole.manifest.digest(), seal=whole.manifest.seal(), writable=True) as store:
        store.put(whole.rows[0])
        shutil.copy(killed / "store.sqlite", copied)
        assert not any("killed" in note for note in open_run(killed).summary().notes)
    for _ in range(2):  # the first reader must not hide it from the second
        with pytest.raises(EquipoiseError, match=r"no finished inputs: .* without store\.sqlite-wal"):
            open_run(copied).summary()
    assert not any("copied" in note for note in open_run(killed).summary().notes)
