"""What `MODEL` means on the command line: a `.pt2` or `.onnx` file, a checkpoint directory, or `package.module:factory`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from equipoise.checkpoints.directory import load_checkpoint, load_weights
from equipoise.checkpoints.program import read_program
from equipoise.core import InputError, Refused, Shape, guarded
from equipoise.core.files import read_json, resolve

_PICKLES = (".pt", ".pth", ".ckpt", ".bin")


@dataclass(frozen=True)
class Loaded:
    """A model as it was named: a module in eval mode or an exported program.

    Attributes:
        source: the name it was loaded by.
        model: the module or the program.
        input_shape: the shape of one input, where it is known.
        examples: inputs of the shapes that the file declares, where it does.
        digest: of the stored program, the same for every batch that it is loaded for; None for modules.
    """

    source: str
    model: nn.Module | ExportedProgram
    input_shape: Shape | None
    examples: tuple[Tensor, ...] | None = None
    digest: str | None = None

    def module(self) -> nn.Module:
        """A callable module, also for an exported program."""
        return self.model.module() if isinstance(self.model, ExportedProgram) else self.model


def load_model(source: str | Path, weights: str | Path | None = None, *, batch: int = 1) -> Loaded:
    """What `source` names; every failure is an `EquipoiseError` with one sentence.

    A file or a folder cannot choose which code runs; `package.module:factory` is the user's own choice and is imported.

    Args:
        source: a `.pt2` or `.onnx` file, a checkpoint directory, or `package.module:factory`.
        weights: a safetensors file for a factory's model.
        batch: the size at which a dynamic batch dimension of a `.pt2` is fixed; other models take what they take.
    """
    source = str(source)
    folder = Path(source).is_dir()
    if weights is not None and (folder or source.endswith((".pt2", ".onnx"))):
        raise InputError(f"{source} holds its own weights; leave out the weights file")
    if source.endswith(".pt2"):
        program, digest = read_program(source, batch)
        value = program_input(program)
        shape = None if value is None else tuple(value.shape[1:])
        return Loaded(source, program, shape, digest=digest)
    if source.endswith(".onnx"):
        return _onnx(source)
    if folder:
        return _directory(source, batch)
    if Path(source).suffix in _PICKLES and (":" not in source or Path(source).is_file()):
        raise Refused(
            f"{source}: pickles are never opened; export the model: "
            "torch.export.save(torch.export.export(model, (x,)), 'model.pt2')"
        )
    if ":" not in source:
        raise InputError(
            f"{source!r} is neither a .pt2 or .onnx file, a directory, nor package.module:factory"
        )
    model = load_factory(source)
    return Loaded(source, load_weights(model, weights) if weights is not None else model, None)


def _directory(source: str, batch: int) -> Loaded:
    from equipoise.checkpoints.huggingface import is_hugging_face, load_hugging_face

    path = Path(source) / "config.json"
    config = read_json(path) if path.is_file() else None
    if isinstance(config, dict) and is_hugging_face(config):
        return Loaded(source, *load_hugging_face(Path(source), config))
    program = path.with_name("model.pt2")
    if config is None and program.is_file():  # what `equipoise train --from` leaves
        return load_model(program, batch=batch)
    return Loaded(source, *load_checkpoint(source))


def _onnx(source: str) -> Loaded:
    from equipoise.onnx import load_onnx

    network = load_onnx(source)
    shapes = network.input_shapes
    one = shapes[0][1:] if len(shapes) == 1 and len(shapes[0]) > 1 else None
    return Loaded(source, network, one, network.examples())


def program_input(program: ExportedProgram) -> torch.Tensor | None:
    """The one tensor that a program takes, without its numbers; None where it takes something else."""
    names = program.graph_signature.user_inputs
    values = [
        n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder" and n.name in names
    ]
    return values[0] if len(values) == 1 and isinstance(values[0], torch.Tensor) else None


def load_factory(spec: str, arguments: dict[str, Any] | None = None) -> nn.Module:
    """`package.module:factory` as the user typed it, called; it must return a module.

    For names that come from a file use `equipoise.checkpoints.builders.build_registered`.

    Args:
        spec: the name, which is imported.
        arguments: of the factory.
    """
    model = target = resolve(spec)
    if callable(target) and not isinstance(target, nn.Module):
        model = guarded(lambda: target(**(arguments or {})), repr(spec))
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec!r} gave a {type(model).__name__}, not an nn.Module")
    return model.eval()
