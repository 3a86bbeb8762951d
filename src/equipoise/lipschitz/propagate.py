"""Carry a bound from the input to every node: composition multiplies, sums add, concatenation takes the root of squares.

Two totals are carried side by side in the log domain: `product`, layer by layer, and `fused`, in which runs of linear maps are
composed before their norm is taken. The second is the minimum of both, so it never exceeds the first.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import hypot, inf, isfinite, isnan, log, prod, sqrt
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core import InputError, Refused, flat_tensors, inflate, proving
from equipoise.lipschitz.capture import Program
from equipoise.lipschitz.logs import log_product, log_root, log_sum, log_up
from equipoise.lipschitz.operations import Constant, Copy, Opaque, Sum
from equipoise.lipschitz.regions import Region, residual_bound
from equipoise.lipschitz.rules import Call, Signal, Step, find_rule
from equipoise.lipschitz.rules.registry import shape_of
from equipoise.lipschitz.rules.shapes import RESHAPES, refuse_nonfinite
from equipoise.lipschitz.values import aten_name, module_path, replay, where
from equipoise.maps.algebra import add, compose
from equipoise.maps.linear import Diagonal, Linear, Matrix, Padding
from equipoise.norms.spectral import Cache, bracket


@dataclass(frozen=True)
class Facts:
    """What is known of a node: its size on the domain, both log-bounds, and the linear run that ends in it."""

    signal: Signal
    product: float
    fused: float
    form: Linear | None = None
    base: fx.Node | None = None


NodeFacts = dict[fx.Node, Facts]
Regions = dict[fx.Node, tuple[Region, ...]]
#: a run of linear maps and the node where it begins
Run = tuple[Linear | None, fx.Node | None] | None


@dataclass(frozen=True)
class Propagation:
    """The bounds of every node, with the step each rule gave, and the totals."""

    program: Program
    facts: NodeFacts
    steps: dict[fx.Node, Step]
    product: float
    fused: float
    regions: Regions = field(default_factory=dict)

    def call(self, node: fx.Node, cache: Cache) -> Call:
        """A node with its arguments: signals where they depend on the input, constants elsewhere.

        Args:
            node: a node of the program.
            cache: of operator norms.
        """
        return Call(node, self._lookup, cache)

    def _lookup(self, node: fx.Node) -> Any:
        return self.facts[node].signal if node in self.facts else self.program.constants[node]


def propagate(
    program: Program,
    ball: float | None = None,
    rtol: float = 1e-3,
    cache: Cache | None = None,
    progress: Callable[[int, int], None] | None = None,
    by_row: bool = False,
) -> Propagation:
    """Bound every node of the program relative to the input; with `ball` only on inputs of norm at most that.

    Args:
        program: what `capture` returned.
        ball: the largest ℓ2 norm of an input.
        rtol: relative gap asked of every operator norm.
        cache: brackets of weights seen before.
        progress: called with (done, total) before every node.
        by_row: the ball is one of `max over rows of ℓ2`, rows being those of the last dimension.
    """
    cache = Cache(rtol) if cache is None else cache
    facts: NodeFacts = {}
    steps: dict[fx.Node, Step] = {}
    run = Propagation(program, facts, steps, inf, inf)
    size = inf if ball is None else float(ball)
    for node in program.inputs:
        value = node.meta["val"]
        shape = tuple(value.shape)
        whole = inflate(size * sqrt(prod(shape[:-1]))) if by_row else size
        facts[node] = Facts(Signal(node, shape, value.dtype, whole, size, size, -size), 0.0, 0.0)

    regions: Regions = {}
    for region in program.regions:
        regions[region.output] = (*regions.get(region.output, ()), region)
    inside = {n for region in program.regions if isfinite(region.bound) for n in region.members}
    with proving():
        for done, node in enumerate(program.nodes):
            if progress is not None:
                progress(done, len(program.nodes))
            call = run.call(node, cache)
            try:
                refuse_nonfinite(call)
                step = find_rule(node)(call)
                _check(node, step)
                node_facts = _advance(call, step, facts)
            except Refused:
                if node not in inside:
                    raise
                step = Step((), "inside a block", map=Opaque(inside=True))
                node_facts = Facts(Signal(node, shape_of(node), _dtype(node)), inf, inf)
            steps[node] = step
            pattern = _residual(call, step, steps, facts) or _centering(call, step)
            if pattern is not None:
                regions[node] = (*regions.get(node, ()), pattern)
            facts[node] = _shortened(node_facts, regions.get(node, ()), facts)
    if program.doubt:
        raise Refused(program.doubt)
    product = log_root(facts[o].product for o in program.outputs)
    fused = log_root(facts[o].fused for o in program.outputs)
    return replace(run, product=product, fused=min(product, fused), regions=regions)


def _dtype(node: fx.Node) -> torch.dtype:
    return flat_tensors(node.meta["val"])[0].dtype


def _shortened(plain: Facts, regions: tuple[Region, ...], facts: NodeFacts) -> Facts:
    """The smaller of what the operations give and what the regions that end here give."""
    product, fused = plain.product, plain.fused
    for region in regions:
        before = facts[region.source]
        if region.whole:
            product = min(product, log_product(log_up(region.bound), before.product))
        fused = min(fused, log_product(log_up(region.bound), before.fused))
    return replace(plain, product=product, fused=min(product, fused))


def _residual(
    call: Call, step: Step, steps: dict[fx.Node, Step], facts: NodeFacts
) -> Region | None:
    """`x ± A·φ(B·x + b)`, recognised by its operations: see `residual_bound`."""
    if not isinstance(step.map, Sum) or [gain for _, gain in step.gains] != [1, 1]:
        return None
    sign = prod(step.map.weights)  # of the one term relative to the other
    for x, y in itertools.permutations(s for s, _ in step.gains):
        branch = facts[y.node]
        act = None if branch.base is None else steps.get(branch.base)
        if act is None or act.curve is None or x.shape != y.shape:
            continue
        inner = facts[act.gains[0][0].node]
        if inner.base is not x.node:
            continue
        bound = residual_bound(inner.form, branch.form, sign, act.curve.slopes, call.cache)
        if bound is not None:
            name = module_path(call.node)
            block = Region(
                x.node, call.node, bound, name, "residual", "residual pattern", whole=False
            )
            return replace(block, by_row=bound) if isinstance(inner.form, Matrix) else block
    return None


def _centering(call: Call, step: Step) -> Region | None:
    """`x − x.mean(dims)`: a projection, of norm 1 where the sum of the branches gives 2."""
    if not isinstance(step.map, Sum) or step.map.weights != (1.0, -1.0):
        return None
    x, mean = (s for s, _ in step.gains)
    source: Any = mean.node
    while aten_name(source) in RESHAPES:
        source = source.args[0]
    if aten_name(source) not in ("mean.dim", "mean.default") or source.args[0] is not x.node:
        return None
    named = (*source.args, None)[1]
    like = torch.empty(x.shape, device="meta")
    kept = like.mean(named or tuple(range(like.dim())), keepdim=True).shape
    if x.shape != call.shape or (1,) * (len(kept) - len(mean.shape)) + mean.shape != kept:
        return None
    return Region(x.node, call.node, 1.0, module_path(call.node), "centering", "projection")


def _check(node: fx.Node, step: Step) -> None:
    if not isinstance(step, Step):
        raise InputError(f"{where(node)}: its rule must return a Step, got {type(step).__name__}")
    if not step.gains and not isinstance(step.map, Constant):
        raise Refused(
            f"{where(node)}: its rule names no input; name those it depends on, or answer map=operations.Constant()"
        )
    for _, gain in step.gains:
        if isnan(gain) or gain < 0 or gain == inf:
            raise Refused(
                f"{where(node)}: its rule gives the constant {gain}; check the weights, or state an input ball"
            )


def _advance(call: Call, step: Step, facts: NodeFacts) -> Facts:
    sources = [s.node for s, _ in step.gains] + [
        s.part[0] for s, _ in step.gains if s.part is not None
    ]
    product = combined(step, {n: facts[n].product for n in sources})
    fused = combined(step, {n: facts[n].fused for n in sources})
    form, base = _linear_run(call, step, facts) or (None, None)
    plain = len(step.gains) == 1 and base in (step.gains[0][0].node, _multiplied(step))
    if form is not None and base is not None and not plain and not _pending(call.node, step):
        composed = log_up(float(bracket(form, call.cache).upper))
        fused = min(fused, log_product(composed, facts[base].fused))
    return Facts(_sized(call, step), product, min(product, fused), form, base)


def _multiplied(step: Step) -> fx.Node | None:
    """The input of the layer before, where this step multiplies its output by one number: the norm is that multiple."""
    layer = step.gains[0][0].node
    factor = step.linear.factor if isinstance(step.linear, Diagonal) else None
    one = factor is not None and bool((factor == factor[0]).all())
    return layer.all_input_nodes[0] if one and layer.all_input_nodes else None


def _pending(node: fx.Node, step: Step) -> bool:
    """Whether only one affine operation reads this node: the run goes on, and its norm is taken at the end."""
    if isinstance(step.linear, Padding):
        return True
    affine = ("batch_norm.default", "dropout.default", "clone.default")
    users = list(node.users)
    return len(users) == 1 and aten_name(users[0]) in affine


def combined(step: Step, logs: dict[fx.Node, float]) -> float:
    """The bound after a step; parts of one tensor that do not overlap count once in a root of squares.

    Args:
        step: the answer of the node's rule.
        logs: logarithm of the bound of every node that the step names.
    """
    if step.combine == "sum":
        return log_sum(log_product(log_up(gain), logs[s.node]) for s, gain in step.gains)
    groups: dict[fx.Node | None, list[tuple[Signal, float]]] = {}
    for s, gain in step.gains:
        base = s.part[0] if s.part is not None and s.part[0] in logs else None
        groups.setdefault(base, []).append((s, gain))
    terms: list[float] = []
    for base, members in groups.items():
        size = log_root(log_product(log_up(gain), logs[s.node]) for s, gain in members)
        if base is not None:
            read = torch.cat([s.part[1].flatten() for s, _ in members if s.part is not None])
            if read.unique().numel() == read.numel():
                top = max(gain for _, gain in members)
                size = min(size, log_product(log_up(top), logs[base]))
        terms.append(size)
    return log_root(terms)


def _linear_run(call: Call, step: Step, facts: NodeFacts) -> Run:
    if isinstance(step.map, Sum):
        return _parallel_run(step, facts) if step.map.weights == (1.0, 1.0) else None
    if len(step.gains) != 1:
        return None
    source = step.gains[0][0].node
    before = facts[source]
    if isinstance(step.map, Copy) and step.map.same:
        return before.form, before.base
    if isinstance(before.form, Matrix) and aten_name(call.node) in RESHAPES:
        # a matrix acts on rows, which stay the same in the same order
        same_rows = call.shape[-1:] == step.gains[0][0].shape[-1:]
        return (before.form, before.base) if same_rows else None
    if isinstance(before.form, Matrix) and aten_name(call.node) == "slice.Tensor":
        if call["dim"] not in (-1, len(call.shape) - 1):
            return None
        # some outputs of a dense layer: queries, keys and values, or the gates of a cell
        rows = slice(call["start"], call["end"], call["step"])
        return Matrix(before.form.matrix[rows], before.form.error), before.base
    if step.linear is None:
        return None
    if before.form is not None:
        composed = compose(before.form, step.linear)
        if composed is not None:
            return composed, before.base
    return step.linear, source


def _parallel_run(step: Step, facts: NodeFacts) -> Run:
    """`A x + B x` of two linear runs from the same node; the node itself counts as the identity."""
    (a, gain_a), (b, gain_b) = step.gains
    if gain_a != 1 or gain_b != 1 or a.shape != b.shape:
        return None
    identity = Diagonal(torch.ones(1, dtype=torch.float64), 1)
    runs = [[(facts[s.node].form, facts[s.node].base), (identity, s.node)] for s in (a, b)]
    for (first, base), (second, other) in itertools.product(*runs):
        if first is not None and second is not None and base is other:
            joined = add(first, second)
            if joined is not None:
                return joined, base
    return None


def _sized(call: Call, step: Step) -> Signal:
    """Bounds of the output's size: what the rule knows, what the offset and gains give, and what each implies for the others."""
    shape, dtype = call.shape, _dtype(call.node)
    if dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        raise Refused(
            f"{where(call.node)}: a cast to the narrow or integer type {dtype} rounds; keep float32 or float64"
        )
    reach = [gain * s.norm if gain else 0.0 for s, gain in step.gains]
    grown = hypot(*reach) if step.combine == "root" else sum(reach)
    norm = _least(step.norm, inflate(grown + step.offset) if step.gains else step.offset)
    row, peak = _least(step.row, norm), _least(step.peak, norm)
    peak = _least(peak, row)
    row = _least(row, inflate(sqrt(shape[-1] if shape else 1) * peak))
    norm = _least(norm, inflate(sqrt(prod(shape[:-1])) * row))
    low = -peak if isnan(step.low) else max(step.low, -peak)
    return Signal(call.node, shape, dtype, norm, row, peak, low, _part(call, step))


