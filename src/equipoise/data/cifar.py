"""CIFAR-10 and CIFAR-100, binary version: records of label byte(s) and 3·32·32 colour bytes, channel by channel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise.core import InputError
from equipoise.core.files import read_bounded
from equipoise.data.dataset import Dataset
from equipoise.data.reading import choose_split
from equipoise.data.sources import MAX_BYTES, array_source

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
