"""Activation decay in a Hugging Face Trainer, on a tiny BERT with random weights: offline, seconds.

Activation decay adds (σ²/2)·mean‖h‖² to the loss, h the input of the last layer: an upper bound of the loss
averaged over Gaussian noise on that layer's weights, hence a pull towards flat minima.

Run: python examples/activation_decay_trainer.py   (needs transformers: pip install 'equipoise[text,train]')
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

import equipoise as eq

torch.manual_seed(0)
VOCABULARY, LENGTH = 50, 12


def sentences(n: int) -> list[dict[str, torch.Tensor]]:
    """A toy task: does token 7 occur? Replace by your tokenised data."""
    ids = torch.randint(1, VOCABULARY, (n, LENGTH))
    ids[: n // 2, 3] = 7
    return [{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": (i == 7).any().long()} for i in ids]


def train(sigma: float) -> tuple[float, float]:
    """Train with the given σ; returns the evaluation loss and the mean square of what the last layer reads."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, num_labels=2,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=60, per_device_train_batch_size=32, learning_rate=2e-3, report_to=[], use_cpu=True,
            save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(BertForSequenceClassification(config), settings, train_dataset=DATA, eval_dataset=TEST)
        trainer.remove_callback(PrinterCallback)
        # The one line that matters. It finds the last linear layer by itself; labels of −100 do not count.
        trainer = eq.regularizers.decay_in_trainer(trainer, sigma=sigma)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]  # the evaluation loss is left alone
        model, decay = trainer.model.eval(), trainer.activation_decay
        with torch.no_grad():
            model(**{key: torch.stack([item[key] for item in TEST]) for key in TEST[0]})
        square = float(decay()) / (sigma**2 / 2)  # decay() is (σ²/2)·mean‖h‖² of the latest forward pass
    return loss, square


DATA, TEST = sentences(256), sentences(64)
for sigma in (1e-6, 0.2):  # as good as none, and one that shows
    loss, square = train(sigma)
    print(f"σ = {sigma:g}: evaluation loss {loss:.3f}, mean ‖h‖² {square:.2f}")
