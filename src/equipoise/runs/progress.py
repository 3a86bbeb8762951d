"""Progress of a run on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from equipoise.core import EquipoiseError
from equipoise.core.accuracy import percent
from equipoise.runs.derive import derive
from equipoise.runs.manifest import is_run, read_manifest
from equipoise.runs.rows import Row
from equipoise.runs.run import open_run


class Reporter:
    """Shows inputs done, certified accuracy so far, draws per second and the time left; call it after every input.

    Rows are derived in batches, once in a while, so that showing progress costs next to nothing.

    Args:
        folder: the run directory.
        console: where to write; a bar if it is a terminal, else plain lines.
        epsilon: the accuracy shown is that at this radius.
        every: seconds between two updates of the figures; default 2 on a terminal, 30 elsewhere.
    """

    def __init__(self, folder: Path, console: Console, epsilon: float = 0.0, every: float | None = None) -> None:
        self.folder, self.console, self.epsilon = folder, console, epsilon
        live = console.is_terminal
        self.every = every if every is not None else (2.0 if live else 30.0)
        self.fresh: list[Row] = []
        self.right = self.derived = self.draws = self.before = 0
        self.begin = self.shown = time.perf_counter()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=console, transient=True) if live else None
        self.task = self.bar.add_task("", total=None) if self.bar is not None else None

    def __enter__(self) -> Reporter:
        if is_run(self.folder):
            try:
                self.fresh = open_run(self.folder).rows
            except EquipoiseError:
                self.fresh = []  # `certify` will say what is wrong with it
        self.before = len(self.fresh)
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, row: Row, done: int, total: int) -> None:
        """Count one stored input; the display follows at most every few moments."""
        self.fresh.append(row)
        self.draws += row.n0 + row.draws
        now = time.perf_counter()
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=done, total=total)
        if now - self.shown < self.every and done < total:
            return
        self.shown = now
        text = self._text(done, total, now - self.begin)
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, description=text)
        else:
            self.console.print(f"{done} of {total} inputs: {text}", markup=False, soft_wrap=True)

    def _text(self, done: int, total: int, elapsed: float) -> str:
        found = derive(read_manifest(self.folder), self.fresh)
        labels = [row.label for row in self.fresh]
        self.right += round(float(found.accuracy(labels, self.epsilon)) * len(labels))
        self.derived += len(labels)
        self.fresh = []
        pace = elapsed / max(done - self.before, 1)
        left = "" if done == total else f", {clock(pace * (total - done))} left"
        share, speed = self.right / self.derived, self.draws / max(elapsed, 1e-9)
        return f"certified {percent(share, 1)}% at ε = {self.epsilon:g}, {speed:,.0f} draws/s{left}"


def clock(seconds: float) -> str:
    """Readable time, rounded.

    >>> clock(42.4), clock(3700), clock(200_000)
    ('42 s', '1 h 02 min', '2 d 07 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"
