"""Pictures of inputs with the closest adversarial example found, kept in a run's folder as `gallery.json`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from equipoise.core.files import describing, read_json, write_whole
from equipoise.report.data import Picture

NAME = "gallery.json"
#: pictures one report shows at most, and the largest of them in characters
LIMIT = 36
LARGEST = 100_000
_PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}\Z")


def save_gallery(pictures: Iterable[Picture], folder: str | Path) -> None:
    """Write `gallery.json`, whole or not at all."""
    plain = [asdict(p) for p in pictures]
    write_whole(Path(folder) / NAME, json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")


def load_gallery(folder: str | Path) -> tuple[Picture, ...]:
    """Read `gallery.json`; only PNG data addresses are accepted as images."""
    path = Path(folder) / NAME
    with describing(path):
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
