"""Certification procedures as rows of a table: what they plan on the selection sample, what they bound on the
estimation one.

Every procedure keeps the total risk α: buckets, intervals and strategy come from the selection sample, which is
independent of the estimation sample; the bounds on the latter share α by the union bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from equipoise.core import InputError, as_upper
from equipoise.smoothing.bounds import (
    Bounds,
    Smoothness,
    count_bounds,
    margin_bounds,
    moment_bounds,
    sample_bounds,
)
from equipoise.smoothing.certificates import ABSTAIN, NOT_COVERED, Certificates
from equipoise.smoothing.moments import Moments, bucket_scores
from equipoise.smoothing.partitions import Build, class_partition, every_class, one_against_rest
from equipoise.smoothing.planning import Plan, plan_counts, plan_scores
from equipoise.smoothing.ramp import Floats


@dataclass(frozen=True)
class Procedure:
    """One row: the candidate partitions among which the selection sample chooses, and which votes it works on."""

    name: str
    partitions: tuple[Build, ...]
    hard: bool
    soft: bool
    direct: bool
    summary: str
    reference: str


#: candidates among which the selection sample chooses: Cohen's, CPM's and Bonferroni's partition
_ANY = (one_against_rest, class_partition, every_class)

PROCEDURES: dict[str, Procedure] = {
    row.name: row
    for row in (
        Procedure(
            "cohen", (one_against_rest,), True, False, False,
            "one Clopper–Pearson bound of the selected class at α", "Cohen et al. (2019), Certify",
        ),
        Procedure(
            "bonferroni", (every_class,), True, False, False,
            "every class at α/c", "union bound",
        ),
        Procedure(
            "cpm", _ANY, True, False, False,
            "buckets of classes, each at α/c*; one against the rest, or every class, when that promises more",
            "thesis, class partitioning",
        ),
        Procedure(
            "direct", _ANY, True, True, True,
            "one interval for each margin itself, or two separate ones when that promises more", "thesis, open problem",
        ),
        Procedure(
            "lvm", _ANY, False, True, False,
            "soft votes through a simplex map, empirical Bernstein or betting, Lipschitz-aware when a constant "
            "is known",
            "thesis, LVM-RS with errata 8–10 and 17",
        ),
    )
}  # fmt: skip


def find_procedure(name: str) -> Procedure:
    """The row of that name, or an error that lists the names."""
    if name not in PROCEDURES:
        raise InputError(f"unknown procedure {name!r}: expected one of {', '.join(PROCEDURES)}")
    return PROCEDURES[name]


def certify_counts(
    selection: ArrayLike,
    estimation: ArrayLike,
    sigma: float,
    alpha: float = 1e-3,
    procedure: str = "cpm",
    *,
    draws: ArrayLike | None = None,
) -> Certificates:
    """Certificates from class counts: no forward pass, so α and the procedure can be changed after the sampling.

    Guarantee: for each input the certificate is wrong with probability at most alpha over the estimation sample, for
    any
    selection sample independent of it. It is about the majority vote (hardmax) of the network under N(0, σ²I) noise.

    Args:
        selection: counts (..., classes) of the n0 selection draws.
        estimation: counts (..., classes) of the n estimation draws.
        sigma: noise level the votes were drawn with.
        alpha: total risk per input.
        procedure: a hard-vote row of `PROCEDURES`: "cohen", "bonferroni", "cpm" or "direct".
        draws: number of estimation draws where some voted for no class; default: the sum of the counts.

    >>> c = certify_counts([95, 3, 2], [9500, 300, 200], sigma=0.5, procedure="cpm")
    >>> int(c.prediction), round(float(c.radius), 4), int(c.buckets)
    (0, 0.8423, 3)
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
    total = second.sum(axis=1) if draws is None else np.broadcast_to(np.asarray(draws), shape).reshape(-1).astype(float)
    if bool(np.any(total < second.sum(axis=1))):
        raise InputError("draws is smaller than the sum of the estimation counts")
    _risk(alpha)
    plan = plan_counts(row.partitions, row.direct, first, int(total.max(initial=1)), sigma, alpha)
    bounds = count_bounds(second, total, plan.partition, sigma, alpha)
    if plan.direct.any():
        moments = Moments.of_counts(plan.partition.gather(second), np.maximum(total, 2))
        bounds = margin_bounds(moments, plan.partition, sigma, alpha).where(plan.direct, bounds)
    about = f"the majority vote of the network under N(0, {sigma:g}²·I) noise"
    return assemble(bounds, plan, row.name, sigma, alpha, total, about, shape)


