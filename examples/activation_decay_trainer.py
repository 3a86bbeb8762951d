"""Activation decay in a Hugging Face Trainer, on a tiny BERT with random weights: offline, seconds.

Activation decay adds (σ²/2)·mean‖h‖² to the loss, h the input of the last layer: an upper bound of the loss
averaged over Gaussian noise on that layer's weights, hence a pull towards flat minima.

Run: python examples/activation_decay_trainer.py   (needs transformers: pip install 'equipoise[text,train]')
"""

import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

import equipoise as eq


class DecayTrainer(Trainer):
    """Adds the penalty to the training loss, over the positions that have a label; the evaluation loss is left alone."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            scale = 1.0  # a loss that is divided by the items of all accumulated batches: so is the penalty
            if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
                scale = (labels != -100).sum() / num_items_in_batch
            loss = loss + scale * self.decay(mask=labels != -100)
        return (loss, outputs) if return_outputs else loss


def sentences(n: int) -> list[dict[str, torch.Tensor]]:
    """A toy task: does token 7 occur? Replace by your tokenized data."""
    ids = torch.randint(1, 50, (n, 12))
    ids[: n // 2, 3] = 7
    return [
        {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": (i == 7).any().long()}
        for i in ids
    ]


torch.manual_seed(0)
DATA, TEST = sentences(256), sentences(64)
CONFIG = BertConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=2,
)
for sigma in (1e-6, 0.2):  # as good as none, and one that shows
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=60, per_device_train_batch_size=32, learning_rate=2e-3, report_to=[], use_cpu=True,
            save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = DecayTrainer(
            BertForSequenceClassification(CONFIG), settings, train_dataset=DATA, eval_dataset=TEST
        )
        trainer.remove_callback(PrinterCallback)
        trainer.decay = eq.regularizers.ActivationDecay(trainer.model, sigma)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        with torch.no_grad():
            trainer.model.eval()(
                **{key: torch.stack([item[key] for item in TEST]) for key in TEST[0]}
            )
        # decay() is (σ²/2)·mean‖h‖² of the latest forward pass
        square = float(trainer.decay()) / (sigma**2 / 2)
    print(f"σ = {sigma:g}: evaluation loss {loss:.3f}, mean ‖h‖² {square:.2f}")
