"""Activation decay with ASAM in a WideResNet."""

from __future__ import annotations

from equipoise.lab.experiments.experiment import Experiment
from equipoise.lab.experiments.generalisation.ad_mlp import AD
from equipoise.lab.experiments.shared.comparison import Claim, Settings, Variants, claim_power, draw, gain_verdicts, run

VARIANTS: Variants = {
    "baseline": {},
    "ASAM": {"optimizer": {"kind": "asam", "rho": 0.5}},
    "AD": {"regularizers": [AD]},
    "AD + ASAM": {"optimizer": {"kind": "asam", "rho": 0.5}, "regularizers": [AD]},
}


def recipe(data: str, depth: int, widen: int, epochs: int, limit: int | None) -> dict[str, object]:
    """WideResNet with the usual augmentation."""
    return {
        "model": {"factory": "equipoise.nn.models:wide_resnet", "arguments": {"depth": depth, "widen": widen}},
        "data": {"path": data, "augment": ["flip", {"kind": "pad-crop", "padding": 4}], "limit": limit},
        "optimizer": {"lr": 0.1, "weight_decay": 5e-4, "nesterov": True},
        "schedule": {"kind": "cosine", "warmup": 0.1},
        "epochs": epochs,
        "batch_size": 128,
        "metrics": {"bound": False, "every": epochs},
    }


CLAIMS = (
    Claim("AD beyond SGD", "AD", 0.18, "97.09 → 97.27"),
    Claim("AD on top of ASAM", "AD + ASAM", 0.06, "97.48 → 97.54", rival="ASAM"),
)
PUBLISHED = "97.09 (SGD), 97.48 (ASAM), 97.27 (AD), 97.54 (AD + ASAM)"
EXPERIMENT = Experiment(
    id="ad-asam",
    chapter="Generalisation",
    place="Table 7.3",
    title="Activation decay and ASAM in a WideResNet",
    claim="Activation decay helps a WideResNet, and helps on top of ASAM too.",
    published=PUBLISHED,
    laptop=Settings(recipe("cifar10.npz", 10, 1, 3, 3000), VARIANTS, seeds=2),
    paper=Settings(recipe("cifar10-full.npz", 28, 10, 200, None), VARIANTS, seeds=3),
    run=run,
    judge=lambda rows: gain_verdicts(rows, CLAIMS),
    power=lambda rows: claim_power(rows, CLAIMS[0]),
    draw=draw,
    needs=("cifar10.npz",),
)
