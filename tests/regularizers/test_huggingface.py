"""Activation decay in the Hugging Face Trainer, on tiny random networks, offline."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from equipoise.core import InputError
from equipoise.regularizers import decay_in_trainer

pytestmark = pytest.mark.text
transformers = pytest.importorskip("transformers")


class Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def bert(cls):
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return cls(config)


def t5():
    config = transformers.T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config)


def items(kind, count=8, length=6):
    g = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        ids = torch.randint(1, 40, (length,), generator=g)
        mask = torch.ones(length, dtype=torch.long)
        real = length - i % 3
        ids[real:], mask[real:] = 0, 0
        if kind == "sequence":
            labels = torch.randint(3, (), generator=g)
        else:
            labels = torch.randint(1, 3, (length,), generator=g)
            labels[real:] = -100
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return Items(found)


MODELS = {
    "sequence": (lambda: bert(transformers.BertForSequenceClassification), "classifier"),
    "token": (lambda: bert(transformers.BertForTokenClassification), "classifier"),
    "seq2seq": (t5, "lm_head"),
}


def make_trainer(model, data, folder, **options):
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
    }
    args = transformers.TrainingArguments(output_dir=str(folder), **{**settings, **options})
    return transformers.Trainer(model=model, args=args, train_dataset=data)


def batch(data, n):
    return {key: torch.stack([item[key] for item in data.items[:n]]) for key in data.items[0]}


@pytest.mark.parametrize("kind", MODELS)
def test_trains_and_adds_the_masked_penalty(kind, tmp_path):
    build, head = MODELS[kind]
    model, data = build(), items(kind)
    trainer = decay_in_trainer(make_trainer(model, data, tmp_path), sigma=0.7)
    inputs = batch(data, 4)
    seen = {}
    handle = model.get_submodule(head).register_forward_pre_hook(lambda m, args: seen.update(h=args[0].detach()))
    model.train()
    loss = trainer.compute_loss(model, dict(inputs))
    model.eval()
    plain = trainer.compute_loss(model, dict(inputs))  # evaluation is left alone
    handle.remove()
    h = seen["h"]
    rows = h if kind == "sequence" else h[inputs["labels"] != -100]
    expected = plain.item() + 0.7**2 / 2 * float(rows.square().sum(-1).mean())
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert trainer.activation_decay.name == head
    before = [p.detach().clone() for p in model.parameters()]
    trainer.train()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_padding_does_not_change_the_penalty(tmp_path):
    build, _ = MODELS["token"]
    model, data = build(), items("token")
    trainer = decay_in_trainer(make_trainer(model, data, tmp_path), sigma=0.7)
    model.train()
    inputs = batch(data, 4)
    longer = {key: torch.cat([v, torch.full((4, 5), -100 if key == "labels" else 0)], 1) for key, v in inputs.items()}
    assert trainer.compute_loss(model, longer).item() == pytest.approx(
        trainer.compute_loss(model, inputs).item(), rel=1e-4
    )


class Normalised(nn.Module):
    """A model that divides its loss by the items of the whole accumulated batch, as the Trainer asks it to."""

    def __init__(self, normalise, factor):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.normalise, self.factor = nn.Linear(4, 3), normalise, factor

    def forward(self, x, labels, num_items_in_batch=None, **kwargs):
        z = self.head(x)
        loss = self.factor * nn.functional.cross_entropy(z, labels, reduction="sum")
        return {"loss": loss / (num_items_in_batch if self.normalise and num_items_in_batch else len(x)), "logits": z}


@pytest.mark.parametrize("factor", [1.0, 0.2, 5.0])
@pytest.mark.parametrize("normalise", [True, False])
def test_gradient_accumulation_keeps_the_balance_of_loss_and_penalty(normalise, factor, tmp_path):
    """Four parts of two, or one batch of eight: the penalty is weighted as the loss, whatever the model divides by, and also
    where the loss is not plain cross-entropy (factor)."""
    g = torch.Generator().manual_seed(3)
    data = [{"x": torch.randn(4, generator=g), "labels": torch.randint(3, (), generator=g)} for _ in range(8)]
    model = Normalised(normalise, factor)
    trainer = decay_in_trainer(make_trainer(model, Items(data), tmp_path), sigma=1.0)
    model.train()
    parts = [
        {
            "x": torch.stack([d["x"] for d in data[i : i + 2]]),
            "labels": torch.stack([d["labels"] for d in data[i : i + 2]]),
        }
        for i in range(0, 8, 2)
    ]
    total = sum(trainer.compute_loss(model, part, num_items_in_batch=torch.tensor(8)).item() for part in parts)
    x, y = (torch.cat([p[k] for p in parts]) for k in ("x", "labels"))
    whole = factor * float(nn.functional.cross_entropy(model.head(x), y).detach()) + 0.5 * float(
        x.square().sum(1).mean()
    )
    assert total == pytest.approx(whole * (1 if normalise else 4), rel=1e-4)


def test_refusals(tmp_path):
    with pytest.raises(InputError, match="Trainer"):
        decay_in_trainer(object())
    build, _ = MODELS["sequence"]
    trainer = decay_in_trainer(make_trainer(build(), items("sequence"), tmp_path))
    with pytest.raises(InputError, match="already"):
        decay_in_trainer(trainer)
