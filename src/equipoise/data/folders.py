"""Folders of pictures: `root/class/picture.png` or `root/split/class/picture.png`, or just pictures without labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core import InputError
from equipoise.data.dataset import Dataset
from equipoise.data.pictures import SUFFIXES, Pictures, as_size, stack
from equipoise.data.reading import choose_split, name_of
from equipoise.data.sources import Ints


@dataclass(frozen=True, eq=False)
class PictureSource:
    """Picture files of one shape."""

    files: tuple[Path, ...] = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    shape: tuple[int, ...]
    pictures: Pictures
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.uint8))
    scale: float = 255.0

    def __len__(self) -> int:
        return len(self.files)

    def read(self, rows: Ints) -> NDArray[Any]:
        """The pictures of these rows, decoded."""
        names = [self.names[row] for row in rows]
        found = [self.pictures.decode(self.files[row], name) for row, name in zip(rows, names, strict=True)]
        return stack(found, self.shape, names)


def load_folder(
    root: Path, split: str | None = None, *, num_classes: int | None = None, size: int | tuple[int, int] | None = None
) -> Dataset:
    """Pictures by class, labels in the order of the sorted class names, files sorted within a class.

    All pictures have one size, unless `size` is given: then each is resized to cover it and cropped in the middle.
    Pictures that lie in the folder itself, with no folder beside them, have no labels.
    """
    loose = [] if any(child.is_dir() and child.name[0] not in "._" for child in root.iterdir()) else _pictures(root)
    parts = {"all": {"": loose}} if loose else _splits(root)
    chosen = choose_split(split, list(parts), str(root))
    classes = None if loose else sorted(parts[chosen])
    files = [path for name in sorted(parts[chosen]) for path in parts[chosen][name]]
    labels = [label for label, name in enumerate(classes or []) for _ in parts[chosen][name]]
    names = tuple(str(path.relative_to(root)) for path in files)
    rules = Pictures(size=as_size(size))
    first = rules.decode(files[0], names[0])
    source = PictureSource(tuple(files), names, first.shape, rules.like(first))
    known = None if loose else np.array(labels)
    return Dataset.from_source(source, known, name=name_of(root), num_classes=num_classes, classes=classes)


def _splits(root: Path) -> dict[str, dict[str, list[Path]]]:
    """Split → class → files. A folder with pictures in it is a class; one with such folders in it is a split."""
    children = {child.name: child for child in sorted(root.iterdir()) if child.is_dir() and child.name[0] not in "._"}
    direct = {name: _pictures(child) for name, child in children.items()}
    if any(direct.values()):
        empty = [name for name, files in direct.items() if not files]
        if empty:
            raise InputError(f"{root}: the class {empty[0]!r} has no pictures ({', '.join(SUFFIXES)}) in it")
        return {"all": direct}
    parts = {name: _classes(child) for name, child in children.items()}
    parts = {name: classes for name, classes in parts.items() if classes}
    if not parts:
        raise InputError(
            f"{root} is a folder of no known kind: expected IDX files, CIFAR .bin files, .parquet files, a saved Hugging "
            f"Face dataset, or pictures in class folders ({', '.join(SUFFIXES)})"
        )
    wanted, *others = parts
    for other in others:
        differing = sorted(set(parts[wanted]) ^ set(parts[other]))
        if differing:
            raise InputError(
                f"{root}: the splits {wanted!r} and {other!r} differ in the class {differing[0]!r}, so that labels "
                "would not agree; give every split a folder of every class"
            )
    return parts


def _classes(folder: Path) -> dict[str, list[Path]]:
    found = {c.name: _pictures(c) for c in sorted(folder.iterdir()) if c.is_dir() and c.name[0] not in "._"}
    if any(found.values()) and not all(found.values()):
        empty = next(name for name, files in found.items() if not files)
        raise InputError(f"{folder}: the class {empty!r} has no pictures ({', '.join(SUFFIXES)}) in it")
    return found if any(found.values()) else {}


def _pictures(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.name[0] != "." and p.is_file())
