"""Muon for a whole network (`torch.optim.Muon` takes matrices only), and lookahead for any optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from equipoise.core import InputError, require_number, require_type


class Muon(torch.optim.Optimizer):
    """Muon for matrices and AdamW at a tenth of the rate for kernels, biases and scales, as one optimizer.

    A matrix moves along its orthogonalised momentum, by `lr·√max(1, m/n)` as in `torch.optim.Muon`. Groups with
    `orthonormal=True` hold stacks of matrices `(…, m, n)` that stay orthonormal, as those of BCOP layers: a step of norm about
    `lr`, then three steps `W ← (3/2)W − (1/2)WWᵀW` back, two of them where lr is at most 0.02.

    Args:
        params: parameters or groups, as for any optimizer.
        lr: step size of matrices.
        momentum: of matrices.
        weight_decay: decoupled, for all but orthonormal matrices.

    Reference: Jordan et al. (2024), Muon: an optimizer for hidden layers in neural networks.

    >>> layer = torch.nn.Linear(3, 2)
    >>> optimizer = Muon(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        require_number(lr, "lr", least=0)
        require_number(momentum, "momentum", least=0, most=1)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "orthonormal": False})
        #: the optimizer of what is no matrix, by the number of its group
        self.rest: dict[int, torch.optim.Optimizer] = {}
        for i, group in enumerate(self.param_groups):
            rest = [p for p in group["params"] if p.ndim != 2 and not group["orthonormal"]]
            if rest:
                decay = 10 * group["weight_decay"]
                self.rest[i] = torch.optim.AdamW(rest, weight_decay=decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for i, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None and (p.ndim == 2 or group["orthonormal"]):
                    self._turn(p, p.grad, group)
            if i in self.rest:
                # one state for all, so that state_dict and load_state_dict are torch's own
                self.rest[i].state = self.state
                self.rest[i].param_groups[0]["lr"] = 0.1 * group["lr"]
                self.rest[i].step()
        return loss

    def _turn(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        average = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        average.lerp_(gradient, 1 - momentum)
        W, M = p, gradient.lerp(average, momentum)
        if p.shape[-2] > p.shape[-1]:
            W, M = p.mT, M.mT
        M = M.bfloat16()
        M = M / torch.linalg.matrix_norm(M, keepdim=True).clamp_min(1e-7)
        for _ in range(5):
            A = M @ M.mT
            M = 3.4445 * M + (-4.7750 * A + 2.0315 * (A @ A)) @ M
        if not group["orthonormal"]:
            longer = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            W.mul_(1 - lr * group["weight_decay"]).sub_(lr * longer * M.to(W.dtype))
            return
        turned = W - lr * M.to(W.dtype)
        identity = torch.eye(turned.shape[-2], dtype=W.dtype, device=W.device)
        # each of them squares ‖WWᵀ − I‖
        for _ in range(2 if lr <= 0.02 else 3):
            turned = (1.5 * identity - 0.5 * (turned @ turned.mT)) @ turned
        W.copy_(turned)


def add_lookahead(
    optimizer: torch.optim.Optimizer, steps: int = 5, alpha: float = 0.5
) -> torch.optim.Optimizer:
    """Let an optimizer look ahead: after every `steps` steps `slow ← slow + α·(w − slow)`, `w ← slow`.

    The slow weights and the count live in the optimizer's own state (`slow`, `ahead`), so that `state_dict` and
    `load_state_dict` carry them, and a run that is stopped anywhere goes on exactly.

    Args:
        optimizer: returned with a hook.
        steps: between two steps of the slow weights.
        alpha: how far the slow weights go.

    Reference: Zhang, Lucas, Hinton, Ba (2019), Lookahead optimizer: k steps forward, 1 step back.

    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = add_lookahead(torch.optim.SGD([w], lr=1.0), steps=2, alpha=0.5)
    >>> for _ in range(2):
    ...     w.grad = torch.ones(1)
    ...     optimizer.step()
    >>> w.item()  # two steps of −1, half of the way back
    -1.0
    """
    require_type(optimizer, torch.optim.Optimizer, "optimizer")
    if steps < 1 or not 0 < alpha <= 1:
        raise InputError(f"lookahead needs steps ≥ 1 and alpha in (0, 1], got {steps} and {alpha}")
    start = {
        p: p.detach().clone()
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    }

    @torch.no_grad()
    def after(stepped: torch.optim.Optimizer, args: Any, options: Any) -> None:
        for group in stepped.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                # not before the first step: torch's optimizers begin where it is empty
                state = stepped.state[p]
                if "slow" not in state:
                    state["slow"], state["ahead"] = start.pop(p, p.detach()).clone(), 0
                state["ahead"] = (state["ahead"] + 1) % steps
                if state["ahead"] == 0:
                    p.copy_(state["slow"].lerp_(p, alpha))

    optimizer.register_step_post_hook(after)
    return optimizer
