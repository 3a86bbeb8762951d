"""Nodes of a captured graph: where they come from, and how they run on values, in float64 as the real functions they stand for.

What is promised about an operation is promised about the real function it computes up to rounding. One operation of PyTorch
is another function beyond rounding: `softplus` returns x above `βx = threshold`, a jump of `log(1 + e^−20)/β = 2·10⁻⁹/β`.
`exact` replaces it by `log(1 + e^{βx})/β`, so that enclosures, attacks and rules speak of one function; and `detach`, which
hides from gradients what it does, by the identity that it is.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.onnx.network import OnnxNode


def aten_name(node: Any) -> str:
    """`relu.default` for a node that runs an operation of aten; empty for anything else."""
    target = getattr(node, "target", None)
    return str(target).removeprefix("aten.") if isinstance(target, torch._ops.OpOverload) else ""


def where(node: fx.Node) -> str:
    """`node 'relu' (module features.1, file.py line 3)`: what every refusal starts with."""
    path, line = module_path(node), source_line(node)
    place = f"module {path}" if path else "the model's own forward"
    if path and _from_onnx(node):
        place, line = f"ONNX node {path!r}", ""  # the line would be one of the importer
    return f"node {node.name!r} ({place}{', ' + line if line else ''})"


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module that runs this node; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    entries = [str(entry[0]) for entry in stack.values()]
    return entries[-1].split("@")[0] if entries else ""


def _from_onnx(node: fx.Node) -> bool:
    """Whether the innermost module is a node of an ONNX file."""
    kind = [entry[1] for entry in (node.meta.get("nn_module_stack") or {}).values()][-1]
    return kind is OnnxNode or kind == f"{OnnxNode.__module__}.{OnnxNode.__qualname__}"


def source_line(node: fx.Node) -> str:
    """`file line N: code` of the innermost frame that is not PyTorch's own."""
    frames = re.findall(
        r'File "(.+)", line (\d+).*\n *(.*)', str(node.meta.get("stack_trace") or "")
    )
    own = [f for f in frames if "site-packages/torch/" not in f[0]] or frames
    if not own:
        return ""
    name, number, code = own[-1]
    return f"{name.rsplit('/', 1)[-1]} line {number}: {code}"


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """`log(1 + e^{βx})/β`, without PyTorch's switch to the identity.

    Args:
        x: any tensor.
        beta: β.
        threshold: not used; PyTorch's operation has it.
    """
    return torch.logaddexp(beta * x, torch.zeros_like(x)) / beta


Lookup = Callable[[fx.Node], Any]
_aten = torch.ops.aten
#: operations that are not, in value or gradient, the function promised
EXACT: dict[Any, Callable[..., Any]] = {
    _aten.softplus.default: softplus,
    _aten.detach.default: _aten.alias.default,
}
#: a view may not exist for the strides that other values have
_RESHAPES = (_aten.view.default, _aten._unsafe_view.default)


_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def _widened(argument: Any) -> Any:
    return _WIDE.get(argument, argument) if isinstance(argument, torch.dtype) else argument


def in_float64(value: Any) -> Any:
    """A floating or complex constant in double precision; anything else as it is."""
    return value.to(_WIDE.get(value.dtype, value.dtype)) if isinstance(value, Tensor) else value


def perform(node: fx.Node, value: Lookup, *, exact: bool = False) -> Any:
    """One operation on the values of its operands.

    Args:
        node: the operation.
        value: of every node that it reads.
        exact: in float64, also where the operation names a narrower type (`x.mean(-1, dtype=torch.float32)`, casts).
    """
    args = fx.node.map_arg(node.args, value)
    kwargs = fx.node.map_arg(node.kwargs, value)
    operation: Any = _aten.reshape.default if node.target in _RESHAPES else node.target
    if not exact:
        return operation(*args, **kwargs)
    kwargs = {name: _widened(a) for name, a in kwargs.items()}
    return EXACT.get(operation, operation)(*map(_widened, args), **kwargs)


def replay(node: fx.Node, x: Tensor) -> Any:
    """An operation with one tensor among its arguments, on another one; real functions, nothing overwritten.

    Args:
        node: the operation.
        x: the tensor that takes the place of its own.
    """
    return perform(node, lambda _: x, exact=True)


def exactly(node: fx.Node, values: Mapping[fx.Node, Any], constant: Lookup) -> Any:
    """An operation in float64.

    Args:
        node: the operation.
        values: of its operands.
        constant: gives the value of every other node that it reads.
    """
    return perform(
        node, lambda n: values[n] if n in values else in_float64(constant(n)), exact=True
    )


def first_of(result: Any) -> Tensor:
    """The values of an operation that returns indices too."""
    return result[0] if isinstance(result, tuple | list) else result
