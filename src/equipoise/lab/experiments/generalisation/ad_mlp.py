"""A GELU MLP with activation decay, against weight decay, dropout, SAM and combinations."""

from __future__ import annotations

from equipoise.lab.experiments.experiment import Experiment
from equipoise.lab.experiments.shared.comparison import Claim, Settings, Variants, claim_power, draw, gain_verdicts, run

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


CLAIMS = (
    Claim("gain of AD", "AD", 2.63, "62.17 → 64.80"),
    Claim("AD beyond dropout", "AD", 0.90, "+2.63 against +1.73", rival="dropout"),
    Claim("AD + spectral beyond AD", "AD + spectral", None, "best of all", rival="AD"),
)
PUBLISHED = "baseline 62.17; AD(0.1) +2.63, dropout(0.1) +1.73, AD + spectral best (full CIFAR-10)"
EXPERIMENT = Experiment(
    id="ad-mlp",
    chapter="Generalisation",
    place="Figure 7.2",
    title="Activation decay in an MLP",
    claim="Activation decay raises the accuracy of an MLP by more than dropout, and combines with spectral regularisation.",
    published=PUBLISHED,
    laptop=Settings(recipe("cifar10.npz", [256, 256, 256], 10), LAPTOP, seeds=5),
    paper=Settings(recipe("cifar10-full.npz", [512, 512, 512], 200), VARIANTS, seeds=5),
    run=run,
    judge=lambda rows: gain_verdicts(rows, CLAIMS),
    power=lambda rows: claim_power(rows, CLAIMS[0]),
    draw=draw,
    needs=("cifar10.npz",),
)
