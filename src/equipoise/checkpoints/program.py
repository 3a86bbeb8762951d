"""`.pt2` programs, read without PyTorch's reader: the graph is built anew, operation by operation, from an untrusted file.

`torch.export.load` unpickles, evaluates symbolic expressions, imports classes that a file names, and compiles names and guards
of the file as Python code; a stored program states the shape of every value, and PyTorch takes its word. Here a file is a list
of operations and a list of weights, and nothing else in it is used:

* each operation is one that a file may call (`equipoise.checkpoints.operations`), with plain arguments;
* names are identifiers, since PyTorch writes them into the code of the graph;
* weights are views of stored bytes, inside of these bytes;
* shapes are computed by running the operations on tensors without numbers, at a given size of the batch, and each value's
  memory is bounded before it exists. No kernel runs while a file is opened.

Inputs are taken one after the other, and outputs returned as a tensor or a tuple: how the exported model nested them is not
read, nor are pickles (sample inputs), guards, stated shapes, ranges of symbols but the batch's, and remarks.
"""

from __future__ import annotations

import io
import keyword
import math
import operator
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._export.serde.serialize import (
    _SERIALIZE_TO_TORCH_DTYPE,
    _SERIALIZE_TO_TORCH_LAYOUT,
    _SERIALIZE_TO_TORCH_MEMORY_FORMAT,
)
from torch._export.verifier import TrainingIRVerifier
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from equipoise.checkpoints.operations import check_arguments_of, find_operation
from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line, unlogged
from equipoise.core.files import Digest, digest_document, parse_json, read_bounded
from equipoise.core.modules import LARGEST, flat_tensors

#: an archive longer than this is not read
LARGEST_ARCHIVE = 2**37
#: a description longer than this is not read
LARGEST_JSON = 200_000_000
#: a program of more operations is not read
MOST_NODES = 50_000
#: bytes of all values together that do not depend on the input, which are computed and kept
LARGEST_CONSTANTS = 2**33

_NAME = re.compile(r"^[A-Za-z_]\w{0,199}$", re.ASCII)
_PART = re.compile(r"^[A-Za-z0-9_][\w-]{0,199}$", re.ASCII)
_FRAME = re.compile(r"^[\w.@<>\[\]/: -]{0,300}$", re.ASCII)
_SYMBOL = re.compile(r"^Symbol\('(\w{1,40})'[\w=, ]*\)$", re.ASCII)
_STORED = re.compile(r"^(weight|tensor)_\d{1,9}$", re.ASCII)

#: arithmetic on sizes, done here in whole numbers
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    f"_operator.{name}": getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge")
}
_ARITHMETIC |= {"torch.sym_max": max, "torch.sym_min": min}
_SIZES: dict[str, Callable[..., Any]] = {
    "torch.ops.aten.sym_size.int": Tensor.size,
    "torch.ops.aten.sym_numel.default": Tensor.numel,
    "torch.ops.aten.sym_stride.int": Tensor.stride,
}
_ASSERTIONS = (
    "torch.ops.aten._assert_scalar.default",
    "torch.ops.aten._assert_tensor_metadata.default",
)
#: inputs of a graph that a file brings along
_STORED_INPUTS = {
    "parameter": InputKind.PARAMETER,
    "buffer": InputKind.BUFFER,
    "tensor_constant": InputKind.CONSTANT_TENSOR,
}
#: arguments of an operation that are plain values
_PLAIN = {"as_int": int, "as_bool": bool, "as_float": int | float, "as_string": str}
_LISTED = (*_PLAIN, "as_tensor", "as_sym_int", "as_optional_tensor")


def load_program(path: str | Path, batch: int = 1) -> ExportedProgram:
    """Open a `.pt2` written by `torch.export.save`; see the module for what is refused.

    Args:
        path: the file.
        batch: the size at which a dynamic batch dimension is fixed, or the nearest one that the program allows; programs
            with static shapes keep their own.
    """
    return read_program(path, batch)[0]


