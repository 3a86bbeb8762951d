"""The Ray engine: actors that hold the model, on this machine or on a cluster; a lost worker's inputs are done again.

Rows are pure functions of the spec and the input, so whichever worker computes one, and however often, the table is that of
the local engine. Actors on a CPU use one torch thread each. At most `AHEAD` inputs per worker are in flight: memory does not
grow with the data.
"""

import copy
import logging
import os
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from torch import nn

from equipoise.core import EquipoiseError, InputError, Refused
from equipoise.runs.engines import Execution
from equipoise.runs.manifest import versions
from equipoise.runs.models import hash_module
from equipoise.runs.rows import Item, Row
from equipoise.runs.tasks import TaskSpec

AHEAD = 2
ATTEMPTS = 3
START_SECONDS = 180.0
_MEGABYTE = 1 << 20
_LOST = (RayActorError, OutOfMemoryError, WorkerCrashedError, NodeDiedError, ObjectLostError)


def run(spec: TaskSpec, items: Iterator[Item], execution: Execution) -> Iterator[Row]:
    """Yield a row for every item, in the order in which workers finish them.

    Joins `execution.address`, or the cluster this process is already connected to; otherwise starts one on the loopback
    address and stops it at the end. Closing the generator stops the work.
    """
    payload = pack(spec)
    with connected(execution, len(payload)):
        team = Team(payload, spec.device, execution)
        try:
            yield from team.rows(items)
        finally:
            team.dismiss()


def pack(spec: TaskSpec) -> bytes:
    """The spec as bytes that any worker can read: the model's tensors on the CPU, the device without its number."""
    model, device = spec.model, torch.device(spec.device).type
    if isinstance(model.payload, nn.Module):
        tensors = (*model.payload.parameters(), *model.payload.buffers())
        if any(t.device.type != "cpu" for t in tensors):
            model = replace(model, payload=copy.deepcopy(model.payload).cpu())
    try:
        return cloudpickle.dumps(replace(spec, model=model, device=device))
    except (TypeError, AttributeError, ValueError, RuntimeError, OSError) as error:
        raise InputError(
            f"the model {model.source} cannot be sent to other processes ({error}): save it as a .pt2 file or give it as "
            "package.module:factory"
        ) from error


class Member:
    """One worker process: built once, then asked for one row after the other."""

    def build(self, payload: bytes, path: list[str], expected: dict[str, str]) -> None:
        """Rebuild the model here; refused where it, or the software, is not that of the process that asks."""
        sys.path.extend(entry for entry in path if entry not in sys.path)
        found = versions()
        wrong = [f"{k} {found[k]} instead of {v}" for k, v in expected.items() if found[k] != v]
        if wrong:
            raise Refused(
                f"a worker has {', '.join(wrong)}: its noise may differ; install the same versions everywhere"
            )
        try:
            spec: TaskSpec = cloudpickle.loads(payload)
        except (ImportError, AttributeError) as error:
            raise InputError(
                f"a worker cannot rebuild the model ({error}): its module must be importable on every machine"
            ) from error
        if spec.device == "cpu":
            torch.set_num_threads(1)
        require_same_code(spec)
        self.worker = spec.worker()

    def row(self, item: Item) -> Row:
        """The row of one input."""
        return self.worker(item)


def require_same_code(spec: TaskSpec) -> None:
    """The code of the model's classes is read from each machine's own files: another version must not vote in this run."""
    payload = spec.model.payload
    if not isinstance(payload, nn.Module) or any(type(m).__module__ == "__main__" for m in payload.modules()):
        return  # programs and classes of the main script travel whole
    if hash_module(payload) != spec.model.hash:
        raise Refused(
            f"a worker's code of {spec.model.source} differs from that of the process that started the run: "
            "put the same files on every machine"
        )


@dataclass(eq=False)
class _Seat:
    """A worker as its employer sees it: whether it is built, and what it was given, oldest first."""

    actor: Any
    built: Any
    ready: bool = False
    given: deque[tuple[Any, Item]] = field(default_factory=deque)


