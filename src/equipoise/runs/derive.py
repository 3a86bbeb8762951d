"""From stored statistics to certificates: α, the procedure and the constant can change, no draw is made.

What may be derived soundly. Buckets, class and map come from the selection sample (or earlier), so another α or another
procedure on the same counts keeps *its* risk. Votes serve every vote procedure. Soft moments were taken for the buckets
planned when sampling: α, the shares and the constant may change, the buckets not. A sample that was stopped by looking at
it admits anytime-valid bounds only. Each derivation keeps its own α; looking at many and publishing the best is not covered.
"""

from typing import Any

import numpy as np

from equipoise.core import InputError, Refused, as_upper
from equipoise.runs.manifest import Constant, Manifest
from equipoise.runs.parameters import Parameters
from equipoise.runs.rows import Row, counts_matrix
from equipoise.smoothing import Certificates
from equipoise.smoothing.bounds import Smoothness
from equipoise.smoothing.derive import Scores, Setting, Stopped, Votes, joined, stored_plan
from equipoise.smoothing.derive import derive as derive_sample
from equipoise.smoothing.moments import Moments
from equipoise.smoothing.noise import tie_breaks
from equipoise.smoothing.procedures import Procedure, find_procedure
from equipoise.smoothing.simplex import map_smoothness


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
    row = find_procedure(p.procedure if procedure is None or (p.adaptive and procedure == "adaptive") else procedure)
    _require_sound(manifest, row, lipschitz, target_radius)
    constant = manifest.lipschitz
    if lipschitz is not None:
        constant = Constant(as_upper(lipschitz, "Lipschitz constant of the network"), "given")
    if not rows:
        raise InputError("the run has no finished inputs yet")
    soft = p.soft and row.soft
    good = [(i, r) for i, r in enumerate(rows) if r.failure is None]
    groups: dict[bool, list[tuple[int, Row]]] = {True: [], False: []}
    for i, r in good:
        groups[soft and r.soft is not None].append((i, r))
    parts = []
    for scored, members in groups.items():
        if members:
            own = [r for _, r in members]
            setting = setting_of(manifest, alpha, "")
            sample = (
                _scores(p, own, row, manifest.stretched(constant)) if scored else _votes(p, own, row, target_radius)
            )
            parts.append(([i for i, _ in members], derive_sample(sample, row, setting)))
    whole = joined(
        parts, len(rows), "adaptive" if p.adaptive else row.name, setting_of(manifest, alpha, _about(manifest, row))
    )
    whole.details["failures"] = {str(r.id): r.failure for r in rows if r.failure is not None}
    if constant is not None and soft:
        whole.details["lipschitz"] = str(constant)
    return whole


def setting_of(manifest: Manifest, alpha: float, about: str) -> Setting:
    """What certificates of these rows rest on, from what the manifest says was drawn."""
    return manifest.parameters.drawn().setting(alpha, about)


def _require_sound(manifest: Manifest, row: Procedure, lipschitz: Any, target: float | None) -> None:
    """Refuse what the stored statistics cannot carry, and say why."""
    p = manifest.parameters
    if p.adaptive:
        if row.soft and not row.hard:
            raise Refused(
                f"this run stopped each input by looking at its votes, and {row.name!r} works on soft scores: only vote "
                "procedures, alpha and the target radius can change"
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
        raise Refused(
            f"{row.name!r} needs soft scores, this run stored votes only: sample again with --procedure {row.name}"
        )
    if lipschitz is not None and not (p.soft and row.soft):
        raise Refused("votes have no Lipschitz constant: it can be given for runs and procedures of soft scores only")


def _votes(p: Parameters, rows: list[Row], row: Procedure, target: float | None) -> Votes | Stopped:
    first = counts_matrix([r.selection for r in rows], p.num_classes).astype(np.float64)
    second = counts_matrix([r.estimation for r in rows], p.num_classes).astype(np.float64)
    draws = np.array([float(r.draws) for r in rows])
    ties = np.stack([tie_breaks(p.seed, r.id) for r in rows]) if row.ties and not p.adaptive else None
    votes = Votes(first, second, draws, ties)
    return Stopped(votes, p.n, target or p.target_radius) if p.adaptive else votes


def _scores(p: Parameters, rows: list[Row], row: Procedure, network: float | None) -> Scores:
    softs = [r.soft for r in rows if r.soft is not None]
    width = max(s.moments.shape[1] for s in softs)
    stacked = np.zeros((4, len(softs), width))
    for i, s in enumerate(softs):
        stacked[:, i, : s.moments.shape[1]] = s.moments
    order, singles = np.stack([s.order for s in softs]), np.array([s.singles for s in softs])
    plan = stored_plan(row, order, singles, np.array([s.direct for s in softs]), stacked[0])
    known = {m: map_smoothness(m, p.num_classes, network) for m in {s.map for s in softs}}
    smoothness = Smoothness(*(np.array([getattr(known[s.map], f) for s in softs]) for f in ("component", "pair")))
    return Scores(plan, Moments(np.array([float(r.draws) for r in rows]), *stacked), smoothness)


def _about(manifest: Manifest, row: Procedure) -> str:
    p = manifest.parameters
    noise = p.drawn()
    if p.adaptive or not (row.soft and p.soft):
        return f"the majority vote of the network under {noise}"
    if manifest.map is not None:
        return f"the classifier smoothed with {noise} and {manifest.map}, fixed before the run"
    return (
        f"the classifier smoothed with {noise} and the map chosen at each input on its own selection "
        "sample: a deployed classifier that chooses anew at x' may use another map there, and nothing is certified about it"
    )
