"""An ONNX graph as a module: each node a submodule with the node's name, what does not depend on the data folded beforehand.

Where onnxruntime is installed, the network is compared with it: two readings of one file must give the same numbers.
"""

from __future__ import annotations

import copy
import importlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.core import EquipoiseError, InputError, Refused, Shape, one_line, unlogged
from equipoise.core.files import read_bounded
from equipoise.onnx import layers, shapes  # noqa: F401 - they fill the table of operators
from equipoise.onnx.operators import PLAIN_NUMBERS, find_operator, input_readers, require_attributes
from equipoise.onnx.reading import LARGEST_FILE, LARGEST_TOTAL, LARGEST_VALUE, Graph, Spec, parse

Values = dict[str, Tensor]
Arrays = dict[str, np.ndarray]
#: networks with more entries in all their values are not compared with onnxruntime: it would take minutes
LARGEST_COMPARED = 2**26
#: differences relative to the largest result that rounding explains
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-8}


class OnnxNode(nn.Module):
    """One node; constants are filled in by the network, so that a trace of it holds the node's own operations only."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        # an unknown operator or attribute is refused here, not at the first call
        self.attributes = require_attributes(spec)

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """The outputs of the node."""
        outputs = find_operator(self.spec)(self.spec, *inputs, **self.attributes)
        return outputs if isinstance(outputs, tuple) else (outputs,)


class OnnxNetwork(nn.Module):
    """The network of an ONNX file, for inputs of the shapes it was last specialized to.

    Shape computations, constant nodes and everything else that does not depend on the numbers in the input are evaluated once
    per input shape (`specialize`, done by itself on an ordinary call), so that an exported graph holds operations on data alone.
    The numbers are those of ONNX's definitions in the file's own floating-point format, up to rounding.

    >>> from equipoise.onnx import known_operators
    >>> "Conv" in known_operators() and "Unique" not in known_operators()
    True
    """

    def __init__(self, graph: Graph, source: bytes | Path | None = None) -> None:
        super().__init__()
        self.graph = graph
        self._source = source  # compared with onnxruntime once, then dropped
        self._dynamic = _data_dependent(graph)
        self._buffer_names = {name: f"constant_{i}" for i, name in enumerate(graph.constants)}
        for name, value in graph.constants.items():
            if value.is_floating_point() and not torch.isfinite(value).all():
                raise InputError(f"constant {name!r} of the ONNX file holds NaN or infinity")
            self.register_buffer(self._buffer_names[name], value)
        # by shapes of the inputs: folded values as tensors, and all values that are known beforehand as arrays
        self._folded: dict[tuple[torch.Size, ...], tuple[Values, Arrays]] = {}
        # last: names that a file chooses must not meet those of attributes and buffers
        for index, spec in enumerate(graph.nodes):
            self.add_module(_label(spec, index, self), OnnxNode(spec))
        self.eval()

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        """The declared shapes of the inputs, with 1 for what the file leaves free."""
        return tuple(tuple(size or 1 for size in shape) for shape in self.graph.inputs.values())

    @property
    def batch(self) -> int | None:
        """The batch size the file insists on, None where it leaves it free."""
        first = next(iter(self.graph.inputs.values()))
        return (first[0] or None) if first else None

    def examples(self) -> tuple[Tensor, ...]:
        """Inputs of zeros of the declared shapes."""
        dtypes = self.graph.dtypes.values()
        return tuple(
            torch.zeros(shape, dtype=d) for shape, d in zip(self.input_shapes, dtypes, strict=True)
        )

    def specialize(self, *inputs: Tensor) -> OnnxNetwork:
        """Fold what does not depend on the data for inputs of these shapes.

        Nodes that depend on the data are run on shapes alone, and others only once the size of their result is known.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        fake = FakeTensorMode(allow_non_fake_inputs=True)
        values = self._constants()
        values.update(
            {name: fake.from_tensor(value) for name, value in self._named(inputs).items()}
        )
        arrays = {name: value.numpy() for name, value in self.graph.constants.items()}
        folded: Values = {}
        limit = LARGEST_TOTAL * max(1, math.prod(inputs[0].shape[:1]))
        entries = 0
        with torch.no_grad(), unlogged():
            for spec, node in self._nodes():
                with fake:
                    results = self._run(spec, node, values, arrays)
                for value in results.values():
                    entries += value.numel()
                    if value.numel() > LARGEST_VALUE:
                        raise spec.refuse(
                            f"its result has {value.numel()} entries; at most {LARGEST_VALUE} are allowed"
                        )
                    if entries > limit:
                        raise spec.refuse(
                            f"up to here the results have more than {LARGEST_TOTAL} entries per sample"
                        )
                if self._dynamic.isdisjoint(results):
                    results = self._run(spec, node, values, arrays)
                    for name, value in results.items():
                        # in the format the network runs in, which `.double()` may have changed
                        folded[name] = results[name] = (
                            value.to(inputs[0]) if value.is_floating_point() else value
                        )
                        arrays[name] = folded[name].cpu().numpy()
                values.update(results)
        self._folded[_shapes(inputs)] = folded, arrays
        self._require_declared(values)

        source = self._source
        self._source = None
        as_stored = [x.dtype for x in inputs] == list(self.graph.dtypes.values())
        if source is not None and as_stored and entries <= LARGEST_COMPARED:
            require_same_results(self, source, self._named(inputs))
        return self

    def _require_declared(self, values: Values) -> None:
        """Refuse a network whose values have other shapes than its file states: one of the two is misread."""
        for name, declared in self.graph.declared.items():
            if name in values and not _fits(values[name], declared):
                raise Refused(
                    f"value {name!r} of the ONNX file has shape {tuple(values[name].shape)} here, and the file states "
                    f"{_stated(declared)}: export it again, or report the file"
                )

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The outputs of the graph: one tensor, or a tuple."""
        if _shapes(inputs) not in self._folded:
            if torch.compiler.is_exporting():
                shapes = [tuple(x.shape) for x in inputs]
                raise InputError(
                    f"call the ONNX network once on inputs of shape {shapes} before exporting it"
                )
            self.specialize(*inputs)
        folded, arrays = self._folded[_shapes(inputs)]
        values = {**self._constants(), **folded, **self._named(inputs)}
        for spec, node in self._nodes():
            if not self._dynamic.isdisjoint(spec.outputs):
                values.update(self._run(spec, node, values, arrays))
        results = tuple(
            _value(values, name, "an output of the graph") for name in self.graph.outputs
        )
        return results[0] if len(results) == 1 else results

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OnnxNetwork:
        specialized = list(self._folded)
        self._folded.clear()
        super()._apply(fn, recurse)
        for sizes in specialized:  # on another device or in another format, folded anew
            dtypes = self.graph.dtypes.values()
            self.specialize(
                *[fn(torch.zeros(size, dtype=d)) for size, d in zip(sizes, dtypes, strict=True)]
            )
        return self

    def _nodes(self) -> Iterator[tuple[Spec, nn.Module]]:
        return zip(self.graph.nodes, self.children(), strict=True)

    def _constants(self) -> Values:
        return {name: getattr(self, place) for name, place in self._buffer_names.items()}

    def _named(self, inputs: tuple[Tensor, ...]) -> Values:
        if len(inputs) != len(self.graph.inputs):
            raise InputError(
                f"the ONNX network takes {len(self.graph.inputs)} inputs, got {len(inputs)}"
            )
        for (name, declared), x in zip(self.graph.inputs.items(), inputs, strict=True):
            if not _fits(x, declared):
                raise InputError(
                    f"input {name!r} of the ONNX network has shape {_stated(declared)}, got {tuple(x.shape)}"
                )
        return dict(zip(self.graph.inputs, inputs, strict=True))

    def _run(self, spec: Spec, node: Callable[..., Any], values: Values, arrays: Arrays) -> Values:
        """The results of a node by name."""
        inputs: list[Any] = []
        try:
            for name, reader in zip(spec.inputs, input_readers(spec), strict=True):
                if not name:
                    inputs.append(None)
                elif reader is None:
                    inputs.append(_value(values, name, repr(spec.name)))
                elif name in self._dynamic:
                    raise spec.refuse(
                        f"its input {name!r} must be known beforehand, and it depends on the data"
                    )
                else:
                    inputs.append(reader(arrays[name]))
            if spec.kind in PLAIN_NUMBERS and len(inputs) == 2:
                inputs = self._plain_numbers(inputs, spec, arrays)
            outputs = node(*inputs)
        except EquipoiseError:
            raise
        except Exception as error:  # whatever an operator raises on inputs that do not fit
            shapes = [tuple(x.shape) if isinstance(x, Tensor | np.ndarray) else x for x in inputs]
            raise InputError(
                f"ONNX node {spec.name!r} ({spec.kind}) does not fit inputs of shapes {shapes}: {one_line(error)}"
            ) from error
        return dict(zip(spec.outputs, outputs, strict=False))

    def _plain_numbers(self, inputs: list[Any], spec: Spec, arrays: Arrays) -> list[Any]:
        """A constant of one entry that meets data as a plain number, where that does not change the result's shape."""
        for place, name in enumerate(spec.inputs):
            if name in self._dynamic or spec.inputs[1 - place] not in self._dynamic:
                continue
            value = arrays[name]
            plain = value.size == 1 and value.dtype.kind == "f"
            if plain and value.ndim <= inputs[1 - place].dim():
                inputs[place] = float(value.item())
        return inputs


