"""Timing that a busy machine cannot skew: all contestants take turns in one run, and medians are compared."""

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Contest:
    """Median seconds, seconds of every round, and last result of every contestant, by name."""

    seconds: dict[str, float]
    results: dict[str, Any]
    rounds: dict[str, list[float]]

    def ratio(self, ours: str, baseline: str) -> float:
        """Time of `ours` over time of `baseline`."""
        return self.seconds[ours] / self.seconds[baseline]

    def ratios(self, ours: str, baseline: str) -> list[float]:
        """The same round by round: their spread says how far the ratio can be trusted."""
        return [a / b for a, b in zip(self.rounds[ours], self.rounds[baseline], strict=True)]


def seconds(work: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def take_turns(
    contestants: Mapping[str, Callable[[], Any]],
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> Contest:
    """Run every contestant once per round, in an order that alternates, and take medians over the rounds.

    With `clock=time.process_time` processor seconds are taken, which other processes disturb less. On a GPU a contestant has to
    wait for its own work.

    >>> contest = take_turns({"short": lambda: sum(range(10)), "long": lambda: sum(range(100_000))}, repeats=3)
    >>> contest.ratio("short", "long") < 1
    True
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    results: dict[str, Any] = {}
    for number in range(repeats):
        names = list(contestants) if number % 2 == 0 else list(contestants)[::-1]
        for name in names:
            begin = clock()
            results[name] = contestants[name]()
            times[name].append(clock() - begin)
    return Contest({name: statistics.median(t) for name, t in times.items()}, results, times)


def peak_bytes(work: Callable[[], Any]) -> int:
    """Most bytes that torch's CPU allocator had handed out at once while `work` ran, above what it had at the start.

    Counted from the profiler's allocation events, so temporaries inside custom operators are seen; buffers that MKL or
    LAPACK allocate on their own are not.

    >>> peak_bytes(lambda: torch.ones(1000).add(1).sum()) >= 8000
    True
    """
    with _without_native_chatter(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    assert profile.kineto_results is not None
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@contextlib.contextmanager
def _without_native_chatter() -> Iterator[None]:
    """Silence file descriptor 2: the profiler's native library reports its start and stop there whatever it is told."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
