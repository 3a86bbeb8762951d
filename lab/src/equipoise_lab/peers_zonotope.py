"""A rival of the library's local bounds: a relational enclosure of a network on an ℓ2 ball, and the bound that follows.

Every node is enclosed as a zonotope around a centre, with the input itself among the generators:

    z = c + A e + Σ_k B_k ε_k + η,      ‖e‖₂ ≤ r,   |ε_k| ≤ μ_k,   |η| ≤ b,   ‖η‖₂ ≤ ρ,

with one symbol per neuron of layer k that may switch. Affine operations act on c and on the columns of A and B (a batch of
directions), so a neuron's range keeps the cancellations that a box forgets. The same columns describe *differences*:
between two inputs of the ball

    δz = A δx + Σ_k B_k v_k + η',      ‖v_k‖₂ ≤ L_k‖δx‖₂,   ‖η'‖₂ ≤ τ‖δx‖₂,

because an activation with secant slopes S within w of reference slopes λ gives S·δz = λ·δz + v, v = (S − λ)·δz. With any
α_k > 0, `‖[A, B_1, …](δx, v_1, …)‖² ≤ λ_max(Σ α_k B_k B_kᵀ)·Σ L_k²/α_k`, which is never above the sum of norms at its
best α. η collects rounding, and symbols beyond the budget.

References: Singh et al. 2018 (zonotopes for ReLU networks, DeepZ); Fazlyab et al. 2019 (slope-restricted uncertainty).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from equipoise.core.precision import frobenius, inflate
from equipoise.lipschitz.enclose import Box
from equipoise.lipschitz.logs import exp_up
from equipoise.lipschitz.operations import Copy
from equipoise.lipschitz.propagate import Propagation
from equipoise.lipschitz.rules import Call, Step
from equipoise.lipschitz.tangent import activated, apply, roundoff, supported
from equipoise.maps.linear import Diagonal, Padding
from equipoise.maps.pointwise import Pointwise
from equipoise.norms import spectral_norm
from equipoise.norms.spectral import Cache, bracket

#: most entries of all generators of one node (float64); about three nodes are alive at once
ENTRIES = 250_000_000
#: above this many entries, and two generators per entry, the directions are forgotten at a ReLU all paths go through
FRESH = 100_000_000
#: rows whose norm is taken together; more are bounded group by group, the root of the sum of squares, twice as many at most
ROWS = 4096
_U = 2.0**-53
_TINY = 1e-290  # covers underflow
_WIDER = 1 + 1e-9  # covers the rounding of sums of up to 10⁶ non-negative float64 numbers


@dataclass(eq=False)
class Cloud:
    """A node on the ball: centre, generators by symbol, and the remainder (entrywise `slack`, ℓ2 `rho`, differences `tau`)."""

    centre: Tensor
    blocks: dict[fx.Node, Tensor]
    slack: Tensor
    rho: float
    tau: float
    lengths: dict[fx.Node, Tensor] = field(default_factory=dict, repr=False)

    def length(self, key: fx.Node) -> Tensor:
        """‖B_kj‖₂ for every entry j, computed once."""
        if key not in self.lengths:
            squares = torch.zeros_like(self.centre)
            for column in self.blocks[
                key
            ]:  # row by row: one pass through memory, nothing allocated
                squares.addcmul_(column, column)
            roots = squares.sqrt()
            small = squares < 1e-280  # squares may have vanished
            if bool(small.any()):
                largest = torch.zeros_like(self.centre)
                for column in self.blocks[key]:
                    largest = torch.maximum(largest, column.abs())
                roots = torch.where(small, largest * math.sqrt(len(self.blocks[key])), roots)
            self.lengths[key] = roots
        return self.lengths[key]

    @property
    def generators(self) -> int:
        """Number of columns."""
        return sum(len(t) for t in self.blocks.values())


@dataclass
class Zonotope:
    """The symbols met so far: size `mu` per symbol (None: the input, in ℓ2) and `lip`, the norm of its differences.

    `noise` keeps (ρ, τ) of every node, `added` the part of them that arose since the base of the linear run it is in.
    """

    run: Propagation
    radius: float
    cache: Cache
    boxes: dict[fx.Node, Box]
    mu: dict[fx.Node, Tensor | None] = field(default_factory=dict)
    lip: dict[fx.Node, float] = field(default_factory=dict)
    unstable: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    noise: dict[fx.Node, tuple[float, float]] = field(default_factory=dict)
    added: dict[fx.Node, tuple[float, float]] = field(default_factory=dict)

    def half(self, cloud: Cloud) -> Tensor:
        """Half-width per entry: `r‖A_j‖₂ + Σ_k ‖B_kj·μ_k‖₁ + b_j`, rounded up."""
        total = cloud.slack.clamp_max(cloud.rho).clone()
        for key, t in cloud.blocks.items():
            mu = self.mu[key]
            if mu is None:
                total += self.radius * cloud.length(key)
            else:
                parts = zip(mu.split(1024), t.reshape(len(t), -1).split(1024), strict=True)
                total += sum(m @ part.abs() for m, part in parts).reshape(total.shape)
        return total * _WIDER

    def reach(self, cloud: Cloud) -> Tensor:
        """`Σ_k ‖B_kj‖₂·L_k`: how far entry j moves per unit of δx, the remainder left out."""
        total = torch.zeros_like(cloud.centre)
        for key in cloud.blocks:
            total += self.lip[key] * cloud.length(key)
        return total * _WIDER

    def norm(self, cloud: Cloud, rows: Tensor, weight: Tensor | None = None) -> float:
        """Upper bound of `‖diag(w) P_rows (δz − η')‖` per unit of δx (`rows` are flat indices)."""
        squares = 0.0
        for index in rows.split(ROWS):
            parts = {k: t.reshape(len(t), -1)[:, index] for k, t in cloud.blocks.items()}
            if weight is not None:
                parts = {k: m * weight[index] for k, m in parts.items()}
            squares = inflate(squares + _joint(parts, self.lip) ** 2)
        return inflate(math.sqrt(squares))


def zonotope_bound(
    run: Propagation, boxes: dict[fx.Node, Box], x: Tensor, radius: float, cache: Cache
) -> tuple[float, Zonotope]:
    """Upper bound of the local Lipschitz constant, with the symbols it took; infinite where the graph is not supported."""
    x = x.detach().double()
    state = Zonotope(run, radius, cache, boxes)
    calls = _calls(run, cache)
    widest = max((run.facts[n].signal.numel for n in run.facts), default=0)
    if calls is None or len(run.program.outputs) != 1 or x.numel() * widest > ENTRIES:
        return math.inf, state
    source = run.program.inputs[0]
    state.mu[source], state.lip[source] = None, 1.0
    state.noise[source] = state.added[source] = (0.0, 0.0)
    eye = torch.eye(x.numel(), dtype=torch.float64).reshape(-1, *x.shape)
    clouds = {source: Cloud(x, {source: eye}, torch.zeros_like(x), 0.0, 0.0)}
    uses = {n: sum(n in m.all_input_nodes for m in run.program.nodes) for n in run.facts}
    for node, call in calls.items():
        step = run.steps[node]
        for s in node.all_input_nodes:
            uses[s] = uses.get(s, 0) - 1
        if step.curve is not None:
            before = step.gains[0][0].node
            alone = all(n is before or uses[n] <= 0 for n in clouds) and uses[before] <= 0
            clouds[node] = _activation(state, call, step, clouds[before], alone)
            state.noise[node] = state.added[node] = (clouds[node].rho, clouds[node].tau)
            # the remainder alone is beyond what the layers give
            if clouds[node].tau >= exp_up(boxes[node].log):
                return math.inf, state
        else:
            clouds[node] = _affine(state, call, step, clouds)
        for n in [n for n in clouds if uses[n] <= 0 and n is not run.program.outputs[0]]:
            del clouds[n]
    out = clouds[run.program.outputs[0]]
    return inflate(state.norm(out, torch.arange(out.centre.numel())) + out.tau), state


def _calls(run: Propagation, cache: Cache) -> dict[fx.Node, Call] | None:
    """The calls of all nodes, or None where one is neither affine nor pointwise."""

    calls = {}
    for node in run.program.nodes:
        step = run.steps[node]
        call = run.call(node, cache)
        if step.curve is not None and (
            not step.curve.everywhere or step.gains[0][0].shape != call.shape
        ):
            return None  # centres are no values of the network: the slopes need not hold there
        if step.curve is None and not supported(call, step):
            return None
        calls[node] = call
    return calls


def _affine(state: Zonotope, call: Call, step: Step, clouds: dict[fx.Node, Cloud]) -> Cloud:
    """Centre and generators through an affine operation; what rounding may do joins the remainder."""
    inputs = {s.node: clouds[s.node] for s, _ in step.gains}
    centre = apply(call, step, {n: c.centre for n, c in inputs.items()}, offset=True)
    keys = dict.fromkeys(k for c in inputs.values() for k in c.blocks)
    blocks = {
        k: pushforward(call, step, {n: c.blocks.get(k) for n, c in inputs.items()}) for k in keys
    }
    slack = apply(call, step, {n: c.slack for n, c in inputs.items()}, magnitude=True) * _WIDER
    own = (0.0, 0.0)
    g = roundoff(step)
    if g > 0:
        sizes = {n: c.centre.abs() + state.half(c) for n, c in inputs.items()}
        fresh = 2 * g * apply(call, step, sizes, offset=True, magnitude=True) + _TINY
        moved = (
            2
            * g
            * apply(call, step, {n: state.reach(c) for n, c in inputs.items()}, magnitude=True)
            + _TINY
        )
        slack = inflate(slack + fresh)
        own = (_size(fresh), _size(moved))
    rho, tau = _remainder(state, call.node, step, own)
    return Cloud(centre, blocks, slack.clamp_max(rho), rho, tau)


def _remainder(
    state: Zonotope, node: fx.Node, step: Step, own: tuple[float, float]
) -> tuple[float, float]:
    """ℓ2 size of the remainder after an affine node: by its gains, or by the norm of the whole linear run that ends here.

    The run's norm carries what came from its base; what was added on the way is carried by gains.
    """
    facts = state.run.facts[node]
    fused, clouds, added = math.inf, [], []
    direct = any(s.node is facts.base for s, _ in step.gains)
    if facts.form is not None and not direct and not isinstance(facts.form, Diagonal | Padding):
        fused = float(bracket(facts.form, state.cache).upper)
    for i in range(2):
        plain = inflate(
            _combined(step, [gain * state.noise[s.node][i] for s, gain in step.gains]) + own[i]
        )
        carried = [
            gain * state.added[s.node][i] for s, gain in step.gains if s.node is not facts.base
        ]
        added.append(inflate(_combined(step, carried) + own[i]))
        base = 0.0 if facts.base is None else state.noise[facts.base][i]
        clouds.append(
            min(plain, math.inf if math.isinf(fused) else inflate(fused * base + added[i]))
        )
    state.added[node] = (added[0], added[1])
    state.noise[node] = (clouds[0], clouds[1])
    return state.noise[node]


def _combined(step: Step, values: list[float]) -> float:
    return inflate(math.hypot(*values) if step.combine == "root" else math.fsum(values))


def _size(v: Tensor) -> float:
    return float(frobenius(v.reshape(1, -1)))


def _activation(state: Zonotope, call: Call, step: Step, cloud: Cloud, alone: bool) -> Cloud:
    """`φ(z) = λz + m + ε`: new symbols for the neurons whose secant slope is not known, the rest linear."""
    c, h = cloud.centre, state.half(cloud)
    before = step.gains[0][0].node
    assert step.curve is not None
    hinge = step.curve.hinge
    relu = hinge is not None and not bool(hinge[0].any()) and bool((hinge[1] == 1).all())
    if relu:
        slope, centre, mu, width = _relu(c, h)
        rough = 4 * _U * (c.abs() + centre.abs())
    else:
        slope, width = secant_slopes(step, Box(c, h, math.inf, 0.0, 0.0))
        centre = activated(call, step.curve, c)
        mu = inflate(width * h)
        rough = 2.0**-44 * (c.abs() + centre.abs())
    rows = (width > 0).flatten().nonzero().flatten()
    state.unstable[call.node] = (len(rows), c.numel())
    bound = inflate(exp_up(state.boxes[before].log) + cloud.tau)
    columns = cloud.generators + len(rows)
    if relu and alone and columns > 2 * c.numel() and columns * c.numel() > FRESH:
        return _restart(state, call.node, cloud, c, h, bound)
    lip = inflate(float(width.max()) * bound) if len(rows) else 0.0
    if 0 < len(rows) <= 2 * ROWS:
        lip = min(lip, state.norm(cloud, rows, width.flatten()))
    fresh = rough + 4 * _U * slope.abs() * h
    moved = 4 * _U * slope.abs() * state.reach(cloud)
    gain = step.gains[0][1]
    blocks = {k: t * slope for k, t in cloud.blocks.items()}
    slack = inflate(slope.abs() * cloud.slack + fresh)
    if relu:
        slack = slack * (slope + width > 0)  # a neuron that stays off is exactly 0
    rho, tau = inflate(gain * cloud.rho + _size(fresh)), inflate(gain * cloud.tau + _size(moved))
    room = max(0, ENTRIES // c.numel() - cloud.generators)
    sizes = mu.flatten()
    if len(rows) > room:  # the smallest symbols join the remainder
        order = sizes[rows].argsort(descending=True)
        rest, rows = rows[order[room:]], rows[order[:room]]
        lost = torch.zeros_like(sizes)
        lost[rest] = sizes[rest]
        slack = inflate(slack + lost.reshape(slack.shape))
        rho, tau = inflate(rho + _size(lost)), inflate(tau + lip)
    if len(rows):
        blocks[call.node] = _units(rows, c)
        state.mu[call.node], state.lip[call.node] = sizes[rows], lip
    return Cloud(centre, blocks, slack.clamp_max(rho), rho, tau)


def _relu(c: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slope λ, centre, symbol size and slope width of a ReLU on `[c − h, c + h]`: `0 ≤ relu(z) − λz ≤ 2m`."""
    low, high = c - h, c + h
    low, high = low - 4 * _U * (c.abs() + h), high + 4 * _U * (c.abs() + h)
    open_ = (low < 0) & (high > 0)
    slope = torch.where(open_, high / (high - low).clamp_min(1e-300), (low >= 0).double()).clamp(
        0, 1
    )
    m = torch.where(
        open_, torch.maximum((1 - slope) * high, -slope * low) / 2, torch.zeros_like(c)
    ) * (1 + 1e-12)
    width = torch.where(open_, torch.maximum(slope, 1 - slope), torch.zeros_like(c)) * (1 + 1e-12)
    return slope, slope * c + m, m, width