def read_program(path: str | Path, batch: int = 1) -> tuple[ExportedProgram, str]:
    """The program in a `.pt2` file, and the digest of what is stored, whatever the batch it is loaded for.

    Args:
        path: the file.
        batch: the size at which a dynamic batch dimension is fixed.
    """
    data = read_bounded(path, LARGEST_ARCHIVE)
    try:
        with unlogged():
            return _read(data, batch)
    except EquipoiseError as error:
        raise type(error)(f"{path}: {error}") from error
    except Exception as error:  # whatever operations raise that do not fit together
        reason = f"{type(error).__name__}: {one_line(error)[:160]}"
        raise InputError(
            f"{path} is not a program this PyTorch can read ({reason}); export it again"
        ) from error


def _read(data: bytes, batch: int) -> tuple[ExportedProgram, str]:
    entries = _entries(data)
    document = _document(entries, "models/model.json")
    weights: dict[str, Tensor] = {}
    for kind in ("weights", "constants"):
        listed = _document(entries, f"data/{kind}/model_{kind}_config.json")
        for key, payload in _get(listed, "config", dict).items():
            weights[_path(key)] = _weight(payload, key, kind, entries)
    program = _Reader(document, weights, batch).program()

    # operations, inputs, outputs and weights as they are stored
    graph = document["graph_module"]["graph"]
    calls = [(node["target"], node["inputs"], node["outputs"]) for node in graph["nodes"]]
    digest = Digest("stored program")
    digest.add(
        "graph",
        digest_document([calls, graph["tensor_values"], document["graph_module"]["signature"]]),
    )
    for key, value in sorted(weights.items()):
        digest.add(key, value)
    return program, str(digest)


# ---- the archive ------------------------------------------------------------------------------------------------------


def _entries(data: bytes) -> dict[str, bytes]:
    """The entries of the archive without their common folder; repeated, compressed or damaged ones are refused."""
    entries: dict[str, bytes] = {}
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        for info in archive.infolist():
            entry = info.filename.partition("/")[2]
            if entry in entries:
                raise Refused(
                    f"it holds the entry {entry[:100]!r} twice: two readers would see two different files"
                )
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise Refused(
                    f"it holds {entry[:100]!r} compressed, which PyTorch never does; export it again"
                )
            if info.file_size > len(data):
                raise Refused(
                    f"it holds {entry[:100]!r}, which declares more bytes than the whole file has"
                )
            entries[entry] = archive.read(info)
    except EquipoiseError:
        raise
    except Exception as error:  # the many ways in which a damaged archive fails
        raise InputError(f"it is not a .pt2 file, or damaged: {one_line(error)[:160]}") from error

    for entry, expected in (("archive_format", b"pt2"), ("byteorder", b"little")):
        if entries.get(entry) != expected:
            raise InputError(
                f"it says {entries.get(entry, b'')[:20]!r} in {entry!r}, expected {expected!r}"
            )
    return entries


def _document(entries: dict[str, bytes], entry: str) -> Any:
    if entry not in entries:
        raise InputError(
            f"it holds no {entry!r}: it is not written by torch.export.save of this PyTorch"
        )
    if len(entries[entry]) > LARGEST_JSON:
        raise Refused(f"{entry!r} is larger than {LARGEST_JSON:,} bytes")
    return parse_json(entries[entry], f"{entry!r}")


