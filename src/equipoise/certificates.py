"""Certificates as bundles of plain files, which `equipoise/checker/check.py` accepts or rejects on its own.

A bundle holds the network as a list of plain operations with proved norms, its weights, inputs, labels and radii; the format is
described in `docs/certificates.md`. The claims are about the real function of the stored weights.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save as to_safetensors
from torch import Tensor, fx, nn

from equipoise.checker import check as checker
from equipoise.checker import check_exact
from equipoise.core.errors import InputError, Refused
from equipoise.core.files import atomic_write, make_folder
from equipoise.core.modules import evaluating
from equipoise.nn.convert import with_effective_weights
from equipoise.norms import spectral_norm

#: certified distances that are counted by default: those of the literature for images in [0, 1]
EPSILONS = (36 / 255, 72 / 255, 108 / 255, 1.0)
#: a claimed norm is raised by these factors until the checker's own proof succeeds
_GROWTH = (1 + 1e-9, 1 + 1e-6, 1 + 1e-4, 1.003, 1.01, 1.03)
#: how far the bundle's network may be from the model on the inputs, relative to the logits: the model computes in float32
_AGREEMENT = 1e-3


def write(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    folder: str | Path,
    *,
    radii: Tensor | None = None,
    epsilons: Iterable[float] = EPSILONS,
) -> dict[str, Any]:
    """Write a bundle that claims a Lipschitz constant of the network and a radius for every input.

    Args:
        model: a network of the operations in `docs/certificates.md`; layers of `equipoise.nn` are exported first.
        x: inputs, the batch first; uint8 images are taken as `x / 255`.
        y: their labels.
        folder: where the bundle is written; existing files of a bundle are replaced.
        radii: claimed radii; lowered to what the checker proves. By default the largest that it proves.
        epsilons: distances at which the certified inputs are counted.

    Returns:
        The claims, as they stand in `certificate.json`.

    Guarantee: norms and radii are those that the checker's own functions proved; `check` reads the files again.

    Raises:
        Refused: the network contains an operation that bundles do not have; the message names it.
    """
    labels = np.asarray(y.detach().cpu(), dtype=np.int64)
    if x.shape[0] != len(labels) or labels.ndim != 1 or not len(labels):
        raise InputError(f"expected one label for each of the {x.shape[0]} inputs, got shape {tuple(labels.shape)}")
    divisor = 255 if x.dtype == torch.uint8 else 1
    images = np.asarray(x.detach().cpu())
    parameter = next(model.parameters(), torch.zeros(()))
    example = (x[:2] / divisor).to(parameter)
    document, weights = describe(model, example)
    network = checker.Network(document, weights)
    with np.errstate(all="ignore"):
        constant = network.evaluate(np.zeros((1, *network.shape)), np.zeros(1)).constant
        _require_same_function(model, network, example)
        proved = _provable(network, images, labels, divisor)
    claimed = proved if radii is None else np.minimum(proved, np.asarray(radii.detach().cpu(), dtype=np.float64))
    counts = {repr(float(epsilon)): int((claimed >= epsilon).sum()) for epsilon in epsilons}
    lowered = 0 if radii is None else int((claimed < np.asarray(radii.detach().cpu()) * (1 - 1e-6)).sum())
    claims = {
        "lipschitz": constant,
        "radii": {
            "x": "x",
            "labels": "labels",
            "radii": "radii",
            "divisor": divisor,
            "certified": counts,
            "lowered": lowered,
        },
    }
    files = {
        "weights.safetensors": to_safetensors(weights),
        "inputs.safetensors": to_safetensors({"x": images, "labels": labels, "radii": claimed}),
    }
    _save(Path(folder), {**document, "claims": claims}, files)
    return claims


def describe(model: nn.Module, example: Tensor) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The network as a bundle's document, with norms that the checker has proved, and its weights.

    Args:
        model: the network, in evaluation mode or not.
        example: a batch of inputs; their shape fixes the sizes of the images.

    Returns:
        The document without claims, and the tensors by name.
    """
    plain = with_effective_weights(model, example)
    with evaluating(plain), torch.no_grad():
        program = torch.export.export(plain, (example[:1],))
    writer = _Writer(plain, program)
    document = {
        "format": "equipoise-bundle",
        "version": 1,
        "input_shape": list(example.shape[1:]),
        "nodes": writer.nodes,
    }
    return document, writer.tensors


