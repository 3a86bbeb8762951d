"""From a module to the list of operations it really performs: non-strict `torch.export`, constants evaluated.

Why `torch.export`: it spells every operation once (aten), shows hooks, overridden forwards, parametrisations and padding
modes as explicit nodes, and keeps the module path and the source line of each. Data-dependent control flow cannot be
captured, and is refused; so are mutations that something else can see, training mode, and reduced precision.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from equipoise.core.errors import InputError, Refused
from equipoise.lipschitz.regions import Region, counted_calls, find_regions, has_blocks

#: functions a graph may call besides registered operators
_PLAIN = (operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv)


@dataclass(frozen=True)
class Program:
    """The operations between the user's inputs and outputs; `constants` holds the value of every other node.

    `regions` are the calls of modules that bound themselves and are believed.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    constants: dict[fx.Node, Any] = field(repr=False)
    regions: tuple[Region, ...] = ()


def where(node: fx.Node) -> str:
    """`node 'relu' (module features.1, file.py line 3)`: what every refusal starts with."""
    path = module_path(node)
    place = f"module {path}" if path else "the model's own forward"
    line = source_line(node)
    return f"node {node.name!r} ({place}{', ' + line if line else ''})"


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module that runs this node; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    entries = [str(entry[0]) for entry in stack.values()]
    return entries[-1].split("@")[0] if entries else ""


def source_line(node: fx.Node) -> str:
    """`file line N: code` of the innermost frame that is not PyTorch's own."""
    frames = [f.strip() for f in str(node.meta.get("stack_trace") or "").split("File ") if f.strip()]
    own = [f for f in frames if "site-packages/torch/" not in f] or frames
    if not own:
        return ""
    head, _, code = own[-1].partition("\n")
    name, _, rest = head.partition(", line ")
    text = code.strip().splitlines()[0].strip() if code.strip() else ""
    number = rest.split(",")[0]
    return f"{name.strip(chr(34)).rsplit('/', 1)[-1]} line {number}" + (f": {text}" if text else "")


def capture(model: nn.Module | ExportedProgram, example_input: Any) -> Program:
    """Capture the model on one example; with a batch of several, on the first sample.

    Guarantee: the program's nodes are all operations between input and output, in order. The rules bound the map of the
    whole tensors, with a batch of one; `batch_note` checks that larger batches do not mix samples.
    """
    if isinstance(model, ExportedProgram):
        return analyse(model)
    if not isinstance(model, nn.Module):
        raise InputError(f"expected an nn.Module or an ExportedProgram, got {type(model).__name__}")
    refuse_training(model)
    examples = first_sample(example_input)
    program = analyse(export(model, examples))
    if not has_blocks(model):
        return program
    with counted_calls() as counts, torch.no_grad():
        model(*examples)
    regions = find_regions(model, program.inputs, program.nodes, program.outputs, counts)
    return replace(program, regions=regions)


def first_sample(example_input: Any) -> tuple[Tensor, ...]:
    """The first sample of every example, as a batch of one."""
    examples = as_examples(example_input)
    return tuple(x[:1].detach().clone() if x.dim() > 0 and x.shape[0] > 1 else x.detach() for x in examples)


def as_examples(example_input: Any) -> tuple[Tensor, ...]:
    """The example as a tuple of floating tensors; anything else is refused with what came."""
    examples = example_input if isinstance(example_input, tuple | list) else (example_input,)
    for x in examples:
        if not isinstance(x, Tensor):
            raise InputError(f"example_input must be a tensor or a tuple of tensors, got {type(x).__name__}")
        if x.dtype not in (torch.float32, torch.float64):
            raise Refused(
                f"example_input has dtype {x.dtype}; the bound is for real-valued inputs: pass float32 or float64 "
                "(for tokens, bound the network that follows the embedding)"
            )
        if x.numel() == 0:
            raise InputError(f"example_input is empty (shape {tuple(x.shape)})")
    if len({x.shape[0] if x.dim() else 1 for x in examples}) > 1:
        raise InputError("the tensors of example_input must share their first (batch) dimension")
    return tuple(examples)


