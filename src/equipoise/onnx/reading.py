"""From the bytes of an ONNX file to plain records: nodes with their attributes, constants, inputs.

Only the protocol buffer itself and the files of weights that lie beside it are read. Branches, loops, local functions, custom
operator domains and number formats that round (float16, bfloat16, quantized) are refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core import InputError, Refused, Shape, explained, one_line, optional
from equipoise.core.files import open_regular

#: a larger file is not read, nor more than this from the files beside it
LARGEST_FILE = 2_000_000_000
#: no value of a network may have more entries than this
LARGEST_VALUE = 2**28
#: nor may all values of a network together have more entries than this, per sample
LARGEST_TOTAL = 2**30
#: a network of more nodes is not read
MOST_NODES = 10_000
#: torch's number format of ONNX's element types
DTYPES: Mapping[int, torch.dtype] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    11: torch.float64,
}
_OWN_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class Spec:
    """One node of an ONNX graph.

    Attributes:
        name: the node's name.
        kind: its operator.
        opset: the version of ONNX's operators that the file uses.
        inputs: names of the values it reads, empty for an input that is left out.
        outputs: names of the values it writes.
        attributes: by name.
    """

    name: str
    kind: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

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

    inputs: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]
    constants: Mapping[str, Tensor]
    nodes: tuple[Spec, ...]
    outputs: tuple[str, ...]
    declared: Mapping[str, Shape] = field(default_factory=dict)


def parse(data: bytes, name: str, folder: Path | None = None) -> Graph:
    """The graph in these bytes; every failure is one sentence that names the file or the node.

    Args:
        data: the content of an ONNX file.
        name: what error messages call it.
        folder: where files of weights beside it are looked for; None refuses them.
    """
    onnx = optional("onnx", "onnx")
    with explained(f"{name} is not an ONNX model"):
        model = onnx.ModelProto.FromString(data)

    graph = model.graph
    if not graph.node:
        raise InputError(f"{name} is not an ONNX model: it has no graph, or an empty one")
    if model.functions:
        raise Refused(
            f"{name} defines functions of its own ({model.functions[0].name!r}); write them out first: "
            "onnx.save(onnx.inliner.inline_local_functions(onnx.load(FILE)), NEW_FILE)"
        )

    if graph.sparse_initializer:
        raise Refused(f"{name}: sparse constants are not supported")

    reader = _Reader(_opset(model, name), folder)
    constants = {
        proto.name: reader.tensor(proto, f"constant {proto.name!r} of {name}")
        for proto in graph.initializer
    }
    inputs = {value.name: value for value in graph.input if value.name not in constants}
    if not inputs or not graph.output:
        raise InputError(f"{name} has no input or no output")
    shapes = {key: _input_shape(value, name) for key, value in inputs.items()}
    dtypes = {key: DTYPES[value.type.tensor_type.elem_type] for key, value in inputs.items()}

    nodes = _join_softplus(
        [reader.node(proto, index) for index, proto in enumerate(graph.node)], constants
    )
    if len(nodes) > MOST_NODES:
        raise Refused(
            f"{name} has {len(nodes):,} nodes; at most {MOST_NODES:,} are read from a file"
        )

    # shapes between the nodes were inferred for one size of the inputs: they say nothing where a size is free
    stated = list(graph.output)
    if all(all(shape) for shape in shapes.values()):
        stated += graph.value_info
    declared = {
        value.name: _sizes(value) for value in stated if value.type.tensor_type.HasField("shape")
    }
    outputs = tuple(output.name for output in graph.output)
    return Graph(shapes, dtypes, constants, nodes, outputs, declared)


def _join_softplus(nodes: list[Spec], constants: Mapping[str, Tensor]) -> tuple[Spec, ...]:
    """`Where(x > 20, x, Softplus(x))`, as PyTorch's exporter writes it, read as the softplus that it stands for.

    The two differ by at most `log(1 + e⁻²⁰) = 2.1·10⁻⁹`, as PyTorch's own softplus does.
    """
    makers = {name: spec for spec in nodes for name in spec.outputs}
    for place, spec in enumerate(nodes):
        if spec.kind != "Where" or len(spec.inputs) != 3:
            continue
        condition, x, value = spec.inputs
        greater = makers.get(condition, spec)
        softplus = makers.get(value, spec)
        threshold = constants.get(greater.inputs[-1])
        if (greater.kind, softplus.kind) != ("Greater", "Softplus") or threshold is None:
            continue
        scalar = threshold.dim() == 0 and float(threshold) >= 20
        if scalar and greater.inputs[:-1] == softplus.inputs == (x,):
            nodes[place] = replace(spec, kind="Identity", inputs=softplus.outputs)
    return tuple(nodes)


def _opset(model: Any, name: str) -> int:
    versions = [entry.version for entry in model.opset_import if entry.domain in _OWN_DOMAINS]
    if not versions:
        raise InputError(f"{name} does not say which version of ONNX's operators it uses")
    if versions[0] < 7:
        raise Refused(
            f"{name} uses operators of version {versions[0]}, whose broadcasting differs; "
            "convert it with onnx.version_converter to version 13"
        )
    return int(versions[0])


def _sizes(value: Any) -> Shape:
    """The declared shape of a value, 0 for sizes that are free."""
    return tuple(max(0, dim.dim_value) for dim in value.type.tensor_type.shape.dim)


def _input_shape(value: Any, name: str) -> Shape:
    element = value.type.tensor_type.elem_type
    if element not in DTYPES or not DTYPES[element].is_floating_point:
        raise Refused(
            f"{name}: input {value.name!r} holds {_element(element)}; inputs are float32 or float64: convert it to "
            "float32 (tokens have no distance to be Lipschitz in)"
        )
    shape = _sizes(value)
    if math.prod(max(1, size) for size in shape) > LARGEST_VALUE:
        raise InputError(
            f"{name}: input {value.name!r} declares the shape {shape[:8]}, more than {LARGEST_VALUE} entries"
        )
    return shape


def _element(kind: int) -> str:
    """ONNX's name of an element type."""
    from onnx import TensorProto

    kinds = TensorProto.DataType
    return kinds.Name(kind) if kind in kinds.values() else str(kind)


