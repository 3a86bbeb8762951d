"""`.pt2` programs: read with suspicion, rebuilt from what was understood, and only the rebuilt archive is given to PyTorch.

`torch.export.load` unpickles constants and sample inputs without restriction when asked to, evaluates symbolic expressions,
resolves any name under `torch.`, imports the classes named in tree specifications, and writes names and guards of the file
into Python code that it compiles. So the archive is taken apart here: only known entries, every description held against a
grammar (`equipoise.checkpoints.description`), every pickle read with `weights_only=True` and written anew. What is not
understood is refused, and PyTorch never sees the bytes of the file itself: there is nothing two readers could see differently.
"""

import io
import json
import re
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_map_only

from equipoise.checkpoints.batching import fix_batch, is_dynamic
from equipoise.checkpoints.description import check_payloads, check_program
from equipoise.checkpoints.plain_values import NAME
from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line, unlogged
from equipoise.core.files import parse_json, read_bounded
from equipoise.core.programs import require_stated_shapes

#: an archive longer than this is not read
LARGEST_ARCHIVE = 2**37
#: a model description longer than this is not read
LARGEST_JSON = 200_000_000
_MARKS = {
    "archive_format": re.compile(rb"pt2"),
    "archive_version": re.compile(rb"\d{1,3}"),
    "byteorder": re.compile(sys.byteorder.encode()),
    "version": re.compile(rb"\d{1,3}\s*"),
    ".data/version": re.compile(rb"\d{1,3}\s*"),
    ".data/serialization_id": re.compile(rb"\d{1,64}"),
    ".format_version": re.compile(rb"\d{1,3}"),
}
_STORAGE = re.compile(r"data/(weights/weight|constants/tensor)_\d{1,9}")
_DESCRIPTIONS = (
    "models/model.json",
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
)
_PICKLES = ("data/sample_inputs/model.pt", "data/weights/model.pt", "data/constants/model.pt")


def load_program(path: str | Path, batch: int = 1) -> ExportedProgram:
    """Open a `.pt2` written by `torch.export.save`, after refusing everything that is not plain weights and aten operations.

    A dynamic batch dimension is fixed at `batch`, or the nearest size that the program allows; others keep their own.
    """
    path = Path(path)
    rebuilt = inspect_program(read_bounded(path, LARGEST_ARCHIVE), str(path), batch)
    try:
        with unlogged():
            program = torch.export.load(io.BytesIO(rebuilt))
            require_stated_shapes(program)
            _run_once(program)
            return program
    except Refused as refused:
        raise Refused(f"{path}: {refused}") from refused
    except Exception as error:  # whatever PyTorch's reader raises for a description that does not fit together
        raise InputError(
            f"{path} is not a program this PyTorch can read ({type(error).__name__}: {_line(error)})"
        ) from error


def _run_once(program: ExportedProgram) -> None:
    """Weights that do not fit the graph, or arguments that do not fit an operation, show on the program's own sample inputs."""
    if program.example_inputs is not None:
        arguments, keywords = program.example_inputs
        with torch.no_grad():
            program.module()(*arguments, **keywords)


