"""The store, exports and merges."""

import csv
import io
import math
import sqlite3
from decimal import Decimal

import numpy as np
import pytest
import runs_nets
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import InputError, Refused
from equipoise.runs import AttackRow, certify, open_run
from equipoise.runs.export import FORMATS
from equipoise.runs.merge import merge_runs
from equipoise.runs.rows import Row, Soft
from equipoise.runs.store import Attacked, Store
from equipoise.smoothing import SimplexMap, read_log

counts = st.lists(st.integers(0, 2**40), min_size=2, max_size=5).map(lambda v: np.array(v, dtype=np.int64))
numbers = st.floats(-1e300, 1e300)
softs = st.builds(
    Soft,
    st.builds(SimplexMap, st.sampled_from(["softmax", "sparsemax"]), st.floats(0.01, 50)),
    st.permutations(range(4)).map(lambda v: np.array(v, dtype=np.int64)),
    st.integers(0, 3),
    st.booleans(),
    st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=2, max_size=4).map(lambda v: np.array(v).T),
)
rows = st.builds(
    Row,
    st.integers(0, 2**40), st.one_of(st.integers(0, 2**40), st.text(max_size=9)), st.integers(-5, 2000),
    st.integers(0, 10**6), st.integers(0, 10**6), st.none() | counts, st.none() | counts, st.none() | softs,
    st.sampled_from([None, "certified"]), st.none() | st.text(max_size=20), st.integers(0, 2**63 - 1), st.floats(0, 1e6),
)  # fmt: skip


def same(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Soft):
        return all(same(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))
    return a == b and type(a) is type(b)


@settings(max_examples=40, deadline=None)
@given(row=rows)
def test_rows_come_back_as_they_were(tmp_path_factory, row):
    folder = tmp_path_factory.mktemp("store")
    with Store(folder, identity="x", writable=True) as store:
        store.put(row)
        store.put(row)  # again: replaced, not doubled
    with Store(folder, identity="x") as store:
        (back,) = store.rows()
        assert store.done() == {row.id}
    for name in vars(row):
        assert same(getattr(row, name), getattr(back, name)), name


def test_the_store_is_in_wal_mode_and_read_while_written(tmp_path):
    with Store(tmp_path, identity="x", writable=True) as writer:
        assert writer.db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        writer.put(Row(0, 0, 0))
        with Store(tmp_path, identity="x") as reader:
            assert len(reader.rows()) == 1
            writer.put(Row(1, 1, 0))
            assert len(reader.rows()) == 2
            with pytest.raises(InputError, match=r"readonly|closed"):
                reader.put(Row(2, 2, 0))
    assert [p.name for p in tmp_path.iterdir()] == ["store.sqlite"]  # one plain file once nobody works on it
    with pytest.raises(InputError, match="another run"):
        Store(tmp_path, identity="y", writable=True)


def test_a_failed_transaction_leaves_nothing(tmp_path):
    with Store(tmp_path, identity="x", writable=True) as store:
        with pytest.raises(InputError):
            store.put_all([Row(0, 0, 0), Row(1, 1, None)])  # a label is required
        assert store.rows() == []


def test_attacks_are_kept_with_the_run(tmp_path, net, xy):
    run = certify(net, xy, run_dir=tmp_path / "a", sigma=0.3, n=150)
    first = [AttackRow(i, "base", 0.25, i % 2 == 0, 0.1 if i % 2 == 0 else None, 20, 1, 0) for i in range(12)]
    run.add_attacks(first)
    run.add_attacks(
        [AttackRow(0, "smoothed", 0.5, False, None, 20, 1, 0), AttackRow(0, "base", 0.25, False, None, 20, 1, 0)]
    )
    found = open_run(tmp_path / "a").attacks()
    assert len(found) == 13
    assert found[0] == AttackRow(0, "base", 0.25, False, None, 20, 1, 0)  # repeated: replaced
    assert found[2] == first[2]
    with sqlite3.connect(tmp_path / "a" / "store.sqlite") as db:
        assert db.execute("SELECT count(*) FROM inputs").fetchone()[0] == 12


# ---- exports ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    x, y = runs_nets.data()
    x[:, 0, 0, 0] = 0.0
    x[5, 0, 0, 0] = 1.4
    return certify(runs_nets.Sometimes(2.0).eval(), (x, y), run_dir=tmp_path / "run", sigma=0.3, n=300)


def test_tsv_is_read_back_as_cohens_log(run, tmp_path):
    log = read_log(run.export(tmp_path / "a.tsv"))
    found = run.certificates()
    assert log.idx.tolist() == run.positions.tolist()
    assert log.label.tolist() == run.labels.tolist()
    assert log.predict.tolist() == found.prediction.tolist()
    assert (log.radius <= found.radius).all()
    assert np.allclose(log.radius, found.radius, rtol=2e-3)
    assert log.accuracy([0.0])[0] == found.accuracy(run.labels)
    assert log.time[0].startswith("0:00:00")
    assert log.predict[5] == -1


