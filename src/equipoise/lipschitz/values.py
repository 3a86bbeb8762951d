"""Captured operations run on values, never in place, and in float64 as the real functions they stand for.

What is promised about an operation is promised about the real function it computes up to rounding. One operation of PyTorch
is another function beyond rounding: `softplus` returns x above `βx = threshold`, a jump of `log(1 + e^−20)/β = 2·10⁻⁹/β`.
`exact` replaces it by `log(1 + e^{βx})/β`, so that enclosures, attacks and rules speak of one function; and `detach`, which
hides from gradients what it does, by the identity that it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """`log(1 + e^{βx})/β`, without PyTorch's switch to the identity."""
    return torch.logaddexp(beta * x, torch.zeros_like(x)) / beta


#: operations that are not, in value or gradient, the function promised
EXACT: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.softplus.default: softplus,
    torch.ops.aten.detach.default: torch.ops.aten.alias.default,
}


_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def _widened(argument: Any) -> Any:
    return _WIDE.get(argument, argument) if isinstance(argument, torch.dtype) else argument


def in_float64(value: Any) -> Any:
    """A floating or complex constant in double precision; anything else as it is."""
    if isinstance(value, Tensor) and value.is_complex():
        return value.to(torch.complex128)
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def is_mutable(node: fx.Node) -> bool:
    """Whether the operation writes into one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def functional(target: Any) -> Any:
    """The operation that does the same without writing into its first argument: `aten.add.Tensor` of `aten.add_.Tensor`.

    >>> functional(torch.ops.aten.add_.Tensor)
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return target
    space, name = schema.name.split("::")
    packet = getattr(getattr(torch.ops, space), name.removesuffix("_"), None) if name.endswith("_") else None
    found = getattr(packet, target._overloadname, None)
    return target if found is None or found._schema.is_mutable else found


def perform(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], *, exact: bool = False) -> Any:
    """One operation on these arguments, none of which is overwritten.

    `exact`: in float64, also where the operation names a narrower type (`x.mean(-1, dtype=torch.float32)`, casts).
    """
    operation: Any = functional(node.target)
    if exact:
        args, kwargs = [_widened(a) for a in args], {name: _widened(a) for name, a in kwargs.items()}
    schema = getattr(operation, "_schema", None)
    if schema is not None and schema.is_mutable and args:
        args = (args[0].clone(), *args[1:])
    return (EXACT.get(operation, operation) if exact else operation)(*args, **kwargs)


def replay(node: fx.Node, x: Tensor) -> Any:
    """An operation with one tensor among its arguments, on another one; real functions, nothing overwritten."""
    args: Any = fx.node.map_arg(node.args, lambda _: x)
    return perform(node, args, fx.node.map_arg(node.kwargs, lambda _: x), exact=True)


def exactly(node: fx.Node, given: Mapping[fx.Node, Any], known: Callable[[fx.Node], Any]) -> Any:
    """An operation in float64 on the values given of its operands, and on constants that are `known`."""

    def value(operand: fx.Node) -> Any:
        return given[operand] if operand in given else in_float64(known(operand))

    args: Any = fx.node.map_arg(node.args, value)
    return perform(node, args, fx.node.map_arg(node.kwargs, value), exact=True)


def first_of(result: Any) -> Tensor:
    """The values of an operation that returns indices too."""
    found: Tensor = result[0] if isinstance(result, tuple | list) else result
    return found


def evaluate(
    nodes: Sequence[fx.Node],
    known: Callable[[fx.Node], Any],
    values: dict[fx.Node, Any],
    *,
    exact: bool = False,
    in_place: bool = False,
) -> dict[fx.Node, Any]:
    """Run the nodes in order from `values` of the inputs; `known` gives the constants. What nothing reads any more is dropped.

    The nodes that an output of the graph reads are kept. `in_place` runs the operations as they are, writes included.
    """
    left = {n: len(n.users) for n in (*values, *nodes)}

    def value(node: fx.Node) -> Any:
        return values[node] if node in values else known(node)

    for node in nodes:
        args: Any = fx.node.map_arg(node.args, value)
        kwargs = fx.node.map_arg(node.kwargs, value)
        values[node] = node.target(*args, **kwargs) if in_place else perform(node, args, kwargs, exact=exact)  # type: ignore[operator]
        for source in set(node.all_input_nodes):
            if source in left:
                left[source] -= 1
                if left[source] == 0:
                    values.pop(source, None)
    return values
