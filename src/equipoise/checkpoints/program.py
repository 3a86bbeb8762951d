"""`.pt2` programs, read without PyTorch's reader: the graph is built anew, operation by operation, from an untrusted file.

`torch.export.load` unpickles, evaluates symbolic expressions, imports classes that a file names, and compiles names and guards
of the file as Python code; a stored program states the shape of every value, and PyTorch takes its word. Here a file is a list
of operations and a list of weights, and nothing else in it is used:

* each operation is one that a file may call (`equipoise.checkpoints.operations`), with plain arguments;
* names are identifiers, since PyTorch writes them into the code of the graph;
* weights are views of stored bytes, inside of these bytes;
* shapes are computed by running the operations on tensors without numbers, at a given size of the batch, and the memory that
  values would take is bounded. No kernel runs while a file is opened.

A description that is not what PyTorch writes (a missing key, a list in place of a number) fails wherever it is read; every such
failure becomes one sentence in `read_program`.

Inputs are taken one after the other, and outputs returned as a tensor or a tuple: how the exported model nested them is not
read, nor are pickles (sample inputs), guards, stated shapes, ranges of symbols but the batch's, and remarks.
"""

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
from equipoise.core import EquipoiseError, InputError, Refused, flat_tensors, one_line, unlogged
from equipoise.core.files import digest_bytes, parse_json, read_bounded

#: an archive longer than this is not read
LARGEST_ARCHIVE = 2**37
#: a description longer than this is not read
LARGEST_JSON = 200_000_000
#: a program of more operations is not read
MOST_NODES = 50_000
#: bytes of one value on the way: what is constant is computed before it is bounded
LARGEST = 2**31
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
#: arguments of an operation that may come in lists
_LISTED = (
    "as_int",
    "as_bool",
    "as_float",
    "as_string",
    "as_tensor",
    "as_sym_int",
    "as_optional_tensor",
)


def read_program(path: str | Path, batch: int = 1) -> tuple[ExportedProgram, str]:
    """The program in a `.pt2` file, and the digest of the file, whatever the batch it is loaded for.

    Args:
        path: written by `torch.export.save`; see the module for what is refused.
        batch: the size at which a dynamic batch dimension is fixed, or the nearest one that the program allows; programs
            with static shapes keep their own.
    """
    data = read_bounded(path, LARGEST_ARCHIVE)
    try:
        with unlogged():
            entries = _entries(data)
            weights = {
                _path(key): _weight(payload, kind, entries)
                for kind in ("weights", "constants")
                for key, payload in _document(entries, f"data/{kind}/model_{kind}_config.json")[
                    "config"
                ].items()
            }
            document = _document(entries, "models/model.json")
            return _Reader(document, weights, batch).program(), digest_bytes(data)
    except EquipoiseError as error:
        raise type(error)(f"{path}: {error}") from error
    except Exception as error:  # a damaged description, or operations that do not fit together
        reason = f"{type(error).__name__}: {one_line(error)[:160]}"
        raise InputError(
            f"{path} is not a program this PyTorch can read ({reason}); export it again"
        ) from error


# ---- the archive ------------------------------------------------------------------------------------------------------


def _entries(data: bytes) -> dict[str, bytes]:
    """The entries of the archive without their common folder; repeated, compressed or damaged ones are refused."""
    entries: dict[str, bytes] = {}
    archive = zipfile.ZipFile(io.BytesIO(data))
    for info in archive.infolist():
        entry = info.filename.partition("/")[2]
        if entry in entries:
            raise Refused(
                f"it holds the entry {entry[:100]!r} twice: two readers would see two different files"
            )
        # PyTorch compresses nothing; what is stored as it is cannot grow
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
            raise Refused(
                f"it holds {entry[:100]!r} compressed, or declares more bytes than the file has; export it again"
            )
        entries[entry] = archive.read(info)
    for entry, expected in (("archive_format", b"pt2"), ("byteorder", b"little")):
        if entries[entry] != expected:
            raise InputError(f"it says {entries[entry][:20]!r} in {entry!r}, expected {expected!r}")
    return entries


def _document(entries: dict[str, bytes], entry: str) -> Any:
    if len(entries[entry]) > LARGEST_JSON:
        raise Refused(f"{entry!r} is larger than {LARGEST_JSON:,} bytes")
    return parse_json(entries[entry], f"{entry!r}")


