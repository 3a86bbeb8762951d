"""The data that options name: its layout, size, columns and class names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core.errors import InputError
from equipoise.core.files import parse_json, read_bounded

if TYPE_CHECKING:
    from equipoise.data import Dataset

_LARGEST = 10_000_000


def read_data(
    data: str, split: str | None, *, layout: str | None = None, size: str | None = None, columns: str | None = None,
    classes: Path | None = None, labelled: bool = True,
) -> Dataset:  # fmt: skip
    """The dataset that the options name."""
    from equipoise.data import load_dataset

    given: dict[str, Any] = {}
    if layout is not None:
        if layout.upper() not in ("NHWC", "NCHW"):
            raise InputError(f"--layout is NHWC or NCHW, got {layout!r}")
        given["layout"] = layout.upper()
    if size is not None:
        given["size"] = parse_size(size)
    if columns is not None:
        given["columns"] = parse_columns(columns)
    found = load_dataset(data, split, labelled=labelled, **given)
    return found if classes is None else found.with_classes(read_classes(classes))


def parse_size(text: str) -> tuple[int, int]:
    """(height, width) from `32`, `32,48` or `32x48`.

    >>> parse_size("32"), parse_size("32x48")
    ((32, 32), (32, 48))
    """
    match = re.fullmatch(r"(\d{1,5})(?:[,x](\d{1,5}))?", text)
    if match is None:
        raise InputError(f"--size takes one or two whole numbers such as 32 or 32,48, got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def parse_columns(text: str) -> tuple[str, str]:
    """The two names in `image,label`.

    >>> parse_columns("img, fine_label")
    ('img', 'fine_label')
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(parts):
        raise InputError(f"--columns takes two names such as image,label, got {text!r}")
    return parts[0], parts[1]


def read_classes(path: Path) -> Sequence[str] | Mapping[str, int]:
    """Class names: one per line in the order of the logits, or a JSON list, or a JSON object of name → number."""
    content = read_bounded(path, _LARGEST)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text of class names: {error.reason} at byte {error.start}") from error
    if text.lstrip()[:1] not in ("{", "["):
        names = [line.strip() for line in text.splitlines() if line.strip()]
        if not names:
            raise InputError(f"{path} names no classes: expected one name per line")
        return names
    found = parse_json(content, str(path))
    if isinstance(found, list) and all(isinstance(name, str) for name in found):
        return found
    if isinstance(found, dict) and all(type(k) is int for k in found.values()):
        return found
    raise InputError(f"{path} is no list of class names and no object of name → number")
