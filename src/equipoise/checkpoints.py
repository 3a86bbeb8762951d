"""Models from and to files: what `MODEL` means on the command line, without executing anything a file says.

A model is a `.pt2` program, an `.onnx` file, a checkpoint directory (one safetensors file and `config.json`), or
`package.module:factory` with safetensors weights.

A `.pt2` is a zip whose reader, `torch.export.load`, unpickles constants and sample inputs without restriction when
asked to, evaluates symbolic
expressions, and resolves any name under `torch.`. So the bytes are inspected first: only known entries, every pickle
readable with
`weights_only=True`, only aten operations, no symbolic expressions. The bytes that were inspected are the ones that are loaded.
"""

from __future__ import annotations

import difflib
import importlib
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line
from equipoise.core.files import write_whole

_ENTRIES = re.compile(
    r"^([^/]+/)?(archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)|\.format_version|"
    r"models/[\w.-]+\.json|data/(weights|constants|sample_inputs)/[\w.-]+|extra/.*)$"
)
_STORAGE = re.compile(r"^(weight|tensor)_\d+$")  # raw numbers: nothing unpickles these unless a description asks for it
_TARGETS = re.compile(r"^(torch\.ops\.(aten|prims)\.[\w.]+|_operator\.[a-z_]+)$")
_PICKLES = (".pt", ".pth", ".ckpt", ".bin")
_FORBIDDEN = ("from_file", "save", "load", "call_torchbind")
#: a model description longer than this is not read
LARGEST_JSON = 200_000_000


@dataclass(frozen=True)
class Loaded:
    """A model as it was named: a module in eval mode or an exported program, and the shape of one input if it is known."""

    source: str
    model: nn.Module | ExportedProgram
    input_shape: tuple[int, ...] | None
    examples: tuple[Tensor, ...] | None = None

    def module(self) -> nn.Module:
        """A callable module, also for an exported program."""
        return self.model.module() if isinstance(self.model, ExportedProgram) else self.model


def load_model(source: str | Path, weights: str | Path | None = None) -> Loaded:
    """What `source` names; every failure is an `EquipoiseError` with one sentence."""
    source = str(source)
    if source.endswith(".pt2"):
        if weights is not None:
            raise InputError("a .pt2 holds its own weights; leave --weights out")
        program = load_program(source)
        return Loaded(source, program, _program_shape(program))
    if source.endswith(".onnx"):
        if weights is not None:
            raise InputError("an .onnx file holds its own weights; leave --weights out")
        return _onnx(source)
    if Path(source).is_dir():
        if weights is not None:
            raise InputError("a checkpoint directory holds its own weights; leave --weights out")
        return Loaded(source, *load_checkpoint(source))
    if Path(source).suffix in _PICKLES and (":" not in source or Path(source).is_file()):
        raise Refused(
            f"{source}: pickles are never opened; export the model: "
            "torch.export.save(torch.export.export(model, (x,)), 'model.pt2')"
        )
    if ":" not in source:
        raise InputError(f"{source!r} is neither a .pt2 or .onnx file, a directory, nor package.module:factory")
    model = load_factory(source)
    return Loaded(source, load_weights(model, weights) if weights is not None else model, None)


def _onnx(source: str) -> Loaded:
    from equipoise.onnx import load_onnx

    network = load_onnx(source)
    shapes = network.input_shapes
    return Loaded(
        source, network, shapes[0][1:] if len(shapes) == 1 and len(shapes[0]) > 1 else None, network.examples()
    )


def _program_shape(program: ExportedProgram) -> tuple[int, ...] | None:
    names = program.graph_signature.user_inputs
    values = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder" and n.name in names]
    return (
        tuple(int(d) for d in values[0].shape[1:]) if len(values) == 1 and isinstance(values[0], torch.Tensor) else None
    )


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    factory: str,
    arguments: Mapping[str, Any] | None = None,
    input_shape: tuple[int, ...] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write `model.safetensors` and `config.json`, each whole or not at all, so that `load_checkpoint` gives the model back.

    `extra` is kept in `config.json` under its own keys (training epoch, metrics, certificate); it is never executed.
    """
    from safetensors.torch import save

    folder = Path(folder)
    _require_own(factory)
    config = {"factory": factory, "arguments": dict(arguments or {}), "input_shape": input_shape, **(extra or {})}
    state = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {folder}: {error.strerror}") from error
    write_whole(folder / "model.safetensors", save(state))
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return folder


def _require_own(factory: str) -> None:
    if not re.match(r"^equipoise(\.\w+)*:[A-Za-z]\w*$", factory):
        raise Refused(f"the checkpoint asks to run {factory!r}; only factories inside equipoise are called from a file")


def load_program(path: str | Path) -> ExportedProgram:
    """Open a `.pt2` written by `torch.export.save`, after refusing everything that is not plain weights and aten operations."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    inspect_program(data, str(path))
    try:
        return torch.export.load(io.BytesIO(data))
    except Exception as error:
        raise InputError(
            f"{path} is not a program this PyTorch can read ({type(error).__name__}: {_line(error)})"
        ) from error


