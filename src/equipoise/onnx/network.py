"""An ONNX graph as a module: each node a submodule with the node's name, what does not depend on the data folded beforehand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.core.errors import EquipoiseError, InputError, Refused, one_line, unlogged
from equipoise.core.files import read_bounded
from equipoise.onnx import indexed, layers, sequences  # noqa: F401 - they fill the table of operators
from equipoise.onnx import shapes as moving_entries  # noqa: F401
from equipoise.onnx.operators import PLAIN_NUMBERS, find_operator, fixed_inputs, keywords
from equipoise.onnx.reading import LARGEST_FILE, LARGEST_TOTAL, LARGEST_VALUE, Graph, Spec, parse
from equipoise.onnx.runtime import LARGEST_COMPARED, require_same_results

Values = dict[str, Tensor]
Numbers = dict[str, np.ndarray]


class OnnxNode(nn.Module):
    """One node; constants are filled in by the network, so that a trace of it holds the node's own operations only."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.attributes = keywords(spec)  # an unknown operator or attribute is refused here, not at the first call
        self.spec, self.training = spec, False

    def forward(self, *inputs: Tensor | np.ndarray | None) -> tuple[Tensor, ...]:
        """The outputs of the node."""
        found = find_operator(self.spec)(self.spec, *inputs, **self.attributes)
        return found if isinstance(found, tuple) else (found,)

    def extra_repr(self) -> str:
        """The node's operator and name."""
        return f"{self.spec.kind}, name={self.spec.name!r}"


