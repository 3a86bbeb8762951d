"""What a task is: a loss, and what is counted."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

#: for each metric the sum of its hits and how many were tried
Counts = dict[str, tuple[Tensor, Tensor | int]]


class Task(Protocol):
    """A loss that is a mean over the batch, and sums over examples for the metrics."""

    def loss(self, output: Any, y: Tensor) -> Tensor:
        """The mean loss of a batch."""

    def counts(self, output: Any, y: Tensor, quick: bool = False) -> Counts:
        """For each metric the sum of its hits and how many were tried; `quick` may leave costly ones out."""


@runtime_checkable
class Timed(Protocol):
    """A task that changes over the run."""

    def at(self, fraction: float) -> Task:
        """The task at a fraction of the run."""


@runtime_checkable
class Fitted(Protocol):
    """A task that needs to know the network."""

    def of(self, model: nn.Module) -> Task:
        """The task for this network."""


def fitted(task: Task, model: nn.Module) -> Task:
    """The task for this network, where it depends on it."""
    return task.of(model) if isinstance(task, Fitted) else task