class _Writer:
    """Translates the graph of an exported program, node by node."""

    def __init__(self, model: nn.Module, program: torch.export.ExportedProgram) -> None:
        self.modules = dict(model.named_modules())
        self.nodes: list[dict[str, Any]] = []
        self.tensors: dict[str, np.ndarray] = {}
        self.names: dict[fx.Node, str] = {}
        self.constants = _constants(program)
        fused: tuple[str, str] | None = None
        for node in program.graph.nodes:
            if node.op == "placeholder" and node not in self.constants:
                self.names[node] = "input"
            elif node.op == "call_function":
                call = _fused_module(node, self.modules)
                if call is None:
                    _translate(self, node)
                elif call == fused:
                    self.names[node] = self.nodes[-1]["name"]
                else:
                    _FUSED[call[1]](self, node, self.modules[call[0]])
                fused = call

    def emit(
        self,
        node: fx.Node,
        op: str,
        inputs: Iterable[str],
        attributes: Mapping[str, Any] | None = None,
        weights: Mapping[str, Tensor] | None = None,
        upper: float | None = None,
    ) -> None:
        """Append an operation whose value is that of the node."""
        name = f"{node.name}_{len(self.nodes)}"
        row: dict[str, Any] = {"name": name, "op": op, "inputs": list(inputs), "attributes": dict(attributes or {})}
        row["weights"] = {key: self.store(f"{name}.{key}", value) for key, value in (weights or {}).items()}
        if upper is not None:
            row["upper"] = upper
        self.nodes.append(row)
        self.names[node] = name

    def store(self, name: str, value: Tensor) -> str:
        """The name under which a tensor is stored; equal tensors are stored once."""
        array = np.ascontiguousarray(value.detach().cpu().numpy())
        for known, other in self.tensors.items():
            if other.shape == array.shape and other.dtype == array.dtype and np.array_equal(other, array):
                return known
        self.tensors[name] = array
        return name

    def value(self, argument: Any) -> Tensor | float | None:
        """The constant that an argument is, or None if it depends on the input."""
        if isinstance(argument, fx.Node):
            return self.constants.get(argument)
        return argument


def _constants(program: torch.export.ExportedProgram) -> dict[fx.Node, Tensor]:
    """Parameters, buffers and constants of a program, by their placeholder."""
    signature = program.graph_signature
    targets = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    stored = {**program.state_dict, **program.constants}
    return {
        node: stored[targets[node.name]]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in targets
    }


def _fused_module(node: fx.Node, modules: Mapping[str, nn.Module]) -> tuple[str, str] | None:
    """Path and class name of the innermost module around a node that bundles have one operation for.

    A stored program may still name modules that it no longer has; its activations are recognised by their operations.
    """
    for path, kind in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        name = (kind if isinstance(kind, str) else kind.__name__).rsplit(".", 1)[-1]
        if name in _FUSED and type(modules.get(path)).__name__ == name:
            return path, name
    return None


def _entering(writer: _Writer, node: fx.Node) -> str:
    """The name of the value that enters a fused module at its first node."""
    return next(writer.names[source] for source in node.all_input_nodes if source in writer.names)


def _shape(node: fx.Node) -> list[int]:
    """The shape of one sample."""
    return [int(n) for n in node.meta["val"].shape[1:]]


def _max_min(writer: _Writer, node: fx.Node, module: Any) -> None:
    writer.emit(node, "rearrange", [_entering(writer, node)], {"kind": "maxmin", "axis": module.dim})


def _beta_abs(writer: _Writer, node: fx.Node, module: Any) -> None:
    source = node.all_input_nodes[0]
    count = math.ceil(module.beta * source.meta["val"].shape[module.dim])
    attributes = {"kind": "abs", "axis": module.dim, "start": 0, "stop": count}
    writer.emit(node, "rearrange", [_entering(writer, node)], attributes)


def _group_sort(writer: _Writer, node: fx.Node, module: Any) -> None:
    source = node.all_input_nodes[0]
    size = module.size or int(source.meta["val"].shape[module.dim])
    writer.emit(node, "rearrange", [_entering(writer, node)], {"kind": "groupsort", "axis": module.dim, "size": size})


