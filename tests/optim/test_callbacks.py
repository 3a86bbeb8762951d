"""The guard in other loops: Hugging Face's Trainer, and a loop with Lightning's hooks."""

import importlib.machinery
import sys
import types

import pytest
import torch
from torch import nn

from equipoise.core import InputError
from equipoise.optim import SpectralGuard, lightning_callback, load_guard, save_guard, trainer_callback


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Wrapped(nn.Module):
    """What the Trainer expects of a model."""

    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x, labels=None):
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(5 * logits, labels), "logits": logits}


@pytest.mark.text
def test_the_trainer_is_guarded_logged_saved_and_resumed(tmp_path):
    transformers = pytest.importorskip("transformers")
    data = [{"x": torch.randn(4), "labels": torch.tensor(i % 2)} for i in range(16)]

    def trainer(steps):
        model = Wrapped()
        guard = SpectralGuard(model, radius=1.0)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=steps, learning_rate=0.3, logging_steps=1, save_steps=2, report_to=[],
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        host = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[trainer_callback(guard)])
        return host, guard

    host, guard = trainer(4)
    host.train()
    assert guard.steps == 4
    assert max(b.upper for b in guard.bounds().values()) <= 1.001
    logged = [row for row in host.state.log_history if "norm/product" in row]
    assert len(logged) >= 4
    assert all(row["norm/body.0/upper"] <= 1.001 for row in logged)
    assert (tmp_path / "checkpoint-4" / "spectral_guard.safetensors").exists()
    again, resumed = trainer(6)
    again.train(resume_from_checkpoint=True)
    assert resumed.steps == 6


def test_a_loop_with_lightnings_hooks(monkeypatch):
    """Lightning is not a dependency: a module with its `Callback` class and the order in which its loop calls it."""
    with pytest.raises(InputError, match="pip install lightning"):
        lightning_callback(SpectralGuard(net()))
    stub = types.ModuleType("lightning.pytorch")
    stub.Callback = type("Callback", (), {})
    package = types.ModuleType("lightning")
    package.__spec__ = importlib.machinery.ModuleSpec("lightning", None)
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", stub)
    model, logs = net(), []
    guard = SpectralGuard(model, radius=1.0)
    callback = lightning_callback(guard)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    trainer = types.SimpleNamespace(optimizers=[optimizer])
    module = types.SimpleNamespace(log_dict=logs.append)
    callback.on_train_start(trainer, module)
    for batch in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        callback.on_train_batch_end(trainer, module, None, None, batch)
    state = callback.state_dict()
    callback.on_train_end(trainer, module)
    assert guard.steps == len(logs) == 3
    assert all(row["norm/product"] <= 1.002002 for row in logs)
    callback.load_state_dict(state)


def test_the_state_is_a_file_of_tensors(tmp_path):
    guard = SpectralGuard(net())
    save_guard(guard, tmp_path)
    load_guard(guard, tmp_path)
    with pytest.raises(InputError, match="holds no"):
        load_guard(guard, tmp_path / "nowhere")
