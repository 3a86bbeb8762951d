"""Every fact that a bound rests on, held against values: sizes and stretches of all nodes of a captured network."""

import math
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.core.programs import flat_tensors
from equipoise.lipschitz.capture import capture
from equipoise.lipschitz.logs import exp_up
from equipoise.lipschitz.operations import Opaque
from equipoise.lipschitz.propagate import Propagation, propagate
from equipoise.lipschitz.rules import Signal
from equipoise.lipschitz.values import exactly

#: what rounding in float64 may add, relative to the numbers that an operation reads
ROUNDING = 1e-9


def check_facts(
    model: nn.Module, example_input: Any, *, ball: float = 1.0, points: int = 8, seed: int = 0
) -> list[str]:
    """Run the captured network on random inputs and compare every node with what its rule promised.

    Checked are the sizes (norm of the tensor, of its rows, of its entries, and the lowest entry), the stretch of every
    operation between pairs of inputs, and the bound of every node relative to the input. No derivative is needed, so
    one wrong rule is named even where the bound of the whole network is loose. What to run on an own rule before trusting
    it.

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
    previous: dict[fx.Node, list[Tensor]] = {}
    wrong: dict[str, None] = {}
    for inputs in _inputs(run, ball, points, seed):
        values = _values(run, inputs)
        for node, facts in run.facts.items():
            if (
                isinstance(getattr(run.steps.get(node), "map", None), Opaque)
                and run.steps[node].label == "inside a block"
            ):
                continue
            for what, claimed, found in _sizes(facts.signal, values[node]):
                if not found <= claimed + ROUNDING * (abs(claimed) + _largest(run, node, values)):
                    wrong[f"{_shown(run, node)}: {what} at most {claimed:.9g}, but {found:.9g} occurs"] = None
            if previous:
                for sentence in _stretches(run, node, values, previous):
                    wrong[sentence] = None
        previous = values
    return list(wrong)


def _inputs(run: Propagation, ball: float, points: int, seed: int) -> list[list[Tensor]]:
    """Points in the ball, most of them on its surface: Gaussian, constant, spikes, and some close to each other."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [tuple(node.meta["val"].shape) for node in run.program.inputs]
    sizes = [math.prod(s) for s in shapes]
    found: list[list[Tensor]] = []
    before = torch.zeros(sum(sizes), dtype=torch.float64)
    for i in range(points):
        flat = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
        if i % 4 == 1:
            flat = before + 1e-3 * flat
        if i % 4 == 2:
            flat = flat.sign() if i % 8 == 2 else torch.ones_like(flat)
        if i % 4 == 3:
            flat = torch.nn.functional.one_hot(flat.argmax(), len(flat)) * flat.sign()
        length = ball * (1 - 1e-12) * (0.3 if i % 5 == 4 else 1.0)
        before = flat = flat * (length / flat.norm())
        found.append([part.reshape(s) for part, s in zip(flat.split(sizes), shapes, strict=True)])
    return found


def _values(run: Propagation, inputs: list[Tensor]) -> dict[fx.Node, list[Tensor]]:
    """The tensors of every node, in float64 as the real functions that operations stand for."""
    values: dict[fx.Node, Any] = dict(zip(run.program.inputs, inputs, strict=True))
    with torch.no_grad():
        for node in run.program.nodes:
            values[node] = exactly(node, values, run.program.constants.__getitem__)
    return {n: _tensors(run, n, v) for n, v in values.items()}


def _tensors(run: Propagation, node: fx.Node, value: Any) -> list[Tensor]:
    """All pieces of a split; of an operation that also returns positions or statistics, the first result."""
    tensors = flat_tensors(value)
    return tensors if run.facts[node].signal.pieces else tensors[:1]


def _sizes(signal: Signal, tensors: list[Tensor]) -> list[tuple[str, float, float]]:
    """What is said of a tensor's size, and what it is."""
    sizes = [t.abs() for t in tensors if t.numel()]
    if not sizes:
        return []
    norm = math.sqrt(sum(float(t.square().sum()) for t in sizes))
    rows = max(float((t if t.dim() else t[None]).norm(dim=-1).max()) for t in sizes)
    facts = [("the norm is", signal.norm, norm), ("the norm of rows is", signal.row, rows)]
    facts.append(("entries are", signal.peak, max(float(t.max()) for t in sizes)))
    if not signal.dtype.is_complex:
        facts.append(("minus the lowest entry is", -signal.low, -min(float(t.min()) for t in tensors if t.numel())))
    return [f for f in facts if not math.isnan(f[2])]


def _largest(run: Propagation, node: fx.Node, values: dict[fx.Node, list[Tensor]]) -> float:
    """The largest number that the operation read or made."""
    read = [node, *(s.node for s, _ in run.steps[node].gains)] if node in run.steps else [node]
    read += [n for n in node.all_input_nodes if n in values]
    return max((float(t.abs().max()) for n in read for t in values[n] if t.numel()), default=0.0)


def _change(a: list[Tensor], b: list[Tensor]) -> float:
    """The distance of two values; entries masked by −∞ in both do not move."""
    moved = [torch.where(s == t, torch.zeros_like(s), s - t) for s, t in zip(a, b, strict=True)]
    return math.sqrt(sum(float(m.abs().square().sum()) for m in moved))


def _stretches(
    run: Propagation, node: fx.Node, x: dict[fx.Node, list[Tensor]], y: dict[fx.Node, list[Tensor]]
) -> list[str]:
    """Where two inputs are driven further apart than was promised: by this operation, or up to here."""
    reached = _change(x[node], y[node])
    slack = ROUNDING * (_largest(run, node, x) + _largest(run, node, y)) * math.sqrt(sum(t.numel() for t in x[node]))
    found = []
    step = run.steps.get(node)
    if step is not None and not math.isnan(reached):
        parts = [gain * _change(x[s.node], y[s.node]) for s, gain in step.gains]
        most = math.hypot(*parts) if step.combine == "root" else math.fsum(parts)
        if not reached <= most * (1 + ROUNDING) + slack:
            found.append(f"{_shown(run, node)}: moves by {reached:.9g} where its rule allows {most:.9g}")
    gap = math.hypot(*(_change(x[i], y[i]) for i in run.program.inputs))
    for name in ("product", "fused"):
        total = exp_up(getattr(run.facts[node], name)) * gap
        scale = max(float(t.abs().max()) for values in (x, y) for ts in values.values() for t in ts if t.numel())
        if not math.isnan(reached) and not reached <= total * (1 + ROUNDING) + slack + ROUNDING * scale:
            found.append(f"{_shown(run, node)}: moves by {reached:.9g} where {name} allows {total:.9g}")
    return found


def _shown(run: Propagation, node: fx.Node) -> str:
    label = f" ({run.steps[node].label})" if node in run.steps else ""
    return f"node {node.name!r}{label}"