class OnnxNetwork(nn.Module):
    """The network of an ONNX file, for inputs of the shapes it was last specialized to.

    Shape computations, constant nodes and everything else that does not depend on the numbers in the input are evaluated once
    per input shape (`specialize`, done by itself on an ordinary call), so that an exported graph holds operations on data alone.
    The numbers are those of ONNX's definitions in the file's own floating-point format, up to rounding.

    >>> from equipoise.onnx.operators import known_operators
    >>> "Conv" in known_operators() and "Unique" not in known_operators()
    True
    """

    def __init__(self, graph: Graph, source: bytes | Path | None = None) -> None:
        super().__init__()
        self.graph = graph
        self._source = source  # compared with onnxruntime once, then dropped
        self.moving = _moving(graph)
        for i, spec in enumerate(graph.nodes):
            self.add_module(_label(spec, i, self), OnnxNode(spec))
        self._places = {name: f"constant_{i}" for i, name in enumerate(graph.constants)}
        for name, value in graph.constants.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise InputError(f"constant {name!r} of the ONNX file holds NaN or infinity")
            self.register_buffer(self._places[name], value)
        self._folded: dict[tuple[tuple[int, ...], ...], tuple[Values, Numbers]] = {}
        self.eval()

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The declared shapes of the inputs, with 1 for what the file leaves free."""
        return tuple(tuple(d or 1 for d in shape) for shape in self.graph.inputs.values())

    @property
    def batch(self) -> int | None:
        """The batch size the file insists on, None where it leaves it free."""
        first = next(iter(self.graph.inputs.values()), ())
        return (first[0] or None) if first else None

    def examples(self) -> tuple[Tensor, ...]:
        """Inputs of zeros of the declared shapes."""
        kinds = self.graph.dtypes.values()
        return tuple(torch.zeros(s, dtype=k) for s, k in zip(self.input_shapes, kinds, strict=True))

    def specialize(self, *inputs: Tensor) -> OnnxNetwork:
        """Fold what does not depend on the data for inputs of these shapes.

        Nodes that depend on the data are run on shapes alone, and others only once the size of their result is known.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        shadows = FakeTensorMode(allow_non_fake_inputs=True)
        values: Values = {**self._constants(), **self._named(inputs)}
        sizes: Values = {name: shadows.from_tensor(value) for name, value in values.items()}
        kept: Values = {}
        numbers: Numbers = {name: value.numpy() for name, value in self.graph.constants.items()}
        budget: float = LARGEST_TOTAL * max(1, inputs[0].shape[0] if inputs[0].dim() else 1)
        left = budget
        with torch.no_grad(), unlogged():
            for spec, node in self._nodes(numbers):
                with shadows:
                    left = self._step(spec, node, sizes, numbers, left)
                if any(o in self.moving for o in spec.outputs):
                    continue
                given = {name: values.get(name, sizes[name]) for name in spec.inputs if name in sizes}
                self._step(spec, node, given, numbers, left)
                for name in (o for o in spec.outputs if o in given):
                    kept[name] = values[name] = _as(given[name], inputs[0])
                    sizes[name] = shadows.from_tensor(values[name])
                    numbers[name] = values[name].cpu().numpy()
        self._folded[_shapes(inputs)] = kept, numbers
        self._require_declared(sizes)
        self._compare(inputs, entries=budget - left)
        return self

    def _require_declared(self, values: Values) -> None:
        """Refuse a network whose values have other shapes than its file states: one of the two is misread."""
        for name, declared in self.graph.declared.items():
            if name not in values:
                continue
            shape = tuple(int(n) for n in values[name].shape)
            fits = len(shape) == len(declared) and all(d in (0, n) for d, n in zip(declared, shape, strict=True))
            if not fits:
                stated = tuple(d or "any" for d in declared)
                raise Refused(
                    f"value {name!r} of the ONNX file has shape {shape} here, and the file states {stated}: export it again, or "
                    "report the file"
                )

    def _compare(self, inputs: tuple[Tensor, ...], entries: float) -> None:
        source, self._source = self._source, None
        plain = all(x.dtype == kind for x, kind in zip(inputs, self.graph.dtypes.values(), strict=True))
        if source is not None and plain and entries <= LARGEST_COMPARED and not torch.compiler.is_exporting():
            require_same_results(self, source, self._named(inputs))

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The outputs of the graph: one tensor, or a tuple."""
        if _shapes(inputs) not in self._folded:
            if torch.compiler.is_exporting():
                raise InputError(f"call the ONNX network once on inputs of shape {_shapes(inputs)} before exporting it")
            self.specialize(*inputs)
        kept, numbers = self._folded[_shapes(inputs)]
        values = {**self._constants(), **kept, **self._named(inputs)}
        for spec, node in self._nodes(numbers):
            if any(o in self.moving for o in spec.outputs):
                self._step(spec, node, values, numbers)
        results = tuple(_known(values, name, "an output of the graph") for name in self.graph.outputs)
        return results[0] if len(results) == 1 else results

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OnnxNetwork:
        folded = list(self._folded)
        self._folded.clear()
        super()._apply(fn, recurse)
        for known in folded:  # on another device or in another format, folded anew
            self.specialize(
                *[fn(torch.zeros(s, dtype=k)) for s, k in zip(known, self.graph.dtypes.values(), strict=True)]
            )
        return self

    def _nodes(self, numbers: Numbers) -> Iterator[tuple[Spec, nn.Module]]:
        """The nodes in order, without those of branches that are not taken."""
        for spec, node in zip(self.graph.nodes, self.children(), strict=True):
            for name, wanted in spec.guards:
                if name in self.moving or name not in numbers or numbers[name].size != 1:
                    raise spec.refuse(f"it stands in a branch, and the condition {name!r} is not known beforehand")
                if bool(numbers[name].reshape(())) != wanted:
                    break
            else:
                yield spec, node

    def _constants(self) -> Values:
        return {name: getattr(self, place) for name, place in self._places.items()}

    def _named(self, inputs: tuple[Tensor, ...]) -> Values:
        if len(inputs) != len(self.graph.inputs):
            raise InputError(f"the ONNX network takes {len(self.graph.inputs)} inputs, got {len(inputs)}")
        for (name, shape), x in zip(self.graph.inputs.items(), inputs, strict=True):
            if x.dim() != len(shape) or any(d and d != n for d, n in zip(shape, x.shape, strict=True)):
                raise InputError(
                    f"input {name!r} of the ONNX network has shape {tuple(d or 'any' for d in shape)}, got {tuple(x.shape)}"
                )
        return dict(zip(self.graph.inputs, inputs, strict=True))

    def _step(
        self, spec: Spec, node: Callable[..., Any], values: Values, numbers: Numbers, left: float = math.inf
    ) -> float:
        """Run a node; what is left of the entries that all results together may have."""
        inputs: list[Any] = []
        for place, name in enumerate(spec.inputs):
            if name and place in fixed_inputs(spec):
                if name in self.moving:
                    raise spec.refuse(f"its input {name!r} must be known beforehand, and it depends on the data")
                inputs.append(numbers[name])
            else:
                known = name and (spec.kind != "If" or name in values)  # a branch that was not taken has no results
                inputs.append(_known(values, name, f"ONNX node {spec.name!r}") if known else None)
        try:
            if spec.kind in PLAIN_NUMBERS and len(inputs) == 2:
                inputs = self._plain(inputs, spec, numbers)
            outputs = node(*inputs)
        except EquipoiseError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, ArithmeticError) as error:
            shapes = [tuple(x.shape) if isinstance(x, Tensor | np.ndarray) else x for x in inputs]
            raise InputError(
                f"ONNX node {spec.name!r} ({spec.kind}) does not fit inputs of shapes {shapes}: {one_line(error)}"
            ) from error
        for name, value in zip(spec.outputs, outputs, strict=False):
            if value.numel() > LARGEST_VALUE:
                raise spec.refuse(f"its result has {value.numel()} entries; at most {LARGEST_VALUE} are allowed")
            left -= value.numel()
            if left < 0:
                raise spec.refuse(f"up to here the results have more than {LARGEST_TOTAL} entries per sample")
            values[name] = value
        return left

    def _plain(self, inputs: list[Any], spec: Spec, numbers: Numbers) -> list[Any]:
        """Known numbers that meet data as plain numbers, where that does not change the result's shape."""
        known = [name not in self.moving and numbers[name].size == 1 for name in spec.inputs]
        if sum(known) != 1 or not any(name in self.moving for name in spec.inputs):
            return inputs
        place = known.index(True)
        value = numbers[spec.inputs[place]]
        if value.dtype.kind == "f" and value.ndim <= inputs[1 - place].dim():
            inputs[place] = float(value.reshape(()))
        return inputs


