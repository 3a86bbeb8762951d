"""Which classes share a confidence interval: buckets of classes, drawn up on the selection sample alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipoise.smoothing.ramp import Floats

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Partition:
    """Buckets of classes for each of N inputs: the selected class, `singles` runners-up one by one, and the rest as
    one.

    `order[i]` lists the classes of input i: the selected one, then the others by falling selection score.
    """

    order: Ints
    singles: Ints

    @property
    def selected(self) -> Ints:
        """The class each certificate will be about."""
        return self.order[:, 0]

    @property
    def buckets(self) -> Ints:
        """Number of non-empty buckets, the selected class included."""
        classes = self.order.shape[1]
        return np.asarray(1 + self.singles + (self.singles < classes - 1))

    @property
    def intervals(self) -> Ints:
        """Number of one-sided bounds that share the risk α: with two buckets the second is 1 minus the first."""
        return np.where(self.buckets <= 2, 1, self.buckets)

    def labels(self) -> Ints:
        """(N, c): the bucket of every class; 0 is the selected class."""
        position = np.minimum(np.arange(self.order.shape[1])[None, :], self.singles[:, None] + 1)
        result = np.empty_like(self.order)
        np.put_along_axis(result, self.order, position, axis=1)
        return result

    def gather(self, values: Floats) -> Floats:
        """(N, c) values per class → (N, B) sums per bucket, B the largest number of buckets; zeros beyond."""
        ordered = np.take_along_axis(values, self.order, axis=1)
        width = int(self.buckets.max(initial=1))
        result = np.zeros((len(ordered), width), dtype=ordered.dtype)
        position = np.arange(self.order.shape[1])[None, :]
        single = position <= self.singles[:, None]
        kept = min(width, ordered.shape[1])
        result[:, :kept] = np.where(single, ordered, 0)[:, :kept]
        rest = np.where(single, 0, ordered).sum(axis=1)
        rows = np.flatnonzero(self.singles < self.order.shape[1] - 1)
        result[rows, self.singles[rows] + 1] = rest[rows]
        return result

    def present(self) -> NDArray[np.bool_]:
        """(N, B): which of the padded buckets exist."""
        return np.arange(int(self.buckets.max(initial=1)))[None, :] < self.buckets[:, None]


Build = Callable[[Floats], Partition]


def ranking(selection: Floats) -> Ints:
    """Classes by falling selection score (ties: the lower index first, as torch's argmax)."""
    return np.argsort(-selection, axis=1, kind="stable")


def one_against_rest(selection: Floats) -> Partition:
    """The selected class against everything else: one interval (Cohen).

    >>> one_against_rest(np.array([[5, 3, 2]])).labels().tolist()
    [[0, 1, 1]]
    """
    return Partition(ranking(selection), np.zeros(len(selection), dtype=np.int64))


def every_class(selection: Floats) -> Partition:
    """Every class by itself (Bonferroni).

    >>> every_class(np.array([[5, 3, 2]])).labels().tolist()
    [[0, 1, 2]]
    """
    return Partition(ranking(selection), np.full(len(selection), selection.shape[1] - 1, dtype=np.int64))


def class_partition(selection: Floats) -> Partition:
    """CPM: the runner-up by itself, the rest as one meta-class; its largest class leaves it while it outweighs the
    runner-up.

    Reference: thesis, class partitioning method. Written without a loop: the number of singles is the smallest s ≥ 1
    whose remaining mass is at most the runner-up's.

    >>> class_partition(np.array([[50, 3, 2, 2, 1], [60, 30, 4, 3, 3]])).labels().tolist()
    [[0, 1, 2, 3, 3], [0, 1, 2, 2, 2]]
    """
    order = ranking(selection)
    others = np.take_along_axis(selection, order, axis=1)[:, 1:]
    after = others.sum(axis=1, keepdims=True) - np.cumsum(others, axis=1)  # mass left in M after s = 1 … c − 1 singles
    enough = after <= others[:, :1]
    enough[:, -1] = True
    return Partition(order, 1 + np.argmax(enough, axis=1))
