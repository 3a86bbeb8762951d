"""What is measured after an epoch: loss and accuracy, the network's proved bound, certified accuracy, layer norms."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.accuracy import certified_at
from equipoise.core.errors import Refused
from equipoise.train.build import Part
from equipoise.train.losses import Classification
from equipoise.train.task import Task, fitted

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Certified:
    """The network's bound: `upper` is proved (None where it was refused, with the reason), `layers` are upper bounds too.

    `pairs` bounds the constants of `z_i − z_j`, where the network ends in a linear layer.
    """

    upper: float | None
    layers: dict[str, float]
    reason: str = ""
    pairs: Tensor | None = None

    def radii(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Certified radii, by pairs where they are known, else `margin/(√2·L)`; the better one for each input, float64."""
        from equipoise.smoothing.margins import margin_radius

        found = torch.zeros(len(labels), dtype=torch.float64)
        if self.upper is not None:
            found = margin_radius(logits, labels, self.upper)
        if self.pairs is not None:
            found = found.maximum(margin_radius(logits, labels, self.pairs))
        return found


def certified_bound(model: nn.Module, input_shape: Sequence[int], rtol: float) -> Certified:
    """`lipschitz_bound` of the network with its effective weights, in evaluation mode; what it cannot bound has no certificate.

    >>> certified_bound(nn.Flatten(), (2, 2), 1e-3).upper >= 1
    True
    """
    from equipoise.models.trained import proved

    try:
        upper, pairs, layers = proved(model, input_shape, rtol)
    except Refused as error:
        return Certified(None, {}, str(error))
    if not math.isfinite(upper):
        return Certified(None, layers, "the bound exceeds the floating-point numbers")
    return Certified(upper, layers, pairs=pairs)


@torch.no_grad()
def evaluate(
    model: nn.Module, part: Part, task: Task, device: torch.device, batch_size: int, epsilons: Sequence[float] = (),
    certified: Certified | None = None, rank: int = 0, world: int = 1, reduce: Reduce | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Mean loss, the task's metrics, and certified accuracy `#{R ≥ ε, R > 0}/n`, R from proved constants, rounded down.

    R is `min_k margin_k/K_yk` with the constants of pairs where the network ends in a linear layer, else `margin/(√2·L)`.

    The certificate is about the ball of radius ε around each input, in ℓ2; misclassified inputs are never certified. The rounding
    inside the forward pass is not covered (as in `smoothing.margins`). The processes share the examples.
    """
    training = model.training
    model.eval()
    task = fitted(task, model)
    sums: dict[str, Tensor] = {}
    known = certified is not None and certified.upper is not None
    certify = known and isinstance(task, Classification)
    for start in range(rank * batch_size, len(part), world * batch_size):
        x, y = part.batch(torch.arange(start, min(start + batch_size, len(part))))
        x, y = x.to(device), y.to(device)
        output = model(x)
        counted = task.counts(output, y).items()
        found = {n: torch.tensor([float(v) for v in pair], dtype=torch.float64, device=device) for n, pair in counted}
        one = torch.tensor(float(len(y)), dtype=torch.float64, device=device)
        found["loss"] = torch.stack([task.loss(output, y).double() * len(y), one])
        if certify and certified is not None:
            finite = torch.isfinite(output).all(1)  # logits that are no numbers have no margin: not certified
            radius = certified.radii(output[finite], y[finite])
            for epsilon in epsilons:
                hits = certified_at(radius, radius > 0, epsilon).sum().double().to(device)
                found[f"certified/{float(epsilon)}"] = torch.stack([hits, one])
        for name, pair in found.items():
            sums[name] = sums[name] + pair if name in sums else pair
    model.train(training)
    return _ratios(_reduced(sums, _names(task, epsilons if certify else ()), device, reduce))


def _names(task: Task, epsilons: Sequence[float]) -> list[str]:
    return ["loss", *getattr(task, "metrics", ("accuracy",)), *(f"certified/{float(e)}" for e in epsilons)]


def _reduced(
    sums: dict[str, Tensor], names: list[str], device: torch.device, reduce: Reduce | None
) -> dict[str, Tensor]:
    """Every process adds the same names in the same order, also one that had no examples."""
    if reduce is None:
        return sums
    none = torch.zeros(2, dtype=torch.float64, device=device)
    total = reduce(torch.stack([sums.get(name, none) for name in names]))
    return dict(zip(names, total, strict=True))


def _ratios(sums: dict[str, Tensor]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    certified: dict[str, float] = {}
    for name, (hits, tried) in ((n, v.tolist()) for n, v in sums.items()):
        ratio = hits / tried if tried else math.nan
        if name.startswith("certified/"):
            certified[name.removeprefix("certified/")] = ratio
        else:
            result[name] = ratio if math.isfinite(ratio) else None
    if certified:
        result["certified_accuracy"] = certified
    return result
