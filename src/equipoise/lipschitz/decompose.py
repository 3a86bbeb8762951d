"""Compositions recognised as one operation, and operations without a rule replaced by what PyTorch computes them with.

`torch.kron`, `torch.einsum`, an LSTM or a Fourier transform with its options are compositions: PyTorch writes them out,
operation by operation, and each of those has a rule. The other way round, people and exporters write out activations and
normalisations (`x·σ(βx)`, `x·(1 + erf(kx))/2`, `x·rsqrt(mean(x²) + ε)`): these become the one operation they are.

Constants that only the written-out operations compute are kept in float64 as well, so that bounds hold for the operation
itself and not for a rounded way to compute it. Numbers of Python are read in the dtype in which PyTorch computes.
"""

from __future__ import annotations

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
from equipoise.lipschitz.rules.registry import has_rule
from equipoise.lipschitz.values import where

_aten = torch.ops.aten

#: an operation, its arguments and its keywords; None stands for the result of the one before
Chain = list[tuple[Any, tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Decomposed:
    """A graph with nothing left to write out: where the nodes of the old one are, what was added, and constants in it."""

    graph: fx.Graph
    places: dict[fx.Node, fx.Node]
    added: set[fx.Node] = field(default_factory=set)
    constants: dict[fx.Node, Any] = field(default_factory=dict)


def decompose(graph: fx.Graph, inputs: Iterable[fx.Node]) -> Decomposed:
    """A copy of the graph in which every operation on the inputs has a rule, as far as that can be done.

    Args:
        graph: without operations that write in place.
        inputs: the placeholders that the bound is about.
    """
    copied = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    copied.output(copied.graph_copy(graph, places))
    result = Decomposed(copied, places)
    fresh = [node for node in copied.nodes if is_fresh(node)]
    for node in fresh:
        node.target = _IN_PLACE[node.target]
    for node in list(copied.nodes):
        if node.target is _aten._native_batch_norm_legit_no_training.default:
            _restore_batch_norm(node)
    moving, composed = {places[node] for node in inputs}, []
    for node in copied.nodes:
        if any(i in moving for i in node.all_input_nodes):
            moving.add(node)
            if _is_composed(node, moving):
                composed.append(node)
    for node in moving:
        read_scalars(node)
    for node in composed:
        _write_out(node, result)
    for node in list(copied.nodes):
        _recognise(node, result)
    return result


#: operations in place that networks are full of, and the same out of place
_IN_PLACE: dict[Any, Any] = {
    _aten.relu_.default: _aten.relu.default,
    _aten.hardtanh_.default: _aten.hardtanh.default,
    _aten.silu_.default: _aten.silu.default,
    _aten.leaky_relu_.default: _aten.leaky_relu.default,
    _aten.add_.Tensor: _aten.add.Tensor,
}
#: operations whose result is new memory
_NEW = {
    _aten.conv1d.default,
    _aten.conv2d.default,
    _aten.conv3d.default,
    _aten.batch_norm.default,
    _aten.linear.default,
}


def is_fresh(node: fx.Node) -> bool:
    """Whether the node overwrites the result of a layer that nothing else reads: in place or not is then the same."""
    if node.target not in _IN_PLACE:
        return False
    source: Any = node.args[0]
    return set(source.users) == {node} and (source.target in _NEW or is_fresh(source))


def _restore_batch_norm(node: fx.Node) -> None:
    """The batch norm in evaluation that functionalisation took apart into its values and its statistics."""
    (x, weight, bias, mean, var, momentum, eps), users = node.args, list(node.users)
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in users):
        return
    with node.graph.inserting_before(node):
        settings = (x, weight, bias, mean, var, False, momentum, eps, False)
        plain = node.graph.call_function(_aten.batch_norm.default, settings)
    for user in users:
        plain.meta = dict(user.meta)
        user.replace_all_uses_with(plain)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


#: arguments of these names are numbers of the operation's own arithmetic, not of its tensors
_OWN_ARITHMETIC = ("ord", "p", "correction")
#: types of arguments that may be numbers
_NUMBERS = ("number", "Optional[number]", "Tensor")
_REAL = {torch.complex64: torch.float32, torch.float32: torch.float32}


def read_scalars(node: fx.Node) -> None:
    """Replace numbers among the arguments by what they are in float32, where PyTorch computes the node in float32."""
    value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
    if not isinstance(value, Tensor) or value.dtype not in _REAL or schema is None:
        return
    for i, argument in enumerate(schema.arguments):
        if str(argument.type) not in _NUMBERS and argument.name not in ("value", "scale"):
            continue
        if argument.name in _OWN_ARITHMETIC:
            continue
        if i < len(node.args):
            node.update_arg(i, _in_float32(node.args[i]))
        elif argument.name in node.kwargs:
            node.update_kwarg(argument.name, _in_float32(node.kwargs[argument.name]))


def _in_float32(value: Any) -> Any:
    """The number as float32 holds it; a whole number stays one where float32 holds it exactly."""
    if isinstance(value, complex):
        return complex(_in_float32(value.real), _in_float32(value.imag))
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    rounded = float(torch.tensor(float(value), dtype=torch.float32))
    return value if rounded == value else rounded


# --- compositions that are one operation ---------------------------------------------------------------------------------


def _recognise(node: fx.Node, result: Decomposed) -> None:
    """Replace a node that ends a composition by the operation that the composition is."""
    if node.op != "call_function" or node.kwargs:
        return
    chain = _root_mean_square(node) or _activation(node)
    if chain is None:
        return
    made: list[fx.Node] = []
    with result.graph.inserting_before(node):
        for target, args, keywords in chain:
            made.append(
                result.graph.call_function(target, tuple(made[-1] if a is None and made else a for a in args), keywords)
            )
            made[-1].meta = dict(node.meta)
    node.replace_all_uses_with(made[-1])
    result.added.update(made)


def _target(node: Any) -> Any:
    return node.target if isinstance(node, fx.Node) and node.op == "call_function" else None


def _near(node: fx.Node) -> float:
    """How far constants may be from those of a formula, relatively: they may be stored in the tensor's dtype."""
    return 1e-15 if node.meta["val"].dtype == torch.float64 else 2.0**-23


_ADD = {_aten.add.Tensor, _aten.add.Scalar}


def _root_mean_square(node: fx.Node) -> Chain | None:
    """`x·rsqrt(mean(x², −1) + ε)` or `x/√(mean(x², −1) + ε)`."""
    multiplied = node.target is _aten.mul.Tensor
    if not multiplied and node.target is not _aten.div.Tensor:
        return None
    for x, size in (node.args, node.args[::-1]) if multiplied else (node.args,):
        inner: Any = _under_root(size, -0.5 if multiplied else 0.5)
        if not isinstance(x, fx.Node) or _target(inner) not in _ADD or inner.kwargs:
            continue
        mean, eps = inner.args
        value = x.meta.get("val")
        if not isinstance(eps, float) or not eps > 0 or not isinstance(value, Tensor) or not value.dim():
            continue
        if isinstance(mean, fx.Node) and _mean_of_squares(mean, x):
            return [(_aten.rms_norm.default, (x, [int(value.shape[-1])], None, eps), {})]
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
    last = ([-1], [x.meta["val"].dim() - 1])
    if mean.target is not _aten.mean.dim or mean.kwargs or len(mean.args) != 3:
        return False
    squared, dims, kept = mean.args
    if kept is not True or list(dims) not in last or not isinstance(squared, fx.Node):  # type: ignore[arg-type]
        return False
    squares: dict[Any, Any] = {_aten.square.default: (x,), _aten.pow.Tensor_Scalar: (x, 2), _aten.mul.Tensor: (x, x)}
    return squared.args == squares.get(squared.target)


#: of a logarithm that is one operation with what it is taken of
_LOGS = {_aten.sigmoid.default: _aten.log_sigmoid.default, _aten.softmax.int: _aten.log_softmax.int}
#: factors out of this range are left alone
_SMALLEST, _LARGEST = 1e-6, 1e6
#: a and b of GELU's tanh form, by the power that they stand before
_TANH_FORM = {1: math.sqrt(2 / math.pi), 3: 0.044715 * math.sqrt(2 / math.pi)}


def _activation(node: fx.Node) -> Chain | None:
    """The operations that a written-out activation is."""
    match node.target:
        case _aten.mul.Tensor | _aten.div.Tensor:
            return _gated(node)
        case _aten.log.default:
            inner: Any = node.args[0]
            return [(_LOGS[_target(inner)], inner.args, {})] if _target(inner) in _LOGS and not inner.kwargs else None
        case _aten.where.self:
            return _softplus(*node.args)
    return None


def _gated(node: fx.Node) -> Chain | None:
    """`c·x·g(kx)` for g = σ, 1 + erf, GELU's 1 + tanh, tanh∘softplus: by φ(x) = x·g(x) it is `(c/k)·φ(kx)`."""
    scale, factors = _product(node)
    if len(factors) != 2:
        return None
    for x, gate in (factors, factors[::-1]):
        found = _gate(x, gate)
        if found is not None:
            operation, keywords, inner, outer = found
            chain: Chain = [(operation, (x,), keywords)]
            if inner != 1:
                chain = [(_aten.mul.Tensor, (x, inner), {}), (operation, (None,), keywords)]
            return chain if scale * outer == 1 else [*chain, (_aten.mul.Tensor, (None, scale * outer), {})]
    return None


def _gate(x: fx.Node, gate: fx.Node) -> tuple[Any, dict[str, Any], float, float] | None:
    """φ and its keywords with k and the factor outside, where `gate` is g(kx)."""
    if gate.kwargs:
        return None
    target, inner = _target(gate), gate.args[0] if gate.args else None
    if target is _aten.sigmoid.default and (k := _multiple(inner, x)) is not None:
        return _aten.silu.default, {}, k, 1 / k
    if target is _aten.tanh.default and _target(inner) is _aten.softplus.default and inner.args == (x,):  # type: ignore[union-attr]
        return _aten.mish.default, {}, 1.0, 1.0
    if target not in (_aten.add.Tensor, _aten.add.Scalar) or gate.args[1] != 1:
        return None
    if _target(inner) is _aten.tanh.default and _is_tanh_form(inner.args[0], x):  # type: ignore[union-attr]
        return _aten.gelu.default, {"approximate": "tanh"}, 1.0, 2.0
    if _target(inner) is _aten.erf.default:
        k = _multiple(inner.args[0], x)  # type: ignore[union-attr]
        if k is not None:  # x·(1 + erf(kx)) = 2·GELU(sx)/s for s = k·√2, and the slopes of GELU(sx)/s are those of GELU
            s = k * math.sqrt(2)
            s = 1.0 if abs(s - 1) <= _near(x) else s
            return _aten.gelu.default, {}, s, 2 / s
    return None


def _is_tanh_form(node: Any, x: fx.Node) -> bool:
    """Whether the node is `ax + bx³` as in GELU, where in single precision the constants may be rounded to it."""
    powers = _polynomial(node, x)
    near = _near(x)
    return powers.keys() == _TANH_FORM.keys() and all(abs(powers[k] / v - 1) <= near for k, v in _TANH_FORM.items())


def _polynomial(node: Any, x: fx.Node) -> dict[int, float]:
    """Coefficients of a node by powers of x, up to the third; empty where it is no such polynomial."""
    if node is x:
        return {1: 1.0}
    if isinstance(node, int | float) and not isinstance(node, bool):
        return {0: float(node)}
    if not isinstance(node, fx.Node) or node.kwargs or len(node.args) != 2:
        return {}
    a, b = (_polynomial(value, x) for value in node.args)
    match _target(node):
        case _aten.add.Tensor | _aten.add.Scalar if a and b:
            return {k: a.get(k, 0.0) + b.get(k, 0.0) for k in {*a, *b}}
        case _aten.mul.Tensor | _aten.mul.Scalar:
            return _multiplied(a, b)
        case _aten.pow.Tensor_Scalar if node.args[1] in (2, 3):
            square = _multiplied(a, a)
            return square if node.args[1] == 2 else _multiplied(square, a)
    return {}


def _multiplied(a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for i, u in a.items():
        for k, v in b.items():
            found[i + k] = found.get(i + k, 0.0) + u * v
    return found if max(found, default=9) <= 3 else {}


def _softplus(condition: Any, x: Any, other: Any) -> Chain | None:
    """`where(x > 20, x, softplus(x))`, which is what PyTorch's softplus does itself."""
    if _target(condition) not in (_aten.gt.Tensor, _aten.gt.Scalar) or _target(other) is not _aten.softplus.default:
        return None
    return [(_aten.softplus.default, (x,), {})] if condition.args == (x, 20) and other.args == (x,) else None


def _product(node: Any) -> tuple[float, list[fx.Node]]:
    """A product of nodes and numbers, taken apart."""
    target = _target(node)
    if target is _aten.neg.default:
        scale, factors = _product(node.args[0])
        return -scale, factors
    if target in (_aten.mul.Tensor, _aten.div.Tensor) and not node.kwargs:
        first, second = node.args
        divided = target is _aten.div.Tensor
        if isinstance(second, int | float) and not isinstance(second, bool) and _SMALLEST < abs(second) < _LARGEST:
            scale, factors = _product(first)
            return scale / second if divided else scale * second, factors
        if not divided and isinstance(first, fx.Node) and isinstance(second, fx.Node):
            (a, left), (b, right) = _scaled(first), _scaled(second)
            return a * b, [left, right]
    return 1.0, [node] if isinstance(node, fx.Node) else []


def _scaled(node: fx.Node) -> tuple[float, fx.Node]:
    """A node times numbers, taken apart."""
    scale, factors = _product(node)
    return (scale, factors[0]) if len(factors) == 1 else (1.0, node)


def _multiple(node: Any, x: fx.Node) -> float | None:
    """k, where the node is k·x."""
    scale, found = _scaled(node) if isinstance(node, fx.Node) else (0.0, None)
    return scale if found is x and _SMALLEST < abs(scale) < _LARGEST else None


# --- operations that PyTorch writes out --------------------------------------------------------------------------------


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


def _lerp(a: Tensor, b: Tensor, weight: Any) -> Tensor:
    return a * (1 - weight) + b * weight


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`softmax(τ·QKᵀ)·V` with τ = 1/√d."""
    if dropout_p or enable_gqa:
        raise ValueError("attention with dropout or grouped queries; call model.eval() first")
    scores = torch.matmul(q, k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.matmul(torch.softmax(scores, -1), v)


#: operations that PyTorch does not write out, and what they are
_OWN: dict[Any, Callable[..., Tensor]] = {
    _aten.bilinear.default: _bilinear,
    _aten.addbmm.default: _addbmm,
    _aten.scaled_dot_product_attention.default: _attention,
    _aten.lerp.Scalar: _lerp,
    _aten.lerp.Tensor: _lerp,
}


def _is_general(node: fx.Node, moving: set[fx.Node]) -> bool:
    """Whether a matrix product with an addend is more than a dense layer: factors, or weights that depend on the input."""
    return bool(node.kwargs) or any(node.args[i] in moving for i in (0, 2))


def _is_composed(node: fx.Node, moving: set[fx.Node]) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if has_rule(node):
        return node.target is _aten.addmm.default and _is_general(node, moving)
    return node.target in _OWN or node.target._can_decompose() or node.target.overloadpacket in _KNOWN


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


def _write_out(node: fx.Node, result: Decomposed) -> None:
    """Put the operations that a node is made of in its place."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    sources = node.all_input_nodes
    operation: Any = _OWN.get(node.target, node.target)

    def run(*given: Any) -> Any:
        known = dict(zip(sources, given, strict=True))
        args: Any = fx.node.map_arg(node.args, known.__getitem__)
        return operation(*args, **fx.node.map_arg(node.kwargs, known.__getitem__))

    values = [s.meta["val"] for s in sources]
    try:
        with torch.no_grad(), _plain_kernels(), enable_python_dispatcher():
            traced = make_fx(run, decomposition_table=_table())(*values)
        if is_mutable(traced.graph):
            with torch.no_grad():
                traced = make_fx(torch.func.functionalize(traced))(*values)
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


def is_mutable(graph: fx.Graph, but: Callable[[fx.Node], bool] = lambda node: False) -> bool:
    """Whether an operation of the graph, but for some, writes into one of its arguments."""
    schemas = [getattr(node.target, "_schema", None) for node in graph.nodes if not but(node)]
    return any(schema is not None and schema.is_mutable for schema in schemas)


def _inserted(
    part: fx.Node, node: fx.Node, traced: fx.GraphModule, placed: dict[fx.Node, fx.Node], result: Decomposed
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
