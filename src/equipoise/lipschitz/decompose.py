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

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf, pi, sqrt
from typing import Any

import torch
from torch import Tensor, fx

from equipoise.core import Refused, Shape, explained
from equipoise.lipschitz.rules.registry import rule_of
from equipoise.lipschitz.values import aten_name, where

_aten = torch.ops.aten


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
        _by_position(node)
        if node.target is _aten.rms_norm.default and node.args[3:] in ((), (None,)):
            # without an ε PyTorch takes that of the type, which float64 would not
            eps = torch.finfo(node.meta["val"].dtype).eps
            weight = node.args[2] if len(node.args) > 2 else None
            node.args = (*node.args[:2], weight, eps)
        # batch norm in evaluation, which functionalisation took apart into its values and its statistics
        whole = aten_name(node) == "_native_batch_norm_legit_no_training.default"
        if whole and all(user.args[1:] == (0,) for user in node.users):
            *settings, momentum, eps = node.args
            settings += [False, momentum, eps, False]
            with copied.inserting_before(node):
                plain = copied.call_function(_aten.batch_norm.default, tuple(settings))
            _redirect(node, [plain])
    moving = {places[node] for node in inputs}
    for node in list(copied.nodes):
        if moving.isdisjoint(node.all_input_nodes):
            continue
        moving.add(node)
        read_scalars(node)
    for node in [n for n in copied.nodes if n in moving and _is_composed(n)]:
        _write_out(node, result)
    for node in [n for n in result.added if n.target in _OWN]:  # as cells of recurrent layers split
        _write_out(node, result)
    for node in list(copied.nodes):
        _recognise(node, result)
    return result


def _by_position(node: fx.Node) -> None:
    """Arguments that have a place stand there, as the exporter writes them: what reads a graph reads them by place."""
    args, kwargs = list(node.args), dict(node.kwargs)
    schema = getattr(node.target, "_schema", None)
    for argument in schema.arguments[len(args) :] if schema else ():
        if argument.kwarg_only or not kwargs:
            break
        args.append(kwargs.pop(argument.name, argument.default_value))
    node.args, node.kwargs = tuple(args), kwargs


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
    if not _is_number(value):
        return value
    dtype = torch.complex64 if isinstance(value, complex) else torch.float32
    rounded = torch.tensor(value, dtype=dtype).item()
    return value if rounded == value else rounded


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


# --- compositions that are one operation ---------------------------------------------------------------------------------


def _recognise(node: fx.Node, result: Decomposed) -> None:
    """Replace a node that ends a composition by the operation that the composition is."""

    def make(target: Any, *args: Any, **keywords: Any) -> fx.Node:
        made = result.graph.call_function(target, args, keywords)
        made.meta = dict(node.meta)
        result.added.add(made)
        return made

    with result.graph.inserting_before(node):
        whole = _root_mean_square(node, make) or _gated(node, make)
    if whole is not None:
        node.replace_all_uses_with(whole)


def _root_mean_square(node: fx.Node, make: Callable[..., fx.Node]) -> fx.Node | None:
    """`x·rsqrt(mean(x², −1) + ε)` or `x/√(mean(x², −1) + ε)`."""
    multiplied = aten_name(node) == "mul.Tensor"
    if not multiplied and aten_name(node) != "div.Tensor":
        return None
    for x, size in (node.args, node.args[::-1]) if multiplied else (node.args,):
        inner = _under_root(size, -0.5 if multiplied else 0.5)
        if not isinstance(x, fx.Node) or not aten_name(inner).startswith("add.") or inner.kwargs:
            continue
        mean, eps = inner.args
        if isinstance(eps, float) and eps > 0 and _is_mean_of_squares(mean, x):
            return make(_aten.rms_norm.default, x, [x.meta["val"].shape[-1]], None, eps)
    return None


