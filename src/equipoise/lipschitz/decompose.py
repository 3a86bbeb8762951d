"""Compositions recognised as one operation, and operations without a rule replaced by what PyTorch computes them with.

`torch.kron`, `torch.einsum`, an LSTM or a Fourier transform with its options are compositions: PyTorch writes them out,
operation by operation, and each of those has a rule. The other way round, forms that exporters and Hugging Face write out
become the one operation they are:

* `x·rsqrt(mean(x²) + ε)`, `x/√(mean(x²) + ε)`, `x·(1/√…)`, `x·(…)^−½`: root-mean-square norms (Llama, T5, torch.onnx);
* `x·σ(kx)`: SiLU, and CLIP's quick GELU with k = 1.702;
* `x·(1 + erf(x/√2))/2` (torch.onnx) and GELU's tanh form, by cubes or factored (GPT-2, BERT);
* `x·tanh(softplus(x))`: Mish (torch.onnx).

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
    for node in list(copied.nodes):
        if node.target is _aten._native_batch_norm_legit_no_training.default:
            _restore_batch_norm(node)
    moving = {places[node] for node in inputs}
    for node in list(copied.nodes):
        if moving.isdisjoint(node.all_input_nodes):
            continue
        moving.add(node)
        read_scalars(node)
    for node in [n for n in copied.nodes if n in moving and _is_composed(n)]:
        _write_out(node, result)
    for node in list(copied.nodes):
        _recognise(node, result)
    return result


def _restore_batch_norm(node: fx.Node) -> None:
    """The batch norm in evaluation that functionalisation took apart into its values and its statistics."""
    x, weight, bias, mean, var, momentum, eps = node.args
    users = list(node.users)
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


def read_scalars(node: fx.Node) -> None:
    """Replace numbers among the arguments by what they are in float32, where PyTorch computes the node in float32."""
    value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
    if (
        not isinstance(value, Tensor)
        or value.dtype not in (torch.float32, torch.complex64)
        or schema is None
    ):
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
    if not _is_number(value):
        return value
    rounded = float(torch.tensor(float(value), dtype=torch.float32))
    return value if rounded == value else rounded


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- compositions that are one operation ---------------------------------------------------------------------------------


def _recognise(node: fx.Node, result: Decomposed) -> None:
    """Replace a node that ends a composition by the operation that the composition is."""
    chain = _root_mean_square(node) or _gated(node)
    if chain is None:
        return
    last: fx.Node | None = None
    with result.graph.inserting_before(node):
        for target, args, keywords in chain:
            last = result.graph.call_function(
                target, tuple(last if a is None and last else a for a in args), keywords
            )
            last.meta = dict(node.meta)
            result.added.add(last)
    assert last is not None
    node.replace_all_uses_with(last)


def _target(node: Any) -> Any:
    """The operation of a node without keywords; None of anything else."""
    return (
        node.target
        if isinstance(node, fx.Node) and node.op == "call_function" and not node.kwargs
        else None
    )


_ADD = (_aten.add.Tensor, _aten.add.Scalar)


def _root_mean_square(node: fx.Node) -> Chain | None:
    """`x·rsqrt(mean(x², −1) + ε)` or `x/√(mean(x², −1) + ε)`."""
    multiplied = _target(node) is _aten.mul.Tensor
    if not multiplied and _target(node) is not _aten.div.Tensor:
        return None
    for x, size in (node.args, node.args[::-1]) if multiplied else (node.args,):
        inner: Any = _under_root(size, -0.5 if multiplied else 0.5)
        if not isinstance(x, fx.Node) or _target(inner) not in _ADD:
            continue
        mean, eps = inner.args
        if isinstance(eps, float) and eps > 0 and _is_mean_of_squares(mean, x):
            return [(_aten.rms_norm.default, (x, [int(x.meta["val"].shape[-1])], None, eps), {})]
    return None


def _under_root(node: Any, power: float) -> Any:
    """v, where the node is v^power for power ±½, however it is written."""
    match _target(node), power:
        case (_aten.sqrt.default, 0.5) | (_aten.rsqrt.default, -0.5):
            return node.args[0]
        case _aten.pow.Tensor_Scalar, _ if node.args[1] == power:
            return node.args[0]
        case _aten.reciprocal.default, -0.5:
            return _under_root(node.args[0], 0.5)
        case _aten.mul.Tensor, -0.5 if (
            node.args[1] == 1
        ):  # 1/√v is exported as a reciprocal times 1
            return _under_root(node.args[0], power)
    return None


def _is_mean_of_squares(mean: Any, x: fx.Node) -> bool:
    """Whether this is the mean of x² over the last dimension, which is kept."""
    if _target(mean) is not _aten.mean.dim or len(mean.args) != 3:
        return False
    squared, dims, kept = mean.args
    if kept is not True or list(dims) not in ([-1], [x.meta["val"].dim() - 1]):
        return False
    return (_target(squared) is _aten.square.default and squared.args == (x,)) or _powers(
        squared, x
    ) == {2: 1.0}


def _gated(node: fx.Node) -> Chain | None:
    """`c·x·g(kx)` for g = σ, 1 + erf, GELU's 1 + tanh, tanh∘softplus: by φ(x) = x·g(x) it is `(c/k)·φ(kx)`."""
    scale, factors = _product(node)
    if len(factors) != 2:
        return None
    for x, gate in (factors, factors[::-1]):
        activation = _gate(x, gate)
        if activation is None:
            continue
        operation, keywords, inner, outer = activation
        chain: Chain = [(operation, (x,), keywords)]
        if inner != 1:
            chain = [(_aten.mul.Tensor, (x, inner), {}), (operation, (None,), keywords)]
        if scale * outer != 1:
            chain.append((_aten.mul.Tensor, (None, scale * outer), {}))
        return chain
    return None


