"""All margins by one constant: what is affordable where too many neurons may switch for a problem per rival and radius.

Divide every margin by its value at the input, `h_k = g_k/m_k`. If `‖h(x) − h(x₀)‖₂ ≤ L‖x − x₀‖` on the ball of radius R and
`L·R < 1`, then `|g_k(x) − g_k(x₀)| < m_k` for all k there: one proof instead of one per rival. The constant is that of pairs of
which one is the centre, so that a single radius does what a sum along several does for pairs of the ball (see `integral`).

*Rounding.* The factors 1/m_k are the stored numbers; multiplying rows by them rounds once more, which `multipliers.proves` has
room for (it grants 16 roundings per entry and needs four), and `m_k·(1/m_k)` is off 1 by 2⁻⁵², far less than `_ROOM`.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from equipoise.core.precision import up
from equipoise.lipschitz.local.backward import slope_ranges
from equipoise.lipschitz.local.integral import Case
from equipoise.lipschitz.local.multipliers import best_multipliers
from equipoise.lipschitz.local.reduced import Reduced, count_switching, reduced_maps

#: most switching neurons of the common problem; a step of Newton's method takes some 8·n³ operations
MOST = 2000
#: outermost radii that are tried: the first as a multiple of what is known, its growth after that, and how many
FIRST, GROWTH, TRIES = 1.45, 1.2, 3
_ROOM = 1 - 1e-9


def together_radius(case: Case, base: float, most: int = MOST) -> float:
    """The largest radius found, at least `base`, at which one constant proves every margin positive.

    `base` is a radius proved already. What rounding may take off a margin within the outer ball is taken off before.
    """
    found, outer = base, base * FIRST
    for _ in range(TRIES):
        if time.monotonic() > case.deadline:
            break
        L = common_constant(case, outer, case.left(outer, case.margins), most)
        if math.isinf(L):
            break
        reached = min(outer, _ROOM / L) if L > 0 else outer
        better, found = reached > found * 1.02, max(found, reached)
        if reached < outer and not better:
            break
        outer = outer * GROWTH if reached == outer else found * 1.12
    return found


def common_constant(case: Case, outer: float, margins: Tensor, most: int = MOST) -> float:
    """Proved L of all margins divided by `margins`, between the centre and the ball; infinite where there is none."""
    ball = case.ball(outer)
    if ball is None or not bool((margins > 0).all()):
        return math.inf
    slopes = slope_ranges(ball, anchored=True)
    if count_switching(slopes) > most:
        return math.inf
    maps = reduced_maps(ball, slopes, case.rows)
    scale = torch.cat([torch.ones(maps.switching, dtype=torch.float64), 1 / margins])
    joint = Reduced(maps.C * scale[:, None], maps.D * scale[:, None], up(maps.slack * scale), maps.counts)
    found = best_multipliers(joint, gap=0.3, enough=_ROOM * (1 - 1e-6) / outer, deadline=case.deadline)
    return math.inf if found is None else found.bound
