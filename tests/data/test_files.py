"""The same images in every format are the same dataset; damage, lies and code in files are always noticed."""

import contextlib
import io
import os
import pickle
import random
import struct
import sys
import warnings
import zipfile
import zlib

import numpy as np
import pytest
import torch
from data_formats import CASES, CLASSES, FORMATS, H, N, Payload, W, labels, pixels, png, table, write_folder

from equipoise.core import EquipoiseError, InputError
from equipoise.data import Dataset, load_dataset

X, Y = pixels(), labels()
IDS = [f"{row.id}-{channels}" for row, channels in CASES]


def written(row, channels, folder, seed=0):
    for package in row.needs:
        pytest.importorskip(package)
    x, y = pixels(channels, seed), labels()
    return row.write(folder, x, y), x, y


@pytest.mark.parametrize(("row", "channels"), CASES, ids=IDS)
def test_the_same_images_in_every_format(row, channels, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    spec, x, y = written(row, channels, tmp_path / "one")
    ds, reference = load_dataset(spec), Dataset.from_arrays(x, y)
    assert (len(ds), ds.input_shape, ds.num_classes) == (N, (channels, H, W), len(CLASSES))
    assert ds.labels.dtype == np.int64
    assert ds.labels.tolist() == y.tolist()
    assert (ds.classes == tuple(CLASSES)) if row.classes else ds.classes is None
    order = np.random.default_rng(1).permutation(N)
    batch, picked = ds.batch(order)
    assert batch.dtype == torch.float32
    assert torch.equal(batch, torch.from_numpy(x.transpose(0, 3, 1, 2)[order]).float() / 255)
    assert picked.dtype == torch.int64
    assert picked.tolist() == y[order].tolist()
    one, label = ds[-1]
    assert torch.equal(one, torch.from_numpy(x[-1].transpose(2, 0, 1)).float() / 255)
    assert (type(label), label) == (int, y[-1])

    assert ds.fingerprint() == reference.fingerprint()
    assert load_dataset(written(row, channels, tmp_path / "two", seed=1)[0]).fingerprint() != ds.fingerprint()
    copy = pickle.loads(pickle.dumps(ds))  # in another process
    assert torch.equal(copy.batch([1, 0])[0], ds.batch([1, 0])[0])
    with pytest.raises(InputError, match="split"):
        load_dataset(spec.partition("#")[0], split="nonsense")


@pytest.mark.parametrize("row", [r for r in FORMATS if r.files], ids=lambda r: r.id)
def test_damaged_files_are_refused_or_read_in_a_sentence(row, tmp_path):
    spec, *_ = written(row, 3, tmp_path)
    whole, rng = load_dataset(spec).fingerprint(), random.Random(row.id)
    paths = sorted(p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".txt")
    for path in [p for p in paths if "train" not in str(p.relative_to(tmp_path))][:3]:
        content = path.read_bytes()
        tail = 40 if path.suffix == ".png" else 5  # the last bytes of a PNG only say that it ends
        for length in (0, 1, 7, len(content) // 2 + 1, len(content) - tail):
            path.write_bytes(content[:length])
            with pytest.raises(InputError):
                load_dataset(spec).fingerprint()
        for _ in range(12):
            damaged = bytearray(content)
            for _ in range(rng.choice([1, 20])):
                damaged[rng.randrange(min(len(content), rng.choice([64, 4000])))] = rng.randrange(256)
            path.write_bytes(damaged)
            with contextlib.suppress(EquipoiseError):
                load_dataset(spec).fingerprint()
        path.write_bytes(content)
    assert load_dataset(spec).fingerprint() == whole


@pytest.mark.parametrize("row", [r for r in FORMATS if r.files and r.needs], ids=lambda r: r.id)
def test_a_missing_package_is_named(row, tmp_path, monkeypatch):
    spec, *_ = written(row, 3, tmp_path)
    missing = row.needs[0]
    for name in [n for n in sys.modules if n == missing or n.startswith(f"{missing}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=r"this needs .*: pip install 'equipoise\[data\]'"):
        load_dataset(spec).batch([0])


def npy(shape, dtype="|u1", body=b"", version=(1, 0)):
    head = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H", len(head)) + head + body


def archive(path, **entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(f"{name}.npy", content)
    return path


def _objects(bomb, *shape):
    return np.array([Payload(bomb)], dtype=object).reshape(shape)


#: name → what is written into the folder, and what is loaded
CODE = {
    "objects": lambda d, bomb: np.savez(d / "a.npz", x=_objects(bomb, 1), y=np.array([0])),
    "labels": lambda d, bomb: np.savez(d / "a.npz", x=np.zeros((1, 2, 2), np.uint8), y=_objects(bomb, 1)),
    "pickle": lambda d, bomb: (d / "a.npz").write_bytes(pickle.dumps(Payload(bomb))),
    "entry": lambda d, bomb: archive(d / "a.npz", x=pickle.dumps(Payload(bomb)), y=npy((1,), body=b"\0")),
    "record": lambda d, bomb: archive(
        d / "a.npz", x=npy((1,), [("a", "|O")], pickle.dumps(Payload(bomb))), y=npy((1,), body=b"\0")
    ),
    "pkl": lambda d, bomb: (d / "a.pkl").write_bytes(pickle.dumps(Payload(bomb))),
}


@pytest.mark.parametrize("name", CODE)
@pytest.mark.filterwarnings("ignore:pickled")
def test_no_code_in_a_file_runs(name, tmp_path):
    bomb, folder = tmp_path / "exploded", tmp_path / "data"
    folder.mkdir()
    CODE[name](folder, bomb)
    assert pickle.loads(pickle.dumps(Payload(tmp_path / "control"))) is None
    assert (tmp_path / "control").is_dir()  # the payload works
    for spec in (folder, *folder.iterdir()):
        with pytest.raises(
            InputError, match="Object arrays cannot" if name in ("objects", "record") and spec != folder else None
        ):
            load_dataset(spec).fingerprint()
    assert not bomb.exists()


LABEL = npy((1,), body=b"\0")
ARCHIVES = {
    "larger-than-memory": ({"x": npy((10**6, 10**6, 10**6)), "y": LABEL}, "cannot read a.npz as .npz"),
    "product-overflows": ({"x": npy((2**32, 2**32, 2**32)), "y": LABEL}, "cannot read a.npz as .npz"),
    "negative": ({"x": npy((-1, 2, 2), body=bytes(4)), "y": LABEL}, "cannot read a.npz as .npz"),
    "shorter-than-declared": ({"x": npy((1, 2, 2), body=b"\0"), "y": LABEL}, "cannot read a.npz as .npz"),
    "version": ({"x": npy((1, 2, 2), body=bytes(4), version=(9, 9)), "y": LABEL}, "cannot read a.npz as .npz"),
    "not-numbers": ({"x": npy((1, 2, 2), "<U1", bytes(16)), "y": LABEL}, "expected uint8"),
    "empty-entry": ({"x": b"", "y": LABEL}, "expected uint8"),
    "no-array": ({"x": npy((1, 2, 2), body=bytes(4)), "y": b"../x"}, "one integer per row"),
    "bad-header": ({"x": npy("((((", body=bytes(4)), "y": LABEL}, "cannot read a.npz as .npz"),
    "only-inputs": ({"x": npy((1, 2, 2), body=bytes(4))}, "has no labels"),
    "labels-of-another-part": ({"x_test": npy((1, 2, 2), body=bytes(4)), "y_train": LABEL}, "has no arrays"),
    "no-rows": ({"x": npy((0, 2, 2)), "y": npy((0,))}, "not empty"),
    "one-label-for-two": ({"x": npy((2, 2, 2), body=bytes(8)), "y": LABEL}, "2 inputs but 1 labels"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_that_lie(name, tmp_path):
    entries, message = ARCHIVES[name]
    with pytest.raises(InputError, match=message):
        load_dataset(archive(tmp_path / "a.npz", **entries))


def test_a_zip_bomb_is_capped_before_it_is_unpacked(tmp_path):
    content = npy((1, 2000, 5000), body=bytes(10**7))
    path = archive(tmp_path / "a.npz", x=content, y=LABEL)
    assert path.stat().st_size < 50_000
    with pytest.raises(InputError, match=r"declares 10,000,\d+ bytes, the limit is 10,000,000"):
        load_dataset(path, max_bytes=10**7)
    assert len(load_dataset(path, max_bytes=len(content))) == 1
    # a directory that lies about the size: no more than that is unpacked
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", len(content)), struct.pack("<I", 1000)))
    with pytest.raises(InputError, match=r"cannot read a\.npz as \.npz"):
        load_dataset(path, max_bytes=10**7)


def explosive_png(width, height):
    """A PNG of a few bytes that declares a huge picture."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def picture(mode, size=(32, 32), kind="PNG", **options):
    image = pytest.importorskip("PIL.Image").new(mode, size, **options)
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


PICTURES = {
    "bomb": (lambda: explosive_png(8000, 8000), "8000×8000 pixels"),
    "largest-bomb": (lambda: explosive_png(60_000, 60_000), "pixels"),
    "no-body": (lambda: explosive_png(32, 32), "as PNG, JPEG"),
    "text": (lambda: b"hello", "as PNG, JPEG"),
    "empty": (lambda: b"", "as PNG, JPEG"),
    "truncated": (lambda: png(X[0])[:-200], "as PNG, JPEG"),
    "truncated-jpeg": (lambda: png(X[0], "JPEG")[:-200], "as PNG, JPEG"),
    "other-size": (lambda: png(X[0, :30]), None),
    "transparent": (lambda: picture("RGBA"), "without alpha"),
    "sixteen-bit": (lambda: picture("I;16"), "8-bit gray"),
    "gif": (lambda: picture("P", kind="GIF"), "as PNG, JPEG"),
    "color-among-gray": (lambda: png(X[0]), "is in color"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "as PNG, JPEG"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_harmful_pictures_are_named_and_not_decoded(name, tmp_path):
    pytest.importorskip("PIL")
    write_folder(tmp_path, X[..., :1] if name == "color-among-gray" else X, Y)
    make, message = PICTURES[name]
    (tmp_path / "test" / "bird" / "evil.png").write_bytes(make())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pillow warns of the bomb, too
        ds = load_dataset(tmp_path)
        named = rf"evil\.png .*{message}" if message else r"row \d+ is uint8 of shape \(3, 30, 32\).*size="
        with pytest.raises(InputError, match=named):
            ds.batch(range(len(ds)))


def test_size_resizes_and_crops_in_the_middle(tmp_path):
    pytest.importorskip("PIL")
    for name, shape in (("a", (8, 8)), ("b", (16, 32)), ("c", (24, 8))):
        (tmp_path / name).mkdir()
        image = np.zeros((*shape, 3), np.uint8)
        image[:, shape[1] // 2 :] = 255  # right half white
        (tmp_path / name / "0.png").write_bytes(png(image))
    with pytest.raises(InputError, match="size= resizes"):
        load_dataset(tmp_path).batch([0, 1, 2])
    x, _ = load_dataset(tmp_path, size=8).batch([0, 1, 2])
    assert x.shape == (3, 3, 8, 8)
    assert bool((x[..., :2] == 0).all())
    assert bool((x[..., -2:] == 1).all())
    assert load_dataset(tmp_path, size=(4, 6)).input_shape == (3, 4, 6)
    (tmp_path / "a" / "1.png").write_bytes(picture("L", color=51))  # gray among color
    assert bool((load_dataset(tmp_path, size=8).batch([1])[0] == 51 / 255).all())
    for size in (0, -3, 10**6, (1, 2, 3), 2.5):
        with pytest.raises(InputError, match="size must be"):
            load_dataset(tmp_path, size=size)


def test_the_labels_of_all_splits_agree(tmp_path):
    """A split without pictures, or even without a folder, of the first class keeps the numbers of the others."""
    pytest.importorskip("PIL")
    write_folder(tmp_path, X, Y)
    for split, name in (("train", "bird"), ("val", "cat")):
        (tmp_path / split / name).mkdir(parents=True)
        (tmp_path / split / name / "0.png").write_bytes(png(X[0]))
    (tmp_path / "val" / "aeroplane").mkdir()
    for split, label in (("train", 1), ("val", 2)):
        ds = load_dataset(tmp_path, split=split)
        assert (ds.labels.tolist(), ds.classes) == ([label], tuple(CLASSES))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"expected .parquet files, or class folders"):
        load_dataset(tmp_path / "empty")


@pytest.mark.parametrize("name", ["test_batch.bin", "t10k-images-idx3-ubyte", "test.parquet"])
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_what_never_ends_is_not_read(name, kind, tmp_path):
    """A link to an endless device was read past every limit; a pipe would be waited for."""
    if kind == "device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=r"not a regular file|expected .parquet files"):
        load_dataset(tmp_path)


def write_table(path, columns):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path)
    return path


def test_a_pickled_extension_type_is_not_unpickled(tmp_path):
    """Old pyarrow unpickled the metadata of this extension type (CVE-2023-47248)."""
    pa = pytest.importorskip("pyarrow")
    bomb = tmp_path / "exploded"
    marks = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Payload(bomb)),
    }
    fields = [pa.field("x", pa.list_(pa.float32()), metadata=marks), pa.field("y", pa.int64(), metadata=marks)]
    rows = pa.table([pa.array([[1.0], [2.0]], fields[0].type), pa.array([1, 2])], schema=pa.schema(fields))
    load_dataset(write_table(tmp_path / "a.parquet", rows)).fingerprint()
    assert not bomb.exists()


def test_missing_left_over_and_differing_shards_are_noticed(tmp_path):
    rows = table(X, Y)
    first, second = (tmp_path / f"test-0000{i}-of-00002.parquet" for i in (0, 1))
    write_table(first, rows)
    with pytest.raises(InputError, match="2 files belong together, there are 1"):
        load_dataset(tmp_path)
    assert len(load_dataset(first)) == N
    write_table(second, rows.rename_columns(["y", "pixels", "label"]))
    with pytest.raises(InputError, match="as one table"):
        load_dataset(tmp_path)
    write_table(second, rows)
    assert len(load_dataset(tmp_path)) == 2 * N


def _tables():
    pa = pytest.importorskip("pyarrow")
    good, nothing = png(X[0]), pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    image = pa.array([good] * 3, pa.binary())
    two = pa.list_(pa.float32())
    y, embedded = [0, 1, 2], "expected embedded pictures"
    return {
        "path-only": ({"image": pa.array([{"path": "/etc/passwd"}] * 3, nothing), "label": y}, embedded),
        "null-struct": ({"image": pa.array([{"bytes": good}, None, None], nothing), "label": y}, embedded),
        "null-label": ({"image": image, "label": [0, None, 2]}, "int64 with 1 gaps, expected integer labels"),
        "text-label": ({"image": image, "label": ["a", "b", "c"]}, "expected integer labels"),
        "minus-one": ({"image": image, "label": [0, 1, -1]}, "row 2 has label -1"),
        "no-label": ({"image": image, "other": y}, "has no labels"),
        "ragged": ({"x": pa.array([[1.0], [2.0], [3.0, 4.0]], two), "y": y}, "lists of numbers of equal length"),
        "gap": ({"x": pa.array([[1.0], [2.0], [None]], two), "y": y}, "row 2 holds NaN"),
        "null-list": ({"x": pa.array([[1.0], None, [2.0]], two), "y": y}, "without gaps"),
        "integers": ({"x": pa.array([[1], [2], [3]]), "y": y}, "expected uint8"),
        "no-bytes": ({"image": [{"bytes": 7, "path": "x"}] * 3, "label": y}, embedded),
        "one-name": (pa.table([pa.array([[1.0]])] * 2 + [pa.array([0])], names=["x", "x", "y"]), "columns x, x, y"),
        "empty": ({"x": pa.array([], two), "y": pa.array([], pa.int64())}, "holds no data"),
    }


def test_tables_that_make_no_sense(tmp_path):
    for columns, message in _tables().values():
        with pytest.raises(InputError, match=message):
            load_dataset(write_table(tmp_path / "a.parquet", columns)).batch([0, 1, 2])


def test_limits_and_columns_of_tables(tmp_path):
    path = write_table(tmp_path / "a.parquet", table(X, Y))
    with pytest.raises(InputError, match=r"declares .* the limit is 100"):
        load_dataset(path, max_bytes=100)
    assert set(load_dataset(path, columns=("image", "y")).labels) == {7}
    assert not load_dataset(path, columns=("image", ""), labelled=False).labelled
    for columns in (("image", "missing"), ("missing", "y")):
        with pytest.raises(InputError, match="name two of them"):
            load_dataset(path, columns=columns)
