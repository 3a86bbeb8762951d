"""New and rewritten safetensors files of a folder, as they appear: a training run watched from outside."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

from equipoise.core.errors import InputError

#: files beside a model that hold other tensors than its weights
STATES = ("spectral_guard.safetensors", "optimizer.safetensors")


def appearing(folder: Path, seconds: float = math.inf, every: float = 2.0) -> Iterator[Path]:
    """Every weight file below the folder once, oldest first, and again whenever it is rewritten, for so many seconds.

    A file counts once its size and date stood still between two looks, so that one being written is left until it is whole.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     _ = (Path(name) / "model.safetensors").write_bytes(b"")
    ...     [path.name for path in appearing(Path(name), seconds=0.05, every=0.01)]
    ['model.safetensors']
    """
    if not folder.is_dir():
        raise InputError(f"--watch follows a folder, and {folder} is none")
    if not seconds >= 0 or not every > 0:
        raise InputError(f"seconds and every must be positive, got {seconds} and {every}")
    told: dict[Path, tuple[int, int]] = {}
    before: dict[Path, tuple[int, int]] = {}
    end = time.monotonic() + seconds
    while True:
        now = _stamps(folder)
        for path, stamp in sorted(now.items(), key=lambda item: item[1]):
            if before.get(path) == stamp and told.get(path) != stamp:
                told[path] = stamp
                yield path
        before = now
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(every, left))


def _stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Date and size of every file that may hold weights; those that vanish meanwhile are left out."""
    found = {}
    for path in folder.rglob("*.safetensors"):
        try:
            status = path.stat()
        except OSError:
            continue
        if path.name not in STATES:
            found[path] = (status.st_mtime_ns, status.st_size)
    return found
