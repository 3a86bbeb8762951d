"""Audits for a report: the bound of a network with its effective weights, local bounds, singular values of its layers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from equipoise.core.digests import sealed, unsealed
from equipoise.core.errors import InputError, Refused, one_line
from equipoise.core.files import as_input_error, atomic_write, read_json
from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise.nn.convert import with_effective_weights
from equipoise.norms.reference import operator_matrix
from equipoise.report.data import Audit, Spectrum

NAME = "audit.json"
#: operators with more inputs or outputs are not materialised for their spectrum
LARGEST = 1500
#: singular values kept per layer
KEPT = 96


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

    >>> audit = audit_network("net", nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval(), torch.zeros(1, 3))
    >>> audit.bound["upper"] > 0, audit.spectra[0].layer, audit.spectra[0].count
    (True, '0', 3)
    """
    if isinstance(model, ExportedProgram):
        return Audit(name, lipschitz_bound(model).to_dict())
    if example is None:
        raise InputError(f"the bound of {name} depends on the input's shape: give an example input")
    model = with_effective_weights(model, example)
    local: list[dict[str, Any]] = []
    bound = lipschitz_bound(model, example).to_dict()
    if inputs is not None and radius is not None:
        found = local_lipschitz(model, inputs, radius, steps=steps)
        names = list(ids) or list(range(len(inputs)))
        pairs = zip(names, torch.as_tensor(found.lower).tolist(), torch.as_tensor(found.upper).tolist(), strict=True)
        local = [{"id": str(i), "lower": low, "upper": high} for i, low, high in pairs]
    return Audit(name, bound, spectra(model, example), tuple(local), radius if local else None)


def spectra(model: nn.Module, example: Tensor) -> tuple[Spectrum, ...]:
    """Singular values of every linear and convolutional layer, at the input size it sees; layers too large are left out."""
    shapes: dict[str, tuple[int, ...]] = {}
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, kinds)}

    def watch(name: str) -> Any:
        def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            shapes.setdefault(name, tuple(args[0].shape[1:]))

        return look

    handles = [m.register_forward_hook(watch(n)) for n, m in layers.items()]
    try:
        with torch.no_grad():
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    found = (_spectrum(n, m, shapes[n]) for n, m in layers.items() if n in shapes)
    return tuple(s for s in found if s is not None)


def _spectrum(name: str, layer: nn.Module, shape: tuple[int, ...]) -> Spectrum | None:
    note = ""
    if isinstance(layer, nn.Linear):
        values = torch.linalg.svdvals(layer.weight.detach().double())
    elif isinstance(layer, nn.Conv2d) and _simple(layer):
        values, note = _periodic(layer, shape), "periodic boundary"
    else:
        if int(np.prod(shape)) > LARGEST:
            return None
        matrix = operator_matrix(layer, shape)
        if max(matrix.shape) > LARGEST:
            return None
        values = torch.linalg.svdvals(matrix)
    kept = values.flatten().sort(descending=True).values.numpy()
    kept = kept[np.unique(np.linspace(0, len(kept) - 1, min(KEPT, len(kept))).round().astype(int))]
    return Spectrum(name, tuple(float(v) for v in kept), int(values.numel()), note)


def _simple(layer: nn.Conv2d) -> bool:
    return layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.groups == 1


def _periodic(layer: nn.Conv2d, shape: tuple[int, ...]) -> Tensor:
    """Singular values with periodic boundary: those of the symbol at every frequency of the layer's input."""
    size = [max(n, k) for n, k in zip(shape[1:], layer.kernel_size, strict=True)]
    while size[0] * size[1] > 64 * 64:  # a coarser grid has the same shape of spectrum
        size = [max(n // 2, k) for n, k in zip(size, layer.kernel_size, strict=True)]
    symbol = torch.fft.fft2(layer.weight.detach().double(), s=size).permute(2, 3, 0, 1)
    return torch.linalg.svdvals(symbol)


def save_audit(audit: Audit, folder: str | Path) -> None:
    """Write `audit.json` beside the certificates it belongs to."""
    atomic_write(Path(folder) / NAME, json.dumps(sealed(asdict(audit)), ensure_ascii=False, allow_nan=False) + "\n")


def load_audit(folder: str | Path) -> Audit:
    """Read `audit.json`."""
    path = Path(folder) / NAME
    with as_input_error(path):
        plain = unsealed(read_json(path, 10**9), str(path))
        found = Audit(
            str(plain["model"]), plain["bound"],
            tuple(
                Spectrum(str(s["layer"]), tuple(float(v) for v in s["values"]), int(s["count"]), str(s["note"]))
                for s in plain["spectra"]
            ),
            tuple({"id": str(p["id"]), "lower": float(p["lower"]), "upper": float(p["upper"])} for p in plain["local"]),
            plain["local_radius"],
        )  # fmt: skip
        for key in ("log_upper", "log_product", "log_fused"):
            float(found.bound[key])
        for row in found.bound["layers"]:
            float(row["share"]), str(row["name"])
    return found


def audit_source(source: str, weights: Path | None = None, shape: tuple[int, ...] | None = None) -> Audit:
    """Audit what `source` names: a .pt2 file, a checkpoint directory or package.module:factory."""
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
