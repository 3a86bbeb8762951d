"""From a module to the list of operations it performs: non-strict `torch.export`, constants evaluated.

Why `torch.export`: it spells every operation once (aten), shows hooks, overridden forwards, parametrisations and padding
modes as explicit nodes, and keeps the module path and the source line of each. Operations that write in place become their
functional forms (`ExportedProgram.run_decompositions`). Data-dependent control flow cannot be captured, and is refused; so
are changes of parameters and buffers, training mode, and reduced precision.
"""

import contextlib
import copy
import functools
import io
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from equipoise.core import (
    EquipoiseError,
    InputError,
    Refused,
    explained,
    flat_outputs,
    flat_tensors,
    run_on,
    unlogged,
)
from equipoise.lipschitz.decompose import decompose, is_mutable
from equipoise.lipschitz.regions import Region, find_regions
from equipoise.lipschitz.values import aten_name, in_float64, perform, where

#: functions a graph may call besides registered operators
_PLAIN = (operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv)

Examples = tuple[Tensor, ...]


@dataclass(frozen=True)
class Program:
    """The operations between the user's inputs and outputs; `constants` holds the value of every other node.

    `regions` are the calls of modules that bound themselves and are trusted; `notes` say what the example represents.
    `doubt` is why the network has no bound although every operation may have one; empty where there is no reason.
    `native` are constants as the network itself computes them, where `constants` has them in float64.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    constants: dict[fx.Node, Any] = field(repr=False)
    regions: tuple[Region, ...] = ()
    notes: tuple[str, ...] = ()
    doubt: str = ""
    native: dict[fx.Node, Any] = field(default_factory=dict, repr=False)


def capture(
    model: nn.Module | ExportedProgram, example_input: Any, *, batch_dim: int | None = 0
) -> Program:
    """Capture the model on one example; with a batch of several, on the first sample (see `choose_example`).

    Args:
        model: a module in evaluation mode, or an exported program.
        example_input: a floating tensor, or a tuple of them; not read for an exported program.
        batch_dim: the dimension along which inputs hold samples; None: the input is one sample as it is.

    Guarantee: the program's nodes are all operations between input and output, in order. The rules bound the map of the
    whole tensors, with a batch of one. On three points, with and without gradients, the program must give what the model
    itself gives: a check, not a proof, that the forward is the same function whether it is traced or called.
    """
    if isinstance(model, ExportedProgram):
        return analyse(model)
    require_module(model)
    model, stored = _in_single_precision(model)
    examples = as_examples(example_input)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers are left as they were
        chosen, note, doubt = choose_example(model, examples, batch_dim)
        program = analyse(export(model, chosen))
        if not doubt and not _agrees(model, program, chosen):
            doubt = _DIFFERS
    notes = tuple(text for text in (note, stored) if text)
    return replace(program, regions=find_regions(model, program), notes=notes, doubt=doubt)


def require_module(model: Any) -> None:
    """Refuse what is no module, is quantised, or is in training mode."""
    if not isinstance(model, nn.Module):
        raise InputError(f"expected an nn.Module or an ExportedProgram, got {type(model).__name__}")
    matters = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.RReLU)
    for path, module in model.named_modules():
        if "quantized" in type(module).__module__:
            raise Refused(
                f"module {path} computes in integers, which round: bound the network that was quantised"
            )
        if module.training and (
            isinstance(module, matters) or not type(module).__module__.startswith("torch.nn.")
        ):
            raise Refused(
                f"module {path or 'the model'} ({type(module).__name__}) is in training mode, in which the map depends on the "
                "batch or on chance; call model.eval() first"
            )


# --- the example, and whether samples stay apart -------------------------------------------------------------------------


def as_examples(example_input: Any, name: str = "example_input") -> Examples:
    """The example as a tuple of floating tensors; anything else is refused with what came.

    Args:
        example_input: a tensor, or a tuple or list of tensors.
        name: of the argument, for messages.
    """
    examples = example_input if isinstance(example_input, tuple | list) else (example_input,)
    if not examples:
        raise InputError(f"{name} is an empty tuple; pass a float tensor")
    for x in examples:
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_meta:
            kind = f"{x.layout} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(
                f"{name} must be a tensor or a tuple of tensors, dense and with values, got {kind}"
            )
        if not x.is_floating_point():
            raise Refused(
                f"{name} has dtype {x.dtype}; the bound is for real-valued inputs: pass float32 or float64 (for tokens, bound "
                "the network that follows the embedding; for a quantised network, the one that was quantised)"
            )
        if x.numel() == 0:
            raise InputError(f"{name} is empty (shape {tuple(x.shape)})")
    if len({x.shape[0] if x.dim() else 1 for x in examples}) > 1:
        raise InputError(f"the tensors of {name} must share their first (batch) dimension")
    return tuple(_widen(x) for x in examples)


def as_batch(x: Any) -> Tensor:
    """The inputs of a network with one input: a finite float tensor with a batch dimension, or a tuple of one."""
    batch, *others = as_examples(x, "x")
    if others:
        raise InputError(
            f"expected the one input of a network, got {len(x)} tensors: fix the others inside the model, or use "
            "lipschitz_bound, which takes several"
        )
    if batch.dim() < 2 or not torch.isfinite(batch).all():
        raise InputError(
            f"x needs a batch dimension and finite values, got shape {tuple(batch.shape)}"
        )
    return batch


def _widen(tensor: Tensor) -> Tensor:
    """A tensor in half precision or less in float32, which holds the same numbers."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def _in_single_precision(model: nn.Module) -> tuple[nn.Module, str]:
    """A network stored in float16 or bfloat16 as its float32 copy, which holds the same weights exactly, with a note."""
    tensors = (*model.parameters(), *model.buffers())
    narrow = {t.dtype for t in tensors if _widen(t) is not t}
    if not narrow:
        return model, ""
    stored = ", ".join(sorted(str(d).removeprefix("torch.") for d in narrow))
    note = f"stored in {stored}: the bound is for the real map of the stored weights"
    return copy.deepcopy(model)._apply(_widen), note


