"""ℓ2 robustness of the networks of the SDP-CROWN release at their radii: proved, left open, broken, and processor time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import equipoise as eq
from equipoise_lab.bench import data_file


@dataclass(frozen=True)
class Task:
    """A network with its images, the radius at which it is asked about, and whether to branch until that is decided."""

    name: str
    images: str
    radius: float
    build: Callable[[], nn.Sequential]
    names: dict[str, str]
    complete: bool = False

    def load(self) -> tuple[nn.Module, Tensor, Tensor]:
        """The network in evaluation mode, its images and their labels."""
        weights = load_file(data_file(f"l2-verification/{self.name}.safetensors"))
        renamed = {}
        for key, value in weights.items():
            layer, _, part = key.rpartition(".")
            renamed[f"{self.names.get(layer, layer)}.{part}"] = value
        model = self.build()
        model.load_state_dict(renamed)
        with np.load(data_file(f"l2-verification/{self.images}")) as stored:
            x = torch.from_numpy(stored["x"]).float()
            y = torch.from_numpy(stored["y"]).long()
        return model.eval(), x if x.dim() == 4 else x[:, None], y


def _dense() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 100),
        nn.ReLU(),
        nn.Linear(100, 100),
        nn.ReLU(),
        nn.Linear(100, 10),
    )


def _convolutional(channels: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(hidden, 100),
        nn.ReLU(),
        nn.Linear(100, 10),
    )


TASKS = (
    Task("mnist-mlp", "mnist-200.npz", 1.0, _dense, {}),
    Task(
        "mnist-convsmall",
        "mnist-200.npz",
        0.3,
        lambda: _convolutional(1, 1568),
        {"conv1": "0", "conv2": "2", "fc1": "5", "fc2": "7"},
    ),
    Task("cifar10-cnn-a", "cifar10-200.npz", 0.41830, lambda: _convolutional(3, 2048), {}),
    Task("mnist-mlp", "mnist-200.npz", 0.5, _dense, {}, complete=True),
)


def rows(images: int = 50, seconds: float = 60.0) -> list[dict[str, object]]:
    """One row per network.

    Args:
        images: the first ones that are asked about; those that are classified wrongly are not robust.
        seconds: of processor time for each.
    """
    measured = []
    for task in TASKS:
        model, x, y = task.load()
        x, y = x[:images], y[:images]
        began = time.process_time()
        radii = eq.certified_radius(
            model, x, y, epsilon=task.radius, complete=task.complete, seconds=seconds
        )
        spent = time.process_time() - began
        attacked = eq.attacks.pgd(model, x, y, epsilon=task.radius, steps=100, restarts=3)
        proved = radii.radius >= task.radius
        if bool((proved & attacked.success).any()):
            raise AssertionError(
                "an attack broke a proof: this is a bug of equipoise, please report it"
            )
        methods = Counter(
            method for method, yes in zip(radii.methods, proved.tolist(), strict=True) if yes
        )
        measured.append(
            {
                "network": task.name,
                "radius": task.radius,
                "images": len(x),
                "right": int(radii.right.sum()),
                "proved": int(proved.sum()),
                "broken": len(radii.broken),
                "undecided": radii.verdicts.count("undecided"),
                "not broken by PGD": int((~attacked.success & radii.right).sum()),
                "seconds an image": round(spent / len(x), 2),
                "slowest": round(max(radii.seconds), 1),
                "methods": ", ".join(f"{name} {count}" for name, count in methods.most_common()),
            }
        )
    return measured