def test_csv_never_overstates(run, tmp_path):
    table = list(csv.DictReader(io.StringIO(run.export(tmp_path / "a.csv").read_text())))
    found = run.certificates()
    for line, radius, low, high in zip(table, found.radius, found.p_lower, found.p_upper, strict=True):
        assert Decimal(line["radius"]) <= Decimal(float(radius))
        assert Decimal(line["p_lower"]) <= Decimal(float(low))
        assert Decimal(line["p_upper"]) >= Decimal(float(high))
    assert "NaN" in table[5]["failure"]
    assert "seconds" not in table[0]


def test_parquet_has_every_digit_and_says_what_it_is(run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    derived = run.certificates(alpha=0.05, procedure="cohen")
    table = parquet.read_table(run.export(tmp_path / "a.parquet", certificates=derived))
    assert table["radius"].to_pylist() == derived.radius.tolist()
    assert table.schema.metadata[b"procedure"] == b"cohen"
    assert b"Not covered" in table.schema.metadata[b"about"]


@pytest.mark.parametrize("name", ["a.txt", "a", "a.TSV"])
def test_unknown_formats(run, tmp_path, name):
    with pytest.raises(InputError, match=r"\.tsv"):
        run.export(tmp_path / name)


@pytest.mark.parametrize("suffix", FORMATS)
def test_an_export_is_whole_or_not_there(run, tmp_path, suffix):
    with pytest.raises(InputError, match="cannot write"):
        run.export(tmp_path / "no" / f"a{suffix}")
    path = tmp_path / f"a{suffix}"
    path.write_text("old")
    run.export(path)
    assert path.read_bytes() != b"old"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


# ---- merging ------------------------------------------------------------------------------------------------------


def test_merging_keeps_attacks_and_unfinished_shards(tmp_path, net, xy):
    def stop(row, done, total):
        if done == 2:
            raise KeyboardInterrupt

    one = certify(net, xy, run_dir=tmp_path / "1", sigma=0.3, n=150, limit=6)
    one.add_attacks([AttackRow(0, "base", 0.25, True, 0.2, 10, 1, 0)])
    with pytest.raises(KeyboardInterrupt):
        certify(net, xy, run_dir=tmp_path / "2", sigma=0.3, n=150, skip=6, progress=stop)
    merged = merge_runs([tmp_path / "1", tmp_path / "2"], tmp_path / "m")
    assert (len(merged.rows), merged.manifest.total, merged.finished) == (8, 12, False)
    assert len(merged.attacks()) == 1
    assert "not finished" in merged.summary().lines()[0]
    with pytest.raises(InputError, match="exists already"):
        merge_runs([tmp_path / "1", tmp_path / "2"], tmp_path / "m")


def test_what_does_not_belong_together_is_not_merged(tmp_path, net, xy):
    base = {"sigma": 0.3, "n": 150}
    certify(net, xy, run_dir=tmp_path / "a", limit=6, **base)
    certify(net, xy, run_dir=tmp_path / "overlap", skip=5, **base)
    certify(net, xy, run_dir=tmp_path / "sigma", skip=6, sigma=0.4, n=150)
    certify(net, (xy[0] + 0.1, xy[1]), run_dir=tmp_path / "data", skip=6, **base)
    certify(runs_nets.Net(scale=3.0).eval(), xy, run_dir=tmp_path / "model", skip=6, **base)
    for name, words in {
        "overlap": "input 5 is in",
        "sigma": "sigma: 0.3 → 0.4",
        "data": "data: sha256",
        "model": "model: sha256",
    }.items():
        with pytest.raises(Refused, match=words):
            merge_runs([tmp_path / "a", tmp_path / name], tmp_path / "m")
    with pytest.raises(InputError, match="at least two"):
        merge_runs([tmp_path / "a"], tmp_path / "m")
    with pytest.raises(InputError, match="not a run directory"):
        merge_runs([tmp_path / "a", tmp_path], tmp_path / "m")
    assert not (tmp_path / "m").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_shards_of_a_soft_run_calibrate_alike(tmp_path, net, xy):
    """The global map comes from inputs spread over the whole data, whatever part a shard certifies."""
    settings = {"sigma": 0.3, "n": 200, "procedure": "lvm", "calibration": 6}
    shards = [certify(net, xy, run_dir=tmp_path / f"{k}", skip=4 * k, limit=4, **settings) for k in range(3)]
    assert len({shard.manifest.map for shard in shards}) == 1
    assert math.isfinite(merge_runs([s.folder for s in shards], tmp_path / "m").certificates().radius.sum())


def test_an_attack_is_on_the_network_or_its_smoothed_version():
    with pytest.raises(InputError, match="'Smoothed'"):
        AttackRow(0, "Smoothed", 0.5, True, 0.1, 20, 1, 0)  # it would be held against no certificate
    assert AttackRow(0, "smoothed", 0.5, True, 0.1, 20, 1, 0).kind is Attacked.SMOOTHED
