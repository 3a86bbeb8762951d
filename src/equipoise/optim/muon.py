"""Muon for a whole network, with Adam for what is no matrix, and lookahead for any optimizer.

`torch.optim.Muon` takes matrices only; this one takes every parameter of a network: kernels as matrices (out, in·…), stacks of
matrices one by one, vectors by Adam.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from equipoise.core.checks import require_number, require_type
from equipoise.core.errors import InputError

#: Keller Jordan's quintic, as in torch.optim.Muon
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalised(update: Tensor, steps: int = 5) -> Tensor:
    """About `U·Vᵀ` of `update = U·Σ·Vᵀ` (…, m, n) by Newton–Schulz steps: singular values in about [0.7, 1.2].

    Args:
        update: matrices.
        steps: of the iteration.

    >>> torch.linalg.svdvals(orthogonalised(torch.diag(torch.tensor([5.0, 1.0])))).max() < 1.3
    tensor(True)
    """
    wide = update.shape[-2] > update.shape[-1]
    X = update.mT if wide else update
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(X.dtype).tiny)
    for _ in range(steps):
        G = X @ X.mT
        X = _A * X + (_B * G + _C * G @ G) @ X
    return X.mT if wide else X


class Muon(torch.optim.Optimizer):
    """Muon for parameters of two and more dimensions, Adam for the rest (biases, scales) and for what has one row.

    A parameter (out, in, …) is taken as the matrix (out, in·…); one of shape (groups, out, in) as `groups` matrices. The update
    is `lr·√max(1, rows/columns)·orthogonalised(momentum)`; vectors take Adam's with a tenth of `lr`.

    Args:
        params: parameters or groups, as for any optimizer.
        lr: step size of matrices.
        momentum: of matrices.
        betas: of Adam.
        weight_decay: decoupled, for all.

    Reference: Jordan et al. (2024), Muon: an optimizer for hidden layers in neural networks.

    >>> layer = nn.Linear(3, 2)
    >>> optimizer = Muon(layer.parameters(), lr=0.1)
    >>> layer(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        require_number(lr, "lr", least=0)
        require_number(momentum, "momentum", least=0, most=1)
        super().__init__(params, {"lr": lr, "momentum": momentum, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"])
                matrix = p.grad if p.ndim <= 3 else p.grad.flatten(1)
                if p.ndim >= 2 and min(matrix.shape[-2:]) > 1:
                    _muon(p, matrix, self.state[p], group)
                else:
                    _adam(p, p.grad, self.state[p], group)
        return loss


def _muon(p: nn.Parameter, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    moment = state.setdefault("momentum", torch.zeros_like(gradient))
    moment.lerp_(gradient, 1 - group["momentum"])
    ahead = torch.lerp(gradient, moment, group["momentum"])  # Nesterov
    rows, columns = ahead.shape[-2:]
    update = orthogonalised(ahead) * max(1.0, rows / columns) ** 0.5
    p.sub_(group["lr"] * update.reshape(p.shape))


def _adam(p: nn.Parameter, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    b1, b2 = group["betas"]
    adam(
        [p], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
        amsgrad=False, beta1=b1, beta2=b2, lr=0.1 * group["lr"], weight_decay=0.0, eps=1e-8, maximize=False,
    )  # fmt: skip


def add_lookahead(optimizer: torch.optim.Optimizer, steps: int = 5, alpha: float = 0.5) -> torch.optim.Optimizer:
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
