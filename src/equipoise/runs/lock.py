"""One process at a time works on a run directory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from equipoise.core import InputError, files

NAME = "lock"


def locked(folder: Path) -> AbstractContextManager[None]:
    """Hold the run directory; a second holder is refused at once."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory")
    busy = f"another process is working on {folder}: wait for it, stop it, or use another run directory"
    return files.locked(folder / NAME, busy)