def read_onnx(data: bytes, name: str = "the file", folder: Path | None = None) -> OnnxNetwork:
    """The network in the bytes of an ONNX file.

    Args:
        data: the file's content.
        name: what error messages call it.
        folder: where weights that are stored in files of their own are looked for.
    """
    return OnnxNetwork(parse(data, name, folder), data)


def load_onnx(path: str | Path) -> OnnxNetwork:
    """The network in an ONNX file, specialized to its declared input shapes (1 for what it leaves free).

    Nothing in the file is executed but the operators of the table `known_operators()`; others are refused with the node's name.
    """
    path = Path(path)
    network = OnnxNetwork(parse(read_bounded(path, LARGEST_FILE), str(path), path.parent), path)
    return network.specialize(*network.examples())


def _moving(graph: Graph) -> frozenset[str]:
    """Names of values that depend on the numbers in the input, not on its shape alone."""
    known = set(graph.constants) | set(graph.inputs)
    moving = set(graph.inputs)
    for spec in graph.nodes:
        missing = [name for name in spec.inputs if name and name not in known]
        if missing:
            raise InputError(f"ONNX node {spec.name!r} reads {missing[0]!r}, which nothing before it writes")
        written = {o for o in spec.outputs if o}
        if written & known or len(written) < len([o for o in spec.outputs if o]):
            raise InputError(f"ONNX node {spec.name!r} writes {sorted(written & known)[:1]}, which has a value already")
        known |= written
        if spec.kind not in ("Shape", "Size") and any(name in moving for name in spec.inputs):
            moving |= written
    return frozenset(moving)


def _label(spec: Spec, index: int, network: nn.Module) -> str:
    """A submodule's name: the node's own where a module can have it, else what is left of it, with its place."""
    if re.fullmatch(r"[\w/:-]{1,80}", spec.name, flags=re.ASCII) and not hasattr(network, spec.name):
        return spec.name
    text = re.sub(r"\W+", "_", spec.name, flags=re.ASCII).strip("_")[-60:]
    return f"{text or spec.kind}_{index}" if not hasattr(network, f"{text}_{index}") else f"node_{index}"


def _as(value: Tensor, like: Tensor) -> Tensor:
    """A folded number in the format the network runs in, which `.double()` may have changed."""
    return value.to(like) if value.is_floating_point() else value


def _shapes(inputs: tuple[Tensor, ...] | Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(n) for n in x.shape) for x in inputs)


def _known(values: Values, name: str, where: str) -> Tensor:
    if name not in values:
        raise InputError(f"{where} needs {name!r}, which has no value")
    return values[name]
