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

from equipoise.checkpoints import Loaded, load_model
from equipoise.core.errors import InputError, Refused, one_line
from equipoise.core.files import Count, Document, NonNegative, atomic_write, parse_document, read_bounded, sealed
from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise.lipschitz.report import Report
from equipoise.nn.convert import with_effective_weights

NAME = "audit.json"
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
        return Audit(model=name, bound=_bound(lipschitz_bound(model), name))
    if example is None:
        raise InputError(f"the bound of {name} depends on the input's shape: give an example input")
    model = with_effective_weights(model, example)
    local = []
    if inputs is not None and radius is not None:
        bracket = local_lipschitz(model, inputs, radius, steps=steps)
        ends = (torch.as_tensor(end).tolist() for end in (bracket.lower, bracket.upper))
        for i, lower, upper in zip(ids or range(len(inputs)), *ends, strict=True):
            local.append(Local(id=str(i), lower=lower, upper=upper))
    return Audit(
        model=name,
        bound=_bound(lipschitz_bound(model, example), name),
        spectra=spectra(model, example),
        local=tuple(local),
        local_radius=radius if local else None,
    )


def _bound(report: Report, name: str) -> NetworkBound:
    return parse_document(report.to_json(), NetworkBound, f"the bound of {name}")


def spectra(model: nn.Module, example: Tensor) -> tuple[Spectrum, ...]:
    """Singular values of every linear layer and of every plain convolution (stride, dilation and groups 1).

    Those of a convolution are taken with periodic boundary: they are those of the symbol at every frequency of its input.

    Args:
        model: the network.
        example: an input.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    handles = []
    for name, layer in model.named_modules():
        plain = isinstance(layer, nn.Conv2d) and {*layer.stride, *layer.dilation, layer.groups} == {1}
        if isinstance(layer, nn.Linear) or plain:

            def look(module: nn.Module, args: tuple[Any, ...], output: Any, name: str = name) -> None:
                sizes[name] = tuple(args[0].shape[2:])

            handles.append(layer.register_forward_hook(look))
    try:
        with torch.no_grad():
            model(example)
    finally:
        for handle in handles:
            handle.remove()

    rows = []
    for name, size in sizes.items():
        weight = model.get_submodule(name).weight.detach().double()  # type: ignore[operator]
        if weight.ndim == 4:
            frequencies = [max(min(64, n), k) for n, k in zip(size, weight.shape[2:], strict=True)]
            weight = torch.fft.fft2(weight, s=frequencies).permute(2, 3, 0, 1)
        values = torch.linalg.svdvals(weight).flatten().sort(descending=True).values
        places = np.unique(np.linspace(0, len(values) - 1, KEPT).round().astype(int))
        note = "periodic boundary" if weight.ndim == 4 else ""
        rows.append(Spectrum(layer=name, values=tuple(values[places].tolist()), count=len(values), note=note))
    return tuple(rows)


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
    return parse_document(read_bounded(Path(folder) / NAME), Audit, str(Path(folder) / NAME), sealed=True)


def audit_source(source: str, weights: Path | None = None, shape: tuple[int, ...] | None = None) -> Audit:
    """Audit what `source` names: a .pt2 file, a checkpoint directory or package.module:factory.

    Args:
        source: as for `equipoise audit`.
        weights: of a factory.
        shape: of one input, where the source does not say it.
    """
    loaded = load_model(source, weights)
    try:
        example = example_of(loaded, shape)
        return audit_network(source, loaded.model, example[0] if isinstance(example, tuple) else example)
    except RuntimeError as error:
        raise Refused(f"{source} does not take inputs of shape {shape}: {one_line(error)}") from error


def example_of(loaded: Loaded, shape: tuple[int, ...] | None = None) -> Any:
    """An input of a loaded model: what its file declares, or zeros of a shape; None for an exported program.

    Args:
        loaded: the model.
        shape: of one input, where the source does not say it.
    """
    network = loaded.model
    if isinstance(network, ExportedProgram):
        if shape is not None:
            raise InputError(f"{loaded.source} has its own input shape: leave out --input-shape")
        return None
    if loaded.examples is not None and shape is None:
        return loaded.examples
    shape = shape or loaded.input_shape
    if shape is None:
        raise InputError(
            f"the bound of {loaded.source} depends on the input's shape: add --input-shape, e.g. --input-shape 3,32,32"
        )
    parameter = next(network.parameters(), torch.zeros(()))
    return torch.zeros(1, *shape, dtype=parameter.dtype)
