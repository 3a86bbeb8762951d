"""`lipschitz_bound`: an upper bound of how much a network can stretch distances, read off the graph it really runs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from equipoise.core.bounds import format_up
from equipoise.core.checks import require_one_of, require_positive
from equipoise.core.errors import InputError, Refused
from equipoise.core.precision import inflate
from equipoise.lipschitz.capture import Program, capture, in_single_precision
from equipoise.lipschitz.chains import chain_total
from equipoise.lipschitz.local.measure import whole_bound
from equipoise.lipschitz.logs import log_product, log_root, log_up
from equipoise.lipschitz.operations import Constant, Copy, Piece, Pieces, Scaled, Sum, Weighted
from equipoise.lipschitz.propagate import Propagation, combined, elasticities, propagate, winner
from equipoise.lipschitz.regions import Region
from equipoise.lipschitz.report import Block, Report, Row, pair_constants
from equipoise.lipschitz.rules import Step
from equipoise.lipschitz.rules.registry import shape_of
from equipoise.lipschitz.values import module_path
from equipoise.norms.spectral import Cache

ChainMethod = Literal["closed", "multipliers"]


def lipschitz_bound(
    model: nn.Module | ExportedProgram,
    example_input: Any = None,
    *,
    ball: float | None = None,
    rtol: float = 1e-3,
    chain: ChainMethod = "closed",
    batch_dim: int | None = 0,
) -> Report:
    """How much can this network stretch an ℓ2 distance between inputs? A proved upper bound, with a row per layer.

    `‖f(x) − f(x')‖₂ ≤ upper·‖x − x'‖₂` for all inputs of the example's shape (one sample; tuple outputs are stacked, as are
    tuple inputs), for the real-number map of the captured graph with the stored weights. Unknown operations, training mode,
    data-dependent control flow and products of unbounded branches raise `Refused` with the node and what to do.

    Args:
        model: any `nn.Module` in evaluation mode, or a program saved by `torch.export`.
        example_input: a float tensor with a batch dimension, or a tuple of them; only its shape and dtype matter.
        ball: bound only on inputs with `‖x‖₂ ≤ ball`; needed for squeeze-and-excite, gates and attention without a norm.
        rtol: relative gap asked of every operator norm. From 0.02 on, convolutions are bounded by a faster route whose
            upper ends may be a few per cent looser than asked: what an audit needs.
        chain: `closed` bounds the dense layers at the end together, in closed form. `multipliers` bounds the whole network by
            one multiplier per neuron (LipSDP, without a solver): any graph that is affine up to pointwise activations and
            max pooling, up to 3,000 neurons; refused by name beyond.
        batch_dim: the dimension of the inputs that holds samples (1 for recurrent layers without `batch_first`); None bounds
            the input as a whole. A network whose samples depend on each other along it is refused.

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
    require_one_of(get_args(ChainMethod), chain=chain)
    if example_input is None and not isinstance(model, ExportedProgram):
        raise InputError("lipschitz_bound needs example_input: the bound depends on the input's shape")
    model, example_input, stored = in_single_precision(model, example_input)
    program = capture(model, example_input, batch_dim=batch_dim)
    batches = [node.meta["val"].shape[:1] for node in program.inputs]
    if ball is not None and any(b and b[0] > 1 for b in batches) and isinstance(model, ExportedProgram):
        raise Refused(
            "a ball is about one input, but the program was exported with a larger batch; export it with a batch of one"
        )
    reports = [_report(p, ball, rtol, chain) for p in (program, program.single) if p is not None]
    claims = (
        f"module {r.name} ({r.kind}): its constant is declared by its class; attacked, not proved"
        for r in program.regions
        if r.declared
    )
    largest = max(reports, key=lambda report: report.log_upper)
    notes = [note for note in (*program.notes, stored, *claims, *largest.notes) if note]
    return replace(largest, notes=tuple(dict.fromkeys(notes)), pairs=_largest(reports))


def _largest(reports: list[Report]) -> Tensor | None:
    """Constants of pairs that hold for every reading of the program."""
    pairs = [report.pairs for report in reports if report.pairs is not None]
    if len(pairs) < len(reports) or len({p.shape for p in pairs}) > 1:
        return None
    return torch.stack(pairs).amax(0)


def _report(program: Program, ball: float | None, rtol: float, chain: ChainMethod) -> Report:
    run = propagate(program, ball, rtol)
    together = chain_total(run)
    if chain == "multipliers":
        found = whole_bound(run, Cache(rtol))
        together = found if together is None else min(found, together)
    totals = {"product": run.product, "fused": run.fused, "chain": math.inf if together is None else together}
    method = min(totals, key=lambda name: totals[name])
    layers = rows(run)
    notes = (*program.notes, *_wider(layers, rtol))
    return Report(
        totals[method], run.product, run.fused, layers, method, ball, notes, together, pair_constants(run),
        blocks(run, layers),
    )  # fmt: skip


def _wider(layers: Sequence[Row], rtol: float) -> tuple[str, ...]:
    """A note where norms are known less closely than was asked for."""
    gaps = [row.upper / row.lower - 1 for row in layers if row.lower > 0]
    wide = [gap for gap in gaps if gap > rtol * (1 + 1e-9)]
    if not wide:
        return ()
    return (
        f"{len(wide)} of {len(gaps)} norms are known within {format_up(max(wide), 2)} only, {rtol:g} was asked for",
    )


