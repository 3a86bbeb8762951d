"""Tasks: what the output of a network is compared with, and what is counted. `LOSSES` is the table that recipes choose from."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.core.errors import InputError
from equipoise.train.task import Counts, Task
from equipoise.train.text import IntentSlots, NextToken


@dataclass(frozen=True)
class Classification:
    """One label per input; `function(logits, labels)` is the mean loss."""

    function: Callable[[Tensor, Tensor], Tensor]

    def loss(self, output: Any, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return self.function(output, y)

    def counts(self, output: Any, y: Tensor, quick: bool = False) -> Counts:
        """Right answers; logits that hold NaN are none."""
        right = (output.argmax(1) == y) & ~output.isnan().any(1)
        return {"accuracy": (right.sum(), len(y))}


def cross_entropy(label_smoothing: float = 0.0) -> Classification:
    """`−log softmax(z)_y`."""
    if not 0 <= label_smoothing < 1:
        raise InputError(f"loss.label_smoothing must lie in [0, 1), got {label_smoothing}")
    return Classification(lambda z, y: F.cross_entropy(z, y, label_smoothing=label_smoothing))


def lipschitz_cross_entropy(
    temperature: float = 0.25, offset: float = 1.5 * math.sqrt(2), lipschitz: float = 1.0
) -> Classification:
    """`t·CE((z − offset·L·e_y)/t, y)`: asks a margin of the right class, at the scale of a Lipschitz network.

    Reference: Prach & Lampert (2022), *Almost-orthogonal layers*, section 5.

    >>> import torch
    >>> round(lipschitz_cross_entropy(1.0, 0.0).loss(torch.zeros(1, 2), torch.tensor([0])).item(), 4)
    0.6931
    """
    from equipoise.nn.losses import offset_cross_entropy

    if temperature <= 0 or offset < 0 or lipschitz <= 0:
        raise InputError(
            f"loss needs temperature > 0, offset ≥ 0, lipschitz > 0, got {temperature}, {offset}, {lipschitz}"
        )
    return Classification(lambda z, y: offset_cross_entropy(z, y, temperature, offset, lipschitz))


@dataclass(frozen=True)
class Ramp:
    """ε over the run: linear from `start` to `end` over the first `until` of it, then constant.

    >>> [round(Ramp(0.1, 0.5, 0.5).at(t), 3) for t in (0, 0.25, 0.5, 1)]
    [0.1, 0.3, 0.5, 0.5]
    """

    start: float
    end: float
    until: float

    def at(self, fraction: float) -> float:
        """The value at a fraction of the run."""
        done = min(1.0, fraction / self.until) if self.until > 0 else 1.0
        return self.start + (self.end - self.start) * done


@dataclass(frozen=True)
class AtRadius(Classification):
    """A loss that asks for a radius ε, with the constants of the network it is fitted to.

    `function(z, y, ε, L, W)`: W is the weight of the linear layer that the network ends in and L the constant of what comes
    before, or W is None and L the constant of the whole network.
    """

    function: Callable[..., Tensor]
    epsilon: Ramp = Ramp(1.0, 1.0, 0.0)
    lipschitz: float | None = None
    trained: bool = False
    fraction: float = 1.0
    weight: Callable[[], Tensor] | None = field(default=None, repr=False)

    def of(self, model: nn.Module) -> AtRadius:
        """The loss with this network's constants: by pairs where it ends in a linear layer, else `√2·L`.

        L is the recipe's `lipschitz`, or what the construction of the network guarantees.
        """
        from equipoise.nn.constants import known_constant
        from equipoise.nn.wrappers import ending

        found = ending(model)
        known = found.trunk if found is not None else known_constant(model)
        constant = self.lipschitz if self.lipschitz is not None else known
        if constant is None:
            raise InputError(
                "loss: the constant of this network does not follow from its construction; state the one it is held at, "
                "lipschitz: 1.0, or take a network of 1-Lipschitz layers"
            )
        return replace(self, lipschitz=constant, weight=None if found is None else found.weight)

    def at(self, fraction: float) -> AtRadius:
        """The loss at a fraction of the run."""
        return replace(self, fraction=fraction)

    def loss(self, output: Any, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        weight = None if self.weight is None else self.weight()
        weight = weight if weight is None or self.trained else weight.detach()
        lipschitz = 1.0 if self.lipschitz is None else self.lipschitz
        return self.function(output, y, self.epsilon.at(self.fraction), lipschitz, weight)


def _at_radius(name: str, epsilon: float = 1.0, **defaults: float) -> Callable[..., Classification]:
    """A row for a loss of `equipoise.nn.losses` that asks for a radius; `defaults` are its own numbers."""

    def row(
        epsilon: float = epsilon, start: float | None = None, ramp: float = 0.5, lipschitz: float | None = None,
        train_constants: bool = False, **own: float,
    ) -> Classification:  # fmt: skip
        import equipoise.nn.losses as losses

        first = epsilon if start is None else start
        if not (epsilon >= 0 and first >= 0 and 0 <= ramp <= 1) or (lipschitz is not None and not lipschitz > 0):
            raise InputError(
                f"loss needs epsilon ≥ 0, start ≥ 0, ramp in [0, 1] and lipschitz > 0, got {epsilon}, {first}, {ramp} and "
                f"{lipschitz}"
            )
        function = functools.partial(getattr(losses, name), **{**defaults, **own})
        return AtRadius(function, Ramp(first, epsilon, ramp), lipschitz, train_constants)

    inner = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=v) for k, v in defaults.items()]
    known = [p for p in inspect.signature(row).parameters.values() if p.kind is not p.VAR_KEYWORD]
    row.__signature__ = inspect.Signature([*known, *inner])  # type: ignore[attr-defined]
    return row


def hinge(epsilon: float = 1.0, lipschitz: float = 1.0) -> Classification:
    """`mean max(0, √2·L·ε − margin)`, L the constant the network is built for."""
    from equipoise.nn.losses import margin_hinge

    if epsilon < 0 or lipschitz <= 0:
        raise InputError(f"loss needs epsilon ≥ 0 and lipschitz > 0, got {epsilon} and {lipschitz}")
    return Classification(lambda z, y: margin_hinge(z, y, epsilon, lipschitz))


def hinge_transport(alpha: float = 0.9, margin: float = 1.0) -> Classification:
    """`α·hinge − (1 − α)·KR`, `equipoise.nn.losses.hkr`."""
    from equipoise.nn.losses import hkr

    _transport(alpha, margin)
    return Classification(lambda z, y: hkr(z, y, alpha, margin))


def soft_hinge_transport(alpha: float = 0.9, margin: float = 1.0, temperature: float = 1.0) -> Classification:
    """`hkr` with rivals weighted by how close they are, `equipoise.nn.losses.soft_hkr`."""
    from equipoise.nn.losses import soft_hkr

    _transport(alpha, margin)
    if not temperature > 0:
        raise InputError(f"loss.temperature must be positive, got {temperature}")
    return Classification(lambda z, y: soft_hkr(z, y, alpha, margin, temperature))


def _transport(alpha: float, margin: float) -> None:
    if not (0 <= alpha <= 1 and margin > 0):
        raise InputError(f"loss needs alpha in [0, 1] and margin > 0, got {alpha} and {margin}")


def multi_margin(margin: float = 1.0) -> Classification:
    """`Σ_{k≠y} max(0, margin − (z_y − z_k)) / c`, the multi-class hinge."""
    if margin <= 0:
        raise InputError(f"loss.margin must be positive, got {margin}")
    return Classification(lambda z, y: F.multi_margin_loss(z, y, margin=margin))


def intent_slots(weight: float = 1.0) -> IntentSlots:
    """`CE(intent) + weight·CE(slots)`."""
    return IntentSlots(weight)


#: every loss a recipe can name; a new one is a new row
LOSSES: dict[str, Callable[..., Task]] = {
    "ce": cross_entropy,
    "lipschitz-ce": lipschitz_cross_entropy,
    "margin": hinge,
    "lmt": _at_radius("lipschitz_margin", temperature=1.0),
    "gloro": _at_radius("gloro"),
    "gloro-trades": _at_radius("gloro_trades", beta=1.2),
    "emma": _at_radius("emma", temperature=1.0),
    "la": _at_radius("logit_annealing", epsilon=0.0, temperature=0.75, offset=2.0, gamma=5.0),
    "hkr": hinge_transport,
    "soft-hkr": soft_hinge_transport,
    "multi-margin": multi_margin,
    "intent-slots": intent_slots,
    "next-token": NextToken,
}
