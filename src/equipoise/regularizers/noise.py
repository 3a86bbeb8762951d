"""Training on noisy inputs: Gaussian augmentation, consistency, and adversarial training of the smoothed classifier."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.errors import InputError
from equipoise.core.modules import fresh_strides

Model = nn.Module | Callable[[Tensor], Tensor]


def add_noise(x: Tensor, sigma: float, generator: torch.Generator | None = None) -> Tensor:
    """`x + N(0, σ²I)`: the augmentation under which a base classifier is smoothed (Cohen et al. 2019).

    >>> add_noise(torch.zeros(2, 3), 0.5).shape
    torch.Size([2, 3])
    """
    _check_sigma(sigma)
    return fresh_strides(x) + sigma * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)


def noisy_copies(x: Tensor, sigma: float, copies: int, generator: torch.Generator | None = None) -> Tensor:
    """`(copies·N, ...)`: the batch `copies` times over, each with its own noise.

    >>> noisy_copies(torch.zeros(2, 3), 0.5, copies=4).shape
    torch.Size([8, 3])
    """
    if copies < 1:
        raise InputError(f"copies must be at least 1, got {copies}")
    return add_noise(x.repeat(copies, *(1,) * (x.dim() - 1)), sigma, generator)


def consistency_loss(
    model: Model,
    x: Tensor,
    y: Tensor,
    sigma: float,
    *,
    copies: int = 2,
    weight: float = 10.0,
    entropy: float = 0.5,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Cross-entropy on noisy copies plus a pull of their predictions to their mean (Jeong and Shin 2020):

    `mean_i CE(F(x+δ_i), y) + λ·mean_i KL(F̂ ‖ F(x+δ_i)) + η·H(F̂)` with `F̂ = mean_i F(x+δ_i)`, λ = `weight`, η = `entropy`.

    >>> model = nn.Linear(4, 3)
    >>> consistency_loss(model, torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]), sigma=0.25).backward()
    """
    if copies < 2:
        raise InputError(f"consistency compares at least 2 noisy copies, got {copies}")
    log_p = functional.log_softmax(model(noisy_copies(x, sigma, copies, generator)), dim=1)
    loss = functional.nll_loss(log_p, y.repeat(copies))
    log_p = log_p.reshape(copies, len(x), -1)
    log_mean = log_p.logsumexp(0) - math.log(copies)
    mean = log_mean.exp()
    divergence = (mean * (log_mean - log_p)).sum(-1).mean()
    return loss + weight * divergence - entropy * (mean * log_mean).sum(-1).mean()


def smooth_adversarial(
    model: Model,
    x: Tensor,
    y: Tensor,
    sigma: float,
    epsilon: float,
    *,
    steps: int = 2,
    copies: int = 2,
    step_size: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Noisy copies of adversarial examples of the *smoothed* classifier, `(copies·N, ...)`, and their labels (SmoothAdv, Salman
    et al. 2019).

    `x' = argmax_{‖x' − x‖₂ ≤ ε} −log mean_i F_y(x' + δ_i)` by projected gradient ascent; the same noise δ_i is used for the
    ascent and for the training step that follows. The model's mode and the gradients of its parameters are left as they are.

    >>> model = nn.Linear(4, 3)
    >>> noisy, labels = smooth_adversarial(model, torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]), sigma=0.25, epsilon=0.5)
    >>> functional.cross_entropy(model(noisy), labels).backward()
    """
    _check_sigma(sigma)
    if not (math.isfinite(epsilon) and epsilon >= 0) or steps < 1:
        raise InputError(f"expected epsilon ≥ 0 and steps ≥ 1, got {epsilon} and {steps}")
    x = fresh_strides(x.detach())
    many = x.repeat(copies, *(1,) * (x.dim() - 1))
    noise = sigma * torch.randn(many.shape, generator=generator, dtype=x.dtype, device=x.device)
    step = 2 * epsilon / steps if step_size is None else step_size
    delta = torch.zeros_like(x)
    for _ in range(steps):
        with torch.enable_grad():
            delta.requires_grad_()
            log_p = functional.log_softmax(model(many + delta.repeat(copies, *(1,) * (x.dim() - 1)) + noise), dim=1)
            soft = log_p.reshape(copies, len(x), -1).logsumexp(0)
            (slope,) = torch.autograd.grad(functional.nll_loss(soft, y, reduction="sum"), delta)
        delta = _into_ball((delta + step * _unit(slope)).detach(), epsilon)
    return (many + delta.repeat(copies, *(1,) * (x.dim() - 1)) + noise).detach(), y.repeat(copies)


def _unit(v: Tensor) -> Tensor:
    return v / _norms(v).clamp_min(torch.finfo(v.dtype).tiny)


def _into_ball(v: Tensor, radius: float) -> Tensor:
    return v * (radius / _norms(v).clamp_min(torch.finfo(v.dtype).tiny)).clamp_max(1)


def _norms(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v.flatten(1), dim=1).reshape(-1, *(1,) * (v.dim() - 1))


def _check_sigma(sigma: float) -> None:
    if not (math.isfinite(sigma) and sigma >= 0):
        raise InputError(f"sigma must be a non-negative number, got {sigma}")
