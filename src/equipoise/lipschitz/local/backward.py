"""Backward linear relaxation (CROWN): every neuron's range on a ball, by pushing its row back to the input.

A row A at a node z with `z = W v + b` becomes `A W` at v; at an activation it is multiplied, entry by entry, by the
slope of the line below where A ≥ 0 and above where A < 0. At the input it ends as

    A z ≥ A' x₀ + c − r‖A'‖_* − e,

with ‖·‖_* dual to the ball's norm. e carries the rounding: `A W` is computed within `γ|A||W|`, entry by entry, and the
values it multiplies lie in known intervals, so the error is at most `|A|·s` with one vector `s = γ(|W||v| + |b|)` per node.

The same walk with reference slopes in place of lines, and bounds of differences in place of values, gives the linear maps
of `multipliers`. Reference: Zhang et al. 2018 (CROWN); rounding as in `core.precision`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, hypot, inf, prod
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from equipoise.core.precision import gamma, inflate, row_lengths
from equipoise.lipschitz.local.curves import Hinge, Lines
from equipoise.lipschitz.local.graph import Activation, Affine, Network
from equipoise.lipschitz.rules.registry import norm_of

Norm = Literal["l2", "linf", "l1"]
#: entries of a batch of rows at the widest node (float64)
ENTRIES = 30_000_000
#: differences are sharpened for layers whose rows fit in this many entries
SHARP = 1_000_000
_U = 2.0**-53
_TINY = 1e-290  # more than underflow can take off: a difference that vanishes in float64 is not 0
_WIDER = 1 + 1e-9  # covers the rounding of sums of up to 10⁶ non-negative float64 numbers

#: what a `Ball` holds of every node
_NODE = ("centre", "slip", "low", "high", "lip", "total", "spread")
Through = Callable[[int, Tensor], tuple[Tensor, "Tensor | None"]]
#: middle and half-width of every activation's secant slopes
Slopes = dict[int, tuple[Tensor, Tensor]]
#: lower bounds of rows of a node on a ball
Bounds = Callable[["Ball", int, Tensor], Tensor]


@dataclass
class Ball:
    """What is known of every node for inputs within `radius` of `x` in `norm`, all as flat vectors.

    `centre` is the value at x, within `slip` of the exact one; `low ≤ value ≤ high` on the ball; two inputs of the
    ball move an entry by at most `lip·‖δx‖₂` and the node by at most `total·‖δx‖₂`. A box has `widths`, its half-width per
    coordinate, in place of the radius. Parts of a ball (`branch`) have, for each row that is bounded, their own `low`, `high` and
    `lines`, and boxes their own `x` and `widths`.
    """

    network: Network
    x: Tensor
    radius: float
    norm: Norm = "l2"
    centre: list[Tensor] = field(default_factory=list)
    slip: list[Tensor] = field(default_factory=list)
    low: list[Tensor] = field(default_factory=list)
    high: list[Tensor] = field(default_factory=list)
    lip: list[Tensor] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    lines: dict[int, Lines] = field(default_factory=dict)
    spread: list[Tensor | None] = field(default_factory=list)
    widths: Tensor | None = None

    def add(self, *known: object) -> None:
        """What is known of the next node: centre, slip, low, high, lip, total and spread, what rounding costs per unit of |A|."""
        for name, value in zip(_NODE, known, strict=True):
            getattr(self, name).append(value)

    def narrow(self, k: int, entries: Tensor, bounds: Tensor) -> None:
        """Take over lower bounds of some entries of node k and of their negatives, stacked.

        Args:
            k: index of the node.
            entries: indices of n of its entries.
            bounds: 2n lower bounds: of the entries, then of their negatives.
        """
        low, high, n = self.low[k], self.high[k], len(entries)
        low[entries] = torch.maximum(low[entries], bounds[:n])
        high[entries] = torch.minimum(high[entries], -bounds[n:])
        crossed = low > high  # only rounding can do this: the truth is within both
        low[crossed], high[crossed] = (
            torch.minimum(low, high)[crossed],
            torch.maximum(low, high)[crossed],
        )

    def size(self, k: int) -> Tensor:
        """Bound of |value| of node k."""
        return torch.maximum(self.low[k].abs(), self.high[k].abs())


def enclose_ball(
    network: Network,
    x: Tensor,
    radius: float,
    norm: Norm = "l2",
    *,
    bounds: Sequence[Bounds] | None = None,
    deadline: float = inf,
    known: Mapping[int, float] | None = None,
    widths: Tensor | None = None,
) -> Ball | None:
    """The ball with every pre-activation interval refined backward; None where values leave the floats.

    Args:
        network: the network.
        x: the centre, one input of any shape.
        radius: of the ball.
        norm: of the ball.
        bounds: functions that refine the intervals of activations, one after the other; by default `lower_bounds`.
        deadline: of `time.process_time()`; after it intervals are left as they are.
        known: local Lipschitz bounds of nodes from elsewhere, by index.
        widths: of a box, its half-width per coordinate, in place of the radius.
    """
    ball = Ball(network, x.detach().double().flatten(), radius, norm, widths=widths)
    bounds = (lower_bounds,) if bounds is None else bounds
    read = {node.source for node in network.activations.values()}
    for k, node in enumerate(network.nodes):
        if node is None:
            _enter(ball)
        elif isinstance(node, Affine):
            _affine(ball, node)
        else:
            _activation(ball, node, k)
        if known is not None and known.get(k, inf) < ball.total[k]:
            ball.total[k] = known[k]
            ball.lip[k] = ball.lip[k].clamp_max(known[k])
        if not torch.isfinite(ball.low[k]).all() & torch.isfinite(ball.high[k]).all():
            return None
        if k in read:
            if time.process_time() < deadline:
                _sharpen(ball, k)
            for bound in bounds:
                _refine(ball, k, bound, deadline)
    return ball


def _enter(ball: Ball) -> None:
    radius = ball.radius if ball.widths is None else ball.widths
    wide = radius * (1 + 4 * _U) + 4 * _U * ball.x.abs()
    zero, one = torch.zeros_like(ball.x), torch.ones_like(ball.x)
    ball.add(ball.x, zero, ball.x - wide, ball.x + wide, one, 1.0, None)


def _affine(ball: Ball, node: Affine) -> None:
    g = 2 * node.gamma + gamma(prod(node.shape) + 1024, torch.float64)
    ends = [(ball.low[s], ball.high[s]) for s in node.sources]
    sizes = [ball.size(s) for s in node.sources]
    spread = node.forward(sizes, offset=True, magnitude=True) * (g * _WIDER) + 1e-300
    centre = node.forward([ball.centre[s] for s in node.sources], offset=True)
    own = node.forward([ball.centre[s].abs() for s in node.sources], offset=True, magnitude=True)
    slip = node.forward([ball.slip[s] for s in node.sources], magnitude=True) * _WIDER
    slip = slip + g * own + 1e-300
    middle = node.forward([(a + b) / 2 for a, b in ends], offset=True)
    half = node.forward([(b - a) / 2 for a, b in ends], magnitude=True) * _WIDER + 2 * spread
    lip, total = _differences(ball, node)
    low, high = middle - half, middle + half
    if ball.norm == "l2":
        moved = inflate(lip * ball.radius) + slip + 4 * _U * centre.abs()
        low, high = torch.maximum(low, centre - moved), torch.minimum(high, centre + moved)
    ball.add(centre, slip, low, high, lip, total, spread)


def _differences(ball: Ball, node: Affine) -> tuple[Tensor, float]:
    """How much an affine node moves per unit of ‖δx‖₂, entry by entry and as a whole."""
    lip = node.forward([ball.lip[s] for s in node.sources], magnitude=True) * _WIDER + _TINY
    grown = [
        inflate(gain * ball.total[s]) + _TINY
        for gain, s in zip(node.gains, node.sources, strict=True)
    ]
    total = inflate(hypot(*grown) if node.root else fsum(grown))
    if node.rows is not None:
        lip = torch.minimum(lip, inflate(node.rows * ball.total[node.sources[0]]) + _TINY)
    total = min(total, norm_of(lip))
    return lip.clamp_max(total), total


def whole_space(network: Network) -> tuple[Ball, Slopes]:
    """Differences alone, for all inputs: `lip` and `total` of every node, and the slopes that activations have anywhere."""
    ball = Ball(network, torch.zeros(network.sizes[0], dtype=torch.float64), inf)
    slopes: Slopes = {}
    for k, node in enumerate(network.nodes):
        if node is None:
            lip, total = torch.ones_like(ball.x), 1.0
        elif isinstance(node, Affine):
            lip, total = _differences(ball, node)
        else:
            low, high = node.curve.slopes
            steep, middle = max(abs(low), abs(high)), (low + high) / 2
            lip = inflate(steep * ball.lip[node.source]) + _TINY
            total = inflate(steep * ball.total[node.source]) + _TINY
            one = torch.ones_like(lip)
            slopes[k] = middle * one, inflate(max(high - middle, middle - low) * one)
        ball.lip.append(lip)
        ball.total.append(total)
    return ball, slopes


def _activation(ball: Ball, node: Activation, k: int) -> None:
    curve, s = node.curve, node.source
    low, high = ball.low[s], ball.high[s]
    lines = curve.lines(low, high)
    least, most = lines.range(low, high)
    steep = max(abs(v) for v in curve.slopes)
    centre = curve.value(ball.centre[s])
    slip = inflate(steep * ball.slip[s]) + curve.noise(ball.centre[s])
    if isinstance(curve, Hinge) and curve.slopes[0] >= 0:
        ends = curve.value(low), curve.value(high)
        least, most = ends[0] - 4 * _U * ends[0].abs(), ends[1] + 4 * _U * ends[1].abs()
    slopes = curve.secants((low, high), low, high)
    steepest = torch.maximum(slopes[0].abs(), slopes[1].abs())
    lip = inflate(steepest * ball.lip[s]) + _TINY * (steepest > 0)
    total = min(inflate(steep * ball.total[s]) + _TINY, norm_of(lip))
    ball.lines[k] = lines
    g = gamma(len(least) + 1024, torch.float64)
    constants = torch.maximum(lines.below.abs(), lines.above.abs())
    # the lines of a part of the ball may be as steep as the curve
    spread = g * (steep * ball.size(s) + constants) + 1e-300
    ball.add(centre, slip, least, most, lip, total, spread)


def _refine(ball: Ball, k: int, bounds: Bounds, deadline: float) -> None:
    """Tighten the interval of node k, for the entries whose activation is not known to be linear."""
    low, high = ball.low[k], ball.high[k]
    readers = [node.curve for node in ball.network.activations.values() if node.source == k]
    hinges = all(isinstance(curve, Hinge) for curve in readers)
    wanted = ((low < 0) & (high > 0) if hinges else high > low).nonzero().flatten()
    if not len(wanted):
        return
    largest = ENTRIES if deadline == inf else ENTRIES // 8  # smaller batches end sooner
    for part in wanted.split(max(1, largest // (2 * ball.network.widest))):
        if time.process_time() > deadline:
            break
        unit = one_hot(part, ball.network.sizes[k]).double()
        ball.narrow(k, part, bounds(ball, k, torch.cat([unit, -unit])))


def _sharpen(ball: Ball, k: int) -> None:
    """Bound the differences of node k by one linear map and what may switch before it: a product of layers forgets both."""
    network = ball.network
    if (
        ball.norm != "l2"
        or network.sizes[k] * network.widest > SHARP
        or not ball.lines
        or not ball.total[k] > 0
    ):
        return
    slopes = slope_ranges(ball, before=k)
    moved = torch.zeros(network.sizes[k], dtype=torch.float64)

    def through(i: int, A: Tensor) -> tuple[Tensor, None]:
        middle, width = slopes[i]
        moved.add_(A.abs() @ (width * ball.lip[network.activations[i].source]))
        return A * middle, None

    unit = torch.eye(network.sizes[k], dtype=torch.float64)
    A, _, error = walk(network, k, unit, through, difference_spread(ball, slopes), offset=False)
    ball.lip[k] = torch.minimum(ball.lip[k], inflate((dual_norm(A, "l2") + moved + error) * _WIDER))
    ball.total[k] = min(ball.total[k], norm_of(ball.lip[k]))


def slope_ranges(
    ball: Ball, inner: Ball | None = None, *, anchored: bool = False, before: int | None = None
) -> Slopes:
    """Middle and half-width of every activation's secant slopes between two inputs of the ball.

    Args:
        ball: with all pre-activations enclosed, as far as they are asked for.
        inner: a smaller ball around the same point, in which one of the two inputs lies.
        anchored: one of the two inputs is the centre.
        before: activations with a larger index are left out.
    """
    found: Slopes = {}
    for k, node in ball.network.activations.items():
        if before is not None and k > before:
            break
        s = node.source
        near = (ball.low[s], ball.high[s])
        if anchored:
            near = (ball.centre[s] - ball.slip[s], ball.centre[s] + ball.slip[s])
        elif inner is not None:
            near = (inner.low[s], inner.high[s])
        least, most = node.curve.secants(near, ball.low[s], ball.high[s])
        middle = (least + most) / 2
        found[k] = middle, inflate(torch.maximum(most - middle, middle - least).clamp_min(0))
    return found


def difference_spread(ball: Ball, slopes: Slopes) -> list[Tensor | None]:
    """What rounding at a node costs per unit of |A| and of ‖δx‖: `γ|W||δv|` with the known bounds of differences.

    Args:
        ball: with bounds of differences.
        slopes: of its activations, as `slope_ranges` gives them.
    """
    found: list[Tensor | None] = []
    for k, node in enumerate(ball.network.nodes[: len(ball.lip)]):
        if node is None:
            found.append(None)
        elif isinstance(node, Affine):
            moved = node.forward([ball.lip[s] for s in node.sources], magnitude=True)
            found.append(2 * node.gamma * _WIDER * moved + 1e-300)
        else:
            middle, width = slopes[k]
            found.append(
                gamma(64, torch.float64) * (middle.abs() + width) * ball.lip[node.source] + 1e-300
            )
    return found


def lower_bounds(ball: Ball, k: int, rows: Tensor) -> Tensor:
    """A lower bound, on the ball, of every `rows·(value of node k)`, rounded down.

    Args:
        ball: with the lines of all activations before node k.
        k: index of the node.
        rows: coefficients, (rows, size of node k).
    """

    def relax(i: int, A: Tensor) -> tuple[Tensor, Tensor | None]:
        return by_lines(ball.lines[i], A)

    return finish(ball, *walk(ball.network, k, rows, relax, ball.spread, offset=True))


def by_lines(lines: Lines, A: Tensor) -> tuple[Tensor, Tensor]:
    """Rows A of an activation's values as rows of its inputs and constants, by the lines below and above.

    Args:
        lines: of the activation.
        A: coefficients of its values, (rows, size).
    """
    above, below = A.clamp_min(0), A.clamp_max(0)
    constant = weigh(above, lines.below) + weigh(below, lines.above)
    return above * lines.lower + below * lines.upper, constant


def weigh(A: Tensor, v: Tensor) -> Tensor:
    """`A_i·v` for every row, or `A_i·v_i` where v has a row for each.

    Args:
        A: (rows, size).
        v: (size,) or (rows, size).
    """
    return A @ v if v.dim() == 1 else (A * v).sum(1)


def finish(ball: Ball, A: Tensor, constant: Tensor, error: Tensor) -> Tensor:
    """The least of `A·x + constant` on the ball, less the error of both, rounded down.

    Args:
        ball: the ball, or a box.
        A: coefficients of the input, (rows, inputs).
        constant: of every row.
        error: bound of the rounding in every row so far.
    """
    g = gamma(A.shape[1] + 64, torch.float64)
    error = error + g * weigh(A.abs(), ball.x.abs()) * 2
    if ball.widths is None:
        reach = dual_norm(A, ball.norm) * (ball.radius * (1 + 4 * _U))
    else:
        reach = inflate(weigh(A.abs(), ball.widths) * (1 + g))
    value = weigh(A, ball.x) + constant
    return value - reach * (1 + 4 * _U) - error * _WIDER - 8 * _U * (value.abs() + reach) - 1e-300


def dual_norm(A: Tensor, norm: Norm) -> Tensor:
    """The norm dual to the ball's, of every row, rounded up.

    Args:
        A: (rows, inputs).
        norm: of the ball.
    """
    if norm == "linf":
        return inflate(A.abs().sum(1) * (1 + gamma(A.shape[1] + 8, torch.float64)))
    return A.abs().amax(1) if norm == "l1" else row_lengths(A)


def walk(
    network: Network,
    k: int,
    rows: Tensor,
    through: Through,
    spread: Sequence[Tensor | None],
    *,
    offset: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Push rows of node k back to the input: their coefficients there, the constants, and a bound of the rounding.

    Args:
        network: the network.
        k: index of the node.
        rows: coefficients, (rows, size of node k).
        through: `through(i, A)` passes activation i: rows of its input, and constants or None.
        spread: `spread[i]` is what rounding at node i costs per unit of |A|.
        offset: whether the offsets of affine nodes enter the constants.
    """
    found = {k: rows}
    constant, error = (
        torch.zeros(len(rows), dtype=torch.float64),
        torch.zeros(len(rows), dtype=torch.float64),
    )
    for i in range(k, 0, -1):
        A = found.pop(i, None)
        if A is None:
            continue
        node, cost = network.nodes[i], spread[i]
        assert node is not None
        assert cost is not None
        error = error + A.abs() @ cost
        if isinstance(node, Affine):
            if offset:
                constant = constant + A @ node.constant
            moved = zip(node.sources, node.adjoint(A), strict=True)
        else:
            passed, more = through(i, A)
            constant = constant if more is None else constant + more
            moved = zip((node.source,), (passed,), strict=True)
        for source, B in moved:
            found[source] = found[source] + B if source in found else B
    A = found.get(0)
    return (
        (torch.zeros(len(rows), network.sizes[0], dtype=torch.float64) if A is None else A),
        constant,
        error,
    )
