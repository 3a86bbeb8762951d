"""What is measured after an epoch: loss and accuracy, the network's proved bound, certified accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.core.accuracy import certified_at
from equipoise.core.errors import Refused
from equipoise.train.config import Document, Metrics
from equipoise.train.losses import Classification, Task
from equipoise.train.processes import all_sum, rank, world

if TYPE_CHECKING:
    from equipoise.train.build import Part


class Totals:
    """Sums of (value, count) by name, in float64; every process must have the same names."""

    def __init__(self, device: torch.device, names: Iterable[str] = ()) -> None:
        self.device = device
        self.pairs = {name: torch.zeros(2, dtype=torch.float64, device=device) for name in names}

    def add(self, name: str, value: Tensor | float, count: Tensor | float) -> None:
        """Add a sum over `count` examples.

        Args:
            name: of the figure.
            value: the sum.
            count: how many there were.
        """
        pair = [torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in (value, count)]
        self.pairs[name] = self.pairs.get(name, 0.0) + torch.stack(pair)

    def reduced(self) -> dict[str, Tensor]:
        """The pairs, over all processes."""
        return {name: all_sum(self.pairs[name]) for name in sorted(self.pairs)}

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
) -> Document:
    """Mean loss, the task's metrics, and certified accuracy `#{R ≥ ε, R > 0}/n`, R from proved constants.

    Guarantee: the certificate is about the ball of radius ε around each input, in ℓ2, for the real function of the stored
    weights; the rounding inside the forward pass is not covered. Misclassified inputs are never certified.

    Args:
        model: the network.
        part: the examples, which the processes share.
        task: the loss and what is counted.
        device: of the network.
        metrics: the recipe's part, with the size of a batch and the radii of the certified accuracy.
        certified: proved constants; without them nothing is certified.
    """
    training = model.training
    model.eval()
    task = task.fit(model, part.source)
    constants = certified if isinstance(task, Classification) and certified and certified.upper is not None else None
    radii_names = {f"certified/{float(epsilon)}": epsilon for epsilon in metrics.epsilons if constants is not None}
    totals = Totals(device, ["loss", *task.metrics, *radii_names])
    for positions in torch.arange(len(part)).split(metrics.batch_size)[rank() :: world()]:
        x, y = part.batch(positions)
        x, y = x.to(device), y.to(device)
        output = model(x)
        totals.add("loss", task.loss(output, y).double() * len(y), len(y))
        for name, (hits, tried) in task.counts(output, y).items():
            totals.add(name, hits, tried)
        if constants is not None:
            finite = torch.isfinite(output).all(1)  # without finite logits there is no margin: not certified
            radii = constants.radii(output[finite], y[finite])
            for name, epsilon in radii_names.items():
                totals.add(name, certified_at(radii, radii > 0, epsilon).sum(), len(y))
    model.train(training)
    means = totals.means()
    figures: Document = {name: means[name] for name in ("loss", *task.metrics)}
    if radii_names:
        figures["certified_accuracy"] = {name.removeprefix("certified/"): means[name] for name in radii_names}
    return figures
