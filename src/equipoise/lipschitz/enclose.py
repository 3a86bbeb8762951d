"""What every node can be on a ball of inputs: a centre, a half-width per entry, an ℓ2 deviation, and a local Lipschitz bound.

For every input of the ball, in exact arithmetic, the node lies within `half` (entry by entry) and within `dev` (in
ℓ2) of `mid`. Linear
maps give `|W|·half` and, sharper for large fan-in, `‖row‖·dev`; both are rounded outward. Entries with `half = 0`
cannot move: their
columns are dropped before the norm of the next layer is taken, and rows of neurons that stay off are dropped as well
(Huang et al. 2021).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core.precision import frobenius, gamma, inflate
from equipoise.lipschitz import operations as op
from equipoise.lipschitz.logs import exp_up, log_product, log_root, log_sum, log_up
from equipoise.lipschitz.propagate import Propagation
from equipoise.lipschitz.rules import Call, Step
from equipoise.lipschitz.tangent import apply, roundoff, supported
from equipoise.lipschitz.values import exactly, first_of, perform
from equipoise.maps.linear import Convolution, Diagonal, Linear, Matrix
from equipoise.maps.pointwise import Pointwise
from equipoise.norms.spectral import Cache, bracket

_U = 2.0**-53
#: more than all that underflow can take off an entry: half-widths that vanish in float64 are not 0
_TINY = 1e-290


@dataclass(frozen=True)
class Box:
    """A node on the ball; `mid` and `half` are None where no entrywise enclosure is kept. `rho` bounds the rounding in `mid`."""

    mid: Tensor | None
    half: Tensor | None
    dev: float
    rho: float
    log: float

    @property
    def entries(self) -> tuple[Tensor, Tensor]:
        """Centre and half-widths, where they are kept."""
        assert self.mid is not None
        assert self.half is not None
        return self.mid, self.half


def enclose(run: Propagation, x: Tensor, radius: float, cache: Cache) -> dict[fx.Node, Box]:
    """Boxes of every node of a program with one input, for inputs within `radius` of `x` (a batch of one)."""
    x = x.detach().double()
    boxes = {run.program.inputs[0]: Box(x, torch.full_like(x, radius), radius, 0.0, 0.0)}
    for node in run.program.nodes:
        boxes[node] = _box(run.call(node, cache), run.steps[node], run, boxes, radius)
    return boxes


def _box(call: Call, step: Step, run: Propagation, boxes: dict[fx.Node, Box], radius: float) -> Box:
    node = call.node
    short = min(
        (log_product(log_up(r.bound), boxes[r.source].log) for r in run.regions.get(node, ())), default=math.inf
    )
    if isinstance(step.map, op.Opaque) and step.map.inside:
        return Box(None, None, math.inf, math.inf, min(short, run.facts[node].fused))
    sources = [(boxes[s.node], gain) for s, gain in step.gains]
    if isinstance(step.map, op.Normalised):
        sources = [(sources[0][0], _local_norm(step.map, sources[0][1], sources[0][0]))]
    log = _combine(step, [log_product(log_up(g), b.log) for b, g in sources])
    log = min(log, short, run.facts[node].fused)
    if not isinstance(step.linear, Diagonal):
        log = min(log, _pruned(node, run, boxes, call.cache))
    image = _image(call, step, sources, boxes)
    if image is None:
        return Box(None, None, math.inf, math.inf, log)
    mid, half, rounding = image
    if rounding is not None:
        rounding = rounding + _TINY
    noise = float(frobenius(rounding.reshape(1, -1))) if rounding is not None else 0.0
    # in logarithms, since the product of two small numbers may vanish
    dev = inflate(exp_up(_combine(step, [log_product(log_up(g), log_up(b.dev)) for b, g in sources])) + noise)
    rho = inflate(exp_up(_combine(step, [log_product(log_up(g), log_up(b.rho)) for b, g in sources])) + noise)
    half = half if rounding is None else inflate(half + rounding)
    dev = min(dev, float(frobenius(half.reshape(1, -1))), inflate(exp_up(log_product(log, log_up(radius))) + rho))
    half = half.clamp_max(dev)
    if step.curve is not None:
        source, gain = step.gains[0]
        log = min(log, log_product(log_up(gain), _pruned(source.node, run, boxes, call.cache, half > 0)))
    return Box(mid, half, dev, rho, log)


def _combine(step: Step, logs: list[float]) -> float:
    return log_root(logs) if step.combine == "root" else log_sum(logs)


Image = tuple[Tensor, Tensor, Tensor | None]


def _image(call: Call, step: Step, sources: list[tuple[Box, float]], boxes: dict[fx.Node, Box]) -> Image | None:
    """Centre, half-widths and entrywise rounding of the centre; None where the operation has no entrywise rule."""
    if not sources or any(b.mid is None for b, _ in sources):
        return None
    box, gain = sources[0]
    before, _ = box.entries
    match step.map:
        case op.Copy() | op.Pieces() | op.Piece() | op.Padded() | op.Join() | op.Scaled() | op.Sum():
            return _moved(call, step, boxes) if supported(call, step) else None
        case op.Weighted():
            return _weighted(step.map, box)
        case op.Average():
            run = _runner(call, boxes)
            rounding = gamma(before.numel() + 8, torch.float64) * run(lambda b: b.mid.abs())
            return run(lambda b: b.mid), inflate(run(lambda b: b.half) * (1 + 1e-10)), inflate(rounding)
        case op.Largest(sliding=True):
            run = _runner(call, boxes)
            return run(lambda b: b.mid), run(lambda b: b.half), None
        case op.Sorted() if call.node.all_input_nodes == [step.gains[0][0].node]:
            mid = _runner(call, boxes)(lambda b: b.mid)
            return mid, torch.full_like(mid, box.dev), None
        case Pointwise():
            return _bent(call, step.map, box, gain)
        case op.Normalised():
            mid = _runner(call, boxes)(lambda b: b.mid)
            noise = inflate(
                gain * gamma(8 * before.shape[-1] + 64, torch.float64) * float(frobenius(before.reshape(1, -1)))
            )
            return mid, torch.full_like(mid, inflate(gain * box.dev)), noise + 2.0**-40 * (mid.abs() + 1)
        case _:
            return None


def _moved(call: Call, step: Step, boxes: dict[fx.Node, Box]) -> Image:
    """Affine operations with few terms, by their own coefficients: entries moved, scaled, shifted and added."""
    nodes = [s.node for s, _ in step.gains]
    mids: dict[fx.Node, Any] = {n: boxes[n].mid for n in nodes}
    halves: dict[fx.Node, Any] = {n: boxes[n].half for n in nodes}
    mid, half = apply(call, step, mids, offset=True), apply(call, step, halves, magnitude=True)
    if roundoff(step) == 0:
        return mid, half, None
    size = apply(call, step, {n: m.abs() for n, m in mids.items()}, offset=True, magnitude=True)
    return mid, inflate(half * (1 + 1e-14)), 16 * _U * size


def activated(call: Call, curve: Pointwise, x: Tensor) -> Tensor:
    """φ(x) as a real function; by the network's own operation where only that knows it."""
    if curve.function is not None:
        return curve.function(x)
    found: Tensor = perform(call.node, [x if isinstance(a, fx.Node) else a for a in call.node.args], call.node.kwargs)
    return found