def read_onnx(data: bytes) -> OnnxNetwork:
    """The network in the bytes of an ONNX file; one with weights in other files is for `load_onnx`."""
    return OnnxNetwork(parse(data, "the file"), data)


def load_onnx(path: str | Path) -> OnnxNetwork:
    """The network in an ONNX file, specialized to its declared input shapes (1 for what it leaves free).

    Nothing in the file is executed but the operators of the table `known_operators()`; others are refused with the node's name.
    """
    path = Path(path)
    network = OnnxNetwork(parse(read_bounded(path, LARGEST_FILE), str(path), path.parent), path)
    return network.specialize(*network.examples())


def _data_dependent(graph: Graph) -> frozenset[str]:
    """Names of values that depend on the numbers in the input, not on its shape alone."""
    written = set(graph.constants) | set(graph.inputs)
    dynamic = set(graph.inputs)
    for spec in graph.nodes:
        for name in spec.inputs:
            if name and name not in written:
                raise InputError(
                    f"ONNX node {spec.name!r} reads {name!r}, which nothing before it writes"
                )
        for name in filter(None, spec.outputs):
            if name in written:
                raise InputError(
                    f"ONNX node {spec.name!r} writes {name!r}, which has a value already"
                )
            written.add(name)
        if spec.kind not in ("Shape", "Size") and not dynamic.isdisjoint(spec.inputs):
            dynamic.update(spec.outputs)
    return frozenset(dynamic - {""})


