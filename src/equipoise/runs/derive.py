"""From stored statistics to certificates: α, the procedure and the constant can change, no draw is made.

What may be derived soundly. Buckets, class and map come from the selection sample (or earlier), so another α or another
procedure on the same counts keeps *its* risk. Votes serve every vote procedure. Soft moments were taken for the buckets
planned when sampling: α and the constant may change, the buckets not. A sample that was stopped by looking at it admits
anytime-valid bounds only. Each derivation keeps its own α; looking at many and publishing the best is not covered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from equipoise.core import InputError, Refused, as_upper
from equipoise.runs.manifest import Constant, Manifest
from equipoise.runs.parameters import Parameters
from equipoise.runs.rows import Row, counts_matrix
from equipoise.smoothing import ABSTAIN, NOT_COVERED, Certificates, Moments, Partition, certify_counts, clopper_pearson
from equipoise.smoothing.adaptive import log_e_value, lower_sequence, target_probability
from equipoise.smoothing.bounds import Bounds, Smoothness
from equipoise.smoothing.maps import hard_row, map_smoothness
from equipoise.smoothing.partitions import Ints
from equipoise.smoothing.planning import Plan
from equipoise.smoothing.procedures import assemble, find_procedure, score_bounds
from equipoise.smoothing.radii import radius_mono

_ARRAYS = ("prediction", "radius", "selected", "p_lower", "p_upper", "buckets", "draws")


def derive(
    manifest: Manifest,
    rows: list[Row],
    *,
    alpha: float | None = None,
    procedure: str | None = None,
    lipschitz: Any = None,
    target_radius: float | None = None,
) -> Certificates:
    """Certificates of the stored rows, in their order; failed rows abstain with their reason in `details["failures"]`.

    Args:
        manifest: of the run.
        rows: what was stored.
        alpha: risk per input, default that of the run.
        procedure: default that of the run; refused where the stored statistics do not carry it.
        lipschitz: another upper bound of the network's constant, for soft runs.
        target_radius: another target, for adaptive runs with a target.
    """
    p = manifest.parameters
    alpha = p.alpha if alpha is None else alpha
    if not 0 < alpha < 1:
        raise InputError(f"the risk alpha must lie strictly between 0 and 1, got {alpha}")
    name = p.procedure if procedure is None or (p.adaptive and procedure == "adaptive") else procedure
    find_procedure(name)
    _require_sound(manifest, name, procedure, lipschitz, target_radius)
    constant = manifest.lipschitz
    if lipschitz is not None:
        constant = Constant(as_upper(lipschitz, "Lipschitz constant of the network"), "given")
    if not rows:
        raise InputError("the run has no finished inputs yet")
    good = [row for row in rows if row.failure is None]
    parts: list[tuple[list[int], Certificates]] = []
    if p.adaptive:
        parts.append(_stopped(p, good, alpha, target_radius or p.target_radius))
    else:
        soft = p.soft and find_procedure(name).soft
        scores = [row for row in good if soft and row.soft is not None]
        votes = [row for row in good if not (soft and row.soft is not None)]
        parts += [_scores(p, scores, alpha, name, constant)] if scores else []
        parts += [_votes(p, votes, alpha, hard_row(find_procedure(name)).name)] if votes else []
    whole = _join(manifest, rows, [part for part in parts if part[0]], alpha, "adaptive" if p.adaptive else name)
    if constant is not None and p.soft and find_procedure(name).soft:
        whole.details["lipschitz"] = str(constant)
    return whole


def _require_sound(manifest: Manifest, name: str, asked: str | None, lipschitz: Any, target: float | None) -> None:
    """Refuse what the stored statistics cannot carry, and say why."""
    p, row = manifest.parameters, find_procedure(name)
    votes_only = manifest.map is not None and manifest.map.name == "hardmax"
    if p.adaptive:
        if asked is not None and asked not in ("adaptive", p.procedure):
            raise Refused(
                f"this run stopped each input by looking at its draws: a fixed-n bound such as {asked!r} would not keep its "
                "risk on such a sample; only alpha and the target radius can change"
            )
        if target is not None and not target > 0:
            raise InputError(f"the target radius must be a positive number, got {target}")
        if target is not None and p.target_radius is None:
            raise Refused(
                "this run stopped at a share of the final radius, not at a target radius: there is none to change"
            )
    elif target is not None:
        raise InputError("target_radius belongs to adaptive runs; for certified accuracy at ε give epsilon")
    if row.soft and not row.hard and not p.soft:
        raise Refused(f"{name!r} needs soft scores, this run stored votes only: sample again with --procedure {name}")
    if p.soft and name == "direct" and p.procedure != "direct" and not votes_only:
        raise Refused(
            "whether to bound margins directly is decided on the selection scores, of which this run kept the votes only: "
            "sample again with --procedure direct"
        )
    if lipschitz is not None and not (p.soft and row.soft):
        raise Refused("votes have no Lipschitz constant: it can be given for runs and procedures of soft scores only")


def _votes(p: Parameters, rows: list[Row], alpha: float, procedure: str) -> tuple[list[int], Certificates]:
    first = counts_matrix([row.selection for row in rows], p.num_classes)
    second = counts_matrix([row.estimation for row in rows], p.num_classes)
    draws = np.array([row.draws for row in rows])
    return [r.position for r in rows], certify_counts(first, second, p.sigma, alpha, procedure, draws=draws)


def _scores(
    p: Parameters, rows: list[Row], alpha: float, procedure: str, constant: Constant | None
) -> tuple[list[int], Certificates]:
    softs = [row.soft for row in rows if row.soft is not None]
    width = max(s.moments.shape[1] for s in softs)
    stacked = np.zeros((4, len(softs), width))
    for i, s in enumerate(softs):
        stacked[:, i, : s.moments.shape[1]] = s.moments
    order, singles = np.stack([s.order for s in softs]), np.array([s.singles for s in softs])
    direct = np.array([s.direct and procedure == "direct" for s in softs])
    plan = Plan(Partition(order, singles), direct, np.zeros(len(softs)), stacked[0])
    draws = np.array([float(row.draws) for row in rows])
    network = None if constant is None else constant.value
    known = {m: map_smoothness(m, p.num_classes, network) for m in {s.map for s in softs}}
    smoothness = Smoothness(*(np.array([getattr(known[s.map], f) for s in softs]) for f in ("component", "pair")))
    bounds = score_bounds(plan, Moments(draws, *stacked), p.sigma, alpha, smoothness)
    return [r.position for r in rows], assemble(bounds, plan, procedure, p.sigma, alpha, draws, "", (len(rows),))


def _stopped(p: Parameters, rows: list[Row], alpha: float, target: float | None) -> tuple[list[int], Certificates]:
    """Anytime-valid bounds at the moment each input stopped: an e-value against p0(ε), or a confidence sequence."""
    if not rows:
        return [], certify_counts([[0, 0]], [[0, 0]], p.sigma, alpha)
    first = counts_matrix([row.selection for row in rows], p.num_classes)
    top = first.argmax(axis=1)
    hits = counts_matrix([row.estimation for row in rows], p.num_classes)[np.arange(len(rows)), top]
    draws = np.array([row.draws for row in rows])
    if target is not None:
        p0 = target_probability(target, p.sigma)
        sure = log_e_value(hits, draws, p0) >= np.log(1 / alpha)
        low, radius = np.where(sure, p0, 0.0), np.where(sure, target, 0.0)
    else:
        low = lower_sequence(hits, draws, alpha / 2)
        full = clopper_pearson(hits, draws, alpha / 2, "lower")
        low = np.where(draws >= p.n, np.maximum(low, full), low)
        radius = radius_mono(low, p.sigma)
    upper = np.minimum(np.nextafter(1 - low, 2.0), 1.0)
    plan = Plan(
        Partition(_top_first(top, p.num_classes), np.zeros_like(top)), np.zeros(len(top), bool), low, low[:, None]
    )
    found = assemble(
        Bounds(low, upper, radius), plan, "adaptive", p.sigma, alpha, draws.astype(float), "", (len(rows),)
    )
    return [r.position for r in rows], found


def _top_first(top: Ints, classes: int) -> Ints:
    order = np.tile(np.arange(classes), (len(top), 1))
    rows = np.arange(len(top))
    order[rows, top], order[rows, 0] = 0, top
    return order


def _join(
    manifest: Manifest, rows: list[Row], parts: list[tuple[list[int], Certificates]], alpha: float, name: str
) -> Certificates:
    p, place = manifest.parameters, {row.position: i for i, row in enumerate(rows)}
    found = Certificates(
        np.full(len(rows), ABSTAIN), np.zeros(len(rows)), np.full(len(rows), ABSTAIN), np.zeros(len(rows)),
        np.ones(len(rows)), np.zeros(len(rows), dtype=np.int64), name, p.sigma, alpha, np.zeros(len(rows), dtype=np.int64),
        f"Certifies {_about(manifest, name)}. {NOT_COVERED}",
    )  # fmt: skip
    for positions, part in parts:
        at = [place[i] for i in positions]
        for k in _ARRAYS:
            getattr(found, k)[at] = getattr(part, k)
    found.details["failures"] = {str(row.id): row.failure for row in rows if row.failure is not None}
    return found


def _about(manifest: Manifest, name: str) -> str:
    p = manifest.parameters
    votes = f"the majority vote of the network under N(0, {p.sigma:g}²·I) noise"
    if p.adaptive or not (find_procedure(name).soft and p.soft):
        return votes
    if manifest.map is not None:
        return f"the classifier smoothed with N(0, {p.sigma:g}²·I) noise and {manifest.map}, fixed before the run"
    return (
        f"the classifier smoothed with N(0, {p.sigma:g}²·I) noise and the map chosen at each input on its own selection "
        "sample: a deployed classifier that chooses anew at x' may use another map there, and nothing is certified about it"
    )
