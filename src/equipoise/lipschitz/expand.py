"""Operations without a rule of their own, replaced in the graph by what PyTorch itself computes them with.

`torch.kron`, `torch.einsum`, an LSTM or a Fourier transform with its options are compositions; PyTorch writes them out,
operation by operation, and each of those has a rule. The graph that is compared with the model (see `capture`) is the one
written out. Constants that only the written-out operations compute are kept in float64 as well, so that bounds hold for the
operation itself and not for a rounded way to compute it.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core.errors import Refused, one_line
from equipoise.lipschitz.memory import refuse_mutation
from equipoise.lipschitz.places import where
from equipoise.lipschitz.recognise import is_composition, recognised
from equipoise.lipschitz.rules.registry import has_rule
from equipoise.lipschitz.values import functional

_aten = torch.ops.aten
#: operations with a kernel of their own that PyTorch also knows to write out
_KNOWN = (
    _aten.addcmul, _aten.addcdiv, _aten.baddbmm, _aten.addmm, _aten.addmv, _aten.addr, _aten.dot, _aten.rot90, _aten.dist,
    _aten.aminmax, _aten.take, _aten.index_add, _aten.index_copy, _aten.index_fill, _aten.linalg_cross,

)  # fmt: skip


def _bilinear(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a_i·W_oij·b_j`: one matrix product with the weight, one with b."""
    outputs, left, right = weight.shape
    rows = torch.matmul(a, weight.permute(1, 0, 2).reshape(left, outputs * right)).unflatten(-1, (outputs, right))
    found = torch.matmul(rows, b.unsqueeze(-1)).squeeze(-1)
    return found if bias is None else found + bias


def _addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * x + alpha * torch.bmm(a, b).sum(0)


#: operations that PyTorch does not write out, and what they are
_OWN: dict[Any, Callable[..., Tensor]] = {_aten.bilinear.default: _bilinear, _aten.addbmm.default: _addbmm}


def _general(node: fx.Node, moving: set[fx.Node]) -> bool:
    """Whether a matrix product with an addend is more than a dense layer: factors, or weights that depend on the input."""
    return bool(node.kwargs) or any(node.args[i] in moving for i in (0, 2))


#: operations whose rule does not cover every way to call them
_BEYOND: dict[Any, Callable[[fx.Node, set[fx.Node]], bool]] = {_aten.addmm.default: _general}


@dataclass(frozen=True)
class Written:
    """A graph with nothing left to write out: where the nodes of the old one are, what was added, and constants in it."""

    graph: fx.Graph
    places: dict[fx.Node, fx.Node]
    added: set[fx.Node] = field(default_factory=set)
    constants: dict[fx.Node, Any] = field(default_factory=dict)


def written_out(graph: fx.Graph, inputs: Iterable[fx.Node]) -> Written:
    """The graph itself, or a copy of it in which compositions without a rule are written out."""
    moving, composed = set(inputs), []
    for node in graph.nodes:
        if any(i in moving for i in node.all_input_nodes):
            moving.add(node)
            if _is_composed(node, moving):
                refuse_mutation(node, moving)
                composed.append(node)
    known = any(is_composition(node) for node in graph.nodes)
    if not composed and not known:
        return Written(graph, {n: n for n in graph.nodes})
    copied = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    copied.output(copied.graph_copy(graph, places))
    result = Written(copied, places)
    for node in composed:
        _replace(places[node], result)
    recognised(copied, result.added)
    return result


def _is_composed(node: fx.Node, moving: set[fx.Node]) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    plain = functional(node.target)
    if has_rule(node):
        return plain in _BEYOND and _BEYOND[plain](node, moving)
    return plain in _OWN or plain._can_decompose() or plain.overloadpacket in _KNOWN


@functools.cache
def _table() -> dict[Any, Any]:
    return dict(torch._decomp.get_decompositions(list(_KNOWN)))


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Without fused kernels for recurrent layers."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _replace(node: fx.Node, result: Written) -> None:
    """Put the operations that a node is made of in its place."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    sources, plain = node.all_input_nodes, functional(node.target)
    operation = _OWN.get(plain, plain)

    def run(*given: Any) -> Any:
        known = dict(zip(sources, given, strict=True))
        args: Any = fx.node.map_arg(node.args, known.__getitem__)
        return operation(*args, **fx.node.map_arg(node.kwargs, known.__getitem__))

    values = [s.meta["val"] for s in sources]
    try:
        with torch.no_grad(), _plain_kernels(), enable_python_dispatcher():
            traced = make_fx(run, decomposition_table=_table())(*values)
    except Exception as error:
        raise Refused(
            f"{where(node)}: {node.target} has no Lipschitz rule and cannot be written out as operations that have one "
            f"({type(error).__name__}: {one_line(error)[:160]}); write it with other operations, or register a rule"
        ) from error
    placed = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), sources, strict=True))
    outputs: Any = None
    with result.graph.inserting_before(node):
        for part in traced.graph.nodes:
            if part.op == "output":
                outputs = fx.node.map_arg(part.args[0], placed.__getitem__)
            elif part.op != "placeholder":
                placed[part] = _inserted(part, node, traced, placed, result)
    _redirect(node, outputs)
    result.graph.erase_node(node)


def _inserted(
    part: fx.Node, node: fx.Node, traced: fx.GraphModule, placed: dict[fx.Node, fx.Node], result: Written
) -> fx.Node:
    if part.op == "get_attr":
        found = result.graph.create_node("get_attr", str(part.target))
        found.meta["val"] = result.constants[found] = getattr(traced, str(part.target))
    else:
        found = result.graph.node_copy(part, placed.__getitem__)
    found.meta |= {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
    result.added.add(found)
    return found


def _redirect(node: fx.Node, outputs: Any) -> None:
    """Whatever read the node reads its parts' results."""
    if isinstance(outputs, fx.Node):
        node.replace_all_uses_with(outputs)
        return
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise Refused(f"{where(node)}: its results are used together by {user.name!r}; take them apart first")
        user.replace_all_uses_with(outputs[user.args[1]])
        user.graph.erase_node(user)
