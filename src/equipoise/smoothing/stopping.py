"""Certification that stops as soon as the answer is known: at a target radius, or close enough to the final one."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from equipoise.core import InputError
from equipoise.smoothing.adaptive import ScoreTest, TargetTest, lower_sequence, target_probability, upper_sequence
from equipoise.smoothing.bounds import Gaussian
from equipoise.smoothing.certificates import ABSTAIN, Certificates
from equipoise.smoothing.classifier import Ids, SmoothedClassifier, count_votes
from equipoise.smoothing.derive import Setting, Stopped, Votes, derive, joined, plan_votes, said, sequence_bounds
from equipoise.smoothing.intervals import clopper_pearson
from equipoise.smoothing.moments import Ints
from equipoise.smoothing.noise import Stream
from equipoise.smoothing.planning import Plan
from equipoise.smoothing.procedures import DEFAULT, Procedure, find_procedure
from equipoise.smoothing.radii import radius_multi
from equipoise.smoothing.ramp import Floats
from equipoise.smoothing.simplex import SimplexMap, apply_map, map_smoothness, scores_of

Verdict = Literal["certified", "hopeless", "undecided"]


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
    lipschitz: Any = None,
    map: SimplexMap | None = None,
    hopeless: float = 0.05,
    ids: Ids | None = None,
) -> Certificates:
    """Sample each input only until its answer is known; each certificate is wrong with probability at most alpha.

    `target_radius=ε`: certified at ε, hopeless at ε (abstains), or undecided after n_max (abstains); the certified
    radius is ε. Every rival is tested at the full α, see `TargetTest`.
    `relative=x`: stop when the certified radius is within a share x of what n_max draws could still give; α is split in
    half between confidence sequences and fixed-n bounds at n_max.

    Args:
        classifier: its `map` is used unless `map` is given; none means the majority vote.
        x: a batch.
        target_radius: ε.
        relative: x in (0, 1), majority vote only.
        n0: selection draws.
        n_max: most estimation draws per input.
        alpha: risk per input, at any stopping time.
        procedure: "rivals", or "cohen" for the class alone.
        lipschitz: sound bound of Lip(f): lowers the score that ε needs (soft maps, target mode).
        map: simplex map, fixed beforehand.
        hopeless: risk of giving up an input that would have been certified.
        ids: keys of the noise.

    The draws used are in `draws`, the verdicts in `details["verdicts"]`.
    """
    if (target_radius is None) == (relative is None):
        raise InputError("give either target_radius or relative")
    if not 0 < alpha < 1 or not 0 < hopeless < 1:
        raise InputError(f"alpha and hopeless must lie strictly between 0 and 1, got {alpha} and {hopeless}")
    chosen = map or classifier.map or SimplexMap("hardmax")
    hard = chosen.votes
    if relative is not None and (not hard or lipschitz is not None or not 0 < relative < 1):
        raise InputError("relative needs a share strictly between 0 and 1, the majority vote and no Lipschitz constant")
    if hard and lipschitz is not None:
        raise InputError("votes have no Lipschitz constant: give a soft map with it")
    classifier = classifier.suited(lipschitz)
    row, spec = find_procedure(procedure), classifier.noise_spec(x)
    setting = spec.setting(alpha, f"the classifier smoothed with {spec} and {chosen}")
    parts, verdicts = [], []
    for k, (xi, name) in enumerate(classifier.inputs(x, ids)):
        if hard:
            stop = _Votes(row, spec.setting(alpha, ""), target_radius, relative, n_max, hopeless)
            found, verdict = stop.run(classifier, xi, name, n0)
        else:
            found, verdict = _scores(
                classifier, xi, name, chosen, float(target_radius or 0.0), lipschitz, n0, n_max, hopeless,
                spec.setting(alpha, ""),
            )  # fmt: skip
        parts.append(([k], found))
        verdicts.append(verdict)
    whole = joined(parts, len(x), "adaptive", setting)
    whole.details.update(verdicts=verdicts, target_radius=target_radius, relative=relative)
    return whole


@dataclass(frozen=True)
class _Votes:
    """Stops the votes of one input, and certifies what was seen through `derive`."""

    row: Procedure
    setting: Setting
    target: float | None
    relative: float | None
    most: int
    hopeless: float

    def run(self, classifier: SmoothedClassifier, x: Tensor, name: int | str, n0: int) -> tuple[Certificates, Verdict]:
        """Sample until decided."""
        selection = classifier.counts(x, n0, input_id=name, stream=Stream.SELECTION)[None].astype(np.float64)
        order = np.argsort(-selection[0], kind="stable")
        counts, draws = np.zeros(len(order), dtype=np.int64), 0
        decide = self._target(selection[0][order]) if self.relative is None else self._close(selection)
        verdict: Verdict = "undecided"
        for out in classifier.logits(x, self.most, input_id=name, stream=Stream.ESTIMATION):
            counts, draws = counts + count_votes(out).cpu().numpy(), draws + len(out)
            ranked = counts[order]
            verdict = decide(float(ranked[0]), float(ranked[1:].max()), draws)
            if verdict != "undecided":
                break
        votes = Votes(selection, counts[None].astype(np.float64), np.array([float(draws)]))
        found = derive(Stopped(votes, self.most, self.target), self.row, self.setting)
        if verdict == "undecided" and float(found.radius[0]) > 0:
            verdict = "certified"
        return found, verdict

    def _target(self, ranked: Floats) -> Any:
        noise, alpha = self.setting.noise, self.setting.alpha
        epsilon = float(self.target or 0.0) + float(self.setting.distance)
        test = TargetTest.of(self.row, ranked, epsilon, noise, alpha)
        alone = len(test.levels) == 1

        def decide(hits: float, rival: float, draws: int) -> Verdict:
            if test.log_e(hits, rival, draws) >= np.log(1 / alpha):
                return "certified"
            top = float(upper_sequence(hits, draws, self.hopeless / (1 if alone else 2)))
            least = 1 - top if alone else float(lower_sequence(rival, draws, self.hopeless / (2 * len(ranked) - 2)))
            most = float(radius_multi(top, min(least, top), noise.sigma))
            return "hopeless" if most < epsilon else "undecided"

        return decide

    def _close(self, selection: Floats) -> Any:
        noise, share = self.setting.noise, float(self.relative or 0.0)
        votes = Votes(selection, selection, np.array([float(self.most)]))
        plan = plan_votes(votes, self.row, self.setting, self.setting.alpha / 2)

        def decide(hits: float, rival: float, draws: int) -> Verdict:
            a, b, t = (np.array([float(v)]) for v in (hits, rival, draws))
            now = sequence_bounds(a, b, t, plan, noise, self.setting.alpha / 2)
            final = self._final(hits, rival, draws, plan, noise)
            if final == 0 and draws < self.most:
                return "hopeless"
            radius = float(now.radius[0])
            return "certified" if radius > 0 and radius >= (1 - share) * final else "undecided"

        return decide

    def _final(self, hits: float, rival: float, draws: int, plan: Plan, noise: Gaussian) -> float:
        """The radius that all draws could still give, roughly."""
        n, alpha = self.most, self.setting.alpha / 2
        best = min(np.ceil(float(clopper_pearson(hits, draws, 0.05, "upper")) * n), n)
        low = float(clopper_pearson(best, n, alpha * float(plan.top[0]), "lower"))
        up = 1 - low
        if int(plan.partition.buckets[0]) > 2:
            least = np.floor(float(clopper_pearson(rival, draws, 0.05, "lower")) * n)
            up = min(up, float(clopper_pearson(least, n, alpha * float(plan.rival[0]), "upper")))
        return float(radius_multi(low, up, noise.sigma))


def _scores(
    classifier: SmoothedClassifier, x: Tensor, name: int | str, chosen: SimplexMap, epsilon: float, lipschitz: Any,
    n0: int, n_max: int, hopeless: float, setting: Setting,
) -> tuple[Certificates, Verdict]:  # fmt: skip
    """Soft scores at a target: half the stake on the class alone, half on its margin over each rival, all at the full α."""
    smooth = map_smoothness(chosen, classifier.num_classes, classifier.round_constant(lipschitz))
    sigma, spread = float(setting.noise.sigma), float(setting.noise.variation)
    goal = epsilon + float(setting.distance)
    p0, h0 = (
        min(target_probability(goal, sigma, c) + spread, 1 - 2.0**-52) for c in (smooth.component, smooth.pair * 0.5)
    )
    logits = classifier.selection(x[None], n0, [name], Stream.SELECTION)
    top = int(apply_map(chosen, logits).sum(axis=1)[0].argmax())
    own, win, lose = ScoreTest(p0), ScoreTest(h0), ScoreTest(1 - h0)
    lost, others = ScoreTest(1 - p0), np.delete(np.arange(classifier.num_classes), top)
    draws, verdict = 0, "undecided"
    for out in classifier.logits(x, n_max, input_id=name, stream=Stream.ESTIMATION):
        scores = scores_of(chosen, out).cpu().numpy()
        score, draws = scores[:, top], draws + len(out)
        margin = (1 + score[:, None] - scores[:, others]) / 2
        e = np.logaddexp(own.update(score), win.update(margin).min()) - np.log(2.0) - 1e-12
        gone = min(float(lost.update(1 - score)), float(lose.update(1 - margin).max()) - np.log(len(others)))
        if e >= np.log(1 / setting.alpha):
            verdict = "certified"
            break
        if gone >= np.log(2 / hopeless):
            verdict = "hopeless"
            break
    sure = verdict == "certified"
    radius = epsilon if sure else 0.0
    arrays: list[Ints] = [np.array([v]) for v in (top if radius > 0 else ABSTAIN, top, 2, draws)]
    found = Certificates(
        arrays[0], np.array([radius]), arrays[1], np.zeros(1), np.ones(1), arrays[2], "adaptive", sigma, setting.alpha,
        arrays[3], said(setting), {"direct": [True]},
    )  # fmt: skip
    return found, verdict  # type: ignore[return-value]
