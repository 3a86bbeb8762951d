"""Arrow and Parquet files made to harm, or that make no sense."""

import pickle

import pytest
from data_formats import Payload, labels, pixels, png, table, write_saved

from equipoise.core import InputError
from equipoise.data import load_dataset

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("PIL")
X, Y = pixels(), labels()


def test_a_pickled_extension_type_is_not_unpickled(tmp_path):
    """Old pyarrow unpickled the metadata of this extension type (CVE-2023-47248)."""
    bomb, folder = tmp_path / "exploded", tmp_path / "data"
    folder.mkdir()
    write_saved(folder, X, Y)
    marks = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Payload(bomb)),
    }
    fields = [pa.field("picture", pa.list_(pa.float32()), metadata=marks), pa.field("kind", pa.int64(), metadata=marks)]
    rows = pa.table([pa.array([[1.0], [2.0]], fields[0].type), pa.array([1, 2])], schema=pa.schema(fields))
    with (
        pa.OSFile(str(folder / "data-00000-of-00002.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, rows.schema) as out,
    ):
        out.write_table(rows)
    with pytest.raises(InputError, match="name the two to use"):
        load_dataset(folder).fingerprint()
    assert not bomb.exists()


def test_a_stream_cut_between_two_batches_is_noticed(tmp_path):
    write_saved(tmp_path, X, Y)
    path = tmp_path / "data-00001-of-00002.arrow"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pa.memory_map(str(path)) as mapped:
        assert pa.ipc.open_stream(mapped).read_all().num_rows == 7  # pyarrow does not mind
    with pytest.raises(InputError, match="cut short"):
        load_dataset(tmp_path)


def test_a_missing_or_a_left_over_shard_is_noticed(tmp_path):
    write_saved(tmp_path, X, Y)
    (tmp_path / "data-00001-of-00002.arrow").rename(tmp_path / "aside")
    with pytest.raises(InputError, match="is one of 2 files, but there are 1"):
        load_dataset(tmp_path)
    (tmp_path / "aside").rename(tmp_path / "data-00001-of-00002.arrow")
    (tmp_path / "data-00000-of-00001.arrow").write_bytes((tmp_path / "data-00000-of-00002.arrow").read_bytes())
    with pytest.raises(InputError, match="but there are 3"):
        load_dataset(tmp_path)
    assert len(load_dataset(tmp_path / "data-00001-of-00002.arrow")) == 7


def _tables():
    good, nothing = png(X[0]), pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    image = pa.array([good] * 3, pa.binary())
    two = pa.list_(pa.float32())
    return {
        "path-only": (
            {"image": pa.array([{"path": "/etc/passwd"}] * 3, nothing), "label": [0, 1, 2]},
            "row 0 holds no bytes",
        ),
        "null-struct": (
            {"image": pa.array([{"bytes": good}, None, None], nothing), "label": [0, 1, 2]},
            "row 1 holds no",
        ),
        "null-label": ({"image": image, "label": [0, None, 2]}, "row 1 has no label"),
        "text-label": ({"image": image, "label": ["a", "b", "c"]}, "integer labels are expected"),
        "float-label": ({"image": image, "label": [0.0, 1.0, 2.0]}, "integer labels are expected"),
        "minus-one": ({"image": image, "label": [0, 1, -1]}, "row 2 has label -1"),
        "no-label": ({"image": image, "other": [0, 1, 2]}, r"columns image, other: name the two"),
        "text-image": ({"image": ["a", "b", "c"], "label": [0, 1, 2]}, "expected pictures or lists"),
        "ragged": (
            {"x": pa.array([[1.0], [2.0], [3.0, 4.0]], two), "y": [0, 1, 2]},
            "lists of different lengths",
        ),
        "gap": ({"x": pa.array([[1.0], [2.0], [None]], two), "y": [0, 1, 2]}, "row 2 holds NaN"),
        "null-list": ({"x": pa.array([[1.0], None, [2.0]], two), "y": [0, 1, 2]}, "gaps or lists"),
        "nan": ({"x": pa.array([[1.0], [float("nan")], [2.0]], two), "y": [0, 1, 2]}, "row 1 holds NaN"),
        "integers": ({"x": pa.array([[1], [2], [3]]), "y": [0, 1, 2]}, "expected uint8"),
        "empty": ({"x": pa.array([], two), "y": pa.array([], pa.int64())}, "holds no data"),
    }


@pytest.mark.parametrize("name", _tables())
def test_tables_that_make_no_sense(name, tmp_path):
    columns, message = _tables()[name]
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=message):
        load_dataset(tmp_path / "a.parquet").batch([0, 1, 2])


def test_parquet_caps_columns_and_shards_that_disagree(tmp_path):
    rows = table(X, Y)
    pq.write_table(rows, tmp_path / "test-00000-of-00002.parquet")
    path = tmp_path / "test-00000-of-00002.parquet"
    with pytest.raises(InputError, match=r"declares .* the cap is 100"):
        load_dataset(path, max_bytes=100)
    assert set(load_dataset(path, columns=("picture", "y")).labels) == {7}
    with pytest.raises(InputError, match="name the two"):
        load_dataset(path, columns=("picture", "missing"))
    pq.write_table(rows.rename_columns(["y", "pixels", "label"]), tmp_path / "test-00001-of-00002.parquet")
    with pytest.raises(InputError, match="other columns or classes"):
        load_dataset(tmp_path)


@pytest.mark.parametrize("cell", ["text", 7, [1, 2]])
def test_a_struct_whose_bytes_are_none_is_refused(cell, tmp_path):
    rows = pa.table({"image": [{"bytes": cell, "path": "x"}] * 2, "label": [0, 1]})
    pq.write_table(rows, tmp_path / "test.parquet")
    with pytest.raises(InputError, match="expected pictures or lists"):
        load_dataset(tmp_path / "test.parquet")


def test_parquet_without_labels(tmp_path):
    pixels = [[0.1 * i] * 4 for i in range(3)]
    pq.write_table(pa.table({"x": pixels, "note": ["a", "b", "c"]}), tmp_path / "bare.parquet")
    found = load_dataset(tmp_path / "bare.parquet", labelled=False)
    assert (len(found), found.labelled, found.labels.tolist()) == (3, False, [-1, -1, -1])
    with pytest.raises(InputError, match="has no labels"):
        load_dataset(tmp_path / "bare.parquet")
    pq.write_table(pa.table({"x": pixels, "row": [5, 6, 7]}), tmp_path / "rows.parquet")
    with pytest.raises(InputError, match="name the two to use"):  # integers that might be labels are not passed over
        load_dataset(tmp_path / "rows.parquet", labelled=False)
    assert not load_dataset(tmp_path / "rows.parquet", columns=("x", ""), labelled=False).labelled


def test_two_columns_of_one_name_are_refused(tmp_path):
    rows = pa.table([pa.array([[1.0], [2.0]])] * 2 + [pa.array([0, 1])], names=["x", "x", "y"])
    pq.write_table(rows, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="two columns of one name: x, x, y"):
        load_dataset(tmp_path / "a.parquet")
