"""Files: written whole or not at all, read in bounded amounts from regular files only, JSON without surprises.

Safetensors files read one tensor at a time: memory holds the header and the tensor asked for, never the file.

The format: eight bytes with the length of a JSON header, the header (name → dtype, shape, place), then the numbers. The
usual reader maps the whole file into memory, which a process of bounded memory pays for; here every tensor is read on its own.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line

#: how the names of temporary files end
PART = ".part"
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


@contextmanager
def as_input_error(path: Path, hint: str = "restore it from a copy") -> Iterator[None]:
    """Inside, what a file says is read: a field that is missing or of another kind is said in a sentence with its name."""
    try:
        yield
    except EquipoiseError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        said = f"{type(error).__name__}: {one_line(error)[:160]}"
        raise InputError(f"{path} is damaged ({said}): {hint}") from error


def read_bounded(path: str | Path, limit: int = LARGEST_TEXT) -> bytes:
    """The whole of a regular file, refused where it is longer than `limit` bytes."""
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
    """The JSON document in a file, read as `parse_json` does."""
    return parse_json(read_bounded(path, limit), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """A JSON document as the standard has it: no key twice in one object, no NaN or Infinity, no bottomless nesting.

    >>> parse_json('{"a": 1, "a": 2}', "x.json")
    Traceback (most recent call last):
    equipoise.core.errors.InputError: x.json is not JSON that can be trusted: the key 'a' is given twice
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {key[:60]!r} is given twice")
            found[key] = value
        return found

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        kind = "JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else "JSON that can be trusted"
        raise InputError(f"{where} is not {kind}: {said}") from error


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Write a file completely or not at all: a temporary file beside it, flushed to disk, then renamed.

    What a killed process left of an earlier attempt at the same file is removed; what another process is writing is not:
    it holds a lock on its temporary file, which goes with the process.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     atomic_write(Path(folder) / "a.txt", "σ")
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


@contextmanager
def locked(path: str | Path, busy: str) -> Iterator[None]:
    """Hold a file of this name, made if need be; the system lets go of it when the process ends, however it dies.

    Refused with the sentence `busy` where it is held already, by another process or by this one.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    try:
        if not _lock(handle, wait=False):
            raise Refused(busy)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, wait: bool) -> bool:
    """Whether the file is locked for this process now."""
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return not wait
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


#: a header longer than this is not read
LARGEST_HEADER = 100_000_000
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its type as the format names it, its shape, and where its bytes lie."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class WeightFile:
    """A safetensors file that is open; use it in a `with` block.

    The header is checked against the file's length before anything is read: places that overlap, leave the file or do not fit
    the shape are refused.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.file: BinaryIO = open_regular(path)
        try:
            self.entries = self._header()
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name, in memory of its own."""
        entry = self.entries[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise InputError(f"{name} of {self.path} is of type {entry.dtype}, which is not read here")
        try:
            content = bytearray(entry.end - entry.begin)
            self.file.seek(self.start + entry.begin)
            read = self.file.readinto(content)  # type: ignore[attr-defined]
        except MemoryError as error:
            raise InputError(f"{name} of {self.path} does not fit into memory") from error
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}") from error
        if read != len(content):
            raise InputError(f"{self.path} changes while it is read: {name} is cut short")
        found = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return found.reshape(entry.shape)

    def _header(self) -> dict[str, Entry]:
        size = os.fstat(self.file.fileno()).st_size
        length = int.from_bytes(self.file.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            raise self._incomplete("its header is longer than the file")
        self.start = 8 + length
        document = parse_json(self.file.read(length), f"the header of {self.path}")
        if not isinstance(document, dict):
            raise self._incomplete("its header is no object")
        entries = {n: self._entry(n, v, size - self.start) for n, v in document.items() if n != "__metadata__"}
        last = 0
        for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
            if entry.begin != last:
                raise self._incomplete(f"the numbers of {name[:100]} overlap others or leave a gap")
            last = entry.end
        if last != size - self.start:
            raise self._incomplete(f"{size - self.start:,} bytes of numbers are there, {last:,} are described")
        return entries

    def _entry(self, name: str, value: Any, available: int) -> Entry:
        try:
            dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._incomplete(f"{name[:100]} is not described by dtype, shape and data_offsets") from error
        whole = isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**48 for n in (*shape, begin, end))
        if not whole or not isinstance(dtype, str) or not begin <= end <= available:
            raise self._incomplete(f"{name[:100]} lies outside of the file")
        kind = _DTYPES.get(dtype)
        if kind is not None and math.prod(shape) * kind.itemsize != end - begin:
            raise self._incomplete(f"{name[:100]} has {end - begin:,} bytes, which do not fit {dtype} of shape {shape}")
        return Entry(dtype, tuple(shape), begin, end)

    def _incomplete(self, reason: str) -> InputError:
        hint = "; pickled checkpoints are never opened, convert them with safetensors.torch.save_file"
        wrong = self.path.suffix in {".pt", ".pth", ".bin", ".ckpt", ".pkl"}
        return InputError(f"{self.path} is no complete safetensors file ({reason}){hint if wrong else ''}")
