"""Lookahead: every few steps of any optimizer the weights go back part of the way to where they were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equipoise.core.errors import InputError


def add_lookahead(optimizer: torch.optim.Optimizer, steps: int = 5, alpha: float = 0.5) -> torch.optim.Optimizer:
    """Let an optimizer look ahead: after every `steps` steps `slow ← slow + α·(w − slow)`, `w ← slow`.

    The slow weights and the count live in the optimizer's own state (`slow`, `ahead`), so that `state_dict` and
    `load_state_dict` carry them, and a run that is stopped anywhere goes on exactly.

    Reference: Zhang, Lucas, Hinton, Ba (2019), Lookahead optimizer: k steps forward, 1 step back.

    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = add_lookahead(torch.optim.SGD([w], lr=1.0), steps=2, alpha=0.5)
    >>> for _ in range(2):
    ...     w.grad = torch.ones(1)
    ...     optimizer.step()
    >>> w.item()  # two steps of −1, half of the way back
    -1.0
    """
    if steps < 1 or not 0 < alpha <= 1:
        raise InputError(f"lookahead needs steps ≥ 1 and alpha in (0, 1], got {steps} and {alpha}")
    start: dict[Tensor, Tensor] = {
        p: p.detach().clone() for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    }

    @torch.no_grad()
    def after(stepped: torch.optim.Optimizer, args: Any, options: Any) -> None:
        for group in stepped.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = stepped.state[p]  # not before the first step: torch's optimizers begin where it is empty
                if "slow" not in state:
                    state["slow"], state["ahead"] = start.pop(p, p.detach()).clone(), 0
                state["ahead"] = (state["ahead"] + 1) % steps
                if state["ahead"] == 0:
                    p.copy_(state["slow"].lerp_(p, alpha))

    optimizer.register_step_post_hook(after)
    return optimizer