def _under_root(node: Any, power: float) -> Any:
    """v, where the node is v^power for power ±½, however it is written."""
    match aten_name(node), power:
        case ("sqrt.default", 0.5) | ("rsqrt.default", -0.5):
            return node.args[0]
        case "pow.Tensor_Scalar", _ if node.args[1] == power:
            return node.args[0]
        case "reciprocal.default", -0.5:
            return _under_root(node.args[0], 0.5)
        case "mul.Tensor", -0.5 if node.args[1] == 1:  # 1/√v is exported as a reciprocal times 1
            return _under_root(node.args[0], power)
    return None


def _is_mean_of_squares(mean: Any, x: fx.Node) -> bool:
    """Whether this is the mean of x² over the last dimension, which is kept."""
    if aten_name(mean) != "mean.dim" or len(mean.args) != 3 or mean.kwargs:
        return False
    squared, dims, kept = mean.args
    last = list(dims) in ([-1], [x.meta["val"].dim() - 1])
    return kept is True and last and _polynomial(squared, x) == {(2,): 1.0}


#: activations φ(x) = x·g(x), or x·(1 + g(x))/2 where `shifted`, by the gate g: φ, its keywords, the coefficients of the
#: polynomial inside g, `shifted`
_ACTIVATIONS: dict[str, tuple[Any, dict[str, str], dict[tuple[int], float], bool]] = {
    "sigmoid.default": (_aten.silu.default, {}, {(1,): 1.0}, False),
    "tanh of softplus": (_aten.mish.default, {}, {(1,): 1.0}, False),
    "erf.default": (_aten.gelu.default, {}, {(1,): sqrt(0.5)}, True),
    "tanh.default": (
        _aten.gelu.default,
        {"approximate": "tanh"},
        {(1,): sqrt(2 / pi), (3,): 0.044715 * sqrt(2 / pi)},
        True,
    ),
}


def _gated(node: fx.Node, make: Callable[..., fx.Node]) -> fx.Node | None:
    """`c·x·g(kx)` or `c·x·(1 + g(kx))` with g of the table, which is `(c/k)·φ(kx)` or `(2c/k)·φ(kx)`."""
    if aten_name(node) not in ("mul.Tensor", "div.Tensor", "neg.default"):
        return None
    terms = _operands(node)
    for gate in terms:
        name, inside = aten_name(gate), gate
        if name == "tanh.default" and aten_name(gate.args[0]) == "softplus.default":
            name, inside = "tanh of softplus", gate.args[0]
        if name not in _ACTIVATIONS or len(inside.args) > 1:
            continue
        activation, keywords, form, shifted = _ACTIVATIONS[name]
        for x in _operands(inside.args[0]) & terms:
            # constants may be stored in the tensor's dtype
            near = 1e-15 if x.meta["val"].dtype == torch.float64 else 2.0**-23
            inner, outer = _polynomial(inside.args[0], x), _polynomial(node, x, gate)
            k, c = inner.get((1,), 0.0) / form[1,], outer.get((1, 1), 0.0)
            k = 1.0 if abs(k - 1) <= near else k
            if not all(1e-6 < abs(number) < 1e6 for number in (k, c)):
                continue
            same = outer == ({(1, 1): c, (1, 0): c} if shifted else {(1, 1): c})
            same = same and inner.keys() == form.keys()
            if same and all(abs(inner[i] / (form[i] * k ** i[0]) - 1) <= near for i in form):
                y = make(activation, x if k == 1 else make(_aten.mul.Tensor, x, k), **keywords)
                factor = (2 * c if shifted else c) / k
                return y if factor == 1 else make(_aten.mul.Tensor, y, factor)
    return None


#: arithmetic with numbers
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add.Tensor": operator.add,
    "add.Scalar": operator.add,
    "mul.Tensor": operator.mul,
    "mul.Scalar": operator.mul,
    "div.Tensor": operator.truediv,
    "div.Scalar": operator.truediv,
    "neg.default": operator.neg,
    "square.default": lambda a: a * a,
    "pow.Tensor_Scalar": lambda a, power: a ** int(power) if power in (2, 3) else None,
}


