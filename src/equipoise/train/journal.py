"""The folder of a run: its recipe, how far it came, and everything needed to continue bit by bit.

```
recipe.json          the recipe and the data's fingerprint, compared at every start
metrics.jsonl        one line per epoch
state/state.safetensors   weights, average, optimizer, generators; its header holds the position and the metrics so far
model.safetensors, config.json, certificate.json, README.md   the finished network
```

Each file is written whole or not at all; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from equipoise.core.errors import InputError
from equipoise.core.files import Digest, atomic_write, locked, open_regular, read_json
from equipoise.train.config import Document

STATE = "state/state.safetensors"
_Count = Annotated[int, Field(ge=0, le=10**15)]
#: what is stored of every part of a run (`model`, `optimizer/0`, …), by name: tensors and plain values
State = dict[str, Document]


class Position(BaseModel):
    """Where a run is: finished epochs, batches of the current one, steps; a row per epoch; the state's plain values."""

    model_config = ConfigDict(extra="forbid", strict=True)
    epoch: _Count
    batch: _Count
    step: _Count
    history: list[Document]
    plain: dict[str, bool | int | float | str | None] = {}


class Journal:
    """A folder that belongs to one recipe; only one process at a time trains in it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock = contextlib.ExitStack()

    def open(self, document: Mapping[str, Any]) -> tuple[State, Position] | None:
        """Claim the folder for this recipe and its data, and read the last state if there is one."""
        path = self.folder / "recipe.json"
        try:
            # what a killed start left (the state's folder, locks, temporary files) does not count
            names = [] if path.exists() or not self.folder.exists() else [p.name for p in self.folder.iterdir()]
            foreign = [name for name in names if name != "state" and not name.startswith(".")]
            if foreign:
                raise InputError(
                    f"{self.folder} holds {foreign[0]!r} and no training run: choose another, empty --run-dir"
                )
            (self.folder / "state").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot train in {self.folder}: {error.strerror}") from error
        busy = f"another process trains in {self.folder}: wait for it, or choose another --run-dir"
        self._lock.enter_context(locked(self.folder / ".lock", busy))
        if path.exists():
            stored: Any = read_json(path)
            changed = [key for key, value in document.items() if stored.get(key) != value]
            if changed:
                listed = "; ".join(f"{key}: {stored.get(key)} → {document[key]}" for key in changed)
                raise InputError(
                    f"{self.folder} belongs to another recipe ({listed}): choose another --run-dir, or remove this one"
                )
        else:
            atomic_write(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        return read_state(self.folder / STATE) if (self.folder / STATE).exists() else None

    def save(self, state: State, position: Position) -> None:
        """Replace the stored state.

        Args:
            state: tensors and plain values.
            position: where the run is.
        """
        from safetensors.torch import save

        flat = {f"{part}|{name}": value for part, named in state.items() for name, value in named.items()}
        tensors = {name: v.detach().cpu().contiguous().clone() for name, v in flat.items() if isinstance(v, Tensor)}
        plain = {name: value for name, value in flat.items() if name not in tensors}
        text = position.model_copy(update={"plain": plain}).model_dump_json()
        metadata = {"position": text, "digest": _digest(tensors, text)}
        atomic_write(self.folder / STATE, save(tensors, metadata=metadata))

    def write_metrics(self, history: list[Document]) -> None:
        """Replace `metrics.jsonl`."""
        lines = [json.dumps(row, allow_nan=False) + "\n" for row in history]
        atomic_write(self.folder / "metrics.jsonl", "".join(lines))

    def close(self) -> None:
        """Let others train here."""
        self._lock.close()


def read_state(path: Path) -> tuple[State, Position]:
    """A state and its position; nothing in it is executed, and one that was changed is refused."""
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(path), safe_open(path, framework="pt") as file:
            header = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header["digest"] != _digest(tensors, header["position"]):
            raise ValueError("its digest does not fit")
        position = Position.model_validate_json(header["position"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"the state {path} is damaged: remove it and the run starts over") from error
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
