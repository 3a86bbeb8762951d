"""Deterministic certificates: the margin of a Lipschitz network, with no noise and no sampling.

`lipschitz` always means a sound upper bound in ℓ2 (it goes through `core.as_upper`). Margins are subtracted in float64
and rounded down, divisions too. `error` covers the rounding of the forward pass: an upper bound of how far each logit is
from its value in real arithmetic (a number, one per input, or one per logit); without it that rounding is not covered.
`lipschitz.rounding.forward_error` gives one for a whole network.
"""

from math import inf, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core import (
    InputError,
    as_upper,
    float64,
    require_labels,
    require_tensor,
    row_lengths,
)

_DOWN = 1 - 2.0**-50
_UP = 1 + 2.0**-50
_INF = torch.tensor(inf, dtype=torch.float64)


def margins(logits: Tensor, labels: Tensor, error: Any = 0.0) -> Tensor:
    """`z_y − z_k − e_y − e_k` for every class k, rounded down, (N, c) in float64; +∞ at k = y so that a minimum ignores it.

    Guarantee: at most the margin in real arithmetic, if every logit is within its error of its real value.

    Args:
        logits: (N, c), finite.
        labels: (N,), class numbers.
        error: upper bound of the error of the logits: a number, one per input, or one per logit.

    >>> margins(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]), error=0.125).round(decimals=6).tolist()
    [[inf, 1.75, 0.75]]
    """
    z = require_tensor(logits, "logits", dims=2).detach().double().cpu()
    if z.shape[1] < 2:
        raise InputError(
            f"expected logits (N, c) of at least two classes, got shape {tuple(z.shape)}"
        )
    y = require_labels(labels, *z.shape).cpu()[:, None]
    gap = torch.nextafter(z.gather(1, y) - z, -_INF)

    off = _errors(error, z)
    if off.any():
        both = torch.nextafter(off.gather(1, y) + off, _INF)
        gap = torch.nextafter(gap - both, -_INF)
    return gap.scatter(1, y, inf)


def _errors(error: Any, logits: Tensor) -> Tensor:
    off = float64(error).cpu()
    off = off[:, None] if off.dim() == 1 else off
    try:
        off = off.expand(logits.shape)
    except RuntimeError:
        off = -_INF
    if not (off >= 0).all():
        raise InputError(
            "the error of the logits is a non-negative number, one per input, or one per logit"
        )
    return off


def margin_radius(
    logits: Tensor,
    labels: Tensor,
    lipschitz: Any = 1.0,
    *,
    weight: Tensor | None = None,
    error: Any = 0.0,
) -> Tensor:
    """`R = min_{k≠y} (z_y − z_k)/K_yk`, rounded down, float64 (N,); 0 where the label does not win.

    K_yk bounds the Lipschitz constant of `z_y − z_k`. It is

    - `√2·L` for one constant L of the whole logit map (Tsuzuku, Sato, Sugiyama 2018, Proposition 1);
    - `L_y + L_k` for one constant per logit;
    - the entry (y, k) of a matrix of such bounds, as in `lipschitz_bound(...).pairs`;
    - `L·‖w_y − w_k‖₂` where `weight` is that of a linear last layer and L bounds what comes before it.

    Args:
        logits: (N, c), finite.
        labels: (N,), class numbers; the predictions, to certify decisions instead of correct decisions.
        lipschitz: one upper bound, a list of c upper bounds, or a tensor (c, c) of them. An upper bound is a number (your own
            claim), a `Bracket`, or a `Bound` of kind upper; estimates are refused.
        weight: (c, features), the effective weight of the last layer.
        error: upper bound of the error of the logits: a number, one per input, or one per logit.

    Guarantee: no change of the input by less than R changes the decision of the real-number map, if the constants are
    upper bounds and every logit is within its error of its real value.

    >>> z, y = torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0])
    >>> round(margin_radius(z, y, 1.0).item(), 6), round(margin_radius(z, y, [1.0, 1.0, 0.25]).item(), 6)
    (0.707107, 0.8)
    >>> round(margin_radius(z, y, weight=torch.eye(3)).item(), 6), margin_radius(z, torch.tensor([1])).item()
    (0.707107, 0.0)
    """
    gap = margins(logits, labels, error)
    y = labels.detach().long().cpu()
    slope = _slopes(lipschitz, weight, gap.shape[1])
    slope = slope.expand(gap.shape) if slope.dim() == 0 else slope[y]

    # a factor does not move the smallest numbers, the next float does
    slope = torch.where(slope > 0, torch.nextafter(slope, _INF), slope)
    radius = torch.where(gap > 0, gap / slope * _DOWN, 0.0)
    radius = torch.where(
        torch.isfinite(radius), torch.nextafter(radius, torch.zeros_like(radius)), radius
    )
    return radius.scatter(1, y[:, None], inf).amin(1)


def _slopes(lipschitz: Any, weight: Tensor | None, classes: int) -> Tensor:
    """K_yk, rounded up: a number, or one for every pair of classes."""
    if weight is not None:
        W = require_tensor(weight, "weight", dims=2).detach().double().cpu()
        if len(W) != classes:
            raise InputError(
                f"expected the weight ({classes}, features) of the last layer, got {tuple(W.shape)}"
            )
        # differences of rows, not the Gram matrix: nothing cancels
        return torch.stack([row_lengths(W - row) for row in W]) * _UP * (as_upper(lipschitz) * _UP)

    if isinstance(lipschitz, Tensor | np.ndarray) and lipschitz.ndim == 2:
        pairs = torch.as_tensor(lipschitz).detach().double().cpu()
        if tuple(pairs.shape) != (classes, classes) or not (pairs >= 0).all():
            raise InputError(
                f"expected {classes}×{classes} upper bounds, one per pair of classes, got {tuple(pairs.shape)}"
            )
        return pairs * _UP

    if isinstance(lipschitz, list | tuple) or getattr(lipschitz, "ndim", 0) == 1:
        each = torch.tensor([as_upper(v) for v in lipschitz], dtype=torch.float64)
        if len(each) != classes:
            raise InputError(f"expected {classes} constants, one per logit, got {len(each)}")
        return (each[:, None] + each) * _UP

    return float64(sqrt(2) * _UP * as_upper(lipschitz) * _UP)