class _Reader:
    """Reads nodes and constants, with what they share."""

    def __init__(self, opset: int, folder: Path | None) -> None:
        self.opset = opset
        self.folder = folder
        #: bytes that may still be read from files beside the network
        self.left = LARGEST_FILE

    def node(self, proto: Any, index: int) -> Spec:
        """The record of a node.

        Args:
            proto: the node in the file.
            index: its place in the graph, for the name of a node without one.
        """
        # bytes where a damaged name is not UTF-8
        name = str(proto.name) or f"{proto.op_type}_{index}"
        spec = Spec(name, proto.op_type, self.opset, tuple(proto.input), tuple(proto.output))
        if proto.domain not in _OWN_DOMAINS:
            raise spec.refuse(
                f"its domain {proto.domain!r} is not ONNX's own; export the network with ONNX's operators"
            )
        return replace(spec, attributes={a.name: self.attribute(a, spec) for a in proto.attribute})

    def attribute(self, proto: Any, spec: Spec) -> Any:
        """The value of an attribute: a number, a text, a tensor, or a list of numbers or texts.

        Args:
            proto: the attribute in the file.
            spec: the node it belongs to, for messages.
        """
        from onnx import TensorProto, helper

        try:
            value = helper.get_attribute_value(proto)
        except ValueError as error:
            raise spec.refuse(
                f"attribute {proto.name!r} cannot be read ({one_line(error)})"
            ) from error
        if isinstance(value, TensorProto):
            return self.tensor(value, f"attribute {proto.name!r} of ONNX node {spec.name!r}")
        items = [
            item.decode("utf-8", "replace") if isinstance(item, bytes) else item
            for item in (value if isinstance(value, list) else [value])
        ]
        if all(isinstance(item, int | float | str) for item in items):
            return items if isinstance(value, list) else items[0]
        raise spec.refuse(
            f"attribute {proto.name!r} is a subgraph or of another kind that is not read; export the network with its "
            "steps written out"
        )

    def tensor(self, proto: Any, what: str) -> Tensor:
        """A tensor of the file; its size is checked before it is made.

        Args:
            proto: the tensor in the file.
            what: what it is called in messages.
        """
        from onnx import numpy_helper

        dtype = DTYPES.get(proto.data_type)
        if dtype is None:
            raise Refused(
                f"{what} has element type {_element(proto.data_type)}; float32, float64, integers and booleans are read: "
                "convert the network to float32"
            )
        shape = tuple(proto.dims)
        if any(size < 0 for size in shape) or math.prod(shape) > LARGEST_VALUE:
            raise InputError(f"{what} declares the shape {shape[:8]}")
        with explained(f"{what} cannot be read"):
            if proto.data_location == 1 or proto.external_data:
                # the numbers take the place that they have in a file without others beside it
                data = self.external(proto, math.prod(shape) * dtype.itemsize, what)
                proto = type(proto)(dims=shape, data_type=proto.data_type, raw_data=data)
            array = numpy_helper.to_array(proto)
            return torch.from_numpy(np.array(array)).reshape(shape).to(dtype)

    def external(self, proto: Any, length: int, what: str) -> bytes:
        """The bytes of a tensor in a file beside the network, where PyTorch's exporter puts them: read in parts, within a budget.

        A file is named by its bare name: a path, a link or a device is refused.

        Args:
            proto: the tensor in the file.
            length: of the tensor, in bytes.
            what: what it is called in messages.
        """
        entries = {entry.key: entry.value for entry in proto.external_data}
        name = entries.get("location", "")
        start = entries.get("offset", "0")
        size = entries.get("length", str(length))

        if self.folder is None:
            raise Refused(
                f"{what} is stored outside the file; save the model as one file, or load it from its folder"
            )
        if name in ("", ".", "..") or any(c in name for c in "/\\:\0") or len(name.encode()) > 255:
            raise Refused(
                f"{what} is stored in {name[:80]!r}; only files in the folder of the model itself are read"
            )
        if not (start.isascii() and start.isdigit() and len(start) < 19) or size != str(length):
            raise InputError(
                f"{what} needs {length} bytes, and the file says {size!r} from {start!r} in {name!r}"
            )
        path = self.folder / name
        if path.is_symlink():
            raise Refused(
                f"{what} is stored in {name!r}, which is a link; put the file itself beside the model"
            )

        self.left -= length
        if self.left < 0:
            raise InputError(
                f"up to {what} more than {LARGEST_FILE:,} bytes of weights are stored outside the file"
            )
        with open_regular(path) as file:
            file.seek(int(start))
            data = file.read(length)
        if len(data) != length:
            raise InputError(
                f"{what}: {name} ends after {len(data)} of its {length} bytes; copy the file again"
            )
        return data
