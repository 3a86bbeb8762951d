"""The engine of one process."""

from collections.abc import Iterator

from equipoise.runs.engines import Execution
from equipoise.runs.rows import Item, Row
from equipoise.runs.tasks import TaskSpec


def run(spec: TaskSpec, items: Iterator[Item], execution: Execution) -> Iterator[Row]:
    """In this process, one input after the other."""
    worker = spec.worker()
    for item in items:
        yield worker(item)