def _weight(payload: Any, kind: str, entries: dict[str, bytes]) -> Tensor:
    """A stored tensor: sizes, strides and offset stay inside the stored bytes, and cannot ask for much more than these."""
    stored = payload["path_name"]
    if payload["use_pickle"] is not False or not _STORED.match(stored):
        raise Refused(
            f"it stores {str(stored)[:80]!r} as an object that would be unpickled: export tensors only"
        )
    content = entries[f"data/{kind}/{stored}"]
    meta = payload["tensor_meta"]
    dtype = _dtype(meta, f"numbers {stored!r}")
    sizes, strides = ([_whole(n["as_int"]) for n in meta[key]] for key in ("sizes", "strides"))
    offset = _whole(meta["storage_offset"]["as_int"])

    count = math.prod(sizes)
    numbers = len(content) // dtype.itemsize
    last = offset + sum((s - 1) * t for s, t in zip(sizes, strides, strict=True)) if count else -1
    strided = _SERIALIZE_TO_TORCH_LAYOUT[meta["layout"]] is torch.strided
    inside = min([0, offset, *sizes, *strides]) >= 0 and last < numbers
    if not (strided and inside and count <= 1024 * max(numbers, 1)):
        raise InputError(
            f"sizes {sizes} and strides {strides} do not fit the {len(content):,} bytes in {stored!r}: it is damaged"
        )
    flat = torch.empty(0, dtype=dtype)
    if numbers:
        flat = torch.frombuffer(bytearray(content), dtype=dtype, count=numbers)
    return flat.as_strided(sizes, strides, offset)


# ---- plain values -----------------------------------------------------------------------------------------------------


def _whole(value: Any) -> int:
    """A whole number of 64 bits."""
    if type(value) is not int or abs(value) >= 2**63:
        raise InputError(f"it has {str(value)[:60]!r} in place of a whole number; export it again")
    return value


def _tagged(value: Any) -> tuple[str, Any]:
    """A tagged union: its one key that is set, and its value."""
    (pair,) = [(key, body) for key, body in value.items() if body is not None]
    return pair


def _dtype(meta: Any, what: str) -> torch.dtype:
    dtype = _SERIALIZE_TO_TORCH_DTYPE[meta["dtype"]]
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


def _path(value: str) -> str:
    """Names joined by dots."""
    for part in value.split("."):
        if not _PART.match(part) or (part.startswith("__") and part.endswith("__")):
            raise Refused(f"it calls a weight {value[:80]!r}, which is no name: names become code")
    return value


# ---- the graph --------------------------------------------------------------------------------------------------------


