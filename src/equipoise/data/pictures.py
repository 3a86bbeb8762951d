"""Pictures (PNG, JPEG, …) to bytes through pillow, and folders of them: `root/class/…`, `root/split/class/…`, or no labels."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core import InputError
from equipoise.core.errors import one_line
from equipoise.data.dataset import Dataset
from equipoise.data.reading import choose_split, name_of, optional
from equipoise.data.sources import Ints

#: only these readers of pillow are used
FORMATS = ("PNG", "JPEG", "BMP", "PPM", "WEBP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".webp")
#: a picture that declares more pixels is not decoded
MAX_PIXELS = 50_000_000
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, struct.error, zlib.error, OverflowError)


@dataclass(frozen=True)
class Pictures:
    """How pictures become arrays: `channels` 1 or 3 (None: as they are), `size` (height, width) to resize and crop to."""

    channels: int | None = None
    size: tuple[int, int] | None = None

    def like(self, first: NDArray[Any]) -> Pictures:
        """These rules, with the channels of the first picture: grey joins colour without loss, not the other way."""
        return replace(self, channels=int(first.shape[0]))

    def decode(self, data: bytes | Path, where: str) -> NDArray[np.uint8]:
        """One picture as (C, H, W) bytes; a rotation noted in EXIF is not applied."""
        pil = optional("PIL.Image", "pillow", "reading pictures")
        file = data if isinstance(data, Path) else io.BytesIO(data)
        try:
            with pil.open(file, formats=FORMATS) as picture:
                width, height = picture.size
                if width * height > MAX_PIXELS:
                    raise InputError(f"{where} declares {width}×{height} pixels, more than {MAX_PIXELS:,}: not decoded")
                picture.load()
                return self._to_array(picture, where)
        except InputError:
            raise
        except (pil.DecompressionBombError, pil.DecompressionBombWarning) as error:
            raise InputError(f"{where} declares too many pixels: not decoded") from error
        except _BROKEN as error:
            what = "no picture in " + ", ".join(FORMATS) if isinstance(error, pil_unidentified()) else one_line(error)
            raise InputError(f"{where} cannot be decoded: {what}") from error

    def _to_array(self, picture: Any, where: str) -> NDArray[np.uint8]:
        mode = picture.mode
        if mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
            picture = picture.convert("LA" if mode in ("L", "LA") else "RGBA")
            if picture.getchannel("A").getextrema() != (255, 255):
                raise InputError(f"{where} is partly transparent: put it on a background first")
            picture = picture.convert("L" if picture.mode == "LA" else "RGB")
        elif mode == "1":
            picture = picture.convert("L")
        elif mode in ("P", "CMYK", "YCbCr", "HSV", "LAB", "RGBX"):
            picture = picture.convert("RGB")
        if picture.mode not in ("L", "RGB"):
            raise InputError(f"{where} has the mode {mode} (16 bit or floats?), expected 8-bit grey or colour")
        if self.channels == 3 and picture.mode == "L":
            picture = picture.convert("RGB")
        if self.channels == 1 and picture.mode == "RGB":
            raise InputError(f"{where} is in colour, but the first picture is grey: convert them all to one of the two")
        if self.size is not None:
            ops = optional("PIL.ImageOps", "pillow", "reading pictures")
            bilinear = optional("PIL.Image", "pillow", "reading pictures").Resampling.BILINEAR
            picture = ops.fit(picture, (self.size[1], self.size[0]), method=bilinear, centering=(0.5, 0.5))
        pixels = np.asarray(picture, dtype=np.uint8)
        return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def pil_unidentified() -> type[Exception]:
    """What pillow raises for bytes that are no picture."""
    found: type[Exception] = optional("PIL", "pillow", "reading pictures").UnidentifiedImageError
    return found


def as_size(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """(height, width) from one number or two."""
    if size is None:
        return None
    pair = size if isinstance(size, tuple) else (size, size)
    if len(pair) != 2 or not all(isinstance(s, int) and 1 <= s <= 4096 for s in pair):
        raise InputError(f"size must be one or two whole numbers between 1 and 4096, got {size!r}")
    return pair


def stack(pictures: list[NDArray[np.uint8]], shape: tuple[int, ...], names: list[str]) -> NDArray[np.uint8]:
    """Pictures of one shape as a batch; the first of another shape is named."""
    for picture, name in zip(pictures, names, strict=True):
        if picture.shape != shape:
            raise InputError(
                f"{name} has shape {picture.shape}, the first picture {shape}: say size= to resize and crop them all"
            )
    return np.stack(pictures)


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
