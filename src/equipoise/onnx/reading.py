"""From the bytes of an ONNX file to plain records: nodes with their attributes, constants, inputs.

Only the protocol buffer itself and the files of weights that lie beside it are read. Loops, local functions, custom operator
domains and number formats that round (float16, bfloat16, quantized) are refused by name.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.errors import InputError, Refused, one_line
from equipoise.core.files import open_regular

#: a larger file is not read, nor more than this from the files beside it
LARGEST_FILE = 2_000_000_000
#: no value of a network may have more entries than this
LARGEST_VALUE = 2**28
#: torch's floating-point formats of ONNX's element types
FLOATS: Mapping[int, torch.dtype] = {1: torch.float32, 11: torch.float64}
_OTHERS = {2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool}
#: torch's number format of ONNX's element types
DTYPES: Mapping[int, torch.dtype] = {**FLOATS, **_OTHERS}
#: nor may all values of a network together have more entries than this, per sample
LARGEST_TOTAL = 2**30
#: a network of more nodes is not read
MOST_NODES = 10_000


@dataclass(frozen=True)
class Spec:
    """One node of an ONNX graph: what it does, what it reads and writes; an empty input name means that it is left out."""

    name: str
    kind: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    #: names of conditions with the value they must have for the node to run: it stands in branches of these
    guards: tuple[tuple[str, bool], ...] = ()

    @property
    def further_results(self) -> bool:
        """Whether more than one of its results is used."""
        return len(list(filter(None, self.outputs))) > 1

    def refuse(self, why: str) -> Refused:
        """The refusal of this node, to be raised."""
        return Refused(f"ONNX node {self.name!r} ({self.kind}, opset {self.opset}): {why}")


@dataclass(frozen=True)
class Graph:
    """The records of a file.

    Attributes:
        inputs: their declared shapes, 0 for sizes that are free.
        dtypes: their types.
        constants: the weights.
        nodes: in order.
        outputs: the names of the results.
        declared: shapes that the file states for results and for values between them, 0 for sizes that are free.
    """

    inputs: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    constants: Mapping[str, Tensor]
    nodes: tuple[Spec, ...]
    outputs: tuple[str, ...]
    declared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def onnx_package() -> Any:
    """The optional package `onnx`, or one sentence about how to get it."""
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        raise InputError("reading ONNX files needs the package onnx: pip install 'equipoise[onnx]'") from error


def parse(data: bytes, name: str = "the file", folder: Path | None = None) -> Graph:
    """The graph in these bytes; every failure is one sentence that names the file or the node.

    Weights stored in files beside it are looked for in `folder`.
    """
    onnx = onnx_package()
    try:
        model = onnx.ModelProto.FromString(data)
    except Exception as error:  # protobuf's classes of errors differ between its versions
        raise InputError(f"{name} is not an ONNX model ({one_line(error)})") from error
    if not model.HasField("graph") or not model.graph.node:
        raise InputError(f"{name} is not an ONNX model: it has no graph, or an empty one")
    if model.functions:
        raise Refused(
            f"{name} defines functions of its own ({model.functions[0].name!r}); write them out first: "
            "onnx.save(onnx.inliner.inline_local_functions(onnx.load(FILE)), NEW_FILE)"
        )
    graph = model.graph
    if graph.sparse_initializer:
        raise Refused(f"{name}: sparse constants are not supported")
    opset, beside = _opset(model, name), Beside(folder)
    constants = {i.name: constant(i, f"constant {i.name!r} of {name}", beside) for i in graph.initializer}
    inputs, dtypes = {}, {}
    for value in graph.input:
        if value.name not in constants:
            inputs[value.name], dtypes[value.name] = _declared(value, name)
    if not inputs or not graph.output:
        raise InputError(f"{name} has no input or no output")
    reader = _Reader(opset, beside, constants)
    nodes = tuple(reader.nodes(graph.node, {}, ()))
    if len(nodes) > MOST_NODES:
        raise Refused(f"{name} has {len(nodes):,} nodes; at most {MOST_NODES:,} are read from a file")

    # shapes between the nodes were inferred for one size of the inputs: they say nothing where a size is free
    fixed = all(size for shape in inputs.values() for size in shape)
    stated = [*graph.output, *(graph.value_info if fixed else ())]
    declared = {v.name: _sizes(v) for v in stated if v.type.tensor_type.HasField("shape")}
    return Graph(inputs, dtypes, constants, nodes, tuple(o.name for o in graph.output), declared)


def _sizes(value: Any) -> tuple[int, ...]:
    """The declared shape of a value, 0 for sizes that are free."""
    return tuple(max(0, int(d.dim_value)) for d in value.type.tensor_type.shape.dim)


def _opset(model: Any, name: str) -> int:
    found = [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")]
    if not found:
        raise InputError(f"{name} does not say which version of ONNX's operators it uses")
    if found[0] < 7:
        raise Refused(
            f"{name} uses operators of version {found[0]}, whose broadcasting differs; "
            "convert it with onnx.version_converter to version 13"
        )
    return int(found[0])


def _declared(value: Any, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or kind.elem_type not in FLOATS:
        raise Refused(
            f"{name}: input {value.name!r} holds {element(kind.elem_type)}; inputs are float32 or float64: convert it to "
            "float32 (tokens have no distance to be Lipschitz in)"
        )
    shape = _sizes(value)
    if math.prod(max(1, n) for n in shape) > LARGEST_VALUE:
        raise InputError(
            f"{name}: input {value.name!r} declares the shape {shape[:8]}, more than {LARGEST_VALUE} entries"
        )
    return shape, FLOATS[kind.elem_type]


Guards = tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class _Reader:
    """Nodes one after the other; those of both branches of an `If` stand before it, guarded by its condition."""

    opset: int
    beside: Beside
    constants: dict[str, Tensor]

    def nodes(self, protos: Any, names: Mapping[str, str], guards: Guards) -> Iterator[Spec]:
        """The records of these nodes; `names` are those that are called otherwise outside of a branch."""
        for index, node in enumerate(protos):
            spec = Spec(
                node.name or f"{node.op_type}_{index}",
                node.op_type,
                self.opset,
                tuple(names.get(i, i) for i in node.input),
                tuple(names.get(o, o) for o in node.output),
                guards=guards,
            )
            if node.domain not in ("", "ai.onnx"):
                raise spec.refuse(
                    f"its domain {node.domain!r} is not ONNX's own; export the network with ONNX's operators"
                )
            if node.op_type == "If":
                yield from self._branches(node, spec, names)
            else:
                yield replace(spec, attributes={a.name: _attribute(a, spec, self.beside) for a in node.attribute})

    def _branches(self, node: Any, spec: Spec, names: Mapping[str, str]) -> Iterator[Spec]:
        graphs = {a.name: a.g for a in node.attribute}
        if set(graphs) != {"then_branch", "else_branch"} or len(spec.inputs) != 1 or not spec.outputs:
            raise spec.refuse("it does not have one condition, two branches and a result")
        results: list[str] = []
        for key, taken in (("then_branch", True), ("else_branch", False)):
            branch = graphs[key]
            own = [i.name for i in branch.initializer] + [o for n in branch.node for o in n.output if o]
            inner = {**names, **{o: f"{spec.outputs[0]}/{key}/{o}" for o in own}}
            if branch.input or branch.sparse_initializer or len(branch.output) != len(spec.outputs):
                raise spec.refuse(f"its {key} has inputs, sparse constants or another number of results")
            for proto in branch.initializer:
                what = f"constant {proto.name!r} of ONNX node {spec.name!r}"
                self.constants[inner[proto.name]] = constant(proto, what, self.beside)
            yield from self.nodes(branch.node, inner, (*spec.guards, (spec.inputs[0], taken)))
            results += [inner.get(o.name, o.name) for o in branch.output]
        yield replace(spec, inputs=(*spec.inputs, *results))


def _attribute(attribute: Any, spec: Spec, beside: Beside) -> Any:
    kinds = type(attribute)
    match attribute.type:
        case kinds.FLOAT:
            return float(attribute.f)
        case kinds.INT:
            return int(attribute.i)
        case kinds.STRING:
            return attribute.s.decode("utf-8", "replace")
        case kinds.FLOATS:
            return [float(v) for v in attribute.floats]
        case kinds.INTS:
            return [int(v) for v in attribute.ints]
        case kinds.STRINGS:
            return [s.decode("utf-8", "replace") for s in attribute.strings]
        case kinds.TENSOR:
            return constant(attribute.t, f"attribute {attribute.name!r} of ONNX node {spec.name!r}", beside)
        case kinds.GRAPH | kinds.GRAPHS:
            raise spec.refuse("loops over a subgraph are not read; export the network with its steps written out")
    raise spec.refuse(f"attribute {attribute.name!r} is of a kind that is not supported")


class Beside:
    """Files of weights in the folder of an ONNX file, where PyTorch's exporter puts them: read in parts, within a budget.

    A file is named by its bare name: a path, a link or a device is refused.
    """

    def __init__(self, folder: Path | None, budget: int = LARGEST_FILE) -> None:
        self.folder, self.left = folder, budget

    def read(self, proto: Any, length: int, what: str) -> bytes:
        """The `length` bytes of a tensor."""
        said = {entry.key: entry.value for entry in proto.external_data}
        name, start, size = said.get("location", ""), said.get("offset", "0"), said.get("length", str(length))
        if self.folder is None:
            raise Refused(f"{what} is stored outside the file; save the model as one file, or load it from its folder")
        if not name or name in (".", "..") or any(c in name for c in "/\\:\0") or len(name.encode()) > 255:
            raise Refused(f"{what} is stored in {name[:80]!r}; only files in the folder of the model itself are read")
        if not (start.isascii() and start.isdigit() and len(start) < 19) or size != str(length):
            raise InputError(f"{what} needs {length} bytes, and the file says {size!r} from {start!r} in {name!r}")
        if (self.folder / name).is_symlink():
            raise Refused(f"{what} is stored in {name!r}, which is a link; put the file itself beside the model")
        self.left -= length
        if self.left < 0:
            raise InputError(f"up to {what} more than {LARGEST_FILE:,} bytes of weights are stored outside the file")
        with open_regular(self.folder / name) as file:
            file.seek(int(start))
            found = file.read(length)
        if len(found) != length:
            raise InputError(f"{what}: {name} ends after {len(found)} of its {length} bytes; copy the file again")
        return found


def element(kind: int) -> str:
    """ONNX's name of an element type."""
    from onnx import TensorProto

    return str(TensorProto.DataType.Name(kind)) if kind in TensorProto.DataType.values() else str(kind)


def constant(proto: Any, what: str, beside: Beside) -> Tensor:
    """A tensor of the file; its size is checked before it is made."""
    from onnx import numpy_helper

    if proto.data_type not in DTYPES:
        raise Refused(
            f"{what} has element type {element(proto.data_type)}; float32, float64, integers and booleans are read: "
            "convert the network to float32"
        )
    shape, kind = tuple(proto.dims), DTYPES[proto.data_type]
    if any(d < 0 for d in shape) or math.prod(float(d) for d in shape) > LARGEST_VALUE:
        raise InputError(f"{what} declares the shape {shape[:8]}")
    try:
        if proto.data_location == 1 or proto.external_data:
            stored = "u1" if kind == torch.bool else np.dtype(str(kind).removeprefix("torch.")).newbyteorder("<")
            data = beside.read(proto, math.prod(shape) * np.dtype(stored).itemsize, what)
            array = np.frombuffer(data, stored).astype(np.dtype(stored).newbyteorder("="))
        else:
            array = np.ascontiguousarray(numpy_helper.to_array(proto)).copy()
        return torch.from_numpy(array).reshape(shape).to(kind)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{what} cannot be read ({one_line(error)})") from error
