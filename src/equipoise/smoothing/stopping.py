"""Certification that stops as soon as the answer is known: at a target radius, or close enough to the final one."""

from collections.abc import Callable
from typing import Literal

import numpy as np
from torch import Tensor

from equipoise.core import InputError, Refused
from equipoise.core.checks import require_number
from equipoise.smoothing.certificates import Certificates
from equipoise.smoothing.classifier import Ids, SmoothedClassifier, count_votes
from equipoise.smoothing.derive import Setting, Stopped, Votes, derive, joined, plan_votes, sequence_bounds
from equipoise.smoothing.intervals import clopper_pearson, lower_sequence, upper_sequence
from equipoise.smoothing.noise import Stream
from equipoise.smoothing.planning import Plan, TargetTest
from equipoise.smoothing.procedures import DEFAULT, Procedure, find_procedure
from equipoise.smoothing.radii import radius_multi
from equipoise.smoothing.ramp import Floats

Verdict = Literal["certified", "hopeless", "undecided"]
#: votes of the class, votes of its strongest rival, draws → what is known by then
Decide = Callable[[float, float, int], Verdict]


def certify_adaptive(
    classifier: SmoothedClassifier,
    x: Tensor,
    *,
    target_radius: float | None = None,
    relative: float | None = None,
    n0: int = 100,
    n_max: int = 100_000,
    alpha: float = 1e-3,
    procedure: str = DEFAULT,
    hopeless: float = 0.05,
    ids: Ids | None = None,
) -> Certificates:
    """Count the votes of each input only until its answer is known; each certificate is wrong with probability at most alpha.

    `target_radius=ε`: certified at ε, hopeless at ε (abstains), or undecided after n_max (abstains); the certified
    radius is ε. Every rival is tested at the full α, see `TargetTest`.
    `relative=x`: stop when the certified radius is within a share x of what n_max draws could still give; α is split in
    half between confidence sequences and fixed-n bounds at n_max.

    Args:
        classifier: its majority vote is certified.
        x: a batch.
        target_radius: ε.
        relative: x in (0, 1).
        n0: selection draws.
        n_max: most estimation draws per input.
        alpha: risk per input, at any stopping time.
        procedure: "rivals", or "cohen" for the class alone.
        hopeless: risk of giving up an input that would have been certified.
        ids: keys of the noise.

    Returns:
        Certificates with the draws used in `draws` and the verdicts in `details["verdicts"]`.
    """
    if (target_radius is None) == (relative is None):
        raise InputError("give either target_radius or relative")
    for what, share in (("hopeless", hopeless), ("relative", 0.5 if relative is None else relative)):
        if not 0 < share < 1:
            raise InputError(f"{what} must lie strictly between 0 and 1, got {share}")
    require_number(n_max, "n_max", least=1, whole=True)
    if classifier.map is not None and not classifier.map.votes:
        raise Refused(f"adaptive sampling counts votes, but this classifier smooths {classifier.map}: use certify")
    row, spec = find_procedure(procedure), classifier.noise_spec(x)
    own = spec.setting(alpha, "")
    parts, verdicts = [], []
    for k, (xi, name) in enumerate(classifier.inputs(x, ids)):
        selection = classifier.counts(xi, n0, input_id=name, stream=Stream.SELECTION).astype(np.float64)
        order = np.argsort(-selection, kind="stable")
        if target_radius is not None:
            decide = _target_rule(row, own, selection[order], target_radius, hopeless)
        else:
            decide = _relative_rule(row, own, selection, n_max, float(relative or 0.0))

        counts, draws = np.zeros(len(order), dtype=np.int64), 0
        verdict: Verdict = "undecided"
        for out in classifier.logits(xi, n_max, input_id=name, stream=Stream.ESTIMATION):
            counts += count_votes(out).cpu().numpy()
            draws += len(out)
            ranked = counts[order]
            verdict = decide(float(ranked[0]), float(ranked[1:].max()), draws)
            if verdict != "undecided":
                break
        votes = Votes(selection[None], counts[None].astype(np.float64), np.array([float(draws)]))
        part = derive(Stopped(votes, n_max, target_radius), row, own)
        if verdict == "undecided" and float(part.radius[0]) > 0:
            verdict = "certified"
        parts.append(([k], part))
        verdicts.append(verdict)
    setting = spec.setting(alpha, f"the majority vote of the network under {spec}")
    whole = joined(parts, len(x), "adaptive", setting)
    whole.details.update(verdicts=verdicts, target_radius=target_radius, relative=relative)
    return whole


def _target_rule(row: Procedure, setting: Setting, ranked: Floats, target: float, hopeless: float) -> Decide:
    """Stop when the target is certified, or when confidence sequences at risk `hopeless` exclude it."""
    epsilon = target + float(setting.distance)
    test = TargetTest.of(row, ranked, epsilon, setting.noise)
    alone = len(test.levels) == 1

    def decide(hits: float, rival: float, draws: int) -> Verdict:
        if test.log_e(hits, rival, draws) >= np.log(1 / setting.alpha):
            return "certified"
        if alone:
            top = float(upper_sequence(hits, draws, hopeless))
            least = 1 - top
        else:
            top = float(upper_sequence(hits, draws, hopeless / 2))
            least = float(lower_sequence(rival, draws, hopeless / (2 * len(ranked) - 2)))
        most = float(radius_multi(top, min(least, top), setting.noise.sigma))
        return "hopeless" if most < epsilon else "undecided"

    return decide


def _relative_rule(row: Procedure, setting: Setting, selection: Floats, most: int, share: float) -> Decide:
    """Stop when the radius of now is within `share` of what `most` draws could still give."""
    half = Setting(setting.noise, setting.alpha / 2)
    plan = plan_votes(Votes(selection[None], selection[None], np.array([float(most)])), row, half)

    def decide(hits: float, rival: float, draws: int) -> Verdict:
        now = sequence_bounds(np.array([hits]), np.array([rival]), np.array([float(draws)]), plan, half)
        final = _final_radius(hits, rival, draws, most, plan, half)
        if final == 0 and draws < most:
            return "hopeless"
        radius = float(now.radius[0])
        return "certified" if radius > 0 and radius >= (1 - share) * final else "undecided"

    return decide


def _final_radius(hits: float, rival: float, draws: int, most: int, plan: Plan, setting: Setting) -> float:
    """The radius that all draws could still give, roughly."""
    best = min(np.ceil(float(clopper_pearson(hits, draws, 0.05, "upper")) * most), most)
    low = float(clopper_pearson(best, most, setting.alpha * float(plan.top[0]), "lower"))
    up = 1 - low
    if int(plan.partition.buckets[0]) > 2:
        least = np.floor(float(clopper_pearson(rival, draws, 0.05, "lower")) * most)
        up = min(up, float(clopper_pearson(least, most, setting.alpha * float(plan.rival[0]), "upper")))
    return float(radius_multi(low, up, setting.noise.sigma))
