"""Optimised relaxation: the backward bound of `backward` with free slopes, on the ball of every layer.

At an activation `φ(z_j)` of a hinge, a row A of its outputs becomes a row g of its inputs plus a constant,

    A·φ(z) ≥ g·z + h      for every z of the ball,

for *any* g, with h the least value of `A·φ(z) − g·z`. The entries of z lie in intervals, `l ≤ z ≤ u`, and z as a whole in a
ball, `‖z − ẑ‖₂ ≤ ρ`: ẑ is the value at the center and ρ the proved local Lipschitz constant from the input to z times the
radius. For any λ ≥ 0 (the multiplier of the ball, minimised entry by entry)

    h ≥ −λρ²/2 + Σ_j min over l_j ≤ z_j ≤ u_j of A_j φ(z_j) − g_j z_j + λ(z_j − ẑ_j)²/2.

λ = 0 is the usual relaxation by lines. The minimum of each of the two pieces of a hinge is that of a parabola on an interval.
So the bound is valid for whatever g and λ an optimizer finds, and only its own evaluation is rounded: in a term the minimiser is
computed within a few units in the last place, which changes the value by the square of that; the value, the sum over the
entries and the sum of rows that meet at z are off by at most `γ_(n+64)` times the sum of all parts in absolute values.

References: Xu et al. 2021 (α-CROWN: optimised slopes); Chiu et al. 2025 (SDP-CROWN: the ball of a layer).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import inf, log

import torch
from torch import Tensor

from equipoise.core.precision import gamma, inflate
from equipoise.lipschitz.local.backward import Ball, by_lines, finish, lower_bounds, walk
from equipoise.lipschitz.local.curves import Hinge
from equipoise.lipschitz.rules.registry import norm_of

_U = 2.0**-53
#: Adam's step for slopes and for logarithms of λ, with the ball of a layer and without, and its decay
RATE, LINES_RATE, DECAY = 0.3, 0.1, 0.98
#: steps for the rows that are asked for, and for the intervals of pre-activations
STEPS, INNER_STEPS = 50, 15
#: intervals are optimised where all their slopes together are at most this many numbers
INNER_NUMBERS = 400_000


@dataclass
class Relaxation:
    """Slopes of the rows at every hinge, for positive and for negative coefficients, and log λ of its ball.

    `shift` is added to g at the neurons that a part of the ball was split at, in units of the row: a multiplier of the split.
    """

    lower: dict[int, Tensor] = field(default_factory=dict)
    upper: dict[int, Tensor] = field(default_factory=dict)
    log_penalty: dict[int, Tensor] = field(default_factory=dict)
    shift: dict[int, Tensor] = field(default_factory=dict)

    def free(self) -> list[Tensor]:
        """What is optimised. Without the ball of a layer, chords are the best lines above: only those below are free."""
        free = [*self.lower.values(), *self.shift.values()]
        if self.log_penalty:
            free += [*self.upper.values(), *self.log_penalty.values()]
        return free

    def project(self, ball: Ball) -> None:
        """Without the ball of a layer, a line below a hinge touches it: its slope lies between the two of the hinge."""
        if self.log_penalty:
            return
        for i, slope in self.lower.items():
            curve = ball.network.activations[i].curve
            assert isinstance(curve, Hinge)
            slope.data = torch.minimum(torch.maximum(slope.data, curve.left), curve.right)

    def copy(self) -> Relaxation:
        """The same numbers, detached."""
        parts = [
            {i: t.detach().clone() for i, t in part.items()}
            for part in (self.lower, self.upper, self.log_penalty, self.shift)
        ]
        return Relaxation(*parts)


def usual_slopes(ball: Ball, k: int, rows: int) -> Relaxation:
    """The slopes of the lines of `backward`, and a small λ, for each of some rows of node k.

    Args:
        ball: with the lines of its activations.
        k: index of the node; activations after it are left out.
        rows: number of rows.
    """
    relaxation = Relaxation()
    for i, node in ball.network.activations.items():
        if i > k or i not in ball.lines or not isinstance(node.curve, Hinge):
            continue
        lines = ball.lines[i]
        relaxation.lower[i] = lines.lower.expand(rows, -1).clone()
        relaxation.upper[i] = lines.upper.expand(rows, -1).clone()
        if ball.norm == "l2":
            rho = max(layer_radius(ball, node.source), 1e-100)
            relaxation.log_penalty[i] = torch.full((rows, 1), log(1e-2 / rho), dtype=torch.float64)
    return relaxation


def layer_radius(ball: Ball, k: int) -> float:
    """ρ with `‖z − ẑ‖₂ ≤ ρ` for the stored center ẑ of node k.

    Args:
        ball: with bounds of differences.
        k: index of the node.
    """
    return inflate(inflate(ball.total[k] * ball.radius) + norm_of(ball.slip[k]))


def relaxed_bounds(
    ball: Ball,
    k: int,
    rows: Tensor,
    relaxation: Relaxation,
    passed: dict[int, Tensor] | None = None,
) -> Tensor:
    """A lower bound, on the ball, of every `rows·(value of node k)`, with these slopes and λ; rounded down, differentiable.

    Args:
        ball: with every node before k enclosed.
        k: node whose rows are bounded.
        rows: (rows, size of node k).
        relaxation: the free numbers.
        passed: is given the rows as they arrive at every activation and, at 0, at the input.
    """
    spread = list(ball.spread)
    for i in relaxation.lower:
        # the offset is that of the stored slopes: they are not rounded
        spread[i] = torch.zeros_like(ball.low[i])

    def through(i: int, A: Tensor) -> tuple[Tensor, Tensor | None]:
        if passed is not None:
            passed[i] = A
        if i not in relaxation.lower:
            return by_lines(ball.lines[i], A)
        g = A.clamp_min(0) * relaxation.lower[i] + A.clamp_max(0) * relaxation.upper[i]
        if i in relaxation.shift:
            s = ball.network.activations[i].source
            split = (ball.low[s] == 0) | (ball.high[s] == 0)
            unit = A.detach().square().mean(1, keepdim=True).sqrt()
            g = g + relaxation.shift[i] * split * unit
        return g, _offset(ball, i, A, g, relaxation.log_penalty.get(i))

    A, constant, error = walk(ball.network, k, rows, through, spread, offset=True)
    if passed is not None:
        passed[0] = A
    bounds = finish(ball, A, constant, error)
    # an optimizer may leave the floats
    return torch.where(torch.isfinite(bounds), bounds, -inf)


def _offset(ball: Ball, i: int, A: Tensor, g: Tensor, log_penalty: Tensor | None) -> Tensor:
    """h of the module's docstring for every row, rounded down."""
    node = ball.network.activations[i]
    s = node.source
    assert isinstance(node.curve, Hinge)
    low, high, center = ball.low[s], ball.high[s], ball.centre[s]
    penalty = (
        torch.zeros(len(A), 1, dtype=torch.float64) if log_penalty is None else log_penalty.exp()
    )
    rho = 0.0 if log_penalty is None else layer_radius(ball, s)
    least = torch.full_like(A, inf)
    for slope, a, b in (
        (node.curve.left, low, high.clamp_max(0)),
        (node.curve.right, low.clamp_min(0), high),
    ):
        steep = A * slope - g
        ideal = center - steep / penalty.clamp_min(1e-300)
        z = torch.maximum(torch.minimum(ideal.nan_to_num(nan=0.0), b), a).detach()
        value = steep * z + penalty / 2 * (z - center).square()
        least = torch.where((a <= b) & (value < least), value, least)
    size = torch.maximum(low.abs(), high.abs())
    steepest = torch.maximum(node.curve.left.abs(), node.curve.right.abs())
    rough = (A.abs() * steepest + g.abs()) * size + penalty * (size + center.abs()).square()
    slack = (gamma(A.shape[1] + 64, torch.float64) * rough.sum(1)) + 1e-290
    lost = penalty[:, 0] * (rho * rho / 2 * (1 + 8 * _U))
    return least.sum(1) - lost - slack


