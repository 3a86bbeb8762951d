"""Deterministic certificates: the margin of a Lipschitz network, with no noise and no sampling.

`lipschitz` always means a sound upper bound in ℓ2 (it goes through `core.as_upper`). Margins are subtracted in float64
and rounded down, divisions too. `error` covers the rounding of the forward pass: an upper bound of how far each logit is
from its value in real arithmetic (a number, one per input, or one per logit); without it that rounding is not covered.
`linear_error` gives it for a linear last layer. A misclassified input has radius 0.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core import InputError, as_upper
from equipoise.core.precision import row_lengths
from equipoise.smoothing.ramp import Floats

_DOWN = 1 - 2.0**-50
_UP = 1 + 2.0**-50


def margins(logits: Tensor, labels: Tensor, error: Any = 0.0) -> Floats:
    """`z_y − z_k − e_y − e_k` for every class k, rounded down, (N, c); +∞ at k = y so that a minimum ignores it.

    Guarantee: at most the margin in real arithmetic, if every logit is within its error of its real value.

    >>> margins(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]), error=0.125).round(6).tolist()
    [[inf, 1.75, 0.75]]
    >>> margins(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0])).round(6).tolist()
    [[inf, 2.0, 1.0]]
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or logits.shape[1] < 2:
        raise InputError(
            f"expected logits (N, c ≥ 2) and labels (N,), got {tuple(logits.shape)}, {tuple(labels.shape)}"
        )
    z, y = logits.detach().double().cpu().numpy(), labels.detach().cpu().numpy().astype(np.int64)
    if not bool(np.isfinite(z).all()):
        raise InputError("the logits hold NaN or infinity: there is no margin")
    if bool(np.any((y < 0) | (y >= z.shape[1]))):
        raise InputError(f"labels must lie in 0 … {z.shape[1] - 1}")
    rows = np.arange(len(z))
    gap = np.nextafter(z[rows, y][:, None] - z, -np.inf)
    off = _errors(error, z.shape)
    if bool(off.any()):
        gap = np.nextafter(gap - np.nextafter(off[rows, y][:, None] + off, np.inf), -np.inf)
    gap[rows, y] = np.inf
    return np.asarray(gap)


def _errors(error: Any, shape: tuple[int, ...]) -> Floats:
    off = np.asarray(error.detach().cpu() if isinstance(error, Tensor) else error, dtype=np.float64)
    off = off[:, None] if off.ndim == 1 else off
    if not bool(np.all(off >= 0)) or off.ndim > 2:
        raise InputError("the error of the logits is a non-negative number, one per input, or one per logit")
    return np.broadcast_to(off, shape)


