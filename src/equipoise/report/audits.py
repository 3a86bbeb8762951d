"""Audits for a report: the bound of a network with its effective weights, local bounds, singular values of its layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict
from torch import Tensor, nn
from torch.export import ExportedProgram

from equipoise.core.digests import sealed
from equipoise.core.documents import Count, Document, NonNegative, check_document, read_document
from equipoise.core.errors import InputError, Refused, one_line
from equipoise.core.files import atomic_write
from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise.nn.convert import with_effective_weights
from equipoise.norms.reference import operator_matrix

NAME = "audit.json"
#: operators with more inputs or outputs are not materialized for their spectrum
LARGEST = 1500
#: singular values kept per layer
KEPT = 96


class Layer(Document):
    """What one operation can add to the bound; `share` is of the logarithm of the product bound."""

    model_config = ConfigDict(extra="ignore")
    name: str = ""
    kind: str = ""
    shape: str = ""
    lower: float | None = None
    upper: float | None = None
    share: float | None = None
    method: str | None = None
    note: str | None = None


class NetworkBound(Document):
    """Logarithms of upper bounds of a network's constant, as `lipschitz_bound(...).to_dict()` has them, and its layers."""

    model_config = ConfigDict(extra="ignore")
    log_upper: float | None
    log_product: float | None
    log_fused: float | None = None
    log_chain: float | None = None
    ball: float | None = None
    notes: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()


class Spectrum(Document):
    """Singular values of one layer, largest first, thinned to a drawable number; an estimate in floating point."""

    layer: str
    values: tuple[float, ...]
    count: Count
    note: str = ""


class Local(Document):
    """A bracket of the constant on a ball around one input."""

    id: str
    lower: NonNegative
    upper: NonNegative


class Audit(Document):
    """Bounds of one network, for all inputs and around some of them."""

    model: str
    bound: NetworkBound
    spectra: tuple[Spectrum, ...] = ()
    local: tuple[Local, ...] = ()
    local_radius: NonNegative | None = None


def audit_network(
    name: str,
    model: nn.Module | ExportedProgram,
    example: Tensor | None = None,
    *,
    inputs: Tensor | None = None,
    ids: Sequence[Any] = (),
    radius: float | None = None,
    steps: int = 10,
) -> Audit:
    """Bound a network, and around each of `inputs` on a ball of `radius`; spectra where layers can be looked at.

    Guarantee: `bound` and the upper ends of `local` are upper bounds of the network with the stored weights, as
    `lipschitz_bound` and `local_lipschitz`; spectra are floating-point estimates.

    Args:
        name: of the network.
        model: the network.
        example: an input, where the network is not an exported program.
        inputs: those that local bounds are computed around.
        ids: of the inputs.
        radius: of the balls.
        steps: of the search for lower ends.

    >>> audit = audit_network("net", nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval(), torch.zeros(1, 3))
    >>> audit.bound.log_upper is not None, audit.spectra[0].layer, audit.spectra[0].count
    (True, '0', 3)
    """
    if isinstance(model, ExportedProgram):
        return Audit(model=name, bound=_bound(lipschitz_bound(model).to_dict(), name))
    if example is None:
        raise InputError(f"the bound of {name} depends on the input's shape: give an example input")
    model = with_effective_weights(model, example)
    bound = _bound(lipschitz_bound(model, example).to_dict(), name)
    local: tuple[Local, ...] = ()
    if inputs is not None and radius is not None:
        bracket = local_lipschitz(model, inputs, radius, steps=steps)
        names = [str(i) for i in (ids or range(len(inputs)))]
        ends = zip(names, torch.as_tensor(bracket.lower).tolist(), torch.as_tensor(bracket.upper).tolist(), strict=True)
        local = tuple(Local(id=i, lower=low, upper=high) for i, low, high in ends)
    return Audit(
        model=name, bound=bound, spectra=spectra(model, example), local=local, local_radius=radius if local else None
    )


def _bound(document: dict[str, Any], name: str) -> NetworkBound:
    return check_document(json.loads(json.dumps(document)), NetworkBound, f"the bound of {name}")


def spectra(model: nn.Module, example: Tensor) -> tuple[Spectrum, ...]:
    """Singular values of every linear and convolutional layer, at the input size it sees; layers too large are left out.

    Args:
        model: the network.
        example: an input.
    """
    shapes: dict[nn.Module, tuple[int, ...]] = {}
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}

    def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        shapes.setdefault(module, tuple(args[0].shape[1:]))

    handles = [module.register_forward_hook(look) for module in layers.values()]
    try:
        with torch.no_grad():
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    rows = [_spectrum(name, layer, shapes[layer]) for name, layer in layers.items() if layer in shapes]
    return tuple(row for row in rows if row is not None)


def _spectrum(name: str, layer: nn.Module, shape: tuple[int, ...]) -> Spectrum | None:
    note = ""
    if isinstance(layer, nn.Linear):
        values = torch.linalg.svdvals(layer.weight.detach().double())
    elif isinstance(layer, nn.Conv2d) and (layer.stride, layer.dilation, layer.groups) == ((1, 1), (1, 1), 1):
        values, note = _periodic(layer, shape), "periodic boundary"
    else:
        if int(np.prod(shape)) > LARGEST:
            return None
        matrix = operator_matrix(layer, shape)
        if max(matrix.shape) > LARGEST:
            return None
        values = torch.linalg.svdvals(matrix)
    ordered = values.flatten().sort(descending=True).values
    places = np.unique(np.linspace(0, len(ordered) - 1, min(KEPT, len(ordered))).round().astype(int))
    return Spectrum(layer=name, values=tuple(ordered[places].tolist()), count=len(ordered), note=note)


def _periodic(layer: nn.Conv2d, shape: tuple[int, ...]) -> Tensor:
    """Singular values with periodic boundary: those of the symbol at every frequency of the layer's input."""
    size = [max(min(64, n), k) for n, k in zip(shape[1:], layer.kernel_size, strict=True)]
    symbol = torch.fft.fft2(layer.weight.detach().double(), s=size).permute(2, 3, 0, 1)
    return torch.linalg.svdvals(symbol)


def save_audit(audit: Audit, folder: str | Path) -> None:
    """Write `audit.json` beside the certificates it belongs to.

    Args:
        audit: of the network.
        folder: of the run.
    """
    document = sealed(audit.model_dump(mode="json"))
    atomic_write(Path(folder) / NAME, json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")


def load_audit(folder: str | Path) -> Audit:
    """Read `audit.json`."""
    return read_document(Path(folder) / NAME, Audit, sealed=True)


def audit_source(source: str, weights: Path | None = None, shape: tuple[int, ...] | None = None) -> Audit:
    """Audit what `source` names: a .pt2 file, a checkpoint directory or package.module:factory.

    Args:
        source: as for `equipoise audit`.
        weights: of a factory.
        shape: of one input, where the source does not say it.
    """
    from equipoise.checkpoints import load_model

    loaded = load_model(source, weights)
    if isinstance(loaded.model, ExportedProgram):
        return audit_network(source, loaded.model)
    shape = shape or loaded.input_shape
    if shape is None:
        raise InputError(f"the bound of {source} depends on the input's shape: add --input-shape, e.g. 3,32,32")
    parameter = next(loaded.model.parameters(), torch.zeros(()))
    try:
        return audit_network(source, loaded.model, torch.zeros(1, *shape, dtype=parameter.dtype))
    except RuntimeError as error:
        raise Refused(f"{source} does not take inputs of shape {shape}: {one_line(error)}") from error
