"""The model of a run: sent to workers, hashed so that a changed one is noticed, with its preprocessing in front."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import json
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from equipoise.checkpoints import Loaded
from equipoise.checkpoints.sources import program_input
from equipoise.core.digests import Digest
from equipoise.core.errors import InputError, Refused
from equipoise.nn.models.plain import Normalise
from equipoise.onnx import OnnxNetwork
from equipoise.smoothing import Denoised

#: arguments by which operators are told that they are in training
_TRAINING = frozenset({"train", "training"})


@dataclass(frozen=True, eq=False)
class Portable:
    """A model that can be pickled to a worker.

    Args:
        payload: a module as it is, an exported program as the bytes of its `.pt2`.
        hash: digest of the stored network: of the file for a `.pt2`, so that it does not depend on the batch it is loaded at.
        source: the name of the model.
        batch: the batch size a program or an ONNX network was exported with; None: any.
        code: digest of a module's weights and code, which workers compare with their own.
    """

    payload: nn.Module | bytes
    hash: str
    source: str
    batch: int | None = None
    code: str | None = None

    def build(self, device: str | torch.device = "cpu") -> nn.Module:
        """The module, on a device."""
        if isinstance(self.payload, nn.Module):
            return self.payload.to(device)
        module = self.program().module().to(device)
        for part in module.modules():
            part.training = False  # the graph is fixed; `.eval()` of an exported program raises
        return module

    def network(self, device: str | torch.device = "cpu") -> nn.Module:
        """The module for batches of any size."""
        module = self.build(device)
        return module if self.batch is None else Batched(module, self.batch)

    def program(self) -> ExportedProgram:
        """The exported program again, from the bytes this process wrote."""
        assert isinstance(self.payload, bytes)
        return torch.export.load(io.BytesIO(self.payload))


class Batched(nn.Module):
    """Runs a batch in pieces of exactly `size` rows, the last one filled up, and joins the results."""

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__()
        self.model, self.size = model, size
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """Row i of the result is the model's output for row i."""
        parts = []
        for piece in x.split(self.size):
            rows = len(piece)
            filling = piece[:1].expand(self.size - rows, *piece.shape[1:])
            parts.append(self.model(torch.cat([piece, filling]))[:rows])
        return torch.cat(parts)


def portable(model: Any, source: str | None = None) -> Portable:
    """Accept a module in evaluation mode, an exported program, what `load_model` returned, or a `Portable`.

    Args:
        model: the model.
        source: its name.
    """
    if isinstance(model, Portable):
        return model
    if isinstance(model, Loaded):
        made = portable(model.model, model.source)
        return made if model.digest is None else replace(made, hash=model.digest)
    if isinstance(model, ExportedProgram):
        _require_inference(model)
        buffer = io.BytesIO()
        torch.export.save(model, buffer)
        return Portable(buffer.getvalue(), hash_program(model), source or "an exported program", _batch(model))
    if not isinstance(model, nn.Module):
        raise InputError(f"expected an nn.Module, an exported program or a loaded model, got {type(model).__name__}")

    training = [name or "the model itself" for name, module in model.named_modules() if module.training]
    if training:
        raise Refused(f"the model is in training mode ({training[0]}): call model.eval() before certifying it")
    name = source or f"{type(model).__module__}:{type(model).__qualname__}"
    fixed = [part.batch for part in model.modules() if isinstance(part, OnnxNetwork) and part.batch is not None]
    digest = hash_module(model)
    return Portable(model, digest, name, fixed[0] if fixed else None, digest)


def denoised(denoiser: Any, model: Any) -> Portable:
    """A denoiser in front of a model, as one model.

    Args:
        denoiser: a module from noisy image to image, or what `load_model` returned.
        model: the classifier.
    """
    parts = [portable(denoiser), portable(model)]
    modules = [part.build() if part.batch is None else part.payload for part in parts]
    pair: nn.Module = Denoised(*modules)  # type: ignore[arg-type]
    digest = Digest("denoised").add("denoiser", parts[0].hash).add("model", parts[1].hash)
    return Portable(pair, str(digest), f"{parts[1].source} behind {parts[0].source}", None, hash_module(pair))


