"""Activation decay in the Hugging Face `Trainer`: sequence and token classification, sequence to sequence."""

import math
from collections.abc import Callable
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
    not. With gradient accumulation the penalty is weighted as the loss is, part by part: where the loss is divided by the
    items of the whole accumulated batch, an optimizer step sees `(σ²/2)·mean‖h‖²` over all its labelled positions; where
    every part is averaged on its own, the `Trainer`'s combination of the parts' means. Which of the two it is, is measured
    once, at the first part, on a loss with twice the number of items. The evaluation loss is left alone.
    `trainer.activation_decay` is the `ActivationDecay`.

    Args:
        trainer: with a model.
        sigma: standard deviation of the noise.
        layer: name of the layer, default the last one called.
    """
    host: Any = trainer
    if not callable(getattr(host, "compute_loss", None)) or getattr(host, "model", None) is None:
        raise InputError(f"expected a transformers.Trainer with a model, got {type(trainer).__name__}")
    if getattr(host, "activation_decay", None) is not None:
        raise InputError("this trainer has activation decay already")
    ad = ActivationDecay(host.model, sigma, layer, **options)
    plain = host.compute_loss
    divides: list[bool] = []

    def compute_loss(
        model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.get("labels")
        items = num_items_in_batch
        if model.training and items is not None and not divides:
            divides.extend(_divides(model, lambda n: plain(model, dict(inputs), num_items_in_batch=n), items))
        loss, outputs = plain(model, inputs, return_outputs=True, num_items_in_batch=items)
        if model.training:
            if labels is None:
                raise InputError("activation decay in a Trainer needs the labels in the batch, under the key 'labels'")
            scale = _scale(host, labels, items, bool(divides and divides[0]))
            loss = loss + scale * trainer_penalty(ad, labels).to(loss.dtype)
        return (loss, outputs) if return_outputs else loss

    host.compute_loss = compute_loss
    host.activation_decay = ad
    return trainer


def trainer_penalty(ad: ActivationDecay, labels: Tensor) -> Tensor:
    """The mean penalty over the positions that carry a label.

    Args:
        ad: attached to the model.
        labels: of the batch.
    """
    mask = torch.ones(len(labels), device=labels.device) if labels.is_floating_point() else labels != IGNORED
    return ad(mask)


def _divides(model: Any, loss: Callable[[Any], Tensor], items: Any) -> list[bool]:
    """Whether the loss is divided by the number of items it is told: then twice the number halves it.

    In evaluation mode, so that nothing is drawn and no statistic moves. Empty where the loss of this part does not tell.
    """
    model.eval()
    try:
        with torch.no_grad():
            once, twice = float(loss(items)), float(loss(2 * items))
    finally:
        model.train()
    return [abs(twice - once / 2) < abs(twice - once)] if math.isfinite(once) and once != 0 else []


def _scale(trainer: Any, labels: Tensor, items: Any, divided: bool) -> float:
    """What the mean loss of this part of the batch was multiplied by: `own items/items` where it is divided by all of them."""
    passes_items = bool(getattr(trainer, "model_accepts_loss_kwargs", False)) or trainer.compute_loss_func is not None
    if items is None or not passes_items:
        return 1.0
    processes = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
    if not divided:
        return 1.0 * processes
    own = len(labels) if labels.is_floating_point() else int((labels != IGNORED).sum())
    return own * processes / max(float(items), 1.0)