def optimise(
    ball: Ball,
    k: int,
    rows: Tensor,
    start: Relaxation | None = None,
    *,
    steps: int = STEPS,
    rate: float | None = None,
    enough: Tensor | float = inf,
    deadline: float = inf,
) -> tuple[Tensor, Relaxation]:
    """The best bounds found by gradient ascent on the bounds themselves, at least those by lines, and the last slopes.

    Args:
        ball: with every node before k enclosed.
        k: node whose rows are bounded.
        rows: (rows, size of node k).
        start: slopes to begin with.
        steps: of Adam.
        rate: its first step.
        enough: stop when every bound is above this.
        deadline: of `time.process_time()`.
    """
    relaxation = usual_slopes(ball, k, len(rows)) if start is None else start.copy()
    parameters = relaxation.free()
    best = lower_bounds(ball, k, rows)
    if not parameters:
        return best, relaxation
    with torch.enable_grad():
        for p in parameters:
            p.requires_grad_()
        rate = rate or (RATE if relaxation.log_penalty else LINES_RATE)
        optimizer = torch.optim.Adam(parameters, lr=rate, fused=True)
        for _ in range(steps):
            if (best > enough).all() or time.process_time() > deadline:
                break
            bounds = relaxed_bounds(ball, k, rows, relaxation)
            best = torch.maximum(best, bounds.detach())
            if not bounds.requires_grad:
                break  # no hinge before k is on the way to it
            optimizer.zero_grad()
            bounds.sum().neg().backward()
            optimizer.step()
            relaxation.project(ball)
            optimizer.param_groups[0]["lr"] *= DECAY
    last = relaxation.copy()
    return torch.maximum(best, relaxed_bounds(ball, k, rows, last)), last


def tight_bounds(ball: Ball, k: int, rows: Tensor) -> Tensor:
    """Lower bounds of rows of node k by a few steps of optimised slopes; −∞ where these would be too many numbers.

    Args:
        ball: enclosed up to node k.
        k: index of the node.
        rows: (rows, size of node k).
    """
    before = sum(ball.network.sizes[i] for i in ball.lines)
    if not before or len(rows) * before > INNER_NUMBERS:
        return torch.full((len(rows),), -inf, dtype=torch.float64)
    return optimise(ball, k, rows, steps=INNER_STEPS)[0]