#: factors out of this range are left alone
_SMALLEST, _LARGEST = 1e-6, 1e6
#: a and b of GELU's tanh form, by the power that they stand before
_TANH_FORM = {1: math.sqrt(2 / math.pi), 3: 0.044715 * math.sqrt(2 / math.pi)}


def _gate(x: fx.Node, gate: fx.Node) -> tuple[Any, dict[str, Any], float, float] | None:
    """φ and its keywords with k and the factor outside, where `gate` is g(kx)."""
    # constants may be stored in the tensor's dtype
    near = 1e-15 if x.meta["val"].dtype == torch.float64 else 2.0**-23
    inner: Any = gate.args[0] if _target(gate) else None
    if (
        _target(gate) is _aten.tanh.default
        and _target(inner) is _aten.softplus.default
        and inner.args == (x,)
    ):
        return _aten.mish.default, {}, 1.0, 1.0
    if _target(gate) is _aten.sigmoid.default:
        powers = _powers(inner, x)
        k = powers.get(1, 0.0)
        return (
            (_aten.silu.default, {}, k, 1 / k)
            if powers.keys() == {1} and _SMALLEST < abs(k) < _LARGEST
            else None
        )
    if (
        _target(gate) not in _ADD
        or gate.args[1] != 1
        or _target(inner) not in (_aten.tanh.default, _aten.erf.default)
    ):
        return None
    powers = _powers(inner.args[0], x)
    if _target(inner) is _aten.tanh.default:
        same = powers.keys() == _TANH_FORM.keys()
        same = same and all(abs(powers[i] / value - 1) <= near for i, value in _TANH_FORM.items())
        return (_aten.gelu.default, {"approximate": "tanh"}, 1.0, 2.0) if same else None
    # x·(1 + erf(x/√2)) = 2·GELU(x)
    same = powers.keys() == {1} and abs(powers[1] * math.sqrt(2) - 1) <= near
    return (_aten.gelu.default, {}, 1.0, 2.0) if same else None


def _powers(node: Any, x: fx.Node) -> dict[int, float]:
    """Coefficients of a node by powers of x, up to the third; empty where it is no such polynomial."""
    if node is x:
        return {1: 1.0}
    if _is_number(node):
        return {0: float(node)}
    if _target(node) is _aten.neg.default:
        return {i: -value for i, value in _powers(node.args[0], x).items()}
    if _target(node) is None or len(node.args) != 2:
        return {}
    a, b = (_powers(value, x) for value in node.args)
    match _target(node):
        case _aten.add.Tensor | _aten.add.Scalar if a and b:
            return {i: a.get(i, 0.0) + b.get(i, 0.0) for i in {*a, *b}}
        case _aten.mul.Tensor | _aten.mul.Scalar:
            return _multiplied(a, b)
        case _aten.div.Tensor | _aten.div.Scalar if b.keys() == {0} and b[0]:
            return {i: value / b[0] for i, value in a.items()}
        case _aten.pow.Tensor_Scalar if node.args[1] == 2:
            return _multiplied(a, a)
        case _aten.pow.Tensor_Scalar if node.args[1] == 3:
            return _multiplied(_multiplied(a, a), a)
    return {}


