"""What to bound, decided on the selection sample: which buckets, how the risk is split, whether margins directly, when to stop.

Nothing here touches the estimation sample, so any choice keeps the risk; a poor one only costs radius.

An option for votes is rated by its expected radius: the share of votes against the class, and the part of them that the largest
other bucket holds, are given the spread that n0 draws leave them. An option for scores is rated by cross-validation: the
buckets of one half of the draws with the mean and variance of the other half, because a partition looks better on the sample it
was made on than it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import betaincinv, ndtr, ndtri

from equipoise.core import Floats, InputError, Mask
from equipoise.smoothing.bounds import (
    UNKNOWN,
    Bounds,
    Gaussian,
    Moments,
    Smoothness,
    bucket_scores,
    margin_bounds,
    moment_bounds,
)
from equipoise.smoothing.intervals import clopper_pearson, empirical_bernstein, log_e_value
from equipoise.smoothing.joint import joint_radius
from equipoise.smoothing.procedures import Build, Option, Partition, Procedure, one_against_rest
from equipoise.smoothing.radii import radius_mono, radius_multi

_QUANTILES = (1 / 6, 1 / 2, 5 / 6)  # three equally likely values of an unknown share


@dataclass(frozen=True)
class Plan:
    """What the selection sample decided.

    Args:
        partition: the buckets.
        direct: where margins are bounded directly.
        top: share of α for the class.
        rival: share of α for each rival.
        expected: the expected radius.
        shift: mean bucket scores, to center moments with.
        joint: where votes of class and rival are tested together.
    """

    partition: Partition
    direct: Mask
    top: Floats
    rival: Floats
    expected: Floats
    shift: Floats
    joint: Mask


def plan_counts(row: Procedure, selection: Floats, n: int, noise: Gaussian, alpha: float) -> Plan:
    """Choose among the options for votes by the radius that n draws would give.

    Args:
        row: the procedure.
        selection: counts (N, c) of the selection draws.
        n: number of estimation draws.
        noise: the same for all inputs.
        alpha: risk per input.
    """
    options = [o for o in row.options if n >= 2 or not o.direct]
    # options share their partitions, and a sort takes time
    made = {o.partition: o.buckets(selection) for o in options}
    partitions = [made[o.partition] for o in options]
    ratings = np.zeros((len(options), len(selection)))
    if len(options) > 1:
        for rating, option, partition in zip(ratings, options, partitions, strict=True):
            rating[:] = _expected_radius(option, partition, selection, n, noise, alpha)
    return _plan(options, partitions, ratings, np.zeros((len(selection), 1)))


def plan_scores(
    row: Procedure,
    scores: Floats,
    n: int,
    noise: Gaussian,
    alpha: float,
    smoothness: Smoothness = UNKNOWN,
) -> Plan:
    """The same for soft scores, with the mean and variance of the left-out half.

    Args:
        row: the procedure.
        scores: of the selection draws, (N, n0, c).
        n: number of estimation draws.
        noise: the same for all inputs.
        alpha: risk per input.
        smoothness: Lipschitz constants of the scores.
    """
    if scores.shape[1] < 2 or n < 2:
        raise InputError(
            "soft votes need at least two draws in each sample: a variance is estimated"
        )
    options = _score_options(row)
    mass = scores.sum(axis=1)
    selected = mass.argmax(axis=1)
    halves = [(scores, scores)]
    if scores.shape[1] >= 4:
        even = scores[:, ::2]
        odd = scores[:, 1::2]
        halves = [(even, odd), (odd, even)]
    ratings = np.zeros((len(options), len(scores)))
    for half, left_out in halves:
        ranked = half.sum(axis=1)
        # the class of the whole sample stays in front
        ranked[np.arange(len(mass)), selected] += mass.sum(axis=1) + 1
        for rating, option in zip(ratings, options, strict=True):
            partition = option.buckets(ranked)
            moments = Moments.of(bucket_scores(left_out, partition)).scaled(n)
            if option.direct:
                bounds = margin_bounds(
                    moments, partition, noise, np.full(len(mass), alpha), smoothness
                )
            else:
                top, rival = option.shares(partition)
                bounds = moment_bounds(
                    moments, partition, noise, alpha * top, alpha * rival, smoothness
                )
            rating += _rating(bounds) / len(halves)
    return _plan(options, [o.buckets(mass) for o in options], ratings, scores)


def _score_options(row: Procedure) -> list[Option]:
    """Options that a stored sample of scores can tell apart: by buckets and kind, each kind with its first share."""
    options: dict[tuple[Build, bool], Option] = {}
    for option in row.options:
        if not option.joint:
            first = next(o for o in row.options if o.direct == option.direct)
            options.setdefault(
                (option.partition, option.direct),
                Option(option.partition, first.share, option.direct),
            )
    return list(options.values())


def _rating(bounds: Bounds) -> Floats:
    """The radius, and where there is none the (negative) gap of the bounds: the less hopeless option wins then."""
    return np.where(
        bounds.radius > 0, bounds.radius, np.minimum(bounds.p_lower - bounds.p_upper, 0.0)
    )


def _plan(
    options: Sequence[Option], partitions: Sequence[Partition], ratings: Floats, scores: Floats
) -> Plan:
    """Take the best option of every input; scores (N, n0, c) give the shift."""
    best = ratings.argmax(axis=0)
    rows = np.arange(len(best))
    singles = np.stack([p.singles for p in partitions])[best, rows]
    orders = np.stack([p.order for p in partitions])[best, rows]
    partition = Partition(orders, singles)
    shares = [np.stack(np.broadcast_arrays(*o.shares(partition))) for o in options]
    top, rival = np.stack(shares)[best, :, rows].T
    direct = np.array([o.direct for o in options])[best]
    joint = np.array([o.joint for o in options])[best]
    shift = scores
    if scores.ndim == 3:
        shift = bucket_scores(scores, partition).mean(axis=1)
    return Plan(partition, direct, top, rival, ratings[best, rows], shift, joint)


def stored_plan(row: Procedure, partition: Partition, direct: Mask, shift: Floats) -> Plan:
    """The plan of soft votes that were sampled before: their buckets are fixed, the shares are those of the row.

    Args:
        row: the procedure, whose first option of each kind gives the shares.
        partition: the buckets that the moments were taken for.
        direct: where the sampling run bounded margins directly.
        shift: the mean bucket scores of the selection sample.
    """
    direct = direct & any(o.direct for o in row.options)
    pairs = []
    for kind in (False, True):
        option = next((o for o in row.options if o.direct == kind), row.options[0])
        pairs.append(np.stack(np.broadcast_arrays(*option.shares(partition))))
    top, rival = np.where(direct, pairs[1], pairs[0])
    return Plan(partition, direct, top, rival, np.zeros(len(direct)), shift, np.zeros_like(direct))


# ---- expected radii of votes -------------------------------------------------------------------------------------------


def _expected_radius(
    option: Option, partition: Partition, selection: Floats, n: int, noise: Gaussian, alpha: float
) -> Floats:
    """Mean radius of an option over nine pairs (p₁, p₂) that fit the selection votes, computed once for equal votes."""
    buckets = partition.gather(selection.astype(np.float64))
    top, rival = np.broadcast_arrays(*option.shares(partition))
    second = buckets[:, 1:].max(axis=1)
    columns = (
        buckets[:, 0],
        second,
        buckets.sum(axis=1),
        partition.buckets,
        alpha * top,
        alpha * rival,
    )
    keys, place = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    radius = np.zeros(len(keys))
    for q in _QUANTILES:
        for s in _QUANTILES:
            p1, p2 = plausible(keys[:, 0], keys[:, 1], keys[:, 2], q, s, selection.shape[1])
            if option.joint:
                radius += _joint_radius(keys, p1, p2, n, noise, alpha)
            elif option.direct:
                radius += _plain_radius(*_margin_ends(p1, p2, n, alpha), noise)
            else:
                radius += _plain_radius(*_binomial_ends(p1, p2, n, keys), noise)
    return radius[place.reshape(-1)] / len(_QUANTILES) ** 2


def _joint_radius(
    keys: Floats, p1: Floats, p2: Floats, n: int, noise: Gaussian, alpha: float
) -> Floats:
    """The radius of the joint test, where it can be better than two bounds, else −1: with enough votes against the class,
    and a selection sample that is not too small to place its zone. It takes longer, so it has to promise one percent more.
    """
    radius = np.full(len(keys), -1.0)
    some = ((keys[:, 2] - keys[:, 0]) * n > 30 * keys[:, 2]) & (n <= 40 * keys[:, 2])
    if some.any():
        hits = np.floor(n * p1[some])
        rival = np.ceil(n * p2[some])
        selection = keys[some, 0], keys[some, 1], keys[some, 2]
        tested = joint_radius(
            hits, rival, np.full(len(hits), float(n)), selection, alpha, noise.variation
        )
        radius[some] = np.where(tested > 0, 0.99 * noise.sigma * tested, -1.0)
    return radius


def _margin_ends(p1: Floats, p2: Floats, n: int, alpha: float) -> tuple[Floats, Floats]:
    """Empirical Bernstein for the margin of n votes."""
    var = (p1 + p2 - (p1 - p2) ** 2) / 4
    low = empirical_bernstein((1 + p1 - p2) / 2, var, n, alpha, "lower")
    return low, 1 - low


def _binomial_ends(p1: Floats, p2: Floats, n: int, keys: Floats) -> tuple[Floats, Floats]:
    """Clopper–Pearson for n votes at the risks of the keys."""
    low = clopper_pearson(np.floor(n * p1), n, keys[:, 4], "lower")
    up = clopper_pearson(np.ceil(n * p2), n, keys[:, 5], "upper")
    return low, np.where(keys[:, 3] > 2, np.minimum(1 - low, up), 1 - low)


def _plain_radius(low: Floats, up: Floats, noise: Gaussian) -> Floats:
    """Cohen's radius; where there is none, the (negative) gap."""
    return _rating(Bounds(low, up, radius_multi(low, up, noise.sigma)))


