"""What every node can be on a ball of inputs: a centre, a half-width per entry, an ℓ2 deviation, and a local Lipschitz bound.

For every input of the ball, in exact arithmetic, the node lies within `half` (entry by entry) and within `dev` (in
ℓ2) of `mid`. Linear
maps give `|W|·half` and, sharper for large fan-in, `‖row‖·dev`; both are rounded outward. Entries with `half = 0`
cannot move: their
columns are dropped before the norm of the next layer is taken, and rows of neurons that stay off are dropped as well
(Huang et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core.precision import float64, frobenius, gamma, up
from equipoise.lipschitz.logs import exp_up, log_product, log_root, log_sum, log_up
from equipoise.lipschitz.propagate import OPAQUE, Propagation
from equipoise.lipschitz.rules import Call, Signal, Step
from equipoise.lipschitz.values import perform
from equipoise.maps.linear import Convolution, Diagonal, Linear, Matrix
from equipoise.norms.bracket import Cache, bracket

_U = 2.0**-53
#: a convolution with at most this many matrix entries is materialised, so that single positions can be dropped
MATERIALISED = 1_000_000
_PASSES = {"view", "selection", "mean", "average pooling", "max pooling", "sort"}
_LINEAR = {"linear", "convolution", "matmul"}


@dataclass(frozen=True)
class Box:
    """A node on the ball; `mid` and `half` are None where no entrywise enclosure is kept. `rho` bounds the rounding in `mid`."""

    mid: Tensor | None
    half: Tensor | None
    dev: float
    rho: float
    log: float


def enclose(run: Propagation, x: Tensor, radius: float, cache: Cache) -> dict[fx.Node, Box]:
    """Boxes of every node of a program with one input, for inputs within `radius` of `x` (a batch of one)."""
    x = x.detach().double()
    boxes = {run.program.inputs[0]: Box(x, torch.full_like(x, radius), radius, 0.0, 0.0)}
    signals = {node: facts.signal for node, facts in run.facts.items()}

    def lookup(node: fx.Node) -> Any:
        return signals[node] if node in signals else run.program.constants[node]

    for node in run.program.nodes:
        call, step = Call(node, lookup, cache), run.steps[node]
        boxes[node] = _box(call, step, run, boxes, radius)
    return boxes


def _box(call: Call, step: Step, run: Propagation, boxes: dict[fx.Node, Box], radius: float) -> Box:
    node = call.node
    short = min(
        (log_product(log_up(r.bound), boxes[r.source].log) for r in run.regions.get(node, ())), default=math.inf
    )
    if step.kind == OPAQUE:
        return Box(None, None, math.inf, math.inf, min(short, run.facts[node].fused))
    sources = [(boxes[s.node], gain) for s, gain in step.gains]
    if step.kind in ("layer norm", "RMS norm"):
        sources = [(sources[0][0], _local_norm(call, step, sources[0][0]))]
    log = _combine(step, [log_product(log_up(g), b.log) for b, g in sources])
    log = min(log, short, run.facts[node].fused, _pruned(node, step, run, boxes, call.cache))
    image = _image(call, step, sources, boxes)
    if image is None:
        return Box(None, None, math.inf, math.inf, log)
    mid, half, rounding = image
    noise = float(frobenius(rounding.reshape(1, -1))) if rounding is not None else 0.0
    dev = up(exp_up(_combine(step, [log_up(up(g * b.dev)) for b, g in sources])) + noise)
    rho = up(exp_up(_combine(step, [log_up(up(g * b.rho)) for b, g in sources])) + noise)
    half = half if rounding is None else up(half + rounding)
    dev = min(dev, float(frobenius(half.reshape(1, -1))), up(exp_up(log_product(log, log_up(radius))) + rho))
    half = half.clamp_max(dev)
    if step.slopes is not None:
        log = min(log, _pruned_rows(node, step, run, boxes, half, call.cache))
    return Box(mid, half, dev, rho, log)


def _combine(step: Step, logs: list[float]) -> float:
    return log_root(logs) if step.combine == "root" else log_sum(logs)


Image = tuple[Tensor, Tensor, Tensor | None]


def _image(call: Call, step: Step, sources: list[tuple[Box, float]], boxes: dict[fx.Node, Box]) -> Image | None:
    """Centre, half-widths and entrywise rounding of the centre; None where the operation has no entrywise rule."""
    if not sources or any(b.mid is None for b, _ in sources):
        return None
    box, gain = sources[0]
    assert box.mid is not None
    assert box.half is not None
    if step.kind in ("identity", "piece"):  # the box of a sort or maximum is that of its values
        return box.mid, box.half, None
    if step.kind in _PASSES and len(sources) == 1:
        run = _runner(call, boxes)
        mid = run(lambda b: b.mid)
        kept = step.kind in ("view", "selection", "max pooling", "sort")
        half = run(lambda b: b.half) if step.kind != "sort" else torch.full_like(mid, box.dev)
        if kept:
            return mid, half, None
        return mid, up(half * (1 + 1e-10)), up(gamma(box.mid.numel() + 8, torch.float64) * run(lambda b: b.mid.abs()))
    if step.kind in _LINEAR:
        return _linear_image(call, box)
    if step.kind == "batch norm":
        return _batch_norm_image(call, step, box)
    if step.kind in ("sum", "shift", "difference", "scaling", "concatenation", "constant padding"):
        return _arithmetic_image(call, step, boxes)
    if step.slopes is not None and len(sources) == 1:
        softsign = torch.nn.functional.softsign  # x/(1 + |x|), two branches in the graph
        run = (lambda pick: softsign(pick(box))) if step.kind == "softsign" else _runner(call, boxes)
        mid = run(lambda b: b.mid)
        if step.slopes[0] >= 0:
            high, low = run(lambda b: b.mid + _outward(b)), run(lambda b: b.mid - _outward(b))
            half = torch.minimum(up(torch.maximum(high - mid, mid - low)), up(box.half * gain))
        else:
            half = up(box.half * gain)
        exact = step.kind in ("relu", "abs", "relu6")
        return mid, half, None if exact else 2.0**-44 * (mid.abs() + box.mid.abs())
    if step.kind in ("layer norm", "RMS norm"):
        mid = _runner(call, boxes)(lambda b: b.mid)
        noise = up(gain * gamma(8 * box.mid.shape[-1] + 64, torch.float64) * float(frobenius(box.mid.reshape(1, -1))))
        return mid, torch.full_like(mid, up(gain * box.dev)), noise + 2.0**-40 * (mid.abs() + 1)
    return None


def _outward(box: Box) -> Tensor:
    """The half-width, wide enough for `mid ± half` to be rounded."""
    assert box.mid is not None
    assert box.half is not None
    return box.half + 4 * _U * (box.mid.abs() + box.half)


def _runner(call: Call, boxes: dict[fx.Node, Box]) -> Callable[[Callable[[Any], Any]], Tensor]:
    """Run the node's own operation in float64 on something read off the boxes of its inputs."""

    def value(node: fx.Node, pick: Callable[[Any], Any]) -> Any:
        if node in boxes:
            return pick(boxes[node])
        constant = call.lookup(node)
        return constant.double() if isinstance(constant, Tensor) and constant.is_floating_point() else constant

    def run(pick: Callable[[Any], Any]) -> Tensor:
        args: Any = fx.node.map_arg(call.node.args, lambda n: value(n, pick))
        kwargs = fx.node.map_arg(call.node.kwargs, lambda n: value(n, pick))
        result = perform(call.node, args, kwargs, exact=True)
        return result[0] if isinstance(result, tuple | list) else result

    return run


