"""Before a long run: does the network answer at all, does it under the noise, and what will the run cost?

Nothing here is a guarantee: shares of a few inputs, on noise of their own that no certificate uses.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core import EquipoiseError, fresh_strides
from equipoise.runs.inputs import Item, in_turn
from equipoise.runs.jobs import Job
from equipoise.smoothing.noise import Stream, noise_key

#: inputs looked at, and how many at a time
INPUTS = 200
BATCH = 50


@dataclass(frozen=True)
class PreflightReport:
    """Shares of a few inputs (estimates), the cost of the run, and the most likely thing that is wrong.

    Args:
        inputs: how many were looked at.
        clean: share of right answers without noise; None: no labels.
        noisy: share of right answers under one draw of the noise.
        unchanged: share of answers that the noise does not change.
        sigma: the noise level, 0 for proved runs.
        forward_passes: of the whole run, in chunks; 0 for proved runs.
        seconds: estimated time of the run with one worker; 0 for proved runs.
        warning: what is likely wrong and what to do, empty if nothing is.
    """

    inputs: int
    clean: float | None
    noisy: float | None
    unchanged: float
    sigma: float
    forward_passes: int
    seconds: float
    warning: str = ""

    def lines(self) -> list[str]:
        """What a user should know before waiting."""
        shares = [] if self.clean is None else [f"clean accuracy {self.clean:.1%}"]
        if self.sigma:
            shares += [] if self.noisy is None else [f"under noise {self.noisy:.1%}"]
            shares.append(f"unchanged {self.unchanged:.1%}")
        lines = [f"{', '.join(shares)} ({self.inputs} inputs, estimates)"] if shares else []
        if self.seconds:
            lines.append(f"about {clock(self.seconds)} with one worker: {self.forward_passes:,} forward passes")
        return lines + ([f"warning: {self.warning}"] if self.warning else [])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def preflight(job: Job) -> PreflightReport:
    """Look at up to 200 inputs of a job, some of every class; unreadable ones are left out.

    Args:
        job: what `prepare` returned.

    Returns:
        Estimates; certificates do not depend on any of it.
    """
    settings, model = job.settings, job.model.network(job.device)
    sigma = settings.sigma or 0.0
    key = noise_key(settings.seed or 0, "preflight", Stream.CALIBRATION, 0)
    generator = torch.Generator().manual_seed(key % 2**63)

    items = _items(job)
    if not items:
        return PreflightReport(0, None, None, 1.0, sigma, 0, 0.0)
    labels = np.array([item.label for item in items], dtype=np.int64)
    x = torch.stack([item.x for item in items])
    clean = noisy = _answers(model, x, job.device)
    if sigma:
        noise = sigma * torch.randn(x.shape, generator=generator)
        noisy = _answers(model, x + noise.to(x), job.device)

    labelled = job.inputs.labelled
    right = float((clean == labels).mean()) if labelled else None
    unchanged = float((clean == noisy).mean())
    passes, seconds = _cost(job) if sigma else (0, 0.0)
    warning = _warning(labels, right, unchanged, sigma)
    under = float((noisy == labels).mean()) if labelled else None
    return PreflightReport(len(labels), right, under, unchanged, sigma, passes, seconds, warning)


def _warning(labels: np.ndarray[Any, Any], right: float | None, unchanged: float, sigma: float) -> str:
    """The most likely thing that is wrong: answers that are no better than chance, or that the noise changes."""
    chance = float(np.bincount(labels[labels >= 0], minlength=1).max() / len(labels))
    spread = math.sqrt(chance * (1 - chance) / len(labels))
    if right is not None and len(labels) >= 10 and right <= chance + 3 * spread and right < 0.7:
        return (
            f"{right:.1%} right without noise is about chance ({chance:.1%}): are the weights trained (--weights), the inputs "
            "scaled as in training (--mean, --std), the classes in the order of the logits (--classes)?"
        )
    if sigma and unchanged < 0.8:
        return (
            f"the network does not withstand noise of sigma {sigma:g}: train it under the noise "
            f"(eq.regularizers.add_noise(x, {sigma:g}), or noise: of a recipe), put a --denoiser before it, or certify at "
            "a smaller --sigma"
        )
    return ""


def _cost(job: Job, timed: int = 3) -> tuple[int, float]:
    """Chunks of the whole run, and their time: the median of a few on a stream that no certificate uses."""
    settings, classifier = job.settings, job.spec().classifier()
    chunk = settings.chunk_size
    passes = job.manifest.total * (math.ceil(settings.n0 / chunk) + math.ceil(settings.n / chunk))
    items = job.inputs.some(job.positions, 1)
    times = []
    try:
        began = time.perf_counter()
        x = items[0].x.to(job.device)
        for out in classifier.logits(x, (timed + 1) * chunk, input_id=items[0].id, stream=Stream.PREDICTION):
            out.argmax(dim=1).cpu()
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
    except EquipoiseError:
        return passes, 0.0  # such an input will be a failed row
    return passes, passes * float(np.median(times[1:]))


def _items(job: Job) -> list[Item]:
    """Inputs of every class in turn where labels are known, else evenly spread; those of one shape."""
    positions = job.positions
    if len(positions) > INPUTS and job.inputs.labelled and job.inputs.labels is not None:
        positions = np.sort(positions[in_turn(np.asarray(job.inputs.labels)[positions])[:INPUTS]])
    items = job.inputs.some(positions, INPUTS)
    return [item for item in items if item.x.shape == items[0].x.shape]


def _answers(model: torch.nn.Module, x: Tensor, device: str) -> np.ndarray[Any, Any]:
    """The largest logit, −1 where one is not finite."""
    with torch.inference_mode():
        out = torch.cat([model(fresh_strides(part).to(device)).double().cpu() for part in x.split(BATCH)])
    answers = torch.where(torch.isfinite(out).all(dim=1), out.argmax(dim=1), -1)
    return np.asarray(answers.numpy())


def clock(seconds: float) -> str:
    """Readable time, rounded.

    >>> clock(4.24), clock(3700), clock(200_000)
    ('4.2 s', '62 min', '56 h')
    """
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