class _Reader:
    """Builds the graph of one file: `values` maps the file's names to nodes, or to whole numbers for sizes."""

    def __init__(self, document: Any, weights: dict[str, Tensor], batch: int) -> None:
        self.weights = weights
        self.batch = batch
        self.description = document["graph_module"]["graph"]
        self.signature = document["graph_module"]["signature"]
        self.ranges = document["range_constraints"]
        self.graph = fx.Graph()
        self.values: dict[str, Any] = {}
        self.mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=False)

    def program(self) -> ExportedProgram:
        inputs = [self.input(spec) for spec in self.signature["input_specs"]]
        users = [spec.arg for spec in inputs if spec.kind is InputKind.USER_INPUT]
        nodes = self.description["nodes"]
        if len(nodes) > MOST_NODES:
            raise Refused(
                f"it has {len(nodes):,} operations; at most {MOST_NODES:,} are read from a file"
            )
        for node in nodes:
            self.node(node)
        results = [self.output(spec) for spec in self.signature["output_specs"]]
        self.require_memory({argument.name for argument in users})
        self.graph.output(tuple(results))
        outputs = [
            OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in results
        ]

        # inputs one after the other, outputs as a tensor or a tuple
        call = ModuleCallSignature(
            users,
            [spec.arg for spec in outputs],
            pytree.tree_structure(((0,) * len(users), {})),
            pytree.tree_structure(0 if len(outputs) == 1 else (0,) * len(outputs)),
        )
        constants: dict[str, Any] = dict(self.weights)
        state: dict[str, Tensor] = {}
        for spec in inputs:
            key = str(spec.target)
            if spec.kind is InputKind.PARAMETER:
                weight = constants.pop(key)
                state[key] = nn.Parameter(weight, requires_grad=weight.is_floating_point())
            elif spec.persistent:
                state[key] = constants.pop(key)
        return ExportedProgram(
            root=nn.Module(),
            graph=self.graph,
            graph_signature=ExportGraphSignature(inputs, outputs),
            state_dict=state,
            range_constraints={},
            module_call_graph=[ModuleCallEntry("", call)],
            constants=constants,
            verifiers=[TrainingIRVerifier],  # in-place operations may stand in the graph
        )

    def require_memory(self, users: set[str]) -> None:
        """Bound the memory of every value, and of all values together that do not depend on the user's inputs.

        Args:
            users: the names of the user's inputs.
        """
        dependent = set[fx.Node]()
        kept = 0
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.name not in users:
                continue  # stored in the file
            size = sum(t.numel() * t.element_size() for t in flat_tensors(node.meta["val"]))
            if size > LARGEST:
                raise Refused(
                    f"{node.name!r} makes {size / 2**30:.3g} GiB at once, more than the {LARGEST / 2**30:g} GiB that a value "
                    "may take: bound its parts, or the module it was exported from"
                )
            if node.name in users or not dependent.isdisjoint(node.all_input_nodes):
                dependent.add(node)
            else:
                kept += size
        if kept > LARGEST_CONSTANTS:
            raise Refused(f"its constants take more than {LARGEST_CONSTANTS / 2**30:g} GiB")

    # ---- inputs and outputs

    def input(self, value: Any) -> InputSpec:
        """An input of the graph: a weight of the file, or a tensor that the user gives."""
        tag, body = _tagged(value)
        argument = body["arg"]
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

        name = _identifier(argument["name"])
        node = self.graph.placeholder(name)
        self.values[name] = node
        if tag == "user_input":
            node.meta["val"] = self.user_input(name)
            return InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None)

        target = body[f"{tag}_name"]
        weight = self.weights[target]
        with self.mode:
            node.meta["val"] = torch.empty_strided(
                weight.shape, weight.stride(), dtype=weight.dtype
            )
        persistent = body["persistent"] is True if tag == "buffer" else None
        return InputSpec(_STORED_INPUTS[tag], TensorArgument(node.name), target, persistent)

    def user_input(self, name: str) -> Tensor:
        """A tensor of the shape that the file states for an input, which is the user's to meet; the batch may be a symbol."""
        meta = self.description["tensor_values"][name]
        shape = [self.size(size, place) for place, size in enumerate(meta["sizes"])]
        with self.mode:
            return torch.empty(shape, dtype=_dtype(meta, f"input {name[:60]!r}"))

    def size(self, value: Any, place: int) -> int:
        """A size of an input: a whole number, or for the first dimension the symbol of the batch.

        Args:
            value: as the file states it.
            place: the dimension.
        """
        tag, body = _tagged(value)
        if tag == "as_int":
            return _whole(body)
        text = str(body["expr_str"])
        match = _SYMBOL.match(text)
        if match is None or place > 0 or list(self.ranges) != [match[1]]:
            raise Refused(
                f"it has the dynamic size {text[:60]!r} in dimension {place} of an input; only the first one, the "
                "batch, may be dynamic: export it with dynamic_shapes=({0: torch.export.Dim('batch')},), or with static shapes"
            )
        limits = self.ranges[match[1]]
        least = limits.get("min_val")
        most = limits.get("max_val")
        batch = max(1, self.batch, least if type(least) is int else 1)
        return min(batch, most) if type(most) is int else batch

    def output(self, value: Any) -> fx.Node:
        """An output of the graph."""
        tag, body = _tagged(value)
        if tag == "buffer_mutation":
            raise Refused(
                "it changes its buffers while it runs: call model.eval() before exporting it"
            )
        node = self.argument(body["arg"])
        if tag != "user_output" or not isinstance(node, fx.Node):
            raise Refused(
                "it has an output that is no tensor; export the model with tensors as outputs"
            )
        return node

    # ---- operations

    def node(self, value: Any) -> None:
        """Add an operation to the graph, or compute a size."""
        target = value["target"]
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for entry in value["inputs"]:
            argument = self.argument(entry["arg"])
            if entry.get("kind") == 2:
                kwargs[_identifier(entry["name"])] = argument
            else:
                args.append(argument)
        outputs = [_tagged(output) for output in value["outputs"]]

        if target in _ASSERTIONS:
            if args and args[0] is False:
                raise Refused("it has a condition on its batch that this batch does not meet")
        elif target in _SIZES or target in _ARITHMETIC:
            if target in _SIZES:
                size = _SIZES[target](args[0].meta["val"], *args[1:])
            elif all(type(argument) is int for argument in args):
                size = _ARITHMETIC[target](*args)
            else:
                raise Refused(f"it calls {target!r} on something else than sizes")
            if abs(size) >= 2**63:
                raise Refused("it computes a size beyond 64 bits")
            self.values[_identifier(outputs[0][1]["as_name"])] = size
        else:
            tag, several = outputs[0]
            places = several if tag == "as_tensors" else [body for _, body in outputs]
            names = [_identifier(place["name"]) for place in places]
            origin = _origin(value["metadata"].get("nn_module_stack"))
            self.call(find_operation(target), tuple(args), kwargs, names, origin)

    def call(
        self,
        operation: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: list[str],
        origin: dict[str, Any],
    ) -> None:
        """Run an operation on tensors without numbers, and add it with what came out.

        Args:
            operation: what is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
            names: what the file calls the results.
            origin: entries of the node's `meta`.
        """
        fakes = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        check_arguments_of(operation, *fakes)
        with self.mode, torch.no_grad():
            result = operation(*fakes[0], **fakes[1])

        single = isinstance(result, Tensor)
        name = names[0] if single else None
        node = self.graph.create_node("call_function", operation, args, kwargs, name)
        node.meta |= {"val": result, **origin}
        for place, name in enumerate(names):
            item = node
            if not single:
                item = self.graph.call_function(operator.getitem, (node, place))
                item.meta |= {**node.meta, "val": result[place]}
            if name in self.values or not isinstance(item.meta["val"], Tensor):
                raise InputError(f"it defines {name!r} twice, or as no tensor; export it again")
            self.values[name] = item

    def argument(self, value: Any) -> Any:
        """An argument of an operation: a tensor of the graph, a plain value, or a list of them."""
        tag, body = _tagged(value)
        if isinstance(body, list) and tag.removesuffix("s") in _LISTED:
            return [self.argument({tag.removesuffix("s"): item}) for item in body]
        match tag:
            case "as_none":
                return None
            case "as_tensor":
                return self.values[body["name"]]
            case "as_name":
                return self.values[body]
            case "as_sym_int" | "as_optional_tensor":
                return self.argument(body)
            case "as_int":
                return _whole(body)
            case "as_float":
                return _real(body)
            case "as_bool" if isinstance(body, bool):
                return body
            case "as_string" if isinstance(body, str) and len(body) < 500 and body.isprintable():
                return body
            case "as_complex":
                return complex(_real(body["real"]), _real(body["imag"]))
            case "as_scalar_type":
                return _SERIALIZE_TO_TORCH_DTYPE[body]
            case "as_memory_format":
                return _SERIALIZE_TO_TORCH_MEMORY_FORMAT[body]
            case "as_layout" if _SERIALIZE_TO_TORCH_LAYOUT[body] is torch.strided:
                return torch.strided
            case "as_device":
                return torch.device("cpu")  # where files are read, whatever they were written on
        raise Refused(
            f"it has {tag[:60]!r} {str(body)[:60]!r} as an argument, which is not a plain tensor program"
        )


def _real(value: Any) -> float:
    if value in ("Infinity", "-Infinity", "NaN"):
        return float(value.replace("Infinity", "inf"))
    return value if isinstance(value, float) else float(_whole(value))


def _origin(stack: Any) -> dict[str, Any]:
    """The modules around an operation, for messages."""
    frames = [frame.split(",")[:3] for frame in str(stack).split(";")]
    if not all(len(frame) == 3 and all(map(_FRAME.match, frame)) for frame in frames):
        return {}
    return {"nn_module_stack": {key: (path, kind) for key, path, kind in frames}}
