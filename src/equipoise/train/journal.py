"""The folder of a run: its recipe, how far it came, and everything needed to continue bit by bit.

```
recipe.json          the recipe and the data's fingerprint, compared at every start
metrics.jsonl        one line per epoch
state/state.safetensors   weights, average, optimizer, generators; its header holds the position and the metrics so far
model.safetensors, config.json, certificate.json, README.md   the finished network
```

Each file is written whole or not at all; nothing is pickled.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from equipoise.checkpoints import tensor_bytes
from equipoise.core import InputError, files
from equipoise.core.files import (
    Count,
    Digest,
    atomic_write,
    locked,
    make_folder,
    open_weights,
    read_json,
    write_json,
)
from equipoise.train.config import Plain

STATE = "state/state.safetensors"
#: what is stored of every part of a run (`model`, `optimizer/0`, …), by name: tensors and plain values
State = dict[str, Plain]


class Position(files.Document):
    """Where a run is: finished epochs, batches of the current one, steps; a row per epoch; the state's plain values."""

    epoch: Count
    batch: Count
    step: Count
    history: list[Plain]
    plain: dict[str, bool | int | float | str | None] = Field(default={})


def claim(
    folder: Path, document: Mapping[str, Any], stack: contextlib.ExitStack
) -> tuple[State, Position] | None:
    """Make the folder that of this recipe and its data, or refuse; its last state if there is one.

    Args:
        folder: of the run.
        document: the recipe and the data's fingerprint.
        stack: keeps the lock: only one process at a time trains in a folder.
    """
    path = folder / "recipe.json"
    if not path.exists():
        # what a killed start left (the state's folder, locks, temporary files) does not count
        names = [item.name for item in folder.glob("[!.]*") if item.name != "state"]
        if names:
            raise InputError(
                f"{folder} holds {names[0]!r} and no training run: choose another, empty --run-dir"
            )
    make_folder(folder / "state")
    busy = f"another process trains in {folder}: wait for it, or choose another --run-dir"
    stack.enter_context(locked(folder / ".lock", busy))
    if path.exists():
        stored = read_json(path)
        changed = [key for key, value in document.items() if stored.get(key) != value]
        if changed:
            listed = "; ".join(f"{key}: {stored.get(key)} → {document[key]}" for key in changed)
            raise InputError(
                f"{folder} belongs to another recipe ({listed}): choose another --run-dir, or remove this one"
            )
    else:
        write_json(path, document)
    return read_state(folder / STATE) if (folder / STATE).exists() else None


def save_state(folder: Path, state: State, position: Position) -> None:
    """Replace the stored state.

    Args:
        folder: of the run.
        state: tensors and plain values.
        position: where the run is.
    """
    flat = {f"{part}|{name}": v for part, named in state.items() for name, v in named.items()}
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in flat.items() if name not in tensors}
    text = position.model_copy(update={"plain": plain}).model_dump_json()
    metadata = {"position": text, "digest": _digest(tensors, text)}
    atomic_write(folder / STATE, tensor_bytes(tensors, metadata))


def write_metrics(folder: Path, history: list[Plain]) -> None:
    """Replace `metrics.jsonl`.

    Args:
        folder: of the run.
        history: a row per epoch.
    """
    lines = [json.dumps(row, allow_nan=False) + "\n" for row in history]
    atomic_write(folder / "metrics.jsonl", "".join(lines))


def read_state(path: Path) -> tuple[State, Position]:
    """A state and its position; nothing in it is executed, and one that was changed is refused."""
    try:
        with open_weights(path) as file:
            header = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header["digest"] != _digest(tensors, header["position"]):
            raise ValueError("its digest does not fit")
        position = Position.model_validate_json(header["position"])
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(
            f"the state {path} is damaged: remove it and the run starts over"
        ) from error
    state: State = {}
    for key, value in {**tensors, **position.plain}.items():
        part, _, name = key.partition("|")
        state.setdefault(part, {})[name] = value
    return state, position


def _digest(tensors: Mapping[str, Tensor], position: str) -> str:
    digest = Digest("training state").add("position", position)
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return str(digest)
