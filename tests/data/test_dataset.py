"""The dataset itself: values, fingerprints, refusals, and how a spec is understood."""

import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from equipoise.core import InputError
from equipoise.data import Dataset, as_dataset, load_dataset

Y = np.array([0, 1, 2, 1])


def floats(shape=(4, 3, 5, 5), dtype=np.float32):
    return np.random.default_rng(0).random(shape).astype(dtype)


def test_digits_are_scikit_learns_split_once():
    sklearn = pytest.importorskip("sklearn.datasets")
    train, test = load_dataset("digits", split="train"), load_dataset("digits#test")
    assert (len(train), len(test), train.num_classes, train.input_shape) == (1437, 360, 10, (1, 8, 8))
    assert np.bincount(test.labels).min() >= 35  # stratified
    assert np.bincount(test.labels).max() <= 37
    whole = sklearn.load_digits()
    wanted = sorted((label, image.tobytes()) for image, label in zip(whole.images / 16, whole.target, strict=True))
    found = []
    for ds in (train, test):
        x, y = ds.batch(range(len(ds)))
        images = x[:, 0].double().numpy()  # sixteenths are exact
        found += [(int(label), image.tobytes()) for image, label in zip(images, y, strict=True)]
    assert sorted(found) == wanted


LAYOUTS = [
    ((4, 6, 5, 3), np.uint8, "auto", (3, 6, 5)),
    ((4, 3, 6, 5), np.float32, "auto", (3, 6, 5)),
    ((4, 3, 6, 5), np.uint8, "NCHW", (3, 6, 5)),
    ((4, 6, 5, 3), np.float32, "NHWC", (3, 6, 5)),
    ((4, 6, 5), np.uint8, "auto", (1, 6, 5)),
    ((4, 6, 5), np.float32, "auto", (6, 5)),  # a time series
    ((4, 6, 5, 3), np.float32, "as-is", (6, 5, 3)),
    ((4, 2, 3, 4, 5), np.float32, "auto", (2, 3, 4, 5)),
    ((4, 9), np.float32, "auto", (9,)),
    ((4, 3, 6, 5), np.uint8, "auto", None),
    ((4, 6, 5, 3), np.float32, "auto", None),
    ((4, 6, 5, 3), np.uint8, "CHWN", None),
]


@pytest.mark.parametrize(("shape", "dtype", "layout", "wanted"), LAYOUTS)
def test_layout_rule(shape, dtype, layout, wanted):
    x = (floats(shape) * 255).astype(dtype)
    if wanted is None:
        with pytest.raises(InputError, match="layout"):
            Dataset.from_arrays(x, Y, layout=layout)
        return
    ds = Dataset.from_arrays(x, Y, layout=layout)
    assert ds.input_shape == wanted
    moved = len(shape) == len(wanted) + 1 and wanted != shape[1:]
    scale = 255 if dtype == np.uint8 else 1
    first = torch.from_numpy(np.moveaxis(x, -1, 1) if moved else x)[2].float().reshape(wanted) / scale
    assert torch.equal(ds[2][0], first)


