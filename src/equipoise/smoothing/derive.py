"""From a sample to certificates, the only way: sufficient statistics, a row of the table and a setting in, radii out.

A sample is what is left of the draws: votes, moments of soft scores, or votes that were stopped by looking at them. The
classifier, stored runs and adaptive sampling all end here, so equal statistics give equal certificates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from equipoise.core import (
    POSITIVE,
    Floats,
    InputError,
    Mask,
    Shape,
    explained,
    floats,
    require_number,
    require_one_of,
)
from equipoise.smoothing.bounds import (
    UNKNOWN,
    Bounds,
    Gaussian,
    Moments,
    Smoothness,
    bucket_scores,
    count_bounds,
    margin_bounds,
    moment_bounds,
    sample_bounds,
)
from equipoise.smoothing.certificates import ABSTAIN, NOT_COVERED, Certificates
from equipoise.smoothing.joint import joint_radius
from equipoise.smoothing.planning import Plan, TargetTest, plan_counts, plan_scores
from equipoise.smoothing.procedures import (
    DEFAULT,
    Partition,
    Procedure,
    find_procedure,
    one_against_rest,
)

_ARRAYS = ("prediction", "radius", "selected", "p_lower", "p_upper", "buckets", "draws", "direct")


@dataclass(frozen=True)
class Setting:
    """What certificates are about and rest on.

    Args:
        noise: its level, and how far the drawn law may be from the Gaussian.
        alpha: risk per input.
        about: the classifier, in words.
        caveats: what is not covered, in words.
        distance: how far the sampled points are from the inputs: subtracted from the radii.
    """

    noise: Gaussian
    alpha: float
    about: str = ""
    caveats: str = NOT_COVERED
    distance: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, int | float | np.floating) or not 0 < self.alpha < 1:
            raise InputError(f"the risk alpha must lie strictly between 0 and 1, got {self.alpha}")

    def __str__(self) -> str:
        return f"Certifies {self.about}. {self.caveats}"


@dataclass(frozen=True)
class Votes:
    """Counts (N, c) of selection and of estimation draws, the number of the latter (some may vote for no class).

    With a `target` the draws of each input were stopped by looking at them, at that radius.
    """

    selection: Floats
    estimation: Floats
    draws: Floats
    target: float | None = None


@dataclass(frozen=True)
class Scores:
    """Moments of the bucket scores of a plan; with `kept`, the scores themselves (N, n, B), betting intervals are used."""

    plan: Plan
    moments: Moments
    smoothness: Smoothness = UNKNOWN
    kept: Floats | None = None


def derive(sample: Votes | Scores, row: Procedure, setting: Setting) -> Certificates:
    """Certificates of N inputs, each wrong with probability at most alpha over the estimation draws.

    Guarantee: for any selection sample independent of the estimation sample, and any procedure whose shares are valid;
    stopped samples get anytime-valid bounds only.

    Args:
        sample: what is left of the draws.
        row: the procedure.
        setting: noise, risk and description.
    """
    if isinstance(sample, Scores):
        plan = sample.plan
        draws = sample.moments.n
        bounds = _score_bounds(sample, setting)
    elif sample.target is not None:
        return _stopped(sample, sample.target, row, setting)
    else:
        plan = plan_votes(sample, row, setting)
        draws = sample.draws
        bounds = _vote_bounds(sample, plan, setting)
    direct = plan.direct | plan.joint
    return _assemble(bounds, plan.partition, direct, draws, row.name, setting)


def plan_votes(sample: Votes, row: Procedure, setting: Setting) -> Plan:
    """What the selection votes decide; only the number of estimation draws is looked at.

    Args:
        sample: the votes.
        row: the procedure.
        setting: noise and risk.
    """
    most = int(sample.draws.max(initial=1))
    return plan_counts(row, sample.selection, most, setting.noise, setting.alpha)


def _vote_bounds(sample: Votes, plan: Plan, setting: Setting) -> Bounds:
    noise = setting.noise
    alpha = setting.alpha
    bounds = count_bounds(
        sample.estimation, sample.draws, plan.partition, noise, alpha * plan.top, alpha * plan.rival
    )
    if plan.joint.any():
        bounds = _joint_bounds(sample, plan, setting).where(plan.joint, bounds)
    if plan.direct.any():
        moments = Moments.of_counts(
            plan.partition.gather(sample.estimation), np.maximum(sample.draws, 2)
        )
        risk = np.full(len(sample.draws), alpha)
        bounds = margin_bounds(moments, plan.partition, noise, risk).where(plan.direct, bounds)
    return bounds


def _joint_bounds(sample: Votes, plan: Plan, setting: Setting) -> Bounds:
    """Class and strongest rival tested together; scores that are symmetric about ½ and give the same radius."""
    noise = setting.noise
    radius = np.zeros(len(plan.joint))
    first, second = (
        np.take_along_axis(v, plan.partition.order, axis=1)
        for v in (sample.selection, sample.estimation)
    )
    rows = np.flatnonzero(plan.joint)
    for some in np.array_split(rows, -(-len(rows) // 4096)):
        selection = first[some, 0], first[some, 1], first[some].sum(axis=1)
        votes = second[some, 0], second[some, 1:].max(axis=1), sample.draws[some]
        radius[some] = joint_radius(*votes, selection, setting.alpha, noise.variation)
    p = ndtr(radius)
    return Bounds(p, 1 - p, radius * noise.sigma)


def _score_bounds(sample: Scores, setting: Setting) -> Bounds:
    plan = sample.plan
    noise = setting.noise
    alpha = setting.alpha
    shared = (plan.partition, noise, alpha * plan.top, alpha * plan.rival, sample.smoothness)
    bounds = moment_bounds(sample.moments, *shared)
    if sample.kept is not None:
        bounds = sample_bounds(sample.kept, *shared)
    if plan.direct.any():
        risk = np.full(len(plan.direct), alpha)
        direct = margin_bounds(sample.moments, plan.partition, noise, risk, sample.smoothness)
        bounds = direct.where(plan.direct, bounds)
    return bounds


def _stopped(sample: Votes, target: float, row: Procedure, setting: Setting) -> Certificates:
    """An e-value against the target radius at the moment each input stopped, valid at any time."""
    partition = one_against_rest(sample.selection)
    ranked, counts = (
        np.take_along_axis(v, partition.order, axis=1)
        for v in (sample.selection, sample.estimation)
    )
    draws = sample.draws
    goal = target + setting.distance
    low = np.zeros(len(draws))
    radius = np.zeros(len(draws))
    for k, votes in enumerate(counts):
        test = TargetTest.of(row, ranked[k], goal, setting.noise)
        if test.log_e(votes[0], votes[1:].max(), draws[k]) >= np.log(1 / setting.alpha):
            low[k] = test.claimed
            radius[k] = target
    bounds = Bounds(low, np.where(low > 0, 1 - low, 1.0), radius)
    direct = np.zeros(len(draws), dtype=bool)
    reached = replace(setting, distance=0.0)
    return _assemble(bounds, partition, direct, draws, "adaptive", reached)


def _assemble(
    bounds: Bounds,
    partition: Partition,
    direct: Mask,
    draws: Floats,
    procedure: str,
    setting: Setting,
) -> Certificates:
    """Bounds → Certificates: where the radius is 0 nothing was shown, so abstain."""
    selected = partition.selected
    radius = bounds.radius
    if setting.distance > 0:
        radius = np.maximum(np.nextafter(radius - setting.distance, -np.inf), 0.0)
    return Certificates(
        np.where(radius > 0, selected, ABSTAIN), radius, selected, bounds.p_lower, bounds.p_upper,
        partition.buckets, procedure, setting.noise.sigma, float(setting.alpha),
        draws.astype(np.int64), str(setting), direct,
    )  # fmt: skip


def joined(
    parts: Sequence[tuple[Sequence[int], Certificates]],
    count: int,
    procedure: str,
    setting: Setting,
) -> Certificates:
    """Certificates of parts of `count` inputs, put at their places; the others abstain.

    Args:
        parts: places and certificates.
        count: number of inputs.
        procedure: its name.
        setting: of the whole.
    """
    ints = np.zeros(count, dtype=np.int64)
    floats = np.zeros(count)
    whole = Certificates(
        ints + ABSTAIN, floats, ints + ABSTAIN, floats.copy(), floats + 1, ints, procedure,
        setting.noise.sigma, float(setting.alpha), ints.copy(), str(setting), np.zeros(count, dtype=bool),
    )  # fmt: skip
    for places, part in parts:
        at = np.asarray(places, dtype=np.int64)
        for name in _ARRAYS:
            getattr(whole, name)[at] = getattr(part, name)
    return whole


# ---- from arrays -------------------------------------------------------------------------------------------------------


def certify_counts(
    selection: ArrayLike,
    estimation: ArrayLike,
    sigma: float,
    alpha: float = 1e-3,
    procedure: str = DEFAULT,
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

    >>> c = certify_counts([95, 3, 2], [9500, 300, 200], sigma=0.5)
    >>> int(c.prediction), round(float(c.radius), 4), int(c.buckets)
    (0, 0.8436, 3)
    """
    row = find_procedure(procedure)
    if not row.hard:
        raise InputError(
            f"{procedure!r} works on scores, not on counts: use certify_scores or SmoothedClassifier.certify"
        )
    first = _counts(selection, "selection")
    second = _counts(estimation, "estimation")
    if first.shape != second.shape:
        raise InputError(
            f"selection has shape {first.shape}, estimation {second.shape}: they must agree"
        )
    shape = second.shape[:-1]
    classes = second.shape[-1]
    first = first.reshape(-1, classes)
    second = second.reshape(-1, classes)
    setting = _setting(sigma, alpha, "the majority vote of the network")
    return _reshaped(derive(Votes(first, second, second.sum(axis=1)), row, setting), shape)


