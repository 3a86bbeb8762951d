"""What every node can be on a ball of inputs: a centre, a half-width per entry, an ℓ2 deviation, and a local Lipschitz bound.

For every input of the ball, in exact arithmetic, the node lies within `half` (entry by entry) and within `dev` (in ℓ2) of `mid`.
Linear maps give `|W|·half` and, sharper for large fan-in, `‖row‖·dev`; both are rounded outward. What a product, an attention or
a steep function stretches depends on the sizes of its operands: its rule is asked again, with their sizes on the ball.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core import Refused, along, frobenius, inflate
from equipoise.lipschitz import operations as op
from equipoise.lipschitz.logs import exp_up, log_product, log_root, log_sum, log_up
from equipoise.lipschitz.nonlinear import known, near, steep
from equipoise.lipschitz.propagate import Propagation
from equipoise.lipschitz.rules import Call, Step, find_rule
from equipoise.lipschitz.rules.registry import norm_of
from equipoise.lipschitz.tangent import (
    activated,
    carried,
    local_rounding,
    roundoff,
    supported,
    value,
)
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
    on_a_ball = step.curve is not None and not step.curve.everywhere
    if on_a_ball or isinstance(step.map, op.Product | op.Opaque):
        step = _local_step(call, step, run, boxes)
    short = min(
        (log_product(log_up(r.bound), boxes[r.source].log) for r in run.regions.get(node, ())),
        default=inf,
    )
    if isinstance(step.map, op.Opaque) and step.map.inside:
        return Box(None, None, inf, inf, min(short, run.facts[node].fused))
    sources = [(boxes[s.node], gain) for s, gain in step.gains]
    if isinstance(step.map, op.Normalised):
        sources = [(sources[0][0], _local_norm(step.map, sources[0][1], sources[0][0]))]

    def combine(logs: Iterable[float]) -> float:
        terms = [
            log_product(log_up(gain), size) for (_, gain), size in zip(sources, logs, strict=True)
        ]
        return log_root(terms) if step.combine == "root" else log_sum(terms)

    log = min(combine(b.log for b, _ in sources), short, run.facts[node].fused)
    facts = run.facts[node]
    if facts.form is not None and facts.base is not None:
        # a linear run as a whole
        whole = float(bracket(facts.form, call.cache).upper)
        log = min(log, log_product(log_up(whole), boxes[facts.base].log))
    image = _image(call, step, sources, boxes)
    if image is None:
        return Box(None, None, inf, inf, log)
    mid, half, rounding = image
    rounding = torch.where(rounding > 0, rounding + _TINY, 0.0)
    noise = norm_of(rounding)
    # in logarithms, since the product of two small numbers may vanish
    dev = inflate(exp_up(combine(log_up(b.dev) for b, _ in sources)) + noise)
    rho = inflate(exp_up(combine(log_up(b.rho) for b, _ in sources)) + noise)
    half = inflate(half + rounding)
    dev = min(dev, norm_of(half), inflate(exp_up(log_product(log, log_up(radius))) + rho))
    half = half.clamp_max(dev)
    return Box(mid, half, dev, rho, log)


def _local_step(call: Call, step: Step, run: Propagation, boxes: dict[fx.Node, Box]) -> Step:
    """The answer of the node's rule to what its operands can be on the ball; the global one where it refuses."""

    def lookup(node: fx.Node) -> Any:
        box = boxes.get(node)
        if box is None or box.mid is None or box.half is None:
            return call.lookup(node)
        signal, entries = run.facts[node].signal, inflate(box.mid.abs() + box.half)
        rows = entries.reshape(-1, entries.shape[-1])
        lengths = box.mid.reshape(rows.shape), box.half.reshape(rows.shape)
        moved = frobenius(lengths[1], (-1,)).clamp_max(box.dev)
        return replace(
            signal,
            norm=min(signal.norm, inflate(norm_of(box.mid) + box.dev)),
            row=min(signal.row, inflate(float((frobenius(lengths[0], (-1,)) + moved).max()))),
            peak=min(signal.peak, float(entries.max())),
            low=max(
                signal.low, float((box.mid - inflate(box.half + 4 * _U * box.mid.abs())).min())
            ),
        )

    try:
        return find_rule(call.node)(Call(call.node, lookup, call.cache))
    except Refused:
        return step


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
    box, _ = sources[0]
    before, width = box.mid, box.half
    if before is None or width is None:
        return None
    halves: dict[fx.Node, Any] = {n: boxes[n].half for n in read}
    plain = isinstance(step.map, Pointwise | op.Largest | op.Sorted) or supported(call, step)
    if not plain and not known(call):
        return None
    if not plain:
        mid, half = near(call, mids, halves)
        rounding = near(call, mids, {n: torch.zeros_like(m) for n, m in mids.items()})[1]
        return (mid, half, rounding) if torch.isfinite(half).all() else None

    mid = value(call, step, mids)
    half = inflate(carried(call, step, halves) * (1 + 4 * roundoff(step)))
    rounding = local_rounding(call, step, {n: m.abs() for n, m in mids.items()}, mid, None)
    match step.map:
        case op.Weighted(rows=rows) if rows is not None:
            # the length of a row times the ℓ2 deviation, sharper for large fan-in
            lengths = inflate(frobenius(step.map.weight.double().flatten(1), (-1,)) * box.dev)
            half = torch.minimum(half, along(lengths, mid, rows))
        case Pointwise(slopes=(low, _)) if low >= 0:
            grows = functools.partial(activated, call, step.map)
            half = torch.minimum(half, steep(grows, (before, width))[1])
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
    least = float((spread - moved / sqrt(d) - noise).clamp_min(0).min())
    return min(gain, inflate(layer.top / sqrt(least * least + layer.eps)))
