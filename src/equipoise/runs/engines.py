"""Engines turn pending inputs into rows, in this process or on a Ray cluster. They never touch the store: the parent writes it.

Rows are pure functions of the spec and the input, so an input that is lost with its worker is simply computed again, by Ray's
own restarts, and the table is that of the local engine.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line, require_one_of
from equipoise.runs.inputs import Item
from equipoise.runs.models import hash_module
from equipoise.runs.settings import versions
from equipoise.runs.store import Row
from equipoise.runs.workers import TaskSpec

#: inputs in flight per worker: memory does not grow with the data
AHEAD = 2


@dataclass(frozen=True)
class Execution:
    """How to run, never what to compute.

    Args:
        engine: "local" or "ray".
        workers: of the Ray engine.
        address: of an existing Ray cluster; None: one on this machine, started and stopped here.
        gpus: per worker, where the device is one; 0.5 lets two workers share a GPU.
    """

    engine: str = "local"
    workers: int = 1
    address: str | None = None
    gpus: float = 1.0

    def __post_init__(self) -> None:
        require_one_of(("local", "ray"), engine=self.engine)
        if not isinstance(self.workers, int) or not 1 <= self.workers <= 100_000:
            raise InputError(f"the number of workers must be positive, got {self.workers}")
        if self.engine == "local" and (self.workers > 1 or self.address is not None):
            raise InputError("the local engine works in this process alone: for several workers use --engine ray")

    def run(self, spec: TaskSpec, items: Iterator[Item]) -> Iterator[Row]:
        """Yield a row for every item, in any order; closing the generator stops the work.

        Args:
            spec: what to compute.
            items: pulled from only as fast as they are worked off.
        """
        if self.engine == "local":
            return map(spec.worker(), items)
        return _run_on_ray(spec, items, self)


class RayWorker:
    """One worker process of a Ray cluster: built once, then asked for one row after the other."""

    def __init__(self, payload: bytes, path: list[str], expected: dict[str, str]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        spec: TaskSpec = pickle.loads(payload)  # only now: its classes may lie on the path of the first process
        here = versions()
        wrong = [f"{name} {here[name]} instead of {value}" for name, value in expected.items() if here[name] != value]
        if wrong:
            raise Refused(
                f"a worker has {', '.join(wrong)}: its noise may differ; install the same versions everywhere"
            )
        if spec.device == "cpu":
            torch.set_num_threads(1)
        self._require_same_code(spec)
        self.worker = spec.worker()

    def _require_same_code(self, spec: TaskSpec) -> None:
        """Classes are read from each machine's own files: another version must not take part in this run."""
        payload = spec.model.payload
        if not isinstance(payload, nn.Module) or any(type(m).__module__ == "__main__" for m in payload.modules()):
            return  # programs and classes of the main script are sent whole
        if hash_module(payload) != spec.model.code:
            raise Refused(f"a worker's code of {spec.model.source} differs: put the same files on every machine")

    def row(self, item: Item) -> Row:
        """The row of one input."""
        return self.worker(item)


def _run_on_ray(spec: TaskSpec, items: Iterator[Item], execution: Execution) -> Iterator[Row]:
    try:
        import ray
        from ray.exceptions import RayError, RayTaskError
    except ImportError as error:
        raise InputError("the engine 'ray' needs ray: pip install 'equipoise[ray]'") from error

    started, team = not ray.is_initialized(), list[Any]()
    try:
        if started:
            _start(ray, execution)
        gpus = execution.gpus if torch.device(spec.device).type == "cuda" else 0
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 3, "max_task_retries": 3}
        kind: Any = ray.remote(**options)(RayWorker)  # type: ignore[call-overload]
        path = [entry or os.getcwd() for entry in sys.path]
        expected = {name: value for name, value in versions().items() if name in ("equipoise", "torch", "numpy")}
        payload = ray.put(ray.cloudpickle.dumps(_portable_spec(spec)))
        team = [kind.remote(payload, path, expected) for _ in range(execution.workers)]

        idle: deque[Any] = deque(team * AHEAD)
        flying: dict[Any, Any] = {}
        while True:
            while idle and (item := next(items, None)) is not None:
                actor = idle.popleft()
                flying[actor.row.remote(item)] = actor
            if not flying:
                return
            done, _ = ray.wait(list(flying), num_returns=1)
            idle.append(flying.pop(done[0]))
            yield ray.get(done[0])
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, EquipoiseError):
            raise type(cause)(*cause.args) from error
        raise InputError(f"a worker failed: {one_line(cause or error)}") from error
    except (RayError, ConnectionError, TypeError, RuntimeError) as error:
        cause = getattr(error, "cause", None) or error
        raise InputError(
            f"Ray could not do it ({_last_line(cause)}): what is stored is kept; a model that cannot be sent to other "
            "processes can be saved as a .pt2 file, and a smaller --batch-size needs less memory"
        ) from error
    finally:
        if started and ray.is_initialized():
            ray.shutdown()
        for actor in [] if started else team:
            ray.kill(actor)


def _start(ray: Any, execution: Execution) -> None:
    """Join the cluster, or start one of this machine on the loopback address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own = {} if execution.address else {"num_cpus": execution.workers, "_node_ip_address": "127.0.0.1"}
    ray.init(
        address=execution.address or "local", include_dashboard=None if execution.address else False,
        log_to_driver=False, logging_level="ERROR", **own,
    )  # fmt: skip


def _portable_spec(spec: TaskSpec) -> TaskSpec:
    """With the model's tensors on the CPU and the device without its number."""
    model, device = spec.model, torch.device(spec.device).type
    if isinstance(model.payload, nn.Module) and device != "cpu":
        model = replace(model, payload=copy.deepcopy(model.payload).cpu())
    return replace(spec, model=model, device=device)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
