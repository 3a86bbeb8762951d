"""Certified accuracy of a few inputs while a network trains: in a loop of one's own, in Lightning, in the HF Trainer's logs.

Each figure is made of certificates at risk α per input of the weights of that moment. Watching many of them and keeping the
best weights is not covered by α: certify the weights that were kept again, on other inputs (`equipoise.certify`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.core.imports import lightning_callback
from equipoise.smoothing import SmoothedClassifier


class CertifiedMonitor:
    """`monitor(model)` gives scalars for a log: accuracy, smoothed certified accuracy at each ε, average radius.

    The model is put into evaluation mode and back; its weights, buffers and the random numbers of the loop are left alone.

    Args:
        inputs: a few inputs, (N, …), on the model's device.
        labels: theirs, (N,).
        sigma: noise level, as for training.
        epsilons: radii of interest; default 0, σ/2 and σ.
        n: draws per input; 100 of them choose the class.
        alpha: risk per input and call.

    >>> monitor = CertifiedMonitor(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), sigma=0.1, n=200)
    >>> scalars = monitor(nn.Sequential(nn.Linear(4, 2)))
    >>> sorted(scalars)
    ['certified/0', 'certified/0.05', 'certified/0.1', 'certified/accuracy', 'certified/average_radius']
    """

    def __init__(
        self, inputs: Tensor, labels: Tensor, sigma: float, *, epsilons: Sequence[float] | None = None, n: int = 1000,
        alpha: float = 1e-3,
    ) -> None:  # fmt: skip
        if len(inputs) != len(labels) or not len(inputs):
            raise InputError(f"expected as many labels as inputs, at least one, got {len(inputs)} and {len(labels)}")
        self.inputs, self.labels, self.sigma, self.n, self.alpha = inputs, labels, sigma, n, alpha
        self.epsilons = [0.0, sigma / 2, sigma] if epsilons is None else [float(e) for e in epsilons]

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """The scalars of the model as it is now; a network that returns NaN gives zeros."""
        modes = [(part, part.training) for part in model.modules()]
        try:
            model.eval()
            with torch.inference_mode():
                logits = model(self.inputs)
            found = SmoothedClassifier(model, self.sigma, logits.shape[1], nonfinite="miss").certify(
                self.inputs, n=self.n, alpha=self.alpha
            )
        finally:
            for part, training in modes:
                part.training = training
        labels = self.labels.cpu().numpy()
        accuracy = found.accuracy(labels, self.epsilons)
        scalars = {f"certified/{e:g}": float(a) for e, a in zip(self.epsilons, accuracy, strict=True)}
        scalars["certified/average_radius"] = found.average_radius(labels)
        scalars["certified/accuracy"] = float((logits.argmax(1) == self.labels.to(logits.device)).double().mean())
        return scalars


def lightning_monitor(monitor: CertifiedMonitor, every: int = 1) -> Any:
    """A Lightning `Callback` that logs the monitor's scalars with the module after every `every`-th training epoch."""
    base: Any = lightning_callback()
    if every < 1:
        raise InputError(f"every must be at least 1, got {every}")

    class CertifiedCallback(base):
        """Logs at the end of an epoch."""

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if (trainer.current_epoch + 1) % every == 0:
                pl_module.log_dict(monitor(pl_module))

    return CertifiedCallback()
