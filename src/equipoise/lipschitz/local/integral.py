"""Certificates that integrate the local constant along the radius.

Let `g = f_y − f_k` be the margin against rival k, and `0 = r_0 < r_1 < … < r_N` radii around x₀. For a point x between
the spheres r_{i−1} and r_i let x' be where the segment from x₀ to x meets the inner one. Then

    g(x) ≥ g(x') − L_i·(‖x − x₀‖ − r_{i−1}),      L_i ≥ |g(a) − g(b)|/‖a − b‖ for ‖a − x₀‖ ≤ r_{i−1}, ‖b − x₀‖ ≤ r_i.

Such a pair has less room than any pair of the outer ball: a ReLU that is active, z ≥ l' > 0, on the inner ball, and at
least l < 0 on the outer one, has secant slopes in `[l'/(l' − l), 1]`, not `[0, 1]`. So a few radii give what right-end sums
of the ordinary local constant need dozens for. The margin left at r_i is the larger of this and of the backward
relaxation's own bound; rounding is downward throughout.

All margins by one constant: what is affordable where too many neurons may switch for a problem per rival and radius.

Divide every margin by its value at the input, `h_k = g_k/m_k`. If `‖h(x) − h(x₀)‖₂ ≤ L‖x − x₀‖` on the ball of radius R and
`L·R < 1`, then `|g_k(x) − g_k(x₀)| < m_k` for all k there: one proof instead of one per rival. The constant is that of pairs of
which one is the centre, so that a single radius does what a sum along several does for pairs of the ball (above).

*Rounding.* The factors 1/m_k are the stored numbers; multiplying rows by them rounds once more, which `multipliers.proves` has
room for (it grants 16 roundings per entry and needs four), and `m_k·(1/m_k)` is off 1 by 2⁻⁵², far less than `_ROOM`.
"""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.core.precision import deflate, inflate
from equipoise.lipschitz.local.backward import Ball, Norm, enclose_ball, slope_ranges
from equipoise.lipschitz.local.graph import Network
from equipoise.lipschitz.local.multipliers import (
    Reduced,
    best_multipliers,
    count_switching,
    reduced_maps,
)
from equipoise.lipschitz.local.slopes import STEPS, Relaxation, optimise, tighten

