"""Certificates that integrate the local constant along the radius.

Let `g = f_y − f_k` be the margin against rival k, and `0 = r_0 < r_1 < … < r_N` radii around x₀. For a point x between
the spheres r_{i−1} and r_i let x' be where the segment from x₀ to x meets the inner one. Then

    g(x) ≥ g(x') − L_i·(‖x − x₀‖ − r_{i−1}),      L_i ≥ |g(a) − g(b)|/‖a − b‖ for ‖a − x₀‖ ≤ r_{i−1}, ‖b − x₀‖ ≤ r_i.

Such a pair is more constrained than any pair of the outer ball: a ReLU that is active, z ≥ l' > 0, on the inner ball, and at
least l < 0 on the outer one, has secant slopes in `[l'/(l' − l), 1]`, not `[0, 1]`. So a few radii give what right-end sums
of the ordinary local constant need dozens for. Rounding is downward throughout.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

import torch
from torch import Tensor

from equipoise.core.precision import deflate, inflate
from equipoise.lipschitz.local.backward import Ball, Norm, enclose_ball, lower_bounds, slope_ranges
from equipoise.lipschitz.local.graph import Network
from equipoise.lipschitz.local.multipliers import (
    Reduced,
    best_multipliers,
    count_switching,
    reduced_maps,
)
from equipoise.lipschitz.local.slopes import STEPS, Relaxation, optimise, tight_bounds

#: radii of the sum, as shares of the outermost
ONE, SHARES = (1.0,), (0.6, 0.8, 1.0)
#: how often an outermost radius is tried, and how it grows while the margin lasts beyond it
TRIES, GROWTH = 4, 1.2
#: more switching neurons than this are left to the linear relaxation (a step takes some n³/10⁹ seconds)
SWITCHING = 500
#: steps of Adam that begin with the slopes of another radius
WARM_STEPS = 20
_DOWN = 1 - 1e-12


def less(margins: Tensor, lost: Tensor) -> Tensor:
    """`margins − lost`, rounded down.

    Args:
        margins: one per rival.
        lost: what is taken off each, not negative.
    """
    return margins - lost - 2.0**-50 * (margins.abs() + lost)


@dataclass
class Case:
    """One input: rows of `g_k`, their margins at the input (lower bounds), and what was computed on balls around it.

    `lost` says what the rounding of a forward pass may take off every margin within a radius (nothing, by default): a margin
    counts as proved on a ball where it stays above that.
    """

    network: Network
    x: Tensor
    rows: Tensor
    margins: Tensor
    norm: Norm = "l2"
    deadline: float = inf
    lost: Callable[[float], Tensor] | None = None
    notes: set[str] = field(default_factory=set)
    losses: dict[float, Tensor] = field(default_factory=dict)
    balls: dict[float, Ball | None] = field(default_factory=dict)
    bounds: dict[float, Tensor] = field(default_factory=dict)
    maps: dict[tuple[float, float], Reduced | None] = field(default_factory=dict)
    failed: float = inf  # the least radius at which the relaxation did not prove every margin
    refines: bool = False  # whether intervals refined backward proved what others did not
    tight: bool = True  # whether slopes are optimised for the intervals of new balls
    # of the ball before, to begin with
    relaxation: Relaxation | None = None

    def ball(self, radius: float) -> Ball | None:
        """The enclosure on the ball, computed once."""
        if radius not in self.balls:
            self.balls[radius] = enclose_ball(
                self.network,
                self.x,
                radius,
                self.norm,
                bounds=(lower_bounds, tight_bounds)[: 1 + self.tight],
                deadline=self.deadline,
            )
        return self.balls[radius]

    def relaxed(self, radius: float) -> Tensor:
        """Lower bounds of every margin on the ball, by the relaxation with optimised slopes.

        In ℓ2 first without refining intervals backward, which costs most: the ball of every layer often does without.
        """
        if radius not in self.bounds:
            enough = -self.left(radius, torch.zeros_like(self.margins))
            bounds = torch.full_like(self.margins, -inf)
            if self.norm == "l2" and not self.refines:
                plain = enclose_ball(self.network, self.x, radius, bounds=())
                bounds = self._optimised(plain, enough)
            if not (bounds > enough).all():
                bounds = torch.maximum(bounds, self._optimised(self.ball(radius), enough))
                self.refines = bool((bounds > enough).all())
                if not self.refines:
                    self.failed = min(self.failed, radius)
            self.bounds[radius] = bounds
        return self.bounds[radius]

    def _optimised(self, ball: Ball | None, enough: Tensor) -> Tensor:
        if ball is None:
            return torch.full_like(self.margins, -inf)
        bounds, self.relaxation = optimise(
            ball,
            self.network.last,
            self.rows,
            self.relaxation,
            steps=STEPS if self.relaxation is None else WARM_STEPS,
            enough=enough,
            deadline=self.deadline,
        )
        return bounds

    def left(self, radius: float, margins: Tensor) -> Tensor:
        """Margins less what rounding may take off them anywhere in the ball, rounded down.

        Args:
            radius: of the ball.
            margins: one per rival.
        """
        if self.lost is None:
            return margins
        if radius not in self.losses:
            self.losses[radius] = self.lost(radius)
        return less(margins, self.losses[radius])

    def shares(self, radius: float) -> Tensor:
        """What the relaxation leaves of every margin on the ball, as a share of the margin at the input."""
        return self.left(radius, self.relaxed(radius)) / self.margins

    def holds(self, radius: float) -> bool:
        """Whether the relaxation alone proves every margin on the ball."""
        return bool((self.shares(radius) > 0).all())

    def segment(self, inner: float, outer: float) -> Reduced | None:
        """The reduced maps of all margins between the ball `inner` and the ball `outer`; None where they are too large.

        Args:
            inner: radius of the inner ball; 0 for the centre alone.
            outer: radius of the outer ball.
        """
        key = (inner, outer)
        if key not in self.maps:
            self.maps[key] = None
            ball, core = self.ball(outer), self.ball(inner) if inner > 0 else None
            if ball is not None and (core is not None or inner == 0):
                slopes = slope_ranges(ball, core, anchored=inner == 0)
                if count_switching(slopes) <= SWITCHING:
                    self.maps[key] = reduced_maps(ball, slopes, self.rows)
                else:
                    self.notes.add(
                        f"no integral: more than {SWITCHING:,} neurons may switch for some inputs"
                    )
        return self.maps[key]


def integrate(case: Case, k: int, outer: float, shares: Sequence[float] = SHARES) -> float:
    """The largest radius up to `outer` within which margin k is proved positive.

    Args:
        case: the input.
        k: index of the margin.
        outer: the largest radius tried.
        shares: of the radii of the sum.
    """
    left = float(case.left(outer, case.margins)[k])
    r = 0.0
    for share in shares:
        if not left > 0:
            break
        R = outer if share == 1 else deflate(share * outer)
        step = inflate(R - r)
        enough = left * (1 - 1e-6) / step if share == 1 else 0.0
        maps = case.segment(r, R)
        found = maps and best_multipliers(
            maps.outputs(torch.tensor([k])),
            enough=enough,
            gap=0.05,
            steps=60,
            deadline=case.deadline,
        )
        L = found.bound if found else inf
        used = inflate(L * step)
        if used >= left:
            return max(r, min(R, (r + left / L * _DOWN) * _DOWN))
        left, r = (deflate(left) - used) * _DOWN, R
    return r


def relaxed_radius(case: Case, low: float, rtol: float = 4e-3) -> float:
    """The largest radius found at which the relaxation alone proves every margin positive, or `low`.

    Args:
        case: the input.
        low: a radius that is proved already, or 0.
        rtol: relative distance of a radius that was not proved at which to stop.
    """
    start = low
    while case.failed - low > rtol * low and low < 1e30 and time.process_time() < case.deadline:
        tried = 2 * max(low, 1e-12)
        if case.failed < inf:
            # margins fall ever faster with the radius: where a straight line says 0, they are positive
            line = case.failed / (1 - float(case.shares(case.failed).min()))
            third = (case.failed - low) / 3
            tried = min(max(low + third, line), case.failed - third)
            hopeless = low == start and case.failed < 1.5 * low and line < low / 2
            if hopeless or not tried > 1e-30:
                break
        if case.holds(tried):
            low = tried
    return low


def multipliers_prove(case: Case, radius: float) -> bool:
    """Whether every margin is proved positive on the ball of this radius, by multipliers if not by the relaxation.

    Args:
        case: the input.
        radius: of the ball.
    """
    shares = case.shares(radius)
    return case.norm == "l2" and all(
        time.process_time() < case.deadline and integrate(case, k, radius) >= radius
        for k in shares.argsort().tolist()
        if not float(shares[k]) > 0
    )


def integral_radius(case: Case, base: float) -> tuple[float, int]:
    """The largest radius found, at least `base`, at which every margin is proved positive, and the rival that limits it.

    The rival that the relaxation finds worst comes first: with constants from the center, at growing radii and between what was
    reached and tried, then with a sum. The others only have to reach as far, and the relaxation proves that of most. Whatever
    time is left, every rival is proved up to the radius returned.

    Args:
        case: the input, on which the relaxation failed beyond `base`.
        base: a radius proved already.
    """
    order = case.shares(case.failed).argsort().tolist()
    limiting = order[0]
    reached, outer, tried = base, base, 1.2 * base
    for _ in range(TRIES):
        found = integrate(case, limiting, tried, ONE)
        if found > reached:
            reached, outer = found, tried
        tried = tried * GROWTH if found >= tried else sqrt(found * tried)
        if tried < 1.01 * reached:
            break
    shares: Sequence[float] = ONE
    tried = 1.1 * reached
    # up to three activations, a sum reaches no further than the constant from the center
    if reached > base and len(case.network.activations) > 3:
        found = integrate(case, limiting, tried)
        if found > reached:
            reached, outer, shares = found, tried, SHARES
    open_ = [k for k in order[1:] if reached > base and not float(case.shares(reached)[k]) > 0]
    for k in open_:
        own = integrate(case, k, outer, shares) if reached > base else 0.0
        if own < reached:
            reached, limiting = own, k
    return max(base, reached), limiting
