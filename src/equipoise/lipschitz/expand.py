"""Compositions recognised as one operation, and operations without a rule, replaced by what PyTorch computes them with.

`torch.kron`, `torch.einsum`, an LSTM or a Fourier transform with its options are compositions; PyTorch writes them out,
operation by operation, and each of those has a rule. The graph that is compared with the model (see `capture`) is the one
written out. Constants that only the written-out operations compute are kept in float64 as well, so that bounds hold for the
operation itself and not for a rounded way to compute it.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core.errors import Refused, one_line
from equipoise.lipschitz.idioms import idiom
from equipoise.lipschitz.modes import refuse_mutation
from equipoise.lipschitz.places import where
from equipoise.lipschitz.rules.registry import has_rule
from equipoise.lipschitz.values import functional

_aten = torch.ops.aten

_ADD = {_aten.add.Tensor, _aten.add.Scalar}
#: over how many dimensions they pool
_POOLS = {_aten.avg_pool1d.default: 1, _aten.avg_pool2d.default: 2, _aten.avg_pool3d.default: 3}
_MUL, _DIV = {_aten.mul.Tensor}, {_aten.div.Tensor}


def root_mean_square(node: fx.Node) -> tuple[fx.Node, int, float] | None:
    """`x·rsqrt(mean(x², −1) + ε)` or `x/√(mean(x², −1) + ε)`: the node of x, the length of its rows, and ε."""
    if node.op != "call_function" or node.kwargs or len(node.args) != 2:
        return None
    pairs = [node.args, node.args[::-1]] if node.target in _MUL else [node.args] if node.target in _DIV else []
    for x, size in pairs:
        inner: Any = _under_root(size, -0.5 if node.target in _MUL else 0.5)
        if not isinstance(x, fx.Node) or not isinstance(inner, fx.Node) or inner.target not in _ADD or inner.kwargs:
            continue
        if not isinstance(inner.args[1], float) or not inner.args[1] > 0:
            continue
        mean, value = inner.args[0], x.meta.get("val")
        if isinstance(mean, fx.Node) and isinstance(value, torch.Tensor) and value.dim() and _mean_of_squares(mean, x):
            return x, int(value.shape[-1]), inner.args[1]
    return None


def _under_root(node: Any, power: float) -> Any:
    """v, where the node is v^power for power ±½, however it is written."""
    match node.target if isinstance(node, fx.Node) and not node.kwargs else None, power:
        case (_aten.sqrt.default, 0.5) | (_aten.rsqrt.default, -0.5):
            return node.args[0]
        case _aten.pow.Tensor_Scalar, _ if node.args[1] == power:
            return node.args[0]
        case _aten.reciprocal.default, -0.5:
            return _under_root(node.args[0], 0.5)
        case _aten.mul.Tensor, -0.5 if node.args[1] == 1:  # 1/√v is exported as a reciprocal times 1
            return _under_root(node.args[0], power)
    return None


def _mean_of_squares(mean: fx.Node, x: fx.Node) -> bool:
    """Whether this is the mean of x² over the last dimension, which is kept."""
    if mean.target is not _aten.mean.dim or mean.kwargs or len(mean.args) != 3 or mean.args[2] is not True:
        return False
    dims, squared = mean.args[1], mean.args[0]
    if list(dims) not in ([-1], [x.meta["val"].dim() - 1]) or not isinstance(squared, fx.Node):  # type: ignore[arg-type]
        return False
    match functional(squared.target):
        case _aten.square.default:
            return squared.args == (x,)
        case _aten.pow.Tensor_Scalar:
            return squared.args == (x, 2)
        case _aten.mul.Tensor:
            return squared.args == (x, x)
    return False


@dataclass(frozen=True)
class Pooling:
    """`(Σ x^p)^(1/p)` over windows, as `F.lp_pool2d` writes it: of this node, p, and size and step per dimension."""

    x: fx.Node
    order: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]


def power_pooling(node: fx.Node) -> Pooling | None:
    """`(sign(a)·relu(|a|)·k)^(1/p)` of `a = avg_pool(x^p)` over k entries: norms of windows for an even p, sums for p = 1."""
    match node.target, node.args, node.kwargs:
        case _aten.pow.Tensor_Scalar, (fx.Node() as scaled, float() as inverse), {}:
            pass
        case _:
            return None
    average = _signed(scaled)
    if average is None or average.target not in _POOLS or average.kwargs:
        return None
    given: Any = average.args
    powered, sizes, *rest = given
    if not isinstance(powered, fx.Node) or powered.target is not _aten.pow.Tensor_Scalar or powered.kwargs:
        return None
    x, order = powered.args
    if not isinstance(x, fx.Node) or not isinstance(order, int | float) or not _plain(order) or inverse != 1 / order:
        return None
    sizes, steps = tuple(sizes), tuple(rest[0] if rest and rest[0] else sizes)
    if {len(sizes), len(steps)} != {_POOLS[average.target]} or scaled.args[1] != math.prod(sizes):
        return None
    if any(_set(value) for value in rest[1:2]) or len(rest) > 3:
        return None
    spatial = x.meta["val"].shape[-len(sizes) :]
    cut = len(rest) > 2 and rest[2] and any((n - k) % s for n, k, s in zip(spatial, sizes, steps, strict=True))
    return None if cut else Pooling(x, int(order), sizes, steps)


def _plain(order: float) -> bool:
    """Whether x^p needs no sign."""
    return order == 1 or (order >= 2 and order % 2 == 0)


def _set(value: Any) -> bool:
    return any(value) if isinstance(value, list | tuple) else bool(value)


def _signed(scaled: fx.Node) -> fx.Node | None:
    """a in `sign(a)·relu(|a|)·k`."""
    match scaled.target, scaled.args:
        case _aten.mul.Tensor, (fx.Node() as both, int() | float()) if both.target is _aten.mul.Tensor:
            match both.args:
                case (fx.Node() as sign, fx.Node() as size) if sign.target is _aten.sign.default:
                    inner: Any = size.args[0] if size.target is _aten.relu.default else None
                    same = inner is not None and inner.target is _aten.abs.default and inner.args == sign.args
                    return sign.args[0] if same else None  # type: ignore[return-value]
    return None


def is_composition(node: fx.Node) -> bool:
    """Whether the node ends a composition that is one operation."""
    return node.op == "call_function" and any(
        find(node) is not None for find in (root_mean_square, power_pooling, idiom)
    )


def recognised(graph: fx.Graph, added: set[fx.Node]) -> None:
    """Replace compositions in the graph by the operation they are."""
    for node in list(graph.nodes):
        if not is_composition(node):
            continue
        with graph.inserting_before(node):
            made = _normalised(graph, node) or _activated(graph, node) or _pooled(graph, node)
        made[-1].meta = dict(node.meta)
        node.replace_all_uses_with(made[-1])
        added.update(made)


def _normalised(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    found = root_mean_square(node)
    if found is None:
        return []
    x, size, eps = found
    return [graph.call_function(_aten.rms_norm.default, (x, [size], None, eps))]


def _activated(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The operations of a written-out activation, one after the other; all have its shape."""
    made: list[fx.Node] = []
    for target, args, keywords in idiom(node) or ():
        made.append(graph.call_function(target, tuple(made[-1] if a is None and made else a for a in args), keywords))
        made[-1].meta = dict(node.meta)
    return made


def _pooled(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Windows along every dimension, and their norms or sums."""
    found = power_pooling(node)
    assert found is not None
    made, value, dims = [found.x], found.x.meta["val"], len(found.sizes)
    first = value.dim() - dims
    for i, (size, step) in enumerate(zip(found.sizes, found.steps, strict=True)):
        made.append(graph.call_function(_aten.unfold.default, (made[-1], first + i, size, step)))
        made[-1].meta = {**node.meta, "val": (value := value.unfold(first + i, size, step))}
    last = list(range(-dims, 0))
    norm, total = _aten.linalg_vector_norm.default, _aten.sum.dim_IntList
    given = (made[-1], last) if found.order == 1 else (made[-1], float(found.order), last)
    made.append(graph.call_function(total if found.order == 1 else norm, given))
    return made[1:]


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
