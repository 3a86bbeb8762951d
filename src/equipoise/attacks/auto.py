"""AutoAttack, where the optional package is installed."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn

from equipoise.attacks.ball import inside_ball
from equipoise.attacks.pgd import AttackResult
from equipoise.core import Refused, fresh_strides


def autoattack(model: nn.Module, x: Tensor, y: Tensor, epsilon: float, *, batch_size: int = 250) -> AttackResult:
    """The standard ℓ2 version of AutoAttack (Croce & Hein 2020); its result is projected back into the ball, then
    judged."""
    try:
        package = importlib.import_module("autoattack")
    except ImportError as error:
        raise Refused(
            "AutoAttack is an optional package that is not installed: get it from "
            "https://github.com/fra31/auto-attack, or use equipoise.attacks.pgd"
        ) from error
    attack = package.AutoAttack(model, norm="L2", eps=epsilon, version="standard", verbose=False)
    found = attack.run_standard_evaluation(fresh_strides(x), y, bs=batch_size)
    radius = torch.full((len(x),), float(epsilon), dtype=torch.float64, device=x.device)
    stored = inside_ball(x, found.double(), radius)
    with torch.no_grad():
        success = model(stored).argmax(dim=1) != y
    return AttackResult(stored, success, (stored.double() - x.double()).flatten(1).norm(dim=1))
