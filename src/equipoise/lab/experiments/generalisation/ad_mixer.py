"""Activation decay in an MLP-Mixer."""

from __future__ import annotations

from equipoise.lab.experiments.experiment import Experiment
from equipoise.lab.experiments.generalisation.ad_mlp import AD
from equipoise.lab.experiments.shared.comparison import Claim, Settings, Variants, draw, gain_verdicts, run


def recipe(data: str, width: int, depth: int, epochs: int, limit: int | None) -> dict[str, object]:
    """A Mixer on 4×4 patches with AdamW."""
    return {
        "model": {
            "factory": "equipoise.nn.models:mlp_mixer",
            "arguments": {"width": width, "depth": depth, "patch_size": 4, "channel_hidden": 4 * width},
        },
        "data": {"path": data, "augment": ["flip"], "limit": limit},
        "optimizer": {"kind": "adamw", "lr": 2e-3, "weight_decay": 0.01},
        "schedule": {"kind": "cosine", "warmup": 0.1},
        "epochs": epochs,
        "batch_size": 128,
        "metrics": {"bound": False, "every": epochs},
    }


VARIANTS: Variants = {"baseline": {}, "AD": {"regularizers": [AD]}}
CLAIMS = (Claim("", "AD", None, "improves"),)
PUBLISHED = "improves"
EXPERIMENT = Experiment(
    id="ad-mixer",
    chapter="Generalisation",
    place="Figure D.1",
    title="Activation decay in an MLP-Mixer",
    claim="Activation decay improves an MLP-Mixer.",
    published=PUBLISHED,
    laptop=Settings(recipe("cifar10.npz", 32, 2, 5, 5000), VARIANTS, seeds=3),
    paper=Settings(recipe("cifar10-full.npz", 256, 8, 200, None), VARIANTS, seeds=5),
    run=run,
    judge=lambda rows: gain_verdicts(rows, CLAIMS),
    draw=draw,
    needs=("cifar10.npz",),
)
