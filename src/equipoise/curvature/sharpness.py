"""How sharp a minimum is: the curvature of the loss smoothed by noise on the parameters, and how much it rises in a ball.

The bound of the smoothed curvature needs the gradient to be small *everywhere* the noise can reach, not only at the minimum:
for `L = ½H·θ²` the gradient vanishes at 0, yet smoothing leaves the curvature H as it is.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.bounds import Bound, Kind
from equipoise.core.checks import POSITIVE, require_number, require_tensor
from equipoise.core.precision import inflate
from equipoise.curvature.hessian import LossHessian, Vector, require_operator
from equipoise.norms.spectral import spectral_norm


def smoothed_loss_bound(curvature: float, gradient: float, sigma: float, *, everywhere: bool) -> Bound:
    """`‖∇²L^σ(θ)‖₂ ≤ H·erf(ε/(√2·H·σ))` for `L^σ(θ) = E L(θ + N(0, σ²I))`.

    Guarantee: an upper bound if `‖∇²L‖ ≤ H = curvature` and `‖∇L‖ ≤ ε = gradient` hold for **all** parameters
    (`everywhere=True`). With values measured at one point it is an estimate only, and labelled so: it can then be wrong by
    any factor.

    Proof: `u·∇L` takes values in an interval of length 2ε and is H-Lipschitz; its Gaussian smoothing has Lipschitz
    constant `H·erf(2ε/(2√2·Hσ))`. Reference: thesis, corollary on the smoothed loss, with its assumption made explicit.

    >>> smoothed_loss_bound(2.0, 0.5, 1.0, everywhere=True)
    Bound(0.394826, upper, method='erf')
    """
    for what, value in (("curvature", curvature), ("gradient", gradient), ("sigma", sigma)):
        require_number(value, what, least=0)
    if sigma == 0 or curvature == 0:
        value = curvature
    else:
        # erf(x) ≤ 2x/√π, equal to all digits below 1e-9
        flat = math.sqrt(2 / math.pi) * (gradient / sigma) * (1 + 1e-14)
        x = gradient / sigma / curvature / math.sqrt(2)
        value = min(curvature, flat if x < 1e-9 else curvature * math.erf(x) * (1 + 1e-14))
    everywhere = everywhere is True  # anything else is labelled an estimate
    note = "" if everywhere else "the constants were measured at one point: no bound"
    return Bound(float(inflate(value)), Kind.UPPER if everywhere else Kind.ESTIMATE, "erf", note)


def last_layer_constants(features: Tensor, bias: bool = False) -> tuple[Bound, Bound]:
    """`(H, ε)` that hold for all weights W of softmax regression on fixed features h: `L(W) = mean CE(Wh, y)`.

    `‖∇²L‖ ≤ ½·λ_max(mean hhᵀ)`, since `‖diag(p) − ppᵀ‖ ≤ ½`; `‖∇L‖_F ≤ √2·mean‖h‖`, since `‖p − y‖ ≤ √2`. With a bias h gains
    a one.

    >>> H, e = last_layer_constants(torch.eye(2))
    >>> round(float(H), 3), round(float(e), 3)
    (0.25, 1.414)
    """
    h = require_tensor(features, "features", dims=2).detach().double()
    if bias:
        h = torch.cat([h, torch.ones_like(h[:, :1])], dim=1)
    norm = float(spectral_norm(h, rtol=1e-4).upper)
    lengths = torch.linalg.vector_norm(h, dim=1).mean()
    return (
        Bound(float(inflate(norm * norm / len(h) / 2 * (1 + 1e-14))), Kind.UPPER, "spectral_norm"),
        Bound(float(inflate(math.sqrt(2) * float(lengths) * (1 + 1e-12))), Kind.UPPER, "lengths"),
    )


@dataclass(frozen=True)
class Sharpness:
    """`value ≤ max_{Δ∈B} (L(θ+Δ) − L(θ))/(1 + L(θ))`: the best the ascent found, a lower bound up to rounding."""

    value: float
    loss: float
    largest_loss: float
    radius: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "kind": "lower"}


def sharpness(
    hessian: LossHessian, *, radius: float = 0.05, steps: int = 20, restarts: int = 2, seed: int = 0
) -> Sharpness:
    """`max_{Δ∈B} (L(θ+Δ) − L(θ))/(1 + L(θ))` by projected gradient ascent on the whole data set.

    B is `‖Δ‖₂ ≤ radius`. The first start is θ itself (SAM's direction, Foret et al. 2021), the others are random.

    Args:
        hessian: the operator.
        radius: of the ball.
        steps: of the ascent.
        restarts: starting points.
        seed: of the random starting points.

    >>> from torch import nn
    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = model.weight.data.fill_(0.0)
    >>> s = sharpness(LossHessian(model, "mse", (torch.ones(1, 1), torch.zeros(1, 1))), radius=0.5)  # L(w) = w²
    >>> round(s.value, 4)
    0.25
    """
    require_number(radius, "radius", least=POSITIVE)
    require_number(steps, "steps", least=1, whole=True)
    require_number(restarts, "restarts", least=1, whole=True)
    require_operator(hessian)
    rng = np.random.default_rng(seed)
    base = hessian.value()
    best = base
    for start in range(restarts):
        delta = np.zeros(hessian.size)
        if start > 0 or not np.any(hessian.gradient(delta)):  # at a stationary point any direction does
            delta = _inside(rng.standard_normal(hessian.size) * radius, radius)
        best = max(best, hessian.value(delta))
        for k in range(steps):
            slope = hessian.gradient(delta)
            step = radius * (1.0 if k == 0 and start == 0 else 0.5)
            delta = _inside(delta + slope * (step / _length(slope)), radius)
            best = max(best, hessian.value(delta))
    return Sharpness((best - base) / (1 + base), base, best, radius)


def _inside(delta: Vector, radius: float) -> Vector:
    return delta * min(1.0, radius / _length(delta))


def _length(v: Vector) -> float:
    return max(float(np.linalg.norm(v)), 1e-300)
