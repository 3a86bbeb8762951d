"""Certificates as bundles of plain files, which the lone program `equipoise/checker/check.py` accepts or rejects.

A bundle holds the network as a list of plain operations with proved norms, its weights, inputs, labels and radii; the format is
described in `docs/certificates.md`. The claims are about the real function of the stored weights.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor, fx, nn

from equipoise.checker import check as checker
from equipoise.checker import check_dense, check_deployed, check_layers, check_smoothing  # noqa: F401 (claims are registered)
from equipoise.core import (
    InputError,
    Refused,
    evaluating,
    explained,
    flat_outputs,
    flat_tensors,
    is_unmodified,
    run_on,
)
from equipoise.core.files import atomic_write, make_folder, write_json
from equipoise.lipschitz.capture import as_function, capture
from equipoise.lipschitz.local.multipliers import Reduced, best_multipliers
from equipoise.lipschitz.rules.registry import bind
from equipoise.nn.convert import with_effective_weights
from equipoise.norms import spectral_norm
from equipoise.smoothing.bounds import Gaussian
from equipoise.smoothing.derive import Setting, Votes, derive, plan_votes
from equipoise.smoothing.joint import joint_cells
from equipoise.smoothing.procedures import find_procedure

#: certified distances that are counted by default: those of the literature for images in [0, 1]
EPSILONS = (36 / 255, 72 / 255, 108 / 255, 1.0)
#: a local radius is lowered by these factors until the checker's own proof succeeds
_SHRINKING = (1 - 1e-6, 0.97, 0.93, 0.88, 0.83, 0.79, 0.74, 0.65, 0.5)
#: how far the bundle's network may be from the model on the inputs, relative to the logits: the model computes in float32
_AGREEMENT = 1e-3
#: and from what was captured of it, in float64: weights of interpolations are stored in float32
_EXACT = 1e-6
#: another machine rounds otherwise: the last digits of a proved radius are given away
_MARGIN = 1 - 1e-9


def _to_safetensors(arrays: dict[str, np.ndarray]) -> bytes:
    """The file's content; `save` takes memory as it lies, so the order of axes must be that of the shape."""
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def write(
    model: nn.Module,
    x: Tensor,
    y: Tensor | None,
    folder: str | Path,
    *,
    radii: Tensor | None = None,
    epsilons: Iterable[float] = EPSILONS,
    deployed: bool = False,
) -> dict[str, Any]:
    """Write a bundle that claims a Lipschitz constant of the network and a radius for every input.

    Args:
        model: a network of the operations in `docs/certificates.md`; layers of `equipoise.nn` are exported first.
        x: inputs, the batch first; uint8 images are taken as `x / 255`.
        y: their labels; None claims the Lipschitz constant alone, and x gives the shape of an input.
        folder: where the bundle is written; existing files of a bundle are replaced.
        radii: claimed radii, lowered to what the checker proves; for dense ReLU networks it proves local certificates too. By
            default the largest radii that follow from the Lipschitz constant.
        epsilons: distances at which the certified inputs are counted.
        deployed: claim the radii of the network as it is executed in float32, sums in any order.

    Returns:
        The claims, as they stand in `certificate.json`; `lowered` counts radii that the checker proves smaller than given.

    Guarantee: norms and radii are those that the checker's own functions proved; `check` reads the files again.

    Raises:
        Refused: the network contains an operation that bundles do not have; the message names it.
    """
    divisor = 255 if x.dtype == torch.uint8 else 1
    images = np.asarray(x.detach().cpu())
    parameter = next(model.parameters(), torch.zeros(()))
    example = (x[:2] / divisor).to(parameter)
    labels = np.zeros(len(x), np.int64)
    if y is not None:
        labels = np.asarray(y.detach().cpu(), dtype=np.int64)
    if labels.shape != (len(x),) or not len(labels):
        raise InputError(
            f"expected one label for each of the {len(x)} inputs, got shape {tuple(labels.shape)}"
        )
    document, weights, exact = _translate(model, example)
    kind = "deployed" if deployed else "radii"
    try:
        with np.errstate(all="ignore"):
            network: Any = checker.Network(document, weights)
            _require_same_function(model, exact, network, example)
            claims: dict[str, Any] = {"lipschitz": float(network.constant)}
            files = {"weights.safetensors": _to_safetensors(weights)}
            if y is None:
                _save(folder, {**document, "claims": claims}, files)
                return claims
            proved = checker.provable_radii(network, images, divisor, labels) * _MARGIN
            if deployed:
                # rounding grows with the radius: what is proved for a larger one holds
                executed = check_deployed.Deployed(network, proved.max())
                proved = checker.provable_radii(executed, images, divisor, labels) * _MARGIN
    except checker.Rejected as error:
        raise Refused(f"the checker proves nothing about this network: {error}") from None
    wanted = proved if radii is None else np.asarray(radii.detach().cpu(), dtype=np.float64)
    tensors = {"x": images, "labels": labels, "radii": np.minimum(proved, wanted)}
    levels = [float(epsilon) for epsilon in epsilons]

    def claim(name: str) -> dict[str, Any]:
        counts = {repr(level): int((tensors[name] >= level).sum()) for level in levels}
        return {"radii": name, "divisor": divisor, "certified": counts}

    claims[kind] = claim("radii")
    if not deployed and (wanted > proved).any():
        local = _local(network, images / float(divisor), labels, wanted, proved)
        if local is not None:
            tensors["local"], tensors["multipliers"] = local
            claims["local"] = claim("local")
    best = tensors.get("local", tensors["radii"])
    claims[kind]["lowered"] = int((best < wanted * (1 - 1e-6)).sum())
    files["inputs.safetensors"] = _to_safetensors(tensors)
    _save(folder, {**document, "claims": claims}, files)
    return claims