def _restart(
    state: Zonotope, node: fx.Node, cloud: Cloud, c: Tensor, h: Tensor, gain: float
) -> Cloud:
    """A ReLU that everything passes through: forget where its entries came from, one symbol per entry that moves."""
    lip = min(inflate(state.norm(cloud, torch.arange(c.numel())) + cloud.tau), gain)
    low, high = (c - h).clamp_min(0), (c + h).clamp_min(0)
    mu = (high - low) / 2 + 4 * _U * (c.abs() + h) * (high > 0)
    rows = (mu > 0).flatten().nonzero().flatten()
    state.mu[node], state.lip[node] = mu.flatten()[rows] * (1 + 1e-12), lip
    return Cloud((low + high) / 2, {node: _units(rows, c)}, torch.zeros_like(c), 0.0, 0.0)


def _units(rows: Tensor, like: Tensor) -> Tensor:
    """One unit generator per row."""
    units = torch.zeros(len(rows), like.numel(), dtype=torch.float64)
    units[torch.arange(len(rows)), rows] = 1.0
    return units.reshape(len(rows), *like.shape)


def _joint(parts: dict[fx.Node, Tensor], lip: dict[fx.Node, float]) -> float:
    """`√(λ_max(Σ α_k B_kᵀB_k)·Σ L_k²/α_k)`, the least found over a few α, each factor an upper bound."""
    parts = {k: m for k, m in parts.items() if lip[k] > 0 and bool(m.any())}
    if not parts:
        return 0.0
    weights = _weights(parts, lip)
    stacked = torch.cat([math.sqrt(weights[k]) * m for k, m in parts.items()])
    top = float(spectral_norm(stacked, rtol=1e-2).upper)
    return inflate(top * math.hypot(*(lip[k] / math.sqrt(weights[k]) for k in parts))) * _WIDER