def _least(*values: float) -> float:
    return min((v for v in values if not isnan(v)), default=inf)


def _part(call: Call, step: Step) -> tuple[fx.Node, Tensor] | None:
    """Which entries of which tensor this one holds, where it is a choice of them (not for large tensors)."""
    if not isinstance(step.map, Copy) or not step.map.traced or len(call.node.all_input_nodes) != 1:
        return None
    source = step.gains[0][0]
    part = source.part
    if part is None:
        if not prod(call.shape) < source.numel <= 2_000_000:
            return None
        places = torch.arange(source.numel, dtype=torch.float64)
        part = source.node, places.reshape(source.shape)
    return part[0], part[1] if step.map.same else replay(call.node, part[1])


def winner(run: Propagation, node: fx.Node) -> Region | None:
    """The block that ends here and whose own bound is the one that counts in the product, if any.

    Args:
        run: the propagated program.
        node: the node in which the block ends.
    """
    for region in run.regions.get(node, ()):
        if (
            region.whole
            and log_product(log_up(region.bound), run.facts[region.source].product)
            <= run.facts[node].product
        ):
            return region
    return None


def elasticities(run: Propagation) -> dict[fx.Node, float]:
    """How much of a relative change of each node's constant reaches the total: `∂ log L/∂ log c`, by autograd."""
    logs: dict[fx.Node, Tensor] = {}

    def joined(terms: Iterable[tuple[fx.Node, float]], power: int) -> Tensor | None:
        kept = [logs[n] + log(gain) for n, gain in terms if gain > 0 and n in logs]
        return torch.logsumexp(power * torch.stack(kept), 0) / power if kept else None

    with torch.inference_mode(False), torch.enable_grad():
        change = {n: torch.zeros((), dtype=torch.float64, requires_grad=True) for n in run.facts}
        logs.update((node, change[node]) for node in run.program.inputs)
        for node in run.program.nodes:
            step, block = run.steps[node], winner(run, node)
            if block is None:
                terms = [(s.node, gain) for s, gain in step.gains]
                before = joined(terms, 2 if step.combine == "root" else 1)
            else:
                before = joined([(block.source, block.bound)], 1)
            if before is not None:  # else it is constant
                logs[node] = before + change[node]
        total = joined([(o, 1.0) for o in run.program.outputs], 2)
    if total is None:
        return dict.fromkeys(change, 0.0)
    slopes = torch.autograd.grad(total, list(change.values()), allow_unused=True)
    return {n: 0.0 if s is None else float(s) for n, s in zip(change, slopes, strict=True)}
