"""Lipschitz bounds in the norm of tokens, `max over tokens of ℓ2 over features`: attention costs the same at every length.

Let every token of the input change by at most 1 in ℓ2. For each node of the graph the pass carries, in logarithms, `row`: how
far a row of the last dimension changes at most, in ℓ2, and `peak`: how far an entry does. Both `peak ≤ row` and `row ≤ √n·peak`
for rows of n entries may be assumed.

1. A map of every row by itself with constant g in ℓ2 (a dense layer, a normalisation or softmax of rows): `g·row`.
2. A map of every entry by itself, a sum, a mask: the changes of the operands add up.
3. Entries moved, of at most m rows into one and each read at most r times there: `√(r·m)·row`. Concatenation: the root of the
   sum of squares. Where H heads meet again that is √H, which is attained when they look at H different tokens.
4. `q_i·k_j` with `‖q_i‖ ≤ R_q` and `‖k_j‖ ≤ R_k`: an entry changes by at most `R_k·row(q) + R_q·row(k)`.
5. `Σ_j p_ij v_j` with `p_i = softmax(s_i)` and `‖v_j‖ ≤ R_V`: two inputs are `p(V − V') + (p − p')V'` apart. The first
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

from dataclasses import dataclass, replace
from math import inf, prod

import torch
from torch import fx

from equipoise.core import InputError, Shape, root
from equipoise.lipschitz import operations as op
from equipoise.lipschitz.induced import gain_of
from equipoise.lipschitz.logs import exp_up, log_product, log_root, log_sum, log_up
from equipoise.lipschitz.propagate import Propagation, combined
from equipoise.lipschitz.rules import Call, Step
from equipoise.lipschitz.rules.registry import shape_of
from equipoise.lipschitz.rules.shapes import places_of
from equipoise.maps.linear import Matrix
from equipoise.maps.pointwise import Pointwise
from equipoise.norms.spectral import Cache

#: logarithms closer than this are the same bound, rounded differently
_SAME = 1e-9


@dataclass(frozen=True)
class Change:
    """How far rows (in ℓ2) and entries of a tensor of this shape move, in logarithms.

    `main` is the bound that the report shows: that of entries for scores, else that of rows.
    """

    shape: Shape
    row: float = 0.0
    peak: float = 0.0
    main: float = 0.0

    def whole(self) -> float:
        """Bound of the change of the whole tensor in ℓ2."""
        return log_product(self.row, log_up(root(prod(self.shape[:-1]))))


Changes = dict[fx.Node, Change]


def by_tokens(run: Propagation, cache: Cache) -> Propagation:
    """The same run with all its constants in the norm of tokens.

    Args:
        run: of a network whose inputs have the shape (batch, tokens, features).
        cache: of operator norms.
    """
    changes = {node: Change(shape_of(node)) for node in run.program.inputs}
    shapes = [change.shape for change in changes.values()]
    if any(len(shape) != 3 for shape in shapes):
        raise InputError(
            f'norm="token" needs inputs of shape (batch, tokens, features), got {shapes}; bound what follows the embedding'
        )
    tokens = log_up(root(sum(prod(shape[:-1]) for shape in shapes)))
    steps = {}
    with torch.no_grad():
        for node in run.program.nodes:
            call = run.call(node, cache)
            row, step = min(_choices(call, run, changes), key=lambda choice: choice[0])
            row = min(row, log_product(tokens, run.facts[node].fused))
            peak = min(_peak(node, run.steps[node], changes), row)
            spread = log_product(peak, log_up(root(prod(call.shape[-1:]))))
            main = peak if spread < row + _SAME else row
            steps[node] = _rescaled(step, main, changes)
            changes[node] = Change(call.shape, min(row, spread), peak, main)
    total = max(changes[output].row for output in run.program.outputs)
    return replace(run, steps=steps, regions={}, product=total, fused=total)


def _rescaled(step: Step, log: float, changes: Changes) -> Step:
    """The step with gains that lead to this bound, for the report."""
    before = combined(step, {s.node: changes[s.node].main for s, _ in step.gains})
    factor = exp_up(log - before) if abs(log - before) > _SAME else 1.0
    return replace(step, gains=tuple((s, gain * factor) for s, gain in step.gains), bracket=None)


def _choices(call: Call, run: Propagation, changes: Changes) -> list[tuple[float, Step]]:
    """Bounds of the change of a row, with the steps that lead to them."""
    step = run.steps[call.node]
    sizes = {s.node: changes[s.node].whole() for s, _ in step.gains}
    choices = [(_row(call, step, changes), step)]
    if step.gains:
        choices.append((combined(step, sizes), step))
    for region in run.regions.get(call.node, ()):
        before = changes[region.source]
        block = Step(((run.facts[region.source].signal, 1.0),), region.kind)
        choices.append((log_product(log_up(region.bound), before.whole()), block))
        choices.append((log_product(log_up(region.by_row), before.row), block))
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
            # entries that are repeated along the last dimension make a row
            length = log_up(root(prod(call.shape[-1:])))
            logs = [
                log_product(
                    log_up(gain_of(call.node, step, "linf", i)),
                    s.row if s.shape[-1:] == call.shape[-1:] else log_product(s.peak, length),
                )
                for i, s in enumerate(sources)
            ]
            return log_root(logs) if step.combine == "root" else log_sum(logs)
    rows = step.by_row or isinstance(step.map, op.Copy) or isinstance(step.linear, Matrix)
    return log_product(log_up(step.gains[0][1]), sources[0].row) if rows else inf


def _total(terms: tuple[op.Term, ...], changes: Changes) -> float:
    """The sum of the terms of a product; infinite where there are none."""
    logs = [log_product(log_up(gain), getattr(changes[s.node], kind)) for s, gain, kind in terms]
    return log_sum(logs) if logs else inf


def _mixed(call: Call, step: Step) -> float:
    """√(r·m) for entries of at most m rows that are moved into one row, each at most r times."""
    x, gain = step.gains[0]
    if not x.shape or not call.shape:
        return gain
    places = places_of(call, x)
    repeats = 1
    if gain > 1:
        repeats = int((places == places.mode(-1, keepdim=True)[0]).sum(-1).max())
    rows = ((places - 1) // x.shape[-1]).sort(-1)[0]
    return root(repeats * (1 + int((rows.diff(dim=-1) != 0).sum(-1).max())))


def _peak(node: fx.Node, step: Step, changes: Changes) -> float:
    """Bound of the change of an entry; infinite where no rule has one."""
    if isinstance(step.map, op.Product | op.Opaque):
        return _total(getattr(step.map, "peaks", ()), changes)
    logs = [
        log_product(log_up(gain_of(node, step, "linf", i)), changes[s.node].peak)
        for i, (s, _) in enumerate(step.gains)
    ]
    return max(logs, default=-inf) if step.combine == "root" else log_sum(logs)