def refuse_training(model: nn.Module) -> None:
    """Training mode is refused where it changes the map or makes it random; elsewhere the flag means nothing."""
    matters = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.RReLU)
    for path, module in model.named_modules():
        own = type(module).__module__.startswith("torch.nn")
        if module.training and (isinstance(module, matters) or not own):
            raise Refused(
                f"module {path or 'the model'} ({type(module).__name__}) is in training mode, in which the map depends "
                "on the batch or on chance; call model.eval() first"
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs every failed guard; a refusal says it once."""
    loggers = [logging.getLogger(name) for name in ("torch.fx.experimental.symbolic_shapes", "torch.export")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextlib.contextmanager
def _readable_switches() -> Iterator[None]:
    """The exporter reads cuDNN's old TF32 switch, which raises after `full_precision` has set the new ones; tracing has no need
    of either.
    """
    cudnn: Any = torch.backends.cudnn
    both: list[Any] = [getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None)]
    owners = [owner for owner in both if hasattr(owner, "fp32_precision")]
    found = [owner.fp32_precision for owner in owners]
    try:
        for value in ("tf32", "ieee"):
            with contextlib.suppress(RuntimeError):
                _ = cudnn.allow_tf32
                break
            for owner in owners:
                owner.fp32_precision = value
        yield
    finally:
        for owner, value in zip(owners, found, strict=True):
            owner.fp32_precision = value


def export(model: nn.Module, examples: tuple[Tensor, ...]) -> ExportedProgram:
    """`torch.export` with its failures turned into one sentence."""
    try:
        with torch.no_grad():
            model(*examples)
    except Exception as error:
        raise InputError(f"the model does not run on example_input: {type(error).__name__}: {_first(error)}") from error
    try:
        with _quiet(), _readable_switches(), torch.no_grad():
            return torch.export.export(model, examples, strict=False)
    except Exception as error:
        kind = type(error).__name__
        hint = (
            "the control flow depends on the data"
            if "data-dependent" in str(error) or "DataDependent" in kind
            else "the forward cannot be captured"
        )
        raise Refused(
            f"{hint}, so there is no fixed graph to bound ({kind}: {_first(error)}); "
            "replace Python branches on tensor values by tensor operations, or bound the parts separately"
        ) from error


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"


def analyse(program: ExportedProgram) -> Program:
    """Split an exported program into constants and the nodes that carry the input to the output."""
    values = _lifted(program)
    inputs: list[fx.Node] = []
    nodes: list[fx.Node] = []
    graph = program.graph_module.graph
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    for node in graph.nodes:
        if node.op == "placeholder" and kinds.get(node.name) is InputKind.USER_INPUT:
            _require_tensor(node)
            inputs.append(node)
    live = _ancestors(graph)
    moving = set(inputs)
    for node in graph.nodes:
        if node.op == "get_attr":
            values[node] = _attribute(program.graph_module, str(node.target))
        if node.op != "call_function" or node not in live:
            continue
        if not isinstance(node.target, torch._ops.OpOverload) and node.target not in _PLAIN:
            raise Refused(f"{where(node)}: {node.target} is not a tensor operation; export the model as plain aten")
        _refuse_mutation(node, moving)
        if any(i in moving for i in node.all_input_nodes):
            moving.add(node)
            nodes.append(node)
        else:
            values[node] = _evaluate(node, values)
    if not inputs:
        raise InputError("the program has no tensor input: there is nothing to be Lipschitz in")
    outputs = _outputs(graph)
    return Program(tuple(nodes), tuple(inputs), tuple(o for o in outputs if o in moving), values)


def _lifted(program: ExportedProgram) -> dict[fx.Node, Any]:
    values: dict[fx.Node, Any] = {}
    by_name = {n.name: n for n in program.graph_module.graph.nodes if n.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        node = by_name[spec.arg.name]
        if spec.kind is InputKind.PARAMETER or (spec.kind is InputKind.BUFFER and spec.persistent):
            values[node] = program.state_dict[str(spec.target)].detach()
        elif spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            constant = program.constants[str(spec.target)]
            values[node] = constant.detach() if isinstance(constant, Tensor) else constant
        elif spec.kind is not InputKind.USER_INPUT:
            raise Refused(
                f"the program takes an input of kind {spec.kind.name} ({spec.arg.name}), which is not bounded"
            )
    return values


def _require_tensor(node: fx.Node) -> None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise Refused(f"input {node.name!r} is a {type(value).__name__}, not a tensor; fix it inside the model first")
    if not all(isinstance(s, int) for s in value.shape):
        raise Refused(f"input {node.name!r} has a symbolic shape {tuple(value.shape)}; export with static shapes")
    if value.dtype not in (torch.float32, torch.float64):
        raise Refused(f"input {node.name!r} has dtype {value.dtype}; the bound is for float32 or float64 inputs")


def _ancestors(graph: fx.Graph) -> set[fx.Node]:
    """Nodes the output needs, plus mutating ones (those are looked at before they may be dropped)."""
    live: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        mutating = node.op == "call_function" and _schema(node) is not None and _schema(node).is_mutable
        if node.op == "output" or mutating or node in live:
            live.add(node)
            live.update(node.all_input_nodes)
    return live


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


def _aliases(node: fx.Node) -> set[fx.Node]:
    """Every node that may share memory with this one, as far as the schemas say."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        todo += [user for user in current.users if current in _shared(user)]
        todo += _shared(current)
    return seen


def _shared(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the result of a node may be, as far as the schemas say."""
    if node.target is operator.getitem:
        return node.all_input_nodes[:1]
    schema = _schema(node)
    if schema is None:
        return []
    name = schema.name.split("::")[-1]
    maybe_view = name in (
        "reshape",
        "contiguous",
        "flatten",
        "to",
        "dropout",
        "expand_as",
        "view_as",
        "movedim",
        "unflatten",
    )
    if maybe_view:
        return node.all_input_nodes[:1]
    if all(r.alias_info is None for r in schema.returns):
        return []
    given = [
        (a, node.args[i] if i < len(node.args) else node.kwargs.get(a.name)) for i, a in enumerate(schema.arguments)
    ]
    return [value for a, value in given if a.alias_info is not None and isinstance(value, fx.Node)]


def _refuse_mutation(node: fx.Node, moving: set[fx.Node]) -> None:
    """An in-place operation is fine if nothing reads the overwritten memory afterwards under another name."""
    schema = _schema(node)
    if schema is None or not schema.is_mutable:
        return
    target = node.args[0]
    assert isinstance(target, fx.Node)
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    own = {node} | {a for a in _aliases(node) if order[a] > order[node] and _descends(a, node)}
    for alias in _aliases(target) - own:
        later = [u for u in alias.users if order[u] > order[node] and u not in own]
        if later:
            raise Refused(
                f"{where(node)} overwrites memory that {later[0].name!r} reads afterwards; "
                "write the operation out of place (e.g. torch.relu(x) for torch.relu_(x))"
            )
    if any(a.op in ("placeholder", "get_attr") and a not in moving for a in _aliases(target)):
        raise Refused(f"{where(node)} changes a parameter or buffer: the map differs from call to call")


def _descends(node: fx.Node, ancestor: fx.Node) -> bool:
    todo = [node]
    while todo:
        current = todo.pop()
        if current is ancestor:
            return True
        todo += _shared(current)
    return False


def _attribute(module: fx.GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _evaluate(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Run a node that does not see the input, as the model would; chance is refused.

    What is overwritten is copied before: operations ahead of this one have read the old values.
    """
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        raise Refused(f"{where(node)} draws random numbers ({node.target}): the map differs from call to call")
    args: Any = fx.node.map_arg(node.args, lambda n: values[n])
    kwargs = fx.node.map_arg(node.kwargs, lambda n: values[n])
    if _schema(node) is not None and _schema(node).is_mutable:
        args = (args[0].clone(), *args[1:])
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "output":
            fx.node.map_arg(node.args, found.append)
    return found
