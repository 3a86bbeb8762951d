"""What a task is: a loss, and what is counted."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

#: for each metric the sum of its hits and how many were tried
Counts = dict[str, tuple[Tensor, Tensor | int]]


class Task(Protocol):
    """A loss that is a mean over the batch, and sums over examples for the metrics."""

    def loss(self, output: Any, y: Tensor) -> Tensor:
        """The mean loss of a batch."""

    def counts(self, output: Any, y: Tensor, quick: bool = False) -> Counts:
        """For each metric the sum of its hits and how many were tried; `quick` may leave costly ones out."""
