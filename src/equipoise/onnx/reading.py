"""From the bytes of an ONNX file to plain records: nodes with their attributes, constants, inputs.

Only the protocol buffer itself is read. Tensors stored outside the file, subgraphs (loops, branches), local functions, custom
operator domains and number formats that round (float16, bfloat16, quantized) are refused by name.
"""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.errors import InputError, Refused, one_line

#: a larger file is not read
LARGEST_FILE = 2_000_000_000
#: no value of a network may have more entries than this
LARGEST_VALUE = 2**28
#: nor all of them together, per sample
LARGEST_TOTAL = 2**30
_FLOATS = {1: torch.float32, 11: torch.float64}
_OTHERS = {2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool}
#: torch's number format of ONNX's element types
DTYPES: Mapping[int, torch.dtype] = {**_FLOATS, **_OTHERS}


@dataclass(frozen=True)
class Spec:
    """One node of an ONNX graph: what it does, what it reads and writes; an empty input name means that it is left out."""

    name: str
    kind: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute, or `default` where the file does not set it."""
        return self.attributes.get(key, default)

    def refuse(self, why: str) -> Refused:
        """The refusal of this node, to be raised."""
        return Refused(f"ONNX node {self.name!r} ({self.kind}, opset {self.opset}): {why}")

    def only(self, *allowed: str) -> None:
        """Refuse attributes that are set and not among these: what is not understood is not ignored."""
        odd = sorted(set(self.attributes) - set(allowed))
        if odd:
            raise self.refuse(f"attribute {odd[0]!r} is not supported")


@dataclass(frozen=True)
class Graph:
    """The records of a file: inputs with their declared shapes (0: free), constants, nodes in order, outputs."""

    inputs: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    constants: Mapping[str, Tensor]
    nodes: tuple[Spec, ...]
    outputs: tuple[str, ...]


def onnx_package() -> Any:
    """The optional package `onnx`, or one sentence about how to get it."""
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        raise InputError("reading ONNX files needs the package onnx: pip install 'equipoise[onnx]'") from error


def parse(data: bytes, name: str = "the file") -> Graph:
    """The graph in these bytes; every failure is one sentence that names the file or the node."""
    onnx = onnx_package()
    try:
        model = onnx.ModelProto.FromString(data)
    except Exception as error:  # protobuf's classes of errors differ between its versions
        raise InputError(f"{name} is not an ONNX model ({one_line(error)})") from error
    if not model.HasField("graph") or not model.graph.node:
        raise InputError(f"{name} is not an ONNX model: it has no graph, or an empty one")
    if model.functions:
        raise Refused(f"{name} defines functions of its own ({model.functions[0].name!r}); export it with them inlined")
    graph = model.graph
    if graph.sparse_initializer:
        raise Refused(f"{name}: sparse constants are not supported")
    opset = _opset(model, name)
    constants = {i.name: constant(i, f"constant {i.name!r} of {name}") for i in graph.initializer}
    inputs, dtypes = {}, {}
    for value in graph.input:
        if value.name not in constants:
            inputs[value.name], dtypes[value.name] = _declared(value, name)
    if not inputs or not graph.output:
        raise InputError(f"{name} has no input or no output")
    nodes = tuple(_spec(node, i, opset) for i, node in enumerate(graph.node))
    return Graph(inputs, dtypes, constants, nodes, tuple(o.name for o in graph.output))


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
    if not value.type.HasField("tensor_type") or kind.elem_type not in _FLOATS:
        raise Refused(
            f"{name}: input {value.name!r} is not a float32 or float64 tensor, so it has no Lipschitz constant"
        )
    shape = tuple(max(0, int(d.dim_value)) for d in kind.shape.dim)
    if math.prod(max(1, n) for n in shape) > LARGEST_VALUE:
        raise InputError(
            f"{name}: input {value.name!r} declares the shape {shape[:8]}, more than {LARGEST_VALUE} entries"
        )
    return shape, _FLOATS[kind.elem_type]


def constant(proto: Any, what: str) -> Tensor:
    """A tensor of the file; its size is checked before it is made."""
    from onnx import numpy_helper

    if proto.data_location == 1 or proto.external_data:
        raise Refused(f"{what} is stored outside the file; save the model as one file")
    if proto.data_type not in DTYPES:
        raise Refused(f"{what} has element type {proto.data_type}; float32, float64, integers and booleans are read")
    if any(d < 0 for d in proto.dims) or float(np.prod([float(d) for d in proto.dims])) > LARGEST_VALUE:
        raise InputError(f"{what} declares the shape {tuple(proto.dims)[:8]}")
    try:
        array = np.ascontiguousarray(numpy_helper.to_array(proto))
        return torch.from_numpy(array.copy()).reshape(tuple(proto.dims)).to(DTYPES[proto.data_type])
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{what} cannot be read ({one_line(error)})") from error


def _spec(node: Any, index: int, opset: int) -> Spec:
    name = node.name or f"{node.op_type}_{index}"
    spec = Spec(name, node.op_type, opset, tuple(node.input), tuple(node.output))
    if node.domain not in ("", "ai.onnx"):
        raise spec.refuse(f"its domain {node.domain!r} is not ONNX's own")
    return Spec(
        name, node.op_type, opset, spec.inputs, spec.outputs, {a.name: _attribute(a, spec) for a in node.attribute}
    )


def _attribute(attribute: Any, spec: Spec) -> Any:
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
            return constant(attribute.t, f"attribute {attribute.name!r} of ONNX node {spec.name!r}")
    raise spec.refuse(f"attribute {attribute.name!r} is a subgraph or of a kind that is not supported")
