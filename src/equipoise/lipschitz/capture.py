"""From a module to the list of operations it really performs: non-strict `torch.export`, constants evaluated.

Why `torch.export`: it spells every operation once (aten), shows hooks, overridden forwards, parametrisations and padding
modes as explicit nodes, and keeps the module path and the source line of each. Data-dependent control flow cannot be
captured, and is refused; so are mutations that something else can see, training mode, and reduced precision.
"""

from __future__ import annotations

import contextlib
import io
import operator
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from equipoise.core.errors import InputError, Refused, one_line, unlogged
from equipoise.core.programs import flat_tensors, lifted, require_stated_shapes
from equipoise.lipschitz.batches import flat_outputs, settled
from equipoise.lipschitz.expand import Written, written_out
from equipoise.lipschitz.modes import asked_about, ordinary_answers, refuse_mutation, written_arguments
from equipoise.lipschitz.places import where
from equipoise.lipschitz.regions import Region, counted_calls, find_regions, has_blocks
from equipoise.lipschitz.values import evaluate, in_float64, is_mutable, perform

#: functions a graph may call besides registered operators
_PLAIN = (operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv)


@dataclass(frozen=True)
class Program:
    """The operations between the user's inputs and outputs; `constants` holds the value of every other node.

    `regions` are the calls of modules that bound themselves and are believed; `notes` say what the example stands for.
    `doubt` is why the network has no bound although every operation may have one; empty where there is no reason.
    `single` is the program of one sample, where a bound must hold for that as well. `native` are constants as the network
    itself computes them, where `constants` has them in float64.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    constants: dict[fx.Node, Any] = field(repr=False)
    regions: tuple[Region, ...] = ()
    notes: tuple[str, ...] = ()
    doubt: str = ""
    single: Program | None = field(default=None, repr=False)
    native: dict[fx.Node, Any] = field(default_factory=dict, repr=False)


def capture(model: nn.Module | ExportedProgram, example_input: Any) -> Program:
    """Capture the model on one example; with a batch of several, on the first sample (see `batches.settled`).

    Guarantee: the program's nodes are all operations between input and output, in order. The rules bound the map of the
    whole tensors, with a batch of one. A forward that asks whether it is being compiled, traced or exported is told that it
    is not (see `modes`), one that asks for gradients must have the same graph with and without them, and on three points
    the program must give what the model itself gives. The model's buffers and the random numbers are left as they were.
    """
    if isinstance(model, ExportedProgram):
        require_stated_shapes(model)
        program = analyse(model)
        return replace(program, doubt=_hidden_writes(program))
    if not isinstance(model, nn.Module):
        raise InputError(f"expected an nn.Module or an ExportedProgram, got {type(model).__name__}")
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise Refused(
            "TorchScript has no graph that torch.export can read: bound the module it was made from, or its ONNX file"
        )
    refuse_training(model)
    with _undisturbed(model), ordinary_answers():
        found = settled(model, example_input)
        program = _captured(model, found.examples)
        single = None if found.single is None else _captured(model, found.single)
    notes = (found.note,) if found.note else ()
    return replace(program, notes=notes, doubt=found.doubt or program.doubt, single=single)


def _captured(model: nn.Module, examples: tuple[Tensor, ...]) -> Program:
    program = analyse(export(model, examples))
    program = replace(program, doubt=_difference(model, program, examples))
    if not has_blocks(model):
        return program
    with counted_calls() as counts, torch.no_grad():
        model(*examples)
    return replace(program, regions=find_regions(model, program.inputs, program.nodes, program.outputs, counts))


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Buffers and random numbers are afterwards what they were before."""
    held = [(m, dict(m._buffers)) for m in model.modules() if m._buffers]
    values = {id(b): b.detach().clone() for _, buffers in held for b in buffers.values() if b is not None}
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, buffers in held:
                    module._buffers.clear()
                    module._buffers.update(buffers)
                    for buffer in buffers.values():
                        if buffer is None or not (buffer.is_inference() or buffer._version):
                            continue  # not written to
                        if not torch.equal(buffer, values[id(buffer)]):
                            buffer.copy_(values[id(buffer)])


#: largest difference between the program and the model, relative to the largest entry, that rounding may explain
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-10}


_DIFFERS = (
    "the captured graph gives other values than the model itself, so a bound of one says nothing of the other; "
    "remove branches on torch.compiler.is_compiling(), torch.is_grad_enabled() and their like, hooks and hidden state"
)