def _weight(payload: Any, key: str, kind: str, entries: dict[str, bytes]) -> Tensor:
    """A stored tensor: sizes, strides and offset stay inside the stored bytes, and cannot ask for much more than these."""
    stored = _get(payload, "path_name", str)
    if payload.get("use_pickle") is not False or not _STORED.match(stored):
        raise Refused(
            f"it stores {key[:80]!r} as an object that would be unpickled: export tensors only"
        )
    content = entries.get(f"data/{kind}/{stored}")
    if content is None:
        raise InputError(f"it lacks the stored numbers {stored!r} of {key[:80]!r}: it is damaged")

    meta = _get(payload, "tensor_meta", dict)
    dtype = _dtype(meta, f"weight {key[:80]!r}")
    sizes = [_get(size, "as_int", int) for size in _get(meta, "sizes", list)]
    strides = [_get(stride, "as_int", int) for stride in _get(meta, "strides", list)]
    offset = _get(_get(meta, "storage_offset", dict), "as_int", int)
    strided = _SERIALIZE_TO_TORCH_LAYOUT.get(meta.get("layout")) is torch.strided
    if not strided or len(sizes) != len(strides) or min([0, offset, *sizes, *strides]) < 0:
        raise InputError(
            f"the weight {key[:80]!r} has the sizes {sizes} and strides {strides}: it is damaged"
        )

    count = math.prod(sizes)
    numbers = len(content) // dtype.itemsize
    last = offset + sum((s - 1) * t for s, t in zip(sizes, strides, strict=True)) if count else -1
    if last >= numbers or count > 1024 * max(numbers, 1):
        raise InputError(
            f"the weight {key[:80]!r} reaches beyond the {len(content):,} bytes stored for it"
        )

    flat = (
        torch.frombuffer(bytearray(content), dtype=dtype, count=numbers)
        if numbers
        else torch.empty(0, dtype=dtype)
    )
    return flat.as_strided(sizes, strides, offset)


# ---- plain values -----------------------------------------------------------------------------------------------------


def _get(document: Any, key: str, kind: type) -> Any:
    """A field of this type."""
    value: Any = document.get(key) if isinstance(document, dict) else None
    fits = isinstance(value, kind)
    if not fits or (kind is int and isinstance(value, bool)):
        raise InputError(
            f"it has {str(value)[:60]!r} as {key!r}, expected {kind.__name__}; export it again"
        )
    if kind is int and abs(value) >= 2**63:
        raise InputError(f"it has a whole number beyond 64 bits as {key!r}; export it again")
    return value


def _tagged(value: Any) -> tuple[str, Any]:
    """A tagged union: its one key that is set, and its value."""
    keys = [key for key in value if value[key] is not None] if isinstance(value, dict) else []
    if len(keys) != 1:
        raise Refused(f"it has {str(value)[:80]!r} where one value belongs; export it again")
    return keys[0], value[keys[0]]


def _dtype(meta: Any, what: str) -> torch.dtype:
    dtype = _SERIALIZE_TO_TORCH_DTYPE[_get(meta, "dtype", int)]
    if dtype.is_floating_point and dtype.itemsize < 4:
        raise Refused(
            f"it has the {what} in {str(dtype).removeprefix('torch.')}: bounds and certificates are for float32 and "
            "float64; export model.float()"
        )
    return dtype


def _identifier(value: Any) -> str:
    """A name that may stand in code."""
    if not (isinstance(value, str) and _NAME.match(value)) or keyword.iskeyword(value):
        raise Refused(
            f"it calls something {str(value)[:80]!r}, which is no name: names become code"
        )
    return value


def _path(value: Any) -> str:
    """Names joined by dots."""
    parts = value.split(".") if isinstance(value, str) else [""]
    if not all(_PART.match(p) and not (p.startswith("__") and p.endswith("__")) for p in parts):
        raise Refused(f"it calls a weight {str(value)[:80]!r}, which is no name: names become code")
    return str(value)


# ---- the graph --------------------------------------------------------------------------------------------------------