def choose_example(
    model: nn.Module, examples: Examples, batch_dim: int | None = 0
) -> tuple[Examples, str, str]:
    """One sample, as a batch of one, where the model treats `batch_dim` as a batch; else the whole example.

    The whole where there is no batch dimension, and where the model does not run on one sample. There is no bound per sample
    where the samples of a batch mix, or where an output of several samples has no batch dimension (`x.mean()`).

    Args:
        model: in evaluation mode.
        examples: the inputs.
        batch_dim: the dimension of the inputs that holds samples; None: none does.

    Returns:
        The tensors to capture the model on, a note about them, and why there is no bound, if there is none.
    """
    examples = tuple(x.detach().clone() for x in examples)
    if batch_dim is None or all(x.dim() < 2 for x in examples):
        why = "batch_dim is None" if batch_dim is None else "the input has no batch dimension"
        return examples, f"{why}: the bound is for the input as a whole", ""
    if not all(-x.dim() <= batch_dim < x.dim() for x in examples):
        raise InputError(
            f"batch_dim is {batch_dim}, but the inputs have shapes {[tuple(x.shape) for x in examples]}"
        )
    count = examples[0].shape[batch_dim]
    single = _sample(examples, batch_dim, 0)
    if _outputs(model, single) is None:  # with a batch of one the capture says why
        whole = f"the model does not run on one sample: the bound is for the example as a whole, a batch of {count}"
        return examples, whole if count > 1 else "", ""
    batch = _samples(examples, batch_dim)
    reasons = (_mixture(net, point, batch_dim) for net, point in _precisions(model, batch))
    reason = next(reasons)
    if reason == _MIXED and next(reasons, _MIXED) == "":
        reason = ""
    if reason != _NO_BATCH:
        return single, "", reason
    todo = "pass one sample, or batch_dim=None to bound the input as a whole"
    doubt = f"{_NO_BATCH}; {todo}" if count > 1 else ""
    return single, f"{_NO_BATCH}: the bound is for a batch of one", doubt


def _sample(examples: Examples, dim: int, index: int) -> Examples:
    """One sample, as a batch of one."""
    return tuple(x.narrow(dim, index, 1).clone() for x in examples)


_MIXED = (
    "the output of one sample depends on the other samples of its batch (a mean, a sum or a recurrence over the batch "
    "dimension?), so a Lipschitz bound per sample does not exist; say which dimension holds the samples (batch_dim=1 for "
    "recurrent layers without batch_first), or batch_dim=None to bound the input as a whole"
)
_NO_BATCH = "an output has no batch dimension, or the model does not run on several samples"
#: samples that are compared: of small inputs at least (a prime, so that no shift along the batch ends where it began), of large
#: inputs at least and at most, and what is small, in entries
_SMALL, _FEWEST, _MOST, _ENTRIES = 11, 3, 8, 2**18
#: difference of a sample alone and next to others that rounding may explain
_MIXING = {torch.float32: 1e-3, torch.float64: 1e-7}


