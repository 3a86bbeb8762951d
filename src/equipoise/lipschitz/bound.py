"""`lipschitz_bound`: an upper bound of how much a network can stretch distances, read off the graph it really runs."""

from collections.abc import Callable
from dataclasses import replace
from math import fsum, inf, isfinite, log, nan
from typing import Any, Literal

from torch import fx, nn
from torch.export import ExportedProgram

from equipoise.core import InputError, Refused, format_up, require_one_of, require_positive
from equipoise.lipschitz.capture import capture
from equipoise.lipschitz.local.measure import ChainMethod, whole_bound
from equipoise.lipschitz.operations import Constant, Copy, Opaque, Scaled, Sum
from equipoise.lipschitz.propagate import Propagation, elasticities, propagate, winner
from equipoise.lipschitz.regions import Region
from equipoise.lipschitz.report import Report, Row, pair_constants
from equipoise.lipschitz.rules import Step
from equipoise.lipschitz.rules.registry import shape_of
from equipoise.lipschitz.tokens import by_tokens
from equipoise.lipschitz.values import module_path
from equipoise.norms.spectral import Cache

Norm = Literal["l2", "token"]


def lipschitz_bound(
    model: nn.Module | ExportedProgram,
    example_input: Any = None,
    *,
    norm: Norm = "l2",
    ball: float | None = None,
    rtol: float = 1e-3,
    chain: ChainMethod = "auto",
    batch_dim: int | None = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """How much can this network stretch an ℓ2 distance between inputs? A proved upper bound, with a row per layer.

    `‖f(x) − f(x')‖₂ ≤ upper·‖x − x'‖₂` for all inputs of the example's shape (one sample; tuple outputs are stacked, as are
    tuple inputs), for the real-number map of the captured graph with the stored weights. Unknown operations, training mode,
    data-dependent control flow and products of unbounded branches raise `Refused` with the node and what to do.

    Args:
        model: any `nn.Module` in evaluation mode, or a program saved by `torch.export`.
        example_input: a float tensor with a batch dimension, or a tuple of them; only its shape and dtype matter.
        norm: of inputs and outputs: `l2`, all tokens together, or `token`, `max over tokens of ℓ2 over features`, for inputs of
            shape (batch, tokens, features): what attention costs then does not grow with the number of tokens (`tokens.py`).
        ball: bound only on inputs with `‖x‖ ≤ ball`, in that norm; needed for squeeze-and-excite, gates and attention without a
            normalisation.
        rtol: relative gap to reach for every operator norm; 0.05 is enough for a first audit, and faster.
        chain: `multipliers` bounds the whole network by one multiplier per neuron (LipSDP, without a solver): any graph that is
            affine up to pointwise activations and max pooling, up to 3,000 neurons; refused by name beyond. `closed` bounds the
            dense layers at the end together, in closed form. `auto` takes multipliers up to 500 neurons, about a second.
        batch_dim: the dimension of the inputs that holds samples (1 for recurrent layers without `batch_first`); None bounds
            the input as a whole. A network whose samples depend on each other along it is refused.
        progress: called with (done, total) before every operation of the network.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> r = lipschitz_bound(net, torch.zeros(1, 4))
    >>> r.upper <= r.product and len(r.layers) == 3
    True

    References: Virmaux & Scaman 2018 (product bound); Ryu et al. 2019; Delattre 2025.
    """
    if ball is not None:
        require_positive(ball=ball)
    require_positive(rtol=rtol)
    require_one_of(ChainMethod, chain=chain)
    require_one_of(Norm, norm=norm)
    if example_input is None and not isinstance(model, ExportedProgram):
        raise InputError(
            "lipschitz_bound needs example_input: the bound depends on the input's shape"
        )
    program = capture(model, example_input, batch_dim=batch_dim)
    if ball is not None and isinstance(model, ExportedProgram):
        shapes = map(shape_of, program.inputs)
        if any(shape and shape[0] > 1 for shape in shapes):
            raise Refused(
                "a ball is about one input, but the program was exported with a larger batch; export it with a batch of one"
            )
    cache = Cache(rtol)
    tokens = norm == "token"
    run = propagate(program, ball, rtol, cache, progress=progress, by_row=tokens)
    if tokens:
        run = by_tokens(run, cache)
    together = inf if tokens else whole_bound(run, cache, chain)
    totals = {"product": run.product, "fused": run.fused, "chain": together}
    method = min(totals, key=lambda name: totals[name])
    claims = (
        f"module {r.name} ({r.kind}): its constant is declared by its class; attacked, not proved"
        for r in program.regions
        if r.declared
    )
    return Report(
        totals[method],
        run.product,
        run.fused,
        rows(run),
        method,
        ball,
        (*program.notes, *claims),
        together if isfinite(together) else None,
        None if tokens else pair_constants(run),
        norm,
    )


def _silent(step: Step) -> bool:
    """Whether an operation only moves, chooses or shifts: it has no row of its own."""
    match step.map:
        case Copy():
            return all(gain <= 1 for _, gain in step.gains)
        case Scaled(factor=factor, shift=shift):
            return shift is not None and factor.numel() == 1 and abs(float(factor)) == 1
        case Opaque(inside=inside):
            return inside
        case _:
            return isinstance(step.map, Constant)


def rows(run: Propagation) -> tuple[Row, ...]:
    """A row per operation that changes distances; views, shifts and identities are left out."""
    weights = elasticities(run)
    blocks = {node: block for node in run.program.nodes if (block := winner(run, node)) is not None}
    inside = {
        member
        for block in blocks.values()
        for member in block.members
        if member is not block.output
    }
    layers = [
        _row(run, node, blocks.get(node), weights[node])
        for node in run.program.nodes
        if node in blocks or (node not in inside and not _silent(run.steps[node]))
    ]
    added = [row.weight * log(row.upper) if row.upper > 0 else 0.0 for row in layers]
    total = fsum(map(abs, added)) or 1.0
    return tuple(
        replace(row, share=value / total) for row, value in zip(layers, added, strict=True)
    )


def _row(run: Propagation, node: fx.Node, block: Region | None, weight: float) -> Row:
    step = run.steps[node]
    if block is not None:
        shape = f"{_show(block.source)}→{_show(node)}"
        ends = nan, block.bound
        return Row(block.name, node.name, block.kind, shape, *ends, block.method, weight)
    gains = [gain for _, gain in step.gains]
    lower, method, remark = nan, "", ""
    upper = fsum(gains) if isinstance(step.map, Sum) else max(gains, default=0.0)
    if step.bracket is not None:
        lower, method, remark = float(step.bracket.lower), step.bracket.method, step.bracket.note
    shape = "→".join(_show(n) for n in (*(s.node for s, _ in step.gains[:1]), node))
    patterns = [
        f"{r.method}: at most {format_up(r.bound, 5)} in the fused total"
        for r in run.regions.get(node, ())
        if not r.whole
    ]
    note = " ".join(v for v in (step.note, remark, *patterns) if v)
    name = module_path(node) or node.name
    return Row(name, node.name, step.label, shape, lower, upper, method, weight, note=note)


def _show(node: fx.Node) -> str:
    """The shape of one sample of a node's tensor, of the first for several."""
    return "×".join(map(str, shape_of(node)[1:])) or "1"
