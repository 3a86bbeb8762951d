"""From a sample to certificates, the only way: sufficient statistics, a row of the table and a setting in, radii out.

A sample is what is left of the draws: votes, moments of soft scores, or votes that were stopped by looking at them. The
classifier, stored runs and adaptive sampling all end here, so equal statistics give equal certificates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr

from equipoise.core import InputError, Refused
from equipoise.smoothing.adaptive import TargetTest, lower_sequence, upper_sequence
from equipoise.smoothing.bounds import (
    UNKNOWN,
    Bounds,
    Gaussian,
    Smoothness,
    count_bounds,
    margin_bounds,
    moment_bounds,
    sample_bounds,
)
from equipoise.smoothing.certificates import ABSTAIN, NOT_COVERED, Certificates
from equipoise.smoothing.intervals import complement
from equipoise.smoothing.joint import joint_radius
from equipoise.smoothing.moments import Moments, Partition, bucket_scores, ranking
from equipoise.smoothing.planning import Plan, plan_counts, plan_scores
from equipoise.smoothing.procedures import DEFAULT, Procedure, find_procedure
from equipoise.smoothing.radii import positive, radius_multi
from equipoise.smoothing.ramp import Floats

Interval = Literal["bernstein", "betting"]
_ARRAYS = ("prediction", "radius", "selected", "p_lower", "p_upper", "buckets", "draws")


@dataclass(frozen=True)
class Setting:
    """What certificates are about and rest on.

    Args:
        noise: its level, and how far the drawn law may be from the Gaussian.
        alpha: risk per input.
        about: the classifier, in words.
        caveats: what is not covered, in words.
        distance: how far the sampled points are from the inputs, (N,) or a number: subtracted from the radii.
    """

    noise: Gaussian
    alpha: float
    about: str = ""
    caveats: str = NOT_COVERED
    distance: Any = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, int | float | np.floating) or not 0 < self.alpha < 1:
            raise InputError(f"the risk alpha must lie strictly between 0 and 1, got {self.alpha}")


@dataclass(frozen=True)
class Votes:
    """Counts (N, c) of selection and of estimation draws, the number of the latter (some may vote for no class), and
    uniform numbers (N, 2) drawn before them, for rows that break ties."""

    selection: Floats
    estimation: Floats
    draws: Floats
    ties: Floats | None = None


@dataclass(frozen=True)
class Scores:
    """Moments of the bucket scores of a plan, or the scores themselves (N, n, B) for betting."""

    plan: Plan
    moments: Moments
    smoothness: Smoothness = UNKNOWN
    kept: Floats | None = None
    interval: Interval = "bernstein"


@dataclass(frozen=True)
class Stopped:
    """Votes of inputs that stopped by looking at their draws: at a target radius, or near what `most` draws could give."""

    votes: Votes
    most: int
    target: float | None = None


def derive(sample: Votes | Scores | Stopped, row: Procedure, setting: Setting) -> Certificates:
    """Certificates of N inputs, each wrong with probability at most alpha over the estimation draws.

    Guarantee: for any selection sample independent of the estimation sample, and any procedure whose shares are valid;
    stopped samples get anytime-valid bounds only.
    """
    if isinstance(sample, Scores):
        return _assemble(_score_bounds(sample, setting), sample.plan, sample.moments.n, row.name, setting)
    if isinstance(sample, Stopped):
        return _stopped(sample, row, setting)
    plan = plan_votes(sample, row, setting)
    return _assemble(_vote_bounds(sample, plan, row, setting), plan, sample.draws, row.name, setting)


def plan_votes(sample: Votes, row: Procedure, setting: Setting, alpha: float | None = None) -> Plan:
    """What the selection votes decide; only the number of estimation draws is looked at."""
    most = int(sample.draws.max(initial=1))
    mean = Gaussian(float(np.mean(setting.noise.sigma)), float(np.max(setting.noise.variation, initial=0.0)))
    return plan_counts(row, sample.selection, most, mean, setting.alpha if alpha is None else alpha)


def stored_plan(row: Procedure, order: Any, singles: Any, direct: NDArray[np.bool_], shift: Floats) -> Plan:
    """The plan of soft votes that were sampled before: their buckets are fixed, the shares are those of the row."""
    partition = Partition(order, singles)
    direct = direct & row.margins
    pairs = [np.stack(np.broadcast_arrays(*row.stored(partition, d))) for d in (False, True)]
    top, rival = np.where(direct, pairs[1], pairs[0])
    return Plan(partition, direct, top, rival, np.zeros(len(direct)), shift)


def _vote_bounds(sample: Votes, plan: Plan, row: Procedure, setting: Setting) -> Bounds:
    if row.ties and sample.ties is None:
        raise Refused(
            f"{row.name!r} needs uniform numbers drawn before the sample: give ties, or use a classifier or run"
        )
    ties = sample.ties if row.ties else None
    noise, alpha = setting.noise, setting.alpha
    bounds = count_bounds(
        sample.estimation, sample.draws, plan.partition, noise, alpha * plan.top, alpha * plan.rival, ties
    )
    if plan.joint is not None and plan.joint.any():
        bounds = _joint_bounds(sample, plan, plan.joint, setting).where(plan.joint, bounds)
    if plan.direct.any():
        moments = Moments.of_counts(plan.partition.gather(sample.estimation), np.maximum(sample.draws, 2))
        risk = np.full(len(sample.draws), alpha)
        bounds = margin_bounds(moments, plan.partition, noise, risk).where(plan.direct, bounds)
    return bounds


def _joint_bounds(sample: Votes, plan: Plan, at: NDArray[np.bool_], setting: Setting) -> Bounds:
    """Class and strongest rival tested together; scores that are symmetric about ½ and give the same radius."""
    noise, radius = setting.noise, np.zeros(len(at))
    first, second = (np.take_along_axis(v, plan.partition.order, axis=1) for v in (sample.selection, sample.estimation))
    rows, variation = np.flatnonzero(at), float(np.max(noise.variation, initial=0.0))
    for some in np.array_split(rows, -(-len(rows) // 4096)):
        seen = first[some, 0], first[some, 1], first[some].sum(axis=1)
        votes = second[some, 0], second[some, 1:].max(axis=1), sample.draws[some]
        radius[some] = joint_radius(*votes, seen, setting.alpha, variation)
    p = ndtr(radius)
    return Bounds(p, 1 - p, radius * noise.sigma)


def _score_bounds(sample: Scores, setting: Setting) -> Bounds:
    plan, noise, alpha = sample.plan, setting.noise, setting.alpha
    shared = (plan.partition, noise, alpha * plan.top, alpha * plan.rival, sample.smoothness)
    if sample.interval == "bernstein":
        bounds = moment_bounds(sample.moments, *shared)
    elif sample.interval == "betting" and sample.kept is not None:
        bounds = sample_bounds(sample.kept, *shared)
    else:
        raise InputError(f"interval must be 'bernstein' or 'betting', got {sample.interval!r}")
    if plan.direct.any():
        risk = np.full(len(plan.direct), alpha)
        direct = margin_bounds(sample.moments, plan.partition, noise, risk, sample.smoothness)
        bounds = direct.where(plan.direct, bounds)
    return bounds


def _stopped(sample: Stopped, row: Procedure, setting: Setting) -> Certificates:
    """Anytime-valid bounds at the moment each input stopped: an e-value against the target, or confidence sequences."""
    votes, noise, alpha = sample.votes, setting.noise, setting.alpha
    order = ranking(votes.selection)
    counts = np.take_along_axis(votes.estimation, order, axis=1)
    hits, rival = counts[:, 0], counts[:, 1:].max(axis=1)
    if sample.target is not None:
        ranked = np.take_along_axis(votes.selection, order, axis=1)
        goal = np.broadcast_to(sample.target + np.asarray(setting.distance, dtype=np.float64), len(order))
        tests = [TargetTest.of(row, r, float(e), noise, alpha) for r, e in zip(ranked, goal, strict=True)]
        setting = replace(setting, distance=0.0)  # it is part of the goal
        logs = np.array([t.log_e(*v) for t, v in zip(tests, zip(hits, rival, votes.draws, strict=True), strict=True)])
        sure = logs >= np.log(1 / alpha)
        low = np.where(sure, [t.claimed for t in tests], 0.0)
        bounds = Bounds(low, np.where(low > 0, 1 - low, 1.0), np.where(sure, sample.target, 0.0))
        singles = np.zeros(len(order), dtype=np.int64)
        plan = Plan(Partition(order, singles), singles > 0, low, low, low, low[:, None])
    else:
        at_most = replace(votes, draws=np.full(len(order), float(sample.most)))
        plan = plan_votes(at_most, row, setting, alpha / 2)
        bounds = sequence_bounds(hits, rival, votes.draws, plan, noise, alpha / 2)
        full = votes.draws >= sample.most
        if full.any():
            last = _vote_bounds(votes, plan, replace(row, ties=False), replace(setting, alpha=alpha / 2))
            bounds = last.where(full & (last.radius > bounds.radius), bounds)
    return _assemble(bounds, plan, votes.draws, "adaptive", setting)


def sequence_bounds(hits: Floats, rival: Floats, draws: Floats, plan: Plan, noise: Gaussian, alpha: float) -> Bounds:
    """The class and its strongest rival by confidence sequences, which hold at all times at once: the radius of now."""
    lower = noise.below(lower_sequence(hits, draws, alpha * plan.top))
    upper = complement(lower)
    several = plan.partition.buckets > 2
    if several.any():
        bound = noise.above(upper_sequence(rival, draws, alpha * plan.rival))
        upper = np.where(several, np.minimum(upper, bound), upper)
    return Bounds(lower, upper, radius_multi(lower, upper, noise.sigma))


def _assemble(bounds: Bounds, plan: Plan, draws: Floats, procedure: str, setting: Setting) -> Certificates:
    """Bounds → Certificates: where the radius is 0 nothing was shown, so abstain."""
    selected = plan.partition.selected
    radius = np.asarray(bounds.radius)
    if np.any(np.asarray(setting.distance) > 0):
        moved = np.maximum(np.nextafter(radius - setting.distance, -np.inf), 0.0)
        radius = np.where(np.asarray(setting.distance) > 0, moved, radius)
    return Certificates(
        np.where(radius > 0, selected, ABSTAIN), radius, selected, bounds.p_lower, bounds.p_upper,
        plan.partition.buckets, procedure, float(np.max(setting.noise.sigma)), float(setting.alpha),
        draws.astype(np.int64), said(setting), {"direct": (plan.direct | (False if plan.joint is None else plan.joint)).tolist()},
    )  # fmt: skip


def said(setting: Setting) -> str:
    """What a certificate is about and what it does not cover, in one text."""
    return f"Certifies {setting.about}. {setting.caveats}"


def joined(
    parts: Sequence[tuple[Sequence[int], Certificates]], count: int, procedure: str, setting: Setting
) -> Certificates:
    """Certificates of parts of `count` inputs, put at their places; the others abstain."""
    found = Certificates(
        np.full(count, ABSTAIN), np.zeros(count), np.full(count, ABSTAIN), np.zeros(count), np.ones(count),
        np.zeros(count, dtype=np.int64), procedure, float(np.max(setting.noise.sigma)), float(setting.alpha),
        np.zeros(count, dtype=np.int64), said(setting),
    )  # fmt: skip
    direct = np.zeros(count, dtype=bool)
    for places, part in parts:
        at = np.asarray(places, dtype=np.int64)
        for name in _ARRAYS:
            getattr(found, name)[at] = getattr(part, name)
        direct[at] = part.details["direct"]
    found.details["direct"] = direct.tolist()
    return found


# ---- from arrays -------------------------------------------------------------------------------------------------------


def certify_counts(
    selection: ArrayLike,
    estimation: ArrayLike,
    sigma: float,
    alpha: float = 1e-3,
    procedure: str = DEFAULT,
    *,
    draws: ArrayLike | None = None,
    ties: ArrayLike | None = None,
    variation: float = 0.0,
) -> Certificates:
    """Certificates from class counts: no forward pass, so α and the procedure can be changed after the sampling.

    Guarantee: for each input the certificate is wrong with probability at most alpha over the estimation sample, for
    any selection sample independent of it. It is about the majority vote (hardmax) of the network under N(0, σ²I) noise.

    Args:
        selection: counts (..., classes) of the n0 selection draws.
        estimation: counts (..., classes) of the n estimation draws.
        sigma: noise level the votes were drawn with.
        alpha: total risk per input.
        procedure: a row of `PROCEDURES` that takes votes.
        draws: number of estimation draws where some voted for no class; default: the sum of the counts.
        ties: (..., 2) uniform numbers drawn before the estimation sample, for the row "randomized".
        variation: total variation between the noise that was drawn and N(0, σ²I).

    >>> c = certify_counts([95, 3, 2], [9500, 300, 200], sigma=0.5)
    >>> int(c.prediction), round(float(c.radius), 4), int(c.buckets)
    (0, 0.8436, 3)
    """
    row = find_procedure(procedure)
    if not row.hard:
        raise InputError(
            f"{procedure!r} works on scores, not on counts: use certify_scores or SmoothedClassifier.certify"
        )
    first, second = _counts(selection, "selection"), _counts(estimation, "estimation")
    if first.shape != second.shape:
        raise InputError(f"selection has shape {first.shape}, estimation {second.shape}: they must agree")
    shape, classes = second.shape[:-1], second.shape[-1]
    first, second = first.reshape(-1, classes), second.reshape(-1, classes)
    total = second.sum(axis=1) if draws is None else _fitting(_whole(draws, "draws"), shape, "draws")
    if bool(np.any(total < second.sum(axis=1))):
        raise InputError("draws is smaller than the sum of the estimation counts")
    broken = None if ties is None else _fitting(_numbers(ties, "ties"), (*shape, 2), "ties").reshape(-1, 2)
    noise = Gaussian(positive(sigma, "sigma")[()], variation)
    about = f"the majority vote of the network under N(0, {_level(noise):g}²·I) noise"
    found = derive(Votes(first, second, total, broken), row, Setting(noise, alpha, about))
    return _reshaped(found, shape)


def certify_scores(
    selection: ArrayLike,
    estimation: ArrayLike,
    sigma: float,
    alpha: float = 1e-3,
    procedure: str = DEFAULT,
    *,
    lipschitz: Any = None,
    pair_lipschitz: Any = None,
    interval: Interval = "bernstein",
) -> Certificates:
    """Certificates from simplex scores `F(x + δ_i)` of one fixed map, arrays (..., draws, classes).

    Guarantee: as `certify_counts`, for the classifier `argmax_k E F_k(x + δ)`.

    Args:
        selection: scores of the selection draws.
        estimation: scores of the estimation draws.
        sigma: noise level.
        alpha: total risk per input.
        procedure: a row of `PROCEDURES` that takes scores: "rivals", "lvm" or "direct".
        lipschitz: upper bound of Lip(F_k) for every component before smoothing; gives the Lipschitz-aware radius.
        pair_lipschitz: upper bound of Lip(F_y − F_k); default twice `lipschitz`.
        interval: "bernstein", or "betting" for the two-sided bounds.
    """
    row = find_procedure(procedure)
    if not row.soft:
        raise InputError(f"{procedure!r} works on counts, not on scores: use certify_counts")
    first, second = _scores(selection, "selection"), _scores(estimation, "estimation")
    if first.shape[:-2] != second.shape[:-2] or first.shape[-1] != second.shape[-1]:
        raise InputError(f"selection has shape {first.shape}, estimation {second.shape}: only the draws may differ")
    noise = Gaussian(sigma)
    setting = Setting(noise, alpha, f"the smoothed scores of the given map under N(0, {_level(noise):g}²·I) noise")
    shape = second.shape[:-2]
    first, second = (s.reshape(-1, *s.shape[-2:]) for s in (first, second))
    smoothness = Smoothness.of(lipschitz, pair_lipschitz)
    plan = plan_scores(row, first, second.shape[1], setting.noise, alpha, smoothness)
    buckets = bucket_scores(second, plan.partition)
    sample = Scores(plan, Moments.of(buckets, plan.shift), smoothness, buckets, interval)
    return _reshaped(derive(sample, row, setting), shape)


def _reshaped(found: Certificates, shape: tuple[int, ...]) -> Certificates:
    direct = np.asarray(found.details["direct"]).reshape(shape).tolist()
    arrays = {name: getattr(found, name).reshape(shape) for name in _ARRAYS}
    return replace(found, **arrays, details={**found.details, "direct": direct})


def _numbers(values: ArrayLike, name: str) -> Floats:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must hold numbers, in rows of equal length") from error


def _whole(values: ArrayLike, name: str) -> Floats:
    """Counts that a float64 holds exactly."""
    array = _numbers(values, name)
    if not bool(np.all((array >= 0) & (array <= 2.0**53) & (array == np.floor(array)))):
        raise InputError(f"{name} must hold non-negative whole numbers, at most 2^53")
    return array


def _fitting(array: Floats, shape: tuple[int, ...], name: str) -> Floats:
    try:
        return np.broadcast_to(array, shape).reshape(-1)
    except ValueError as error:
        raise InputError(f"{name} has shape {array.shape}, which does not fit the counts' {shape}") from error


def _level(noise: Gaussian) -> float:
    if np.ndim(noise.sigma):
        raise InputError(f"sigma must be one number here, got {np.size(noise.sigma)}")
    return float(noise.sigma)


def _counts(values: ArrayLike, name: str) -> Floats:
    array = _whole(values, name)
    if array.ndim < 1 or array.shape[-1] < 2:
        raise InputError(f"{name} must have shape (..., classes) with at least two classes, got {array.shape}")
    return array


def _scores(values: ArrayLike, name: str) -> Floats:
    array = _numbers(values, name)
    if array.ndim < 2 or array.shape[-1] < 2:
        raise InputError(f"{name} must have shape (..., draws, classes) with at least two classes, got {array.shape}")
    if not bool(np.all((array >= 0) & (array <= 1))) or bool(np.any(array.sum(axis=-1) > 1 + 1e-9)):
        raise InputError(
            f"{name} must hold points of the simplex: entries in [0, 1] with sum at most 1 (compute them in float64)"
        )
    return array
