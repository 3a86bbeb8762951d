"""Training for the smoothed soft scores themselves: the soft vote, and the Lipschitz-aware radius.

With a simplex map τ and M noisy copies, `F̂(x) = mean_i τ(f(x + δ_i))` estimates the smoothed scores, and its gradient
goes through map and temperature. Estimates, not bounds: they are for training; certificates come from `equipoise.smoothing`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core.errors import InputError
from equipoise.regularizers.noise import Model, noisy_copies
from equipoise.smoothing.ramp import ramp_quantile
from equipoise.smoothing.simplex import SimplexMap

#: scores are kept this far from 0 and 1, where quantiles and logarithms are infinite
EDGE = 1e-4


def smoothed_scores(
    model: Model, x: Tensor, sigma: float, map: SimplexMap, copies: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """`mean_i τ(f(x + δ_i))` over noisy copies (N, c), and the logits of the first copy.

    >>> scores, _ = smoothed_scores(torch.nn.Linear(4, 3), torch.randn(5, 4), 0.25, SimplexMap("softmax"), copies=4)
    >>> bool((scores.sum(1) - 1).abs().max() < 1e-5)
    True
    """
    logits = model(noisy_copies(x, sigma, copies, generator)).reshape(copies, len(x), -1)
    return map(logits).mean(0), logits[0]


def soft_vote_loss(scores: Tensor, y: Tensor) -> Tensor:
    """`−log F̂_y`: the likelihood of the soft vote, not of single noisy copies.

    >>> round(float(soft_vote_loss(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))), 4)
    0.6931
    """
    return functional.nll_loss(scores.clamp_min(EDGE).log(), y)


class _Quantile(torch.autograd.Function):
    """`H_a⁻¹(p)` of `smoothing.ramp`, with slope `1/H_a'`: H_a' = (Φ(t + a/2) − Φ(t − a/2))/a."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, width: float) -> Tensor:
        low, up = ramp_quantile(p.detach().double().cpu().numpy(), width)
        t = torch.from_numpy(np.asarray((low + up) / 2)).to(p)
        ctx.save_for_backward(t)
        ctx.width = width
        return t

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (t,) = ctx.saved_tensors
        a = ctx.width
        slope = (torch.special.ndtr(t + a / 2) - torch.special.ndtr(t - a / 2)) / a
        return grad / slope.clamp_min(1e-6), None


def expected_radius(scores: Tensor, y: Tensor, sigma: float, lipschitz: float) -> Tensor:
    """`½(ψ(F̂_y) − max_k ψ(F̂_k))` (N,), differentiable: the Lipschitz-aware radius R_multiLip if the scores were exact.

    Negative where another class leads. An estimate: nothing is certified by it.

    Args:
        scores: smoothed scores (N, c) in [0, 1].
        y: labels (N,).
        sigma: noise level.
        lipschitz: of every component of `τ∘f` (`SimplexMap.component_lipschitz`).

    >>> round(float(expected_radius(torch.tensor([[0.9, 0.1]]), torch.tensor([0]), 0.5, 1.0)), 4)
    0.7431
    """
    if not (math.isfinite(lipschitz) and lipschitz > 0 and math.isfinite(sigma) and sigma > 0):
        raise InputError(f"expected a positive sigma and Lipschitz constant, got {sigma} and {lipschitz}")
    t = _Quantile.apply(scores.clamp(EDGE, 1 - EDGE), 1 / (lipschitz * sigma))
    others = t.masked_fill(functional.one_hot(y, t.shape[1]).bool(), -math.inf)
    radius: Tensor = 0.5 * sigma * (t.gather(1, y[:, None])[:, 0] - others.amax(1))
    return radius
