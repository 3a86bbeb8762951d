"""Conformal prediction sets that keep their coverage under attack, from one noisy draw per input.

Let `S = s(x + δ, y)` be the score of a label under one draw δ ~ N(0, σ²I), and q the k-th smallest of the n scores of
calibration examples. The set at an attacked input x̃, `‖x̃ − x‖ ≤ r`, is `{y : s(x̃ + δ, y) ≤ q}`.

*Theorem.* If `k ≥ (n + 1)·Φ(Φ⁻¹(1 − α) + r/σ)` and the calibration examples and the clean test example are exchangeable,
the set contains the label with probability at least 1 − α, whatever the attack, as long as it does not know the draw δ at x̃.

*Proof.* For fixed q and label let `p(x) = P(s(x + δ, y) ≤ q)`. By the lemma of Neyman and Pearson `p(x̃) ≥ h(p(x))` with
`h(p) = Φ(Φ⁻¹(p) − c)`, `c = r/σ`. Its derivative `exp(cz − c²/2)` at `z = Φ⁻¹(p)` increases with p: h is convex. δ is
independent of the calibration sample, the example and the attack, so the coverage is
`E p(x̃) ≥ E h(p(x)) ≥ h(E p(x)) = h(P(S ≤ q))`, by Jensen over calibration sample and example together. The n scores and S
are exchangeable, so `P(S ≤ q) ≥ k/(n + 1)`, with or without ties. Finally `h(k/(n + 1)) ≥ 1 − α` by the choice of k. ∎

Grid noise of total variation v per draw gives `p(x̃) ≥ h(p(x) − v) − v`, hence the level `Φ(Φ⁻¹(1 − α + v) + c) + v`; where
the grid is not that of 8-bit images, r grows by what rounding moves. The level is rounded up. With float noise the law of
the noise is not covered.

Reference: after RCP1, randomized smoothing with one sample for robust conformal prediction (NeurIPS 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, inf, isfinite, nextafter

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor, nn

from equipoise.core import (
    POSITIVE,
    Floats,
    InputError,
    Mask,
    require_images,
    require_labels,
    require_module,
    require_number,
)
from equipoise.smoothing.classifier import SmoothedClassifier
from equipoise.smoothing.noise import NoiseName, Sigma, Stream, fresh_seed
from equipoise.smoothing.ramp import quantile

_EPS = 2.0**-46  # more than the relative error of Φ, over (1 + x²), and of the operations around it


class RobustConformal:
    """Prediction sets that contain the label with probability 1 − α under any ℓ2 attack of size r.

    The score of a label is `−log softmax` of its logit under one draw of noise.

    Args:
        model: maps (batch, *shape) to logits, every row by itself; in evaluation mode, and trained under such noise.
        sigma: noise level, in the units of the input.
        noise: "grid", "float" or None, as for `SmoothedClassifier`.

    Guarantee: coverage at least 1 − α on average over calibration sample, example and draws, if the calibration examples were
    not used for training and come from the law of the clean test examples. Not for each input or class by itself.

    >>> model = nn.Linear(2, 2).eval()
    >>> x, y = torch.randn(99, 2), torch.zeros(99, dtype=torch.int64)
    >>> RobustConformal(model, 0.5).calibrate(x, y).predict(x[:3], radius=0.1).shape
    (3, 2)
    """

    def __init__(self, model: nn.Module, sigma: Sigma, *, noise: NoiseName | None = None) -> None:
        self.model = require_module(model)
        self.sigma = sigma
        self.noise = noise
        self.scores: Floats | None = None

    def calibrate(self, x: Tensor, y: Tensor) -> RobustConformal:
        """Keep the scores of clean, labelled examples, one draw each.

        Args:
            x: inputs that the model was not trained on.
            y: their labels.
        """
        with torch.inference_mode():
            classes = self.model(require_images(x)[:1]).shape[-1]
        y = require_labels(y, len(x), classes)
        self.smoothed = SmoothedClassifier(
            self.model, self.sigma, classes, chunk_size=1, noise=self.noise
        )
        self.spec = self.smoothed.noise_spec(x)
        self.shape = x.shape[1:]
        scores = self._draw(x, Stream.CALIBRATION)
        self.scores = np.sort(scores[np.arange(len(x)), y.cpu().numpy()])
        return self

    def threshold(self, radius: float, alpha: float = 0.1) -> float:
        """The largest score in a set; infinite where the calibration sample is too small, so that sets hold all classes.

        Args:
            radius: ℓ2 size r of the attack.
            alpha: share of sets that may miss the label.
        """
        require_number(radius, "radius", least=0)
        require_number(alpha, "alpha", least=POSITIVE, most=1)
        if self.scores is None:
            raise InputError("there are no calibration scores: call calibrate(x, y) first")
        variation = self.spec.variation
        moved = self.spec.grid.distance(self.spec.dimension) if self.spec.grid else 0.0
        shift = (radius + moved) / self.smoothed.sigma * (1 + _EPS)

        risk = max(nextafter(alpha - variation, 0.0), 0.0)
        z = nextafter(shift - float(quantile(risk)[0]), inf)
        tail = float(ndtr(-z)) * (1 - _EPS * (1 + z * z)) - variation if isfinite(z) else 0.0
        above = floor(max(0.0, tail) * (len(self.scores) + 1))  # n + 1 − k
        return float(self.scores[-above]) if above else inf

    def predict(self, x: Tensor, radius: float, alpha: float = 0.1) -> Mask:
        """Which classes are in the set of each input, (N, classes), from one fresh draw each.

        Args:
            x: inputs, possibly attacked.
            radius: ℓ2 size r of the attack.
            alpha: share of sets that may miss the label.
        """
        threshold = self.threshold(radius, alpha)
        if x.shape[1:] != self.shape:
            raise InputError(
                f"calibrated on inputs of shape {tuple(self.shape)}, got {tuple(x.shape[1:])}"
            )
        return self._draw(x, Stream.PREDICTION) <= threshold

    def coverage(
        self, x: Tensor, y: Tensor, attacked: Mapping[float, Tensor], alpha: float = 0.1
    ) -> list[dict[str, float]]:
        """How often the sets of labelled examples hold their label, as they are and attacked: estimates, for a report.

        Args:
            x: clean test inputs.
            y: their labels.
            attacked: for every radius r, these inputs moved by at most r, for instance by `attacks.smooth_pgd`.
            alpha: share of sets that may miss the label.

        Returns:
            A row per radius, as `report.collect(sets=…)` takes them.
        """
        rows = []
        own = np.arange(len(x)), y.cpu().numpy()
        for radius, moved in attacked.items():
            clean = self.predict(x, radius, alpha)
            row = {"radius": radius, "alpha": alpha, "examples": len(x)}
            row |= {"size": float(clean.sum(1).mean()), "covered": float(clean[own].mean())}
            row["attacked"] = float(self.predict(moved, radius, alpha)[own].mean())
            rows.append(row)
        return rows

    def _draw(self, x: Tensor, stream: Stream) -> Floats:
        """Scores (N, classes) from draws that nobody has seen: an attack must not know them."""
        fresh = self.smoothed.like(SmoothedClassifier, seed=fresh_seed())
        logits = torch.from_numpy(fresh.selection(x, 1, None, stream)[:, 0])
        return -logits.log_softmax(1).numpy()
