"""The spectral norms of every weight of safetensors files, also of a folder that is watched while a training run writes it.

From a file alone, stride, dilation, groups and padding of a convolution are unknown. With unknown input size the bracket is that
of the ungrouped stride-1 convolution over all input sizes, `sup_ω ‖E(ω)‖₂`, and its **upper** end also holds for

* every stride s ≥ 1: a strided convolution computes a subset of the stride-1 outputs;
* every amount of zero padding and every input size: a compression of the infinite convolution;
* every dilation: the symbol is evaluated at `d·ω`, the supremum is the same;
* every grouping of the same weight: the groups are blocks of rows, and the largest block norm is at most that of the stack;
* the transposed convolution with the same weight, whose matrix is the adjoint.

The **lower** end belongs to stride 1 and groups 1. Reflect and replicate padding copy pixels and are not covered.
"""

import fnmatch
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise.core.bounds import Bracket
from equipoise.core.errors import EquipoiseError, InputError
from equipoise.core.files import WeightFile, open_weights
from equipoise.core.precision import full_precision, require_finite, working_dtype
from equipoise.maps.geometry import PaddingMode
from equipoise.maps.linear import convolution
from equipoise.norms.convolution import conv_bracket
from equipoise.norms.spectral import spectral_norm

Status = Literal["bracket", "skipped", "refused"]


@dataclass(frozen=True)
class WeightRow:
    """One tensor of a file: its bracket, or why it has none.

    `skipped` means there is nothing to bound (a bias, a counter), `refused` that the weight is broken (NaN) or does not
    fit the options given.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    status: Status
    kind: Literal["matrix", "convolution", ""] = ""
    bracket: Bracket | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        row = {key: value for key, value in asdict(replace(self, bracket=None)).items() if key != "bracket"}
        row["shape"] = list(self.shape)
        if self.bracket is not None:
            b = self.bracket
            row |= {"lower": b.lower, "upper": b.upper, "gap": b.gap, "reached": b.reached, "method": b.method}
        return row


@dataclass(frozen=True)
class Reading:
    """How the weights of a file are to be read; the defaults give upper ends that hold for any stride and groups."""

    rtol: float = 1e-3
    input_size: tuple[int, ...] | None = None
    padding: PaddingMode = "zeros"
    stride: int = 1

    def __post_init__(self) -> None:
        if not self.rtol > 0:
            raise InputError(f"rtol must be positive, got {self.rtol}")
        if self.stride < 1:
            raise InputError(f"stride must be at least 1, got {self.stride}")


def weight_names(path: Path, only: str | None = None, empty: bool = False) -> list[str]:
    """Names of the tensors in the file, sorted; `only` is a shell pattern such as `layer1.*`.

    That there are none is refused, unless it may be `empty`.
    """
    with _opened(path) as file:
        names = file.names
    chosen = names if only is None else fnmatch.filter(names, only)
    if not chosen and not empty:
        raise InputError(
            f"{path.name} holds no tensors"
            if not names
            else f"no tensor of {path.name} matches {only!r}; try {names[0]!r}"
        )
    return chosen


def weight_norms(path: Path, reading: Reading | None = None, names: list[str] | None = None) -> Iterator[WeightRow]:
    """One row per tensor, read and bounded one after the other; a broken tensor gives a refused row and the rest goes on.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "w.safetensors"
    ...     save_file({"w": 2 * torch.eye(3), "b": torch.zeros(3)}, path)
    ...     [(row.name, row.status) for row in weight_norms(path)]
    [('b', 'skipped'), ('w', 'bracket')]
    """
    reading = Reading() if reading is None else reading
    with _opened(path) as file:
        for name in file.names if names is None else names:
            shape, dtype = file.shape(name), file.dtype(name)
            reason = _skip_reason(shape, dtype)
            if reason:
                yield WeightRow(name, shape, dtype, "skipped", note=reason)
                continue
            yield _bounded(name, dtype, file.tensor(name), reading)


def _skip_reason(shape: tuple[int, ...], dtype: str) -> str:
    if not dtype.startswith(("F", "BF", "C")):
        return f"{dtype} is not floating point"
    if len(shape) < 2:
        return "a scalar" if not shape else "a vector"
    if len(shape) > 5:
        return f"{len(shape)} dimensions: neither a matrix nor a convolution kernel"
    return ""


def _bounded(name: str, dtype: str, tensor: Tensor, reading: Reading) -> WeightRow:
    shape = tuple(tensor.shape)
    kind: Literal["matrix", "convolution"] = "matrix" if tensor.dim() == 2 else "convolution"
    try:
        bracket = tensor_bracket(tensor, reading)
    except EquipoiseError as error:
        return WeightRow(name, shape, dtype, "refused", kind, note=str(error))
    return WeightRow(name, shape, dtype, "bracket", kind, bracket, bracket.note)


def tensor_bracket(tensor: Tensor, reading: Reading) -> Bracket:
    """Bracket of one weight: 2-D as a matrix, 3-D to 5-D as the kernel `(out, in, *k)` of a convolution."""
    weight = require_finite(tensor.to(working_dtype(tensor.dtype)))
    if weight.dim() == 2:
        return spectral_norm(weight, rtol=reading.rtol)
    given = reading.input_size
    size = given[0] if given is not None and len(given) == 1 else given  # one number serves every axis
    with torch.no_grad(), full_precision():
        conv = convolution(weight, reading.padding, reading.stride, input_size=size)
        return conv_bracket(conv, reading.rtol)


def _opened(path: Path) -> AbstractContextManager[WeightFile]:
    if not path.exists():
        raise InputError(f"there is no file {path}")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the .safetensors file in it")
    return open_weights(path)


def weight_files(path: Path) -> list[Path]:
    """The file itself, or the weight files of a folder (a model in several parts), in order of their names."""
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise InputError(f"the folder {path} holds no .safetensors file; with --watch it is waited for")
    return found


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
