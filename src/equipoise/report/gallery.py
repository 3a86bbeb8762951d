"""Pictures of inputs with the closest adversarial example found, in a run's folder as `gallery.json`; PNG files by hand."""

import base64
import json
import math
import re
import struct
import zlib
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core.errors import InputError
from equipoise.core.files import as_input_error, atomic_write, read_json
from equipoise.report.data import Picture


def png(image: ArrayLike) -> bytes:
    """An image (H, W), (1, H, W) or (3, H, W) with values in [0, 1], clipped, as a PNG file.

    >>> png([[0.0, 1.0]])[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    pixels = np.asarray(image, dtype=np.float64)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3):
        pixels = np.moveaxis(pixels, 0, -1)
    elif pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or pixels.shape[-1] not in (1, 3) or pixels.size == 0:
        raise InputError(f"expected an image (H, W), (1, H, W) or (3, H, W), got shape {np.shape(image)}")
    levels = np.nan_to_num(pixels.clip(0, 1) * 255).round().astype(np.uint8)
    height, width, channels = levels.shape
    rows: NDArray[np.uint8] = np.concatenate([np.zeros((height, 1), np.uint8), levels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    body = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def data_uri(image: ArrayLike) -> str:
    """The PNG as a `data:` address for an `<img>`."""
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


NAME = "gallery.json"
#: pictures one report shows at most, and the largest of them in characters
LIMIT = 36
LARGEST = 100_000
_PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}\Z")


def save_gallery(pictures: Iterable[Picture], folder: str | Path) -> None:
    """Write `gallery.json`, whole or not at all."""
    plain = [asdict(p) for p in pictures]
    atomic_write(Path(folder) / NAME, json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")


def load_gallery(folder: str | Path) -> tuple[Picture, ...]:
    """Read `gallery.json`; only PNG data addresses are accepted as images."""
    path = Path(folder) / NAME
    with as_input_error(path):
        names = {f.name for f in fields(Picture)}
        found = tuple(_checked(Picture(**{k: v for k, v in p.items() if k in names})) for p in _list(path))
    return found


def _list(path: Path) -> list[dict[str, Any]]:
    plain = read_json(path, 10**9)
    if not isinstance(plain, list):
        raise TypeError("expected a list of pictures")
    return plain


def _checked(picture: Picture) -> Picture:
    for uri in (picture.image, picture.adversarial):
        if uri is not None and (len(uri) > LARGEST or not _PNG.match(uri)):
            raise ValueError(f"the image of input {picture.id} is not a small PNG")
    for number in (picture.radius, picture.distance):
        if number is not None and not (math.isfinite(number) and number >= 0):
            raise ValueError(f"input {picture.id} has a radius or distance that is no number")
    return picture