def _bent(call: Call, curve: Pointwise, box: Box, gain: float) -> Image:
    before, width = box.entries
    mid = activated(call, curve, before)
    half = inflate(width * gain)
    if curve.slopes[0] >= 0:
        outward = width + 4 * _U * (before.abs() + width)  # covers the rounding of `before ± width`
        high, low = (activated(call, curve, before + sign * outward) for sign in (1, -1))
        half = torch.minimum(inflate(torch.maximum(high - mid, mid - low)), half)
    return mid, half, None if curve.exact else 2.0**-44 * (mid.abs() + before.abs())


def _runner(call: Call, boxes: dict[fx.Node, Box]) -> Callable[[Callable[[Any], Any]], Tensor]:
    """Run the node's own operation in float64 on something read off the boxes of its inputs."""

    def run(pick: Callable[[Any], Any]) -> Tensor:
        picked = {n: pick(boxes[n]) for n in call.node.all_input_nodes if n in boxes}
        return first_of(exactly(call.node, picked, call.lookup))

    return run


def _weighted(layer: op.Weighted, box: Box) -> Image:
    """`|W|·half` and, where rows are known, `‖row‖·dev`."""
    before, width = box.entries
    W, b = layer.weight.double(), None if layer.bias is None else layer.bias.detach().double()
    g = gamma(max(W[0].numel(), W[:, 0].numel()) + 8, torch.float64)
    mid = layer.run(before, W, b)
    rounding = inflate(g * layer.run(before.abs(), W.abs(), None if b is None else b.abs())) * (1 + 1e-9)
    half = layer.run(width, W.abs(), None) * (1 + 2 * g)
    if layer.rows is not None:
        rows = inflate(frobenius(W.flatten(1), (-1,)) * box.dev)
        shape = [1] * mid.dim()
        shape[layer.rows] = -1
        half = torch.minimum(half, rows.reshape(shape).expand_as(half))
    return mid, inflate(half), rounding


