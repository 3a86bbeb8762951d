"""Every fact that a bound rests on, compared with values: sizes and stretches of all nodes of a captured network."""

import math
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.core.modules import flat_tensors
from equipoise.lipschitz.capture import capture
from equipoise.lipschitz.logs import exp_up
from equipoise.lipschitz.propagate import Propagation, propagate
from equipoise.lipschitz.rules import Signal
from equipoise.lipschitz.values import exactly

#: what rounding in float64 may add, relative to the numbers that an operation reads
ROUNDING = 1e-9

Values = dict[fx.Node, list[Tensor]]


def check_facts(
    model: nn.Module, example_input: Any, *, ball: float = 1.0, points: int = 8, seed: int = 0
) -> list[str]:
    """Run the captured network on random inputs and compare every node with what its rule promised.

    Checked are the sizes (norm of the tensor, of its rows, of its entries, and the lowest entry), the stretch of every
    operation between pairs of inputs, and the bound of every node relative to the input. No derivative is needed, so
    one wrong rule is named even where the bound of the whole network is loose. Run it on your own rule before trusting it.

    Args:
        model: a module in evaluation mode.
        example_input: as for `lipschitz_bound`.
        ball: the inputs have ℓ2 norm at most this; sizes are mostly known on a ball only.
        points: how many inputs are compared.
        seed: of the inputs.

    Returns:
        A sentence per fact that does not hold; empty where all do.

    >>> check_facts(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.zeros(1, 3))
    []
    """
    run = propagate(capture(model, example_input), ball)
    hidden = [node for node, step in run.steps.items() if step.label == "inside a block"]
    wrong: dict[str, None] = {}
    previous: Values | None = None
    for inputs in _inputs(run, ball, points, seed):
        values = _values(run, inputs)
        for node, facts in run.facts.items():
            if node in hidden:
                continue
            checks = _sizes(facts.signal, values[node], ROUNDING * _largest(run, node, values))
            if previous is not None:
                checks += _stretches(run, node, values, previous)
            label = f" ({run.steps[node].label})" if node in run.steps else ""
            for what, claimed, slack, actual in checks:
                if not (actual <= claimed + slack + ROUNDING * abs(claimed) or math.isnan(actual)):
                    wrong[
                        f"node {node.name!r}{label}: {what} at most {claimed:.9g}, but {actual:.9g} occurs"
                    ] = None
        previous = values
    return list(wrong)


def _inputs(run: Propagation, ball: float, points: int, seed: int) -> list[list[Tensor]]:
    """Points in the ball, most of them on its surface: Gaussian, close to the one before, signs, spikes, and ones."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [node.meta["val"].shape for node in run.program.inputs]
    sizes = [shape.numel() for shape in shapes]
    flat = torch.zeros(sum(sizes), dtype=torch.float64)
    rows = []
    for i in range(points):
        noise = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
        spike = noise * (noise == noise.max())
        flat = (noise, flat + 1e-3 * noise, noise.sign(), spike, torch.ones_like(noise))[i % 5]
        flat = flat * (ball * (1 - 1e-12) * (1.0, 1.0, 0.3)[i % 3] / flat.norm())
        rows.append(
            [part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        )
    return rows


def _values(run: Propagation, inputs: list[Tensor]) -> Values:
    """The tensors of every node, in float64 as the real functions that operations stand for.

    Of an operation that also returns positions or statistics, the first result.
    """
    values: dict[fx.Node, Any] = dict(zip(run.program.inputs, inputs, strict=True))
    with torch.no_grad():
        for node in run.program.nodes:
            values[node] = exactly(node, values, run.program.constants.__getitem__)
    return {node: flat_tensors(value)[:1] for node, value in values.items()}


Comparison = tuple[str, float, float, float]


def _sizes(signal: Signal, tensors: list[Tensor], slack: float) -> list[Comparison]:
    """What is promised about a tensor's size, what rounding may add, and what it is."""
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return []
    rows = max(float(torch.atleast_1d(t).norm(dim=-1).max()) for t in tensors)
    norm = math.hypot(*(float(t.norm()) for t in tensors))
    peak = max(float(t.abs().max()) for t in tensors)
    facts = [
        ("the norm is", signal.norm, slack, norm),
        ("the norm of rows is", signal.row, slack, rows),
        ("entries are", signal.peak, slack, peak),
    ]
    if not signal.dtype.is_complex:
        low = min(float(t.min()) for t in tensors)
        facts.append(("minus the lowest entry is", -signal.low, slack, -low))
    return facts


def _largest(run: Propagation, node: fx.Node, values: Values) -> float:
    """The largest number that the operation read or made."""
    read = [node, *(n for n in node.all_input_nodes if n in values)]
    if node in run.steps:
        read += [source.node for source, _ in run.steps[node].gains]
    return max((float(t.abs().max()) for n in read for t in values[n] if t.numel()), default=0.0)


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The distance of two values; entries masked by −∞ in both do not move."""
    moved = [torch.where(s == t, torch.zeros_like(s), s - t) for s, t in zip(a, b, strict=True)]
    return math.sqrt(sum(float(m.abs().square().sum()) for m in moved))


def _stretches(run: Propagation, node: fx.Node, x: Values, y: Values) -> list[Comparison]:
    """How far two inputs are driven apart, and how far this operation, and the bound up to here, allow."""
    reached = _distance(x[node], y[node])
    slack = (
        ROUNDING
        * (_largest(run, node, x) + _largest(run, node, y))
        * math.sqrt(sum(t.numel() for t in x[node]))
    )
    checks = []
    step = run.steps.get(node)
    if step is not None:
        parts = [gain * _distance(x[source.node], y[source.node]) for source, gain in step.gains]
        most = math.hypot(*parts) if step.combine == "root" else math.fsum(parts)
        checks.append(("its rule lets it move", most, slack, reached))

    gap = math.hypot(*(_distance(x[i], y[i]) for i in run.program.inputs))
    scale = max(
        float(t.abs().max()) for values in (x, y) for ts in values.values() for t in ts if t.numel()
    )
    for name in ("product", "fused"):
        total = exp_up(getattr(run.facts[node], name)) * gap
        checks.append((f"by {name} it moves", total, slack + ROUNDING * scale, reached))
    return checks
