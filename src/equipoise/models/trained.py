"""A folder with a trained network: `model.safetensors`, `config.json`, `certificate.json` and a model card, `README.md`.

The certificate says what was proved for the stored weights when they were written. Its digest is evidence against accidents and
naive edits, no signature: `Trained.prove` computes the bounds again from the weights, which is what counts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.checkpoints import load_checkpoint
from equipoise.core.accuracy import percent
from equipoise.core.bounds import format_down, format_up
from equipoise.core.digests import digest_document, sealed, unsealed
from equipoise.core.errors import InputError, Refused, did_you_mean
from equipoise.core.files import atomic_write, read_bounded, read_json
from equipoise.lipschitz import lipschitz_bound
from equipoise.nn.convert import with_effective_weights

CERTIFICATE, CARD = "certificate.json", "README.md"
_HERE = Path(__file__).resolve().parent
#: a stored bound may be this much below one that is computed again: other machines round and stop elsewhere
_SLACK = 1e-2


@dataclass(frozen=True)
class Trained:
    """A trained network in evaluation mode, the shape of one input, what was proved of it, and its model card.

    `certificate` holds `upper` (Lipschitz constant in ℓ2), `pairs` (constants of `z_i − z_j`, or None), `figures` (accuracy and
    certified accuracy, as measured when it was written) and where they come from.
    """

    name: str
    model: nn.Module = field(repr=False)
    input_shape: tuple[int, ...] | None
    certificate: Mapping[str, Any] = field(repr=False)
    card: str = field(repr=False)

    def prove(self, rtol: float = 1e-3) -> tuple[float, Tensor | None]:
        """The Lipschitz bound and the constants of pairs, computed again from the weights at hand.

        Refused where the stored certificate claims less than that: it is not about these weights.
        """
        if self.input_shape is None:
            raise InputError(f"{self.name} does not say the shape of its inputs, so there is nothing to bound")
        upper, pairs, _ = proved(self.model, self.input_shape, rtol)
        stored = self.certificate.get("upper")
        if stored is not None and not claims(stored, torch.tensor(upper)):
            raise Refused(
                f"the certificate of {self.name} claims a Lipschitz constant of {stored}, the weights have the bound "
                f"{format_up(upper)}: it is not about these weights; train it again"
            )
        apart = self.certificate.get("pairs")
        if apart is not None and (pairs is None or not claims(apart, pairs)):
            raise Refused(
                f"the certificate of {self.name} claims constants of pairs of classes that are not those of its weights; train "
                "it again"
            )
        return upper, pairs


def claims(stored: Any, found: Tensor) -> bool:
    """Whether stored numbers are of this shape, and none lies below what was found now by more than a slack.

    >>> claims(1.0, torch.tensor(1.001)), claims(float("nan"), torch.tensor(1.0)), claims([1.0], torch.tensor(1.0))
    (True, False, False)
    """
    try:
        numbers = torch.tensor(stored, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return False
    tiny = 1e-12 * found.abs().max()  # the diagonal of pairs is 0 up to rounding
    return numbers.shape == found.shape and bool((numbers >= found * (1 - _SLACK) - tiny).all())


def described(config: Mapping[str, Any]) -> str:
    """The digest of what a `config.json` says of the network: builder, arguments and shape of the inputs."""
    return digest_document({key: config.get(key) for key in ("factory", "arguments", "input_shape")})


def proved(
    model: nn.Module, input_shape: Sequence[int], rtol: float = 1e-3
) -> tuple[float, Tensor | None, dict[str, float]]:
    """Bound, constants of pairs and bounds by layer of a network with its effective weights, in evaluation mode.

    >>> proved(nn.Flatten(), (2, 2))[0] >= 1
    True
    """
    parameter = next(model.parameters(), torch.zeros(()))
    example = torch.zeros(1, *input_shape, dtype=parameter.dtype, device=parameter.device)
    report = lipschitz_bound(with_effective_weights(model, example), example, rtol=rtol)
    layers: dict[str, float] = {}
    for row in report.layers:
        if row.method and row.upper < float("inf"):  # linear operators and blocks, not activations and scalings
            layers[row.name if row.name not in layers else row.node] = row.upper
    return report.upper, report.pairs, layers


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
    certificate: Any = {}
    if (folder / CERTIFICATE).is_file():
        where = str(folder / CERTIFICATE)
        stored = read_json(folder / CERTIFICATE)
        if not isinstance(stored, dict) or not {"digest", "weights"} <= set(stored):
            raise InputError(f"{where} does not say with digests what it is about: it proves nothing; remove the file")
        certificate = unsealed(stored, where)
        beside = read_json(folder / "config.json")
        config = unsealed(beside, str(folder / "config.json"))
        if certificate["weights"] is None or certificate["weights"] != config.get("weights"):
            raise InputError(f"{where} is about other weights than those beside it; train the network again")
        known = "digest" in beside  # certificates of earlier releases do not say it, but their config.json is sealed
        if certificate.get("model", described(config) if known else None) != described(config):
            raise InputError(f"{where} is about another network than config.json describes; restore that file")
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
    config = unsealed(read_json(folder / "config.json"), str(folder / "config.json"))
    document = {
        "norm": "l2", "upper": upper, "pairs": None if pairs is None else pairs.tolist(), "figures": dict(figures),
        "made": dict(made), "weights": config["weights"], "model": described(config),
        "about": "proved for the stored weights in real arithmetic; the rounding of the forward pass is not covered",
    }  # fmt: skip
    atomic_write(folder / CERTIFICATE, json.dumps(sealed(document), indent=1, allow_nan=False) + "\n")
    atomic_write(folder / CARD, _card(name, document, config))


def _card(name: str, document: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    figures, made, upper = document["figures"], document["made"], document["upper"]
    rows = [f"| accuracy | {figures['accuracy']:.2%} |"] if figures.get("accuracy") is not None else []
    for epsilon, share in (figures.get("certified_accuracy") or {}).items():
        rows.append(f"| certified at ε = {format_down(float(epsilon), 4)} (ℓ2) | {percent(share)}% |")
    rows.append(f"| Lipschitz constant, proved | {'refused' if upper is None else f'≤ {format_up(upper)}'} |")
    facts = [f"* {key}: {value}" for key, value in made.items()]
    return "\n".join([
        f"# {name}", "",
        f"`{config['factory']}` with {json.dumps(config['arguments'])}, inputs of shape {config['input_shape']} in [0, 1].", "",
        f"| figure ({figures.get('split', 'test')}, {figures.get('samples', '?')} inputs) | value |", "|---|---|", *rows, "",
        "Certified by pairs of classes." if document["pairs"] is not None else "Certified by `margin/(√2·L)`.",
        "The bounds hold for the stored weights in real arithmetic; the rounding of the forward pass is not covered.", "",
        "```python", "import equipoise as eq", "", f'found = eq.models.load("{name}")', "upper, pairs = found.prove()", "```", "",
        *facts, "",
    ])  # fmt: skip