def _weights(
    parts: dict[fx.Node, Tensor], lip: dict[fx.Node, float], rounds: int = 4
) -> dict[fx.Node, float]:
    """α_k near the best (any is sound): `L_k/‖B_k v‖` with v the top vector of the weighted sum, damped."""

    def top(weights: dict[fx.Node, float], v: Tensor, steps: int) -> tuple[float, Tensor]:
        for _ in range(steps):
            v = v / torch.linalg.vector_norm(v).clamp_min(1e-300)
            v = torch.stack([weights[k] * (parts[k].mT @ (parts[k] @ v)) for k in weights]).sum(0)
        size = float(torch.linalg.vector_norm(v))
        return size, v / max(size, 1e-300)

    n = next(iter(parts.values())).shape[1]
    start = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norms = {k: math.sqrt(top({k: 1.0}, start, 8)[0]) for k in parts}
    weights = {k: max(lip[k] / max(norms[k], 1e-150), 1e-290) for k in parts}
    best, least, v = weights, math.inf, start
    for _ in range(rounds):
        size, v = top(weights, v + 1e-3 * start / math.sqrt(n), 10)
        value = size * math.fsum(lip[k] ** 2 / weights[k] for k in parts)
        if value < least:
            best, least = weights, value
        along = {k: float(torch.linalg.vector_norm(parts[k] @ v)) for k in parts}
        ideal = {k: lip[k] / max(along[k], 0.1 * norms[k], 1e-150) for k in parts}
        weights = {k: max(math.sqrt(weights[k] * ideal[k]), 1e-290) for k in parts}
    return best