def write_smoothing(
    selection: np.ndarray,
    estimation: np.ndarray,
    draws: Sequence[int] | np.ndarray,
    folder: str | Path,
    *,
    sigma: float,
    alpha: float,
    procedure: str = "rivals",
) -> dict[str, Any]:
    """Write a bundle that claims radii of randomized smoothing, with the votes from which they follow.

    Args:
        selection: votes of the selection sample (N, classes); they choose the class and how the risk is spent.
        estimation: votes of the estimation sample (N, classes).
        draws: number of estimation draws of every input; they must be equal.
        folder: where the bundle is written.
        sigma: standard deviation of the noise.
        alpha: risk for each input.
        procedure: a row of `smoothing.PROCEDURES` that counts votes.

    Returns:
        The claims, as they stand in `certificate.json`.
    """
    votes = Votes(selection.astype(float), estimation.astype(float), np.asarray(draws, dtype=float))
    setting = Setting(Gaussian(sigma), alpha)
    method = find_procedure(procedure)
    plan = plan_votes(votes, method, setting)
    certificate = derive(votes, method, setting)
    rows = []
    for index in np.flatnonzero(certificate.radius > 0):
        order = plan.partition.order[index]
        counts = votes.estimation[index, order]
        selection_votes = votes.selection[index, order]
        radius = float(certificate.radius[index]) * _MARGIN
        row: dict[str, Any] = {
            "input": int(index),
            "k": int(counts[0]),
            "rival": int(counts[1:].max()),
        }
        if plan.joint[index]:
            weight, ends = joint_cells(
                counts[:1],
                votes.draws[index : index + 1],
                (selection_votes[:1], selection_votes[1:2], selection_votes.sum(keepdims=True)),
            )
            row |= {"procedure": "joint", "gap": 2 * radius / sigma}
            row |= {"weight": float(weight[0]), "cells": ends[0].tolist()}
        else:
            p = float(certificate.p_lower[index]) * _MARGIN
            q = min(1.0, float(certificate.p_upper[index]) / _MARGIN)
            share = float(plan.top[index]) if plan.partition.buckets[index] > 2 else 1.0
            if share == 1 or q > (1 - p) * (1 - 1e-6):
                # the class's own bound is the better one for its rivals
                q = min(1.0, (1 - p) * (1 + 1e-15))
            row |= {"procedure": "bounds", "share": share, "p": p, "q": q}
        # the bounds' last digits were given away, and the radius follows from them
        rows.append({**row, "radius": max(radius - 1e-7 * (radius + sigma), 0.0)})
    claims = {"smoothing": {"sigma": sigma, "alpha": alpha, "n": int(max(draws)), "rows": rows}}
    _save(folder, {"claims": claims}, {})
    return claims


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
            return check_dense.check_exact(folder) if exact else checker.check(folder)
    except checker.Rejected as error:
        raise Refused(f"REJECTED: {error}") from None
    except Exception as error:  # noqa: BLE001 (a malformed bundle is rejected, whatever it breaks)
        raise Refused(
            f"REJECTED: malformed bundle ({type(error).__name__}: {str(error)[:200]})"
        ) from None


