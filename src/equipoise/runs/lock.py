"""One process at a time works on a run directory; the lock goes with the process, however it dies."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from equipoise.core import EquipoiseError, InputError, Refused

NAME = "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run directory; a second holder is refused at once.

    An exclusive transaction on an empty SQLite file: the operating system drops it when the process ends, and it works
    alike on every platform.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory")
    db = None
    try:
        db = sqlite3.connect(folder / NAME, timeout=0, isolation_level=None)
        db.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        if db is not None:
            db.close()
        raise _explained(folder, error) from error
    try:
        yield
    finally:
        db.close()


def _explained(folder: Path, error: sqlite3.Error) -> EquipoiseError:
    if "locked" in str(error):
        return Refused(f"another process is working on {folder}: wait for it, stop it, or use another run directory")
    if isinstance(error, sqlite3.OperationalError):
        return InputError(f"cannot write in {folder} ({error}): check its permissions and the free space")
    return InputError(f"{folder / NAME} is not a lock file of ours ({error}): remove it")
