"""Checkpoint directories: `model.safetensors`, and `config.json` with the builder's name, its arguments and a digest.

`digest` covers both files, so that a flipped bit, an edit or a swapped file is noticed. It is evidence against accidents and
naive edits, not a signature: who can write both files can write a digest that fits.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from torch import nn

from equipoise.checkpoints.builders import build_registered, registered
from equipoise.core import InputError, Refused, Shape
from equipoise.core.files import (
    Document,
    atomic_write,
    check_document,
    digest_bytes,
    make_folder,
    open_weights,
    read_bounded,
    read_json,
    sealed,
    unsealed,
    write_json,
)

#: a weights file longer than this is not read
LARGEST_WEIGHTS = 2**40


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    factory: str,
    arguments: Mapping[str, Any] | None = None,
    input_shape: Shape | None = None,
) -> Path:
    """Write `model.safetensors` and `config.json`, each whole or not at all, so that `load_checkpoint` gives the model back.

    Args:
        folder: made where it is not there.
        model: whose weights are stored.
        factory: a registered builder (`equipoise.nn.models.factory("mlp")`).
        arguments: of the builder.
        input_shape: of one input.
    """
    folder = Path(folder)
    if not registered(factory):
        raise Refused(
            f"{factory!r} is no registered model, so no checkpoint could name it: register it "
            "(equipoise.checkpoints.register_model, or an entry point), or keep the weights alone"
        )
    make_folder(folder)
    weights = tensor_bytes(model.state_dict())
    config = sealed(
        {
            "factory": factory,
            "arguments": dict(arguments or {}),
            "input_shape": input_shape,
            "weights": digest_bytes(weights),
        }
    )
    atomic_write(folder / "model.safetensors", weights)
    write_json(folder / "config.json", config)
    return folder


def tensor_bytes(
    tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> bytes:
    """The content of a safetensors file.

    Args:
        tensors: by name; they may share memory.
        metadata: texts for its header.
    """
    from safetensors.torch import save

    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    return save(own, metadata)


class Config(Document):
    """What `config.json` of a checkpoint says; further keys (epoch, metrics) are kept and never executed.

    Attributes:
        factory: the name of a registered builder.
        arguments: of the builder.
        input_shape: of one input.
        weights: the digest of the weights file.
    """

    model_config = ConfigDict(extra="allow")
    factory: str = Field(max_length=200)
    arguments: dict[str, Any] | None = None
    input_shape: tuple[Annotated[int, Field(ge=1, le=2**24)], ...] | None = Field(
        None, min_length=1, max_length=8
    )
    weights: str | None = None


def load_checkpoint(folder: str | Path) -> tuple[nn.Module, Shape | None]:
    """A checkpoint directory: one safetensors file, and a `config.json` with `factory`, `arguments` and `input_shape`.

    The factory must be a registered builder: a file does not choose which other code runs. A `config.json` that was written
    by hand may lack digests; where they are there, they must fit.
    """
    folder = Path(folder)
    where = str(folder / "config.json")
    config = check_document(unsealed(read_json(folder / "config.json"), where), Config, where)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise InputError(f"{folder} must hold one .safetensors file, it holds {len(files)}")

    state = read_weights(files[0], config.weights)
    elements = sum(value.numel() for value in state.values())
    model = build_registered(config.factory, config.arguments, where, elements, len(state))
    return fill(model, state, files[0]), config.input_shape


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Weights from a safetensors file into the model, every name accounted for; other formats are refused.

    Args:
        model: the model, which is filled and returned in evaluation mode.
        path: the file.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise Refused(
            f"weights are read from .safetensors only, got {path.name!r}: pickled checkpoints can run code; convert it first"
        )
    return fill(model, read_weights(path), path)


def read_weights(path: Path, digest: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file.

    Args:
        path: the file.
        digest: of its content, where it is known.
    """
    if digest is not None and digest != digest_bytes(read_bounded(path, LARGEST_WEIGHTS)):
        raise InputError(
            f"{path} is not the file that its config.json was written with (the digest does not fit)"
        )
    with open_weights(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary


def fill(model: nn.Module, state: Mapping[str, torch.Tensor], path: Path) -> nn.Module:
    """Put tensors into a model, every name accounted for.

    Half precision becomes the model's own format, which is exact; integers in place of weights would be another network.

    Args:
        model: the model.
        state: tensors by name.
        path: of their file, for error messages.
    """
    for name, value in model.state_dict().items():
        stored = state.get(name, value)
        if value.is_floating_point() and (
            not stored.is_floating_point() or stored.element_size() == 1
        ):
            raise Refused(
                f"{path} stores {name} as {stored.dtype}: quantised weights are not read, store them as float32"
            )
    try:
        missing, extra = model.load_state_dict(dict(state), strict=False)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(
            f"the weights of {path} do not fit the model: {str(error).splitlines()[-1].strip()[:160]}"
        ) from error
    for what, names in (("missing", missing), ("unknown", extra)):
        names = [name for name in names if not name.endswith("num_batches_tracked")]
        if names:
            raise InputError(
                f"the weights of {path} do not fit the model: {len(names)} {what} (first: {names[0]})"
            )
    return model.eval()