def _save(folder: str | Path, document: dict[str, Any], files: Mapping[str, bytes]) -> None:
    """Write the tensors, then the document that names their digests."""
    folder = Path(folder)
    make_folder(folder)
    digests = {}
    for name, content in files.items():
        digests[name] = hashlib.sha256(content).hexdigest()
        atomic_write(folder / name, content)
    full = {"version": "equipoise-bundle 1", **document, "digests": digests}
    write_json(folder / "certificate.json", full)


def _require_same_function(
    model: nn.Module, exact: Callable[[Tensor], Tensor], network: "checker.Network", example: Tensor
) -> None:
    """Compare the bundle's network with the model on the example, and in float64 at random points too."""
    with evaluating(model), torch.no_grad():
        # one by one: a program may be fixed to a batch of one
        outputs = [flat_outputs(run_on(model, [sample[None]])) for sample in example]
    rows = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in outputs])
    random = torch.randn(example.shape, generator=torch.Generator().manual_seed(0))
    points = torch.cat([example.cpu().double(), random.double()])
    for batch, expected, share in (
        (points[: len(rows)], rows, _AGREEMENT),
        (points, exact(points), _EXACT),
    ):
        value = network.evaluate(np.moveaxis(batch.numpy(), 0, -1)).x.T
        target = _double(expected)
        tolerance = share * np.abs(target).max() + 1e-30
        if value.shape != target.shape or not np.abs(value - target).max() <= tolerance:
            raise Refused(
                "the bundle's operations do not give the model's outputs, one vector of logits: part of it was not understood"
            )


