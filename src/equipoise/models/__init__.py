"""Trained networks with their certificates: those in the package by name, and the folders that `equipoise train` writes.

A folder has `model.safetensors`, `config.json`, `certificate.json` and a model card, `README.md`. The certificate says what was
proved for the stored weights when they were written; it names the digest of `config.json`, which covers the weights. Digests are
evidence against accidents and naive edits, no signatures:
`Trained.prove` computes the bounds again from the weights, which is what counts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checkpoints import load_checkpoint
from equipoise.core import InputError, Shape, did_you_mean, format_down, format_up, percent
from equipoise.core.files import atomic_write, read_bounded, read_json, sealed, unsealed, write_json
from equipoise.lipschitz import lipschitz_bound
from equipoise.nn.convert import with_effective_weights

__all__ = ["Trained", "bundled", "load", "save_certificate"]

CERTIFICATE, CARD = "certificate.json", "README.md"
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Trained:
    """A trained network in evaluation mode, the shape of one input, what was proved of it, and its model card.

    `certificate` holds `upper` (Lipschitz constant in ℓ2), `pairs` (constants of `z_i − z_j`, or None), `figures` (accuracy and
    certified accuracy, as measured when it was written) and where they come from.
    """

    name: str
    model: nn.Module = field(repr=False)
    input_shape: Shape | None
    certificate: Mapping[str, Any] = field(repr=False)
    card: str = field(repr=False)

    def prove(self, rtol: float = 1e-3) -> tuple[float, Tensor | None]:
        """The Lipschitz bound and the constants of pairs, computed again from the weights at hand: what counts."""
        if self.input_shape is None:
            raise InputError(
                f"{self.name} does not say the shape of its inputs, so there is nothing to bound"
            )
        return proved(self.model, self.input_shape, rtol)


def proved(
    model: nn.Module, input_shape: Sequence[int], rtol: float = 1e-3
) -> tuple[float, Tensor | None]:
    """Bound and constants of pairs of a network with its effective weights, in evaluation mode.

    Args:
        model: the network.
        input_shape: of one input.
        rtol: of the layers' norms.

    >>> proved(nn.Flatten(), (2, 2))[0] >= 1
    True
    """
    parameter = next(model.parameters(), torch.zeros(()))
    example = torch.zeros(1, *input_shape, dtype=parameter.dtype, device=parameter.device)
    report = lipschitz_bound(with_effective_weights(model, example), example, rtol=rtol)
    return report.upper, report.pairs


def bundled() -> list[str]:
    """The names of the networks in the package.

    >>> "digits" in bundled()
    True
    """
    return sorted(folder.name for folder in _HERE.iterdir() if (folder / CERTIFICATE).is_file())


def load(name: str | Path) -> Trained:
    """A trained network of the package by its name, or of a folder that `equipoise train` wrote.

    Nothing in the files is executed: they are a checkpoint of a registered builder, JSON and text.

    >>> digits = load("digits")
    >>> digits.certificate["figures"]["accuracy"] > 0.9, digits.model(torch.zeros(1, *digits.input_shape)).shape
    (True, torch.Size([1, 10]))
    """
    folder = _HERE / str(name) if str(name) in bundled() else Path(name)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"there is no trained network {str(name)!r} in the package (there are {', '.join(bundled())}), and no such "
            f"folder{did_you_mean(str(name), bundled())}"
        )
    model, shape = load_checkpoint(folder)
    where = folder / CERTIFICATE
    certificate = {}
    if where.is_file():
        certificate = unsealed(read_json(where), str(where), needed=True)
        if certificate.get("network") != read_json(folder / "config.json").get("digest", ""):
            raise InputError(
                f"{where} is about another network than the one beside it; restore the folder"
            )
    card = folder / CARD
    text = read_bounded(card, 1_000_000).decode("utf-8", errors="replace") if card.is_file() else ""
    return Trained(str(name), model, shape, certificate, text)


def save_certificate(
    folder: str | Path,
    name: str,
    upper: float | None,
    pairs: Tensor | None,
    figures: Mapping[str, Any],
    made: Mapping[str, Any],
) -> None:
    """Write `certificate.json` and the model card beside a checkpoint; without a bound the certificate says so.

    Args:
        folder: that of the checkpoint.
        name: of the network.
        upper: proved bound of its Lipschitz constant, or None.
        pairs: proved constants of `z_i − z_j`, or None.
        figures: what was measured, `accuracy`, `certified_accuracy` by ε, `samples`, `split`.
        made: what it was made by: `recipe`, `seed`, `data` (a fingerprint), `command`.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    document = {
        "norm": "l2", "upper": upper, "pairs": None if pairs is None else pairs.tolist(), "figures": dict(figures),
        "made": dict(made), "network": config["digest"],
        "about": "proved for the stored weights in real arithmetic; the rounding of the forward pass is not covered",
    }  # fmt: skip
    write_json(folder / CERTIFICATE, sealed(document))
    atomic_write(folder / CARD, _card(name, document, config))


def _card(name: str, document: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    figures, upper = document["figures"], document["upper"]
    shares = {"accuracy": figures.get("accuracy")}
    for epsilon, share in (figures.get("certified_accuracy") or {}).items():
        shares[f"certified at ε = {format_down(float(epsilon), 4)} (ℓ2)"] = share
    rows = [f"| {key} | {percent(share)}% |" for key, share in shares.items() if share is not None]
    constant = "refused" if upper is None else f"≤ {format_up(upper)}"
    rows.append(f"| Lipschitz constant, proved | {constant} |")
    way = "`margin/(√2·L)`" if document["pairs"] is None else "pairs of classes"
    facts = [f"* {key}: {value}" for key, value in document["made"].items()]
    table, made = ("\n".join(lines) for lines in (rows, facts))
    return f"""\
# {name}

`{config["factory"]}` with {json.dumps(config["arguments"])}, inputs of shape {config["input_shape"]}.

| figure ({figures.get("split")}, {figures.get("samples")} inputs) | value |
|---|---|
{table}

Certified by {way}.
The bounds hold for the stored weights in real arithmetic; the rounding of the forward pass is not covered.

{made}
"""
