"""Data that only the trainer reads, by the word before the colon of `data.path`; a new kind is a new row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from equipoise.train.characters import load_characters
from equipoise.train.text import load_snips

#: `(what follows the colon, split)` → a `Source`
READERS: dict[str, Callable[[str, str], Any]] = {"snips": load_snips, "characters": load_characters}