def _silent(step: Step) -> bool:
    """Whether an operation only moves, chooses or shifts: it has no row of its own."""
    match step.map:
        case Copy() | Pieces() | Piece():
            return all(gain <= 1 for _, gain in step.gains)
        case Scaled(factor=factor, shift=shift):
            return shift is not None and factor.numel() == 1 and abs(float(factor)) == 1
        case _:
            return isinstance(step.map, Constant)


def rows(run: Propagation) -> tuple[Row, ...]:
    """A row per operation that changes distances; views, shifts and identities are left out."""
    weights = elasticities(run)
    blocks = {node: block for node in run.program.nodes if (block := winner(run, node)) is not None}
    inside = {member for block in blocks.values() for member in block.members if member is not block.output}
    kept = [
        (node, run.steps[node])
        for node in run.program.nodes
        if node not in inside and (node in blocks or not _silent(run.steps[node]))
    ]
    gains = {node: blocks[node].bound if node in blocks else _own_gain(step) for node, step in kept}
    added = {node: weights[node] * math.log(g) if g > 0 else 0.0 for node, g in gains.items()}
    total = sum(abs(v) for v in added.values()) or 1.0
    shares = {node: value / total for node, value in added.items()}
    return tuple(
        _block_row(blocks[node], weights[node], shares[node])
        if node in blocks
        else _row(run, node, gains[node], weights[node], shares[node])
        for node, _ in kept
    )


def _own_gain(step: Step) -> float:
    if isinstance(step.map, Sum):
        return math.fsum(gain for _, gain in step.gains)
    return max((gain for _, gain in step.gains), default=0.0)


def _block_row(block: Region, weight: float, share: float) -> Row:
    shape = f"{_show(block.source)}→{_show(block.output)}"
    return Row(block.name, block.output.name, block.kind, shape, math.nan, block.bound, block.method, weight, share)


def _row(run: Propagation, node: fx.Node, gain: float, weight: float, share: float) -> Row:
    step = run.steps[node]
    shape = "→".join(_show(n) for n in (*(s.node for s, _ in step.gains[:1]), node))
    found = step.bracket
    lower, upper = (float(found.lower), float(found.upper)) if found is not None else (math.nan, gain)
    method = found.method if found is not None else ""
    pattern = [
        f"{r.method}: at most {format_up(r.bound, 5)} in the fused total"
        for r in run.regions.get(node, ())
        if not r.whole
    ]
    note = " ".join(v for v in (step.note, found.note if found is not None else "", *pattern) if v)
    return Row(module_path(node) or node.name, node.name, step.label, shape, lower, upper, method, weight, share, note)


def _show(node: fx.Node) -> str:
    """The shape of one sample of a node's tensor, of the first for several."""
    return "×".join(map(str, shape_of(node)[1:])) or "1"


def blocks(run: Propagation, layers: Sequence[Row]) -> tuple[Block, ...]:
    """The blocks by their share of the log-bound, largest first, with the product bound if it and those before it are capped.

    A block is the module that holds a layer, or the layer itself where it stands alone. Capped: every layer of the block with
    weights or factors, and a norm above 1, is scaled to norm 1. Sums, pooling and activations stay what they are: `x + f(x)`
    with f capped is at most 2.
    """
    names = {row.name for row in layers}
    holders = {name.rpartition(".")[0] for name in names} - {""}

    def block_of(name: str) -> str:
        # an operation in the forward of a block, such as its addition, has the block's own name
        return name if name in holders else name.rpartition(".")[0] or name

    shares: dict[str, float] = {}
    for row in layers:
        shares[block_of(row.name)] = shares.get(block_of(row.name), 0.0) + row.share
    worst = sorted((name for name, share in shares.items() if share > 0), key=lambda name: -shares[name])
    ranked, capped = [], set[str]()
    for name in worst[:12]:
        capped.add(name)
        ranked.append(Block(name, shares[name], _capped(run, lambda node: block_of(_named(node)) in capped)))
    return tuple(ranked)


def _named(node: fx.Node) -> str:
    return module_path(node) or node.name


def _capped(run: Propagation, chosen: Callable[[fx.Node], bool]) -> float:
    """The logarithm of the product bound with the operations of these nodes scaled to a constant of at most 1."""
    logs = dict.fromkeys(run.program.inputs, 0.0)
    for node in run.program.nodes:
        step = run.steps[node]
        top = max((gain for _, gain in step.gains), default=0.0)
        if chosen(node) and isinstance(step.map, Weighted | Scaled) and 1 < top < math.inf:
            step = replace(step, gains=tuple((s, min(1.0, inflate(gain / top))) for s, gain in step.gains))
        logs[node] = combined(step, logs)
        for region in run.regions.get(node, ()):
            if region.whole:
                bound = min(1.0, region.bound) if chosen(node) else region.bound
                logs[node] = min(logs[node], log_product(log_up(bound), logs[region.source]))
    return log_root(logs[o] for o in run.program.outputs)