def _local(
    network: "checker.Network",
    images: np.ndarray,
    labels: np.ndarray,
    wanted: np.ndarray,
    proved: np.ndarray,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Local radii and the multipliers that prove them; None for networks that are not dense ReLU networks."""
    try:
        layers = check_dense.dense_layers(network)
    except checker.Rejected:
        return None
    neurons = [len(bias) for _, bias in layers[:-1]]
    radii = proved.copy()
    multipliers = np.ones((len(images), sum(neurons)))
    for index in np.flatnonzero(wanted > proved):
        image = images[index].astype(np.float64).ravel()
        for radius in wanted[index] * np.array(_SHRINKING):
            if radius <= proved[index]:
                break
            proof = _local_proof(layers, image, labels[index], radius, neurons)
            if proof is not None:
                radii[index] = radius * _MARGIN
                multipliers[index] = proof
                break
    return radii, multipliers


def _local_proof(
    layers: Any, image: np.ndarray, label: int, radius: float, neurons: list[int]
) -> np.ndarray | None:
    """Multipliers with which the checker proves the radius; None where none were found."""
    multipliers = np.ones(sum(neurons))
    try:
        ball = check_dense.Ball(layers, image, radius)
        margins = ball.open_margins(label)
        if len(margins):
            C, D, slack, switching = ball.maps(margins)
            parts = np.split(switching, np.cumsum(neurons)[:-1])
            counts = tuple(int(part.sum()) for part in parts)
            C, D, slack = map(torch.from_numpy, (C, D, slack))
            maps = Reduced(C, D, slack, counts)
            solution = best_multipliers(maps, enough=0.999 / radius)
            if solution is None:
                return None
            multipliers[switching] = solution.s.numpy()
        ball.check(label, multipliers)
    except checker.Rejected:
        return None
    return multipliers


# --- the network as a list of plain operations -------------------------------------------------------------------------


def describe(model: nn.Module, example: Tensor) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The network as a bundle's document, with norms that the checker has proved, and its weights.

    Args:
        model: the network, in evaluation mode or not.
        example: a batch of inputs; their shape fixes the sizes of the images.

    Returns:
        The document without claims, and the tensors by name.
    """
    return _translate(model, example)[:2]


def _translate(
    model: nn.Module, example: Tensor
) -> tuple[dict[str, Any], dict[str, np.ndarray], Callable[[Tensor], Tensor]]:
    """The document, the tensors, and the captured network as a function in float64."""
    plain = with_effective_weights(model, example)
    with evaluating(plain), torch.no_grad():
        program = capture(plain, example[:1])
    if program.doubt:
        raise Refused(program.doubt)
    modules = dict(plain.named_modules(remove_duplicate=False))
    # constants are those of the network as it is executed
    program = replace(program, constants={**program.constants, **program.native})
    writer = _Writer(program.constants, modules)
    writer.names[program.inputs[0]] = "input"
    for node in program.nodes:
        failure = f"{node.name} ({_name(node)}) is not an operation that bundles have"
        with explained(failure, kind=Refused):
            writer.translate(node)

    # without operations that became parts of others
    nodes: list[dict[str, Any]] = []
    used = {writer.names.get(node) for node in program.outputs}
    if len(used) != 1:
        raise Refused("a bundle has networks with one output")
    for row in reversed(writer.nodes):
        if row["name"] in used:
            used.update(row["inputs"], row["weights"].values())
            nodes.insert(0, row)
    tensors = {name: value for name, value in writer.tensors.items() if name in used}
    if not nodes:
        raise Refused("a bundle has networks whose output is the result of an operation")
    document = {"input_shape": list(example.shape[1:]), "nodes": nodes}
    return document, tensors, as_function(program)


_Arguments = Mapping[str, Any]

#: a dense layer is a convolution without dimensions
_DENSE = {"stride": [], "padding": [], "groups": 1}


class _Writer:
    """Translates the graph of a captured program, node by node."""

    def __init__(self, constants: Mapping[fx.Node, Any], modules: Mapping[str, nn.Module]) -> None:
        self.constants = constants
        self.modules = modules
        self.nodes: list[dict[str, Any]] = []
        self.tensors: dict[str, np.ndarray] = {}
        self.stored: dict[Any, str] = {}
        self.names: dict[Any, str] = {}
        self.block: Any = None

    def translate(self, node: fx.Node) -> None:
        """Append the operations of one node of the graph, or refuse it by name."""
        name = _name(node)
        for value in flat_tensors(node.meta["val"])[:1]:
            if value.dtype not in (torch.float32, torch.float64):
                raise Refused(f"{node.name}: a bundle has no values in {value.dtype}, which round")
        block, module = self.module_around(node)
        if block and block == self.block:
            self.names[node] = self.nodes[-1]["name"]
            return
        # a reshape before a block may be named after it
        self.block = None if name in _RESHAPES else block
        if self.block:
            _MODULES[type(module).__name__](self, node, module)
        elif name in _PASSED and not (name == "dropout" and node.args[2]):
            source = node.all_input_nodes[0]
            # parts of a value, which have no name, are recognised where they meet
            if source in self.names:
                self.names[node] = self.names[source]
        elif name in _TRANSLATIONS:
            _TRANSLATIONS[name](self, node, bind(node, lambda value: value))
        elif name not in _PARTS:
            raise Refused(
                f"a bundle has no operation for {node.name} ({name}); docs/certificates.md lists the operations it has"
            )

    def module_around(self, node: fx.Node) -> tuple[str, nn.Module | None]:
        """The call of a module that becomes one operation, around a node, and the module; an empty text outside of them."""
        for call, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            module = self.modules.get(str(path))
            if module is None or not type(module).__module__.startswith("equipoise.nn."):
                continue
            if type(module).__name__ in _MODULES and is_unmodified(module, "forward"):
                return str(call), module
        return "", None

    def emit(
        self,
        node: fx.Node,
        op: str,
        sources: Iterable[Any],
        weights: Mapping[str, Tensor] | None = None,
        **rest: Any,
    ) -> None:
        """Append an operation whose value is that of the node.

        Args:
            node: a node of the program.
            op: the name of the operation.
            sources: the nodes that are its inputs.
            weights: its stored tensors.
            rest: its attributes.
        """
        name = f"{node.name}_{len(self.nodes)}"
        stored = {key: self.store(f"{name}.{key}", value) for key, value in (weights or {}).items()}
        inputs = [self.names[source] for source in sources]
        self.nodes.append({"name": name, "op": op, "inputs": inputs, "weights": stored, **rest})
        self.names[node] = name

    def store(self, name: str, value: Tensor) -> str:
        """The name under which a tensor is stored; equal tensors are stored once.

        Args:
            name: the name to store it under, unless an equal tensor has one.
            value: the tensor.
        """
        array = np.ascontiguousarray(value.detach().cpu().numpy())
        content = (array.dtype.str, array.shape, array.tobytes())
        name = self.stored.setdefault(content, name)
        self.tensors[name] = array
        return name

    def layer(
        self,
        node: fx.Node,
        op: str,
        source: Any,
        parameters: tuple[Tensor, Tensor | None],
        geometry: _Arguments,
        **rest: Any,
    ) -> None:
        """Append a linear layer, or a block around one, with a norm that the checker has proved.

        Args:
            node: a node of the program.
            op: linear, convolution, circular, transposed or residual.
            source: the node that is its input.
            parameters: weight and bias; the bias has an entry for each channel.
            geometry: of the convolution.
            rest: other attributes of the operation.
        """
        weight, bias = parameters
        taps = weight.shape[2:]
        operator = weight
        if taps:
            mode = "circular" if op == "circular" else "zeros"
            kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(taps) - 1]
            channels = weight.shape[1] * geometry["groups"], len(weight)
            operator = kind(*channels, taps, bias=False, padding_mode=mode, **geometry)
            operator.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is None:
            bias = weight.new_zeros(_shape(node)[0] if op == "transposed" else len(weight))
        weights = {"weight": weight, "bias": bias.reshape(-1, *[1] * len(taps))}

        lower = max(1e-30, float(spectral_norm(operator, rtol=1e-4).lower))
        size = tuple(rest.get("size", _shape(source)[1:]))
        if op == "convolution":
            rest = {}
        proof = check_layers.Circular if op == "circular" else checker.Layer
        layer = proof(_double(weight), geometry, size)
        # the smallest bound that the checker's own proof gives, up to a factor of 4 of its distance to the norm
        for power in range(14):
            upper = lower * (1 + 1e-9 * 4**power)
            try:
                layer.check(upper)
            except checker.Rejected:
                continue
            self.emit(node, op, [source], weights, upper=upper, **geometry, **rest)
            return
        raise Refused(f"{node.name}: the checker does not prove the norm {lower:g}")


