"""How large an orthogonalised update of Muon can be: the Newton–Schulz polynomial, bounded over the values it can meet.

Muon replaces the momentum B by `p(…p(B/‖B‖_F)…)` with `p(X) = aX + b(XXᵀ)X + c(XXᵀ)²X`, which acts on every singular value
as the scalar polynomial `p(s) = as + bs³ + cs⁵`. After the pre-scaling all singular values lie in [0, 1], so in real arithmetic
the update has norm at most `lr·max p∘…∘p` over [0, 1], computed here by interval arithmetic.

Real optimizers run these steps in bfloat16, where the rounding of one product of n×n matrices may change a norm by n·2⁻⁸: no
a-priori bound is left. So the guard does not use this number. It measures every update as it is, in Frobenius norm off the
followed space, and proves the weight anew where that is not enough; to verify that an update has the norm promised would
cost as much as that proof.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from equipoise.core.errors import InputError
from equipoise.core.precision import up

Coefficients = Sequence[float] | Sequence[Sequence[float]]

#: Keller Jordan's quintic, the default of torch.optim.Muon and of pytorch-optimizer
JORDAN = (3.4445, -4.7750, 2.0315)


def newton_schulz_gain(coefficients: Coefficients = JORDAN, steps: int = 5, cells: int = 200_000) -> float:
    """An upper bound of `max |p_n∘…∘p_1|` over [0, 1] in real arithmetic: 1 + δ for an update of Muon of learning rate 1.

    The interval is cut into cells, each is sent through the polynomials in mean value form, rounded outward. `coefficients` is
    one triple (a, b, c), used in every step, or one per step, the last of which is repeated.

    >>> 1.13 < newton_schulz_gain() < 1.21
    True
    """
    table = np.asarray(coefficients, dtype=np.float64)
    table = table[None] if table.ndim == 1 else table
    if table.ndim != 2 or table.shape[1] != 3 or not np.isfinite(table).all() or steps < 1 or cells < 1:
        raise InputError(
            f"expected triples (a, b, c) of finite numbers and at least one step, got {coefficients!r}, {steps}"
        )
    edges = np.linspace(0.0, 1.0, cells + 1)
    low, high = edges[:-1], edges[1:]
    for i in range(steps):
        low, high = _image(low, high, *(float(x) for x in table[min(i, len(table) - 1)]))
    return up(float(max(np.abs(low).max(), np.abs(high).max())))


def _image(low: np.ndarray, high: np.ndarray, a: float, b: float, c: float) -> tuple[np.ndarray, np.ndarray]:
    """Enclosure of `p([low, high])`: `p(middle) ± width/2·max|p'|`, with p' over the cell by its extreme terms."""
    middle, half = (low + high) / 2, (high - low) / 2
    square_low = np.where((low <= 0) & (high >= 0), 0.0, np.minimum(low * low, high * high))
    square_high = np.maximum(low * low, high * high)
    slopes = np.stack([a + 3 * b * s + 5 * c * s * s for s in (square_low, square_high)])
    inner = -3 * b / (10 * c) if c else -1.0  # where p' as a function of s² turns
    turn = np.clip(inner, square_low, square_high)
    slope = np.maximum(np.abs(slopes).max(0), np.abs(a + 3 * b * turn + 5 * c * turn * turn))
    size = abs(a) + 3 * abs(b) * square_high + 5 * abs(c) * square_high * square_high
    slope = slope + 1e-14 * size
    value = middle * (a + middle * middle * (b + c * middle * middle))
    reach = half * slope * (1 + 1e-14) + 1e-14 * (np.abs(middle) + half) * size
    return value - reach, value + reach
