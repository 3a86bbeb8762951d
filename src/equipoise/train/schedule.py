"""Learning-rate schedules: a factor in terms of the fraction of the run, a pure function with no state to store."""

from __future__ import annotations

import itertools
import math

from equipoise.train.recipe import Schedule


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """The factor of the learning rate at `step` of `steps` (the first step is 0).

    >>> [round(factor(Schedule(kind="cosine", warmup=0.2), s, 10), 3) for s in (0, 1, 2, 5, 9)]
    [0.5, 1.0, 1.0, 0.691, 0.038]
    """
    warm = 0.3 if schedule.kind == "one-cycle" and schedule.warmup == 0 else schedule.warmup
    rising = round(warm * steps)
    if step < rising:
        return (step + 1) / rising
    t = (step - rising) / max(1, steps - rising)
    if schedule.kind in ("cosine", "one-cycle"):
        return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * t)) / 2
    if schedule.kind == "linear":
        return schedule.final + (1 - schedule.final) * (1 - t)
    if schedule.kind == "piecewise":
        return _between(schedule.points, step / steps)
    if schedule.kind == "step":
        return schedule.gamma ** sum(step >= round(m * steps) for m in schedule.milestones)
    return 1.0


def _between(points: list[tuple[float, float]], t: float) -> float:
    """Linear interpolation, constant outside the points."""
    if t <= points[0][0]:
        return points[0][1]
    for (a, low), (b, high) in itertools.pairwise(points):
        if t <= b:
            return low + (high - low) * (t - a) / (b - a)
    return points[-1][1]