def _label(spec: Spec, index: int, network: nn.Module) -> str:
    """A submodule's name: the node's own where a module can have it, else what is left of it, with its place."""
    label = re.sub(r"[^\w/:-]+", "_", spec.name, flags=re.ASCII)[-80:]
    unique = label == spec.name and not hasattr(network, label)
    return label if unique else f"{label}@{index}"


def _fits(x: Tensor, declared: Shape) -> bool:
    """Whether a tensor has the declared shape, in which 0 stands for any size."""
    return x.dim() == len(declared) and all(
        d in (0, n) for d, n in zip(declared, x.shape, strict=True)
    )


def _stated(declared: Shape) -> tuple[int | str, ...]:
    return tuple(size or "any" for size in declared)


def _shapes(inputs: tuple[Tensor, ...]) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in inputs)


def _value(values: Values, name: str, reader: str) -> Tensor:
    if name not in values:
        raise InputError(f"{reader} needs {name!r}, a result that is not computed here")
    return values[name]


# ---- comparison with onnxruntime ----------------------------------------------------------------------------------------


def require_same_results(network: nn.Module, source: bytes | Path, inputs: Values) -> None:
    """Compare a network with onnxruntime on three random points; nothing is compared where it is missing or cannot run it.

    Args:
        network: the network as it was read.
        source: the bytes of its file, or the path where weights lie beside it.
        inputs: tensors of the inputs' shapes and types, by name.

    Raises:
        Refused: where results differ by more than rounding, so that a bound would say nothing of the network in the file.
    """
    try:
        ort = importlib.import_module("onnxruntime")
    except ImportError:
        return
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4

    generator = torch.Generator().manual_seed(0)
    rows = [
        [scale * torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs.values()]
        for scale in (1.0, 0.1, 10.0)
    ]
    try:
        file = source if isinstance(source, bytes) else str(source)
        session = ort.InferenceSession(
            file, options, providers=["CPUExecutionProvider"], enable_fallback=0
        )
        expected = [
            session.run(None, {n: x.numpy() for n, x in zip(inputs, row, strict=True)})
            for row in rows
        ]
    except Exception:  # noqa: BLE001 - a newer format, operators it lacks, types it has no kernel for
        return
    for row, arrays in zip(rows, expected, strict=True):
        _require_equal(
            network, row, [torch.from_numpy(np.asarray(array)).double() for array in arrays]
        )


def _require_equal(network: nn.Module, points: list[Tensor], theirs: list[Tensor]) -> None:
    ours = _results(network, points)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        shapes = [[list(t.shape) for t in values] for values in (ours, theirs)]
        raise Refused(
            f"the ONNX network gives results of shapes {shapes[0]}, onnxruntime of {shapes[1]}: it is not bounded"
        )

    rounding = _ROUNDING[points[0].dtype]
    if all(_difference(a, b) <= rounding * _largest(b) for a, b in zip(ours, theirs, strict=True)):
        return

    # a network may amplify rounding: float64 shows how much
    exact = _results(copy.deepcopy(network).double(), [point.double() for point in points])
    for a, b, c in zip(ours, theirs, exact, strict=True):
        if _difference(a, b) > rounding * _largest(b) + 20 * _difference(a, c):
            raise Refused(
                f"the ONNX network gives other results than onnxruntime (they differ by {_difference(a, b):.3g} where the "
                f"largest is {_largest(b):.3g}), so a bound would say nothing of the network in the file; please report the file"
            )


def _results(network: nn.Module, points: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        results = network(*points)
    return [t.double() for t in (results if isinstance(results, tuple) else (results,))]


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference; entries that are NaN or infinite in the same way in both do not differ."""
    same = (a == b) | (a.isnan() & b.isnan())
    return _largest(torch.where(same, 0.0, (a - b).nan_to_num(1e300)))


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
