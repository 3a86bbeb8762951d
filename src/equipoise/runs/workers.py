"""From one input to its row, in this process or on a Ray cluster: sampled (randomized smoothing) or proved (deterministic radii).

Rows are pure: the same row whatever the engine, the order, the other inputs or a restart. So an input that is lost with its
Ray worker is simply computed again, by Ray's own restarts. Workers never touch the store: the first process writes it.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.core import EquipoiseError, InputError, Ints, Refused, guarded, one_line, optional
from equipoise.lipschitz.local.radius import Certifier
from equipoise.runs.sources import Batched, Item, Portable, hash_module
from equipoise.runs.store import Manifest, Row, Settings, SoftVotes, versions
from equipoise.smoothing import SmoothedClassifier, Stream, certify_adaptive
from equipoise.smoothing.classifier import count_votes
from equipoise.smoothing.simplex import plan_map

#: relative gap of every operator norm
RTOL = 1e-3
#: inputs in flight per Ray worker: memory does not grow with the data
AHEAD = 2


@dataclass(frozen=True, eq=False)
class TaskSpec:
    """All that a worker needs, picklable.

    Args:
        model: the network.
        manifest: of the run.
        device: where the passes run.
        example: one input, on which a proved run captures the network.
        batch_size: most draws in one forward pass; no number depends on it.
    """

    model: Portable
    manifest: Manifest
    device: str
    example: Tensor
    batch_size: int | None = None

    @property
    def settings(self) -> Settings:
        """Those of the run."""
        return self.manifest.settings

    def worker(self) -> Worker:
        """Build the model on this machine; do it once per process."""
        return ProvedWorker(self) if self.settings.kind == "proved" else SampledWorker(self)

    def classifier(self) -> SmoothedClassifier:
        """The smoothed classifier of the run."""
        settings = self.settings
        module = self.model.build(self.device)
        chunk = settings.chunk_size
        size = self.model.batch or min(self.batch_size or chunk, chunk)
        if size != chunk:
            module = Batched(module, size)
        classifier = SmoothedClassifier(
            module,
            settings.channels or settings.levels.sigma,
            settings.num_classes or 0,
            seed=settings.seed,
            chunk_size=chunk,
            map=self.manifest.simplex,
            noise=settings.noise,
        )
        classifier.cells = settings.cells
        return classifier


class Worker:
    """Turns inputs into rows; `measure` gives the fields of a row that depend on the kind of run."""

    measure: Callable[[Item, Tensor], dict[str, Any]]

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec

    def __call__(self, item: Item) -> Row:
        """The row of one input; NaN logits give a failed row, a model that cannot run at all raises."""
        start = time.process_time()
        what = f"the model on input {item.id!r} of shape {tuple(item.x.shape)}"
        try:
            if item.problem is not None:
                raise Refused(item.problem)
            values = guarded(lambda: self.measure(item, item.x.to(self.spec.device)), what)
        except Refused as error:
            values = {"failure": str(error)}
        seconds = max(0.0, time.process_time() - start)
        return Row(id=item.id, position=item.position, label=item.label, seconds=seconds, **values)


class SampledWorker(Worker):
    """Counts votes, or sums soft votes, under noise."""

    def __init__(self, spec: TaskSpec) -> None:
        super().__init__(spec)
        self.counter = spec.classifier().like(Counting)

    def measure(self, item: Item, x: Tensor) -> dict[str, Any]:
        """Votes of the selection and of the estimation draws, and the moments of soft votes.

        Args:
            item: the input.
            x: its numbers, on the worker's device.
        """
        settings = self.spec.settings
        require_dimension(settings, x)
        counter = self.counter
        counter.votes = {s: np.zeros(counter.num_classes, dtype=np.int64) for s in Stream}
        values: dict[str, Any] = {"n0": settings.n0, "draws": settings.n}
        if settings.target_radius is not None:
            outcome = certify_adaptive(
                counter,
                x[None],
                settings.target_radius,
                n0=settings.n0,
                n_max=settings.n,
                alpha=settings.alpha,
                procedure=settings.procedure,
                ids=[item.id],
            )
            values["draws"] = int(outcome.draws[0])
        elif self.spec.manifest.scored:
            values["soft"] = self._soft(item, x)
        else:
            counter.counts(x, settings.n0, input_id=item.id, stream=Stream.SELECTION)
            counter.counts(x, settings.n, input_id=item.id, stream=Stream.ESTIMATION)
        for stream in (Stream.SELECTION, Stream.ESTIMATION):
            values[stream.name.lower()] = tuple(counter.votes[stream].tolist())
        return values

    def _soft(self, item: Item, x: Tensor) -> SoftVotes:
        """Moments under the map of the run."""
        manifest = self.spec.manifest
        settings = manifest.settings
        simplex = manifest.simplex
        assert simplex is not None
        network = manifest.stretched(manifest.lipschitz)
        logits = self.counter.selection(x[None], settings.n0, [item.id], Stream.SELECTION)
        alpha = settings.alpha
        n = settings.n
        noise = settings.noise_law().setting(alpha, "").noise
        plan = plan_map(simplex, logits, settings.procedure, n, noise, alpha, network)
        m, _ = self.counter.moments(x, n, plan, simplex, input_id=item.id)
        return SoftVotes(
            order=tuple(plan.partition.order[0].tolist()),
            singles=int(plan.partition.singles[0]),
            direct=bool(plan.direct[0]),
            moments=tuple(
                tuple(part[0].tolist()) for part in (m.shift, m.first, m.second, m.cross)
            ),
        )


def require_dimension(settings: Settings, x: Tensor) -> None:
    """On the grid the law of the noise depends on the dimension: inputs of another one are refused.

    Args:
        settings: of the run.
        x: one input.
    """
    if settings.noise == "grid" and x.numel() != settings.dimension:
        raise Refused(
            f"the input has {x.numel()} numbers, the inputs of this run have {settings.dimension}: run it by itself"
        )


class Counting(SmoothedClassifier):
    """A smoothed classifier that also counts the votes of everything it draws, per stream."""

    votes: dict[Stream, Ints]

    def logits(self, x: Tensor, n: int, *, input_id: int | str, stream: Stream) -> Iterator[Tensor]:
        """As `SmoothedClassifier.logits`.

        Args:
            x: one input.
            n: number of draws.
            input_id: key of the noise.
            stream: which sample.
        """
        for out in super().logits(x, n, input_id=input_id, stream=stream):
            self.votes[stream] += count_votes(out).cpu().numpy()
            yield out


class ProvedWorker(Worker):
    """Proves radii of the real function of the stored weights; the network is captured and bounded once."""

    def __init__(self, spec: TaskSpec) -> None:
        super().__init__(replace(spec, device="cpu"))
        settings = spec.settings
        module = spec.model.build("cpu")
        tensors = [*module.parameters(), *module.buffers()]
        self.dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        x = spec.example.to(self.dtype)
        self.certifier = Certifier.of(
            module,
            x[None],
            norm=settings.norm,
            effort=settings.effort,
            rtol=RTOL,
            deployed=settings.deployed,
        )

    def measure(self, item: Item, x: Tensor) -> dict[str, Any]:
        """The radius, what limits it, and the radius of the deployed forward pass if wanted.

        Args:
            item: the input.
            x: its numbers.
        """
        expected = tuple(self.spec.example.shape)
        if tuple(x.shape) != expected:
            raise Refused(
                f"the input has shape {tuple(x.shape)}, the inputs of this run have {expected}"
            )
        label = torch.tensor([item.label]) if item.label >= 0 else None
        settings = self.spec.settings
        radii = self.certifier.radii(
            x.to(self.dtype)[None],
            label,
            epsilon=settings.epsilon,
            complete=settings.complete,
            seconds=settings.seconds,
        )
        radius = float(radii.radius[0])
        broken = radii.broken.get(0)
        return {
            "answer": int(radii.predictions[0]),
            "radius": radius,
            "rival": int(radii.rivals[0]),
            "method": radii.methods[0] if radius > 0 else "",
            "deployed": None if radii.deployed is None else float(radii.deployed[0]),
            "broken": None if broken is None else tuple(broken.flatten().tolist()),
        }


class RayWorker:
    """One worker process of a Ray cluster, built once; another version of the software or of the model's code is refused.

    Classes are read from each machine's own files; exported programs and classes of the main script are sent whole.

    Args:
        payload: a pickled `TaskSpec`.
        path: where the first process finds modules.
        expected: its versions, and the digest of the model's code.
    """

    def __init__(self, payload: bytes, path: list[str], expected: dict[str, str]) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        spec: TaskSpec = pickle.loads(payload)  # only now: its classes may lie on that path
        here = _software(spec)
        wrong = [
            f"{name} {here[name]} instead of {value}"
            for name, value in expected.items()
            if here[name] != value
        ]
        if wrong:
            raise Refused(
                f"a worker has {', '.join(wrong)}: its numbers may differ; install the same files and versions everywhere"
            )
        if spec.device == "cpu":
            torch.set_num_threads(1)
        self.worker = spec.worker()

    def row(self, item: Item) -> Row:
        """The row of one input."""
        return self.worker(item)


def _software(spec: TaskSpec) -> dict[str, str]:
    """Versions, and the digest of the model's code where it is read from files."""
    payload = spec.model.payload
    code = ""
    if isinstance(payload, nn.Module) and all(
        type(m).__module__ != "__main__" for m in payload.modules()
    ):
        code = hash_module(payload)
    return versions() | {"code": code}


