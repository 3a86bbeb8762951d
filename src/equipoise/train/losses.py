"""Tasks: what the output of a network is compared with, and what is counted. `LOSSES` is the table that recipes choose from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from equipoise.core.errors import InputError
from equipoise.train.task import Counts, Task
from equipoise.train.text import IntentSlots


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


def _at_radius(name: str) -> Callable[..., Classification]:
    """A loss of `equipoise.nn.losses` that asks for a radius ε, L being the constant the network is built for."""

    def row(epsilon: float = 1.0, lipschitz: float = 1.0) -> Classification:
        import equipoise.nn.losses as losses

        if epsilon < 0 or lipschitz <= 0:
            raise InputError(f"loss needs epsilon ≥ 0 and lipschitz > 0, got {epsilon} and {lipschitz}")
        function = getattr(losses, name)
        return Classification(lambda z, y: function(z, y, epsilon, lipschitz))

    return row


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
    "margin": _at_radius("margin_hinge"),
    "lmt": _at_radius("lipschitz_margin"),
    "gloro": _at_radius("gloro"),
    "gloro-trades": _at_radius("gloro_trades"),
    "emma": _at_radius("emma"),
    "multi-margin": multi_margin,
    "intent-slots": intent_slots,
}