#: radii of the sum, as shares of the outermost
SHARES = (0.6, 0.8, 1.0)
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
    most: int = SWITCHING
    deadline: float = math.inf
    lost: Callable[[float], Tensor] | None = None
    notes: set[str] = field(default_factory=set, repr=False)
    losses: dict[float, Tensor] = field(default_factory=dict, repr=False)
    balls: dict[float, Ball | None] = field(default_factory=dict, repr=False)
    bounds: dict[float, Tensor] = field(default_factory=dict, repr=False)
    maps: dict[tuple[float, float], Reduced | None] = field(default_factory=dict, repr=False)
    starts: dict[tuple[float, float], Tensor | None] = field(default_factory=dict, repr=False)
    refines: bool = False  # whether intervals refined backward proved what others did not
    # of the ball before, to begin with
    relaxation: Relaxation | None = field(default=None, repr=False)

    def ball(self, radius: float) -> Ball | None:
        """The enclosure on the ball, computed once."""
        if radius not in self.balls:
            known = next((b for b in self.balls.values() if b is not None), None)
            self.balls[radius] = enclose_ball(
                self.network,
                self.x,
                radius,
                self.norm,
                inner=known,
                deadline=self.deadline,
                tighten=functools.partial(tighten, deadline=self.deadline),
            )
        return self.balls[radius]

    def relaxed(self, radius: float) -> Tensor:
        """Lower bounds of every margin on the ball, by the relaxation with optimised slopes.

        In ℓ2 first without refining intervals backward, which costs most: the ball of every layer often does without.
        """
        if radius not in self.bounds:
            enough = -self.left(radius, torch.zeros_like(self.margins))
            bounds = torch.full_like(self.margins, -math.inf)
            if self.norm == "l2" and not self.refines:
                plain = enclose_ball(self.network, self.x, radius, most_rows=0)
                bounds = self._optimised(plain, enough)
            if not bool((bounds > enough).all()):
                bounds = torch.maximum(bounds, self._optimised(self.ball(radius), enough))
                self.refines = bool((bounds > enough).all())
            self.bounds[radius] = bounds
        return self.bounds[radius]

    def _optimised(self, ball: Ball | None, enough: Tensor) -> Tensor:
        if ball is None:
            return torch.full_like(self.margins, -math.inf)
        bounds, self.relaxation = optimise(
            ball,
            len(self.network.nodes) - 1,
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

    def holds(self, radius: float) -> bool:
        """Whether the relaxation alone proves every margin on the ball."""
        return bool((self.left(radius, self.relaxed(radius)) > 0).all())

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
                if count_switching(slopes) <= self.most:
                    self.maps[key] = reduced_maps(ball, slopes, self.rows)
                else:
                    self.notes.add(
                        f"no integral: more than {self.most:,} neurons may switch for some inputs"
                    )
        return self.maps[key]

    def start(self, inner: float, outer: float) -> Tensor | None:
        """Multipliers for all margins together, divided by their size: far inside the cone, so good for each of them.

        Args:
            inner: radius of the inner ball; 0 for the centre alone.
            outer: radius of the outer ball.
        """
        key = (inner, outer)
        if key not in self.starts:
            maps = self.segment(inner, outer)
            found = None
            if maps is not None and maps.switching:
                found = best_multipliers(
                    maps.divided(self.margins), gap=1.0, deadline=self.deadline
                )
            self.starts[key] = None if found is None else found.s
        return self.starts[key]

    def constant(self, k: int, inner: float, outer: float, enough: float, steps: int) -> float:
        """Proved L of margin k for pairs between the two balls; infinite where there is none.

        Args:
            k: index of the margin.
            inner: radius of the inner ball; 0 for the centre alone.
            outer: radius of the outer ball.
            enough: stop as soon as the constant is below this.
            steps: of Newton's method at most; with 0 by the common multipliers alone.
        """
        maps = self.segment(inner, outer)
        if maps is None:
            return math.inf
        own, start = maps.outputs(torch.tensor([k])), self.start(inner, outer)
        found = best_multipliers(
            own, start=start, enough=enough, gap=1e-2, steps=steps, deadline=self.deadline
        )
        return math.inf if found is None else found.bound


@dataclass(frozen=True)
class Reach:
    """How far one margin is proved positive, and the share of it that was spent at each radius on the way there."""

    radius: float
    spent: tuple[tuple[float, float], ...] = ()

    def enough(self, r: float, R: float, margin: float, left: float) -> float:
        """The constant between r and R with which a margin, `left` of it over at r, spends somewhat less of itself than this.

        Args:
            r: the inner radius.
            R: the outer radius.
            margin: at the centre.
            left: what is over of it at r.
        """
        for at, share in self.spent:
            if at >= R:
                return 0.95 * max(left - (1 - share) * margin, 0.0) / (R - r)
        return left * (1 - 1e-6) / (self.radius - r) if self.radius > r else math.inf


def integrate(
    case: Case, k: int, outer: float, steps: int = 60, other: Reach | None = None
) -> Reach:
    """The largest radius up to `outer` within which margin k is proved positive.

    Args:
        case: the input.
        k: index of the margin.
        outer: the largest radius tried.
        steps: of Newton's method at most, for each constant.
        other: constants need only be small enough to reach as far as this.
    """
    whole = left = float(case.left(outer, case.margins)[k])
    r, spent = 0.0, list[tuple[float, float]]()
    if not left > 0:
        return Reach(0.0)
    for share in SHARES:
        R = outer if share == 1 else deflate(share * outer)
        step = inflate(R - r)
        enough = left * (1 - 1e-6) / step if share == 1 else 0.0
        if other is not None:
            enough = other.enough(r, R, whole, left)
        L = case.constant(k, r, R, enough, steps)
        used = inflate(L * step)
        remaining = max(
            deflate(left) - used if used < left else -math.inf,
            float(case.left(outer, case.relaxed(R))[k]),
        )
        if not remaining > 0:
            ends = max(r, min(R, (r + left / L * _DOWN) * _DOWN)) if 0 < L < math.inf else r
            return Reach(ends, tuple(spent))
        left, r = remaining * _DOWN, R
        spent.append((R, 1 - left / whole))
    return Reach(r, tuple(spent))


def relaxed_radius(case: Case, start: float, high: float = math.inf, rtol: float = 5e-3) -> float:
    """The largest radius found at which the relaxation alone proves every margin positive.

    Args:
        case: the input.
        start: the radius that is tried first.
        high: a radius that was not proved.
        rtol: relative distance of a radius that was not proved at which to stop.
    """
    low, tried = 0.0, start
    for _ in range(60):
        if time.process_time() > case.deadline or high - low <= rtol * low or tried < 1e-30:
            break
        if case.holds(tried):
            low = tried
        else:
            high = tried
        if high == math.inf:
            tried = 2 * low
        elif low == 0:
            tried = high / 4
        else:
            tried = math.sqrt(low * high)
    return low


def multipliers_at(case: Case, radius: float) -> str | None:
    """The method by multipliers that proves every margin positive on the ball of this radius; None where none does.

    Args:
        case: the input.
        radius: of the ball.
    """
    if case.norm != "l2" or time.process_time() > case.deadline:
        return None
    order = (case.relaxed(radius) / case.margins).argsort().tolist()
    if all(integrate(case, k, radius).radius >= radius for k in order):
        return "integral"
    L = common_constant(case, radius, case.left(radius, case.margins))
    return "multipliers" if inflate(L * radius) < _ROOM else None


def integral_radius(case: Case, base: float) -> tuple[float, int]:
    """The largest radius found, at least `base`, at which every margin is proved positive, and the rival that limits it.

    `base` is a radius proved already. The rival that the relaxation finds worst comes first; the others only have to
    reach as far, most of them with the same multipliers, and of the rest only the one that limits is looked at closer.
    Whatever time is left, every rival is proved up to the radius returned.

    Args:
        case: the input.
        base: a radius proved already.
    """
    outer = base * 1.28
    worst = int((case.relaxed(outer) / case.margins).argmin())
    first = integrate(case, worst, outer)
    again = outer * 1.08 if first.radius >= outer else first.radius * 1.012
    if (
        (first.radius >= outer or again < 0.99 * outer)
        and again > base
        and time.process_time() < case.deadline
    ):
        more = integrate(case, worst, again)
        if more.radius > first.radius:
            first, outer = more, again
    if first.radius <= base:
        return base, worst
    reached = {
        k: first.radius if k == worst else integrate(case, k, outer, 0).radius
        for k in range(len(case.margins))
    }
    closer = {worst}
    while True:
        limiting = min(reached, key=lambda k: (reached[k], k != worst))
        if limiting in closer or time.process_time() > case.deadline:
            break
        reached[limiting] = max(
            reached[limiting], integrate(case, limiting, outer, other=first).radius
        )
        closer.add(limiting)
    return (reached[limiting], limiting) if reached[limiting] > base else (base, limiting)


#: most switching neurons of the common problem; a step of Newton's method takes some 8·n³ operations
MOST = 2000
#: outermost radii that are tried: the first as a multiple of what is known, its growth after that, and how many
FIRST, GROWTH, TRIES = 1.45, 1.2, 3
_ROOM = 1 - 1e-9


def together_radius(case: Case, base: float, most: int = MOST) -> float:
    """The largest radius found, at least `base`, at which one constant proves every margin positive.

    `base` is a radius proved already. What rounding may take off a margin within the outer ball is taken off before.

    Args:
        case: the input.
        base: a radius proved already.
        most: neurons that may switch; with more of them nothing is tried.
    """
    found, outer = base, base * FIRST
    for _ in range(TRIES):
        if time.process_time() > case.deadline:
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
    """Proved L of all margins divided by `margins`, between the centre and the ball; infinite where there is none.

    Args:
        case: the input.
        outer: radius of the ball.
        margins: what every margin is divided by; where one is not positive there is no constant.
        most: neurons that may switch; with more of them there is no constant.
    """
    ball = case.ball(outer)
    if ball is None or not bool((margins > 0).all()):
        return math.inf
    slopes = slope_ranges(ball, anchored=True)
    if count_switching(slopes) > most:
        case.notes.add(f"no multipliers: more than {most:,} neurons may switch for some inputs")
        return math.inf
    joint = reduced_maps(ball, slopes, case.rows).divided(margins)
    found = best_multipliers(
        joint, gap=0.3, enough=_ROOM * (1 - 1e-6) / outer, deadline=case.deadline
    )
    return math.inf if found is None else found.bound