def run_on_ray(
    spec: TaskSpec, items: Iterator[Item], workers: int, address: str | None
) -> Iterator[Row]:
    """Yield a row for every item, in any order; closing the generator stops the work.

    Args:
        spec: what to compute.
        items: pulled from only as fast as they are worked off.
        workers: how many; each takes a GPU where the device is one.
        address: of an existing cluster; None: one on this machine, started and stopped here.
    """
    ray = optional("ray", "ray")
    from ray.exceptions import RayError
    from ray.util import ActorPool

    model = spec.model
    device = torch.device(spec.device).type
    if isinstance(model.payload, nn.Module) and device != "cpu":
        model = replace(model, payload=copy.deepcopy(model.payload).cpu())
    spec = replace(spec, model=model, device=device)
    path = [entry or os.getcwd() for entry in sys.path]

    started = not ray.is_initialized()
    team: list[Any] = []
    try:
        if started:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options = {"log_to_driver": False, "logging_level": "ERROR"}
            if address is None:  # a cluster of our own listens on the loopback address alone
                options |= {"num_cpus": workers, "_node_ip_address": "127.0.0.1"}
                options["include_dashboard"] = False
            ray.init(address=address or "local", **options)
        kind = ray.remote(
            num_cpus=1, num_gpus=int(device == "cuda"), max_restarts=3, max_task_retries=3
        )(RayWorker)
        payload = ray.put(ray.cloudpickle.dumps(spec))
        team += [kind.remote(payload, path, _software(spec)) for _ in range(workers)]

        pool = ActorPool(team * AHEAD)
        for item in items:
            if not pool.has_free():
                yield pool.get_next_unordered()
            pool.submit(lambda actor, item: actor.row.remote(item), item)
        while pool.has_next():
            yield pool.get_next_unordered()
    except (RayError, ConnectionError, TypeError, RuntimeError) as error:
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, EquipoiseError):
            raise type(cause)(*cause.args) from error
        raise InputError(
            f"Ray could not do it ({one_line(cause)}): what is stored is kept; a model that cannot be sent to other "
            "processes can be saved as a .pt2 file, and a smaller --batch-size needs less memory"
        ) from error
    finally:
        if started and ray.is_initialized():
            ray.shutdown()
        for actor in [] if started else team:
            ray.kill(actor)
