"""Files: written whole or not at all; regular files read in bounded amounts; JSON and safetensors without surprises."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from equipoise.core.errors import InputError, Refused, one_line

#: a description (JSON, YAML) longer than this is not read
LARGEST_TEXT = 16_000_000


def make_folder(folder: str | Path) -> Path:
    """Make a folder, with those above it, where it is not there yet."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot make {folder}: {getattr(error, 'strerror', None) or one_line(error)}") from error
    return Path(folder)


def open_regular(path: str | Path) -> BinaryIO:
    """A file opened for reading, if it is a plain one: a device, a pipe or a folder is refused, and never waited for."""
    path = Path(path)
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a zero byte in the name
        raise InputError(f"cannot read {str(path)!r}: {one_line(error)}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InputError(f"cannot read {path}: it is not a regular file but a folder, a device or a pipe")
    return os.fdopen(handle, "rb")


def read_bounded(path: str | Path, limit: int = LARGEST_TEXT) -> bytes:
    """The whole of a regular file, refused where it is longer than `limit` bytes.

    Args:
        path: the file.
        limit: most bytes.
    """
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            content = file.read(size + 1) if size <= limit else b""
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        except MemoryError as error:
            raise InputError(f"cannot read {path}: its {size:,} bytes do not fit into memory") from error
    if size > limit:
        raise InputError(f"{path} is longer than {limit:,} bytes, too long for what it should be: it was not read")
    if len(content) != size:
        raise InputError(f"cannot read {path}: it changes while it is read")
    return content


def read_json(path: str | Path, limit: int = LARGEST_TEXT) -> Any:
    """The JSON document in a file, read as `parse_json` does.

    Args:
        path: the file.
        limit: most bytes.
    """
    return parse_json(read_bounded(path, limit), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """A JSON document as the standard has it: no key twice in one object, no NaN or Infinity, no bottomless nesting.

    Args:
        text: the JSON text.
        where: what it is, for the message.

    >>> parse_json('{"a": 1, "a": 2}', "x.json")
    Traceback (most recent call last):
    equipoise.core.errors.InputError: x.json is not JSON that can be trusted: the key 'a' is given twice
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for key, value in pairs:
            if key in members:
                raise ValueError(f"the key {key[:60]!r} is given twice")
            members[key] = value
        return members

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not valid JSON")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        kind = "JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else "JSON that can be trusted"
        raise InputError(f"{where} is not {kind}: {said}") from error


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Write a file completely or not at all: a temporary file beside it, flushed to disk, then renamed.

    Args:
        path: the file; what stood in it before is replaced.
        content: its new content; text is written as UTF-8.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     atomic_write(Path(folder) / "a.txt", "σ")
    ...     (Path(folder) / "a.txt").read_text(encoding="utf-8")
    'σ'
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name[:50]}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise InputError(f"cannot write {path}: {error.strerror}") from error


@contextmanager
def locked(path: str | Path, busy: str) -> Iterator[None]:
    """Hold a lock on a file, made if need be; the system lets go of it when the process ends, however it dies.

    Args:
        path: the file.
        busy: the sentence of the refusal if the lock is held already, by another process or by this one.
    """
    try:
        file = open(path, "ab")  # noqa: SIM115 - closed below, which lets go of the lock
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(busy) from error
        except (OSError, ImportError):  # a file system or an operating system without such locks
            pass
        yield


class WeightFile:
    """A safetensors file that is open: names, shapes and types at once, numbers one tensor at a time.

    Attributes:
        path: the file.
        names: of its tensors, sorted.
    """

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self._file = path, file
        self.names: list[str] = sorted(file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The type of a tensor, as the format names it (F32, BF16, I64, …)."""
        return str(self._file.get_slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name."""
        try:
            return self._file.get_tensor(name)
        except Exception as error:  # a type that torch has not, a file that was cut since
            raise InputError(f"cannot read {name[:100]} of {self.path}: {one_line(error)[:160]}") from error


@contextmanager
def open_weights(path: str | Path) -> Iterator[WeightFile]:
    """A safetensors file whose header is sound; numbers are read when they are asked for.

    Args:
        path: a regular file; a pickle is refused with a hint.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    with open_regular(path) as plain:  # refuses pipes and devices before they are mapped
        length = int.from_bytes(plain.read(8), "little")
        if length > os.fstat(plain.fileno()).st_size:
            raise _no_weights(path, "its header is longer than the file")
        parse_json(plain.read(length), f"the header of {path}")  # a name twice is two files in one
    try:
        file = safe_open(path, "pt")
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        raise _no_weights(path, one_line(error)[:160]) from error
    with file:
        yield WeightFile(path, file)


def _no_weights(path: Path, reason: str) -> InputError:
    hint = "; pickled checkpoints are never opened, convert them with safetensors.torch.save_file"
    wrong = path.suffix in {".pt", ".pth", ".bin", ".ckpt", ".pkl"}
    return InputError(f"{path} is no complete safetensors file ({reason}){hint if wrong else ''}")
