"""Activation decay in an MLP-Mixer."""

from __future__ import annotations

from equipoise.lab.experiments.generalisation.ad_mlp import AD, decay
from equipoise.lab.experiments.shared.comparison import Claim, Settings, Variants, compared
from equipoise.lab.experiments.shared.training import Plain, recipe

VARIANTS: Variants = {"baseline": {}, "AD": {"regularizers": [AD]}}
SWEEP: Variants = {**VARIANTS, **{f"AD {sigma:g}": {"regularizers": [decay(sigma)]} for sigma in (0.05, 0.2, 0.3)}}


def mixer(data: str, width: int, depth: int, epochs: int, limit: int | None, test: int | None = None) -> Plain:
    """A Mixer on 4×4 patches with AdamW."""
    arguments = {"width": width, "depth": depth, "patch_size": 4, "channel_hidden": 4 * width}
    optimizer = {"kind": "adamw", "lr": 2e-3, "weight_decay": 0.01}
    return recipe(
        "mlp_mixer",
        arguments,
        data,
        epochs,
        limit=limit,
        test_limit=test,
        augment=["flip"],
        optimizer=optimizer,
        warmup=0.1,
    )


EXPERIMENT = compared(
    __name__,
    place="Figure D.1",
    title="Activation decay in an MLP-Mixer",
    claim="Activation decay improves an MLP-Mixer.",
    published="improves (figure, Mixer-S/32 on ImageNet)",
    claims=(Claim("", "AD", None, "improves"),),
    laptop=Settings(mixer("cifar10.npz", 32, 2, 5, 5000), VARIANTS, seeds=3),
    paper=Settings(mixer("cifar10-full.npz", 256, 8, 200, None), SWEEP, seeds=10),
    notes=(
        "CIFAR-10 and 4×4 patches for ImageNet and 32×32 ones: the data are not free to fetch",
        "no number is printed, so only an interval without 0 decides; eleven seeds, ten minutes of two cores, detect one point",
    ),
)
