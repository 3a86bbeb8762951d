"""From stored statistics to certificates: α, the procedure and the constant can change, no draw is made.

What may be derived soundly. Buckets, class and map come from the selection sample (or earlier), so another α or another
procedure on the same counts keeps *its* risk. Votes serve every vote procedure. Soft moments were taken for the buckets
planned when sampling: α, the shares and the constant may change, the buckets not. A sample that was stopped by looking at
it admits anytime-valid bounds only. Each derivation keeps its own α; looking at many and publishing the best is not covered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from equipoise.core import InputError, Refused, as_upper
from equipoise.runs.settings import Constant, Manifest, Settings
from equipoise.runs.store import Row
from equipoise.smoothing import Certificates
from equipoise.smoothing.bounds import Moments
from equipoise.smoothing.derive import Scores, Stopped, Votes, joined
from equipoise.smoothing.derive import derive as derive_sample
from equipoise.smoothing.noise import tie_breaks
from equipoise.smoothing.planning import stored_plan
from equipoise.smoothing.procedures import Partition, Procedure, find_procedure
from equipoise.smoothing.simplex import map_smoothness


def derive(
    manifest: Manifest,
    rows: list[Row],
    alpha: float | None = None,
    procedure: str | None = None,
    lipschitz: Any = None,
    target_radius: float | None = None,
) -> Certificates:
    """Certificates of the stored rows, in their order; failed rows abstain.

    Args:
        manifest: of the run.
        rows: what was stored.
        alpha: risk per input, default that of the run.
        procedure: default that of the run; refused where the stored statistics do not carry it.
        lipschitz: another upper bound of the network's constant, for soft runs.
        target_radius: another target, for adaptive runs with a target.

    Guarantee: each certificate is wrong with probability at most alpha, for one derivation fixed beforehand.
    """
    settings = manifest.settings
    if settings.kind == "proved":
        raise InputError("a proved run holds radii without risk: there are no certificates to derive")
    if not rows:
        raise InputError("the run has no finished inputs yet")
    alpha = settings.alpha if alpha is None else alpha
    own = procedure is None or (settings.adaptive and procedure == "adaptive")
    row = settings.row if own else find_procedure(str(procedure))
    _require_sound(settings, row, lipschitz, target_radius)

    constant = manifest.lipschitz
    if lipschitz is not None:
        bound = as_upper(lipschitz, "Lipschitz constant of the network")
        constant = Constant.model_construct(value=bound, source="given")
    network = manifest.stretched(constant)

    noise = settings.noise_law()
    soft = settings.soft and row.soft
    places = [i for i, stored in enumerate(rows) if stored.failure is None]
    members = [rows[i] for i in places]
    parts = []
    if members:
        if manifest.scored and row.soft:
            sample: Scores | Votes | Stopped = _scores(manifest, members, row, network)
        else:
            sample = _votes(settings, members, row, target_radius)
        parts = [(places, derive_sample(sample, row, noise.setting(alpha, "")))]

    about = f"the majority vote of the network under {noise}"
    if soft:
        about = f"the classifier smoothed with {noise} and {manifest.simplex}, fixed before the run"
    name = "adaptive" if settings.adaptive else row.name
    certificates = joined(parts, len(rows), name, noise.setting(alpha, about))
    if constant is not None and soft:
        certificates.details["lipschitz"] = str(constant)
    return certificates


def _require_sound(settings: Settings, row: Procedure, lipschitz: Any, target: float | None) -> None:
    """Refuse what the stored statistics cannot carry, and say why."""
    scores_only = row.soft and not row.hard
    if settings.adaptive:
        if scores_only:
            raise Refused(
                f"this run stopped each input by looking at its votes, and {row.name!r} works on soft scores: only vote "
                "procedures, alpha and the target radius can change"
            )
        if target is not None and not target > 0:
            raise InputError(f"the target radius must be a positive number, got {target}")
    elif target is not None:
        raise InputError("target_radius belongs to adaptive runs; for certified accuracy at ε give epsilon")
    if scores_only and not settings.soft:
        raise Refused(
            f"{row.name!r} needs soft scores, this run stored votes only: sample again with --procedure {row.name}"
        )
    if lipschitz is not None and not (settings.soft and row.soft):
        raise Refused("votes have no Lipschitz constant: it can be given for runs and procedures of soft scores only")


def _votes(settings: Settings, rows: list[Row], row: Procedure, target: float | None) -> Votes | Stopped:
    selection = np.array([r.selection for r in rows], dtype=np.float64)
    estimation = np.array([r.estimation for r in rows], dtype=np.float64)
    draws = np.array([r.draws for r in rows], dtype=np.float64)
    ties = None
    if row.ties and not settings.adaptive:
        ties = np.stack([tie_breaks(settings.seed or 0, r.id) for r in rows])
    votes = Votes(selection, estimation, draws, ties)
    return Stopped(votes, target or settings.target_radius) if settings.target_radius else votes


def _scores(manifest: Manifest, rows: list[Row], row: Procedure, network: float | None) -> Scores:
    softs = [r.soft for r in rows if r.soft is not None]
    width = max(len(s.moments[0]) for s in softs)
    stacked = np.zeros((4, len(softs), width))
    for i, s in enumerate(softs):
        stacked[:, i, : len(s.moments[0])] = s.moments

    order = np.array([s.order for s in softs], dtype=np.int64)
    singles = np.array([s.singles for s in softs])
    direct = np.array([s.direct for s in softs])
    plan = stored_plan(row, Partition(order, singles), direct, stacked[0])
    assert manifest.simplex is not None
    smoothness = map_smoothness(manifest.simplex, manifest.settings.num_classes or 0, network)
    moments = Moments(np.array([float(r.draws) for r in rows]), *stacked)
    return Scores(plan, moments, smoothness)
