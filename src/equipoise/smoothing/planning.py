"""What to bound, decided on the selection sample: which buckets, and whether margins directly.

A partition drawn up on a sample looks better on that sample than it is: its pooled classes are those that happened to
get
few votes. So the candidates are compared by cross-validation: the partition of one half is rated on the other half.
Nothing
here touches the estimation sample, so any choice keeps the risk; a poor one only costs radius.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipoise.core import InputError
from equipoise.smoothing.bounds import UNKNOWN, Bounds, Smoothness, count_bounds, margin_bounds, moment_bounds
from equipoise.smoothing.moments import Moments, bucket_scores
from equipoise.smoothing.partitions import Build, Partition, one_against_rest
from equipoise.smoothing.ramp import Floats

_SPLITS = 3
_BLOCK = 4_000_000  # draws unrolled at a time


@dataclass(frozen=True)
class Plan:
    """What the selection sample decided: the buckets, where to bound margins directly, and the radius it hopes for."""

    partition: Partition
    direct: NDArray[np.bool_]
    hoped: Floats
    shift: Floats


def plan_counts(
    partitions: Sequence[Build], direct: bool, selection: Floats, n: int, sigma: float, alpha: float
) -> Plan:
    """Choose among the partitions by the radius that n draws with the frequencies of a left-out half would give."""
    options = _options(partitions, direct and n >= 2)
    if len(options) == 1:
        partition = options[0][0](selection)
        hoped = _rating(count_bounds(*_expected(selection, n), partition, sigma, alpha))
        return _choose(options, [hoped], selection, None)
    ratings = [np.zeros(len(selection)) for _ in options]
    for seen, left_out in _halves(selection):
        expected, total = _expected(left_out, n)
        for rating, (build, margins) in zip(ratings, options, strict=True):
            partition = build(_keep_top(seen, selection))
            if margins:
                moments = Moments.of_counts(partition.gather(expected), np.maximum(total, 2))
                rating += _rating(margin_bounds(moments, partition, sigma, alpha)) / (2 * _SPLITS)
            else:
                rating += _rating(count_bounds(expected, total, partition, sigma, alpha)) / (2 * _SPLITS)
    return _choose(options, ratings, selection, None)


def plan_scores(
    partitions: Sequence[Build],
    direct: bool,
    scores: Floats,
    n: int,
    sigma: float,
    alpha: float,
    smoothness: Smoothness = UNKNOWN,
) -> Plan:
    """The same for soft scores (N, n0, c), with the mean and variance of the left-out half."""
    if scores.shape[1] < 2 or n < 2:
        raise InputError("soft votes need at least two draws in each sample: a variance is estimated")
    options = _options(partitions, direct)
    mass = scores.sum(axis=1)
    halves = [(scores, scores)]
    if scores.shape[1] >= 4:
        halves = [(scores[:, ::2], scores[:, 1::2]), (scores[:, 1::2], scores[:, ::2])]
    ratings = [np.zeros(len(scores)) for _ in options]
    for seen, left_out in halves:
        for rating, (build, margins) in zip(ratings, options, strict=True):
            partition = build(_keep_top(seen.sum(axis=1), mass))
            moments = Moments.of(bucket_scores(left_out, partition)).scaled(n)
            bound = margin_bounds if margins else moment_bounds
            rating += _rating(bound(moments, partition, sigma, alpha, smoothness)) / len(halves)
    return _choose(options, ratings, mass, scores)


def _options(partitions: Sequence[Build], direct: bool) -> list[tuple[Build, bool]]:
    """Every partition with two-sided bounds, and those of several buckets with direct margins too."""
    plain = [(build, False) for build in partitions]
    return plain + [(build, True) for build in partitions if direct and build is not one_against_rest]


def _choose(
    options: Sequence[tuple[Build, bool]], ratings: Sequence[Floats], mass: Floats, scores: Floats | None
) -> Plan:
    partition, hoped = options[0][0](mass), ratings[0]
    flags = np.full(len(hoped), options[0][1])
    for (build, margins), rating in zip(options[1:], ratings[1:], strict=True):
        better = rating > hoped
        partition = build(mass).where(better, partition)
        flags = np.where(better, margins, flags)
        hoped = np.where(better, rating, hoped)
    shape = (len(hoped), int(partition.buckets.max(initial=1)))
    shift = np.zeros(shape) if scores is None else bucket_scores(scores, partition).mean(axis=1)
    return Plan(partition, flags, hoped, shift)


def _rating(bounds: Bounds) -> Floats:
    """The radius, and where there is none the (negative) gap of the bounds: the less hopeless option wins then."""
    return np.where(bounds.radius > 0, bounds.radius, np.minimum(bounds.p_lower - bounds.p_upper, 0.0))


def _expected(frequencies: Floats, n: int) -> tuple[Floats, Floats]:
    """Whole counts of n draws with the given frequencies, and their totals.

    The few votes against the top class are a poor picture of how its rivals share them: one pseudo-vote, spread over all
    rivals, is mixed in. Their sum stays, so unanimous votes stay unanimous.
    """
    n0 = np.maximum(frequencies.sum(axis=1, keepdims=True), 1.0)
    rows, top = np.arange(len(frequencies)), frequencies.argmax(axis=1)
    rivals = frequencies.astype(np.float64)
    rivals[rows, top] = 0.0
    against = rivals.sum(axis=1, keepdims=True)
    spread = (rivals + 1 / (frequencies.shape[1] - 1)) * (against / (against + 1))
    spread[rows, top] = frequencies[rows, top]
    expected = np.floor(spread / n0 * n)
    return expected, np.full(len(expected), float(n))


def _keep_top(part: Floats, whole: Floats) -> Floats:
    """The scores of a half, with the class selected on the whole sample in front."""
    result = part.astype(np.float64)
    result[np.arange(len(whole)), whole.argmax(axis=1)] += whole.sum(axis=1) + 1
    return result


def _halves(selection: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Counts of random halves of the draws, both ways; fixed permutations, so a row never depends on its neighbours."""
    total = selection.sum(axis=1).astype(np.int64)
    splits = [np.zeros_like(selection) for _ in range(_SPLITS)]
    classes = np.arange(selection.shape[1])
    for n0 in np.unique(total[total > 0]):
        orders = [np.random.default_rng(k).permutation(n0)[: (n0 + 1) // 2] for k in range(_SPLITS)]
        same = np.flatnonzero(total == n0)
        for rows in np.array_split(same, -(-len(same) * int(n0) // _BLOCK)):
            counts = selection[rows].astype(np.int64)
            draws = np.repeat(np.broadcast_to(classes, counts.shape).ravel(), counts.ravel()).reshape(len(rows), n0)
            for half, order in zip(splits, orders, strict=True):
                kept = draws[:, order]
                np.add.at(half, (np.repeat(rows, kept.shape[1]), kept.ravel()), 1.0)
    for half in splits:
        yield half, selection - half
        yield selection - half, half
