"""Benchmarks: ratios against the alternatives, side by side in one run."""

import os
from pathlib import Path

from equipoise.core.errors import InputError


def data_file(name: str) -> Path:
    """A file of the folder that `EQUIPOISE_DATA` names."""
    folder = os.environ.get("EQUIPOISE_DATA")
    if not folder:
        raise InputError(f"{name} is not bundled: set EQUIPOISE_DATA to the folder that holds it")
    path = Path(folder) / name
    if not path.exists():
        raise InputError(f"{name} is not in the folder EQUIPOISE_DATA names, {folder}")
    return path