def _operands(node: Any, depth: int = 6) -> set[Any]:
    """The nodes that this one is computed from by arithmetic with numbers in so many steps, itself included."""
    nodes = {node} if isinstance(node, fx.Node) else set()
    if depth and nodes and aten_name(node) in _ARITHMETIC:
        nodes = nodes.union(*(_operands(argument, depth - 1) for argument in node.args))
    return nodes


def _polynomial(node: Any, *variables: fx.Node) -> dict[Shape, float]:
    """Coefficients by powers of the variables; empty where the node is no polynomial of them."""
    import sympy  # type: ignore[import-untyped]

    symbols = dict(zip(variables, sympy.symbols("x y"), strict=False))

    def value(argument: Any) -> Any:
        if argument in symbols:
            return symbols[argument]
        if _is_number(argument):
            return argument
        if argument.kwargs:
            raise ValueError
        return _ARITHMETIC[aten_name(argument)](*map(value, argument.args))

    try:
        expression = sympy.Poly(value(node), *symbols.values())
        return {powers: float(c) for powers, c in expression.as_dict().items()}
    except (KeyError, TypeError, ValueError, ZeroDivisionError, sympy.PolynomialError):
        return {}


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
        1 / sqrt(q.shape[-1]) if scale is None else scale
    )
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -inf) if mask.dtype == torch.bool else scores + mask
    return torch.matmul(torch.softmax(scores, -1), v)


def _split(x: Tensor, size: int | list[int], dim: int = 0) -> list[Tensor]:
    """Slices of these sizes, or of one size but for the last, which ends with the tensor."""
    sizes = size if isinstance(size, list) else [size] * -(-x.shape[dim] // size)
    ends = itertools.accumulate(sizes, initial=0)
    return [_aten.slice.Tensor(x, dim, start, end) for start, end in itertools.pairwise(ends)]


#: operations that PyTorch does not write out, or not as views, and what they are
_OWN: dict[Any, Callable[..., Any]] = {
    _aten.scaled_dot_product_attention.default: _attention,
    _aten.split.Tensor: _split,
    _aten.unsafe_split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.chunk.default: lambda x, chunks, dim=0: _split(x, -(-x.shape[dim] // chunks), dim),
    _aten.unbind.int: lambda x, dim=0: [x.select(dim, i) for i in range(x.shape[dim])],
}


def _is_composed(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or rule_of(node) is not None:
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
        args = fx.node.map_arg(node.args, values.__getitem__)
        return operation(*args, **fx.node.map_arg(node.kwargs, values.__getitem__))

    examples = [s.meta["val"] for s in sources]
    failure = f"{where(node)}: {node.target} has no Lipschitz rule and cannot be written out as operations that have one"
    todo = "; write it with other operations, or register a rule"
    with explained(failure, todo, Refused), torch.no_grad():
        with _plain_kernels(), enable_python_dispatcher():
            traced = make_fx(run, decomposition_table=_table())(*examples)
        if is_mutable(traced.graph):
            traced = make_fx(torch.func.functionalize(traced))(*examples)
    placed = dict(
        zip((n for n in traced.graph.nodes if n.op == "placeholder"), sources, strict=True)
    )
    with result.graph.inserting_before(node):
        for part in traced.graph.nodes:
            if part.op not in ("placeholder", "output"):
                placed[part] = _inserted(part, node, traced, placed, result)
    outputs = fx.node.map_arg(next(iter(reversed(traced.graph.nodes))).args[0], placed.__getitem__)
    _redirect(node, outputs)


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
    """Whatever read the node reads these results, and the node goes."""
    if isinstance(outputs, fx.Node):
        node.replace_all_uses_with(outputs)
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise Refused(
                f"{where(node)}: its results are used together by {user.name!r}; take them apart first"
            )
        outputs[user.args[1]].meta |= user.meta
        user.replace_all_uses_with(outputs[user.args[1]])
        user.graph.erase_node(user)
    node.graph.erase_node(node)