def _residual(writer: _Writer, node: fx.Node, module: Any) -> None:
    """`x − 2·Uᵀ relu(Ux + b)`."""
    stored, offset, scale = module.effective()
    inner = module.inner(stored)
    if (
        not isinstance(module.activation, nn.ReLU)
        or scale.numel()
        or getattr(inner, "padding_mode", "zeros") != "zeros"
    ):
        raise Refused(f"{node.name}: a bundle has residual blocks with ReLU and zero padding only")
    weight, dims = inner.weight, inner.weight.dim() - 2
    attributes: dict[str, Any] = {"h": 2.0, "activation": "relu"}
    if dims:
        keys = {"stride": inner.stride, "padding": inner.padding, "dilation": inner.dilation}
        attributes |= {key: [int(n) for n in value] for key, value in keys.items()}
        attributes |= {"groups": inner.groups, "mode": "zeros"}
    weights = {"weight": weight}
    if offset.numel():
        weights["bias"] = offset.reshape(-1, *[1] * dims)
    source = next(a for a in node.all_input_nodes if a in writer.names)
    size = [int(n) for n in source.meta["val"].shape[2:]]
    layer = checker.Linear(_double(weight), attributes)
    upper = _provable_norm(layer, float(spectral_norm(inner, rtol=1e-4).upper), size, node.name)
    writer.emit(node, "residual", [writer.names[source]], attributes, weights, upper)


#: modules that become one operation
_FUSED: dict[str, Callable[[_Writer, fx.Node, Any], None]] = {
    "MaxMin": _max_min,
    "BetaAbs": _beta_abs,
    "GroupSort": _group_sort,
    **dict.fromkeys(("SLLLinear", "SLLConv2d", "CPLLinear", "CPLConv2d"), _residual),
}

#: operations that return their input
_PASS = {"dropout", "clone", "contiguous", "alias", "detach", "_to_copy", "to"}
_CONVOLUTIONS = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}


#: operations on the parts of a value
_PARTS = {"split_with_sizes", "split", "chunk", "getitem", "maximum", "minimum"}


def _named(node: Any, *names: str) -> bool:
    """Whether a node calls one of these operations."""
    packet = getattr(getattr(node, "target", None), "overloadpacket", getattr(node, "target", None))
    return isinstance(node, fx.Node) and getattr(packet, "__name__", "") in names


def _joined(node: fx.Node) -> tuple[fx.Node, dict[str, Any]] | None:
    """The value and the activation of a concatenation `(|a|, b)` or `(max(a, b), min(a, b))` of the two parts of a value."""
    parts: Any = node.args[0]
    if len(parts) != 2:
        return None
    first, second = parts
    ordered = _named(first, "maximum") and _named(second, "minimum") and first.args == second.args
    if not ordered and not _named(first, "abs"):
        return None
    a, b = first.args if ordered else (first.args[0], second)
    if not (_named(a, "getitem") and _named(b, "getitem") and a.args[0] is b.args[0]):
        return None
    split = a.args[0]
    axis, sizes = _axis(node), [part.meta["val"].shape for part in (a, b)]
    whole = split.args[0].meta["val"].shape
    if (a.args[1], b.args[1]) != (0, 1) or not axis or sizes[0][axis] + sizes[1][axis] != whole[axis]:
        return None
    if ordered:
        return (split.args[0], {"kind": "maxmin", "axis": axis}) if sizes[0] == sizes[1] else None
    return split.args[0], {"kind": "abs", "axis": axis, "start": 0, "stop": int(sizes[0][axis])}


def _axis(node: fx.Node) -> int:
    """The axis of a concatenation, counted from the front."""
    axis: Any = node.args[1] if len(node.args) > 1 else 0
    return int(axis) % int(node.meta["val"].dim())


def _translate(writer: _Writer, node: fx.Node) -> None:
    """Append the operations of one node of the graph, or refuse it by name."""
    name = getattr(node.target, "overloadpacket", node.target)
    name = str(getattr(name, "__name__", name)).removesuffix("_")
    arguments = list(node.args)
    moving = [writer.names[a] for a in node.all_input_nodes if a in writer.names]
    if not moving and name not in ("cat", "abs", *_PARTS):
        raise Refused(f"a bundle has no operation for the input of {node.name} ({name})")
    if name in _PARTS or (name == "abs" and not moving):
        return  # a part of an activation, which is recognised where its parts are joined
    if name in _PASS:
        writer.names[node] = moving[0]
    elif name in ("linear", *_CONVOLUTIONS):
        _linear(writer, node, name)
    elif name in ("relu", "abs"):
        attributes = {"kind": name} if name == "relu" else {"kind": "abs", "axis": 1, "start": 0, "stop": None}
        writer.emit(node, "rearrange", moving, attributes)
    elif name in ("tanh", "sigmoid"):
        writer.emit(node, "curve", moving, {"kind": name})
    elif name == "leaky_relu":
        slope: Any = arguments[1] if len(arguments) > 1 else 0.01
        writer.emit(node, "leaky_relu", moving, {"slope": float(np.float32(slope))})
    elif name in ("flatten", "view", "reshape", "unsqueeze", "squeeze"):
        writer.emit(node, "rearrange", moving, {"kind": "reshape", "shape": _shape(node)})
    elif name == "flip":
        rank = node.meta["val"].dim()
        axes = [int(axis) % rank for axis in node.args[1]]  # type: ignore[union-attr, arg-type]
        writer.emit(node, "rearrange", moving, {"kind": "flip", "axes": axes})
    elif name in ("pixel_unshuffle", "pixel_shuffle"):
        _shuffle(writer, node, int(arguments[1]), unshuffle=name == "pixel_unshuffle")  # type: ignore[arg-type]
    elif name in ("add", "sub", "mul", "div"):
        _arithmetic(writer, node, name)
    elif name == "cat" and (joined := _joined(node)) is not None:
        writer.emit(node, "rearrange", [writer.names[joined[0]]], joined[1])
    elif name == "cat":
        if any(part not in writer.names for part in node.all_input_nodes):
            raise Refused(f"a bundle has no operation for the parts that {node.name} joins")
        parts: Any = arguments[0]
        writer.emit(node, "concatenate", [writer.names[part] for part in parts], {"axis": _axis(node)})
    elif name in ("avg_pool2d", "max_pool2d"):
        _pool(writer, node, name)
    else:
        raise Refused(
            f"a bundle has no operation for {node.name} ({name}); docs/certificates.md lists the operations it has"
        )