def _difference(model: nn.Module, program: Program, examples: tuple[Tensor, ...]) -> str:
    """The program and the model on the example and two random points, with and without gradients: a check, not a proof."""
    generator = torch.Generator().manual_seed(0)
    points = [examples]
    for scale in (1.0, 30.0):
        drawn = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in examples)
        points.append(tuple((scale * d).to(x.device) for d, x in zip(drawn, examples, strict=True)))
    for i, point in enumerate(points):
        with torch.set_grad_enabled(i == 1):
            theirs = [t.detach() for t in flat_outputs(model(*(x.clone() for x in point)))]
        with torch.no_grad():
            ours = run_program(program, point)
        if len(ours) != len(theirs) or not all(_agree(a, b) for a, b in zip(ours, theirs, strict=True)):
            return _DIFFERS
    return ""


def _hidden_writes(program: Program) -> str:
    """A program without its model: whether its writes, done in place, reach something that the alias analysis missed."""
    if not any(is_mutable(node) for node in program.nodes):
        return ""
    generator = torch.Generator().manual_seed(0)
    shapes = [node.meta["val"] for node in program.inputs]
    point = [torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in shapes]
    constants = {n: v.clone() if isinstance(v, Tensor) else v for n, v in program.constants.items()}
    copied = replace(program, constants=constants)
    with torch.no_grad():
        ours, theirs = run_program(program, point), run_program(copied, [x.clone() for x in point], in_place=True)
    return "" if all(_agree(a, b) for a, b in zip(ours, theirs, strict=True)) else _DIFFERS


def run_program(
    program: Program, inputs: Sequence[Tensor], *, exact: bool = False, in_place: bool = False
) -> list[Tensor]:
    """The floating outputs of the program, constant ones included, in order; `exact` as in `values`, in float64."""

    def constant(node: fx.Node) -> Any:
        if not exact and node in program.native:
            return program.native[node]
        value = program.constants[node]
        return in_float64(value) if exact else value

    start: dict[fx.Node, Any] = dict(zip(program.inputs, inputs, strict=True))
    values = evaluate(program.nodes, constant, start, exact=exact, in_place=in_place)
    found = [values[o] if o in values else program.constants.get(o) for o in _outputs(program.inputs[0].graph)]
    return [t for t in found if isinstance(t, Tensor) and t.is_floating_point()]


