"""The one reader of captured graphs in this package: affine maps and pointwise curves, as operators on flat vectors.

A `Network` is a list of nodes in order: the input, affine nodes with an adjoint and a version in absolute values, and
activations. Max pooling becomes affine maps and ReLUs, `max(a, b) = b + relu(a − b)`, window by window. What does
not fit is named in `Unsupported`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import fsum, prod

import torch
from torch import Tensor, fx

from equipoise.core.precision import frobenius, gamma, inflate, root
from equipoise.lipschitz.local.curves import Curve, Hinge, Sampled
from equipoise.lipschitz.operations import Copy, Largest
from equipoise.lipschitz.propagate import Propagation
from equipoise.lipschitz.rules import Call, Step
from equipoise.lipschitz.rules.registry import per_axis, shape_of
from equipoise.lipschitz.tangent import apply, roundoff, supported
from equipoise.maps.linear import Convolution, Matrix
from equipoise.maps.pointwise import Pointwise
from equipoise.norms.spectral import Cache

#: γ of a handful of operations: sums of branches, products with slopes
_SHORT = gamma(16, torch.float64)


#: entries up to which a map is kept as a matrix
MATERIALISED = 400_000


class Unsupported(Exception):
    """The graph has an operation that is neither affine nor pointwise; the text says which."""


@dataclass(eq=False)
class Affine:
    """`Σ W_i v_i + b` of earlier nodes; `gains` bound ‖W_i‖₂, `rows` every row's length (one source only).

    `run(values, offset, magnitude)` works on tensors of the graph's shapes: with the offset or without, in absolute
    values or not. Rounding of `run` and of its adjoint is at most `gamma` times the run in absolute values.
    """

    sources: tuple[int, ...]
    shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    run: Callable[[Sequence[Tensor], bool, bool], Tensor]
    gamma: float
    gains: tuple[float, ...]
    rows: Tensor | None = None
    matrices: tuple[Tensor, ...] | None = None
    root: bool = False

    def forward(
        self, values: Sequence[Tensor], offset: bool = False, magnitude: bool = False
    ) -> Tensor:
        """The map on flat vectors.

        Args:
            values: one flat vector per source.
            offset: whether b is added.
            magnitude: whether coefficients and b are taken in absolute value.
        """
        given = [v.reshape(s) for v, s in zip(values, self.shapes, strict=True)]
        return self.run(given, offset, magnitude).reshape(-1)

    def adjoint(self, rows: Tensor) -> tuple[Tensor, ...]:
        """`A W_i` for a batch of rows A, one per source; small maps become matrices the first time."""
        size = prod(self.shape)
        if self.matrices is None and size * sum(map(prod, self.shapes)) <= MATERIALISED:
            self.matrices = self._pull(torch.eye(size, dtype=torch.float64))
        if self.matrices is not None:
            return tuple(rows @ matrix for matrix in self.matrices)
        return self._pull(rows)

    def _pull(self, rows: Tensor) -> tuple[Tensor, ...]:
        zeros = [torch.zeros(s, dtype=torch.float64) for s in self.shapes]
        with torch.enable_grad():
            pull = torch.func.vjp(lambda *v: self.run(v, False, False), *zeros)[1]
            found = torch.func.vmap(pull)(rows.reshape(len(rows), *self.shape))
        found = found if rows.requires_grad else tuple(t.detach() for t in found)
        return tuple(
            t.reshape(len(rows), n) for t, n in zip(found, map(prod, self.shapes), strict=True)
        )

    @functools.cached_property
    def constant(self) -> Tensor:
        """b."""
        zeros = [torch.zeros(s, dtype=torch.float64) for s in self.shapes]
        return self.forward(zeros, offset=True)


@dataclass(frozen=True, eq=False)
class Activation:
    """A curve applied to every entry of an earlier node."""

    source: int
    curve: Curve


@dataclass(frozen=True, eq=False)
class Network:
    """Nodes in order; node 0 is the input, the last one the output; `places` says which graph node became which."""

    nodes: tuple[Affine | Activation | None, ...]
    sizes: tuple[int, ...]
    places: dict[fx.Node, int] = field(default_factory=dict)

    @functools.cached_property
    def activations(self) -> dict[int, Activation]:
        """The activations by index."""
        return {k: node for k, node in enumerate(self.nodes) if isinstance(node, Activation)}

    @property
    def last(self) -> int:
        """Index of the output."""
        return len(self.nodes) - 1

    @property
    def widest(self) -> int:
        """Entries of the largest node."""
        return max(self.sizes)

    @property
    def neurons(self) -> int:
        """Entries of all activations together."""
        return sum(self.sizes[k] for k in self.activations)


class _Builder:
    """Collects nodes; remembers which graph node became which."""

    def __init__(self) -> None:
        self.nodes: list[Affine | Activation | None] = []
        self.shapes: list[tuple[int, ...]] = []
        self.index: dict[fx.Node, int] = {}

    def add(self, node: Affine | Activation | None, shape: tuple[int, ...]) -> int:
        self.nodes.append(node)
        self.shapes.append(shape)
        return len(self.nodes) - 1

    def linear(self, source: int, run: Callable[[Tensor, bool], Tensor], gain: float) -> int:
        """A linear map with coefficients 0 and ±1, `run(values, magnitude)`.

        Args:
            source: index of the node that it reads.
            run: the map on a tensor of that node's shape; `magnitude` asks for coefficients in absolute value.
            gain: bound of its spectral norm.
        """
        before = self.shapes[source]
        shape = tuple(run(torch.zeros(before, dtype=torch.float64), False).shape)
        node = Affine(
            (source,),
            shape,
            (before,),
            lambda v, offset, magnitude: run(v[0], magnitude),
            _SHORT,
            (gain,),
        )
        return self.add(node, shape)


def read_network(run: Propagation, cache: Cache) -> Network:
    """The network of a propagated program with one input and one output; `Unsupported` where it is something else.

    Args:
        run: the propagated program.
        cache: of operator norms.
    """
    program = run.program
    if len(program.inputs) != 1 or len(program.outputs) != 1:
        raise Unsupported("the network has several inputs or outputs")
    builder = _Builder()
    source = program.inputs[0]
    builder.index[source] = builder.add(None, shape_of(source))

    # an activation may be several nodes, of which one rule reads the first and answers for the last
    needed = set(program.outputs)
    for node in reversed(program.nodes):
        if node in needed:
            needed.update(signal.node for signal, _ in run.steps[node].gains)
    for node in program.nodes:
        if node in needed:
            _read(builder, run.call(node, cache), run.steps[node])
    return Network(tuple(builder.nodes), tuple(map(prod, builder.shapes)), builder.index)


def _read(builder: _Builder, call: Call, step: Step) -> None:
    node = call.node
    source = builder.index.get(step.gains[0][0].node) if step.gains else None
    match step.map:
        case Copy(same=True) if source is not None:
            builder.index[node] = source
        case Largest(sliding=True) if "kernel_size" in call.arguments:
            builder.index[node] = _max_pool(builder, call, step)
        case Pointwise(everywhere=True) if (
            source is not None and step.gains[0][0].shape == call.shape
        ):
            builder.index[node] = builder.add(
                Activation(source, _curve(call, step.map, step.label)), call.shape
            )
        case Pointwise(everywhere=False):
            raise Unsupported(
                f"node {node.name!r} ({step.label}) has bounded slopes on a ball only"
            )
        case _ if supported(call, step):
            builder.index[node] = _affine(builder, call, step)
        case _:
            raise Unsupported(f"node {node.name!r} ({step.label}) is neither affine nor pointwise")


def _affine(builder: _Builder, call: Call, step: Step) -> int:
    signals = list(dict.fromkeys(s.node for s, _ in step.gains))
    shapes = tuple(next(s.shape for s, _ in step.gains if s.node is n) for n in signals)
    gains = tuple(inflate(fsum(g for s, g in step.gains if s.node is n)) for n in signals)

    def run(values: Sequence[Tensor], offset: bool, magnitude: bool) -> Tensor:
        return apply(
            call, step, dict(zip(signals, values, strict=True)), offset=offset, magnitude=magnitude
        )

    form, rows, matrices = step.linear, None, None
    if len(signals) == 1 and isinstance(form, Matrix):
        matrix = form.matrix.detach().double()
        rows = frobenius(matrix, (-1,)).repeat(prod(call.shape) // len(matrix))
        matrices = (matrix,) if prod(shapes[0]) == matrix.shape[1] else None
    elif len(signals) == 1 and isinstance(form, Convolution) and form.padding == "zeros":
        rows = frobenius(form.weight.detach().double().flatten(1), (-1,))
        rows = rows.repeat_interleave(prod(call.shape) // len(rows))
    size = roundoff(step) + _SHORT
    sources = tuple(builder.index[n] for n in signals)
    node = Affine(
        sources, call.shape, shapes, run, size, gains, rows, matrices, step.combine == "root"
    )
    return builder.add(node, call.shape)


def _curve(call: Call, curve: Pointwise, label: str) -> Curve:
    if curve.hinge is not None:
        left, right = (
            t if t.numel() == 1 else torch.broadcast_to(t, call.shape) for t in curve.hinge
        )
        if (left <= right).all():
            return Hinge(left.reshape(-1), right.reshape(-1))
    own = curve.function
    if own is None:
        raise Unsupported(
            f"node {call.node.name!r} ({label}) is not a function of one entry that can be sampled"
        )

    def function(z: Tensor) -> Tensor:
        return own(z.reshape(*z.shape[:-1], *call.shape)).reshape(z.shape)

    return Sampled(function, curve.slopes, curve.curvature)


def _max_pool(builder: _Builder, call: Call, step: Step) -> int:
    """A gather of all windows, then a tournament: `max(a, b) = b + relu(a − b)` halves the entries round by round."""
    assert isinstance(step.map, Largest)
    x = step.gains[0][0]
    windows = _windows(call, x.shape, step.map.dims)
    count = int(torch.bincount(windows.flatten()).max())
    at = builder.linear(builder.index[x.node], lambda v, _: v.reshape(-1)[windows], root(count))
    left, one = len(windows), torch.ones(1, dtype=torch.float64)
    while left > 1:
        half = left // 2
        gap = builder.linear(at, functools.partial(_difference, half), root(2))
        switch = builder.add(Activation(gap, Hinge(0 * one, one)), builder.shapes[gap])
        shapes = (builder.shapes[at], builder.shapes[switch])
        shape = (left - half, shapes[0][1])
        node = Affine(
            (at, switch), shape, shapes, functools.partial(_winner, half), _SHORT, (1.0, 1.0)
        )
        at, left = builder.add(node, shape), left - half
    return builder.linear(at, lambda v, _: v.reshape(call.shape), 1.0)


def _difference(half: int, v: Tensor, magnitude: bool) -> Tensor:
    """The first `half` rows less the next; in absolute values their sum."""
    a, b = v[:half], v[half : 2 * half]
    return a + b if magnitude else a - b


def _winner(half: int, values: Sequence[Tensor], offset: bool, magnitude: bool) -> Tensor:
    """The rows that were subtracted plus the ReLU, and the row left over, if any."""
    rows, switch = values
    return torch.cat([rows[half : 2 * half] + switch, rows[2 * half :]])


def _windows(call: Call, shape: tuple[int, ...], d: int) -> Tensor:
    """Flat input index of every window's entries, (entries, windows); padded places repeat an entry of the window."""
    kernel = per_axis(call["kernel_size"], d)
    stride = per_axis(call["stride"], d, kernel)
    padding = per_axis(call["padding"], d, (0,))
    dilation = per_axis(call["dilation"], d, (1,))

    index = torch.arange(prod(shape)).reshape(-1, *shape[-d:])
    for axis, out in enumerate(call.shape[-d:]):
        width = (kernel[axis] - 1) * dilation[axis] + 1
        # the last window may reach beyond the padding, or not reach the end
        right = max(0, (out - 1) * stride[axis] + width - index.shape[1] - padding[axis])
        around = [0] * (2 * index.dim() - 4) + [padding[axis], right]
        index = torch.nn.functional.pad(index, around, value=-1)
        index = index.unfold(1, width, stride[axis])[:, :out, ..., :: dilation[axis]]
        index = index.movedim(1, d)  # the next axis comes first, its taps last
    entries = index.reshape(-1, prod(kernel)).T
    return torch.where(entries < 0, entries.amax(0), entries)