def _local_norm(layer: op.Normalised, gain: float, box: Box) -> float:
    """`max|γ|/√(max(0, std(x) − r/√d)² + ε)` with r the deviation of the row on the ball; the global constant elsewhere."""
    if box.mid is None or box.half is None:
        return gain
    d = box.mid.shape[-1]
    rows = box.mid.reshape(-1, d)
    spread = rows.std(-1, correction=0) if layer.centred else rows.square().mean(-1).sqrt()
    moved = torch.linalg.vector_norm(box.half.reshape(-1, d), dim=-1).clamp_max(box.dev) * (1 + 1e-10)
    noise = 1e-10 * (rows.abs().amax(-1) + 1e-300)
    least = float((spread - moved / math.sqrt(d) - noise).clamp_min(0).min())
    return min(gain, inflate(layer.top / math.sqrt(least * least + layer.eps)))


def _pruned(
    node: fx.Node, run: Propagation, boxes: dict[fx.Node, Box], cache: Cache, rows: Tensor | None = None
) -> float:
    """log of ‖W[moving rows, moving columns]‖·L(base) for the linear run that ends in this node.

    Args:
        node: the end of the run.
        run: of the network.
        boxes: of the nodes before it.
        cache: of operator norms.
        rows: entries of the node that move; the others belong to neurons that stay off.
    """
    facts = run.facts[node]
    if facts.form is None or facts.base is None:
        return math.inf
    base = boxes[facts.base]
    alive = None if base.half is None else base.half > 0
    return log_product(log_up(masked_norm(facts.form, alive, rows, cache)), base.log)


def masked_norm(form: Linear, columns: Tensor | None, rows: Tensor | None, cache: Cache) -> float:
    """Upper bound of the norm of a linear form restricted to moving inputs and outputs (masks of the batch-of-one tensors)."""
    if isinstance(form, Matrix):
        W = form.matrix
        if columns is not None and columns.numel() == W.shape[1]:
            W = W[:, columns.flatten()]
        if rows is not None and rows.numel() == W.shape[0]:
            W = W[rows.flatten()]
        if W.numel() == 0:
            return 0.0
        same = W.shape == form.matrix.shape
        return float(bracket(form if same else Matrix(W.contiguous(), form.error), cache).upper)
    if isinstance(form, Convolution):
        return _masked_conv(form, columns, rows, cache)
    if isinstance(form, Diagonal):
        return float(bracket(form, cache).upper)
    return math.inf


def _masked_conv(form: Convolution, columns: Tensor | None, rows: Tensor | None, cache: Cache) -> float:
    """A convolution loses the channels that do not move anywhere."""
    weight = form.weight
    if form.groups == 1:
        if columns is not None and columns.dim() > 1 and columns.shape[1] == weight.shape[1]:
            weight = weight[:, columns.transpose(0, 1).flatten(1).any(1)]
        if rows is not None and rows.dim() > 1 and rows.shape[1] == weight.shape[0]:
            weight = weight[rows.transpose(0, 1).flatten(1).any(1)]
    if weight.numel() == 0:
        return 0.0
    same = weight.shape == form.weight.shape
    return float(bracket(form if same else form.with_weight(weight.contiguous()), cache).upper)
