"""What is measured after an epoch: loss and accuracy, the network's proved bound, certified accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.core import Refused, certified_at
from equipoise.train.config import Metrics, Plain
from equipoise.train.losses import Classification, Task
from equipoise.train.processes import from_all, rank, world

if TYPE_CHECKING:
    from equipoise.train.build import Part


class Totals:
    """Sums of (value, count) by name, in float64."""

    def __init__(self) -> None:
        self.pairs: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor, count: Tensor | int) -> None:
        """Add a sum over `count` examples.

        Args:
            name: of the figure.
            value: the sum.
            count: how many there were.
        """
        pair = torch.stack([value.double(), torch.as_tensor(count).to(value.device).double()])
        self.pairs[name] = self.pairs.get(name, 0.0) + pair

    def reduced(self) -> dict[str, Tensor]:
        """The pairs, over all processes."""
        everyone = from_all({name: pair.cpu() for name, pair in self.pairs.items()})
        names = sorted({name for pairs in everyone for name in pairs})
        return {name: sum(pairs[name] for pairs in everyone if name in pairs) for name in names}

    def means(self) -> dict[str, float | None]:
        """The means, over all processes; None for what is not a number."""
        means = {name: float(value / count) for name, (value, count) in self.reduced().items()}
        return {name: mean if math.isfinite(mean) else None for name, mean in means.items()}


@dataclass(frozen=True)
class Certified:
    """The network's bound: `upper` is proved; None where it was refused, with the reason.

    `pairs` bounds the constants of `z_i − z_j`, where the network ends in a linear layer.
    """

    upper: float | None
    reason: str = ""
    pairs: Tensor | None = None

    def radii(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Certified radii in float64: the larger of `margin/(√2·L)` and, where they are proved, those by pairs.

        Args:
            logits: (B, classes), finite.
            labels: (B,).
        """
        from equipoise.smoothing.margins import margin_radius

        radii = torch.zeros(len(labels), dtype=torch.float64)
        for constant in (self.upper, self.pairs):
            if constant is not None:
                radii = radii.maximum(margin_radius(logits, labels, constant))
        return radii


def certified_bound(model: nn.Module, input_shape: Sequence[int], rtol: float) -> Certified:
    """`lipschitz_bound` of the network with its effective weights, in evaluation mode; what is refused has no certificate.

    Args:
        model: the network.
        input_shape: of one input.
        rtol: of the layers' norms.

    >>> certified_bound(nn.Flatten(), (2, 2), 1e-3).upper >= 1
    True
    """
    from equipoise.models import proved

    try:
        upper, pairs = proved(model, input_shape, rtol)
    except Refused as error:
        return Certified(None, str(error))
    if not math.isfinite(upper):
        return Certified(None, "the bound exceeds the floating-point numbers")
    return Certified(upper, pairs=pairs)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    part: Part,
    task: Task,
    device: torch.device,
    metrics: Metrics,
    certified: Certified | None = None,
) -> Plain:
    """Mean loss, the task's metrics, and certified accuracy `#{R ≥ ε, R > 0}/n`, R from proved constants.

    Guarantee: the certificate is about the ball of radius ε around each input, in ℓ2, for the real function of the stored
    weights; the rounding inside the forward pass is not covered. Misclassified inputs are never certified.

    Args:
        model: the network, in evaluation mode.
        part: the examples, which the processes share.
        task: the loss and what is counted.
        device: of the network.
        metrics: the recipe's part, with the size of a batch and the radii of the certified accuracy.
        certified: proved constants; without them nothing is certified.
    """
    task = task.fit(model, part.source)
    if not isinstance(task, Classification) or (certified and certified.upper is None):
        certified = None
    totals = Totals()
    for positions in torch.arange(len(part)).split(metrics.batch_size)[rank() :: world()]:
        x, y = part.batch(positions)
        x = x.to(device)
        y = y.to(device)
        output = model(x)
        totals.add("loss", task.loss(output, y).double() * len(y), len(y))
        for name, (hits, tried) in task.counts(output, y).items():
            totals.add(name, hits, tried)
        if certified is not None:
            # without finite logits there is no margin: not certified
            finite = torch.isfinite(output).all(1)
            radii = certified.radii(output[finite], y[finite])
            for epsilon in metrics.epsilons:
                count = certified_at(radii, radii > 0, epsilon).sum()
                totals.add(f"certified/{float(epsilon)}", count, len(y))
    means = totals.means()
    figures: Plain = {name: means[name] for name in ("loss", *task.metrics)}
    if certified is not None and metrics.epsilons:
        shares = {str(float(e)): means[f"certified/{float(e)}"] for e in metrics.epsilons}
        figures["certified_accuracy"] = shares
    return figures
