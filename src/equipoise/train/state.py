"""The run directory: what it was asked, how far it came, and everything needed to go on bit by bit.

```
recipe.json                    the recipe and the data's fingerprint, compared at every start
metrics.jsonl                  one line per epoch
state/step-00000120.safetensors  weights, EMA, optimizer, random states; the header holds the position as JSON
model.safetensors, config.json   the finished network, an equipoise checkpoint
```

Each file is written whole or not at all; nothing is pickled.
"""

import contextlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.core.digests import Digest, digest_document
from equipoise.core.errors import InputError
from equipoise.core.files import atomic_write, locked, open_regular, read_bounded, read_json

#: the temporary names of `atomic_write`
_LEFTOVER = re.compile(
    r"^\.(recipe\.json|metrics\.jsonl|model\.safetensors|config\.json|certificate\.json|README\.md|summary\.json"
    r"|step-\d+\.safetensors)\.\w+(\.part)?$"
)
Optim = torch.optim.Optimizer
_LARGEST = 1_000_000_000  # bytes of the metrics


@dataclass
class State:
    """Tensors by name (`model/…`, `ema/…`, `optimiser/…`, `random/…`, `epoch/…`) and the position as plain data."""

    tensors: dict[str, Tensor]
    position: dict[str, Any] = field(default_factory=dict)

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors below a prefix, with their own names."""
        return {k.removeprefix(prefix + "/"): v for k, v in self.tensors.items() if k.startswith(prefix + "/")}


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under a prefix."""
    return {f"{prefix}/{name}": value for name, value in tensors.items()}


