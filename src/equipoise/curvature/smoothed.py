"""The curvature of a loss smoothed by Gaussian noise on the parameters: the bound, the constants it needs, the measured value.

The bound needs the gradient to be small *everywhere* the noise can reach, not only at the minimum: for `L = ½H·θ²` the
gradient vanishes at 0, yet smoothing leaves the curvature H as it is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.bounds import Bound, Kind
from equipoise.core.errors import InputError
from equipoise.core.precision import up
from equipoise.curvature.eigenvalues import Eigenvalue, top_of
from equipoise.curvature.hessian import Data, LossHessian, Pattern
from equipoise.curvature.losses import Loss
from equipoise.norms.spectral import spectral_norm


def smoothed_loss_bound(curvature: float, gradient: float, sigma: float, *, everywhere: bool) -> Bound:
    """`‖∇²L^σ(θ)‖₂ ≤ H·erf(ε/(√2·H·σ))` for `L^σ(θ) = E L(θ + N(0, σ²I))`.

    Guarantee: an upper bound if `‖∇²L‖ ≤ H = curvature` and `‖∇L‖ ≤ ε = gradient` hold for **all** parameters
    (`everywhere=True`). With values measured at one point it is an estimate only, and labelled so: it can then be wrong by
    any factor.

    Proof: `u·∇L` takes values in an interval of length 2ε and is H-Lipschitz; its Gaussian smoothing has Lipschitz
    constant `H·erf(2ε/(2√2·Hσ))`. Reference: thesis, corollary on the smoothed loss, with its assumption made explicit.

    >>> smoothed_loss_bound(2.0, 0.5, 1.0, everywhere=True)
    Bound(0.394825, upper, method='erf')
    """
    for what, value in (("curvature", curvature), ("gradient", gradient), ("sigma", sigma)):
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{what} must be a non-negative number, got {value}")
    if sigma == 0 or curvature == 0:
        value = curvature
    else:
        flat = (
            math.sqrt(2 / math.pi) * (gradient / sigma) * (1 + 1e-14)
        )  # erf(x) ≤ 2x/√π, equal to all digits below 1e-9
        x = gradient / sigma / curvature / math.sqrt(2)
        value = min(curvature, flat if x < 1e-9 else curvature * math.erf(x) * (1 + 1e-14))
    note = "" if everywhere else "the constants were measured at one point: no bound"
    return Bound(float(up(value)), Kind.UPPER if everywhere else Kind.ESTIMATE, "erf", note)


def last_layer_constants(features: Tensor, bias: bool = False) -> tuple[Bound, Bound]:
    """`(H, ε)` that hold for all weights W of softmax regression on fixed features h: `L(W) = mean CE(Wh, y)`.

    `‖∇²L‖ ≤ ½·λ_max(mean hhᵀ)`, since `‖diag(p) − ppᵀ‖ ≤ ½`; `‖∇L‖_F ≤ √2·mean‖h‖`, since `‖p − y‖ ≤ √2`. With a bias h gains
    a one.

    >>> H, e = last_layer_constants(torch.eye(2))
    >>> round(float(H), 3), round(float(e), 3)
    (0.25, 1.414)
    """
    if features.dim() != 2 or len(features) == 0:
        raise InputError(f"expected features of shape (samples, d), got {tuple(features.shape)}")
    h = features.detach().double()
    if bias:
        h = torch.cat([h, torch.ones_like(h[:, :1])], dim=1)
    norm = float(spectral_norm(h, rtol=1e-4).upper)
    lengths = torch.linalg.vector_norm(h, dim=1).mean()
    return (
        Bound(float(up(norm * norm / len(h) / 2 * (1 + 1e-14))), Kind.UPPER, "spectral_norm"),
        Bound(float(up(math.sqrt(2) * float(lengths) * (1 + 1e-12))), Kind.UPPER, "lengths"),
    )


def smoothed_curvature(
    model: nn.Module,
    loss: Loss,
    data: Data,
    sigma: float,
    layer: Pattern = None,
    *,
    samples: int = 8,
    seed: int = 0,
    **options: Any,
) -> Eigenvalue:
    """The eigenvalue of largest modulus of `∇²L^σ(θ)`, with `∇²L^σ` as a mean over fixed noise draws: the measured value.

    A Monte-Carlo estimate: the residual speaks of that mean, not of the draws.

    >>> x = torch.ones(1, 1)
    >>> round(smoothed_curvature(nn.Linear(1, 1, bias=False), "mse", (x, x), 0.3).value, 4)  # quadratic: nothing changes
    2.0
    """
    return top_of(LossHessian(model, loss, data, layer, noise=(sigma, samples, seed), **options), which="LM", seed=seed)