def _linear_image(call: Call, box: Box) -> Image | None:
    weight = call.get("weight")
    if not isinstance(weight, Tensor) or weight.dim() < 2 or call.get("transposed"):
        return None
    W = weight.double()
    bias = call.get("bias")
    b = bias.double() if isinstance(bias, Tensor) else None
    signal = next(v for v in call.arguments.values() if isinstance(v, Signal))
    position = next(i for i, a in enumerate(call.node.args) if isinstance(a, fx.Node) and a is signal.node)
    if position != 0:
        return None

    def run(t: Tensor, w: Tensor, c: Tensor | None) -> Tensor:
        rest = [None if isinstance(a, fx.Node) else a for a in call.node.args[3:]]
        return call.node.target(t, w, c, *rest, **call.node.kwargs)  # type: ignore[operator]

    if any(isinstance(a, fx.Node) for a in call.node.args[3:]) or call.node.kwargs.get("bias") is not None:
        return None
    assert box.mid is not None
    assert box.half is not None
    count = W[0].numel()
    g = gamma(count + 8, torch.float64)
    mid = run(box.mid, W, b)
    rounding = up(g * run(box.mid.abs(), W.abs(), None if b is None else b.abs())) * (1 + 1e-9)
    wide = run(box.half, W.abs(), None) * (1 + 2 * g)
    rows = up(frobenius(W.flatten(1), (-1,)) * box.dev)
    shape = [1] * mid.dim()
    shape[1 - W.dim() if W.dim() > 2 else -1] = -1  # with or without a batch dimension
    return mid, up(torch.minimum(wide, rows.reshape(shape).expand_as(wide))), rounding


def _batch_norm_image(call: Call, step: Step, box: Box) -> Image | None:
    form = step.linear
    if not isinstance(form, Diagonal):
        return None
    assert box.mid is not None
    assert box.half is not None
    shape = [1] * box.mid.dim()
    shape[1] = -1
    scale = form.factor.reshape(shape)
    mean = call["running_mean"].double().reshape(shape)
    shift = call["bias"].double().reshape(shape) if call["bias"] is not None else torch.zeros_like(mean)
    mid = (box.mid - mean) * scale + shift
    rounding = 16 * _U * ((box.mid.abs() + mean.abs()) * scale.abs() + shift.abs())
    return mid, up(box.half * scale.abs() * (1 + 1e-14)), rounding


