"""A GELU MLP with activation decay, against weight decay, dropout, SAM and combinations."""

from __future__ import annotations

from equipoise.lab.experiments.experiment import Experiment
from equipoise.lab.experiments.shared.comparison import Settings, Variants, draw, run, verdict_on_gain

AD = {"kind": "activation-decay", "sigma": 0.1}
SPECTRAL = {"kind": "spectral", "penalty": "hinge", "target": 1.0, "weight": 0.01}
VARIANTS: Variants = {
    "baseline": {},
    "AD": {"regularizers": [AD]},
    "weight decay": {"optimizer": {"weight_decay": 5e-4}},
    "dropout": {"model": {"arguments": {"dropout": 0.1}}},
    "SAM": {"optimizer": {"kind": "sam", "rho": 0.05}},
    "AD + weight decay": {"regularizers": [AD], "optimizer": {"weight_decay": 5e-4}},
    "AD + spectral": {"regularizers": [AD, SPECTRAL]},
}
#: two cores have time for these
LAPTOP: Variants = {name: VARIANTS[name] for name in ("baseline", "AD", "dropout", "AD + spectral")}


def recipe(data: str, widths: list[int], epochs: int) -> dict[str, object]:
    """Four layers, GELU, momentum SGD with a cosine schedule."""
    return {
        "model": {"factory": "equipoise.nn.models:mlp", "arguments": {"widths": widths, "activation": "gelu"}},
        "data": {"path": data},
        "optimizer": {"lr": 0.05},
        "schedule": {"kind": "cosine", "warmup": 0.05},
        "epochs": epochs,
        "batch_size": 128,
        "metrics": {"bound": False, "every": epochs},
    }


PUBLISHED = "baseline 62.17; AD(0.1) +2.63, dropout(0.1) +1.73, AD + spectral best (full CIFAR-10)"
EXPERIMENT = Experiment(
    id="ad-mlp",
    chapter="Generalisation",
    title="Activation decay in an MLP",
    claim="Activation decay raises the accuracy of an MLP by more than dropout, and combines with spectral regularisation.",
    published=PUBLISHED,
    laptop=Settings(recipe("cifar10.npz", [256, 256, 256], 10), LAPTOP, seeds=5),
    paper=Settings(recipe("cifar10-full.npz", [512, 512, 512], 200), VARIANTS, seeds=5),
    run=run,
    judge=lambda rows: verdict_on_gain(rows, "baseline", "AD", 1.5, PUBLISHED),
    draw=draw,
    needs=("cifar10.npz",),
)