def _agree(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    known, rounding = a.isfinite() & b.isfinite(), _ROUNDING.get(a.dtype, 1e-2)
    if not bool((known | (a == b) | (a.isnan() & b.isnan())).all()):
        return False
    a, b = a[known].double(), b[known].double()
    if a.numel() == 0:
        return True
    return float((a - b).abs().max()) <= rounding * float(torch.maximum(a.abs().max(), b.abs().max()))


def refuse_training(model: nn.Module) -> None:
    """Training mode is refused where it changes the map or makes it random; elsewhere the flag means nothing."""
    matters = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.RReLU)
    for path, module in model.named_modules():
        own = type(module).__module__.split(".")[:2] == ["torch", "nn"]
        if module.training and (isinstance(module, matters) or not own):
            raise Refused(
                f"module {path or 'the model'} ({type(module).__name__}) is in training mode, in which the map depends "
                "on the batch or on chance; call model.eval() first"
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs every failed guard and prints the graph it had; a refusal says it once."""
    with warnings.catch_warnings(), unlogged(), contextlib.redirect_stderr(io.StringIO()) as printed:
        warnings.simplefilter("ignore")
        yield
    if printed.getvalue():  # by the network itself, since nothing was raised
        sys.stderr.write(printed.getvalue())


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
            asked = asked_about(lambda: model(*examples))
    except Exception as error:
        raise InputError(
            f"the model does not run on example_input: {type(error).__name__}: {one_line(error)[:200]}"
        ) from error
    with torch.no_grad():
        found = _exported(model, examples)
    if asked.inference:
        raise Refused("the forward asks whether it is in inference mode, so it may be two networks; remove the branch")
    if asked.gradients:
        for wanted in (False, True):
            with torch.enable_grad():
                other = _exported(model, tuple(x.detach().requires_grad_(wanted) for x in examples))
            if not _same_program(found, other):
                raise Refused(
                    "the forward asks whether gradients are taken (torch.is_grad_enabled, x.requires_grad, …) and computes "
                    "something else with gradients than without them; remove the branch, or bound both networks"
                )
    return found


def _same_program(one: ExportedProgram, other: ExportedProgram) -> bool:
    """Whether two captures of one model are the same operations on the same constants."""
    names = one.constants.keys()
    return str(one.graph) == str(other.graph) and names == other.constants.keys() and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b
        for a, b in ((one.constants[name], other.constants[name]) for name in names)
    )  # fmt: skip


def _exported(model: nn.Module, examples: tuple[Tensor, ...]) -> ExportedProgram:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    jumps = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
    try:
        with _quiet(), _readable_switches():
            return torch.export.export(model, examples, strict=False)
    except Exception as error:
        hint = "the control flow depends on the data" if isinstance(error, jumps) else "the forward cannot be captured"
        raise Refused(
            f"{hint}, so there is no fixed graph to bound ({type(error).__name__}: {one_line(error)[:200]}); "
            "replace Python branches on tensor values by tensor operations, or bound the parts separately"
        ) from error


def analyse(program: ExportedProgram) -> Program:
    """Split an exported program into constants and the nodes that carry the input to the output."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    given: list[fx.Node] = []
    for node in program.graph_module.graph.nodes:
        if node.op == "placeholder" and kinds.get(node.name) is InputKind.USER_INPUT:
            _require_tensor(node)
            given.append(node)
    if not given:
        raise InputError("the program has no tensor input: there is nothing to be Lipschitz in")
    written = written_out(program.graph_module.graph, given)
    return _sorted_out(program, written, [written.places[n] for n in given], lifted(program))


def _sorted_out(
    program: ExportedProgram, written: Written, inputs: list[fx.Node], known: dict[fx.Node, Any]
) -> Program:
    values: dict[fx.Node, Any] = {written.places[n]: v for n, v in known.items()} | written.constants
    native: dict[fx.Node, Any] = {}
    nodes: list[fx.Node] = []
    live, moving = _ancestors(written.graph), set(inputs)
    held = {_memory(v) for v in values.values() if isinstance(v, Tensor)}
    read: set[int] = set()
    for node in written.graph.nodes:
        if node.op == "get_attr" and node not in values:
            values[node] = _attribute(program.graph_module, str(node.target))
        if node.op != "call_function" or node not in live:
            continue
        if not isinstance(node.target, torch._ops.OpOverload) and node.target not in _PLAIN:
            raise Refused(f"{where(node)}: {node.target} is not a tensor operation; export the model as plain aten")
        if any(i in moving for i in node.all_input_nodes):
            refuse_mutation(node, moving)
            moving.add(node)
            nodes.append(node)
            read |= {_memory(t) for n in node.all_input_nodes for t in flat_tensors(values.get(n))}
        elif node in written.added:
            native[node] = _evaluate(node, {**values, **native}, read, held)
            values[node] = _evaluate(node, {n: in_float64(values[n]) for n in node.all_input_nodes}, read, held)
        else:
            values[node] = _evaluate(node, values, read, held)
    outputs = tuple(o for o in _outputs(written.graph) if o in moving)
    for node in outputs:
        if any(t.is_complex() for t in flat_tensors(node.meta.get("val"))):
            raise Refused(f"{where(node)}: the network returns complex numbers; return torch.view_as_real of them")
    return Program(tuple(nodes), tuple(inputs), outputs, values, native=native)


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
        if node.op == "output" or is_mutable(node) or node in live:
            live.add(node)
            live.update(node.all_input_nodes)
    return live


def _attribute(module: fx.GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _evaluate(node: fx.Node, values: dict[fx.Node, Any], read: set[int], held: set[int]) -> Any:
    """Run a node that does not see the input, as the model would, writes included; chance is refused.

    `read` are the memories that operations on the input have read so far: they are not overwritten, but copied. `held`
    are those of parameters and buffers, which may not be written.
    """
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        raise Refused(f"{where(node)} draws random numbers ({node.target}): the map differs from call to call")
    args: Any = fx.node.map_arg(node.args, lambda n: values[n])
    kwargs = fx.node.map_arg(node.kwargs, lambda n: values[n])
    for written in written_arguments(node):
        memories = {_memory(t) for t in flat_tensors(fx.node.map_arg((written,), lambda n: values[n]))}
        if memories & held:
            raise Refused(f"{where(node)} changes a parameter or buffer: the map differs from call to call")
        if memories & read:  # operations ahead of this one keep the old values
            refuse_mutation(node, set())
            return perform(node, args, kwargs)
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _memory(t: Tensor) -> int:
    if t.layout is not torch.strided:
        kind = str(t.layout).removeprefix("torch.")
        raise Refused(
            f"a tensor of shape {tuple(t.shape)} is stored as {kind}, which no rule reads: use its to_dense()"
        )
    return t.untyped_storage().data_ptr()


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "output":
            fx.node.map_arg(node.args, found.append)
    return found