def linear_error(
    features: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Floats:
    """How far `W·g + b`, evaluated in a dtype (default: the features'), may be from real arithmetic, (N, c), rounded up.

    `γ_{m+1}·(|W|·|g| + |b|)` with `γ_n = n·u/(1 − n·u)`, u the unit roundoff, m features: holds for any order of the sum,
    with or without fused operations. Reference: Higham (2002), §3.1.

    >>> g, W = torch.ones(1, 4), torch.ones(2, 4)
    >>> bool((linear_error(g, W) < 1e-5).all() and (linear_error(g, W, dtype=torch.float64) < 1e-14).all())
    True
    """
    kind = features.dtype if dtype is None else dtype
    terms = (weight.shape[1] + 1) * torch.finfo(kind).eps / 2
    if not terms < 0.5:
        raise InputError(f"{weight.shape[1]} features are too many for a bound in {kind}: evaluate in float64")
    size = features.detach().double().abs().cpu() @ weight.detach().double().abs().cpu().T
    size = size if bias is None else size + bias.detach().double().abs().cpu()
    return np.asarray((size * (terms / (1 - terms)) * (1 + 2.0**-20)).numpy() + 1e-300)


def radius_global(logits: Tensor, labels: Tensor, lipschitz: Any, error: Any = 0.0) -> Floats:
    """`R = margin/(√2·L)`, L ≥ Lip(f) of the whole logit map: two logits differ by a √2·L-Lipschitz function.

    Reference: Tsuzuku, Sato, Sugiyama (2018), Proposition 1.

    >>> radius_global(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]), 1.0).round(6).tolist()
    [0.707107]
    """
    return _smallest(margins(logits, labels, error), np.asarray(math.sqrt(2) * _UP * as_upper(lipschitz) * _UP))


def radius_coordinate(logits: Tensor, labels: Tensor, lipschitz: Any, error: Any = 0.0) -> Floats:
    """`R = min_k margin_k/(L_y + L_k)`, one constant per logit.

    Args:
        logits: (N, c).
        labels: (N,).
        lipschitz: c upper bounds of Lip(f_k): numbers, `Bound`s or `Bracket`s.
        error: of the logits.

    >>> radius_coordinate(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]), [1.0, 1.0, 0.25]).round(6).tolist()
    [0.8]
    """
    constants = np.array([as_upper(v) for v in lipschitz])
    if constants.shape != logits.shape[1:]:
        raise InputError(f"expected {logits.shape[1]} constants, one per logit, got {len(constants)}")
    y = labels.detach().cpu().numpy().astype(np.int64)
    gap = margins(logits, labels, error)
    return _smallest(gap, (constants[y][:, None] + constants[None, :]) * _UP)


def radius_last_layer(logits: Tensor, labels: Tensor, weight: Tensor, trunk: Any = 1.0, error: Any = 0.0) -> Floats:
    """`R = min_k margin_k/(L_trunk·‖W_y − W_k‖₂)` for `f = W·g + b` with Lip(g) ≤ L_trunk: never below `radius_global`.

    >>> W = torch.eye(3)
    >>> radius_last_layer(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]), W).round(6).tolist()
    [0.707107]
    """
    if weight.ndim != 2 or weight.shape[0] != logits.shape[1] or not bool(torch.isfinite(weight).all()):
        raise InputError(f"expected the finite weight ({logits.shape[1]}, features) of the last layer")
    gap = margins(logits, labels, error)
    w = weight.detach().double().cpu()
    y = labels.detach().cpu().long()
    # row differences, not the Gram trick: no cancellation
    pairs = torch.stack([row_lengths(w - w[k]) for k in range(len(w))]).numpy() * _UP
    return _smallest(gap, pairs[y.numpy()] * (as_upper(trunk) * _UP))


def radius_pairs(logits: Tensor, labels: Tensor, pairs: Tensor, error: Any = 0.0) -> Floats:
    """`R = min_k margin_k/K_yk` with K_yk an upper bound of the constant of `f_y − f_k`, as in `Report.pairs`.

    >>> K = math.sqrt(2) * (1 - torch.eye(3, dtype=torch.float64))
    >>> radius_pairs(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]), K).round(6).tolist()
    [0.707107]
    """
    classes = logits.shape[-1]
    if tuple(pairs.shape) != (classes, classes) or bool(pairs.isnan().any()) or bool((pairs < 0).any()):
        raise InputError(
            f"expected {classes}×{classes} upper bounds, one per pair of classes, got {tuple(pairs.shape)}"
        )
    gap = margins(logits, labels, error)
    slope = pairs.detach().double().cpu().numpy()[labels.detach().cpu().numpy().astype(np.int64)]
    return _smallest(gap, slope * _UP)


def _smallest(gap: Floats, slope: Floats) -> Floats:
    slope = np.where(slope > 0, np.nextafter(slope, np.inf), slope)  # a factor does not move the smallest numbers
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        radius = np.where(gap > 0, gap / slope * _DOWN, 0.0)
    radius = np.where(np.isfinite(radius), np.nextafter(radius, 0.0), radius)
    return np.asarray(radius.min(axis=1))