def plausible(
    most: Any, second: Any, total: Any, q: float, s: float, classes: int
) -> tuple[Floats, Floats]:
    """Probabilities (p₁, p₂) that fit selection votes: quantile q of the share against the class, s of the runner-up's part.

    Args:
        most: votes of the class.
        second: votes of the largest other bucket.
        total: all votes.
        q: quantile of the share against the class.
        s: quantile of the runner-up's part of that share.
        classes: number of classes.
    """
    against = np.maximum(total - most, 0.0)
    rest = betaincinv(against + 0.5, most + 0.5, q)
    share = betaincinv(second + 0.5, against - second + 0.35, s) if classes > 2 else 1.0
    return 1 - rest, np.maximum(rest * share, rest / max(classes - 1, 1))


# ---- stopping at a target radius ---------------------------------------------------------------------------------------


def target_probability(epsilon: float, sigma: float) -> float:
    """The p0 = Φ(ε/σ), rounded up until `radius_mono(p0, σ) ≥ ε`.

    Args:
        epsilon: the target radius ε.
        sigma: noise level.

    >>> round(target_probability(0.25, 0.25), 6)
    0.841345
    """
    p0 = float(ndtr(epsilon / sigma))
    for k in range(50):
        if p0 < 1 and float(radius_mono(p0, sigma)) >= epsilon:
            return p0
        p0 = min(p0 + 2.0 ** (k - 50) * (1 - p0), 1.0)
    raise InputError(
        f"the target radius {epsilon} cannot be certified at noise level {sigma}: it would need p = 1"
    )