def _linear(writer: _Writer, node: fx.Node, name: str) -> None:
    """A dense layer or a convolution with constant weights, and its norm."""
    source, weight = node.args[0], writer.value(node.args[1])
    bias = writer.value(node.args[2]) if len(node.args) > 2 else None
    if not isinstance(weight, Tensor) or source not in writer.names:
        raise Refused(f"{node.name}: bundles have products with stored weights only")
    weights = {"weight": weight}
    if name == "linear":
        attributes: dict[str, Any] = {}
        layer: nn.Module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        row = checker.Linear(_double(weight), {})
        size: list[int] = []
    else:
        dims = weight.dim() - 2
        stride, padding, dilation = (_tuple(node, place, dims, default) for place, default in ((3, 1), (4, 0), (5, 1)))
        groups = int(node.args[6]) if len(node.args) > 6 else 1  # type: ignore[arg-type]
        attributes = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "mode": "zeros"}
        channels = weight.shape[1] * groups, weight.shape[0]
        layer = _CONVOLUTIONS[name](*channels, weight.shape[2:], stride, padding, dilation, groups, bias=False)  # type: ignore
        row = checker.Linear(_double(weight), attributes)
        size = [int(n) for n in source.meta["val"].shape[2:]]  # type: ignore[union-attr]
    if isinstance(bias, Tensor):
        weights["bias"] = bias if name == "linear" else bias.reshape(-1, *[1] * (weight.dim() - 2))
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    upper = _provable_norm(row, float(spectral_norm(layer, rtol=1e-4).upper), size, node.name)
    writer.emit(node, "linear", [writer.names[source]], attributes, weights, upper)  # type: ignore


def _provable_norm(row: "checker.Linear", upper: float, size: list[int], name: str) -> float:
    """The library's bound, raised until the checker's own proof succeeds."""
    for growth in _GROWTH:
        try:
            row.check(upper * growth, size)
        except checker.Rejected:
            continue
        return upper * growth
    raise Refused(f"{name}: the checker does not prove the norm {upper:g}")


def _double(weight: Tensor) -> np.ndarray:
    return np.asarray(weight.detach().cpu().double())


def _tuple(node: fx.Node, place: int, dims: int, default: int) -> list[int]:
    value: Any = node.args[place] if len(node.args) > place else default
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    return [int(n) for n in (numbers * dims if len(numbers) == 1 else numbers)]


