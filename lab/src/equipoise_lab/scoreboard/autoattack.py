"""AutoAttack by the package `torchattacks`, where it is installed."""

import importlib
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from equipoise.attacks import (
    AttackResult,
    checked_labels,
    checked_logits,
    checked_radius,
    inside_ball,
)
from equipoise.core.errors import InputError, Refused
from equipoise.core.modules import fresh_strides

#: the package that has AutoAttack
PACKAGE = "torchattacks"


def require_autoattack() -> None:
    """Refuse where no package has AutoAttack."""
    if find_spec(PACKAGE) is None:
        raise Refused(
            f"AutoAttack is optional and not installed: pip install {PACKAGE}, or use equipoise.attacks.pgd"
        )


def autoattack(
    model: nn.Module, x: Tensor, y: Tensor, epsilon: float, *, batch_size: int = 250
) -> AttackResult:
    """The standard ℓ2 version of AutoAttack (Croce & Hein 2020) by `torchattacks`; its result is projected back into the ball,
    then judged.

    Args:
        model: in evaluation mode.
        x: images (N, channels, height, width) in [0, 1].
        y: the answers to break (N,).
        epsilon: radius, one for all.
        batch_size: inputs per call of the package.
    """
    y = checked_labels(x, y)
    radius = checked_radius(x, epsilon)
    with torch.no_grad():
        classes = checked_logits(model, x, y).shape[1]
    if classes < 4 or x.dim() != 4:
        raise InputError(
            f"AutoAttack takes images and at least four classes; got inputs of {x.dim() - 1} axes and {classes} classes"
        )
    require_autoattack()
    attack = importlib.import_module(PACKAGE).AutoAttack(
        model, norm="L2", eps=epsilon, version="standard", n_classes=classes, seed=0
    )
    batches = zip(fresh_strides(x).split(batch_size), y.split(batch_size), strict=True)
    adversarial = torch.cat([attack(*batch) for batch in batches])
    stored = inside_ball(x, adversarial.detach().double(), radius)
    with torch.no_grad():
        success = model(stored).argmax(dim=1) != y
    return AttackResult(stored, success, (stored.double() - x.double()).flatten(1).norm(dim=1))
