"""What a rule sees (`Call`), what it says (`Step`), and the one registry that maps operations to rules."""

import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot, inf, prod
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, fx

from equipoise.core import (
    Bound,
    Bracket,
    InputError,
    Refused,
    Shape,
    as_upper,
    deflate,
    flat_tensors,
    float64,
    frobenius,
    guarded,
    inflate,
    require_one_of,
    root,
)
from equipoise.lipschitz.operations import Copy, Map, Opaque, Padded, Scaled, Weighted
from equipoise.lipschitz.values import Lookup, where
from equipoise.maps.linear import Linear
from equipoise.maps.pointwise import Pointwise
from equipoise.norms.spectral import Cache, bracket

#: what to try where an operation has a constant on bounded inputs only
BALL = "state an input ball: lipschitz_bound(..., ball=R), or audit --ball R; smoothing (`certify`) needs no bound"


@dataclass(frozen=True, eq=False)
class Signal:
    """A tensor of the graph that depends on the input, with what is known about its size on the stated domain.

    `norm` bounds the ℓ2 norm of the whole tensor, `row` that of every row (last dimension), `peak` the size of every entry;
    infinite where unknown. No entry is below `low`. `part` says which entries of which other tensor this one holds, where
    it is a selection of them.
    """

    node: fx.Node
    shape: Shape
    dtype: torch.dtype
    norm: float = inf
    row: float = inf
    peak: float = inf
    low: float = -inf
    part: tuple[fx.Node, Tensor] | None = field(default=None, repr=False)

    @property
    def numel(self) -> int:
        """Number of entries."""
        return prod(self.shape)


@dataclass(frozen=True)
class Step:
    """The answer of a rule: `‖f(x) − f(x')‖ ≤ Σ gain·‖x_i − x'_i‖`, or the root of the sum of squares for `root`.

    `gains` may name any earlier signal, not only direct inputs. `map` is what the operation is; without one nothing but the
    gains is used, and `label` is only shown. `offset` is an upper bound of ‖f(0)‖ (infinite: unknown), from which the engine
    bounds the size of the output on a ball; `norm`, `row`, `peak`, `low` are bounds the rule knows itself. `slopes` is short for
    `map=Pointwise(slopes)`: a function of each entry alone with slopes in that interval. `by_row`: each row (last dimension) of
    the result is a function of the same row of the one input, with the same constant.
    """

    gains: tuple[tuple[Signal, float], ...]
    label: str
    combine: Literal["sum", "root"] = "sum"
    bracket: Bracket | None = None
    offset: float = inf
    norm: float = inf
    row: float = inf
    peak: float = inf
    low: float = -inf
    map: Map = field(default_factory=Opaque)
    slopes: tuple[float, float] | None = None
    note: str = ""
    by_row: bool = False

    def __post_init__(self) -> None:
        require_one_of(("sum", "root"), combine=self.combine)
        if any(isinstance(gain, Bound | Bracket) for _, gain in self.gains):
            gains = tuple((s, as_upper(gain, "gain")) for s, gain in self.gains)
            object.__setattr__(self, "gains", gains)
        if isinstance(self.map, Pointwise):
            object.__setattr__(self, "slopes", self.map.slopes)
        elif self.slopes is not None:
            if not isinstance(self.map, Opaque) or len(self.gains) != 1:
                raise InputError(
                    f"{self.label}: slopes belong to a function of one tensor, entry by entry"
                )
            object.__setattr__(self, "map", Pointwise(self.slopes))

    @property
    def curve(self) -> Pointwise | None:
        """The activation, where the operation is one."""
        return self.map if isinstance(self.map, Pointwise) else None

    @property
    def linear(self) -> Linear | None:
        """The operator as a value, where the operation is affine and has one."""
        return self.map.form if isinstance(self.map, Weighted | Scaled | Padded) else None


def range_step(
    x: Signal, gain: float, label: str, map: Map | None = None, row: float = inf
) -> Step:
    """The step of an operation that is 0 at 0, and whose entries never leave the range of those of x.

    Args:
        x: the one input.
        gain: the Lipschitz constant.
        label: shown in the report.
        map: what the operation is, where that is known.
        row: bound of the ℓ2 norm of every row of the result.
    """
    return Step(
        ((x, gain),), label, offset=0.0, peak=x.peak, row=row, low=x.low, map=map or Opaque()
    )


def unchanged(x: Signal) -> Step:
    """The step of an operation that is the identity here: a cast, dropout in evaluation."""
    return range_step(x, 1.0, "identity", Copy(same=True, traced=True), x.row)


