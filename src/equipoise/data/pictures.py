"""Pictures (PNG, JPEG, …) to bytes, through pillow: grey or colour, one size, and no surprises."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.core.errors import InputError, one_line
from equipoise.data.reading import optional

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
