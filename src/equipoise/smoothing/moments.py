"""Class buckets chosen on the selection sample, and their score moments.

Counts are enough for hard votes; for soft ones these sums are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipoise.core import InputError
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


@dataclass(frozen=True)
class Moments:
    """For N inputs and B buckets (bucket 0 is the selected class), over n draws with scores `Z ∈ [0, 1]`:

    `first = Σ(Z_b − shift_b)`, `second = Σ(Z_b − shift_b)²`, `cross = Σ(Z_0 − shift_0)(Z_b − shift_b)`. The shift is
    fixed before the sample (the selection mean), so that nothing cancels; statistics with the same shift add up.

    >>> m = Moments.of(np.array([[[0.9, 0.1], [0.7, 0.3]]]))
    >>> m.mean.round(3).tolist(), m.var.round(3).tolist()
    ([[0.8, 0.2]], [[0.02, 0.02]])
    """

    n: Floats
    shift: Floats
    first: Floats
    second: Floats
    cross: Floats

    @classmethod
    def of(cls, scores: Floats, shift: Floats | None = None) -> Moments:
        """Statistics of bucket scores (N, n, B)."""
        if scores.ndim != 3 or scores.shape[1] < 1:
            raise InputError(f"expected scores of shape (inputs, draws, buckets), got {scores.shape}")
        centre = scores.mean(axis=1) if shift is None else shift
        z = scores - centre[:, None, :]
        n = np.full(len(scores), float(scores.shape[1]))
        return cls(n, centre, z.sum(axis=1), (z * z).sum(axis=1), (z * z[:, :, :1]).sum(axis=1))

    @classmethod
    def of_counts(cls, counts: Floats, n: Floats) -> Moments:
        """Statistics of hard votes from counts per bucket (N, B): a vote is 0 or 1, and never for two buckets at
        once."""
        counts = counts.astype(np.float64)
        cross = np.zeros_like(counts)
        cross[:, 0] = counts[:, 0]
        return cls(n.astype(np.float64), np.zeros_like(counts), counts, counts, cross)

    def scaled(self, n: int) -> Moments:
        """The statistics a sample of n draws with the same mean and variance would have: to plan, never to certify."""
        more = (n - 1) / np.maximum(self.n - 1, 1)[:, None]
        return Moments(
            n=np.full_like(self.n, float(n)),
            shift=self.mean,
            first=np.zeros_like(self.first),
            second=self._centred(self.second) * more,
            cross=self._centred(self.cross) * more,
        )

    def _centred(self, sums: Floats) -> Floats:
        top = self.first[:, :1] if sums is self.cross else self.first
        return np.asarray(sums - top * self.first / self.n[:, None])

    @property
    def mean(self) -> Floats:
        """Mean score per bucket."""
        return self.shift + self.first / self.n[:, None]

    @property
    def rounding(self) -> Floats:
        """(N, 1): bound of the rounding in a mean, however the n terms were added."""
        return (2.0**-51 * (self.n + 16))[:, None]

    @property
    def var(self) -> Floats:
        """Unbiased variance per bucket, rounded up."""
        return self._var(self.second, self._centred(self.second))

    @property
    def gap(self) -> tuple[Floats, Floats]:
        """Mean and unbiased variance (rounded up) of the direct margin `h_b = (1 + Z_0 − Z_b)/2` for every b."""
        mean = self.mean
        total = (self._centred(self.second)[:, :1] + self._centred(self.second) - 2 * self._centred(self.cross)) / 4
        return (1 + mean[:, :1] - mean) / 2, self._var(self.second + self.second[:, :1], total)

    def _var(self, size: Floats, centred: Floats) -> Floats:
        spare = np.maximum(self.n - 1, 1)[:, None]
        return np.asarray((np.maximum(centred, 0) + self.rounding * np.abs(size)) / spare)


def bucket_scores(scores: Floats, partition: Partition) -> Floats:
    """(N, n, c) class scores → (N, n, B) bucket scores; where rounding carries a sum beyond 1 it is 1."""
    inputs, draws, classes = scores.shape
    flat = scores.reshape(inputs * draws, classes)
    order, singles = np.repeat(partition.order, draws, axis=0), np.repeat(partition.singles, draws)
    return np.minimum(Partition(order, singles).gather(flat), 1.0).reshape(inputs, draws, -1)