def certify_scores(
    selection: ArrayLike,
    estimation: ArrayLike,
    sigma: float,
    alpha: float = 1e-3,
    procedure: str = "lvm",
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
        procedure: a soft-vote row of `PROCEDURES`: "lvm" or "direct".
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
    _risk(alpha)
    shape = second.shape[:-2]
    first, second = (s.reshape(-1, *s.shape[-2:]) for s in (first, second))
    smoothness = smoothness_of(lipschitz, pair_lipschitz)
    plan = plan_scores(row.partitions, row.direct, first, second.shape[1], sigma, alpha, smoothness)
    buckets = bucket_scores(second, plan.partition)
    bounds = score_bounds(plan, Moments.of(buckets, plan.shift), sigma, alpha, smoothness, buckets, interval)
    about = f"the smoothed scores of the given map under N(0, {sigma:g}²·I) noise"
    total = np.full(len(second), float(second.shape[1]))
    return assemble(bounds, plan, row.name, sigma, alpha, total, about, shape)


def score_bounds(
    plan: Plan,
    moments: Moments,
    sigma: float,
    alpha: float,
    smoothness: Smoothness,
    samples: Floats | None = None,
    interval: str = "bernstein",
) -> Bounds:
    """The bounds a plan asks for, from moments (Bernstein) or from the bucket scores themselves (betting)."""
    if interval == "bernstein":
        bounds = moment_bounds(moments, plan.partition, sigma, alpha, smoothness)
    elif interval == "betting" and samples is not None:
        bounds = sample_bounds(samples, plan.partition, sigma, alpha, smoothness)
    else:
        raise InputError(f"interval must be 'bernstein' or 'betting', got {interval!r}")
    if plan.direct.any():
        bounds = margin_bounds(moments, plan.partition, sigma, alpha, smoothness).where(plan.direct, bounds)
    return bounds


def assemble(
    bounds: Bounds,
    plan: Plan,
    procedure: str,
    sigma: float,
    alpha: float,
    draws: Floats,
    about: str,
    shape: tuple[int, ...],
    details: dict[str, Any] | None = None,
) -> Certificates:
    """Bounds → Certificates in the batch shape: where the radius is 0 nothing was shown, so abstain."""
    selected = plan.partition.selected
    prediction = np.where(bounds.radius > 0, selected, ABSTAIN)

    def back(values: Any) -> Any:
        return np.asarray(values).reshape(shape)

    return Certificates(
        back(prediction), back(bounds.radius), back(selected), back(bounds.p_lower), back(bounds.p_upper),
        back(plan.partition.buckets), procedure, float(sigma), float(alpha), back(draws.astype(np.int64)),
        f"Certifies {about}. {NOT_COVERED}", {"direct": back(plan.direct).tolist(), **(details or {})},
    )  # fmt: skip


def smoothness_of(lipschitz: Any, pair: Any = None) -> Smoothness:
    """Read Lipschitz constants: only upper bounds are let through; the pair constant defaults to twice the
    component's."""
    if lipschitz is None:
        return Smoothness()
    if isinstance(lipschitz, np.ndarray) and lipschitz.ndim:
        return Smoothness(lipschitz, 2 * lipschitz if pair is None else np.asarray(pair))
    constant = as_upper(lipschitz)
    return Smoothness(constant, 2 * constant if pair is None else as_upper(pair))


def _counts(values: ArrayLike, name: str) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim < 1 or array.shape[-1] < 2:
        raise InputError(f"{name} must have shape (..., classes) with at least two classes, got {array.shape}")
    if not bool(np.all((array >= 0) & (array == np.floor(array)))):
        raise InputError(f"{name} must hold non-negative whole numbers")
    return array


def _scores(values: ArrayLike, name: str) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim < 2 or array.shape[-1] < 2:
        raise InputError(f"{name} must have shape (..., draws, classes) with at least two classes, got {array.shape}")
    if not bool(np.all((array >= 0) & (array <= 1))) or bool(np.any(array.sum(axis=-1) > 1 + 1e-9)):
        raise InputError(
            f"{name} must hold points of the simplex: entries in [0, 1] with sum at most 1 (compute them in float64)"
        )
    return array


def _risk(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise InputError(f"the risk alpha must lie strictly between 0 and 1, got {alpha}")
