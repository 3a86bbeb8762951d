"""Muon for a whole network, with Adam for what is no matrix, and a bound of how large its updates can be.

Muon replaces the momentum B of a matrix by `p(…p(B/‖B‖_F)…)` with `p(X) = aX + b(XXᵀ)X + c(XXᵀ)²X`, which acts on every
singular value as the scalar polynomial `p(s) = as + bs³ + cs⁵`. After the pre-scaling all singular values lie in [0, 1], so in
real arithmetic the update has norm at most `lr·max p∘…∘p` over [0, 1], computed here by interval arithmetic.

Real optimizers run these steps in bfloat16, where the rounding of one product of n×n matrices may change a norm by n·2⁻⁸: no
a-priori bound is left. So the guard does not use this number. It measures every update as it is, in Frobenius norm off the
followed space, and proves the weight anew where that is not enough; to verify that an update has the norm promised would
cost as much as that proof.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.core.precision import inflate

#: Keller Jordan's quintic, as in torch.optim.Muon
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalised(update: Tensor, steps: int = 5) -> Tensor:
    """About `U·Vᵀ` of `update = U·Σ·Vᵀ` (…, m, n) by Newton–Schulz steps: singular values in about [0.7, 1.2].

    `newton_schulz_gain` proves how large it can be.

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
    is `lr·√max(1, rows/columns)·orthogonalised(momentum)`; vectors take Adam's with `lr·vectors`.

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
        vectors: float = 0.1,
        steps: int = 5,
    ) -> None:
        if not (lr >= 0 and 0 <= momentum < 1 and vectors >= 0 and steps >= 1):
            raise InputError(f"Muon needs lr ≥ 0, momentum in [0, 1), vectors ≥ 0, steps ≥ 1; got {lr}, {momentum}, …")
        defaults = {
            "lr": lr, "momentum": momentum, "betas": betas, "weight_decay": weight_decay, "vectors": vectors,
            "steps": steps,
        }  # fmt: skip
        super().__init__(params, defaults)

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
                if p.ndim >= 2 and min(_matrix(p).shape[-2:]) > 1:
                    _muon(p, p.grad, self.state[p], group)
                else:
                    _adam(p, p.grad, self.state[p], group)
        return loss


def _matrix(p: Tensor) -> Tensor:
    return p if p.ndim <= 3 else p.flatten(1)


def _muon(p: nn.Parameter, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state["momentum"] = torch.zeros_like(p)
    moment, beta = state["momentum"], group["momentum"]
    moment.lerp_(gradient, 1 - beta)
    ahead = _matrix(torch.lerp(gradient, moment, beta))  # Nesterov
    rows, columns = ahead.shape[-2:]
    update = orthogonalised(ahead, group["steps"]) * max(1.0, rows / columns) ** 0.5
    p.sub_(group["lr"] * update.reshape(p.shape))


def _adam(p: nn.Parameter, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state["step"], state["exp_avg"], state["exp_avg_sq"] = 0, torch.zeros_like(p), torch.zeros_like(p)
    state["step"] += 1
    b1, b2 = group["betas"]
    state["exp_avg"].lerp_(gradient, 1 - b1)
    state["exp_avg_sq"].lerp_(gradient.square(), 1 - b2)
    size = (state["exp_avg_sq"] / (1 - b2 ** state["step"])).sqrt_().add_(1e-8)
    p.addcdiv_(state["exp_avg"] / (1 - b1 ** state["step"]), size, value=-group["lr"] * group["vectors"])


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


Coefficients = Sequence[float] | Sequence[Sequence[float]]

#: Keller Jordan's quintic, the default of torch.optim.Muon and of pytorch-optimizer
JORDAN = (3.4445, -4.7750, 2.0315)


def newton_schulz_gain(coefficients: Coefficients = JORDAN, steps: int = 5, cells: int = 200_000) -> float:
    """An upper bound of `max |p_n∘…∘p_1|` over [0, 1] in real arithmetic: 1 + δ for an update of Muon of learning rate 1.

    The interval is cut into cells, each is sent through the polynomials in mean value form, rounded outward. `coefficients` is
    one triple (a, b, c), used in every step, or one per step, the last of which is repeated.

    >>> 1.13 < newton_schulz_gain() < 1.21
    True
    """
    table = np.asarray(coefficients, dtype=np.float64)
    table = table[None] if table.ndim == 1 else table
    if table.ndim != 2 or table.shape[1] != 3 or not np.isfinite(table).all() or steps < 1 or cells < 1:
        raise InputError(
            f"expected triples (a, b, c) of finite numbers and at least one step, got {coefficients!r}, {steps}"
        )
    edges = np.linspace(0.0, 1.0, cells + 1)
    low, high = edges[:-1], edges[1:]
    for i in range(steps):
        low, high = _image(low, high, *(float(x) for x in table[min(i, len(table) - 1)]))
    return inflate(float(max(np.abs(low).max(), np.abs(high).max())))


def _image(low: np.ndarray, high: np.ndarray, a: float, b: float, c: float) -> tuple[np.ndarray, np.ndarray]:
    """Enclosure of `p([low, high])`: `p(middle) ± width/2·max|p'|`, with p' over the cell by its extreme terms."""
    middle, half = (low + high) / 2, (high - low) / 2
    square_low = np.where((low <= 0) & (high >= 0), 0.0, np.minimum(low * low, high * high))
    square_high = np.maximum(low * low, high * high)
    slopes = np.stack([a + 3 * b * s + 5 * c * s * s for s in (square_low, square_high)])
    inner = -3 * b / (10 * c) if c else -1.0  # where p' as a function of s² turns
    turn = np.clip(inner, square_low, square_high)
    slope = np.maximum(np.abs(slopes).max(0), np.abs(a + 3 * b * turn + 5 * c * turn * turn))
    size = abs(a) + 3 * abs(b) * square_high + 5 * abs(c) * square_high * square_high
    slope = slope + 1e-14 * size
    value = middle * (a + middle * middle * (b + c * middle * middle))
    reach = half * slope * (1 + 1e-14) + 1e-14 * (np.abs(middle) + half) * size
    return value - reach, value + reach
