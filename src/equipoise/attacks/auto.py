"""AutoAttack, where a package that has it is installed: `autoattack` by its authors, or `torchattacks`."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from equipoise.attacks.pgd import AttackResult, checked_labels, checked_logits, checked_radius, inside_ball
from equipoise.core import Refused, fresh_strides
from equipoise.core.checks import require_type

#: packages that have it, the authors' own first
PACKAGES = ("autoattack", "torchattacks")


def require_autoattack() -> str:
    """The name of the installed package that has AutoAttack; refused where there is none."""
    for name in PACKAGES:
        if find_spec(name) is not None:
            return name
    raise Refused(
        "AutoAttack is optional and not installed: pip install torchattacks, get the authors' package from "
        "https://github.com/fra31/auto-attack, or use equipoise.attacks.pgd"
    )


def autoattack(model: nn.Module, x: Tensor, y: Tensor, epsilon: float, *, batch_size: int = 250) -> AttackResult:
    """The standard ℓ2 version of AutoAttack (Croce & Hein 2020) on inputs in [0, 1]; its result is projected back into the
    ball, then judged.

    Taken from the authors' package `autoattack` where it is installed, else from `torchattacks`.

    Args:
        model: in evaluation mode.
        x: inputs (N, ...) in [0, 1].
        y: the answers to break (N,).
        epsilon: radius, one for all.
        batch_size: inputs per call of the package.
    """
    require_type(epsilon, (int, float), "epsilon")
    y = checked_labels(x, y)
    radius = checked_radius(x, epsilon)
    with torch.no_grad():
        classes = checked_logits(model, x, y).shape[1]

    name = require_autoattack()
    package = importlib.import_module(name)
    options = {"norm": "L2", "eps": epsilon, "version": "standard"}
    inputs = fresh_strides(x)
    if name == "autoattack":
        attack = package.AutoAttack(model, **options, verbose=False)
        adversarial = attack.run_standard_evaluation(inputs, y, bs=batch_size)
    else:
        attack = package.AutoAttack(model, **options, n_classes=classes)
        batches = zip(inputs.split(batch_size), y.split(batch_size), strict=True)
        adversarial = torch.cat([attack(*batch) for batch in batches])

    stored = inside_ball(x, adversarial.detach().double(), radius)
    with torch.no_grad():
        success = model(stored).argmax(dim=1) != y
    return AttackResult(stored, success, (stored.double() - x.double()).flatten(1).norm(dim=1))
