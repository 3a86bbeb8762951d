"""Certification that stops as soon as the answer is known: at a target radius, or close enough to the final one."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from equipoise.core import InputError, as_upper
from equipoise.smoothing.adaptive import ScoreTest, log_e_value, lower_sequence, target_probability
from equipoise.smoothing.certificates import ABSTAIN, NOT_COVERED, Certificates
from equipoise.smoothing.classifier import Ids, SmoothedClassifier
from equipoise.smoothing.intervals import clopper_pearson
from equipoise.smoothing.maps import apply_map, scores_of
from equipoise.smoothing.noise import Stream
from equipoise.smoothing.radii import radius_mono
from equipoise.smoothing.simplex import SimplexMap

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
    lipschitz: Any = None,
    map: SimplexMap | None = None,
    hopeless: float = 0.05,
    ids: Ids | None = None,
) -> Certificates:
    """Sample each input only until its answer is known; each certificate is wrong with probability at most alpha.

    `target_radius=ε`: certified at ε, hopeless at ε (abstains), or undecided after n_max (abstains); the certified
    radius is ε.
    `relative=x`: stop when the certified radius is within a share x of what n_max draws could still give; α is split in
    half between the confidence sequence and a Clopper–Pearson bound at n_max.

    Args:
        classifier: its `map` is used unless `map` is given; none means the majority vote.
        x: a batch.
        target_radius: ε.
        relative: x in (0, 1), majority vote only.
        n0: selection draws.
        n_max: most estimation draws per input.
        alpha: risk per input, at any stopping time.
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
    hard = chosen.name == "hardmax"
    if relative is not None and (not hard or lipschitz is not None or not 0 < relative < 1):
        raise InputError("relative needs a share strictly between 0 and 1, the majority vote and no Lipschitz constant")
    constant = np.inf
    if lipschitz is not None:
        network = as_upper(lipschitz, "Lipschitz constant of the network")
        constant = chosen.component_lipschitz(network, classifier.num_classes)
    scores = apply_map(chosen, classifier.selection(x, n0, ids, Stream.SELECTION)).sum(axis=1)
    top = scores.argmax(axis=1)
    rows = []
    for k, (xi, name) in enumerate(classifier.inputs(x, ids)):
        if relative is not None:
            rows.append(_until_close(classifier, xi, name, int(top[k]), relative, n_max, alpha))
        else:
            p0 = target_probability(float(target_radius or 0.0), classifier.sigma, constant)
            found = _until_decided(classifier, xi, name, int(top[k]), chosen, p0, n_max, alpha, hopeless)
            rows.append((found[0], p0 if found[0] == "certified" else 0.0, target_radius or 0.0, found[1]))
    return _assemble(classifier, rows, top, chosen, alpha, target_radius, relative)


def _until_decided(
    classifier: SmoothedClassifier, x: Tensor, name: int | str, top: int, chosen: SimplexMap, p0: float, n_max: int,
    alpha: float, hopeless: float,
) -> tuple[Verdict, int]:  # fmt: skip
    hard = chosen.name == "hardmax"
    win, lose = ScoreTest(p0), ScoreTest(1 - p0)
    hits, draws = 0.0, 0
    for out in classifier.logits(x, n_max, input_id=name, stream=Stream.ESTIMATION):
        score = scores_of(chosen, out)[:, top]
        draws += len(out)
        if hard:
            hits += float(score.sum())
            yes, no = float(log_e_value(hits, draws, p0)), float(log_e_value(draws - hits, draws, 1 - p0))
        else:
            values = score.cpu().numpy()
            yes, no = win.update(values), lose.update(1 - values)
        if yes >= np.log(1 / alpha):
            return "certified", draws
        if no >= np.log(1 / hopeless):
            return "hopeless", draws
    return "undecided", draws


def _until_close(
    classifier: SmoothedClassifier, x: Tensor, name: int | str, top: int, relative: float, n_max: int, alpha: float
) -> tuple[Verdict, float, float, int]:
    hits, draws, low = 0, 0, 0.0
    for out in classifier.logits(x, n_max, input_id=name, stream=Stream.ESTIMATION):
        right = (out.argmax(dim=1) == top) & torch.isfinite(out).all(dim=1)
        hits, draws = hits + int(right.sum()), draws + len(out)
        low = max(low, float(lower_sequence(hits, draws, alpha / 2)))
        best = np.ceil(float(clopper_pearson(hits, draws, 0.05, "upper")) * n_max)
        final = float(radius_mono(clopper_pearson(min(best, n_max), n_max, alpha / 2, "lower"), classifier.sigma))
        radius = float(radius_mono(low, classifier.sigma))
        if final == 0 and draws < n_max:
            return "hopeless", low, 0.0, draws
        if radius > 0 and radius >= (1 - relative) * final:
            return "certified", low, radius, draws
    low = max(low, float(clopper_pearson(hits, draws, alpha / 2, "lower")))
    radius = float(radius_mono(low, classifier.sigma))
    return ("certified" if radius > 0 else "undecided"), low, radius, draws


def _assemble(
    classifier: SmoothedClassifier,
    rows: list[tuple[Verdict, float, float, int]],
    top: Any,
    chosen: SimplexMap,
    alpha: float,
    target: float | None,
    relative: float | None,
) -> Certificates:
    verdicts = [r[0] for r in rows]
    sure = np.array([v == "certified" for v in verdicts])
    low = np.array([r[1] for r in rows])
    radius = np.where(sure, np.array([r[2] for r in rows]), 0.0)
    about = f"Certifies the classifier smoothed with N(0, {classifier.sigma:g}²·I) noise and {chosen}. {NOT_COVERED}"
    upper = np.minimum(np.nextafter(1 - low, 2.0), 1.0)
    return Certificates(
        np.where(sure, top, ABSTAIN), radius, top, low, upper, np.full(len(rows), 2), "adaptive", classifier.sigma,
        alpha,
        np.array([r[3] for r in rows]), about, {"verdicts": verdicts, "target_radius": target, "relative": relative},
    )  # fmt: skip
