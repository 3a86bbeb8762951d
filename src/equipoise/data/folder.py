"""Where a user keeps data files that do not come with the package."""

from __future__ import annotations

import os
from pathlib import Path

from equipoise.core.errors import InputError


def data_file(name: str) -> Path:
    """A file of the folder that `EQUIPOISE_DATA` names; one sentence where it is not there."""
    folder = os.environ.get("EQUIPOISE_DATA")
    if not folder:
        raise InputError(f"{name} is not bundled: set EQUIPOISE_DATA to the folder that holds it")
    path = Path(folder) / name
    if not path.exists():
        raise InputError(f"{name} is not in the folder EQUIPOISE_DATA names, {folder}")
    return path
