"""Certified accuracy as a TorchMetrics metric: reset, update, compute, and sums over processes.

Run: python examples/torchmetrics_accuracy.py   (needs torchmetrics)
"""

import torch
from torchmetrics import Metric

import equipoise as eq


class CertifiedAccuracy(Metric):
    """Share of examples whose label wins at every input within epsilon (ℓ2).

    Args:
        epsilon: the radius.
        lipschitz: proved upper bound of the network's Lipschitz constant.
    """

    higher_is_better = True

    def __init__(self, epsilon, lipschitz):
        super().__init__()
        self.epsilon, self.lipschitz = epsilon, lipschitz
        self.add_state("certified", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits, labels):
        radius = eq.smoothing.margin_radius(logits, labels, self.lipschitz)
        self.certified += (radius >= self.epsilon).sum()
        self.total += len(labels)

    def compute(self):
        return self.certified / self.total


if __name__ == "__main__":
    found = eq.models.load("digits")
    upper, _ = found.prove()
    metric = CertifiedAccuracy(0.1, upper)
    test = eq.data.load_dataset("digits", "test")
    for first in range(0, 360, 120):
        x, y = test.batch(range(first, first + 120))
        with torch.no_grad():
            metric.update(found.model(x), y)
    print(f"certified at 0.1: {float(metric.compute()):.1%}")
