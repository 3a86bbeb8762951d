"""Safetensors files read one tensor at a time: memory holds the header and the tensor asked for, never the file.

The format: eight bytes with the length of a JSON header, the header (name → dtype, shape, place), then the numbers. The
usual reader maps the whole file into memory, which a process of bounded memory pays for; here every tensor is read on its own.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from equipoise.core.errors import InputError
from equipoise.core.files import open_regular, parse_json

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