@dataclass(frozen=True)
class TargetTest:
    """The e-process of "the certified radius is at most ε" for votes: Cohen's test, and tests of class and rivals together.

    The claim is false iff some rival k has `Φ⁻¹(p_A) − Φ⁻¹(p_k) < 2ε/σ`. For a level t fixed beforehand that means
    `p_A ≤ Φ(t)` or `p_k ≥ Φ(t − 2ε/σ)`, so the smaller of the two e-values is an e-value against it; so is any average
    over levels. Each rival is tested at the full α and the smallest counts, which is that of the rival with most votes.
    Cohen's level is `t = ε/σ`, where the second half follows from the first.

    Args:
        levels: pairs (p_A must exceed, p_k must stay below), all of equal weight; the second is 1 for Cohen's.
        claimed: lower bound of p_A that certification implies (0 if it implies none).
    """

    levels: tuple[tuple[float, float], ...]
    claimed: float

    @classmethod
    def of(cls, row: Procedure, ranked: Floats, epsilon: float, noise: Gaussian) -> TargetTest:
        """Choose the levels on the selection votes: Cohen's, and three for different guesses of the probabilities behind them.

        Args:
            row: the procedure.
            ranked: selection votes in falling order.
            epsilon: the target radius.
            noise: its level and variation.
        """
        sigma = noise.sigma
        spread = noise.variation
        needed = target_probability(epsilon, sigma)
        cohen = min(needed + spread * (1 + 2.0**-50) + 2.0**-52 * (spread > 0), 1 - 2.0**-53)
        if len(ranked) < 3 or all(o.partition is one_against_rest for o in row.options):
            return cls(((cohen, 1.0),), needed)
        # near the target one level alone certifies half as many inputs as three: the votes say little of where it should lie
        guesses = [
            plausible(ranked[0], ranked[1], ranked.sum(), q, s, len(ranked))
            for q, s in ((0.5, 0.5), (0.25, 0.75), (0.75, 0.25))
        ]
        gap = 2 * epsilon / sigma
        levels = [_best_level(float(p1), float(p2), gap, spread) for p1, p2 in guesses]
        return cls(((cohen, 1.0), *levels), 0.0)

    def log_e(self, hits: float, rival: float, draws: float) -> float:
        """ln e after these votes, rounded down.

        Args:
            hits: votes of the class.
            rival: votes of the rival with most votes.
            draws: all votes.
        """
        terms = []
        for p1, p2 in self.levels:
            e = float(log_e_value(hits, draws, p1))
            if p2 < 1:
                e = min(e, float(log_e_value(draws - rival, draws, 1 - p2)))
            terms.append(e)
        return float(np.logaddexp.reduce(terms)) - float(np.log(len(terms))) - 1e-12


def _best_level(p1: float, p2: float, gap: float, spread: float) -> tuple[float, float]:
    """The level at which class and rival are told apart at the same speed."""
    low = ndtri(p2) + gap
    high = ndtri(p1)
    t = np.linspace(low, high, 33)[1:-1] if low < high else np.array([gap / 2])
    above = np.minimum(ndtr(t) + 2.0**-45 + spread, 1 - 2.0**-50)
    below = np.maximum(ndtr(t - gap) - 2.0**-45 - spread, 1e-12)
    rate = np.minimum(_information(p1, above), _information(1 - p2, 1 - below))
    best = int(rate.argmax())
    return float(above[best]), float(below[best])


def _information(p: float, against: Any) -> Floats:
    """Kullback–Leibler divergence of coins, 0 where p is on the wrong side: nats gained per draw."""
    p = min(max(p, 1e-12), 1 - 1e-12)
    nats = p * np.log(p / against) + (1 - p) * np.log((1 - p) / (1 - np.asarray(against)))
    return np.where(p > against, nats, 0.0)