def _name(node: Any) -> str:
    """The name of an operation, without the number of its dimensions."""
    target = getattr(node, "target", None)
    name = getattr(getattr(target, "overloadpacket", target), "__name__", "")
    return re.sub(r"(_|[123]d)$", "", str(name))


def _double(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.detach().cpu().double())


def _shape(node: fx.Node) -> list[int]:
    """The shape of one sample."""
    return [int(n) for n in node.meta["val"].shape[1:]]


def _geometry(attributes: _Arguments) -> dict[str, Any]:
    """Stride, padding and groups of a convolution."""
    lists = {key: list(attributes[key]) for key in ("stride", "padding")}
    return {**lists, "groups": attributes["groups"]}


def _spread(weight: Tensor, dilation: Sequence[int]) -> Tensor:
    """The kernel of a dilated convolution, with the zeros between its taps written out."""
    if max(dilation) == 1:
        return weight
    taps = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    wide = weight.new_zeros(*weight.shape[:2], *taps)
    places: Any = (..., *[slice(None, None, d) for d in dilation])
    wide[places] = weight
    return wide


def _linear(writer: _Writer, node: fx.Node, a: _Arguments) -> None:
    """A dense layer, a convolution, or a transposed one."""
    source = a["input"]
    weight = writer.constants[a["weight"]]
    bias = None if a["bias"] is None else writer.constants[a["bias"]]
    if weight.dim() == 2:
        writer.layer(node, "linear", source, (weight, bias), _DENSE)
        return
    weight = _spread(weight, a["dilation"])
    op = "convolution"
    rest = {}
    geometry = _geometry(a)
    if "transpose" in _name(node):
        op = "transposed"
        rest = {"size": _shape(node)[1:]}
    elif _name(source) == "pad" and "circular" in source.args:
        # circular padding; its widths begin with the last dimension
        widths = source.args[1][::-1]
        if widths[::2] != widths[1::2] or any(geometry["padding"]):
            raise Refused(f"{node.name}: a bundle has equal circular padding on both sides only")
        op = "circular"
        geometry["padding"] = widths[::2]
        source = source.args[0]
    writer.layer(node, op, source, (weight, bias), geometry, **rest)


