"""Certification that stops as soon as it is known whether a target radius is certified."""

from typing import Literal

import numpy as np
from torch import Tensor

from equipoise.core import Ints, Refused, require_number, require_type
from equipoise.smoothing.certificates import Certificates
from equipoise.smoothing.classifier import Ids, SmoothedClassifier, count_votes
from equipoise.smoothing.derive import Setting, Votes, derive, joined
from equipoise.smoothing.intervals import clopper_pearson
from equipoise.smoothing.noise import Stream
from equipoise.smoothing.planning import TargetTest
from equipoise.smoothing.procedures import DEFAULT, find_procedure
from equipoise.smoothing.radii import radius_multi

Verdict = Literal["certified", "hopeless", "undecided"]
#: risk of giving up an input at one look: some percent over all looks where the truth lies exactly at the target
_HOPELESS = 1e-3


def certify_adaptive(
    classifier: SmoothedClassifier,
    x: Tensor,
    target_radius: float,
    *,
    n0: int = 100,
    n_max: int = 100_000,
    alpha: float = 1e-3,
    procedure: str = DEFAULT,
    ids: Ids | None = None,
) -> Certificates:
    """Count the votes of each input only until its answer is known; each certificate is wrong with probability at most alpha.

    Certified at `target_radius` ε, hopeless at ε (abstains), or undecided after n_max (abstains); the certified radius is ε.
    Every rival is tested at the full α, see `TargetTest`. For the largest radius instead of a yes or no, use `certify`.

    Args:
        classifier: its majority vote is certified.
        x: a batch.
        target_radius: ε.
        n0: selection draws.
        n_max: most estimation draws per input.
        alpha: risk per input, at any stopping time.
        procedure: "rivals", or "cohen" for the class alone.
        ids: keys of the noise.

    Returns:
        Certificates with the draws used in `draws` and the verdicts in `details["verdicts"]`.
    """
    require_type(classifier, SmoothedClassifier, "classifier")
    if classifier.map is not None and not classifier.map.votes:
        raise Refused(
            f"adaptive sampling counts votes, but this classifier smooths {classifier.map}: use certify"
        )
    row = find_procedure(procedure)
    spec = classifier.noise_spec(x)
    setting = spec.setting(alpha, f"the majority vote of the network under {spec}")
    epsilon = require_number(target_radius, "target_radius", least=0) + setting.distance
    parts = []
    verdicts = []
    for k, (xi, name) in enumerate(classifier.inputs(x, ids)):
        selection = classifier.counts(xi, n0, input_id=name, stream=Stream.SELECTION).astype(
            np.float64
        )
        order = np.argsort(-selection, kind="stable")
        test = TargetTest.of(row, selection[order], epsilon, setting.noise)
        counts = np.zeros(len(order), dtype=np.int64)
        draws = 0
        verdict = "undecided"
        for out in classifier.logits(xi, n_max, input_id=name, stream=Stream.ESTIMATION):
            counts += count_votes(out).cpu().numpy()
            draws += len(out)
            votes = counts[order]
            verdict = _verdict(test, votes, draws, epsilon, setting)
            if verdict != "undecided":
                break
        estimation = counts[None].astype(np.float64)
        sample = Votes(selection[None], estimation, np.array([float(draws)]), target_radius)
        parts.append(([k], derive(sample, row, setting)))
        verdicts.append(verdict)
    whole = joined(parts, len(x), "adaptive", setting)
    whole.details.update(verdicts=verdicts, target_radius=target_radius)
    return whole


def _verdict(
    test: TargetTest, votes: Ints, draws: int, epsilon: float, setting: Setting
) -> Verdict:
    """Certified by the e-process, or hopeless where binomial bounds exclude the target: abstaining is always sound."""
    hits = float(votes[0])
    rival = float(votes[1:].max())
    if test.log_e(hits, rival, draws) >= np.log(1 / setting.alpha):
        return "certified"
    top = clopper_pearson(hits, draws, _HOPELESS, "upper")
    least = 1 - top
    if len(test.levels) > 1:
        least = clopper_pearson(rival, draws, _HOPELESS / (len(votes) - 1), "lower")
    most = radius_multi(top, np.minimum(least, top), setting.noise.sigma)
    return "hopeless" if most < epsilon else "undecided"
