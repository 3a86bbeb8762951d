"""Files made to harm: code in pickles, lies about sizes, paths that lead out, pictures that explode."""

import io
import os
import pickle
import struct
import warnings
import zipfile
import zlib

import numpy as np
import pytest
from data_formats import CLASSES, Payload, labels, pixels, png, write_folder

from equipoise.core import InputError
from equipoise.data import load_dataset

X, Y = pixels(), labels()


def npy(shape, dtype="|u1", body=b"", version=(1, 0)):
    head = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H", len(head)) + head + body


def archive(path, **entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(f"{name}.npy", content)
    return path


# ---- code ---------------------------------------------------------------------------------------------------------


def _object_array(folder, bomb):
    np.savez(folder / "a.npz", x=np.array([Payload(bomb)], dtype=object), y=np.array([0]))
    return folder / "a.npz"


def _object_labels(folder, bomb):
    np.savez(folder / "a.npz", x=np.zeros((1, 2, 2), np.uint8), y=np.array([Payload(bomb)], dtype=object))
    return folder / "a.npz"


def _pickle_named_npz(folder, bomb):
    (folder / "a.npz").write_bytes(pickle.dumps(Payload(bomb)))
    return folder / "a.npz"


def _raw_pickle_entry(folder, bomb):
    return archive(folder / "a.npz", x=pickle.dumps(Payload(bomb)), y=npy((1,), body=b"\0"))


def _object_in_a_record(folder, bomb):
    body = pickle.dumps(Payload(bomb))
    return archive(folder / "a.npz", x=npy((1,), [("a", "|O")], body), y=npy((1,), body=b"\0"))


def _cifar_pickles(folder, bomb):
    for name in ("data_batch_1", "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(Payload(bomb)))
    return folder


def _plain_pickle(folder, bomb):
    (folder / "data.pkl").write_bytes(pickle.dumps(Payload(bomb)))
    return folder / "data.pkl"


def _torch_file(folder, bomb):
    (folder / "data.pt").write_bytes(pickle.dumps(Payload(bomb)))
    return folder / "data.pt"


CODE = [
    _object_array,
    _object_labels,
    _pickle_named_npz,
    _raw_pickle_entry,
    _object_in_a_record,
    _cifar_pickles,
    _plain_pickle,
    _torch_file,
]


@pytest.mark.parametrize("make", CODE, ids=lambda make: make.__name__.strip("_"))
@pytest.mark.filterwarnings("ignore:pickled")
def test_no_code_in_a_file_runs(make, tmp_path):
    bomb = tmp_path / "exploded"
    (tmp_path / "data").mkdir()
    spec = make(tmp_path / "data", bomb)
    assert pickle.loads(pickle.dumps(Payload(tmp_path / "control"))) is None
    assert (tmp_path / "control").is_dir()  # the payload works
    objects = make in (_object_array, _object_labels, _object_in_a_record)
    with pytest.raises(InputError, match=r"Python objects \(a pickle\), which are never loaded" if objects else None):
        load_dataset(spec).fingerprint()
    assert not bomb.exists()


# ---- sizes --------------------------------------------------------------------------------------------------------

LABEL = npy((1,), body=b"\0")
ARCHIVES = {
    "larger-than-memory": ({"x": npy((10**6, 10**6, 10**6)), "y": LABEL}, "the cap is"),
    "product-overflows": ({"x": npy((2**32, 2**32, 2**32)), "y": LABEL}, "the cap is"),
    "negative": ({"x": npy((-1, 2, 2), body=bytes(4)), "y": LABEL}, r"declares the shape \(-1, 2, 2\)"),
    "two-negatives": ({"x": npy((-1, -4, 1), body=bytes(4)), "y": LABEL}, "declares the shape"),
    "shorter-than-declared": ({"x": npy((1, 2, 2), body=b"\0"), "y": LABEL}, "is truncated, or longer"),
    "longer-than-declared": ({"x": npy((1, 2, 2), body=bytes(9)), "y": LABEL}, "is truncated, or longer"),
    "version": ({"x": npy((1, 2, 2), body=bytes(4), version=(9, 9)), "y": LABEL}, "not a readable array"),
    "not-numbers": ({"x": npy((1, 2, 2), "<U1", bytes(16)), "y": LABEL}, "expected uint8"),
    "empty-entry": ({"x": b"", "y": LABEL}, "not a readable array"),
    "bad-header": ({"x": npy("((((", body=bytes(4)), "y": LABEL}, "not a readable array"),
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
    path = archive(tmp_path / "a.npz", x=npy((1, 2000, 5000), body=bytes(10**7)), y=LABEL)
    assert path.stat().st_size < 50_000
    with pytest.raises(InputError, match=r"declares 10,000,000 bytes, the cap is 9,999,999"):
        load_dataset(path, max_bytes=10**7 - 1)
    assert len(load_dataset(path, max_bytes=10**7)) == 1


# ---- pictures -----------------------------------------------------------------------------------------------------


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
    "larger-bomb": (lambda: explosive_png(12_000, 12_000), "pixels"),
    "largest-bomb": (lambda: explosive_png(60_000, 60_000), "pixels"),
    "no-body": (lambda: explosive_png(32, 32), "cannot be decoded"),
    "text": (lambda: b"hello", "cannot be decoded"),
    "empty": (lambda: b"", "cannot be decoded"),
    "truncated": (lambda: png(X[0])[:-200], "cannot be decoded"),
    "truncated-jpeg": (lambda: png(X[0], "JPEG")[:-200], "cannot be decoded"),
    "other-size": (lambda: png(X[0, :30]), r"shape \(3, 30, 32\).*say size="),
    "transparent": (lambda: picture("RGBA"), "transparent"),
    "sixteen-bit": (lambda: picture("I;16"), "16 bit"),
    "gif": (lambda: picture("P", kind="GIF"), "cannot be decoded"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be decoded"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_harmful_pictures_are_named_and_not_decoded(name, tmp_path):
    pytest.importorskip("PIL")
    write_folder(tmp_path, X, Y)
    make, message = PICTURES[name]
    (tmp_path / "test" / "bird" / "evil.png").write_bytes(make())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pillow warns of the bomb, too
        ds = load_dataset(tmp_path)
        with pytest.raises(InputError, match=rf"evil\.png .*{message}"):
            ds.batch(range(len(ds)))


def test_kinds_of_pictures_that_fit_are_converted(tmp_path):
    pytest.importorskip("PIL")
    write_folder(tmp_path, X, Y)
    place = tmp_path / "test" / "aeroplane"
    (place / "zz1.png").write_bytes(picture("L", color=51))
    (place / "zz2.png").write_bytes(picture("RGBA", color=(51, 51, 51, 255)))
    (place / "zz3.png").write_bytes(picture("P", color=0))
    ds = load_dataset(tmp_path)
    grey, opaque, palette = ds.batch([4, 5, 6])[0]
    assert grey.shape == (3, 32, 32)
    assert bool((grey == 51 / 255).all())
    assert bool((opaque == 51 / 255).all())
    assert bool((palette == 0).all())


def test_colour_among_grey_is_refused(tmp_path):
    pytest.importorskip("PIL")
    write_folder(tmp_path, X[..., :1], Y)
    (tmp_path / "test" / "cat" / "zz.png").write_bytes(png(X[0]))
    ds = load_dataset(tmp_path)
    with pytest.raises(InputError, match=r"zz\.png is in colour"):
        ds.batch([len(ds) - 1])


def test_size_resizes_and_crops_in_the_middle(tmp_path):
    pytest.importorskip("PIL")
    for name, shape in (("a", (8, 8)), ("b", (16, 32)), ("c", (24, 8))):
        (tmp_path / name).mkdir()
        image = np.zeros((*shape, 3), np.uint8)
        image[:, shape[1] // 2 :] = 255  # right half white
        (tmp_path / name / "0.png").write_bytes(png(image))
    with pytest.raises(InputError, match="say size="):
        load_dataset(tmp_path).batch([0, 1, 2])
    x, _ = load_dataset(tmp_path, size=8).batch([0, 1, 2])
    assert x.shape == (3, 3, 8, 8)
    assert bool((x[..., :2] == 0).all())
    assert bool((x[..., -2:] == 1).all())
    assert load_dataset(tmp_path, size=(4, 6)).input_shape == (3, 4, 6)
    for size in (0, -3, 10**6, (1, 2, 3), 2.5):
        with pytest.raises(InputError, match="size must be"):
            load_dataset(tmp_path, size=size)


def test_folders_that_would_give_wrong_labels_are_refused(tmp_path):
    pytest.importorskip("PIL")
    write_folder(tmp_path, X, Y)
    for name in CLASSES[1:]:  # without the first class, every label of this split would be off by one
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "0.png").write_bytes(png(X[0]))
    with pytest.raises(InputError, match="differ in the class 'aeroplane'"):
        load_dataset(tmp_path, split="train")
    (tmp_path / "train" / "aeroplane").mkdir()
    with pytest.raises(InputError, match="class 'aeroplane' has no pictures"):
        load_dataset(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="folder of no known kind"):
        load_dataset(tmp_path / "empty")


@pytest.mark.parametrize("name", ["test_batch.bin", "t10k-images-idx3-ubyte", "test.parquet"])
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_what_never_ends_is_not_read(name, kind, tmp_path):
    """A link to an endless device was read past every limit; a pipe would be waited for."""
    if kind == "device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=r"not a regular file|of no known kind"):
        load_dataset(tmp_path)


def test_labels_beyond_64_bits_are_refused(tmp_path):
    """The largest uint64 is −1 as int64."""
    y = np.array([0, 2**64 - 1], dtype=np.uint64)
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 4), np.float32), y=y)
    with pytest.raises(InputError, match="row 1 has label 18446744073709551615"):
        load_dataset(tmp_path / "a.npz")

    class Map:
        targets = y

        def __len__(self):
            return 2

        def __getitem__(self, i):
            return np.zeros(4, np.float32), y[i]

    from equipoise.data import as_dataset

    with pytest.raises(InputError, match="row 1 has label"):
        as_dataset(Map(), "map")


@pytest.mark.parametrize(
    "spec", ["sys:exit", "os:abort.__class__", "os:_exit", "math:pi", "builtins:print", "nowhere:x"]
)
def test_a_factory_that_is_none_is_one_sentence(spec):
    with pytest.raises(InputError) as caught:
        load_dataset(spec)
    assert "\n" not in str(caught.value)
