"""Sharpness: how much the loss can rise within a ball around the parameters, found by ascent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import nn

from equipoise.core.errors import InputError
from equipoise.curvature.hessian import Data, LossHessian, Pattern, Vector
from equipoise.curvature.losses import Loss

Ball = Literal["l2", "box"]


@dataclass(frozen=True)
class Sharpness:
    """`value ≤ max_{Δ∈B} (L(θ+Δ) − L(θ))/(1 + L(θ))`: the best the ascent found, a lower bound up to rounding."""

    value: float
    loss: float
    largest_loss: float
    radius: float
    ball: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "kind": "lower"}


def sharpness(
    model: nn.Module,
    loss: Loss,
    data: Data,
    layer: Pattern = None,
    *,
    radius: float = 0.05,
    ball: Ball = "l2",
    steps: int = 20,
    restarts: int = 2,
    seed: int = 0,
    **options: Any,
) -> Sharpness:
    """`max_{Δ∈B} (L(θ+Δ) − L(θ))/(1 + L(θ))` by projected gradient ascent on the whole data set.

    B is `‖Δ‖₂ ≤ radius`, or with `ball="box"` the box `|Δ_i| ≤ radius·(|θ_i| + 1)` of Keskar et al. 2017. The first start is
    θ itself (SAM's direction, Foret et al. 2021), the others are random.

    >>> import torch
    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = model.weight.data.fill_(0.0)
    >>> s = sharpness(model, "mse", (torch.ones(1, 1), torch.zeros(1, 1)), radius=0.5)  # L(w) = w²
    >>> round(s.value, 4)
    0.25
    """
    return sharpness_of(
        LossHessian(model, loss, data, layer, **options),
        radius=radius,
        ball=ball,
        steps=steps,
        restarts=restarts,
        seed=seed,
    )


def sharpness_of(
    hessian: LossHessian,
    *,
    radius: float = 0.05,
    ball: Ball = "l2",
    steps: int = 20,
    restarts: int = 2,
    seed: int = 0,
) -> Sharpness:
    """`sharpness` around the parameters of an operator that is there already."""
    if ball not in ("l2", "box"):
        raise InputError(f"ball must be l2 or box, got {ball!r}")
    if not (math.isfinite(radius) and radius > 0) or steps < 1 or restarts < 1:
        raise InputError(f"expected radius > 0, steps ≥ 1 and restarts ≥ 1; got {radius}, {steps}, {restarts}")
    rng = np.random.default_rng(seed)
    reach = np.full(hessian.size, radius) if ball == "l2" else radius * (np.abs(hessian.flat()) + 1)
    base = hessian.value()
    best = base
    for start in range(restarts):
        delta = np.zeros(hessian.size)
        if start > 0 or not np.any(hessian.gradient_at(delta)):  # at a stationary point any direction does
            delta = _inside(rng.standard_normal(hessian.size) * reach, reach, ball)
        best = max(best, hessian.value(delta))
        for k in range(steps):
            direction = _steepest(hessian.gradient_at(delta), reach, ball)
            step = 1.0 if k == 0 and start == 0 else 0.5
            delta = _inside(delta + step * direction, reach, ball)
            best = max(best, hessian.value(delta))
    return Sharpness((best - base) / (1 + base), base, best, radius, ball)


def _steepest(g: Vector, reach: Vector, ball: Ball) -> Vector:
    if ball == "box":
        result: Vector = np.sign(g) * reach
        return result
    return g * (reach[0] / max(float(np.linalg.norm(g)), 1e-300))


def _inside(delta: Vector, reach: Vector, ball: Ball) -> Vector:
    if ball == "box":
        return np.clip(delta, -reach, reach)
    return delta * min(1.0, float(reach[0]) / max(float(np.linalg.norm(delta)), 1e-300))
