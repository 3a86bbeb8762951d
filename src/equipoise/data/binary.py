"""Binary formats of a fixed layout: CIFAR-10 and CIFAR-100 (records of label and colour bytes), and IDX, that of MNIST."""

import math
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise.core import InputError
from equipoise.core.errors import one_line
from equipoise.core.files import read_bounded
from equipoise.data.dataset import Dataset
from equipoise.data.reading import DAMAGED, choose_split, name_of, open_plain_or_gzip, read_exactly
from equipoise.data.sources import MAX_BYTES, Layout, array_source, largest_label

_PIXELS = 3 * 32 * 32
_PICKLES = ("data_batch_1", "test_batch", "batches.meta")


class Variant(NamedTuple):
    """How one of the two is stored; the label is the last of the label bytes (CIFAR-100: coarse, fine)."""

    name: str
    train: str
    test: str
    label_bytes: int
    num_classes: int
    names: str


VARIANTS = [
    Variant("cifar10", r"data_batch_(\d+)\.bin", r"test_batch\.bin", 1, 10, "batches.meta.txt"),
    Variant("cifar100", r"train()\.bin", r"test\.bin", 2, 100, "fine_label_names.txt"),
]


def find_cifar(folder: Path) -> tuple[Variant, dict[str, list[Path]]] | None:
    """The variant in a folder and its files by split, or None; the pickled version is refused."""
    names = sorted(path.name for path in folder.iterdir())
    for variant in VARIANTS:
        train = [(int(m[1] or 0), name) for name in names if (m := re.fullmatch(variant.train, name))]
        files = {"train": [folder / name for _, name in sorted(train)]}
        files["test"] = [folder / name for name in names if re.fullmatch(variant.test, name)]
        files = {split: paths for split, paths in files.items() if paths}
        if files:
            return variant, files
    if any(name in _PICKLES for name in names):
        raise InputError(
            f"{folder} holds CIFAR as Python pickles, which are never loaded: get the binary version (.bin)"
        )
    return None


def load_cifar(
    folder: Path, split: str | None = None, *, num_classes: int | None = None, max_bytes: int = MAX_BYTES
) -> Dataset:
    """CIFAR-10 (`data_batch_*.bin`, `test_batch.bin`) or CIFAR-100 (`train.bin`, `test.bin`, fine labels) in a folder."""
    found = find_cifar(folder)
    if found is None:
        raise InputError(f"{folder} holds no data_batch_*.bin, test_batch.bin, train.bin or test.bin")
    variant, files = found
    chosen = files[choose_split(split, list(files), str(folder))]
    total = sum(path.stat().st_size for path in chosen)
    if total > max_bytes:
        raise InputError(f"{folder} holds {total:,} bytes, the cap is {max_bytes:,} (max_bytes=)")
    records = np.concatenate([_records(path, variant, max_bytes) for path in chosen])
    labels = records[:, variant.label_bytes - 1]
    pixels = records[:, variant.label_bytes :].reshape(-1, 3, 32, 32)
    classes = _class_names(folder / variant.names, variant.num_classes)
    return Dataset.from_source(
        array_source(pixels, variant.name, "NCHW"),
        labels,
        name=variant.name,
        num_classes=variant.num_classes if num_classes is None else num_classes,
        classes=classes,
    )


def _records(path: Path, variant: Variant, max_bytes: int) -> NDArray[Any]:
    body = read_bounded(path, max_bytes)
    record = variant.label_bytes + _PIXELS
    if not body or len(body) % record:
        raise InputError(f"{path.name} has {len(body):,} bytes, expected a positive multiple of {record:,}")
    return np.frombuffer(body, np.uint8).reshape(-1, record)


def _class_names(path: Path, count: int) -> tuple[str, ...] | None:
    if not path.is_file():
        return None
    text = read_bounded(path).decode("utf-8", errors="replace")
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    return names if len(names) == count else None


_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IMAGES = re.compile(r"^(?P<family>.*?)(?P<part>train|t10k|test)(?P<kind>-images[-.]idx)[234]-ubyte(\.gz)?$")


def read_idx(path: Path, max_bytes: int = MAX_BYTES) -> NDArray[Any]:
    """The array of an IDX file: bytes 0, 0, type, number of axes; a uint32 per axis; the numbers, and nothing more."""
    where = path.name
    try:
        with open_plain_or_gzip(path) as file:
            zero, code, axes = struct.unpack(">HBB", read_exactly(file, 4, where, last=False))
            if zero != 0 or code not in _TYPES or not 1 <= axes <= 4:
                raise InputError(f"{where} is not an IDX file: it starts with {zero:04x}{code:02x}{axes:02x}")
            shape = struct.unpack(f">{axes}I", read_exactly(file, 4 * axes, where, last=False))
            dtype = np.dtype(_TYPES[code])
            size = math.prod(shape) * dtype.itemsize
            if size > max_bytes:
                raise InputError(
                    f"{where} declares shape {shape}, {size:,} bytes; the cap is {max_bytes:,} (max_bytes=)"
                )
            body = read_exactly(file, size, where)
    except DAMAGED as error:
        raise InputError(f"{where} is damaged: {one_line(error)}") from error
    return np.frombuffer(body, dtype).reshape(shape)


def find_idx(folder: Path) -> dict[str, Path]:
    """Split → file of images (uncompressed first) among the files of a folder; `t10k` is the split "test"."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _IMAGES.match(path.name)
        if match is None:
            continue
        split = "train" if match["part"] == "train" else "test"
        if split in found and found[split].name != path.name.removesuffix(".gz"):
            raise InputError(f"{folder} holds {found[split].name} and {path.name}: name the file itself")
        found.setdefault(split, path)
    return found


def is_idx(path: Path) -> bool:
    """Whether a file is named as IDX images are."""
    return _IMAGES.match(path.name) is not None


def load_idx(
    path: Path,
    split: str | None = None,
    *,
    num_classes: int | None = None,
    layout: Layout = "auto",
    max_bytes: int = MAX_BYTES,
) -> Dataset:
    """Images and labels of the MNIST family: `path` is the folder, or the file of images beside its labels."""
    if path.is_dir():
        files = find_idx(path)
    else:
        match = _IMAGES.match(path.name)
        if match is None:
            raise InputError(f"{path.name} is not named like IDX images, e.g. t10k-images-idx3-ubyte.gz")
        files = {"train" if match["part"] == "train" else "test": path}
    name = name_of(path)
    images = files[choose_split(split, list(files), name)]
    pixels = read_idx(images, max_bytes)
    beside = _labels_of(images)
    if beside is None:
        raise InputError(
            f"the labels of {images.name} are missing: expected them beside it, with labels-idx1 in the name"
        )
    labels = read_idx(beside, max_bytes)
    if num_classes is None:  # a part may lack the last class
        others = [_labels_of(other) for other in files.values() if other != images]
        num_classes = largest_label([labels, *(read_idx(other, max_bytes) for other in others if other is not None)])
    return Dataset.from_source(array_source(pixels, images.name, layout), labels, name=name, num_classes=num_classes)


def _labels_of(images: Path) -> Path | None:
    stem = re.sub(r"-images([-.])idx[234]-ubyte(\.gz)?$", r"-labels\1idx1-ubyte", images.name)
    candidates = (images.with_name(stem), images.with_name(stem + ".gz"))
    return next((path for path in candidates if path.is_file()), None)
