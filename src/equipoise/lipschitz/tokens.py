"""Lipschitz bounds in the norm of tokens, `max over tokens of ℓ2 over features`: attention costs the same at every length.

Let every token of the input change by at most 1 in ℓ2. For each node of the graph the pass carries, in logarithms, `row`: how far
a row of the last dimension changes at most, in ℓ2, and `peak`: how far an entry does. Always `peak ≤ row ≤ √n·peak` for rows of n.

1. A map of every row by itself with constant g in ℓ2 (a dense layer, a normalisation or softmax of rows): `g·row`.
2. A map of every entry by itself, a sum, a mask: the changes of the operands add up.
3. Entries moved, of at most m rows into one and each read at most r times there: `√(r·m)·row`. Concatenation: the root of the
   sum of squares. Where H heads meet again that is √H, which is attained when they look at H different tokens.
4. `q_i·k_j` with `‖q_i‖ ≤ R_q` and `‖k_j‖ ≤ R_k`: an entry changes by at most `R_k·row(q) + R_q·row(k)`.
5. `Σ_j p_ij v_j` with `p_i = softmax(s_i)` and `‖v_j‖ ≤ R_V`: between two inputs it changes by `p(V − V') + (p − p')V'`. The first
   is a mean of changes of rows. Along the segment from s' to s the derivative of the second is `Σ_j p_j (v_j − v̄) ds_j`, at most
   `max_j |ds_j|·√(Σ_j p_j ‖v_j − v̄‖²) ≤ peak(S)·R_V`. So rows change by at most `row(V) + R_V·peak(S)`, and nothing
   depends on the number of tokens.
6. Everything else: `peak` by the rules of ℓ∞; or the constant c in ℓ2, since a tensor of t rows changes by at most `√t·row` as
   a whole and no row by more than the whole: `√t·c·row`. So no bound exceeds √N times that in ℓ2, for inputs of N tokens.

R_q, R_k, R_V come from normalisations or from the stated ball. Every constant is rounded up, and so are sums and products of
them (`logs`). The norm of several inputs or outputs is their largest. For root mean squares instead of ℓ2 multiply by
`√(features of the input / features of the output)`.

References: Kim et al. 2021; Newhouse et al. 2025 (`max over tokens of RMS`).
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from equipoise.core.errors import InputError
from equipoise.lipschitz import operations as op
from equipoise.lipschitz.induced import gain_of
from equipoise.lipschitz.logs import exp_up, log_product, log_root, log_sum, log_up
from equipoise.lipschitz.propagate import Propagation, combined
from equipoise.lipschitz.regions import Region
from equipoise.lipschitz.rules import Call, Step
from equipoise.lipschitz.rules.registry import Shape, root, shape_of
from equipoise.lipschitz.rules.shapes import places_of
from equipoise.maps.linear import Matrix
from equipoise.maps.pointwise import Pointwise
from equipoise.norms.spectral import Cache, bracket


@dataclass(frozen=True)
class Change:
    """How far rows (in ℓ2) and entries of a tensor of this shape move, in logarithms."""

    shape: Shape
    row: float
    peak: float

    def repeated(self, shape: Shape) -> float:
        """Bound of the change of a row after broadcasting to this shape."""
        if self.shape[-1:] == shape[-1:]:
            return self.row
        return log_product(self.peak, log_up(root(math.prod(shape[-1:]))))

    def whole(self) -> float:
        """Bound of the change of the whole tensor in ℓ2."""
        return log_product(self.row, log_up(root(math.prod(self.shape[:-1]))))


Changes = dict[fx.Node, Change]


def by_tokens(run: Propagation, cache: Cache) -> Propagation:
    """The same run with all its constants in the norm of tokens.

    Args:
        run: of a network whose inputs have the shape (batch, tokens, features).
        cache: of operator norms.
    """
    shapes = [shape_of(node) for node in run.program.inputs]
    if any(len(shape) != 3 for shape in shapes):
        raise InputError(
            f'norm="token" needs inputs of shape (batch, tokens, features), got {shapes}; bound what follows the embedding'
        )
    tokens = log_up(root(sum(math.prod(shape[:-1]) for shape in shapes)))
    changes = {node: Change(shape_of(node), 0.0, 0.0) for node in run.program.inputs}
    logs = dict.fromkeys(changes, 0.0)  # what the report shows: of entries for scores, else of rows
    result = replace(run, facts=dict(run.facts), steps={}, regions={})
    with torch.no_grad():
        for node in run.program.nodes:
            call, step = run.call(node, cache), run.steps[node]
            choices = _choices(call, run, changes)
            choices.append((log_product(tokens, run.facts[node].fused), None))
            row, region = min(choices, key=lambda choice: choice[0])
            peak = min(_peak(node, step, changes), row)
            spread = log_product(peak, log_up(root(math.prod(call.shape[-1:]))))
            changes[node] = Change(call.shape, min(row, spread), peak)
            logs[node] = peak if spread < row + 1e-9 else row
            if region is not None and math.isfinite(logs[node]):
                constant = exp_up(logs[node] - logs[region.source])
                logs[node] = log_product(log_up(constant), logs[region.source])
                result.regions[node] = (replace(region, bound=constant, whole=True),)
            result.steps[node] = _rescaled(step, logs[node], logs)
            result.facts[node] = replace(run.facts[node], product=logs[node])
    total = max((changes[o].row for o in run.program.outputs), default=-math.inf)
    return replace(result, product=total, fused=total)


def _rescaled(step: Step, log: float, logs: dict[fx.Node, float]) -> Step:
    """The step with gains that lead to this bound, for the report."""
    before = combined(step, {s.node: logs[s.node] for s, _ in step.gains})
    if not abs(log - before) > 1e-9:  # the same up to rounding
        return replace(step, bracket=None)
    factor = exp_up(log - before)
    return replace(step, gains=tuple((s, gain * factor) for s, gain in step.gains), bracket=None)


def _choices(call: Call, run: Propagation, changes: Changes) -> list[tuple[float, Region | None]]:
    """Bounds of the change of a row, and the regions that they are of."""
    step, facts = run.steps[call.node], run.facts[call.node]
    choices: list[tuple[float, Region | None]] = [(_row(call, step, changes), None)]
    if step.gains:
        sizes = {s.node: changes[s.node].whole() for s, _ in step.gains}
        choices.append((combined(step, sizes), None))
    if isinstance(facts.form, Matrix) and facts.base is not None:
        # neighbouring dense layers composed, and some outputs of one
        base = changes[facts.base]
        size = (*call.shape[-1:], *base.shape[-1:])
        if base.shape[:-1] == call.shape[:-1] and tuple(facts.form.matrix.shape) == size:
            gain = log_up(float(bracket(facts.form, call.cache).upper))
            choices.append((log_product(gain, base.row), None))
    for region in run.regions.get(call.node, ()):
        before = changes[region.source]
        choices.append((log_product(log_up(region.bound), before.whole()), region))
        choices.append((log_product(log_up(region.by_row), before.row), region))
    return choices


def _row(call: Call, step: Step, changes: Changes) -> float:
    """Bound of the change of a row by the rules 1 to 5; infinite where none applies."""
    sources = [changes[s.node] for s, _ in step.gains]
    match step.map:
        case op.Product(rows=terms) if terms:
            return _total(terms, changes)
        case op.Copy(same=False) | op.Padded():
            return log_product(log_up(_mixed(call, step)), sources[0].row)
        case op.Join():
            return log_root(source.row for source in sources)
        case Pointwise() | op.Sum() | op.Scaled() | op.Choice():
            terms = [
                log_product(log_up(gain_of(call.node, step, "linf", i)), s.repeated(call.shape))
                for i, s in enumerate(sources)
            ]
            return log_root(terms) if step.combine == "root" else log_sum(terms)
    rows = step.by_row or isinstance(step.map, op.Copy) or isinstance(step.linear, Matrix)
    return log_product(log_up(step.gains[0][1]), sources[0].row) if rows else math.inf


def _total(terms: tuple[op.Term, ...], changes: Changes) -> float:
    """The sum of the terms of a product."""
    logs = []
    for signal, gain, kind in terms:
        change = changes[signal.node]
        logs.append(log_product(log_up(gain), change.row if kind == "row" else change.peak))
    return log_sum(logs)


def _mixed(call: Call, step: Step) -> float:
    """√(r·m) for entries of at most m rows that are moved into one row, each at most r times."""
    x, gain = step.gains[0]
    places = places_of(call, x)
    if not places.dim() or not x.shape:
        return 1.0 if gain <= 1 else math.inf
    repeats = 1
    if gain > 1:
        repeats = int((places == places.mode(-1, keepdim=True)[0]).sum(-1).max())
    rows: Tensor = ((places - 1) // x.shape[-1]).sort(-1)[0]
    return root(repeats * (1 + int((rows.diff(dim=-1) != 0).sum(-1).max())))


def _peak(node: fx.Node, step: Step, changes: Changes) -> float:
    """Bound of the change of an entry; infinite where no rule has one."""
    if isinstance(step.map, op.Product):
        return _total(step.map.peaks, changes) if step.map.peaks else math.inf
    if isinstance(step.map, op.Opaque):
        return math.inf
    logs = [
        log_product(log_up(gain_of(node, step, "linf", i)), changes[s.node].peak)
        for i, (s, _) in enumerate(step.gains)
    ]
    return max(logs, default=-math.inf) if step.combine == "root" else log_sum(logs)