def inspect_program(data: bytes, name: str = "the file") -> None:
    """Refuse a `.pt2` that would run code when read: unknown entries, pickles beyond weights, foreign operations, expressions."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        infos = archive.infolist()
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise InputError(f"{name} is not a .pt2 file: it is not a zip archive ({_line(error)})") from error
    repeated = [entry for entry, count in Counter(i.filename for i in infos).items() if count > 1]
    if repeated:
        raise Refused(f"{name} holds the entry {repeated[0]!r} twice: two readers would see two different files")
    for info in infos:
        if info.is_dir():
            continue
        if info.compress_type != zipfile.ZIP_STORED:
            raise Refused(f"{name} holds {info.filename!r} compressed, which PyTorch never does; export it again")
        if not _ENTRIES.match(info.filename):
            raise Refused(f"{name} holds {info.filename!r}, which a plain exported program has not; export it again")
        try:
            content = archive.read(info)
        except Exception as error:
            raise InputError(f"{name} is damaged at {info.filename!r} ({_line(error)})") from error
        _inspect_entry(name, info.filename, content)
    if not any("models/" in i.filename for i in infos):
        raise InputError(f"{name} holds no exported program (no models/*.json)")


def _inspect_entry(name: str, entry: str, content: bytes) -> None:
    if entry.endswith(".json"):
        if len(content) > LARGEST_JSON:
            raise Refused(f"{name}: {entry!r} is larger than {LARGEST_JSON} bytes")
        try:
            described = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}: {entry!r} is not JSON ({_line(error)})") from error
        _inspect_description(name, described)
    elif "/data/" in f"/{entry}" and not _STORAGE.match(entry.rsplit("/", 1)[-1]):
        try:
            torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        except Exception as error:
            raise Refused(
                f"{name}: {entry!r} is a pickle that holds more than weights; it was not opened; "
                "export the model again with tensors only"
            ) from error


def _inspect_description(name: str, described: Any) -> None:
    for item in _dicts(described):
        if "expr_str" in item:
            raise Refused(
                f"{name} has symbolic shapes, whose expressions are evaluated as code; export it with static shapes"
            )
        if item.get("use_pickle") not in (None, False):
            raise Refused(
                f"{name} asks for a constant to be unpickled without restriction; export it with tensor constants only"
            )
        stored = item.get("path_name")
        if stored is not None and not (isinstance(stored, str) and _STORAGE.match(stored)):
            raise Refused(
                f"{name} stores {stored!r}, an object rather than a tensor, which would be unpickled; export tensors only"
            )
        target = item.get("target")
        if isinstance(target, str) and "inputs" in item and "outputs" in item:
            overload = target.rsplit(".", 2)[-2] if target.count(".") > 1 else target
            if not _TARGETS.match(target) or overload in _FORBIDDEN:
                raise Refused(f"{name} calls {target!r}, which is not a plain tensor operation")


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    todo = [value]
    while todo:
        current = todo.pop()
        if isinstance(current, dict):
            yield current
            todo += current.values()
        elif isinstance(current, list):
            todo += current


def load_factory(spec: str, arguments: dict[str, Any] | None = None) -> nn.Module:
    """`package.module:factory`, called with no positional arguments; it must return a module."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise InputError(f"a factory is written package.module:factory, got {spec!r}")
    try:
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = _member(target, part, module_name, attribute)
        model = target(**(arguments or {})) if callable(target) and not isinstance(target, nn.Module) else target
    except ImportError as error:
        raise InputError(f"cannot import {module_name!r}: {_line(error)}") from error
    except AttributeError as error:
        raise InputError(f"{spec!r} failed with an AttributeError: {_line(error)}") from error
    except TypeError as error:
        raise InputError(f"{spec!r} cannot be called without arguments: {_line(error)}") from error
    except EquipoiseError:
        raise
    except Exception as error:  # whatever the user's own code raises
        raise InputError(f"{spec!r} failed with {type(error).__name__}: {_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec!r} gave a {type(model).__name__}, not an nn.Module")
    return model.eval()


def _member(owner: Any, part: str, module_name: str, attribute: str) -> Any:
    """`owner.part`; where there is none, the nearest public name is suggested."""
    try:
        return getattr(owner, part)
    except AttributeError as error:
        names = [name for name in dir(owner) if not name.startswith("_")]
        close = difflib.get_close_matches(part, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"{module_name!r} has no {attribute!r}{hint}") from error


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Weights from a safetensors file into the model, every name accounted for; other formats are refused."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    if path.suffix != ".safetensors":
        raise Refused(
            f"weights are read from .safetensors only, got {path.name!r}: pickled checkpoints can run code; convert it first"
        )
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path}: {_line(error)}") from error
    try:
        missing, extra = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise InputError(f"the weights of {path} do not fit the model: {_mismatch(error)}") from error
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    extra = [name for name in extra if not name.endswith("num_batches_tracked")]
    if missing or extra:
        what = [f"{len(v)} {k} (first: {v[0]})" for k, v in (("missing", missing), ("unknown", extra)) if v]
        raise InputError(f"the weights of {path} do not fit the model: {' and '.join(what)}")
    return model.eval()


def load_checkpoint(folder: str | Path) -> tuple[nn.Module, tuple[int, ...] | None]:
    """A checkpoint directory: one safetensors file, and a `config.json` with `factory`, `arguments` and `input_shape`.

    The factory must lie inside equipoise: a file does not choose which other code runs.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{folder} has no readable config.json: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{folder / 'config.json'} is not JSON: {_line(error)}") from error
    factory = config.get("factory") if isinstance(config, dict) else None
    if not isinstance(factory, str):
        raise InputError(f"{folder / 'config.json'} names no factory")
    _require_own(factory)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise InputError(f"{folder} must hold one .safetensors file, it holds {len(files)}")
    model = load_weights(load_factory(factory, config.get("arguments")), files[0])
    shape = config.get("input_shape")
    return model, tuple(int(n) for n in shape) if shape else None


def _mismatch(error: RuntimeError) -> str:
    """What PyTorch says below its heading: the first parameter that does not fit, with both shapes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[1] if len(lines) > 1 else _line(error)


def _line(error: BaseException) -> str:
    return one_line(error)[:160]
