"""Lipschitz bounds in the norm of tokens, `max over tokens of ℓ2 over features`: attention costs the same at every length.

Let every token of the input change by at most 1 in ℓ2. For each node of the graph the pass carries, in logarithms,

* `peak`: how far an entry changes at most;
* `row`: how far a group of entries changes at most, in ℓ2. `groups` numbers the group of every entry: at first the tokens, and
  after operations that mix tokens the rows of the last dimension. Views and selections move the numbers with the entries;
* `line`: how far a row of the last dimension changes at most, in ℓ2, by rule 7.

**Rules.** Let a row of the last dimension hold entries of at most m groups, so that it changes by at most `√m·row`.

1. A map of every row by itself with constant g in ℓ2 (a dense layer, a normalisation of rows, sorting them): g times the
   change of the rows. With m = 1 a group is a union of rows, and stays one.
2. A map of every entry by itself, a sum, a mask: the changes of the operands add up, group by group where the groups are the same,
   else row by row.
3. Entries moved, each at most once: the groups move along. Concatenation: the root of the sum of squares, as parts of one
   group are parts of one vector. Entries repeated up to r times within a row: `√(r·m)` times the change of a group.
4. `q_i·k_j` with `‖q_i‖ ≤ R_q` and `‖k_j‖ ≤ R_k`: an entry changes by at most `R_k·row(q) + R_q·row(k)`.
5. `Σ_j p_ij v_j` with `p_i = softmax(s_i)` and `‖v_j‖ ≤ R_V`: `p(V − V') + (p − p')V'`. The first is a mean of the changes of the v_j.
   Along the segment from s' to s the derivative of the second is `Σ_j p_j (v_j − v̄) ds_j`, at most
   `max_j |ds_j| · √(Σ_j p_j ‖v_j − v̄‖²) ≤ peak(s)·R_V`. So rows change by at most `row(V) + R_V·peak(S)`: nothing depends on
   the number of tokens. Where H heads meet again, m = H: `√H`, which is attained when they look at H different tokens.
6. Means and sums over other dimensions than the last: the sum of the weights.
7. Everything else: `peak` by the rules of ℓ∞, and a row of n entries changes by at most `√n·peak`; or the constant c in ℓ2,
   since a tensor of t groups changes by at most `√t·row` as a whole and no row by more than the whole: `√t·c`.
   For the same reason no bound exceeds √N times the one in ℓ2, for inputs of N tokens.

Every constant is rounded up, and sums and products of them in `logs`. The norm of several inputs or outputs is their largest.
For root mean squares instead of ℓ2 multiply by `√(features of the input / features of the output)`.

References: Kim et al. 2021; Newhouse et al. 2025 (`max over tokens of RMS`).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core.errors import InputError
from equipoise.lipschitz import operations as op
from equipoise.lipschitz.induced import gain_of
from equipoise.lipschitz.logs import exp_up, log_product, log_root, log_sum, log_up
from equipoise.lipschitz.propagate import Propagation, combined
from equipoise.lipschitz.regions import Region
from equipoise.lipschitz.rules import Call, Signal, Step
from equipoise.lipschitz.rules.registry import Shape, root, shape_of
from equipoise.lipschitz.values import aten_name, exactly
from equipoise.maps.linear import Matrix
from equipoise.maps.pointwise import Pointwise
from equipoise.norms.spectral import Cache, bracket

#: logarithms closer than this are the same bound, rounded differently
_SLACK = 1e-9


def _rows_of(shape: Shape) -> Tensor:
    """Every row of the last dimension as a group of its own."""
    count = math.prod(shape[:-1])
    return torch.arange(count, dtype=torch.float64).reshape(*shape[:-1], 1).expand(shape)


def _distinct(values: Tensor) -> int:
    """How many different numbers stand in one row of the last dimension, at most."""
    if not values.dim() or bool((values == values[..., :1]).all()):
        return 1
    return 1 + int((values.sort(-1)[0].diff(dim=-1) != 0).sum(-1).max())


@dataclass(frozen=True)
class Change:
    """How far a node moves, in logarithms: its groups of entries and the rows of its last dimension in ℓ2, and its entries.

    `mixed` is how many groups one row holds, at most. `spread`: the bound of groups is no more than that of their entries.
    """

    row: float
    line: float
    peak: float
    groups: Tensor
    mixed: int
    spread: bool = False

    @property
    def main(self) -> float:
        """The bound that later ones are made of: of entries for scores, else of groups."""
        return self.peak if self.spread else self.row

    def rows(self, shape: Shape) -> float:
        """Bound of the change of a row of the last dimension, repeated to this shape."""
        entries = log_product(self.peak, log_up(root(math.prod(shape[-1:]))))
        if not shape or self.groups.shape[-1:] != shape[-1:]:
            return entries
        return min(entries, self.line, log_product(self.row, log_up(root(self.mixed))))

    def whole(self) -> float:
        """Bound of the change of the whole tensor in ℓ2."""
        few = self.groups[..., :1] if self.mixed == 1 and self.groups.dim() else self.groups
        return log_product(self.row, log_up(root(few.unique().numel())))


Changes = dict[fx.Node, Change]
#: a bound of the change of groups, and the groups
Grouped = tuple[float, Tensor]


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
    most = log_up(root(sum(math.prod(shape[:-1]) for shape in shapes)))
    changes: Changes = {
        node: Change(0.0, 0.0, 0.0, _rows_of(shape_of(node)), 1) for node in run.program.inputs
    }
    facts = {node: replace(run.facts[node], form=None, base=None) for node in changes}
    steps: dict[fx.Node, Step] = {}
    regions: dict[fx.Node, tuple[Region, ...]] = {}
    with torch.no_grad():
        for node in run.program.nodes:
            change, region = _advance(run.call(node, cache), run, changes, most)
            changes[node] = change
            steps[node] = _rescaled(run.steps[node], change, changes)
            main = change.main
            if region is not None and math.isfinite(main):
                before = changes[region.source].main
                constant = exp_up(main - before)
                regions[node] = (replace(region, bound=constant, whole=True),)
                main = log_product(log_up(constant), before)
            facts[node] = replace(run.facts[node], product=main, fused=main)
        total = max(
            (changes[o].rows(shape_of(o)) for o in run.program.outputs), default=-math.inf
        )
    return Propagation(run.program, facts, steps, total, total, regions)


def _rescaled(step: Step, change: Change, changes: Changes) -> Step:
    """The step with gains that give this change, for the report."""
    gains = step.gains
    if isinstance(step.map, op.Product):
        terms = step.map.peaks if change.spread else step.map.rows
        gains = tuple((signal, gain) for signal, gain, _ in terms) or gains
    mains = {s.node: changes[s.node].main for s, _ in gains}
    before = combined(replace(step, gains=gains), mains)
    if not math.isfinite(before) or not math.isfinite(change.main):
        return replace(step, gains=(), bracket=None)
    factor = exp_up(change.main - before)
    return replace(step, gains=tuple((s, gain * factor) for s, gain in gains), bracket=None)


def _advance(
    call: Call, run: Propagation, changes: Changes, most: float
) -> tuple[Change, Region | None]:
    """The change of a node, and the region whose bound it is, if any."""
    node, step = call.node, run.steps[call.node]
    own = _rows_of(call.shape) if call.shape else torch.zeros((), dtype=torch.float64)
    grouped = [g for g in (_grouped(call, step, changes), _fused(call, run, changes)) if g]

    lines: list[tuple[float, Region | None]] = [(log_product(most, run.facts[node].fused), None)]
    for region in run.regions.get(node, ()):
        before = changes[region.source]
        lines.append((log_product(log_up(region.bound), before.whole()), region))
        if region.by_row is not None:
            rows = before.rows(shape_of(region.source))
            lines.append((log_product(log_up(region.by_row()), rows), region))
    if step.gains and not grouped:
        nodes = [s.node for s, _ in step.gains] + [s.part[0] for s, _ in step.gains if s.part]
        lines.append((combined(step, {n: changes[n].whole() for n in nodes}), None))
    line, winner = min(lines, key=lambda choice: choice[0])

    row, groups = min(grouped, key=lambda choice: choice[0], default=(line, own))
    if line <= row:
        row, groups = line, own
    else:
        winner = None
    peak = min(_peak(node, step, changes), row, line)
    spread = False
    if log_product(peak, log_up(root(math.prod(call.shape[-1:])))) < row + _SLACK:
        largest = int(groups.unique(return_counts=True)[1].max())
        entries = log_product(peak, log_up(root(largest)))
        row, spread = min(row, entries), entries < row + _SLACK
    mixed = _distinct(groups)
    if mixed == 1 and groups.dim():
        groups = groups[..., :1].clone().expand(groups.shape)  # one number per row is kept
    return Change(row, line, peak, groups, mixed, spread), None if spread else winner


def _fused(call: Call, run: Propagation, changes: Changes) -> Grouped | None:
    """Neighbouring dense layers composed, and some outputs of one."""
    form, base = run.facts[call.node].form, run.facts[call.node].base
    if not isinstance(form, Matrix) or base is None:
        return None
    before = shape_of(base)
    rows = before[:-1] == call.shape[:-1]
    if not rows or tuple(form.matrix.shape) != (*call.shape[-1:], *before[-1:]):
        return None
    gain = log_up(float(bracket(form, call.cache).upper))
    return _row_by_row(changes[base], gain, call.shape)


def _peak(node: fx.Node, step: Step, changes: Changes) -> float:
    """Bound of the change of an entry; infinite where no rule has one."""
    if isinstance(step.map, op.Product):
        return _terms(step.map.peaks, changes)
    if isinstance(step.map, op.Opaque):
        return math.inf
    logs = [
        log_product(log_up(gain_of(node, step, "linf", i)), changes[s.node].peak)
        for i, (s, _) in enumerate(step.gains)
    ]
    return max(logs, default=-math.inf) if step.combine == "root" else log_sum(logs)


def _terms(terms: tuple[op.Term, ...], changes: Changes) -> float:
    """The sum of the terms of a product; infinite without any."""
    if not terms:
        return math.inf
    logs = []
    for signal, gain, kind in terms:
        change = changes[signal.node]
        size = change.peak if kind == "peak" else change.rows(signal.shape)
        logs.append(log_product(log_up(gain), size))
    return log_sum(logs)


def _row_by_row(change: Change, gain: float, shape: Shape) -> Grouped:
    """A map of every row by itself: unions of rows stay groups."""
    if change.mixed == 1:
        return log_product(gain, change.row), change.groups[..., :1].expand(shape)
    source = tuple(change.groups.shape)
    return log_product(gain, change.rows(source)), _rows_of(shape)


def _grouped(call: Call, step: Step, changes: Changes) -> Grouped | None:
    """Bound of the change of groups by the rules 1 to 6, and the groups; None where none applies."""
    sources = [changes[s.node] for s, _ in step.gains]
    if not sources or not call.shape:
        return None
    same = all(s.shape == call.shape for s, _ in step.gains)
    match step.map:
        case op.Copy(same=True):
            return sources[0].row, sources[0].groups
        case op.Copy() | op.Padded():
            return _moved(call, step, changes)
        case op.Join():
            return _joined(call, step, changes)
        case op.Weighted(form=Matrix()) | op.Normalised() | op.Sorted(last=True):
            return _row_by_row(sources[0], log_up(step.gains[0][1]), call.shape)
        case op.Sorted():
            return _reordered(call, step, changes)
        case op.Product(rows=terms):
            return (_terms(terms, changes), _rows_of(call.shape)) if terms else None
        case op.Average() if aten_name(call.node) in ("mean.dim", "sum.dim_IntList"):
            rank = len(step.gains[0][0].shape)
            if not call["dim"] or rank - 1 in [d % rank for d in call["dim"]]:
                return None
            weight = log_up(gain_of(call.node, step, "linf", 0))
            rows = sources[0].rows(step.gains[0][0].shape)
            return log_product(weight, rows), _rows_of(call.shape)
        case op.Largest(sliding=False) if not same:
            return None
        case Pointwise() | op.Sum() | op.Scaled() | op.Choice() | op.Largest(sliding=False):
            return _aligned(call, step, changes, same)
    return None


def _aligned(call: Call, step: Step, changes: Changes, same: bool) -> Grouped:
    """Entries of several tensors at the same place: group by group where all have the same groups, else row by row."""
    sources = [changes[s.node] for s, _ in step.gains]
    groups = sources[0].groups
    if same and all(torch.equal(groups, source.groups) for source in sources[1:]):
        return _by_group(step, changes), groups
    terms = [
        log_product(log_up(gain_of(call.node, step, "linf", i)), source.rows(call.shape))
        for i, source in enumerate(sources)
    ]
    return (log_root if step.combine == "root" else log_sum)(terms), _rows_of(call.shape)


def _by_group(step: Step, changes: Changes) -> float:
    """The bound after a step, group by group; parts of a tensor count as such where their groups are those of the tensor."""
    gains = []
    logs = {}
    for signal, gain in step.gains:
        change = changes[signal.node]
        logs[signal.node] = change.row
        if signal.part is not None:
            base, places = signal.part
            moved = changes[base].groups.flatten()[places.flatten().long()]
            if torch.equal(moved, change.groups.flatten()):
                logs[base] = changes[base].row
            else:
                signal = replace(signal, part=None)
        gains.append((signal, gain))
    return combined(replace(step, gains=tuple(gains)), logs)


def _moved(call: Call, step: Step, changes: Changes) -> Grouped:
    """Entries at constant places, zeros or copies: their groups move along where none is read twice."""
    signal, gain = step.gains[0]
    change = changes[signal.node]
    groups = exactly(call.node, {signal.node: change.groups}, call.lookup)
    if gain <= 1:
        return change.row, groups
    places = torch.arange(signal.numel, dtype=torch.float64).reshape(signal.shape)
    places = exactly(call.node, {signal.node: places}, call.lookup)
    repeated = int((places == places.mode(-1, keepdim=True)[0]).sum(-1).max())
    size = root(_distinct(groups) * repeated)
    return log_product(change.row, log_up(size)), _rows_of(call.shape)


def _reordered(call: Call, step: Step, changes: Changes) -> Grouped | None:
    """Maxima next to the minima of the same entries (MaxMin), where all of them have the same groups."""
    if aten_name(call.node) not in ("cat.default", "concat.default", "stack.default"):
        return None
    parts = [n for n in call.node.all_input_nodes if n in changes]
    nodes = [*parts, *(s.node for s, _ in step.gains)]
    first = changes[nodes[0]].groups
    if not all(torch.equal(first, changes[n].groups) for n in nodes):
        return None
    groups = exactly(call.node, {n: changes[n].groups for n in parts}, call.lookup)
    return _by_group(step, changes), groups


def _joined(call: Call, step: Step, changes: Changes) -> Grouped:
    """A concatenation: groups of the same number are joined, or rows where that leaves several groups in one row."""
    values: dict[Any, Any] = {s.node: changes[s.node].groups for s, _ in step.gains}
    groups = exactly(call.node, values, call.lookup)
    if _distinct(groups) == 1:
        return _by_group(step, changes), groups
    rows = [changes[s.node].rows(s.shape) for s, _ in step.gains]
    return log_root(rows), _rows_of(call.shape)