def secant_slopes(step: Step, box: Box) -> tuple[Tensor, Tensor]:
    """Reference slope and half-width per entry of an activation whose input lies in `box`."""
    assert step.curve is not None
    shape = step.gains[0][0].shape
    if box.mid is not None and box.half is not None:
        lows, highs = _secants(step.curve, box.mid, box.half)
    else:
        lows, highs = (torch.full(shape, s, dtype=torch.float64) for s in step.curve.slopes)
    middle = (lows + highs) / 2
    return middle, inflate((highs - lows) / 2 + 2.0**-52 * middle.abs())


def _secants(curve: Pointwise, mid: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest slope between two points of `mid ± half`, entry by entry.

    Exact for a hinge, from the curvature for smooth maps, else the whole interval.
    """
    lows, highs = (torch.full_like(mid, s) for s in curve.slopes)
    if curve.hinge is not None:
        left, right = (t.to(mid).expand_as(mid) for t in curve.hinge)
        below, above = mid + half <= 0, mid - half >= 0
        lows = torch.where(below, left, torch.where(above, right, torch.minimum(left, right)))
        highs = torch.where(below, left, torch.where(above, right, torch.maximum(left, right)))
    elif math.isfinite(curve.curvature) and curve.function is not None:
        at = mid.detach().clone().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(curve.value(at).sum(), at)
        lows = torch.maximum(lows, slope - curve.curvature * half - 1e-9)
        highs = torch.minimum(highs, slope + curve.curvature * half + 1e-9)
    return lows, highs


#: directions mapped at once
CHUNK = 256


def pushforward(call: Call, step: Step, blocks: Mapping[fx.Node, Tensor | None]) -> Tensor:
    """The linear part applied to a batch of directions per input; None stands for directions that are zero there."""
    nodes = list(blocks)
    present = {n: t for n, t in blocks.items() if t is not None}
    shapes = {s.node: s.shape for s, _ in step.gains}
    absent = {
        n: torch.zeros((), dtype=torch.float64).expand(shapes[n]) for n in nodes if n not in present
    }
    if isinstance(step.map, Copy) and step.map.same:
        return present[nodes[0]]

    def one(*directions: Tensor) -> Tensor:
        return apply(call, step, {**absent, **dict(zip(present, directions, strict=True))})

    parts = zip(*(t.split(CHUNK) for t in present.values()), strict=True)
    return torch.cat([torch.func.vmap(one)(*part) for part in parts])