class Team:
    """Gives items to workers, replaces the lost ones, and gives their items out again."""

    def __init__(self, payload: bytes, device: str, execution: Execution) -> None:
        self.payload, self.path = ray.put(payload), [entry or os.getcwd() for entry in sys.path]
        gpus = execution.gpus if torch.device(device).type == "cuda" else 0
        self.kind = ray.remote(Member).options(num_cpus=1, num_gpus=gpus, max_restarts=0, max_task_retries=0)
        known = versions()
        self.expected = {k: known[k] for k in ("equipoise", "torch", "numpy")}
        self.needs = f"{execution.workers} × (1 CPU" + (f" and {gpus:g} GPU)" if gpus else ")")
        self.again: deque[Item] = deque()
        self.lost: Counter[Any] = Counter()
        self.failed_starts = 0
        self.waiting_since = time.monotonic()
        self.seats = [self._hire() for _ in range(execution.workers)]

    def _hire(self) -> _Seat:
        actor: Any = self.kind.remote()
        return _Seat(actor, actor.build.remote(self.payload, self.path, self.expected))

    def assemble(self) -> None:
        """Wait until every worker is built."""
        for seat in list(self.seats):
            if not ray.wait([seat.built], timeout=START_SECONDS)[0]:
                self.waiting_since -= START_SECONDS
                self._require_start()
            self._welcome(seat)

    def rows(self, items: Iterator[Item]) -> Iterator[Row]:
        """Rows as they come; `items` is pulled from by this thread only, when a worker has room."""
        while True:
            self._give_out(items)
            working = [seat.given[0][0] for seat in self.seats if seat.given]
            if not working and all(seat.ready for seat in self.seats):
                return
            starting = [seat.built for seat in self.seats if not seat.ready]
            if not working and not self.again and not self._peek(items):
                return
            done, _ = ray.wait(working + starting, num_returns=1, timeout=1.0)
            if not done and not working:
                self._require_start()
            for seat in list(self.seats):
                if not seat.ready and seat.built in done:
                    self._welcome(seat)
                elif seat.given and seat.given[0][0] in done:
                    yield from self._collect(seat)

    def _peek(self, items: Iterator[Item]) -> bool:
        """Whether an item is left; if so it waits to be given out."""
        item = next(items, None)
        if item is not None:
            self.again.append(item)
        return item is not None

    def _give_out(self, items: Iterator[Item]) -> None:
        for depth in range(AHEAD):  # every worker gets a first item before any gets a second
            for seat in self.seats:
                while seat.ready and len(seat.given) <= depth:
                    item = self.again.popleft() if self.again else next(items, None)
                    if item is None:
                        return
                    seat.given.append((seat.actor.row.remote(item), item))

    def _welcome(self, seat: _Seat) -> None:
        try:
            ray.get(seat.built)
        except _LOST as error:
            self.failed_starts += 1
            if self.failed_starts > ATTEMPTS * len(self.seats):
                raise InputError(f"workers die before they are ready: {_line(error)}") from error
            self._replace(seat)
        except RayTaskError as error:
            raise _translated(error) from error
        else:
            seat.ready, self.waiting_since = True, time.monotonic()

    def _collect(self, seat: _Seat) -> Iterator[Row]:
        reference, item = seat.given[0]
        try:
            row = ray.get(reference)
        except _LOST as error:  # the oldest item was being worked on: it alone may be to blame
            self.lost[item.id] += 1
            if self.lost[item.id] >= ATTEMPTS:
                raise InputError(
                    f"{ATTEMPTS} workers were lost on input {item.id!r} ({_line(error)}): out of memory, or the model crashes "
                    "on it? What is stored is kept; a smaller --batch-size needs less memory"
                ) from error
            self.again.extendleft(given for _, given in reversed(seat.given))
            self._replace(seat)
            return
        except RayTaskError as error:
            raise _translated(error) from error
        seat.given.popleft()
        yield row

    def _replace(self, seat: _Seat) -> None:
        ray.kill(seat.actor)
        self.waiting_since = time.monotonic()
        self.seats[self.seats.index(seat)] = self._hire()

    def _require_start(self) -> None:
        if time.monotonic() - self.waiting_since > START_SECONDS:
            there = ray.cluster_resources()
            has = f"{there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs"
            raise InputError(
                f"no worker has started within {START_SECONDS:g} s: asked for {self.needs}, the cluster has {has} in all"
            )

    def dismiss(self) -> None:
        """Stop every worker, whatever it is doing."""
        if ray.is_initialized():
            for seat in self.seats:
                ray.kill(seat.actor)


def _translated(error: RayTaskError) -> EquipoiseError:
    """What the worker raised, as one sentence."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, EquipoiseError):
        return type(cause)(*cause.args)
    return InputError(f"a worker failed: {_line(cause or error)}")


def _line(error: BaseException) -> str:
    """The last line that says something: Ray puts the traceback first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if isinstance(error, RayTaskError) and lines else (lines[0] if lines else "")
    return (text or type(error).__name__).rstrip(".")


@contextmanager
def connected(execution: Execution, size: int) -> Iterator[None]:
    """A connection to a cluster; what this started is stopped at the end, what was there stays."""
    if ray.is_initialized():
        own = str(ray.get_runtime_context().gcs_address)
        if execution.address not in (None, "auto", own):
            raise InputError(f"this process is already connected to the Ray cluster at {own}, not {execution.address}")
        yield
    elif execution.address is not None:
        _join(execution.address)
        try:
            yield
        finally:
            ray.shutdown()
    else:
        with local_cluster(execution.workers, size):
            yield


def _join(address: str) -> None:
    try:
        with _loopback() if _answers(address) else nullcontext():
            _quietly_init(address=address)
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise InputError(f"cannot join the Ray cluster at {address}: {_line(error)}") from error


def _answers(address: str) -> bool:
    """Fail at once where nobody listens (Ray would try for minutes); True for a cluster on the loopback address alone."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return False  # "auto" and the like: Ray's own search
    with socket.create_connection((host, int(port)), timeout=10):
        pass
    if host not in ("127.0.0.1", "localhost") or address.startswith("ray://"):
        return False
    try:
        with socket.create_connection((ray.util.get_node_ip_address(), int(port)), timeout=10):
            return False
    except OSError:
        return True


@contextmanager
def local_cluster(workers: int, size: int) -> Iterator[None]:
    """A cluster of this machine alone, on the loopback address, its files in a folder that goes with it."""
    short = "/tmp" if os.path.isdir("/tmp") else None  # paths of sockets are limited to about a hundred characters
    with tempfile.TemporaryDirectory(prefix="eq-ray-", dir=short, ignore_cleanup_errors=True) as folder:
        try:
            with _loopback():
                _quietly_init(
                    address="local", num_cpus=workers, include_dashboard=False, configure_logging=False,
                    object_store_memory=100 * _MEGABYTE + 2 * size, _node_ip_address="127.0.0.1", _temp_dir=folder,
                )  # fmt: skip
        except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise InputError(f"cannot start Ray on this machine: {_line(error)}") from error
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _loopback() -> Iterator[None]:
    """Ray turns 127.0.0.1 into an address that others can reach, and listens there, unless clusters are switched off."""
    from ray._private import ray_constants

    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", None)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _quietly_init(**settings: Any) -> None:
    """`ray.init` without statistics for its makers and without advice on stderr."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(logging_level=logging.ERROR, log_to_driver=False, **settings)
    finally:
        logger.setLevel(level)