BAD = {
    "negative-label": (floats(), np.array([0, 1, -1, 0]), "row 2 has label -1, expected 0 or more"),
    "float-labels": (floats(), Y.astype(float), "one integer per row"),
    "one-hot": (floats(), np.eye(4, dtype=int), "one integer per row"),
    "too-few-labels": (floats(), Y[:3], "4 inputs but 3 labels"),
    "empty": (floats((0, 3, 5, 5)), Y[:0], "not empty"),
    "int64": (np.zeros((4, 5, 5), int), Y, "uint8"),
    "objects": (np.array([[None], [1], [2], [3]]), Y, "not an array of numbers"),
    "ragged": ([[1.0], [1.0, 2.0]], [0, 1], "not an array of numbers"),
    "not-a-number": (floats() * np.nan, Y, "row 0 holds NaN, infinity or a number too large for float32"),
    "too-large": (floats(dtype=np.float64) * 1e39, Y, "too large for float32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arrays_are_refused(name):
    x, y, message = BAD[name]
    with pytest.raises(InputError, match=re.escape(message)):
        Dataset.from_arrays(x, y)


def test_a_fingerprint_is_the_content():
    """Type, scale and labels count, the byte order and the container do not; the caller's arrays are copied."""
    x, y = floats(), Y.copy()
    ds = Dataset.from_arrays(x, y)
    same, before = ds.fingerprint(), ds.batch(range(4))[0].clone()
    for equal in (x.astype(">f4"), torch.from_numpy(x)):
        assert Dataset.from_arrays(equal, torch.from_numpy(Y)).fingerprint() == same
    for other in (
        Dataset.from_arrays(x.astype(np.float64), Y), Dataset.from_arrays(x, Y, scale=2.0),
        Dataset.from_arrays(x, Y[::-1].copy()), Dataset.from_arrays(x.reshape(4, 5, 3, 5), Y, layout="NCHW"),
    ):  # fmt: skip
        assert other.fingerprint() != same
    x[:], y[:] = 0, 0
    ds.batch(range(4))[0].zero_()
    assert torch.equal(ds.batch(range(4))[0], before)
    assert ds.labels.tolist() == [0, 1, 2, 1]


def test_it_is_a_map_style_dataset_of_torch():
    ds = Dataset.from_arrays(floats(), Y)
    with pytest.raises(IndexError):
        ds[4]
    x, y = next(iter(DataLoader(ds, batch_size=4)))
    assert torch.equal(x, ds.batch(range(4))[0])
    assert y.tolist() == Y.tolist()
    again = as_dataset(TensorDataset(torch.from_numpy(floats()), torch.from_numpy(Y)), "tensors")
    assert again.fingerprint() == ds.fingerprint()


#: a name or more arguments of `load_dataset`, and what is said
WRONG = [
    ({"spec": "nowhere.npz"}, "there is no 'nowhere.npz'"),
    ({"spec": ""}, "there is no ''"),
    ({"spec": "no_such_module:make"}, "No module named"),
    ({"spec": "math:no_such_name"}, "has no 'no_such_name'"),
    ({"spec": "math:pi"}, "is a float"),
    ({"spec": "math:factorial"}, "failed with TypeError"),
    ({"spec": "sys:exit"}, "failed with SystemExit"),
    ({"spec": "digits#validation"}, "no split 'validation': choose one of train, test"),
    ({"spec": "digits", "size": 4}, "size= has no meaning"),
    ({"spec": "digits", "columns": ("a", "b")}, "columns= has no meaning"),
    ({"spec": "a#test.npz"}, "no split 'test': choose one of train, val"),
    ({"spec": "a#test.npz#val", "split": "train"}, "'val', but split='train' was given"),
    *[({"spec": spec}, "") for spec in ("a" * 5000, "a\0b.npz", "é:x", "a:b:c", "#test", "~", "\n")],
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=str)
def test_names_and_splits(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("a#test.npz", x_train=floats(), y_train=Y, x_val=floats()[:2], y_val=Y[:2])
    assert (len(load_dataset("a#test.npz#val")), len(load_dataset("a#test.npz", split="train"))) == (2, 4)
    assert load_dataset("a#test.npz#val").num_classes == 3  # the classes of all splits
    with pytest.raises(InputError, match=re.escape(said) or None):
        load_dataset(**arguments)


def items(*rows):
    return type("Items", (), {"__len__": lambda _: len(rows), "__getitem__": lambda _, index: rows[index]})()


class Augmented:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.random.default_rng().random((3, 5, 5)), 0


MAPS = {
    "augmented": (Augmented(), "another input each time"),
    "shapes": (items((floats()[0], 0), (floats()[1, :, :4], 0)), "row 1 is float32 of shape"),
    "nan": (items((floats()[0], 0), (floats()[1] * np.nan, 0)), "row 1 holds NaN"),
    "no pair": (items(floats()[0]), "row 0 is not a pair"),
    "half a label": (items((floats()[0], 0.5)), "one integer per row"),
    "a label beyond int64": (items((floats()[0], np.uint64(2**64 - 1))), "row 0 has label 18446744073709551615"),
    "nothing": (items(), "holds no data"),
    "a generator": ((i for i in range(3)), "is a generator"),
}


@pytest.mark.parametrize("name", MAPS)
def test_map_style_datasets_that_make_no_sense_are_refused(name):
    data, said = MAPS[name]
    with pytest.raises(InputError, match=said):
        as_dataset(data, "items").fingerprint()


def test_rows_may_be_dictionaries():
    rows = [{"idx": i, "image": x, "label": int(y)} for i, (x, y) in enumerate(zip(floats(), Y, strict=True))]
    assert as_dataset(rows, "rows").fingerprint() == as_dataset((floats(), Y), "pair").fingerprint()
    assert as_dataset({"x": floats(), "y": Y}, "columns").labels.tolist() == Y.tolist()
    odd = [{"picture": r["image"], "kind": r["label"]} for r in rows]
    assert as_dataset(odd, "odd", columns=("picture", "kind")).labels.tolist() == Y.tolist()
    with pytest.raises(InputError, match=r"has the columns picture, kind: name two of them, columns=\(image, label\)"):
        as_dataset(odd, "odd")


def test_inputs_alone_have_no_labels(tmp_path):
    alone = as_dataset(torch.from_numpy(floats()), "alone")
    assert (alone.labelled, alone.num_classes, alone.labels.tolist()) == (False, 0, [-1] * 4)
    assert "no labels" in repr(alone)
    np.savez(tmp_path / "x.npz", x=floats())
    assert not load_dataset(tmp_path / "x.npz", labelled=False).labelled
    with pytest.raises(InputError, match="no labels"):
        load_dataset(tmp_path / "x.npz")
