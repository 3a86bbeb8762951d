"""Small PNG files without an image library: grey or RGB, 8 bits."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipoise.core.errors import InputError


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
