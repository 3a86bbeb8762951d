"""From one input to its row: the sampled worker (randomized smoothing) and the proved worker (deterministic radii).

Rows are pure: the same row whatever the engine, the order, the other inputs or a restart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line
from equipoise.lipschitz.local.radius import Certifier
from equipoise.runs.inputs import Item
from equipoise.runs.models import Batched, Portable
from equipoise.runs.settings import Settings, map_text
from equipoise.runs.store import Row, SoftVotes
from equipoise.smoothing import SimplexMap, SmoothedClassifier, Stream, certify_adaptive, choose_map
from equipoise.smoothing.classifier import count_votes
from equipoise.smoothing.procedures import Ints
from equipoise.smoothing.simplex import plan_map

#: relative gap of every operator norm
RTOL = 1e-3


@dataclass(frozen=True, eq=False)
class TaskSpec:
    """All that a worker needs, picklable.

    Args:
        model: the network.
        settings: of the run.
        map: fixed before the run; None: chosen at each input, or votes.
        network: the Lipschitz constant in the coordinates of the noise.
        batch_size: most draws in one forward pass; no number depends on it.
        device: where the passes run.
        example: one input, on which a proved run captures the network.
    """

    model: Portable
    settings: Settings
    map: SimplexMap | None = None
    network: float | None = None
    batch_size: int | None = None
    device: str = "cpu"
    example: Tensor | None = None

    def worker(self) -> Worker:
        """Build the model on this machine; do it once per process."""
        return ProvedWorker(self) if self.settings.kind == "proved" else SampledWorker(self)

    def classifier(self) -> SmoothedClassifier:
        """The smoothed classifier of the run."""
        settings = self.settings
        module = self.model.build(self.device)
        size = self.model.batch or self.batch_size
        if size is not None and (size < settings.chunk_size or (self.model.batch and size != settings.chunk_size)):
            module = Batched(module, size)
        made = SmoothedClassifier(
            module,
            settings.channels or settings.levels.sigma,
            settings.num_classes or 0,
            seed=settings.seed,
            chunk_size=settings.chunk_size,
            map=self.map,
            nonfinite=settings.nonfinite,
            noise=settings.noise,
        )
        made.cells = settings.cells
        return made


class Worker:
    """Turns inputs into rows."""

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec

    def __call__(self, item: Item) -> Row:
        """The row of one input; NaN logits give a failed row, a model that cannot run at all raises."""
        start = time.process_time()
        values: dict[str, Any]
        try:
            if item.problem is not None:
                raise Refused(item.problem)
            values = self.measure(item, item.x.to(self.spec.device))
        except Refused as error:
            values = {"failure": str(error)}
        except EquipoiseError:
            raise
        except Exception as error:  # whatever the user's own code raises
            shape = tuple(item.x.shape)
            raise InputError(f"the model failed on input {item.id!r} of shape {shape}: {one_line(error)}") from error
        spent = max(0.0, time.process_time() - start)
        return Row(id=item.id, position=item.position, label=item.label, seconds=spent, **values)

    def measure(self, item: Item, x: Tensor) -> dict[str, Any]:
        """The fields of the row."""
        raise NotImplementedError


class SampledWorker(Worker):
    """Counts votes, or sums soft votes, under noise."""

    def __init__(self, spec: TaskSpec) -> None:
        super().__init__(spec)
        self.counter = spec.classifier().like(Counting)

    def measure(self, item: Item, x: Tensor) -> dict[str, Any]:
        """Votes of the selection and of the estimation draws, and the moments of soft votes."""
        settings = self.spec.settings
        if settings.noise == "grid" and x.numel() != settings.dimension:
            raise Refused(
                f"the input has {x.numel()} numbers, the inputs of this run have {settings.dimension}: run it by itself"
            )
        counter = self.counter
        counter.votes = {s: np.zeros(counter.num_classes, dtype=np.int64) for s in Stream}
        values: dict[str, Any] = {"draws": settings.n}
        if settings.adaptive:
            values["draws"] = self._adaptive(counter, item, x)
        elif settings.soft and not (self.spec.map is not None and self.spec.map.votes):
            values["soft"] = self._soft(counter, item, x)
        else:
            counter.counts(x, settings.n0, input_id=item.id, stream=Stream.SELECTION)
            counter.counts(x, settings.n, input_id=item.id, stream=Stream.ESTIMATION)

        selection, estimation = (counter.votes[s] for s in (Stream.SELECTION, Stream.ESTIMATION))
        return {
            "n0": settings.n0,
            "selection": tuple(selection.tolist()),
            "estimation": tuple(estimation.tolist()),
            **values,
        }

    def _soft(self, counter: Counting, item: Item, x: Tensor) -> SoftVotes | None:
        """Moments under the map of the run (or of this input); None where the votes are best."""
        settings, network, chosen = self.spec.settings, self.spec.network, self.spec.map
        procedure, alpha, n = settings.procedure, settings.alpha, settings.n
        logits = counter.selection(x[None], settings.n0, [item.id], Stream.SELECTION)
        if chosen is None:
            sigma = settings.levels.sigma
            maps = choose_map(logits, n, sigma, alpha, procedure=procedure, lipschitz=network, per_input=True)
            chosen = maps[0]
        if chosen.votes:
            counter.counts(x, n, input_id=item.id, stream=Stream.ESTIMATION)
            return None

        noise = settings.noise_law().setting(alpha, "").noise
        plan = plan_map(chosen, logits, procedure, n, noise, alpha, network)
        m, _ = counter.moments(x, n, plan, chosen, input_id=item.id)
        moments = np.stack([m.shift[0], m.first[0], m.second[0], m.cross[0]])
        return SoftVotes(
            map=map_text(chosen),
            order=tuple(plan.partition.order[0].tolist()),
            singles=int(plan.partition.singles[0]),
            direct=bool(plan.direct[0]),
            moments=tuple(tuple(row) for row in moments.tolist()),
        )

    def _adaptive(self, counter: Counting, item: Item, x: Tensor) -> int:
        """The number of draws made until the answer was known."""
        settings = self.spec.settings
        outcome = certify_adaptive(
            counter,
            x[None],
            target_radius=settings.target_radius,
            relative=settings.relative,
            n0=settings.n0,
            n_max=settings.n,
            alpha=settings.alpha,
            procedure=settings.procedure,
            ids=[item.id],
        )
        return int(outcome.draws[0])


class Counting(SmoothedClassifier):
    """A smoothed classifier that also counts the votes of everything it draws, per stream."""

    votes: dict[Stream, Ints]

    def logits(self, x: Tensor, n: int, *, input_id: int | str, stream: Stream) -> Iterator[Tensor]:
        """As `SmoothedClassifier.logits`."""
        for out in super().logits(x, n, input_id=input_id, stream=stream):
            self.votes[stream] += count_votes(out).cpu().numpy()
            yield out


class ProvedWorker(Worker):
    """Proves radii of the real function of the stored weights; the network is captured and bounded once."""

    def __init__(self, spec: TaskSpec) -> None:
        super().__init__(replace(spec, device="cpu"))
        settings = spec.settings
        self.module: nn.Module = spec.model.build("cpu")
        tensors = [*self.module.parameters(), *self.module.buffers()]
        self.dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        if spec.example is None:
            raise InputError("a proved run needs an example input")
        x = spec.example.to(self.dtype)
        self.shape = tuple(x.shape)
        self.certifier = Certifier.of(
            self.module, x[None], norm=settings.norm, effort=settings.effort, rtol=RTOL, deployed=settings.deployed
        )

    def measure(self, item: Item, x: Tensor) -> dict[str, Any]:
        """The radius, what limits it, and the radius of the deployed forward pass if asked for."""
        settings = self.spec.settings
        if tuple(x.shape) != self.shape:
            raise Refused(f"the input has shape {tuple(x.shape)}, the inputs of this run have {self.shape}")
        label = torch.tensor([item.label]) if item.label >= 0 else None
        radii = self.certifier.radii(x.to(self.dtype)[None], label, seconds=settings.seconds)
        radius, margin = float(radii.radius[0]), float(radii.margins[0])
        return {
            "answer": int(radii.predictions[0]),
            "radius": radius,
            "rival": int(radii.rivals[0]),
            "margin": margin if math.isfinite(margin) else None,
            "method": radii.methods[0] if radius > 0 else "",
            "deployed": None if radii.deployed is None else float(radii.deployed[0]),
        }
