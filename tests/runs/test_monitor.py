"""Certified accuracy inside training loops: one's own, Lightning's."""

import sys
import types

import pytest
import torch
from torch import nn

from equipoise.core import InputError
from equipoise.optim import SpectralGuard, lightning_callback
from equipoise.runs.monitor import CertifiedMonitor, lightning_monitor

X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.2], [0.0, 0.0]])
Y = torch.tensor([0, 1, 0, 1])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def monitor():
    return CertifiedMonitor(X, Y, sigma=0.1, n=200, alpha=0.01)


def test_a_loop_of_ones_own_is_left_as_it_was():
    model = net()
    model[3].eval()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.random.get_rng_state()
    scalars = monitor()(model)
    assert [part.training for part in model] == [True, True, True, False, True]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())
    assert 0 <= scalars["certified/0.1"] <= scalars["certified/0"] <= 1


def test_figures_are_those_of_certificates():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(50 * torch.eye(2))
        model.bias.copy_(torch.tensor([0.0, 10.0]))
    scalars = monitor()(model)
    assert scalars["certified/accuracy"] == scalars["certified/0"] == scalars["certified/0.1"] == 1.0
    wrong = CertifiedMonitor(X, 1 - Y, sigma=0.1, n=200)(model)
    assert wrong["certified/0"] == wrong["certified/accuracy"] == 0.0


@pytest.fixture
def lightning(monkeypatch):
    """Lightning itself where it is installed, else a module with its `Callback` class."""
    try:
        import lightning.pytorch as found
    except ImportError:
        found = types.ModuleType("lightning.pytorch")
        found.Callback = type("Callback", (), {})
        monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
        monkeypatch.setitem(sys.modules, "lightning.pytorch", found)
    return found


def test_the_callback_logs_after_epochs(lightning):
    logs, module = [], types.SimpleNamespace()
    callback = lightning_monitor(lambda model: {"certified/0": 0.5}, every=2)
    module.log_dict = logs.append
    for epoch in range(4):
        callback.on_train_epoch_end(types.SimpleNamespace(current_epoch=epoch), module)
    assert logs == [{"certified/0": 0.5}] * 2


def test_with_lightning_itself(tmp_path):
    """Training, logging, checkpoint and resumption by its own Trainer, with the guard and the monitor."""
    pytorch = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Module(pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    def train(epochs, resume=None):
        module = Module()
        guard = SpectralGuard(module, radius=1.0)
        trainer = pytorch.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, enable_checkpointing=False,
            callbacks=[lightning_callback(guard), lightning_monitor(monitor())],
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=2)
        trainer.fit(module, loader, ckpt_path=resume)
        return trainer, guard

    trainer, guard = train(3)
    assert guard.steps == 6
    assert max(b.upper for b in guard.bounds().values()) <= 1.001
    assert {"certified/0", "norm/product"} <= set(trainer.callback_metrics)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again, resumed = train(4, tmp_path / "a.ckpt")
    assert resumed.steps == 8
    assert again.callback_metrics["norm/product"] <= 1.002


def test_wrong_requests_get_a_sentence(lightning):
    with pytest.raises(InputError, match="as many labels"):
        CertifiedMonitor(X, Y[:2], sigma=0.1)
    with pytest.raises(InputError, match="at least 1"):
        lightning_monitor(monitor(), every=0)