def _shuffle(writer: _Writer, node: fx.Node, block: int, unshuffle: bool) -> None:
    """Space to depth or depth to space, as reshape, permute, reshape."""
    source: Any = node.args[0]
    channels, height, width = (int(n) for n in source.meta["val"].shape[1:])
    if unshuffle:
        shape, axes = [channels, height // block, block, width // block, block], [0, 1, 3, 5, 2, 4]
    else:
        shape, axes = [channels // block**2, block, block, height, width], [0, 1, 4, 2, 5, 3]
    writer.emit(node, "rearrange", [writer.names[source]], {"kind": "reshape", "shape": shape})
    writer.emit(node, "rearrange", [writer.names[node]], {"kind": "permute", "axes": axes})
    writer.emit(node, "rearrange", [writer.names[node]], {"kind": "reshape", "shape": _shape(node)})


def _arithmetic(writer: _Writer, node: fx.Node, name: str) -> None:
    """Sums of two values, and shifts and scalings by constants."""
    left, right = node.args[:2]
    if node.kwargs.get("alpha", 1) != 1:
        raise Refused(f"{node.name}: a bundle has no sum with a factor")
    dtype = node.meta["val"].dtype
    if left in writer.names and right in writer.names:
        names = [writer.names[left], writer.names[right]]  # type: ignore[index]
        if name == "sub":
            writer.emit(node, "scale", [names[1]], weights={"value": torch.tensor(-1.0, dtype=dtype)})
            names[1] = writer.names[node]
        elif name != "add":
            raise Refused(f"{node.name}: a bundle has no product or quotient of two values")
        writer.emit(node, "add", names)
        return
    moving, constant = (left, right) if left in writer.names else (right, left)
    if moving is right and name in ("sub", "div"):
        raise Refused(f"{node.name}: a bundle has no constant minus or divided by a value")
    value = torch.as_tensor(writer.value(constant), dtype=dtype)
    if value.dim() == node.meta["val"].dim():
        value = value[0] if value.shape[0] == 1 else value
    inputs = [writer.names[moving]]  # type: ignore[index]
    if name in ("add", "sub"):
        writer.emit(node, "shift", inputs, weights={"value": value if name == "add" else -value})
    else:
        writer.emit(node, "scale", inputs, {"inverse": name == "div"}, {"value": value})


def _pool(writer: _Writer, node: fx.Node, name: str) -> None:
    """Average and max pooling of images."""
    kernel = _tuple(node, 1, 2, 1)
    stride = _tuple(node, 2, 2, 1) if len(node.args) > 2 and node.args[2] else kernel
    attributes = {"kernel": kernel, "stride": stride, "padding": _tuple(node, 3, 2, 0)}
    if len(node.args) > 4:
        raise Refused(f"{node.name}: a bundle has pooling without dilation, ceil mode and divisor only")
    op = "average_pool" if name == "avg_pool2d" else "max_pool"
    writer.emit(node, op, [writer.names[node.args[0]]], attributes)  # type: ignore[index]


def _require_same_function(model: nn.Module, network: "checker.Network", example: Tensor) -> None:
    """Compare the bundle's network with the model on the example."""
    with evaluating(model), torch.no_grad():
        # one by one: a program may be fixed to a batch of one
        expected = np.asarray(torch.cat([model(x[None]) for x in example]).cpu().double())
    batch = np.asarray(example.detach().cpu().double())
    value = network.evaluate(batch, np.zeros(len(batch))).x
    scale = float(np.abs(expected).max()) + 1e-30
    if value.shape != expected.shape or not float(np.abs(value - expected).max()) <= _AGREEMENT * scale:
        raise Refused("the bundle's operations do not give the model's outputs: part of the model was not understood")


def _provable(network: "checker.Network", images: np.ndarray, labels: np.ndarray, divisor: int) -> np.ndarray:
    """Radii of all inputs, in batches."""
    size = max(1, min(500, 2**25 // network.largest))
    parts = []
    for start in range(0, len(images), size):
        batch = images[start : start + size].astype(np.float64) / divisor
        parts.append(checker.provable_radii(network, batch, labels[start : start + size]))
    # another machine rounds otherwise: the last digits are given away
    return np.concatenate(parts) * (1 - 1e-9)


def _save(folder: Path, document: dict[str, Any], files: Mapping[str, bytes]) -> None:
    """Write the tensors, then the document that names their digests."""
    make_folder(folder)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    for name, content in files.items():
        atomic_write(folder / name, content)
    text = json.dumps({**document, "digests": digests}, indent=1, allow_nan=False)
    atomic_write(folder / "certificate.json", text + "\n")


def check(folder: str | Path, *, exact: bool = False) -> list[str]:
    """Check a bundle with the independent checker.

    Args:
        folder: the folder of the bundle.
        exact: use Python's integers instead of floating point; for dense ReLU networks.

    Returns:
        The claims that were proved, in words.

    Raises:
        Refused: a claim is not proved, or the bundle is malformed.
    """
    try:
        with np.errstate(all="ignore"):
            return check_exact.check(folder) if exact else checker.check(folder)
    except checker.Rejected as error:
        raise Refused(f"REJECTED: {error}") from None
    except Exception as error:  # noqa: BLE001 (a malformed bundle is rejected, whatever it breaks)
        raise Refused(f"REJECTED: malformed bundle ({type(error).__name__}: {str(error)[:200]})") from None


__all__ = ["EPSILONS", "check", "describe", "write"]
