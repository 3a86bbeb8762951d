"""Audits for a report: the bound of a network with its effective weights, and local bounds around some inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from torch import Tensor, nn
from torch.export import ExportedProgram

from equipoise.checkpoints import Loaded, load_model
from equipoise.core.errors import InputError, Refused, one_line
from equipoise.core.files import (
    Document,
    NonNegative,
    atomic_write,
    parse_document,
    read_bounded,
    sealed,
)
from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise.lipschitz.report import Report
from equipoise.nn.convert import with_effective_weights

NAME = "audit.json"


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


class Local(Document):
    """A bracket of the constant on a ball around one input."""

    id: str
    lower: NonNegative
    upper: NonNegative


class Audit(Document):
    """Bounds of one network, for all inputs and around some of them."""

    model: str
    bound: NetworkBound
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
    """Bound a network, and around each of `inputs` on a ball of `radius`.

    Guarantee: `bound` and the upper ends of `local` are upper bounds of the network with the stored weights, as
    `lipschitz_bound` and `local_lipschitz`.

    Args:
        name: of the network.
        model: the network.
        example: an input, where the network is not an exported program.
        inputs: those that local bounds are computed around.
        ids: of the inputs.
        radius: of the balls.
        steps: of the search for lower ends.

    >>> audit = audit_network("net", nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval(), torch.zeros(1, 3))
    >>> audit.bound.log_upper is not None, audit.bound.layers[0].name
    (True, '0')
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
        local=tuple(local),
        local_radius=radius if local else None,
    )


def _bound(report: Report, name: str) -> NetworkBound:
    return parse_document(report.to_json(), NetworkBound, f"the bound of {name}")


def save_audit(audit: Audit, folder: str | Path) -> None:
    """Write `audit.json` beside the certificates it belongs to.

    Args:
        audit: of the network.
        folder: of the run.
    """
    document = sealed(audit.model_dump(mode="json"))
    atomic_write(
        Path(folder) / NAME, json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"
    )


def load_audit(folder: str | Path) -> Audit:
    """Read `audit.json`."""
    return parse_document(
        read_bounded(Path(folder) / NAME), Audit, str(Path(folder) / NAME), sealed=True
    )


def audit_source(
    source: str, weights: str | Path | None = None, shape: tuple[int, ...] | None = None
) -> Audit:
    """Audit what `source` names: a .pt2 file, a checkpoint directory or package.module:factory.

    Args:
        source: as for `equipoise audit`.
        weights: of a factory.
        shape: of one input, where the source does not say it.
    """
    loaded = load_model(source, weights)
    try:
        example = example_of(loaded, shape)
        return audit_network(
            source, loaded.model, example[0] if isinstance(example, tuple) else example
        )
    except RuntimeError as error:
        raise Refused(
            f"{source} does not take inputs of shape {shape}: {one_line(error)}"
        ) from error


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
