"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from equipoise.core.errors import InputError


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file completely or not at all: a temporary file beside it, flushed to disk, then renamed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder) / "a.txt", "σ")
    ...     (Path(folder) / "a.txt").read_text(encoding="utf-8")
    'σ'
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    name = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except OSError as error:
        if name is not None and os.path.exists(name):
            os.unlink(name)
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
