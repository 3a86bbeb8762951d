"""Certified accuracy of a Lipschitz network: radii from logits, rounded down, and counts that can be merged.

The certificate is about the real-number map: the rounding inside the network's own forward pass is not covered.
`tolerance` takes a bound of it off every margin, where one is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.core.accuracy import certified_at
from equipoise.core.bounds import as_upper
from equipoise.core.errors import InputError
from equipoise.core.precision import deflate, inflate
from equipoise.nn.normalise import pairwise_distances


def certified_radius(
    logits: Tensor, labels: Tensor, lipschitz: Any = 1.0, weight: Tensor | None = None, tolerance: float = 0.0
) -> Tensor:
    """`R = min_{k≠y} (z_y − z_k)/K_yk`, rounded down, float64 (batch,); 0 where the label does not win.

    `K_yk = √2·L` with L an upper bound of the logit map's constant, or `L·‖w_y − w_k‖₂` where `weight` is that of the
    last layer and L bounds what comes before it. No change of the input by less than R changes the decision.

    Args:
        logits: (batch, classes), finite.
        labels: (batch,), integers; pass the predictions to certify decisions instead of correct decisions.
        lipschitz: a number (your claim), `Bracket` or `Bound` of kind upper; estimates are refused.
        weight: the effective weight (classes, features) of the last layer.
        tolerance: upper bound of the error of each logit; twice that is taken off every margin.

    Reference: Tsuzuku, Sato, Sugiyama (2018), Proposition 1.

    >>> certified_radius(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0])).numpy().round(4).tolist()
    [0.7071]
    >>> certified_radius(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([1])).tolist()
    [0.0]
    """
    if logits.dim() != 2 or logits.shape[1] < 2 or labels.shape != logits.shape[:1]:
        raise InputError(
            f"expected logits (batch, classes ≥ 2) and labels (batch,), got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    z, y, L = logits.detach().double(), labels.detach().long(), as_upper(lipschitz)
    if not bool(torch.isfinite(z).all()):
        raise InputError("the logits hold NaN or infinity: there is no margin")
    if bool(((y < 0) | (y >= z.shape[1])).any()):
        raise InputError(f"labels must lie in 0 … {z.shape[1] - 1}")
    if not tolerance >= 0:
        raise InputError(f"the tolerance must not be negative, got {tolerance}")
    if weight is None:
        K = z.new_full(z.shape, inflate(2.0**0.5 * L))
    else:
        if weight.dim() != 2 or weight.shape[0] != z.shape[1] or not bool(torch.isfinite(weight).all()):
            raise InputError(
                f"expected the finite weight ({z.shape[1]}, features) of the last layer, got {tuple(weight.shape)}"
            )
        K = inflate(pairwise_distances(weight)[y] * L)
    lowest = z.new_tensor(-torch.inf)
    margin = torch.nextafter(z.gather(1, y[:, None]) - z, lowest)
    gap = torch.nextafter(margin - inflate(2 * tolerance), lowest)
    radius = torch.where(gap > 0, deflate(gap / K), 0.0).nan_to_num(nan=0.0, posinf=torch.inf)
    return radius.scatter(1, y[:, None], torch.inf).amin(1)


@dataclass
class CertifiedAccuracy:
    """Accuracy and certified accuracy at several radii: sums only, so that parts of a dataset can be merged.

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
        """Count a batch: certified at ε means that the label wins (`R > 0`) and `R ≥ ε`, see `core.accuracy`."""
        found = certified_radius(logits, labels, lipschitz, weight)
        self.samples += len(labels)
        self.correct += int((logits.argmax(1) == labels).sum())
        for i, r in enumerate(self.radii):
            self.certified[i] += int(certified_at(found, found > 0, r).sum())

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


def certified_accuracy(
    logits: Tensor, labels: Tensor, epsilon: float, lipschitz: Any = 1.0, weight: Tensor | None = None
) -> float:
    """Share of inputs that are classified as labelled everywhere within distance ε (`R ≥ ε`, `R > 0`).

    >>> certified_accuracy(torch.tensor([[3.0, 1.0], [0.0, 0.1]]), torch.tensor([0, 1]), 0.5)
    0.5
    """
    metric = CertifiedAccuracy((epsilon,))
    metric.update(logits, labels, lipschitz, weight)
    return float(metric.compute()["certified"][float(epsilon)])