def _samples(examples: Examples, dim: int) -> Examples:
    """Random samples next to each other: as many as in the example, so that samples that mix at a distance are seen."""
    count = examples[0].shape[dim]
    size = max(_SMALL, count)
    if size * sum(x.numel() for x in examples) > _ENTRIES * count:
        size = max(_FEWEST, min(count, _MOST))
    generator = torch.Generator().manual_seed(0)
    batch = []
    for x in examples:
        shape = list(x.shape)
        shape[dim] = size
        batch.append(torch.randn(shape, generator=generator, dtype=x.dtype).to(x.device))
    return tuple(batch)


def _batch_dim(alone: Tensor, together: Tensor, size: int) -> int | None:
    """The dimension of an output that holds the samples: the one that grew with their number."""
    for d, n in enumerate(alone.shape):
        if together.shape == (*alone.shape[:d], size * n, *alone.shape[d + 1 :]):
            return d
    return None


def _precisions(model: nn.Module, point: Examples) -> Iterator[tuple[nn.Module, Examples]]:
    """The model in its own precision, then in float64: large offsets cancel with rounding."""
    yield model, point
    try:
        wide = copy.deepcopy(model).double()
    except Exception:  # noqa: BLE001 – a module may forbid copies in any way
        return
    yield wide, tuple(x.double() for x in point)


def _mixture(model: nn.Module, batch: Examples, dim: int) -> str:
    """Why the first or the last sample does not give alone what it gives next to others, and next to samples of NaN.

    A check, not a proof; empty where they do. Both ends, so that samples that read only those before them, or only those
    after them, are seen.
    """
    size = batch[0].shape[dim]
    for i in (0, size - 1):
        sample = _sample(batch, dim, i)
        poisoned = tuple(torch.full_like(x, torch.nan) for x in batch)
        for x, one in zip(poisoned, sample, strict=True):
            x.narrow(dim, i, 1).copy_(one)
        alone = _outputs(model, sample)
        for others in (batch, poisoned):
            together = _outputs(model, others)
            if together is None and others is poisoned:
                continue  # the model refuses NaN
            if alone is None or together is None:
                return _NO_BATCH
            for a, t in zip(alone, together, strict=True):
                d = _batch_dim(a, t, size)
                if d is None:
                    return _NO_BATCH
                if not _agree(a, t.chunk(size, d)[i], _MIXING, 1.0):
                    return _MIXED
    return ""


def _outputs(model: nn.Module, inputs: Examples) -> list[Tensor] | None:
    """The model's floating outputs, or None where it does not run on these inputs."""
    try:
        return flat_outputs(run_on(model, [x.clone() for x in inputs]))
    except EquipoiseError:
        return None


# --- the exported program, and whether it is the model --------------------------------------------------------------------


#: largest difference between the program and the model, relative to the largest entry, that rounding may explain
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-10}
_DIFFERS = (
    "the captured graph gives other values than the model itself, so a bound of one says nothing of the other; "
    "remove branches on torch.compiler.is_compiling(), torch.is_grad_enabled() and their like, hooks and hidden state"
)


def _agrees(model: nn.Module, program: Program, examples: Examples) -> bool:
    """Whether program and model agree on the example and two random points, with and without gradients."""
    generator = torch.Generator().manual_seed(0)

    def same(net: nn.Module, point: Examples) -> bool:
        theirs = [t.detach() for t in flat_outputs(net(*(x.clone() for x in point)))]
        with torch.no_grad():
            ours = run_program(program, point, exact=net is not model)
        return len(ours) == len(theirs) and all(map(_agree, ours, theirs))

    for scale in (0.0, 1.0, 30.0):
        point = tuple(
            (scale * torch.randn(x.shape, generator=generator, dtype=x.dtype)).to(x.device)
            for x in examples
        )
        with torch.set_grad_enabled(scale == 1):
            if not any(same(*each) for each in _precisions(model, point if scale else examples)):
                return False
    return True


def run_program(program: Program, inputs: Sequence[Tensor], *, exact: bool = False) -> list[Tensor]:
    """The floating outputs of the program, constant ones included, in order.

    Args:
        program: as captured.
        inputs: one tensor per input.
        exact: in float64, as the real functions that operations stand for (see `values`).
    """

    values = dict(zip(program.inputs, inputs, strict=True))

    def value(node: fx.Node) -> Any:
        if node in values:
            return values[node]
        if exact:
            return in_float64(program.constants[node])
        return program.native.get(node, program.constants[node])

    for node in program.nodes:
        values[node] = perform(node, value, exact=exact)
    return flat_outputs(
        [
            values[o] if o in values else program.constants.get(o)
            for o in _returned(program.inputs[0].graph)
        ]
    )