class Chain(nn.Module):
    """One module after the other; an exported one refuses `eval`, which a container would call."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.training = first, second, False

    def forward(self, x: Tensor) -> Tensor:
        """`second(first(x))`."""
        out: Tensor = self.second(self.first(x))
        return out


def normalised(model: Any, mean: Sequence[float], std: Sequence[float]) -> Portable:
    """`(x − mean)/std` per channel before a model that was trained on such inputs: noise and radii are in units of x.

    Args:
        model: as for `portable`.
        mean: one number per channel.
        std: one positive number per channel.
    """
    inner = portable(model)
    layer: nn.Module = Normalise(mean, std).eval()
    shown = ("(" + ", ".join(f"{v:g}" for v in values) + ")" for values in (mean, std))
    name = "{}, inputs (x − {})/{}".format(inner.source, *shown)
    digest = str(Digest("normalised").add("model", inner.hash).add("mean", tuple(mean)).add("std", tuple(std)))
    if isinstance(inner.payload, nn.Module):
        chain = Chain(layer, inner.payload)
        return replace(inner, source=name, payload=chain, hash=digest, code=hash_module(chain))

    program = inner.program()
    value = program_input(program)
    if value is None:
        raise InputError("the exported program must take one tensor with a batch dimension")
    example = torch.zeros(tuple(int(d) for d in value.shape), dtype=value.dtype)
    outer = torch.export.export(Chain(layer, program.module()), (example,))
    return replace(portable(outer, name), hash=digest)


def _batch(program: ExportedProgram) -> int | None:
    value = program_input(program)
    if value is None or value.ndim < 2:
        raise InputError("the exported program must take one tensor with a batch dimension")
    size = value.shape[0]
    return size if isinstance(size, int) else None


def _require_inference(program: ExportedProgram) -> None:
    """A program exported in training mode draws random numbers of its own, or mixes the inputs of a batch."""
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for place, argument in enumerate(() if schema is None else schema.arguments):
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            if argument.name in _TRAINING and value is True:
                raise Refused(
                    f"the program was exported in training mode ({node.name}): call model.eval() before exporting it"
                )


def hash_program(program: ExportedProgram) -> str:
    """sha256 over the graph, the weights and the constants of an exported program."""
    digest = Digest("program")
    digest.sha.update(program.graph_module.code.encode())
    digest.sha.update(str(program.graph).encode())
    for name, value in sorted({**program.state_dict, **program.constants}.items()):
        digest.add(name, value)
    return str(digest)


def hash_module(model: nn.Module) -> str:
    """sha256 over weights, buffers, the tree of modules with their settings, and the code of classes outside torch.

    Settings are the public attributes holding plain values, tensors or named functions; what a forward pass reads from
    anywhere else (files, globals, private attributes) is not seen.
    """
    digest = Digest("module")
    for name, value in sorted(model.state_dict().items()):
        digest.add(name, value)
    seen: set[type] = set()
    for name, module in model.named_modules():
        kind = type(module)
        digest.add(name, f"{kind.__module__}.{kind.__qualname__}({module.extra_repr()})")
        for key, value in _settings(module):
            digest.add(f"{name}.{key}", value)
        if kind not in seen and not kind.__module__.startswith("torch."):
            seen.add(kind)
            digest.add(kind.__qualname__, _code(kind))
    return str(digest)


def _settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Public attributes as text."""
    for key, value in sorted(vars(module).items()):
        if key.startswith("_") or key == "training":
            continue
        try:
            yield key, json.dumps(value, sort_keys=True, default=_describe, skipkeys=True)
        except (TypeError, ValueError):  # keys that cannot be sorted, or a cycle
            yield key, _kind(value)


def _describe(value: Any) -> Any:
    """What is the same in every process: never an address."""
    if isinstance(value, Tensor | np.ndarray):
        return Digest("").add("", value).hex()
    if isinstance(value, functools.partial):
        return [_kind(value), value.func, value.args, value.keywords]
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
        return [_kind(value), vars(value)]
    return _kind(value)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _code(kind: type) -> str:
    """The source of a class, or its compiled methods where there is none (a class typed into a session)."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        functions = [f for _, f in sorted(vars(kind).items()) if inspect.isfunction(f)]
        return repr([(f.__name__, f.__code__.co_code, f.__code__.co_names) for f in functions])