def _arithmetic_image(call: Call, step: Step, boxes: dict[fx.Node, Box]) -> Image | None:
    run = _runner(call, boxes)
    mid = run(lambda b: b.mid)
    if step.kind in ("concatenation", "constant padding"):
        half = _moved_half(call, boxes)
        return None if half is None else (mid, half, None)
    half = torch.zeros_like(mid)
    size = mid.abs()
    for name in ("self", "other"):
        value = call[name]
        alpha = abs(float(call.get("alpha", 1) or 1)) if (name == "other") != ("rsub" in str(call.node.target)) else 1.0
        if isinstance(value, Signal):
            box = boxes[value.node]
            assert box.half is not None
            assert box.mid is not None
            factor = step.linear.factor if step.kind == "scaling" and isinstance(step.linear, Diagonal) else None
            if step.kind == "scaling":
                if factor is None:
                    return None
                other = call["other"] if name == "self" else call["self"]
                c = float64(other)
                half = up(half + box.half * (1 / c if ".div" in str(call.node.target) else c).abs() * (1 + 1e-14))
            else:
                half = up(half + alpha * box.half)
                size = size + alpha * box.mid.abs()
        elif step.kind != "scaling":
            size = size + alpha * float64(value).abs()
    return mid, half, 8 * _U * size


def _moved_half(call: Call, boxes: dict[fx.Node, Box]) -> Tensor | None:
    """Half-widths through a concatenation or zero padding: constants have none."""
    node = call.node
    if "pad" in str(node.target):
        source = next(v for v in call.arguments.values() if isinstance(v, Signal))
        half = boxes[source.node].half
        return None if half is None else torch.nn.functional.pad(half, list(call["pad"]))
    tensors = []
    for value in call["tensors"]:
        if isinstance(value, Signal):
            half = boxes[value.node].half
            if half is None:
                return None
            tensors.append(half)
        else:
            tensors.append(torch.zeros_like(value, dtype=torch.float64))
    dim = call.get("dim", 0) or 0
    return torch.stack(tensors, dim) if "stack" in str(node.target) else torch.cat(tensors, dim)


def _local_norm(call: Call, step: Step, box: Box) -> float:
    """`max|γ|/√(max(0, std(x) − r/√d)² + ε)` with r the deviation of the row on the ball; the global constant elsewhere."""
    gain = step.gains[0][1]
    shape = call["normalized_shape"]
    if box.mid is None or box.half is None or list(shape) != list(box.mid.shape[-1:]):
        return gain
    d = box.mid.shape[-1]
    rows = box.mid.reshape(-1, d)
    spread = rows.std(-1, correction=0) if step.kind == "layer norm" else rows.square().mean(-1).sqrt()
    moved = torch.linalg.vector_norm(box.half.reshape(-1, d), dim=-1).clamp_max(box.dev) * (1 + 1e-10)
    noise = 1e-10 * (rows.abs().amax(-1) + 1e-300)
    least = float((spread - moved / math.sqrt(d) - noise).clamp_min(0).min())
    eps = call["eps"]
    eps = (
        torch.finfo(next(v for v in call.arguments.values() if isinstance(v, Signal)).dtype).eps if eps is None else eps
    )
    weight = call.get("weight")
    top = float(weight.abs().max()) if isinstance(weight, Tensor) else 1.0
    return min(gain, up(top / math.sqrt(least * least + float(eps))))


def _pruned(node: fx.Node, step: Step, run: Propagation, boxes: dict[fx.Node, Box], cache: Cache) -> float:
    """log of ‖W[:, moving columns]‖·L(base) for the linear run that ends in this node."""
    facts = run.facts[node]
    if facts.form is None or facts.base is None or isinstance(step.linear, Diagonal):
        return math.inf
    base = boxes[facts.base]
    alive = None if base.half is None else base.half > 0
    return log_product(log_up(masked_norm(facts.form, alive, None, cache)), base.log)


def _pruned_rows(
    node: fx.Node, step: Step, run: Propagation, boxes: dict[fx.Node, Box], half: Tensor, cache: Cache
) -> float:
    """The same with the rows of neurons that stay off dropped as well, for the output of an activation."""
    facts = run.facts[step.gains[0][0].node]
    if facts.form is None or facts.base is None:
        return math.inf
    base = boxes[facts.base]
    alive = None if base.half is None else base.half > 0
    norm = masked_norm(facts.form, alive, half > 0, cache)
    return log_product(log_up(norm), log_up(step.gains[0][1]), base.log)


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
    inputs = math.prod(form.input_shape)
    small = rows is not None and rows.numel() * inputs <= MATERIALISED and form.padding == "zeros"
    if small and columns is not None and columns.numel() == inputs and not bool(columns.all() and rows.all()):  # type: ignore[union-attr]
        eye = torch.eye(inputs, dtype=torch.float64)[columns.flatten()]
        if eye.numel() == 0:
            return 0.0
        M = form.with_weight(form.weight.double()).apply(eye.reshape(-1, *form.input_shape)).flatten(1).mT
        if rows is not None and rows.numel() == M.shape[0]:
            M = M[rows.flatten()]
        return 0.0 if M.numel() == 0 else float(bracket(Matrix(M.contiguous(), form.error), cache).upper)
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
