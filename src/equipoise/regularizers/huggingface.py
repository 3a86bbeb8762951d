"""Activation decay in the Hugging Face `Trainer`: sequence and token classification, sequence to sequence."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise.core.errors import InputError
from equipoise.regularizers.decay import ActivationDecay

AnyTrainer = TypeVar("AnyTrainer")

#: the label that losses ignore
IGNORED = -100


def decay_in_trainer(trainer: AnyTrainer, sigma: float = 0.1, layer: str | None = None, **options: Any) -> AnyTrainer:
    """Add activation decay to the training loss of a `transformers.Trainer` (or a subclass); returns the same trainer.

    `trainer = decay_in_trainer(Trainer(model=…, args=…, train_dataset=…), sigma=0.05)`

    The positions that count are those whose label is not −100, so padding of token and sequence-to-sequence labels does
    not. The penalty is scaled as the loss is: with gradient accumulation some models divide by the items of the whole
    accumulated batch, others by those of their own part. The evaluation loss is left alone. `trainer.activation_decay` is
    the `ActivationDecay`.
    """
    host: Any = trainer
    if not callable(getattr(host, "compute_loss", None)) or getattr(host, "model", None) is None:
        raise InputError(f"expected a transformers.Trainer with a model, got {type(trainer).__name__}")
    if getattr(host, "activation_decay", None) is not None:
        raise InputError("this trainer has activation decay already")
    ad = ActivationDecay(host.model, sigma, layer, **options)
    plain = host.compute_loss

    def compute_loss(
        model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.get("labels")
        loss, outputs = plain(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if model.training:
            if labels is None:
                raise InputError("activation decay in a Trainer needs the labels in the batch, under the key 'labels'")
            scale = _scale(host, ad, loss.detach(), labels, num_items_in_batch)
            loss = loss + scale * trainer_penalty(ad, labels).to(loss.dtype)
        return (loss, outputs) if return_outputs else loss

    host.compute_loss = compute_loss
    host.activation_decay = ad
    return trainer


def trainer_penalty(ad: ActivationDecay, labels: Tensor) -> Tensor:
    """The mean penalty over the positions that carry a label."""
    mask = torch.ones(len(labels), device=labels.device) if labels.is_floating_point() else labels != IGNORED
    return ad(labels if ad.form == "montecarlo" else None, mask=mask)


def _scale(trainer: Any, ad: ActivationDecay, loss: Tensor, labels: Tensor, items: Any) -> float:
    """What the mean loss of this part of the batch was multiplied by.

    Given the number of items of the accumulated batch, a model may return the sum over its own items divided by that number, or
    still the mean over its own items: which one it was shows in the loss itself.
    """
    told = bool(getattr(trainer, "model_accepts_loss_kwargs", False)) or trainer.compute_loss_func is not None
    if items is None or not told or labels.is_floating_point():
        return 1.0
    processes = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
    own = int((labels != IGNORED).sum())
    candidates = [1.0 * processes, own * processes / max(float(items), 1.0)]
    logits = ad.latest_logits().detach().flatten(0, -2).float()
    mean = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
    return min(candidates, key=lambda c: abs(float(loss) - c * float(mean)))
