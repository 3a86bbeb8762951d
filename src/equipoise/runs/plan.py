"""What a run will cost, estimated from a few timed batches before anything is written."""

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from equipoise.core import InputError
from equipoise.runs.jobs import Job
from equipoise.runs.parameters import Parameters
from equipoise.runs.rows import Item
from equipoise.runs.tasks import classifier_of
from equipoise.smoothing import SmoothedClassifier, Stream
from equipoise.smoothing.adaptive import first_crossing, target_probability

_CHECKPOINTS = 400


@dataclass(frozen=True)
class Estimate:
    """Estimates, not bounds: draws, forward passes, seconds by number of workers, and memory of one worker in bytes.

    `adaptive_draws` is the expected number of draws per input when each stops at `target_radius`, from pilot votes of a few
    inputs; the other adaptive figures follow from it.
    """

    inputs: int
    selection_draws: int
    draws_per_input: int
    batch: int
    seconds_per_batch: float
    forward_passes: int
    seconds: dict[int, float]
    target_radius: float
    adaptive_draws: float
    adaptive_forward_passes: int
    adaptive_seconds: dict[int, float]
    model_bytes: int
    buffer_bytes: int
    process_bytes: int | None
    pilot_inputs: int

    @property
    def draws_per_input_adaptive(self) -> float:
        """Selection and expected estimation draws of an adaptive run."""
        return self.selection_draws + self.adaptive_draws

    def lines(self) -> list[str]:
        """What the figures rest on."""
        memory = f"model {self.model_bytes / 1e6:.1f} MB, noise buffer {self.buffer_bytes / 1e6:.1f} MB"
        if self.process_bytes is not None:
            memory += f", this process at its peak {self.process_bytes / 1e6:.0f} MB"
        return [
            f"{self.seconds_per_batch * 1e3:.1f} ms per forward pass of {self.batch} draws, measured now on this machine",
            f"memory of one worker, whatever the number of draws: {memory}",
            f"adaptive draws predicted from pilot votes of {self.pilot_inputs} inputs; times of several workers as if they "
            "did not slow each other down",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def estimate(job: Job, *, workers: Sequence[int] = (1,), batches: int = 5, pilot: int = 8) -> Estimate:
    """Time a few batches of the job's own model and data; nothing is written.

    The time is `inputs·⌈draws/chunk⌉` passes of one chunk, divided by the workers: the best case, as if they did not slow
    each other down.

    Args:
        job: what `describe` returned.
        workers: numbers of workers to give times for.
        batches: timed chunks, after one that warms up.
        pilot: inputs whose votes predict how early adaptive sampling would stop.
    """
    p = job.parameters
    if batches < 1 or pilot < 1 or not workers or min(workers) < 1:
        raise InputError("batches, pilot and the numbers of workers must be positive")
    classifier = classifier_of(job.model, p, job.batch_size, job.device)
    items = job.inputs.some(job.positions, pilot)
    if not items:
        raise InputError("none of the pilot inputs can be read")
    each = _seconds_per_chunk(classifier, items[0], p, job.device, batches)
    passes = math.ceil(p.n0 / p.chunk_size) + math.ceil(p.n / p.chunk_size)
    target = p.target_radius if p.target_radius is not None else p.sigma / 2
    expected = _adaptive_draws(classifier, items, p, target, job.device)
    fewer = math.ceil(p.n0 / p.chunk_size) + expected / p.chunk_size
    x, total = items[0].x, job.manifest.total
    parameters = [*classifier.model.parameters(), *classifier.model.buffers()]
    return Estimate(
        inputs=total,
        selection_draws=p.n0,
        draws_per_input=p.n0 + p.n,
        batch=p.chunk_size,
        seconds_per_batch=each,
        forward_passes=total * passes,
        seconds={k: total * passes * each / k for k in workers},
        target_radius=target,
        adaptive_draws=expected,
        adaptive_forward_passes=math.ceil(total * fewer),
        adaptive_seconds={k: total * fewer * each / k for k in workers},
        model_bytes=sum(t.numel() * t.element_size() for t in parameters),
        buffer_bytes=p.chunk_size * x.numel() * x.element_size(),
        process_bytes=_peak(job.device),
        pilot_inputs=len(items),
    )


def _seconds_per_chunk(classifier: SmoothedClassifier, item: Item, p: Parameters, device: str, batches: int) -> float:
    """Median time of a chunk: noise, forward pass and votes, on a stream that no certificate uses."""
    x, times = item.x.to(device), []
    chunks = classifier.logits(x, (batches + 1) * p.chunk_size, input_id=item.id, stream=Stream.PREDICTION)
    begin = time.perf_counter()
    for out in chunks:
        out.argmax(dim=1).cpu()
        now = time.perf_counter()
        times.append(now - begin)
        begin = now
    return statistics.median(times[1:])


def _adaptive_draws(
    classifier: SmoothedClassifier, items: Sequence[Item], p: Parameters, target: float, device: str
) -> float:
    """Mean draws until decided at the target, if every input kept the share of votes it had in one pilot chunk."""
    p0 = target_probability(target, p.sigma)
    steps = np.unique(np.geomspace(p.chunk_size, max(p.n, p.chunk_size), _CHECKPOINTS).astype(int) // p.chunk_size)
    at = np.minimum(steps * p.chunk_size, max(p.n, 1)).astype(float)
    used = []
    for item in items:
        votes = classifier.counts(item.x.to(device), p.chunk_size, input_id=item.id, stream=Stream.PREDICTION)
        hits = votes.max() / max(votes.sum(), 1) * at
        index = int(first_crossing(hits, at, p0, p.alpha, p.hopeless or 0.05)[0])
        used.append(at[min(index, len(at) - 1)])
    return float(np.mean(used))


def _peak(device: str) -> int | None:
    """Most memory this process has held so far, after the timed batches: that of one worker, whatever n."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
