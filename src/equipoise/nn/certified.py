"""Certified accuracy of a Lipschitz network, counted batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from equipoise.core.accuracy import certified_at
from equipoise.core.errors import InputError
from equipoise.smoothing.margins import margin_radius


@dataclass
class CertifiedAccuracy:
    """Accuracy and certified accuracy at several radii: sums only, so that parts of a dataset can be merged.

    Radii are `margin_radius`, about the real-number map: the rounding of the network's own forward pass is not covered.

    Args:
        radii: at which to count.

    >>> import torch
    >>> metric = CertifiedAccuracy((0.0, 0.5))
    >>> metric.update(torch.tensor([[3.0, 1.0], [0.0, 0.1]]), torch.tensor([0, 1]))
    >>> metric.compute()
    {'accuracy': 1.0, 'certified': {0.0: 1.0, 0.5: 0.5}, 'samples': 2}
    """

    radii: Sequence[float] = (36 / 255, 72 / 255, 108 / 255, 1.0)
    samples: int = 0
    correct: int = 0
    certified: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not len(self.radii) or not all(r >= 0 for r in self.radii):
            raise InputError(f"radii must be non-negative numbers, got {tuple(self.radii)}")
        self.certified = self.certified or [0] * len(self.radii)

    def update(self, logits: Tensor, labels: Tensor, lipschitz: Any = 1.0, weight: Tensor | None = None) -> None:
        """Count a batch: certified at ε means that the label wins (`R > 0`) and `R ≥ ε`.

        Args:
            logits: (batch, classes).
            labels: (batch,).
            lipschitz: as in `smoothing.margins.margin_radius`.
            weight: that of the last layer; `lipschitz` is then about what comes before it.
        """
        radius = margin_radius(logits, labels, lipschitz, weight=weight)
        self.samples += len(labels)
        self.correct += int((logits.argmax(1) == labels).sum())
        for i, r in enumerate(self.radii):
            self.certified[i] += int(certified_at(radius, radius > 0, r).sum())

    def merge(self, other: CertifiedAccuracy) -> None:
        """Add the counts of another part."""
        if tuple(other.radii) != tuple(self.radii):
            raise InputError(f"cannot merge counts at radii {tuple(other.radii)} into those at {tuple(self.radii)}")
        self.samples += other.samples
        self.correct += other.correct
        self.certified = [a + b for a, b in zip(self.certified, other.certified, strict=True)]

    def compute(self) -> dict[str, Any]:
        """The fractions."""
        if not self.samples:
            raise InputError("no sample was counted yet")
        shares = {float(r): n / self.samples for r, n in zip(self.radii, self.certified, strict=True)}
        return {"accuracy": self.correct / self.samples, "certified": shares, "samples": self.samples}