def _residual(writer: _Writer, node: fx.Node, module: Any) -> None:
    """`x − 2·Uᵀ relu(Ux + b)`, at the first node of its module."""
    stored, offset, scale = module.effective()
    inner = module.inner(stored)
    zeros = getattr(inner, "padding_mode", "zeros") == "zeros"
    sources = [source for source in node.all_input_nodes if source in writer.names]
    if not isinstance(module.activation, nn.ReLU) or scale.numel() or not zeros or not sources:
        raise Refused(f"{node.name}: a bundle has residual blocks with ReLU and zero padding only")
    weight, geometry = inner.weight, _DENSE
    if weight.dim() > 2:
        geometry = _geometry(vars(inner))
        weight = _spread(weight, inner.dilation)
    parameters = weight, offset if offset.numel() else None
    writer.layer(node, "residual", sources[0], parameters, geometry, h=2.0)


def _householder(writer: _Writer, node: fx.Node, module: Any) -> None:
    """Reflections of pairs of channels, at the first node of their module."""
    half = module.theta.detach() / 2
    value = torch.stack([half.sin(), -half.cos()])
    writer.emit(node, "householder", node.all_input_nodes[:1], {"value": value})


def _batch_norm(writer: _Writer, node: fx.Node, a: _Arguments) -> None:
    """`ax + b` for every channel, as a scaling and a shift in float64; a and b from its values at 0 and 1."""
    others: Any = node.args[1:]
    statistics = [
        writer.constants[part].double() if part in writer.constants else part for part in others
    ]
    zero = torch.zeros(1, *_shape(node)[:1], *[1] * (len(_shape(node)) - 1), dtype=torch.float64)
    target: Any = node.target
    shift = target(zero, *statistics)
    scale = target(zero + 1, *statistics) - shift
    writer.emit(node, "scale", [a["input"]], {"value": scale[0]})
    writer.emit(node, "shift", [node], {"value": shift[0]})


