"""Spectral control while training: norms held at a radius by any optimizer, proved after every step."""

from equipoise.optim.callbacks import (
    GuardLogger,
    lightning_callback,
    load_guard,
    save_guard,
    tensorboard_sink,
    trainer_callback,
    wandb_sink,
)
from equipoise.optim.guard import SpectralGuard
from equipoise.optim.muon import Muon, add_lookahead

__all__ = [
    "GuardLogger", "Muon", "SpectralGuard", "add_lookahead", "lightning_callback", "load_guard",
    "save_guard", "tensorboard_sink", "trainer_callback", "wandb_sink",
]  # fmt: skip