def as_function(program: Program) -> Callable[[Tensor], Tensor]:
    """The captured program in float64 on a batch, as the real function it computes."""

    def one(sample: Tensor) -> Tensor:
        return torch.cat(
            [t.double().flatten() for t in run_program(program, [sample[None]], exact=True)]
        )

    return functools.partial(mapped, one)


def mapped(one: Callable[..., Tensor], *batches: Tensor) -> Tensor:
    """A function of one sample on every sample.

    Args:
        one: the function.
        batches: one for each of its arguments.
    """
    try:
        return torch.func.vmap(one)(*batches)
    except RuntimeError:  # an operation that cannot be mapped over a batch
        return torch.stack([one(*each) for each in zip(*batches, strict=True)])


def _agree(
    a: Tensor, b: Tensor, rounding: dict[torch.dtype, float] = _ROUNDING, least: float = 0.0
) -> bool:
    """Whether two outputs differ by no more than rounding, relative to the largest entry plus `least`."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    finite = torch.cat([a[a.isfinite()], b[b.isfinite()]]).abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(
        a, b, rtol=0, atol=rounding.get(a.dtype, 1e-2) * (largest + least), equal_nan=True
    )


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """Without the exporter's warnings and logs of every failed guard: a refusal says it once."""
    cudnn: Any = torch.backends.cudnn
    with contextlib.ExitStack() as stack:
        try:
            _ = cudnn.allow_tf32
        # precision was set by the new switches, and the exporter reads the old one
        except RuntimeError:
            for owner in (cudnn.conv, cudnn.rnn):
                stack.callback(setattr, owner, "fp32_precision", owner.fp32_precision)
            cudnn.allow_tf32 = True
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(unlogged())
        printed = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        warnings.simplefilter("ignore")
        yield
    if printed.getvalue():  # by the network itself, since nothing was raised
        sys.stderr.write(printed.getvalue())


def export(model: nn.Module, examples: Examples) -> ExportedProgram:
    """`torch.export` with its failures turned into one sentence.

    Args:
        model: in evaluation mode.
        examples: what it is run and exported on.
    """
    run_on(model, examples)
    failure = "the forward cannot be captured, e.g. as its control flow depends on the data: there is no fixed graph to bound"
    todo = "; replace Python branches on tensor values by tensor operations, or bound the parts separately"
    with explained(failure, todo, Refused), torch.no_grad(), _exporting():
        return torch.export.export(model, examples, strict=False)


def _functional(program: ExportedProgram) -> ExportedProgram:
    """The program without operations that write into their arguments."""
    if not is_mutable(program.graph_module.graph):
        return program
    failure = "operations that write in place could not be taken apart"
    todo = "; write them out of place (e.g. torch.relu(x) for torch.relu_(x))"
    with explained(failure, todo, Refused), torch.no_grad(), _exporting():
        program = program.run_decompositions({})
    if program.graph_signature.buffers_to_mutate:
        names = ", ".join(program.graph_signature.buffers_to_mutate.values())
        raise Refused(
            f"the forward changes a parameter or buffer ({names}): the map differs from call to call"
        )
    return program


def analyse(program: ExportedProgram) -> Program:
    """Split an exported program into constants and the nodes that carry the input to the output."""
    program = _functional(program)
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    inputs: list[fx.Node] = []
    for node in program.graph_module.graph.nodes:
        if node.op == "placeholder" and kinds.get(node.name) is InputKind.USER_INPUT:
            _require_tensor(node)
            inputs.append(node)
    if not inputs:
        raise InputError("the program has no tensor input: there is nothing to be Lipschitz in")
    # their new values come before the outputs
    changed = len(program.graph_signature.user_inputs_to_mutate)
    plain = decompose(program.graph_module.graph, inputs)
    returned: Any = plain.graph.output_node()
    returned.args = (returned.args[0][changed:],)
    inputs = [plain.places[n] for n in inputs]
    values = {plain.places[n]: v for n, v in _stored(program).items()} | plain.constants
    native: dict[fx.Node, Any] = {}
    nodes: list[fx.Node] = []
    live, moving = _ancestors(plain.graph), set(inputs)
    for node in list(plain.graph.nodes):
        if node.op == "get_attr" and node not in values:
            values[node] = operator.attrgetter(str(node.target))(program.graph_module)
        if node.op != "call_function" or node not in live:
            continue
        if not isinstance(node.target, torch._ops.OpOverload) and node.target not in _PLAIN:
            raise Refused(
                f"{where(node)}: {node.target} is not a tensor operation; export the model as plain aten"
            )
        if not any(i in moving for i in node.all_input_nodes):
            if node in plain.added:
                native[node] = _evaluate(node, {**values, **native}.__getitem__)
                values[node] = _evaluate(node, lambda n: in_float64(values[n]))
            else:
                values[node] = _evaluate(node, values.__getitem__)
        elif _reads_shape_only(node, moving):
            values[node] = _evaluate(node, lambda n: values[n] if n in values else _zeros(n))
        else:
            _narrow_constants(node, plain.graph, values)
            moving.add(node)
            nodes.append(node)
    outputs = tuple(o for o in _returned(plain.graph) if o in moving)
    for node in outputs:
        if any(t.is_complex() for t in flat_tensors(node.meta.get("val"))):
            raise Refused(
                f"{where(node)}: the network returns complex numbers; return torch.view_as_real of them"
            )
    return Program(tuple(nodes), tuple(inputs), outputs, values, native=native)


