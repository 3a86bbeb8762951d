"""One input → its row. Pure: the same row whatever the engine, the order, the other inputs or a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line
from equipoise.runs.models import Batched, Portable
from equipoise.runs.parameters import Parameters
from equipoise.runs.rows import Item, Row, Soft, failed
from equipoise.smoothing import SimplexMap, SmoothedClassifier, Stream, certify_adaptive, choose_map
from equipoise.smoothing.classifier import count_votes
from equipoise.smoothing.moments import Ints
from equipoise.smoothing.noise import noise_key
from equipoise.smoothing.simplex import plan_map


@dataclass(frozen=True, eq=False)
class TaskSpec:
    """All a worker needs, and it pickles: the model, the parameters, the map and the constant fixed before the run.

    `batch_size` is the largest number of draws in one forward pass, `device` where the passes run; neither is part of the
    noise.
    """

    model: Portable
    parameters: Parameters
    map: SimplexMap | None = None
    network: float | None = None
    batch_size: int | None = None
    device: str = "cpu"

    def classifier(self) -> SmoothedClassifier:
        """The smoothed classifier of the run."""
        return classifier_of(self.model, self.parameters, self.batch_size, self.device, self.map)

    def worker(self) -> Worker:
        """Build the model on this machine; do it once per process."""
        return Worker(self)


class Worker:
    """Turns inputs into rows: `worker(item)`. Holds the model; nothing of one input is kept for the next."""

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec
        self.classifier = spec.classifier()

    def __call__(self, item: Item) -> Row:
        """The row of one input; NaN logits give a failed row, a model that cannot run at all raises."""
        p, start = self.spec.parameters, time.perf_counter()
        key = noise_key(p.seed, item.id, Stream.SELECTION, 0)
        try:
            row = self._sample(item, item.x.to(self.spec.device))
        except Refused as error:
            return failed(item, str(error), key, time.perf_counter() - start)
        except EquipoiseError:
            raise
        except Exception as error:  # whatever the user's own code raises
            raise InputError(
                f"the model failed on input {item.id!r} of shape {tuple(item.x.shape)}: {one_line(error)}"
            ) from error
        return replace(row, key=key, seconds=time.perf_counter() - start)

    def _sample(self, item: Item, x: Tensor) -> Row:
        p = self.spec.parameters
        if p.noise == "grid" and x.numel() != p.dimension:
            raise Refused(
                f"the input has {x.numel()} numbers, the inputs of this run have {p.dimension}: run it by itself"
            )
        if p.adaptive:
            return self._stopped(item, x)
        if not p.soft or (self.spec.map is not None and self.spec.map.votes):
            first = self.classifier.counts(x, p.n0, input_id=item.id, stream=Stream.SELECTION)
            second = self.classifier.counts(x, p.n, input_id=item.id, stream=Stream.ESTIMATION)
            return Row(item.position, item.id, item.label, p.n0, p.n, first, second)
        return self._soft(item, x)

    def _soft(self, item: Item, x: Tensor) -> Row:
        """Moments under the map of the run (or of this input), and the votes of the same draws."""
        p, tally = self.spec.parameters, Tally.of(self.classifier)
        logits = tally.selection(x[None], p.n0, [item.id], Stream.SELECTION)
        chosen, network = self.spec.map, self.spec.network
        if chosen is None:
            found = choose_map(
                logits, p.n, p.sigma, p.alpha, procedure=p.procedure, lipschitz=network, per_input=True
            )  # fmt: skip
            chosen = found[0]
        if chosen.votes:
            tally.counts(x, p.n, input_id=item.id, stream=Stream.ESTIMATION)
            soft = None
        else:
            plan = plan_map(chosen, logits, p.procedure, p.n, p.drawn().setting(p.alpha, "").noise, p.alpha, network)
            m, _ = tally.moments(x, p.n, plan, 0, chosen, input_id=item.id)
            moments = np.stack([m.shift[0], m.first[0], m.second[0], m.cross[0]])
            soft = Soft(chosen, plan.partition.order[0], int(plan.partition.singles[0]), bool(plan.direct[0]), moments)
        first, second = (tally.votes[s] for s in (Stream.SELECTION, Stream.ESTIMATION))
        return Row(item.position, item.id, item.label, p.n0, p.n, first, second, soft)

    def _stopped(self, item: Item, x: Tensor) -> Row:
        """The counts at the moment the answer was known."""
        p, tally = self.spec.parameters, Tally.of(self.classifier)
        found = certify_adaptive(
            tally, x[None], target_radius=p.target_radius, relative=p.relative, n0=p.n0, n_max=p.n, alpha=p.alpha,
            procedure=p.procedure, map=SimplexMap("hardmax"), hopeless=p.hopeless or 0.05, ids=[item.id],
        )  # fmt: skip
        first, second = (tally.votes[s] for s in (Stream.SELECTION, Stream.ESTIMATION))
        draws, why = int(found.draws[0]), found.details["verdicts"][0]
        return Row(item.position, item.id, item.label, p.n0, draws, first, second, stopped=why)


class Tally(SmoothedClassifier):
    """A smoothed classifier that also counts the votes of everything it draws, per stream."""

    votes: dict[Stream, Ints]

    @classmethod
    def of(cls, other: SmoothedClassifier) -> Tally:
        """The same classifier with empty counts."""
        result = other.like(cls)
        result.votes = {s: np.zeros(other.num_classes, dtype=np.int64) for s in Stream}
        return result

    def logits(self, x: Tensor, n: int, *, input_id: int | str, stream: Stream) -> Iterator[Tensor]:
        """As `SmoothedClassifier.logits`."""
        for out in super().logits(x, n, input_id=input_id, stream=stream):
            self.votes[stream] += count_votes(out).cpu().numpy()
            yield out


def classifier_of(
    model: Portable, p: Parameters, batch_size: int | None, device: str, chosen: SimplexMap | None = None
) -> SmoothedClassifier:
    """The smoothed classifier that these parameters describe, in forward passes of at most `batch_size` draws."""
    module = model.build(device)
    if model.batch is not None and model.batch != p.chunk_size:
        module = Batched(module, model.batch, exact=True)
    elif model.batch is None and batch_size is not None and batch_size < p.chunk_size:
        if batch_size < 1:
            raise InputError(f"batch_size must be positive, got {batch_size}")
        module = Batched(module, batch_size, exact=True)
    dtype = None if p.noise_dtype is None else getattr(torch, p.noise_dtype)
    made = SmoothedClassifier(
        module, p.channels or p.sigma, p.num_classes, seed=p.seed, chunk_size=p.chunk_size, map=chosen, noise_dtype=dtype,
        nonfinite=p.nonfinite, noise=p.noise or "float",
    )  # fmt: skip
    made.cells = p.cells
    return made