class Call:
    """One node with its arguments by schema name: `Signal` where they depend on the input, values elsewhere."""

    def __init__(self, node: fx.Node, lookup: Lookup, cache: Cache) -> None:
        self.node, self.lookup, self.cache = node, lookup, cache
        self.arguments = bind(node, lookup)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The argument, or `default` where the schema has none of that name.

        Args:
            name: of the argument in the schema.
            default: returned where there is none.
        """
        return self.arguments.get(name, default)

    def bracket(self, form: Linear) -> Bracket:
        """Bracket of the norm of a linear form, computed once for shared weights."""
        return bracket(form, self.cache)

    @property
    def shape(self) -> Shape:
        """Shape of the output."""
        return shape_of(self.node)

    @property
    def x(self) -> Signal:
        """The first argument, which must depend on the input."""
        return self.signal(next(iter(self.arguments)))

    @property
    def source(self) -> Signal:
        """The first argument that depends on the input."""
        return next(v for v in self.arguments.values() if isinstance(v, Signal))

    def signal(self, name: str) -> Signal:
        """An argument that must depend on the input."""
        value = self.arguments[name]
        if not isinstance(value, Signal):
            self.refuse(f"argument {name!r} is constant while another one depends on the input")
        return value

    def constant(self, name: str) -> Any:
        """An argument that must not depend on the input."""
        value = self.arguments.get(name)
        if isinstance(value, Signal):
            self.refuse(
                f"argument {name!r} depends on the input", "keep weights independent of the input"
            )
        return value

    def refuse(
        self, why: str, todo: str = "bound the parts around it separately, or register a rule"
    ) -> NoReturn:
        """Refuse with the node, its module, its source line, the reason and what to do.

        Args:
            why: the reason.
            todo: what to do instead.
        """
        raise Refused(f"{where(self.node)}: {self.node.target}: {why}; {todo}")


Rule = Callable[[Call], Step]
_RULES: dict[str, Rule] = {}
#: rules for operations on complex numbers
_COMPLEX: dict[str, Rule] = {}


def _keeps(table: dict[str, Rule], *names: str, override: bool = False) -> Callable[[Rule], Rule]:
    """Decorator: put a function into the table under these names, as in the graph, e.g. `aten.relu.default`."""

    def keep(function: Rule) -> Rule:
        for name in names:
            if name in table and not override:
                raise InputError(
                    f"{name} has a rule already; use register_rule(..., override=True) to replace it"
                )
            table[name] = function
        return function

    return keep


#: decorators: this function bounds these operations; where a complex number goes in or comes out
rule = functools.partial(_keeps, _RULES)
complex_rule = functools.partial(_keeps, _COMPLEX)


def register_rule(*names: str, override: bool = False) -> Callable[[Rule], Rule]:
    """Teach `lipschitz_bound` an operation: the decorated function gets a `Call` and returns a `Step`.

    The guarantee of the total is then yours as well: attack the rule before trusting it.

    >>> @register_rule("mylib.double.default")
    ... def double(call):
    ...     return Step(((call.signal("x"), 2.0),), "doubling")
    >>> _ = _RULES.pop("mylib.double.default")
    """
    if not names or not all(isinstance(n, str) and n.count(".") >= 2 for n in names):
        raise InputError(
            f"name operations as namespace.op.overload, e.g. 'aten.relu.default'; got {names}"
        )
    return _keeps(_RULES, *names, override=override)


def find_rule(node: fx.Node) -> Rule:
    """The rule of a node's operation; refused where there is none."""
    function = rule_of(node)
    if function is not None:
        return function
    name = _name(node.target)
    kind = " on complex numbers" if _is_complex(node) else ""
    raise Refused(
        f"{where(node)}: no Lipschitz rule for {name}{kind}; write it with operations that have one, or register yours "
        f'with @equipoise.lipschitz.register_rule("{name}")'
    )


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a node's operation, if it has one."""
    table, name = _COMPLEX if _is_complex(node) else _RULES, _name(node.target)
    if name not in table:
        _load_installed()
    return table.get(name)


def _is_complex(node: fx.Node) -> bool:
    """Whether the node reads or makes complex numbers."""
    nodes = (node, *node.all_input_nodes)
    return any(t.is_complex() for n in nodes for t in flat_tensors(n.meta.get("val")))


def _name(target: Any) -> str:
    return str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))


@functools.cache
def _load_installed() -> None:
    """Rules of installed packages, once: entry points of the group `equipoise.rules`, modules that register or mappings."""
    for entry in importlib.metadata.entry_points(group="equipoise.rules"):
        loaded = guarded(entry.load, f"the rules {entry.value} of an installed package")
        if isinstance(loaded, Mapping):
            for name, function in loaded.items():
                if name not in _RULES:
                    register_rule(name)(function)