def inspect_program(data: bytes, name: str = "the file", batch: int = 1) -> bytes:
    """The archive written anew from what was understood; refused where anything in it is not understood.

    A dynamic batch dimension becomes a static one of size `batch`.
    """
    entries = _entries(data, name)
    described: dict[str, Any] = {}
    out: dict[str, bytes] = {}
    for entry, content in entries.items():
        if entry in _DESCRIPTIONS:
            described[entry] = _parse(content, f"{name}: {entry!r}")
        elif entry in _PICKLES:
            out[entry] = _pickle(content, entry, name)
        elif not entry.startswith("extra/"):  # such files are the writer's own remarks: left behind
            out[entry] = content
    if "models/model.json" not in described:
        raise InputError(f"{name} holds no exported program (no models/model.json)")
    program = described.pop("models/model.json")
    if is_dynamic(program):
        program, size = fix_batch(program, batch, name)
        samples = "data/sample_inputs/model.pt"
        if out.get(samples):
            out[samples] = _rebatched(out[samples], size)
    rebuilt = {"models/model.json": check_program(program, name)}
    for entry, document in described.items():
        folder = entry.rpartition("/")[0]
        sizes = {e.removeprefix(folder + "/"): len(c) for e, c in out.items() if e.startswith(folder + "/")}
        rebuilt[entry] = check_payloads(document, sizes, name)
    out |= {entry: json.dumps(document).encode() for entry, document in rebuilt.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for entry, content in out.items():
            archive.writestr(f"model/{entry}", content)
    return buffer.getvalue()


def _parse(content: bytes, where: str) -> Any:
    if len(content) > LARGEST_JSON:
        raise Refused(f"{where} is larger than {LARGEST_JSON:,} bytes")
    return parse_json(content, where)


def _entries(data: bytes, name: str) -> dict[str, bytes]:
    """The entries of the archive without their common folder; unknown, repeated, compressed or damaged ones are refused."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        infos = [info for info in archive.infolist() if not info.is_dir()]
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, UnicodeDecodeError) as error:
        raise InputError(f"{name} is not a .pt2 file: it is not a zip archive ({_line(error)})") from error
    repeated = [entry for entry, count in Counter(i.filename for i in infos).items() if count > 1]
    if repeated:
        raise Refused(f"{name} holds the entry {repeated[0][:100]!r} twice: two readers would see two different files")
    roots = {i.filename.partition("/")[0] for i in infos}
    prefix = f"{roots.pop()}/" if len(roots) == 1 and all("/" in i.filename for i in infos) else ""
    found: dict[str, bytes] = {}
    for info in infos:
        entry = info.filename.removeprefix(prefix)
        known = entry in _MARKS or entry in _DESCRIPTIONS or entry in _PICKLES or _STORAGE.fullmatch(entry)
        if not known and not entry.startswith("extra/"):
            raise Refused(f"{name} holds {entry[:100]!r}, which a plain exported program has not; export it again")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise Refused(f"{name} holds {entry[:100]!r} compressed, which PyTorch never does; export it again")
        if info.file_size > len(data):
            raise Refused(f"{name} holds {entry[:100]!r}, which declares more bytes than the whole file has")
        try:
            found[entry] = archive.read(info)
        except Exception as error:  # the many ways in which a damaged archive fails
            raise InputError(f"{name} is damaged at {entry[:100]!r} ({_line(error)})") from error
        if entry in _MARKS and not _MARKS[entry].fullmatch(found[entry]):
            raise InputError(
                f"{name} says {found[entry][:20]!r} in {entry!r}: it is no .pt2 of this PyTorch and machine"
            )
    return found


def _pickle(content: bytes, entry: str, name: str) -> bytes:
    """A pickle that holds tensors and plain values only, read with `weights_only=True` and written anew."""
    if not content:
        return content
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as inner:
            if any(i.compress_type != zipfile.ZIP_STORED for i in inner.infolist()):
                raise ValueError("compressed")
        with unlogged():
            found = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        _check_plain(found, depth=8)
    except Exception as error:
        if isinstance(error, EquipoiseError):
            raise Refused(f"{name}: {entry!r} holds {error}") from error
        raise Refused(
            f"{name}: {entry!r} is a pickle that holds more than weights; it was not opened; "
            "export the model again with tensors only"
        ) from error
    if entry == "data/sample_inputs/model.pt":
        fine = (
            isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], tuple) and isinstance(found[1], dict)
        )
        if not fine:
            raise Refused(f"{name}: the sample inputs are not a pair (arguments, keyword arguments)")
    elif not isinstance(found, dict):
        raise Refused(f"{name}: {entry!r} does not hold tensors by name")
    buffer = io.BytesIO()
    torch.save(found, buffer)
    return buffer.getvalue()


def _rebatched(content: bytes, size: int) -> bytes:
    """Sample inputs, read and written by this process, with `size` copies of their first row."""
    found = torch.load(io.BytesIO(content), weights_only=True)
    repeated = tree_map_only(Tensor, lambda t: t[:1].repeat(size, *[1] * (t.ndim - 1)) if t.ndim else t, found)
    buffer = io.BytesIO()
    torch.save(repeated, buffer)
    return buffer.getvalue()


def _check_plain(value: Any, depth: int) -> None:
    """Tensors, numbers, and tuples, lists and dictionaries of them; the keys are written into code, so they are names."""
    if depth == 0:
        raise InputError("values nested too deeply")
    if value is None or type(value) in (bool, int, float, str, complex) or type(value) in (Tensor, torch.nn.Parameter):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not (isinstance(key, str) and all(NAME.match(part) or part.isdigit() for part in key.split("."))):
                raise InputError(f"the key {str(key)[:60]!r}, which is no name")
            _check_plain(item, depth - 1)
    elif type(value) in (tuple, list):
        for item in value:
            _check_plain(item, depth - 1)
    else:
        raise InputError(f"a {type(value).__name__}, expected tensors and numbers")


def _line(error: BaseException) -> str:
    return one_line(error)[:160]
