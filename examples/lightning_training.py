"""A 1-Lipschitz network in a LightningModule; the bound is proved when training ends.

Run: python examples/lightning_training.py   (needs lightning)
"""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import equipoise as eq


class Robust(lightning.LightningModule):
    """Orthogonal layers, a loss that asks for margin, certified accuracy on the validation set."""

    def __init__(self, epsilon=0.1):
        super().__init__()
        self.epsilon = epsilon
        self.network = torch.nn.Sequential(
            torch.nn.Flatten(), eq.nn.BCOPLinear(64, 64), eq.nn.MaxMin(), eq.nn.BCOPLinear(64, 10)
        )

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.cross_entropy(4 * self.network(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        radius = eq.smoothing.margin_radius(self.network(x), y, 1 + 1e-4)  # by construction
        self.log("certified", (radius >= self.epsilon).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    train = TensorDataset(*eq.data.load_dataset("digits", "train").batch(range(1437)))
    test = TensorDataset(*eq.data.load_dataset("digits", "test").batch(range(360)))
    robust = Robust()
    trainer = lightning.Trainer(
        max_epochs=5,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        robust,
        DataLoader(train, 128, shuffle=True, drop_last=True),
        DataLoader(test, 360),
    )
    bound = eq.lipschitz_bound(robust.network.eval(), test[0][0][None])
    print(f"certified at 0.1: {float(trainer.callback_metrics['certified']):.1%}")
    print(f"proved constant: {bound.upper:.4f}")
