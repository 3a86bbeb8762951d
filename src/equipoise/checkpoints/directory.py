"""Checkpoint directories: `model.safetensors`, and `config.json` with the builder's name, its arguments and a digest.

`digest` covers both files, so that a flipped bit, an edit or a swapped file is noticed. It is evidence against accidents and
naive edits, not a signature: who can write both files can write a digest that fits.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.checkpoints.builders import build_registered, registered
from equipoise.core.digests import digest_bytes, sealed, unsealed
from equipoise.core.errors import InputError, Refused, one_line
from equipoise.core.files import atomic_write, make_folder, parse_json, read_bounded, read_json

#: a weights file longer than this is not read
LARGEST_WEIGHTS = 2**40
_LARGEST_HEADER = 100_000_000


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    factory: str,
    arguments: Mapping[str, Any] | None = None,
    input_shape: tuple[int, ...] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write `model.safetensors` and `config.json`, each whole or not at all, so that `load_checkpoint` gives the model back.

    `factory` is a registered builder (`equipoise.nn.models.factory("mlp")`). `extra` is kept in `config.json` under its own keys
    (training epoch, metrics, certificate); it is never executed.
    """
    from safetensors.torch import save

    folder = Path(folder)
    if not registered(factory):
        raise Refused(
            f"{factory!r} is no registered model, so no checkpoint could name it: register it "
            "(equipoise.checkpoints.register_model, or an entry point), or keep the weights alone"
        )
    config = {"factory": factory, "arguments": dict(arguments or {}), "input_shape": input_shape, **(extra or {})}
    state = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    make_folder(folder)
    weights = save(state)
    config["weights"] = digest_bytes(weights)
    config = sealed(config)
    atomic_write(folder / "model.safetensors", weights)
    atomic_write(folder / "config.json", json.dumps(config, indent=2, allow_nan=False) + "\n")
    return folder


def load_checkpoint(folder: str | Path) -> tuple[nn.Module, tuple[int, ...] | None]:
    """A checkpoint directory: one safetensors file, and a `config.json` with `factory`, `arguments` and `input_shape`.

    The factory must be a registered builder: a file does not choose which other code runs. Checkpoints of the first release
    carry no digest; they open, and only what does not fit is noticed.
    """
    folder = Path(folder)
    where = str(folder / "config.json")
    config = unsealed(read_json(folder / "config.json"), where)
    factory = config.get("factory") if isinstance(config, dict) else None
    if not isinstance(factory, str):
        raise InputError(f"{where} names no factory")
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise InputError(f"{folder} must hold one .safetensors file, it holds {len(files)}")
    state = read_weights(files[0], config.get("weights"))
    elements = sum(value.numel() for value in state.values())
    model = build_registered(factory, config.get("arguments"), where, elements, len(state))
    return fill(model, state, files[0]), _shape(config.get("input_shape"), where)


def _shape(value: Any, where: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    fine = isinstance(value, list) and 1 <= len(value) <= 8
    if not fine or not all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 2**24 for n in value):
        raise InputError(f"{where}: input_shape must be a list of positive whole numbers, got {str(value)[:100]}")
    return tuple(value)


def load_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """Weights from a safetensors file into the model, every name accounted for; other formats are refused."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise Refused(
            f"weights are read from .safetensors only, got {path.name!r}: pickled checkpoints can run code; convert it first"
        )
    return fill(model, read_weights(path), path)


def read_weights(path: Path, digest: Any = None) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file whose header is sound (and whose content has this digest, where one is known)."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    content = read_bounded(path, LARGEST_WEIGHTS)
    if digest is not None and digest != digest_bytes(content):
        raise InputError(f"{path} is not the file that its config.json was written with (the digest does not fit)")
    length = int.from_bytes(content[:8], "little")
    if length > min(_LARGEST_HEADER, len(content) - 8):
        raise InputError(f"cannot read {path}: its header is longer than the file")
    parse_json(content[8 : 8 + length], f"the header of {path}")
    try:
        return load(content)
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, OverflowError, AttributeError) as error:
        raise InputError(f"cannot read {path}: {one_line(error)[:160]}") from error


def fill(model: nn.Module, state: Mapping[str, torch.Tensor], path: Path) -> nn.Module:
    """Put tensors into a model, every name accounted for."""
    try:
        missing, extra = model.load_state_dict(dict(state), strict=False)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(f"the weights of {path} do not fit the model: {_mismatch(error)}") from error
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    extra = [name for name in extra if not name.endswith("num_batches_tracked")]
    if missing or extra:
        what = [f"{len(v)} {k} (first: {v[0]})" for k, v in (("missing", missing), ("unknown", extra)) if v]
        raise InputError(f"the weights of {path} do not fit the model: {' and '.join(what)}")
    return model.eval()


def _mismatch(error: Exception) -> str:
    """What PyTorch says below its heading: the first parameter that does not fit, with both shapes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[1] if len(lines) > 1 else one_line(error))[:160]