def _gather(writer: _Writer, node: fx.Node, a: _Arguments) -> None:
    """Operations that move entries: done with the places of the entries."""
    source: Any = node.args[0]
    count = prod(_shape(source))
    places = torch.arange(float(count), dtype=torch.float64).reshape(1, *_shape(source))
    target: Any = node.target
    index = target(places, *node.args[1:], **node.kwargs)
    writer.emit(node, "gather", [source], {"index": index[0].long()})


def _image_map(writer: _Writer, node: fx.Node, a: _Arguments) -> None:
    """Interpolation and adaptive averages: the operation itself gives the matrix of all pixels, which become channels."""
    source: Any = node.args[0]
    channels, *size = _shape(source)
    n = prod(size)
    target: Any = node.target
    rows = target(torch.eye(n).reshape(n, 1, *size), *node.args[1:], **node.kwargs).reshape(n, -1)
    turned = torch.arange(channels * n).reshape(channels, n).T
    writer.emit(node, "gather", [source], {"index": turned})
    geometry = {"stride": [1], "padding": [0], "groups": 1}
    writer.layer(node, "convolution", node, (rows.T[..., None], None), geometry, size=[channels])
    back = torch.arange(rows.shape[1] * channels).reshape(-1, channels).T
    writer.emit(node, "gather", [node], {"index": back.reshape(_shape(node))})


def _pad(writer: _Writer, node: fx.Node, a: _Arguments) -> None:
    """Padding with zeros, or in other ways that copy entries."""
    source: Any = node.args[0]
    if a.get("mode", "constant") != "constant":
        _gather(writer, node, a)
        return
    widths = list(a["pad"])
    rest = 2 * len(_shape(source)) - len(widths)
    if a.get("value") or min(widths) < 0 or rest < 0:
        raise Refused(f"{node.name}: a bundle has padding of a sample with zeros only")
    # the widths begin with the last dimension
    pairs = [*zip(widths[::2], widths[1::2], strict=True)][::-1]
    writer.emit(node, "pad", [source], widths=[0] * rest + [w for pair in pairs for w in pair])


def _arithmetic(writer: _Writer, node: fx.Node, a: _Arguments) -> None:
    """Sums of two values, and a value with a constant added, subtracted, multiplied or divided by."""
    name = _name(node)
    left, right = a["self"], a["other"]
    if right in writer.names and left not in writer.names and name in ("add", "mul"):
        left, right = right, left
    if right in writer.names or a.get("alpha", 1) != 1:
        if name != "add" or a["alpha"] != 1:
            raise Refused(f"{node.name}: of two values, a bundle has the plain sum only")
        writer.emit(node, "add", [left, right])
        return
    if a.get("rounding_mode"):
        raise Refused(f"{node.name}: a bundle has no division that rounds")
    value = torch.as_tensor(writer.constants.get(right, right), dtype=node.meta["val"].dtype)
    if value.dim() == node.meta["val"].dim():
        value = value.squeeze(0)
    op = {"add": "shift", "sub": "shift", "mul": "scale", "div": "divide"}[name]
    writer.emit(node, op, [left], {"value": -value if name == "sub" else value})


def _concatenate(writer: _Writer, node: fx.Node, a: _Arguments) -> None:
    """Values one after the other; `cat(|a|, b)` and `cat(max(a, b), min(a, b))` of the halves of a value are activations."""
    if a["dim"] != 1:
        raise Refused(f"{node.name}: a bundle has concatenations of channels only")
    values = a["tensors"]
    names = [_name(value) for value in values]
    if names not in (["maximum", "minimum"], ["abs", "slice"]):
        writer.emit(node, "concatenate", values)
        return
    ordered = names[0] == "maximum"
    first, second = values[0].args[0], values[1].args[1] if ordered else values[1]
    source = first.args[0]
    shape = _shape(node)
    count = _shape(first)[0]
    halves = [(source, 1, 0, count), (source, 1, count, shape[0])]
    same = not ordered or values[0].args == values[1].args
    if not same or [first.args, second.args] != halves or _shape(source) != shape:
        raise Refused(f"{node.name}: of parts of a value, a bundle has MaxMin and β-abs only")
    if ordered:
        writer.emit(node, "reshape", [source], shape=[2, count, *shape[1:]])
        writer.emit(node, "sort", [node], dim=1, descending=True)
        writer.emit(node, "reshape", [node], shape=shape)
    else:
        writer.emit(node, "abs", [source], count=count)


