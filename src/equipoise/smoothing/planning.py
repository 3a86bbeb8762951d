"""What to bound, decided on the selection sample: which buckets, how the risk is split, and whether margins directly.

Nothing here touches the estimation sample, so any choice keeps the risk; a poor one only costs radius.

Votes are planned in the order of their counts, once for equal counts. Where all partitions are fixed (one against the
rest, every class by itself) an option is rated by its expected radius: the share of votes against the class and the
runner-up's part of them are given the spread that n0 draws leave them. A partition drawn up on a sample looks better on
that sample than it is (its pooled classes are those that happened to get few votes), so those are compared by
cross-validation: the partition of one half is rated on the other half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri

from equipoise.core import InputError
from equipoise.smoothing.adaptive import pictured
from equipoise.smoothing.bounds import UNKNOWN, Bounds, Gaussian, Smoothness, count_bounds, margin_bounds, moment_bounds
from equipoise.smoothing.joint import joint_radius
from equipoise.smoothing.moments import (
    Build,
    Ints,
    Moments,
    Partition,
    bucket_scores,
    every_class,
    one_against_rest,
    ranking,
)
from equipoise.smoothing.procedures import Option, Procedure
from equipoise.smoothing.ramp import Floats

_SPLITS = 3
_BLOCK = 4_000_000  # numbers unrolled at a time
#: partitions that do not depend on the sample → number of classes by themselves
_FIXED: dict[Build, Callable[[int], int]] = {one_against_rest: lambda c: 0, every_class: lambda c: c - 1}
_QUANTILES = (1 / 6, 1 / 2, 5 / 6)  # three equally likely pictures of an unknown share


@dataclass(frozen=True)
class Plan:
    """What the selection sample decided: the buckets, where to bound margins directly, the shares of α for the class
    and for each rival, and the radius it hopes for. `shift` are the mean bucket scores, to centre moments with. `joint`:
    where votes of class and rival are tested together.
    """

    partition: Partition
    direct: NDArray[np.bool_]
    top: Floats
    rival: Floats
    hoped: Floats
    shift: Floats
    joint: NDArray[np.bool_] | None = None


def plan_counts(row: Procedure, selection: Floats, n: int, noise: Gaussian, alpha: float) -> Plan:
    """Choose among the options by the radius that n draws would give; noise and alpha are the same for all inputs."""
    options = [o for o in row.options if n >= 2 or not o.direct]
    order = ranking(selection)
    ranked = np.take_along_axis(selection.astype(np.float64), order, axis=1)
    if all(o.partition in _FIXED for o in options):
        keys = np.stack([ranked[:, 0], ranked[:, 1], ranked.sum(axis=1)], axis=1)
        kept, place = np.unique(keys, axis=0, return_inverse=True)
        best, hoped = _expected_radius(options, kept, n, noise, alpha, selection.shape[1])
        singles = np.array([_FIXED[o.partition](selection.shape[1]) for o in options])[best]
    else:
        kept, place = np.unique(ranked, axis=0, return_inverse=True)
        best, hoped = _cross_validated(options, kept, n, noise, alpha)
        singles = np.stack([o.buckets(kept).singles for o in options])[best, np.arange(len(kept))]
    place = np.reshape(place, -1)
    partition = Partition(order, singles[place])
    return _plan(options, best[place], partition, hoped[place], None)


def plan_scores(
    row: Procedure, scores: Floats, n: int, noise: Gaussian, alpha: float, smoothness: Smoothness = UNKNOWN
) -> Plan:
    """The same for soft scores (N, n0, c), with the mean and variance of the left-out half."""
    if scores.shape[1] < 2 or n < 2:
        raise InputError("soft votes need at least two draws in each sample: a variance is estimated")
    options = _told_apart(row)  # none of them joint
    mass = scores.sum(axis=1)
    halves = [(scores, scores)]
    if scores.shape[1] >= 4:
        halves = [(scores[:, ::2], scores[:, 1::2]), (scores[:, 1::2], scores[:, ::2])]
    ratings = np.zeros((len(options), len(scores)))
    for seen, left_out in halves:
        for rating, option in zip(ratings, options, strict=True):
            partition = option.buckets(_keep_top(seen.sum(axis=1), mass))
            moments = Moments.of(bucket_scores(left_out, partition)).scaled(n)
            top, rival = (alpha * s for s in option.shares(partition))
            if option.direct:
                found = margin_bounds(moments, partition, noise, np.full(len(mass), alpha), smoothness)
            else:
                found = moment_bounds(moments, partition, noise, top, rival, smoothness)
            rating += _rating(found) / len(halves)
    best, rows = ratings.argmax(axis=0), np.arange(len(mass))
    each = [o.buckets(mass) for o in options]
    singles = np.stack([p.singles for p in each])[best, rows]
    return _plan(options, best, Partition(each[0].order, singles), ratings[best, rows], scores)


def _told_apart(row: Procedure) -> list[Option]:
    """Options that a stored sample of scores can tell apart: by buckets and kind, each kind with its first share."""
    found: dict[tuple[Build, bool], Option] = {}
    for option in (o for o in row.options if not o.joint):
        first = next(o for o in row.options if o.direct == option.direct)
        found.setdefault((option.partition, option.direct), Option(option.partition, first.share, option.direct))
    return list(found.values())


def _plan(options: Sequence[Option], best: Ints, partition: Partition, hoped: Floats, scores: Floats | None) -> Plan:
    shares = [np.stack(np.broadcast_arrays(*o.shares(partition))) for o in options]
    top, rival = np.stack(shares)[best, :, np.arange(len(best))].T
    direct = np.array([o.direct for o in options])[best]
    shape = (len(hoped), int(partition.buckets.max(initial=1)))
    shift = np.zeros(shape) if scores is None else bucket_scores(scores, partition).mean(axis=1)
    joint = np.array([o.joint for o in options])[best]
    return Plan(partition, direct, top, rival, hoped, shift, joint)


# ---- votes, partitions fixed: expected radius --------------------------------------------------------------------------


def _expected_radius(
    options: Sequence[Option], keys: Floats, n: int, noise: Gaussian, alpha: float, classes: int
) -> tuple[Ints, Floats]:
    """The best option for (largest count, second count, all votes), and its mean radius over nine pictures of (p₁, p₂)."""
    ratings = np.zeros((len(options), len(keys)))
    for q in _QUANTILES:
        for s in _QUANTILES:
            p1, p2 = pictured(keys[:, 0], keys[:, 1], keys[:, 2], q, s, classes)
            for rating, option in zip(ratings, options, strict=True):
                found = _joint_promise(keys, p1, p2, n, noise, alpha) if option.joint else None
                if found is None:
                    found = _promise(option, p1, p2, n, noise, alpha, classes)
                rating += found / len(_QUANTILES) ** 2
    best = ratings.argmax(axis=0)
    return best, ratings[best, np.arange(len(keys))]


def _joint_promise(keys: Floats, p1: Floats, p2: Floats, n: int, noise: Gaussian, alpha: float) -> Floats:
    """The radius of the joint test, where it can be better than two bounds: with enough votes against the class, and a
    selection sample that is not too small to place its zone.

    It takes longer, so it has to promise one percent more.
    """
    found = np.full(len(keys), -1.0)
    some = ((keys[:, 2] - keys[:, 0]) * n > 30 * keys[:, 2]) & (n <= 40 * keys[:, 2])
    if some.any():
        hits, rival = np.floor(n * p1[some]), np.ceil(n * p2[some])
        seen = keys[some, 0], keys[some, 1], keys[some, 2]
        radius = joint_radius(hits, rival, np.full(len(hits), float(n)), seen, alpha, float(noise.variation))
        found[some] = np.where(radius > 0, 0.99 * float(noise.sigma) * radius, -1.0)
    return found


def _promise(option: Option, p1: Floats, p2: Floats, n: int, noise: Gaussian, alpha: float, classes: int) -> Floats:
    """Roughly the radius of n draws with these shares of votes; where there is none, the (negative) gap."""
    if option.direct:
        h, var = (1 + p1 - p2) / 2, (p1 + p2 - (p1 - p2) ** 2) / 4
        log = np.log(2 / alpha)
        low = h - np.sqrt(2 * var * log / n) - 7 * log / (3 * (n - 1))
        up = 1 - low
    else:
        example = Partition(np.arange(classes)[None], np.array([_FIXED[option.partition](classes)]))
        top, rival = (alpha * float(s[0]) for s in option.shares(example))
        low = betaincinv(np.maximum(n * p1, 1e-9), n * (1 - p1) + 1, top)
        up = 1 - low
        if int(example.buckets[0]) > 2:
            up = np.minimum(up, betaincinv(n * p2 + 1, np.maximum(n * (1 - p2), 1e-9), 1 - rival))
    gap = np.clip(low, 0, 1) - np.clip(up, 0, 1)
    with np.errstate(invalid="ignore"):
        radius = 0.5 * float(noise.sigma) * (ndtri(np.clip(low, 1e-300, 1)) - ndtri(np.clip(up, 1e-300, 1)))
    return np.where(gap > 0, radius, gap)


# ---- votes, partitions learned: cross-validation -----------------------------------------------------------------------


def _cross_validated(
    options: Sequence[Option], ranked: Floats, n: int, noise: Gaussian, alpha: float
) -> tuple[Ints, Floats]:
    """The option with the largest radius on left-out halves of the ranked counts."""
    ratings = np.zeros((len(options), len(ranked)))
    for seen, left_out in _halves(ranked):
        expected, total = _expected(left_out, n)
        for rating, option in zip(ratings, options, strict=True):
            rating += _rate_counts(option, _keep_top(seen, ranked), expected, total, noise, alpha) / (2 * _SPLITS)
    best = ratings.argmax(axis=0)
    return best, ratings[best, np.arange(len(ranked))]


def _rate_counts(
    option: Option, seen: Floats, expected: Floats, total: Floats, noise: Gaussian, alpha: float
) -> Floats:
    partition = option.buckets(seen)
    if option.direct:
        moments = Moments.of_counts(partition.gather(expected), np.maximum(total, 2))
        return _rating(margin_bounds(moments, partition, noise, np.full(len(total), alpha)))
    top, rival = (alpha * s for s in option.shares(partition))
    return _rating(count_bounds(expected, total, partition, noise, top, rival))


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


def _halves(ranked: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Counts of random halves of the draws, both ways; fixed permutations, so a row never depends on its neighbours."""
    total = ranked.sum(axis=1).astype(np.int64)
    splits = [np.zeros_like(ranked) for _ in range(_SPLITS)]
    classes = np.arange(ranked.shape[1])
    for n0 in np.unique(total[total > 0]):
        orders = [np.random.default_rng(k).permutation(n0)[: (n0 + 1) // 2] for k in range(_SPLITS)]
        same = np.flatnonzero(total == n0)
        for rows in np.array_split(same, -(-len(same) * int(n0) // _BLOCK)):
            counts = ranked[rows].astype(np.int64)
            draws = np.repeat(np.broadcast_to(classes, counts.shape).ravel(), counts.ravel()).reshape(len(rows), n0)
            for half, order in zip(splits, orders, strict=True):
                kept = draws[:, order]
                np.add.at(half, (np.repeat(rows, kept.shape[1]), kept.ravel()), 1.0)
    for half in splits:
        yield half, ranked - half
        yield ranked - half, half
