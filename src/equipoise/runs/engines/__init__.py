"""Engines: what turns pending inputs into rows. They never touch the store; the parent alone writes it.

An engine is a function of a picklable `TaskSpec`, an iterator of inputs (pull from it only as fast as they are worked off:
each one holds a tensor) and an `Execution`; it yields one `Row` per input, in any order. An input that is lost with its
worker is simply computed again: rows are pure functions of the spec and the input. Closing the generator must stop the work.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from equipoise.core import InputError
from equipoise.core.imports import resolve
from equipoise.runs.rows import Item, Row
from equipoise.runs.tasks import TaskSpec


@dataclass(frozen=True)
class Execution:
    """How to run, never what to compute: number of workers, the address of a cluster, GPUs per worker if the device is one.

    `gpus=0.5` lets two workers share a GPU.
    """

    workers: int = 1
    address: str | None = None
    gpus: float = 1.0


class Engine(Protocol):
    """`engine(spec, items, execution)` yields a row for every item."""

    def __call__(self, spec: TaskSpec, items: Iterator[Item], execution: Execution) -> Iterator[Row]:
        """Yield a row for every item, in any order."""
        ...


#: name → `module:function`; a new engine is a new row
ENGINES: dict[str, str] = {"local": "equipoise.runs.engines.local:run", "ray": "equipoise.runs.engines.ray:run"}


def find_engine(name: str, execution: Execution) -> Engine:
    """The engine of that name, imported when asked for; refused if it cannot work as asked."""
    if name not in ENGINES:
        raise InputError(f"unknown engine {name!r}: expected one of {', '.join(ENGINES)}")
    if execution.workers < 1:
        raise InputError(f"the number of workers must be positive, got {execution.workers}")
    if not (0 < execution.gpus < 1 or (execution.gpus >= 1 and float(execution.gpus).is_integer())):
        raise InputError(f"GPUs per worker are a share below 1 or a whole number, got {execution.gpus}")
    if name == "local" and (execution.workers > 1 or execution.address is not None):
        raise InputError("the local engine works in this process alone: for several workers use --engine ray")
    try:
        engine: Engine = resolve(ENGINES[name])
    except InputError as error:
        if not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        missing = error.__cause__.name or name
        hint = (
            f"pip install 'equipoise[{name}]'"
            if not missing.startswith("equipoise")
            else "it is not part of this installation"
        )
        raise InputError(f"the engine {name!r} needs {missing}: {hint}") from error
    return engine