def _pool(writer: _Writer, node: fx.Node, a: _Arguments) -> None:
    """Average and max pooling, and the mean over an image."""
    name = _name(node)
    source = a["self"]
    size = _shape(source)[1:]
    dims = len(size)
    kernel = stride = size
    padding = [0] * dims
    if name == "mean":
        usual = sorted(d % (dims + 2) for d in a["dim"]) == list(range(2, dims + 2))
    else:
        kernel = list(a["kernel_size"])
        padding = np.broadcast_to(a["padding"], dims).tolist()
        stride = list(a["stride"] or kernel)
        usual = not a["ceil_mode"] and not a.get("divisor_override")
        usual &= bool(np.all(np.equal(a.get("dilation", 1), 1)))
        usual &= not any(padding) or a.get("count_include_pad", True)
    if not usual:
        raise Refused(
            f"{node.name}: a bundle has pooling without dilation, ceil mode and divisor only"
        )
    op = "max_pool" if "max" in name else "average_pool"
    writer.emit(node, op, [source], kernel=kernel, stride=stride, padding=padding)
    if name == "mean":
        writer.emit(node, "reshape", [node], shape=_shape(node))


def _activation(writer: _Writer, node: fx.Node, a: _Arguments) -> None:
    """Functions of one number, and sorting, with PyTorch's arguments."""
    name = _name(node).replace("hardtanh", "clamp")
    ends = {"min": -1e99, "max": 1e99}
    limits = {key.removesuffix("_val"): value for key, value in a.items() if key != "self"}
    rest: Any = {key: ends[key] if value is None else value for key, value in limits.items()}
    writer.emit(node, name, [a["self"]], **rest)


def _reshape(writer: _Writer, node: fx.Node, a: _Arguments) -> None:
    writer.emit(node, "reshape", node.all_input_nodes[:1], shape=_shape(node))


#: modules that become one operation
_MODULES: dict[str, Callable[[_Writer, fx.Node, Any], None]] = {
    **dict.fromkeys(("SLLLinear", "SLLConv2d", "CPLLinear", "CPLConv2d"), _residual),
    "HouseholderActivation": _householder,
}
#: operations that are recognised where their results meet
_PARTS = {"maximum", "minimum"}
_PASSED = {"getitem", "dropout", "clone", "contiguous", "alias", "detach", "_to_copy", "to"}
_RESHAPES = ("flatten", "unflatten", "view", "reshape", "unsqueeze", "squeeze")
_MOVES = (
    "pixel_shuffle", "pixel_unshuffle", "permute", "transpose", "flip", "slice", "upsample_nearest",
)  # fmt: skip
_FUNCTIONS = (
    "relu", "abs", "leaky_relu", "clamp", "hardtanh", "tanh", "sigmoid", "silu", "softplus", "sort",
)  # fmt: skip
_IMAGE_MAPS = ("upsample_linear", "upsample_bilinear", "upsample_bicubic", "adaptive_avg_pool")
_TRANSLATIONS: dict[str, Callable[[_Writer, fx.Node, _Arguments], None]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(("linear", "conv", "conv_transpose"), _linear),
    **dict.fromkeys(("avg_pool", "max_pool", "mean"), _pool),
    **dict.fromkeys(("add", "sub", "mul", "div"), _arithmetic),
    **dict.fromkeys(_MOVES, _gather),
    **dict.fromkeys(_FUNCTIONS, _activation),
    **dict.fromkeys(_IMAGE_MAPS, _image_map),
    "batch_norm": _batch_norm,
    "pad": _pad,
    "cat": _concatenate,
}

__all__ = ["EPSILONS", "check", "describe", "write", "write_smoothing"]
