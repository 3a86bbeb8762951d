"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from equipoise.core.errors import InputError

#: how the names of temporary files end
PART = ".part"


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file completely or not at all: a temporary file beside it, flushed to disk, then renamed.

    What a killed process left of an earlier attempt at the same file is removed; what another process is writing is not:
    it holds a lock on its temporary file, which goes with the process.

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
        _tidy(path)
        handle, name = _temporary(path)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())
            if os.name == "posix":
                os.replace(name, path)  # while the lock is held
        if os.name != "posix":  # an open file cannot be renamed there
            os.replace(name, path)
    except OSError as error:
        if name is not None and os.path.exists(name):
            os.unlink(name)
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def _prefix(path: Path) -> str:
    return f".{path.name[:50]}."


def _temporary(path: Path) -> tuple[int, str]:
    """A new file beside `path`, open and locked."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path), suffix=PART)
        _lock(handle, wait=True)
        if os.path.exists(name):  # else it was tidied away before it was locked
            return handle, name
        os.close(handle)


def _tidy(path: Path) -> None:
    """Remove temporary files of `path` that no living process holds."""
    ours = re.compile(re.escape(_prefix(path)) + r"\w+" + re.escape(PART))
    names: list[str] = []
    with suppress(OSError):  # a folder one may write in, but not read
        names = [name for name in os.listdir(path.parent) if ours.fullmatch(name)]
    for name in names:
        with suppress(OSError):  # gone by now, or not ours to remove
            handle = os.open(path.parent / name, os.O_RDWR)
            try:
                if _lock(handle, wait=False):
                    os.unlink(path.parent / name)
            finally:
                os.close(handle)


def _lock(handle: int, wait: bool) -> bool:
    """Whether the file is locked for this process now; never where the system has no such locks."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):
        return False
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
