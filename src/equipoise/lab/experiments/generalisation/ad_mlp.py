"""A GELU MLP with activation decay, against weight decay, dropout, SAM and combinations."""

from __future__ import annotations

from equipoise.lab.experiments.shared.comparison import Claim, Settings, Variants, compared
from equipoise.lab.experiments.shared.training import STANDARD, Plain, recipe

SPECTRAL = {"kind": "spectral", "penalty": "squares", "weight": 1e-3, "bound": "gram", "iterations": 6}


def decay(sigma: float) -> dict[str, object]:
    """Activation decay at σ on the input of the last layer."""
    return {"kind": "activation-decay", "sigma": sigma}


AD = decay(0.1)
#: the thesis' optimizer: no momentum, no weight decay
SGD = {"lr": 0.1, "momentum": 0.0}
#: σ of activation decay, p of dropout and ρ of SAM are swept; the thesis' best are 0.1, 0.1 and not printed
SWEEP: Variants = {
    "baseline": {},
    **{f"AD {sigma:g}": {"regularizers": [decay(sigma)]} for sigma in (0.02, 0.05, 0.2, 0.3)},
    "AD": {"regularizers": [AD]},
    "dropout": {"model": {"arguments": {"dropout": 0.1}}},
    **{f"dropout {p:g}": {"model": {"arguments": {"dropout": p}}} for p in (0.05, 0.2, 0.3)},
    **{f"weight decay {w:g}": {"optimizer": {"weight_decay": w}} for w in (1e-4, 5e-4, 5e-3)},
    "weight decay": {"optimizer": {"weight_decay": 1e-3}},
    **{f"SAM {rho:g}": {"optimizer": {"kind": "sam", "rho": rho}} for rho in (0.02, 0.05, 0.1, 0.2)},
    "AD + weight decay": {"regularizers": [AD], "optimizer": {"weight_decay": 1e-3}},
    "AD + spectral": {"regularizers": [AD, SPECTRAL]},
}


def chosen(*names: str) -> Variants:
    """Some of the sweep."""
    return {name: SWEEP[name] for name in names}


def perceptron(data: str, widths: list[int], epochs: int, **options: object) -> Plain:
    """Dense layers with GELU and the thesis' optimizer and augmentation."""
    shared = {"optimizer": SGD, "augment": STANDARD, **options}
    return recipe("mlp", {"widths": widths, "activation": "gelu"}, data, epochs, **shared)  # type: ignore[arg-type]


#: 1,000 images in small batches, as many steps as two cores take in seconds
SMALL = {"limit": 1000, "batch_size": 16}
#: where a failure lies
SCALE = (
    "a thousand images for a few seconds underfit, and decay helps networks that overfit: a failure at laptop or desk "
    "scale lies with the scale, not with the thesis; one run at paper scale takes half an hour of two cores, the sweep "
    "over ten seeds four days"
)
CLAIMS = (
    Claim("gain of AD", "AD", 2.63, "62.17 → 64.80"),
    Claim("AD beyond dropout", "AD", 0.90, "+2.63 against +1.73", rival="dropout"),
    Claim("AD + spectral beyond AD", "AD + spectral", None, "best of all", rival="AD"),
)
EXPERIMENT = compared(
    __name__,
    place="Figure 7.2",
    title="Activation decay in an MLP",
    claim="Activation decay raises the accuracy of an MLP by more than dropout, and combines with spectral regularisation.",
    published="baseline 62.17; AD(0.1) +2.63, dropout(0.1) +1.73, AD + spectral best (full CIFAR-10)",
    claims=CLAIMS,
    laptop=Settings(perceptron("cifar10.npz", [128] * 3, 10, **SMALL), chosen("baseline", "AD", "dropout"), seeds=2),
    desk=Settings(perceptron("cifar10.npz", [128] * 3, 12, **SMALL), chosen("baseline", "AD", "dropout"), seeds=4),
    paper=Settings(perceptron("cifar10-full.npz", [512] * 3, 200), SWEEP, seeds=10),
    notes=(
        "width and number of epochs are not printed in the thesis: 512, as in its appendix D, and 200, as elsewhere",
    ),
)