def _stored(program: ExportedProgram) -> dict[fx.Node, Any]:
    """Parameters, buffers and constants by placeholder."""
    values: dict[fx.Node, Any] = {}
    by_name = {n.name: n for n in program.graph_module.graph.nodes if n.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        node = by_name[spec.arg.name]
        if spec.kind is InputKind.PARAMETER or (spec.kind is InputKind.BUFFER and spec.persistent):
            values[node] = _strided(program.state_dict[str(spec.target)])
        elif spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            constant = program.constants[str(spec.target)]
            values[node] = _strided(constant) if isinstance(constant, Tensor) else constant
        elif spec.kind is not InputKind.USER_INPUT:
            raise Refused(
                f"the program takes an input of kind {spec.kind.name} ({spec.arg.name}), which is not bounded"
            )
    return values


def _strided(tensor: Tensor) -> Tensor:
    """Without gradients, and without a conjugation or sign that is still to be carried out."""
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise Refused(
            f"a tensor of shape {tuple(tensor.shape)} is stored as {kind}, which no rule reads: use its to_dense()"
        )
    return tensor.detach().resolve_conj().resolve_neg()


#: operations that read nothing but the shape of their first argument, or of their second
_LIKE = ("zeros_like.default", "ones_like.default", "full_like.default", "new_zeros.default", "new_ones.default",
         "new_full.default", "fill.Scalar", "fill.Tensor", "copy.default")  # fmt: skip
_AS = ("expand_as.default", "view_as.default", "reshape_as.default")


def _reads_shape_only(node: fx.Node, moving: set[fx.Node]) -> bool:
    """Whether the input enters the node by its shape alone, so that the result is constant."""
    if aten_name(node) in _LIKE:
        return not any(argument in moving for argument in node.args[1:2])
    return aten_name(node) in _AS and node.args[0] not in moving


def _zeros(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    return torch.zeros(value.shape, dtype=value.dtype)


def _narrow_constants(node: fx.Node, graph: fx.Graph, values: dict[fx.Node, Any]) -> None:
    """A constant of one number in float64 does not widen a float32 operation: PyTorch reads it in float32, and so do we."""
    result = node.meta.get("val")
    if not isinstance(result, Tensor) or result.dtype != torch.float32:
        return
    for source in node.all_input_nodes:
        value = values.get(source)
        if isinstance(value, Tensor) and value.dim() == 0 and value.dtype == torch.float64:
            with graph.inserting_before(node):
                narrow = graph.create_node("get_attr", f"{source.name}_float32")
            narrow.meta["val"] = values[narrow] = value.float()
            node.replace_input_with(source, narrow)


def _require_tensor(node: fx.Node) -> None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise Refused(
            f"input {node.name!r} is a {type(value).__name__}, not a tensor; fix it inside the model first"
        )
    if not all(isinstance(s, int) for s in value.shape):
        raise Refused(
            f"input {node.name!r} has a symbolic shape {tuple(value.shape)}; export with static shapes"
        )
    if value.dtype not in (torch.float32, torch.float64):
        raise Refused(
            f"input {node.name!r} has dtype {value.dtype}; the bound is for float32 or float64 inputs: "
            "hold it fixed in a module of your own, for a bound with respect to the others"
        )


def _ancestors(graph: fx.Graph) -> set[fx.Node]:
    """Nodes the output needs."""
    live: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node.op == "output" or node in live:
            live.add(node)
            live.update(node.all_input_nodes)
    return live


def _evaluate(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """Run a node that does not see the input, as the model would; chance is refused."""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise Refused(
            f"{where(node)} draws random numbers ({node.target}): the map differs from call to call"
        )
    with torch.no_grad():
        return perform(node, value)


def _returned(graph: fx.Graph) -> list[fx.Node]:
    """What the output node reads, in order."""
    nodes: list[fx.Node] = []
    fx.node.map_arg(graph.output_node().args, nodes.append)
    return nodes
