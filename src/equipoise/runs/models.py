"""The model of a run: sent to workers, hashed so that a changed one is noticed, with its preprocessing in front."""

from __future__ import annotations

import inspect
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from equipoise.checkpoints import Loaded
from equipoise.checkpoints.sources import program_input
from equipoise.core.errors import InputError, Refused
from equipoise.core.files import Digest
from equipoise.nn.models.plain import Normalise
from equipoise.onnx import OnnxNetwork
from equipoise.smoothing import Denoised


@dataclass(frozen=True, eq=False)
class Portable:
    """A model that can be pickled to a worker.

    Args:
        payload: a module as it is, an exported program as the bytes of its `.pt2`.
        hash: digest of the stored network: of the file for a `.pt2`, so that it does not depend on the batch it is loaded at.
        source: the name of the model.
        batch: the batch size a program or an ONNX network was exported with; None: any.
    """

    payload: nn.Module | bytes
    hash: str
    source: str
    batch: int | None = None

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
        self.model = model
        self.size = size
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """Row i of the result is the model's output for row i."""
        parts = []
        for piece in x.split(self.size):
            filling = piece[:1].expand(self.size - len(piece), *piece.shape[1:])
            parts.append(self.model(torch.cat([piece, filling]))[: len(piece)])
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
        return replace(made, hash=model.digest or made.hash)
    if isinstance(model, ExportedProgram):
        _require_inference(model)
        value = program_input(model)
        if value is None or value.ndim < 2:
            raise InputError("the exported program must take one tensor with a batch dimension")
        size = value.shape[0]
        buffer = io.BytesIO()
        torch.export.save(model, buffer)
        name = source or "an exported program"
        return Portable(buffer.getvalue(), hash_program(model), name, size if isinstance(size, int) else None)
    if not isinstance(model, nn.Module):
        raise InputError(f"expected an nn.Module, an exported program or a loaded model, got {type(model).__name__}")

    for name, module in model.named_modules():
        if module.training:
            at = name or "the model itself"
            raise Refused(f"the model is in training mode ({at}): call model.eval() before certifying it")
    kind = type(model)
    fixed = [part.batch for part in model.modules() if isinstance(part, OnnxNetwork)]
    return Portable(
        model,
        hash_module(model),
        source or f"{kind.__module__}:{kind.__qualname__}",
        next((batch for batch in fixed if batch is not None), None),
    )


def denoised(denoiser: Any, model: Any) -> Portable:
    """A denoiser in front of a model, as one model.

    Args:
        denoiser: a module from noisy image to image, or what `load_model` returned.
        model: the classifier.
    """
    first = portable(denoiser)
    second = portable(model)
    pair: nn.Module = Denoised(first.network(), second.network())
    digest = Digest("denoised").add("denoiser", first.hash).add("model", second.hash)
    return Portable(pair, str(digest), f"{second.source} behind {first.source}")


def normalised(model: Any, mean: Sequence[float], std: Sequence[float]) -> Portable:
    """`(x − mean)/std` per channel before a model that was trained on such inputs: noise and radii are in units of x.

    Args:
        model: as for `portable`.
        mean: one number per channel.
        std: one positive number per channel.
    """
    inner = portable(model)
    chain = nn.Sequential(Normalise(mean, std).eval(), inner.build())
    chain.training = False  # `.eval()` of an exported program raises
    payload: nn.Module | bytes = chain
    if isinstance(inner.payload, bytes):
        value = program_input(inner.program())
        assert value is not None
        example = torch.zeros(tuple(int(d) for d in value.shape), dtype=value.dtype)
        payload = portable(torch.export.export(chain, (example,))).payload
    digest = Digest("normalised").add("model", inner.hash).add("mean", tuple(mean)).add("std", tuple(std))
    name = f"{inner.source}, inputs (x − {tuple(mean)})/{tuple(std)}"
    return replace(inner, payload=payload, hash=str(digest), source=name)


def _require_inference(program: ExportedProgram) -> None:
    """A program exported in training mode draws random numbers of its own, or mixes the inputs of a batch."""
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for place, argument in enumerate(() if schema is None else schema.arguments):
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            if argument.name in ("train", "training") and value is True:
                raise Refused(
                    f"the program was exported in training mode ({node.name}): call model.eval() before exporting it"
                )


def hash_program(program: ExportedProgram) -> str:
    """sha256 over the graph, the weights and the constants of an exported program."""
    digest = Digest("program")
    digest.feed(program.graph_module.code.encode()).feed(str(program.graph).encode())
    for name, value in sorted({**program.state_dict, **program.constants}.items()):
        digest.add(name, value)
    return str(digest)


def hash_module(model: nn.Module) -> str:
    """sha256 over weights, buffers, the tree of modules with their settings, and the code of classes outside torch.

    Settings are the public attributes; what a forward pass reads from anywhere else (files, globals, private attributes) is
    not part of it.
    """
    digest = Digest("module")
    for name, value in sorted(model.state_dict().items()):
        digest.add(name, value)
    for name, module in model.named_modules():
        kind = type(module)
        digest.add(name, f"{kind.__module__}.{kind.__qualname__}({module.extra_repr()})")
        for key, value in sorted(vars(module).items()):
            if not key.startswith("_") and key != "training":
                digest.add(f"{name}.{key}", _text(value))
        if not kind.__module__.startswith("torch."):
            digest.add(kind.__qualname__, _code(kind))
    return str(digest)


def _text(value: Any) -> str:
    """An attribute as text that is the same in every process: no addresses, no order of a set."""

    def describe(part: Any) -> Any:
        if isinstance(part, Tensor | np.ndarray):
            return Digest("").add("", part).hex()
        if isinstance(part, set | frozenset):
            return sorted(map(repr, part))
        return re.sub(r" at 0x[0-9a-f]+", "", repr(part))

    try:
        return json.dumps(value, default=describe)
    except (TypeError, ValueError):  # keys that are no text, or a cycle
        return str(describe(value))


def _code(kind: type) -> str:
    """The source of a class, or its compiled methods where there is none (a class typed into a session)."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        functions = [f for _, f in sorted(vars(kind).items()) if inspect.isfunction(f)]
        return repr([(f.__name__, f.__code__.co_code, f.__code__.co_names) for f in functions])
