"""The same images in every format are the same dataset: values, labels, fingerprint; and damage is always noticed."""

import pickle
import random

import numpy as np
import pytest
import torch
from data_formats import CASES, CLASSES, FORMATS, H, N, W, labels, pixels

from equipoise.core import EquipoiseError, InputError
from equipoise.data import Dataset, load_dataset

IDS = [f"{row.id}-{channels}" for row, channels in CASES]


def written(row, channels, folder, seed=0):
    for package in row.needs:
        pytest.importorskip(package)
    x, y = pixels(channels, seed), labels()
    return row.write(folder, x, y), x, y


@pytest.mark.parametrize(("row", "channels"), CASES, ids=IDS)
def test_values_labels_and_shapes(row, channels, tmp_path):
    spec, x, y = written(row, channels, tmp_path)
    ds = load_dataset(spec)
    assert (len(ds), ds.input_shape, ds.num_classes) == (N, (channels, H, W), row.num_classes)
    assert ds.labels.dtype == np.int64
    assert ds.labels.tolist() == y.tolist() == ds.all_labels.tolist()
    assert (ds.classes == tuple(CLASSES)) if row.classes else ds.classes is None
    order = np.random.default_rng(1).permutation(N)
    batch, found = ds.batch(np.concatenate([order, order[:3]]))
    wanted = torch.from_numpy(x.transpose(0, 3, 1, 2)[np.concatenate([order, order[:3]])]).float() / 255
    assert batch.dtype == torch.float32
    assert torch.equal(batch, wanted)
    assert found.dtype == torch.int64
    assert found.tolist() == y[np.concatenate([order, order[:3]])].tolist()
    one, label = ds[-1]
    assert torch.equal(one, torch.from_numpy(x[-1].transpose(2, 0, 1)).float() / 255)
    assert (type(label), label) == (int, y[-1])


@pytest.mark.parametrize(("row", "channels"), CASES, ids=IDS)
def test_fingerprint_is_the_content(row, channels, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    spec, x, y = written(row, channels, tmp_path / "one")
    reference = Dataset.from_arrays(x, y)
    ds = load_dataset(spec)
    assert ds.fingerprint() == reference.fingerprint() == ds.fingerprint()
    assert ds.select(skip=2, stride=3).fingerprint() == reference.select(skip=2, stride=3).fingerprint()
    other, *_ = written(row, channels, tmp_path / "two", seed=1)
    assert load_dataset(other).fingerprint() != ds.fingerprint()


@pytest.mark.parametrize(("row", "channels"), CASES, ids=IDS)
def test_a_copy_in_another_process_reads_the_same(row, channels, tmp_path):
    ds = load_dataset(written(row, channels, tmp_path)[0])
    ds.batch([0])  # files may be open now
    copy = pickle.loads(pickle.dumps(ds.select(skip=1)))
    assert torch.equal(copy.batch([3, 0])[0], ds.batch([4, 1])[0])
    assert copy.ids[0] == 1


@pytest.mark.parametrize("row", [r for r in FORMATS if r.files], ids=lambda r: r.id)
def test_truncated_files_are_refused(row, tmp_path):
    spec, *_ = written(row, row.channels[-1], tmp_path)
    whole = load_dataset(spec)
    split = "train" if spec.endswith("#train") else "test"
    paths = [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".txt"]
    used = [p for p in paths if not ("train" in str(p.relative_to(tmp_path)) and split == "test")]
    assert used
    for path in used[:4]:
        content = path.read_bytes()
        tail = 40 if path.suffix == ".png" else 5  # the last bytes of a PNG only say that it ends
        for length in (0, 1, 7, len(content) // 2 + 1, len(content) - tail):
            path.write_bytes(content[:length])
            with pytest.raises(InputError):
                load_dataset(spec).fingerprint()
        path.write_bytes(content)
    assert load_dataset(spec).fingerprint() == whole.fingerprint()


@pytest.mark.parametrize("row", [r for r in FORMATS if r.files], ids=lambda r: r.id)
def test_damage_raises_nothing_but_our_errors(row, tmp_path):
    spec, *_ = written(row, row.channels[-1], tmp_path)
    rng = random.Random(row.id)
    paths = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    refused = []
    for _ in range(40):
        path = rng.choice(paths)
        content = path.read_bytes()
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 20])):
            damaged[rng.randrange(min(len(content), rng.choice([64, 4000])))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            load_dataset(spec).fingerprint()
        except EquipoiseError as error:
            refused.append(str(error))
        path.write_bytes(content)
    assert not any("\n" in message for message in refused)
    assert refused


@pytest.mark.parametrize(("row", "channels"), CASES, ids=IDS)
def test_an_unknown_split_is_refused(row, channels, tmp_path):
    spec, *_ = written(row, channels, tmp_path)
    with pytest.raises(InputError, match="split"):
        load_dataset(spec.partition("#")[0], split="nonsense")


@pytest.mark.parametrize("row", [r for r in FORMATS if r.files], ids=lambda r: r.id)
def test_a_label_out_of_range_names_row_value_and_range(row, tmp_path):
    spec, *_ = written(row, row.channels[-1], tmp_path)
    with pytest.raises(InputError, match=r"row 4 has label 1, expected in 0 … 0"):
        load_dataset(spec, num_classes=1)


@pytest.mark.parametrize("row", [r for r in FORMATS if "pyarrow" in r.needs or "PIL" in r.needs], ids=lambda r: r.id)
def test_a_missing_package_is_named(row, tmp_path, monkeypatch):
    import sys

    spec, *_ = written(row, row.channels[-1], tmp_path)
    if not row.files:
        pytest.skip("the factory imports pillow itself")
    missing = row.needs[0]
    for name in [n for n in sys.modules if n == missing or n.startswith(f"{missing}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=r"needs (pyarrow|pillow): pip install 'equipoise\[data\]'"):
        load_dataset(spec).batch([0])


def test_a_part_that_lacks_the_last_class_has_as_many_classes(tmp_path):
    from data_formats import png

    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for part, few in (("train", labels()), ("test", labels() * 0)):
        rows = pa.table({"image": [png(image) for image in pixels()], "label": few})
        pq.write_table(rows, tmp_path / f"{part}.parquet")
    assert load_dataset(tmp_path, split="test").num_classes == 3


def test_the_real_archives(data_dir):
    for name, shape, count in (("cifar10", (3, 32, 32), 5000), ("fashion_mnist", (1, 28, 28), 10_000)):
        ds = load_dataset(data_dir / f"{name}.npz", split="test")
        assert (ds.input_shape, len(ds), ds.num_classes) == (shape, count, 10)
        assert np.bincount(ds.labels).tolist() == [count // 10] * 10
        x, _ = ds.batch(range(64))
        assert 0.0 <= float(x.min()) < 0.1
        assert 0.9 < float(x.max()) <= 1.0