def _multiplied(a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
    product: dict[int, float] = {}
    for i, u in a.items():
        for k, v in b.items():
            product[i + k] = product.get(i + k, 0.0) + u * v
    return product if max(product, default=9) <= 3 else {}


def _product(node: Any) -> tuple[float, list[fx.Node]]:
    """A product of nodes and numbers, taken apart into its number and its nodes."""
    match _target(node):
        case _aten.neg.default:
            scale, factors = _product(node.args[0])
            return -scale, factors
        case _aten.mul.Tensor | _aten.div.Tensor if _is_number(node.args[1]):
            number = node.args[1]
            if _SMALLEST < abs(number) < _LARGEST:
                scale, factors = _product(node.args[0])
                return (
                    scale / number if node.target is _aten.div.Tensor else scale * number,
                    factors,
                )
        case _aten.mul.Tensor:
            pairs = [_product(a) for a in node.args]
            if all(len(factors) == 1 for _, factors in pairs):
                return math.prod(scale for scale, _ in pairs), [factors[0] for _, factors in pairs]
    return 1.0, [node] if isinstance(node, fx.Node) else []


# --- operations that PyTorch writes out --------------------------------------------------------------------------------


#: operations with a kernel of their own that PyTorch also knows to write out
_KNOWN = (_aten.addcmul, _aten.addcdiv, _aten.baddbmm, _aten.addmm, _aten.addmv, _aten.dot)


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
    scores = torch.matmul(q, k.transpose(-1, -2)) * (
        1 / math.sqrt(q.shape[-1]) if scale is None else scale
    )
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.matmul(torch.softmax(scores, -1), v)


#: operations that PyTorch does not write out, and what they are
_OWN: dict[Any, Callable[..., Tensor]] = {_aten.scaled_dot_product_attention.default: _attention}


def _is_composed(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or has_rule(node):
        return False
    return (
        node.target in _OWN or node.target._can_decompose() or node.target.overloadpacket in _KNOWN
    )


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

    def run(*tensors: Any) -> Any:
        values = dict(zip(sources, tensors, strict=True))
        args: Any = fx.node.map_arg(node.args, values.__getitem__)
        return operation(*args, **fx.node.map_arg(node.kwargs, values.__getitem__))

    examples = [s.meta["val"] for s in sources]
    try:
        with torch.no_grad(), _plain_kernels(), enable_python_dispatcher():
            traced = make_fx(run, decomposition_table=_table())(*examples)
        if is_mutable(traced.graph):
            with torch.no_grad():
                traced = make_fx(torch.func.functionalize(traced))(*examples)
    except Exception as error:
        raise Refused(
            f"{where(node)}: {node.target} has no Lipschitz rule and cannot be written out as operations that have one "
            f"({type(error).__name__}: {one_line(error)[:160]}); write it with other operations, or register a rule"
        ) from error
    placed = dict(
        zip((n for n in traced.graph.nodes if n.op == "placeholder"), sources, strict=True)
    )
    with result.graph.inserting_before(node):
        for part in traced.graph.nodes:
            if part.op not in ("placeholder", "output"):
                placed[part] = _inserted(part, node, traced, placed, result)
    outputs = fx.node.map_arg(next(iter(reversed(traced.graph.nodes))).args[0], placed.__getitem__)
    _redirect(node, outputs)
    result.graph.erase_node(node)


def is_mutable(graph: fx.Graph) -> bool:
    """Whether an operation of the graph writes into one of its arguments."""
    schemas = [getattr(node.target, "_schema", None) for node in graph.nodes]
    return any(schema is not None and schema.is_mutable for schema in schemas)


def _inserted(
    part: fx.Node,
    node: fx.Node,
    traced: fx.GraphModule,
    placed: dict[fx.Node, fx.Node],
    result: Decomposed,
) -> fx.Node:
    if part.op == "get_attr":
        inserted = result.graph.create_node("get_attr", str(part.target))
        inserted.meta["val"] = result.constants[inserted] = getattr(traced, str(part.target))
    else:
        inserted = result.graph.node_copy(part, placed.__getitem__)
    inserted.meta |= {
        key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta
    }
    result.added.add(inserted)
    return inserted


def _redirect(node: fx.Node, outputs: Any) -> None:
    """Whatever read the node reads its parts' results."""
    if isinstance(outputs, fx.Node):
        node.replace_all_uses_with(outputs)
        return
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise Refused(
                f"{where(node)}: its results are used together by {user.name!r}; take them apart first"
            )
        user.replace_all_uses_with(outputs[user.args[1]])
        user.graph.erase_node(user)