def optimizer_state(optimizer: Optim) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state as flat tensors and plain numbers (`i/name`, i the parameter's place)."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for index, entries in optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}/{name}"] = value
            elif value is None or isinstance(value, bool | int | float | str):
                plain[f"{index}/{name}"] = value
            else:
                raise InputError(f"the optimizer keeps {name!r} as {type(value).__name__}: it cannot be checkpointed")
    return tensors, plain


def restore_optimizer(optimizer: Optim, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Put back what `optimizer_state` gave; hyperparameters stay those of the recipe."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **plain}.items():
        index, _, name = key.partition("/")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class RunDirectory:
    """A folder that belongs to one recipe; only one process at a time trains in it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._hold = contextlib.ExitStack()

    def open(self, document: Mapping[str, Any]) -> State | None:
        """Claim the folder for this recipe (`document`), and give the last state if there is one."""
        path = self.folder / "recipe.json"
        try:
            strange = [] if path.exists() else self._strange()
            if strange:
                raise InputError(
                    f"{self.folder} is not empty and no training run (it holds {strange[0]!r}): choose another --run-dir"
                )
            (self.folder / "state").mkdir(parents=True, exist_ok=True)
            self._hold.enter_context(locked(self.folder / ".lock", self._busy()))
            self._tidy()
        except OSError as error:
            raise InputError(f"cannot train in {self.folder}: {error.strerror}") from error
        if path.exists():
            self._compare(path, document)
        else:
            atomic_write(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        states = self.states()
        return read_state(states[-1]) if states else None

    def _strange(self) -> list[str]:
        """What is in the folder and is not ours."""
        if not self.folder.exists():
            return []
        names = sorted(p.name for p in self.folder.iterdir())
        return [n for n in names if n not in (".lock", "state") and not _LEFTOVER.match(n)]

    def _tidy(self) -> None:
        """Remove what a killed process was writing; we hold the lock, so nobody writes it now."""
        for place in (self.folder, self.folder / "state"):
            for item in place.iterdir():
                if _LEFTOVER.match(item.name):
                    item.unlink(missing_ok=True)

    def close(self) -> None:
        """Let others train here."""
        self._hold.close()

    def _busy(self) -> str:
        return f"another process trains in {self.folder}: wait for it, or choose another --run-dir"

    def _compare(self, path: Path, document: Mapping[str, Any]) -> None:
        try:
            before = read_json(path)
        except InputError as error:
            raise InputError(f"{path} cannot be read: remove {self.folder} or choose another --run-dir") from error
        changes = differences(_completed(before), json.loads(json.dumps(document)))
        if changes:
            raise InputError(
                f"{self.folder} belongs to another recipe ({'; '.join(changes)}): "
                "choose another --run-dir, or remove this one"
            )

    def states(self) -> list[Path]:
        """The checkpoints, oldest first."""
        return sorted((self.folder / "state").glob("step-*.safetensors"))

    def save(self, state: State, keep: int = 2) -> Path:
        """Write a checkpoint, then remove all but the last `keep`."""
        from safetensors.torch import save

        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.tensors.items()}
        path = self.folder / "state" / f"step-{state.position['step']:010d}.safetensors"
        position = json.dumps(state.position)
        atomic_write(path, save(tensors, metadata={"position": position, "digest": _digest(tensors, position)}))
        for old in self.states()[:-keep]:
            old.unlink(missing_ok=True)
        return path


def _digest(tensors: Mapping[str, Tensor], position: str) -> str:
    digest = Digest("training state").add("position", position)
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return str(digest)


def read_state(path: Path) -> State:
    """A checkpoint from its file; nothing in it is executed, and one that was changed is refused.

    States of the first release have no digest and are believed.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(path), safe_open(path, framework="pt") as file:
            noted = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if noted.get("digest") not in (None, _digest(tensors, noted["position"])):
            raise ValueError("its digest does not fit")
        return State(tensors, json.loads(noted["position"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(f"the checkpoint {path} is damaged: remove it to go on from the one before") from error


def _completed(document: Any) -> Any:
    """A stored recipe with today's spelling and defaults, so that a run of an earlier release goes on."""
    from equipoise.train.reading import check, numbers

    if not isinstance(document, dict) or not isinstance(document.get("recipe"), dict):
        return document
    with warnings.catch_warnings(), contextlib.suppress(InputError):  # what is no recipe differs from every one
        warnings.simplefilter("ignore", FutureWarning)
        return {**document, "recipe": json.loads(json.dumps(check(numbers(document["recipe"])).to_dict()))}
    return document


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """What changed between two documents, `key: before → after`.

    >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "d": 4})
    ['a.b: 1 → 3', 'c: 2 → nothing', 'd: nothing → 4']
    """
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(k for k in after if k not in before)]
        absent = object()
        found = []
        for k in keys:
            a, b = before.get(k, absent), after.get(k, absent)
            name = f"{path}.{k}" if path else str(k)
            if a is absent or b is absent:
                found.append(f"{name}: {'nothing' if a is absent else a} → {'nothing' if b is absent else b}")
            else:
                found += differences(a, b, name)
        return found
    return [] if before == after else [f"{path}: {before} → {after}"]


class MetricsFile:
    """`metrics.jsonl`: a line per epoch with its checksum, appended and flushed; a torn last line is dropped on reading."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """The rows that are whole; a row that was changed after it was written is refused, the last may be torn."""
        if not self.path.exists():
            return []
        rows: list[dict[str, Any]] = []
        checked = False
        lines = read_bounded(self.path, _LARGEST).decode("utf-8", errors="replace").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                row, end = json.JSONDecoder().raw_decode(line)
            except (ValueError, RecursionError):
                row, end = None, -1
            if end < 0 and number == len(lines) and not line.endswith("\n"):
                break  # torn: the process was killed while it wrote it
            noted = row.pop("check", None) if isinstance(row, dict) else ""
            checked = checked or noted is not None  # the first release wrote none at all
            if not isinstance(row, dict) or line[end:] != "\n" or (checked and noted != _check(row)):
                raise self._damaged(f"in line {number}")
            rows.append(row)
        return rows

    def _damaged(self, where: str) -> InputError:
        return InputError(f"{self.path} is damaged {where}: remove it, and the run is measured again")

    def rewind(self, epoch: int) -> list[dict[str, Any]]:
        """Keep the rows up to this epoch, forget later ones (they will be computed again), and give the kept ones."""
        rows = [row for row in self.read() if row.get("epoch", 0) <= epoch]
        if self.path.exists():
            seen = [row.get("epoch", 0) for row in rows]
            if seen != sorted(set(seen)) or (epoch and seen[-1:] != [epoch]):
                raise self._damaged(f"(it holds the epochs {seen} of {epoch})")
            atomic_write(self.path, "".join(_line(row) for row in rows))
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(row))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}") from error


def _check(row: Mapping[str, Any]) -> str:
    return digest_document(json.loads(json.dumps(row)))[7:23]


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps({**row, "check": _check(row)}, allow_nan=False) + "\n"