def certify_scores(
    selection: ArrayLike,
    estimation: ArrayLike,
    sigma: float,
    alpha: float = 1e-3,
    procedure: str = DEFAULT,
    *,
    lipschitz: Any = None,
    pair_lipschitz: Any = None,
    interval: Literal["bernstein", "betting"] = "bernstein",
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
    require_one_of(("bernstein", "betting"), interval=interval)
    first = _scores(selection, "selection")
    second = _scores(estimation, "estimation")
    if first.shape[:-2] != second.shape[:-2] or first.shape[-1] != second.shape[-1]:
        raise InputError(
            f"selection has shape {first.shape}, estimation {second.shape}: only the draws may differ"
        )
    setting = _setting(sigma, alpha, "the smoothed scores of the given map")
    shape = second.shape[:-2]
    first, second = (s.reshape(-1, *s.shape[-2:]) for s in (first, second))
    smoothness = Smoothness.of(lipschitz, pair_lipschitz)
    plan = plan_scores(row, first, second.shape[1], setting.noise, alpha, smoothness)
    buckets = bucket_scores(second, plan.partition)
    moments = Moments.of(buckets, plan.shift)
    sample = Scores(plan, moments, smoothness, buckets if interval == "betting" else None)
    return _reshaped(derive(sample, row, setting), shape)


def _setting(sigma: float, alpha: float, what: str) -> Setting:
    level = require_number(sigma, "sigma", least=POSITIVE)
    return Setting(Gaussian(level), alpha, f"{what} under N(0, {level:g}²·I) noise")


def _reshaped(whole: Certificates, shape: Shape) -> Certificates:
    return replace(whole, **{name: getattr(whole, name).reshape(shape) for name in _ARRAYS})


def _numbers(values: ArrayLike, name: str, *axes: str) -> Floats:
    with explained(f"{name} must hold numbers, in rows of equal length"):
        array = floats(values)
    if array.ndim < len(axes) or array.shape[-1] < 2:
        raise InputError(
            f"{name} must have shape (..., {', '.join(axes)}) with at least two classes, got {array.shape}"
        )
    return array


def _counts(values: ArrayLike, name: str) -> Floats:
    """Counts that a float64 holds exactly, and their sums."""
    array = _numbers(values, name, "classes")
    whole = np.all((array >= 0) & (array == np.floor(array)))
    if not whole or not np.all(array.sum(axis=-1) < 2.0**53):
        raise InputError(f"{name} must hold non-negative whole numbers, fewer than 2^53 together")
    return array


def _scores(values: ArrayLike, name: str) -> Floats:
    array = _numbers(values, name, "draws", "classes")
    if not np.all((array >= 0) & (array <= 1)) or np.any(array.sum(axis=-1) > 1 + 1e-9):
        raise InputError(
            f"{name} must hold points of the simplex: entries in [0, 1] with sum at most 1 (compute them in float64)"
        )
    return array