class _Reader:
    """Builds the graph of one file: `values` maps the file's names to nodes, or to whole numbers for sizes."""

    def __init__(self, document: Any, weights: dict[str, Tensor], batch: int) -> None:
        self.weights = weights
        self.batch = batch
        module = _get(document, "graph_module", dict)
        self.description = _get(module, "graph", dict)
        self.signature = _get(module, "signature", dict)
        self.ranges = document.get("range_constraints") or {}

        self.graph = fx.Graph()
        self.values: dict[str, Any] = {}
        self.constant: set[fx.Node] = set()
        self.constant_bytes = 0
        self.mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=False)

    def program(self) -> ExportedProgram:
        inputs = [self.input(spec) for spec in _get(self.signature, "input_specs", list)]
        nodes = _get(self.description, "nodes", list)
        if len(nodes) > MOST_NODES:
            raise Refused(
                f"it has {len(nodes):,} operations; at most {MOST_NODES:,} are read from a file"
            )
        for node in nodes:
            self.node(node)
        results = [self.output(spec) for spec in _get(self.signature, "output_specs", list)]
        self.graph.output(tuple(results))
        outputs = [
            OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in results
        ]

        # inputs one after the other, outputs as a tensor or a tuple
        users = [spec.arg for spec in inputs if spec.kind is InputKind.USER_INPUT]
        call = ModuleCallSignature(
            users,
            [spec.arg for spec in outputs],
            pytree.tree_structure(((0,) * len(users), {})),
            pytree.tree_structure(0 if len(outputs) == 1 else (0,) * len(outputs)),
        )
        parameters = {str(spec.target) for spec in inputs if spec.kind is InputKind.PARAMETER}
        stored = parameters | {str(spec.target) for spec in inputs if spec.persistent}
        state = {key: value for key, value in self.weights.items() if key in stored}
        for key in parameters:
            state[key] = nn.Parameter(state[key], requires_grad=state[key].is_floating_point())
        return ExportedProgram(
            root=nn.Module(),
            graph=self.graph,
            graph_signature=ExportGraphSignature(inputs, outputs),
            state_dict=state,
            range_constraints={},
            module_call_graph=[ModuleCallEntry("", call)],
            constants={key: value for key, value in self.weights.items() if key not in stored},
            verifiers=[TrainingIRVerifier],  # in-place operations may stand in the graph
        )

    # ---- inputs and outputs

    def input(self, value: Any) -> InputSpec:
        """An input of the graph: a weight of the file, or a tensor that the user gives."""
        tag, body = _tagged(value)
        argument = _get(body, "arg", dict)
        if tag == "user_input":
            label, argument = _tagged(argument)
            if label != "as_tensor":
                raise Refused(
                    f"it takes an input {label[:60]!r} that is no tensor: fix it inside the model"
                )
        elif tag not in _STORED_INPUTS:
            raise Refused(
                f"it takes an input of the kind {tag[:60]!r}: export it with tensors as inputs only"
            )

        name = _identifier(argument.get("name"))
        node = self.graph.placeholder(name)
        self.values[name] = node
        if tag == "user_input":
            node.meta["val"] = self.user_input(name)
            return InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None)

        target = _path(body.get(f"{tag}_name"))
        if target not in self.weights:
            raise InputError(f"it lacks the weight {target[:80]!r}: it is damaged")
        weight = self.weights[target]
        self.constant.add(node)
        with self.mode:
            node.meta["val"] = torch.empty_strided(
                weight.shape, weight.stride(), dtype=weight.dtype
            )
        persistent = body.get("persistent") is True if tag == "buffer" else None
        return InputSpec(_STORED_INPUTS[tag], TensorArgument(node.name), target, persistent)

    def user_input(self, name: str) -> Tensor:
        """A tensor of the shape that the file states for an input, which is the user's to meet; the batch may be a symbol."""
        meta = _get(_get(self.description, "tensor_values", dict), name, dict)
        dtype = _dtype(meta, f"input {name[:60]!r}")
        shape = [self.size(size, place) for place, size in enumerate(_get(meta, "sizes", list))]
        if min([0, *shape]) < 0:
            raise InputError(f"it has an input {name[:60]!r} of shape {shape}; export it again")
        self.require_memory(math.prod(shape) * dtype.itemsize, f"input {name!r}", constant=False)
        with self.mode:
            return torch.empty(shape, dtype=dtype)

    def size(self, value: Any, place: int) -> int:
        """A size of an input: a whole number, or for the first dimension the symbol of the batch."""
        tag, body = _tagged(value)
        if tag == "as_int":
            return _get(value, tag, int)
        text = body.get("expr_str") if isinstance(body, dict) else None
        match = _SYMBOL.match(str(text))
        if match is None or place > 0 or list(self.ranges) != [match[1]]:
            raise Refused(
                f"it has the dynamic size {str(text)[:60]!r} in dimension {place} of an input; only the first one, the "
                "batch, may be dynamic: export it with dynamic_shapes=({0: torch.export.Dim('batch')},), or with static shapes"
            )
        limits = self.ranges[match[1]]
        least, most = limits.get("min_val"), limits.get("max_val")
        batch = max(1, self.batch, least if type(least) is int else 1)
        return min(batch, most) if type(most) is int else batch

    def output(self, value: Any) -> fx.Node:
        """An output of the graph."""
        tag, body = _tagged(value)
        if tag == "buffer_mutation":
            raise Refused(
                "it changes its buffers while it runs: call model.eval() before exporting it"
            )
        node = self.argument(_get(body, "arg", dict))
        if tag != "user_output" or not isinstance(node, fx.Node):
            raise Refused(
                "it has an output that is no tensor; export the model with tensors as outputs"
            )
        return node

    # ---- operations

    def node(self, value: Any) -> None:
        """Add an operation to the graph, or compute a size."""
        target = _get(value, "target", str)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for entry in _get(value, "inputs", list):
            argument = self.argument(_get(entry, "arg", dict))
            if entry.get("kind") == 2:
                kwargs[_identifier(entry.get("name"))] = argument
            else:
                args.append(argument)
        outputs = [_tagged(output) for output in _get(value, "outputs", list)]

        if target in _ASSERTIONS:
            if args and args[0] is False:
                raise Refused("it has a condition on its batch that this batch does not meet")
        elif target in _SIZES or target in _ARITHMETIC:
            size = self.compute_size(target, args)
            for _, body in outputs:
                self.values[_identifier(_get(body, "as_name", str))] = size
        else:
            self.call(target, args, kwargs, outputs, value)

    def compute_size(self, target: str, args: list[Any]) -> int:
        if target in _SIZES:
            size = _SIZES[target](args[0].meta["val"], *args[1:])
        elif all(type(argument) is int for argument in args):
            size = _ARITHMETIC[target](*args)
        else:
            raise Refused(f"it calls {target!r} on something else than sizes")
        if abs(size) >= 2**63:
            raise Refused("it computes a size beyond 64 bits")
        return size

    def call(
        self,
        target: str,
        args: list[Any],
        kwargs: dict[str, Any],
        outputs: list[tuple[str, Any]],
        value: Any,
    ) -> None:
        """Run an operation on tensors without numbers, and add it with what came out."""
        operation = find_operation(target)
        fakes = fx.node.map_arg((tuple(args), kwargs), lambda node: node.meta["val"])
        check_arguments_of(operation, *fakes)
        with self.mode, torch.no_grad():
            result = operation(*fakes[0], **fakes[1])

        single = len(outputs) == 1 and outputs[0][0] == "as_tensor"
        name = outputs[0][1].get("name") if single else value.get("name") or "several"
        node = self.graph.create_node(
            "call_function", operation, tuple(args), kwargs, _identifier(name)
        )
        node.meta |= {"val": result, **_origin(value.get("metadata"))}
        constant = self.constant.issuperset(node.all_input_nodes)
        tensors = flat_tensors(result)
        self.require_memory(
            sum(t.numel() * t.element_size() for t in tensors), f"node {node.name!r}", constant
        )
        if any(not isinstance(n, int) for t in tensors for n in t.shape):
            raise Refused(f"the shape of node {node.name!r} depends on the numbers")

        if single:
            self.define(outputs[0][1], node, result, constant)
            return
        places = (
            outputs[0][1]
            if len(outputs) == 1 and outputs[0][0] == "as_tensors"
            else [body for _, body in outputs]
        )
        if len(places) > len(result):
            raise InputError(
                f"node {node.name!r} states other outputs than it has; export it again"
            )
        for place, body in enumerate(places):
            item = self.graph.create_node(
                "call_function", operator.getitem, (node, place), name=f"getitem_{place}"
            )
            item.meta |= {**node.meta, "val": result[place]}
            self.define(body, item, result[place], constant)
        if constant:
            self.constant.add(node)

    def define(self, body: Any, node: fx.Node, value: Any, constant: bool) -> None:
        """Let the file's name of a result mean this node."""
        name = _identifier(_get(body, "name", str))
        if name in self.values or not isinstance(value, Tensor):
            raise InputError(f"it defines {name[:60]!r} twice, or as no tensor; export it again")
        self.values[name] = node
        if constant:
            self.constant.add(node)

    def require_memory(self, size: int, what: str, constant: bool) -> None:
        """Bound the memory of one value, and of all constants together."""
        if size > LARGEST:
            raise Refused(
                f"{what} makes {size / 2**30:.3g} GiB at once, more than the {LARGEST / 2**30:g} GiB that a value "
                "may take: bound its parts, or the module it was exported from"
            )
        self.constant_bytes += size * constant
        if self.constant_bytes > LARGEST_CONSTANTS:
            raise Refused(
                f"up to {what} its constants take more than {LARGEST_CONSTANTS / 2**30:g} GiB"
            )

    def argument(self, value: Any) -> Any:
        """An argument of an operation: a tensor of the graph, a plain value, or a list of them."""
        tag, body = _tagged(value)
        if isinstance(body, list) and tag.removesuffix("s") in _LISTED:
            return [self.argument({tag.removesuffix("s"): item}) for item in body]
        if tag in _PLAIN:
            return _plain(tag, body)
        match tag:
            case "as_none":
                return None
            case "as_tensor":
                return self.lookup(_get(body, "name", str))
            case "as_name":
                return self.lookup(body)
            case "as_sym_int" | "as_optional_tensor":
                return self.argument(body)
            case "as_scalar_type":
                return _SERIALIZE_TO_TORCH_DTYPE[_get(value, tag, int)]
            case "as_memory_format":
                return _SERIALIZE_TO_TORCH_MEMORY_FORMAT[_get(value, tag, int)]
            case "as_layout" if _SERIALIZE_TO_TORCH_LAYOUT.get(body) is torch.strided:
                return torch.strided
            case "as_device":
                return torch.device("cpu")  # where files are read, whatever they were written on
            case "as_complex":
                return complex(*(_plain("as_float", body.get(part)) for part in ("real", "imag")))
        raise Refused(f"it has {tag[:60]!r} as an argument, which is not a plain tensor program")

    def lookup(self, name: Any) -> Any:
        """The node or the size of this name."""
        if name not in self.values:
            raise InputError(
                f"it reads {str(name)[:80]!r}, which nothing before it writes; export it again"
            )
        return self.values[name]


def _plain(tag: str, value: Any) -> Any:
    if tag == "as_float" and value in ("Infinity", "-Infinity", "NaN"):
        return float(value.replace("Infinity", "inf"))
    if not isinstance(value, _PLAIN[tag]) or (tag != "as_bool" and isinstance(value, bool)):
        raise InputError(f"it has {str(value)[:60]!r} as an argument {tag!r}; export it again")
    if isinstance(value, str) and (len(value) > 500 or not value.isprintable()):
        raise InputError(f"it has a strange text as an argument: {value[:60]!r}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise InputError("it has a whole number beyond 64 bits as an argument")
    return float(value) if tag == "as_float" else value


def _origin(metadata: Any) -> dict[str, Any]:
    """The modules around an operation, for messages."""
    stack = metadata.get("nn_module_stack") if isinstance(metadata, dict) else None
    frames = [frame.split(",")[:3] for frame in str(stack).split(";")]
    if not all(len(frame) == 3 and all(map(_FRAME.match, frame)) for frame in frames):
        return {}
    return {"nn_module_stack": {key: (path, kind) for key, path, kind in frames}}
