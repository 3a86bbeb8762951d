"""What every node can be on a ball of inputs: a centre, a half-width per entry, an ℓ2 deviation, and a local Lipschitz bound.

For every input of the ball, in exact arithmetic, the node lies within `half` (entry by entry) and within `dev` (in
ℓ2) of `mid`. Linear
maps give `|W|·half` and, sharper for large fan-in, `‖row‖·dev`; both are rounded outward. Entries with `half = 0`
cannot move: their
columns are dropped before the norm of the next layer is taken, and rows of neurons that stay off are dropped as well
(Huang et al. 2021).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core import frobenius, gamma, inflate
from equipoise.lipschitz import operations as op
from equipoise.lipschitz.logs import exp_up, log_product, log_root, log_sum, log_up
from equipoise.lipschitz.propagate import Propagation
from equipoise.lipschitz.rules import Call, Step
from equipoise.lipschitz.tangent import (
    activated,
    carried,
    local_rounding,
    roundoff,
    supported,
    value,
)
from equipoise.lipschitz.values import exactly, first_of
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


def enclose(run: Propagation, x: Tensor, radius: float, cache: Cache) -> dict[fx.Node, Box]:
    """Boxes of every node of a program with one input, for inputs within `radius` of `x` (a batch of one).

    Args:
        run: the propagated program.
        x: the centre of the ball.
        radius: of the ball, in ℓ2.
        cache: of operator norms.
    """
    x = x.detach().double()
    boxes = {run.program.inputs[0]: Box(x, torch.full_like(x, radius), radius, 0.0, 0.0)}
    for node in run.program.nodes:
        boxes[node] = _box(run.call(node, cache), run.steps[node], run, boxes, radius)
    return boxes


def _box(call: Call, step: Step, run: Propagation, boxes: dict[fx.Node, Box], radius: float) -> Box:
    node = call.node
    short = min(
        (log_product(log_up(r.bound), boxes[r.source].log) for r in run.regions.get(node, ())),
        default=math.inf,
    )
    if isinstance(step.map, op.Opaque) and step.map.inside:
        return Box(None, None, math.inf, math.inf, min(short, run.facts[node].fused))
    sources = [(boxes[s.node], gain) for s, gain in step.gains]
    if isinstance(step.map, op.Normalised):
        sources = [(sources[0][0], _local_norm(step.map, sources[0][1], sources[0][0]))]

    def combine(logs: Iterable[float]) -> float:
        terms = [
            log_product(log_up(gain), size) for (_, gain), size in zip(sources, logs, strict=True)
        ]
        return log_root(terms) if step.combine == "root" else log_sum(terms)

    log = min(combine(b.log for b, _ in sources), short, run.facts[node].fused)
    if not isinstance(step.linear, Diagonal):
        log = min(log, _pruned(node, run, boxes, call.cache))
    image = _image(call, step, sources, boxes)
    if image is None:
        return Box(None, None, math.inf, math.inf, log)
    mid, half, rounding = image
    rounding = torch.where(rounding > 0, rounding + _TINY, 0.0)
    noise = float(frobenius(rounding.reshape(1, -1)))
    # in logarithms, since the product of two small numbers may vanish
    dev = inflate(exp_up(combine(log_up(b.dev) for b, _ in sources)) + noise)
    rho = inflate(exp_up(combine(log_up(b.rho) for b, _ in sources)) + noise)
    half = inflate(half + rounding)
    dev = min(
        dev,
        float(frobenius(half.reshape(1, -1))),
        inflate(exp_up(log_product(log, log_up(radius))) + rho),
    )
    half = half.clamp_max(dev)
    if step.curve is not None:
        source, gain = step.gains[0]
        log = min(
            log, log_product(log_up(gain), _pruned(source.node, run, boxes, call.cache, half > 0))
        )
    return Box(mid, half, dev, rho, log)


#: centre, half-widths and entrywise rounding of the centre
Image = tuple[Tensor, Tensor, Tensor]


def _image(
    call: Call, step: Step, sources: list[tuple[Box, float]], boxes: dict[fx.Node, Box]
) -> Image | None:
    """The image of the boxes of the operands; None where the operation has no entrywise rule."""
    read = [n for n in (*call.node.all_input_nodes, *(s.node for s, _ in step.gains)) if n in boxes]
    if not sources or any(boxes[n].mid is None for n in read):
        return None
    mids: dict[fx.Node, Any] = {n: boxes[n].mid for n in read}
    box, gain = sources[0]
    before, width = box.mid, box.half
    if before is None or width is None:
        return None
    if isinstance(step.map, op.Normalised):
        mid = first_of(exactly(call.node, mids, call.lookup))
        noise = (
            gain
            * gamma(8 * before.shape[-1] + 64, torch.float64)
            * float(frobenius(before.reshape(1, -1)))
        )
        return (
            mid,
            torch.full_like(mid, inflate(gain * box.dev)),
            inflate(noise) + 2.0**-40 * (mid.abs() + 1),
        )
    if not isinstance(step.map, Pointwise | op.Largest | op.Sorted) and not supported(call, step):
        return None

    mid = value(call, step, mids)
    halves: dict[fx.Node, Any] = {s.node: boxes[s.node].half for s, _ in step.gains}
    half = inflate(carried(call, step, halves) * (1 + 4 * roundoff(step)))
    rounding = local_rounding(call, step, {n: m.abs() for n, m in mids.items()}, mid, None)
    match step.map:
        case op.Weighted(rows=rows) if rows is not None:
            # the length of a row times the ℓ2 deviation, sharper for large fan-in
            lengths = inflate(frobenius(step.map.weight.double().flatten(1), (-1,)) * box.dev)
            shape = [1] * mid.dim()
            shape[rows] = -1
            half = torch.minimum(half, lengths.reshape(shape).expand_as(half))
        case Pointwise(slopes=(low, _)) if low >= 0:
            # covers the rounding of `before ± width`
            outward = width + 4 * _U * (before.abs() + width)
            above = activated(call, step.map, before + outward) - mid
            below = mid - activated(call, step.map, before - outward)
            half = torch.minimum(inflate(torch.maximum(above, below)), half)
    return mid, half, rounding


def _local_norm(layer: op.Normalised, gain: float, box: Box) -> float:
    """`max|γ|/√(max(0, std(x) − r/√d)² + ε)` with r the deviation of the row on the ball; the global constant elsewhere."""
    if box.mid is None or box.half is None:
        return gain
    d = box.mid.shape[-1]
    rows = box.mid.reshape(-1, d)
    spread = rows.std(-1, correction=0) if layer.centred else rows.square().mean(-1).sqrt()
    moved = torch.linalg.vector_norm(box.half.reshape(-1, d), dim=-1).clamp_max(box.dev) * (
        1 + 1e-10
    )
    noise = 1e-10 * (rows.abs().amax(-1) + 1e-300)
    least = float((spread - moved / math.sqrt(d) - noise).clamp_min(0).min())
    return min(gain, inflate(layer.top / math.sqrt(least * least + layer.eps)))


def _pruned(
    node: fx.Node,
    run: Propagation,
    boxes: dict[fx.Node, Box],
    cache: Cache,
    rows: Tensor | None = None,
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
    """Upper bound of the norm of a linear form restricted to moving inputs and outputs.

    A convolution loses the channels that do not move anywhere.

    Args:
        form: the operator.
        columns: which entries of its input move (a batch of one); None: all.
        rows: which entries of its output move.
        cache: of operator norms.
    """
    if isinstance(form, Diagonal) or (isinstance(form, Convolution) and form.groups != 1):
        return float(bracket(form, cache).upper)
    if not isinstance(form, Matrix | Convolution):
        return math.inf
    weight = form.matrix if isinstance(form, Matrix) else form.weight
    for dim, mask in ((1, columns), (0, rows)):
        if mask is None:
            continue
        moving = mask.flatten()
        if isinstance(form, Convolution):
            moving = mask.transpose(0, 1).flatten(1).any(1) if mask.dim() > 1 else mask
        if len(moving) == weight.shape[dim] and not moving.all():
            weight = weight.index_select(dim, moving.nonzero().flatten())
    if weight.numel() == 0:
        return 0.0
    smaller = Matrix(weight, form.error) if isinstance(form, Matrix) else form.with_weight(weight)
    return float(bracket(smaller, cache).upper)