def known_operations() -> tuple[str, ...]:
    """Names of every operation that has a rule, those of installed packages included."""
    _load_installed()
    return tuple(sorted(_RULES))


def shape_of(node: fx.Node) -> Shape:
    """Static shape of a node's tensor (of the first, for several)."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        value = value[0]
    if not isinstance(value, Tensor):
        raise Refused(f"{where(node)}: its value is a {type(value).__name__}, not a tensor")
    if not all(isinstance(s, int) for s in value.shape):
        raise Refused(f"{where(node)}: its shape depends on the data")
    return tuple(value.shape)


def norm_of(values: Tensor | None) -> float:
    """Upper bound of the ℓ2 norm of a constant tensor."""
    if values is None or values.numel() == 0:
        return 0.0
    wide = values.detach() if values.is_complex() else values.detach().double()
    return float(frobenius(wide.reshape(1, -1)))


def largest(value: Tensor | complex) -> float:
    """Upper bound of the entries of a constant, in modulus; 0 if it has none."""
    kind = torch.complex128 if isinstance(value, complex) else torch.float64
    c = value if isinstance(value, Tensor) else torch.tensor(value, dtype=kind)
    if c.numel() == 0:
        return 0.0
    if c.is_complex():
        return inflate(float(c.detach().to(torch.complex128).abs().max()))
    return float(c.detach().abs().max())


def lower(x: float) -> float:
    """A little below a number of either sign, so that it covers the rounding of a few operations."""
    return -inflate(-x) if x < 0 else deflate(x)


def copies(signal: Signal, shape: Shape) -> float:
    """√ of how often broadcasting to `shape` repeats every entry, rounded up.

    Args:
        signal: the tensor that is broadcast.
        shape: of the result.
    """
    times = prod(shape) // max(1, signal.numel)
    return root(max(1, times))


def as_signal(call: "Call", c: Tensor) -> Signal:
    """A constant, real in float64 or complex, with the bounds of its size, as signals have them.

    Args:
        call: the node that reads it.
        c: the constant, not empty.
    """
    row = float(frobenius(c, (-1,)).max()) if c.dim() else largest(c)
    low = -inf if c.is_complex() else float(c.min())
    return Signal(call.node, tuple(c.shape), c.dtype, norm_of(c), row, largest(c), low)


def choice_step(
    call: "Call", values: Iterable[Any], label: str, map: Map | None = None, *, spread: bool = True
) -> Step:
    """The step of an operation that takes every entry of its result from one of its operands.

    Args:
        call: the node.
        values: the operands: signals, constant tensors and numbers.
        label: shown in the report.
        map: what the operation is, where that is known.
        spread: whether the operands are broadcast to the shape of the result; else each entry is taken once at most.
    """
    gains: list[tuple[Signal, float]] = []
    fixed: list[Signal] = []
    for value in values:
        if isinstance(value, Signal):
            gains.append((value, copies(value, call.shape) if spread else 1.0))
        elif not isinstance(value, Tensor) or value.numel():
            c = value if isinstance(value, Tensor) and value.is_complex() else float64(value)
            fixed.append(as_signal(call, torch.broadcast_to(c, call.shape) if spread else c))
    every = [*fixed, *(s for s, _ in gains)]
    offset = inflate(hypot(*(s.norm for s in fixed)))
    return Step(
        tuple(gains),
        label,
        "root",
        offset=offset,
        norm=inflate(hypot(*(gain * s.norm for s, gain in gains), offset)),
        peak=max(s.peak for s in every),
        low=min(s.low for s in every),
        map=map or Opaque(),
    )


def per_axis(value: Any, dims: int, default: Sequence[int] = ()) -> Shape:
    """One number per axis, from one for all, one each, or none at all.

    Args:
        value: the argument of a convolution or pooling.
        dims: number of axes.
        default: what counts where the argument is None or empty.
    """
    values = (
        tuple(value) if isinstance(value, list | tuple) else () if value is None else (int(value),)
    )
    values = values or tuple(default)
    return values * dims if len(values) == 1 else values


def bind(node: fx.Node, lookup: Lookup) -> dict[str, Any]:
    """The arguments of an operation by name, with their defaults.

    Args:
        node: the operation.
        lookup: what stands for a node among the arguments.
    """
    args = fx.node.map_arg(node.args, lookup)
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # `getitem`
        return {str(i): value for i, value in enumerate(args)}
    defaults = {a.name: a.default_value for a in schema.arguments}
    return defaults | dict(zip(defaults, args, strict=False)) | fx.node.map_arg(node.kwargs, lookup)
