"""Training on noisy inputs: augmentation, consistency, smoothed scores; the input-gradient penalty.

With a simplex map τ and M noisy copies, `F̂(x) = mean_i τ(f(x + δ_i))` estimates the smoothed scores, and its gradient
goes through map and temperature. Estimates, not bounds: they are for training; certificates come from `equipoise.smoothing`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core import (
    InputError,
    describe,
    fresh_strides,
    require_counts,
    require_labels,
    require_number,
    require_positive,
    safe_root,
)
from equipoise.nn.losses import margin
from equipoise.smoothing.ramp import ramp_quantile
from equipoise.smoothing.simplex import SimplexMap

Model = nn.Module | Callable[[Tensor], Tensor]


def add_noise(x: Tensor, sigma: float, generator: torch.Generator | None = None) -> Tensor:
    """`x + N(0, σ²I)`: the augmentation under which a base classifier is smoothed (Cohen et al. 2019).

    Args:
        x: a batch of floating-point inputs.
        sigma: noise level.
        generator: source of the draws.

    >>> add_noise(torch.zeros(2, 3), 0.5).shape
    torch.Size([2, 3])
    """
    require_number(sigma, "sigma", least=0)
    return fresh_strides(_batch(x)) + sigma * torch.randn(
        x.shape, generator=generator, dtype=x.dtype, device=x.device
    )


def noisy_copies(
    x: Tensor, sigma: float, copies: int, generator: torch.Generator | None = None
) -> Tensor:
    """`(copies·N, ...)`: the batch `copies` times over, each with its own noise.

    Args:
        x: a batch of floating-point inputs.
        sigma: noise level.
        copies: noisy copies of every input.
        generator: source of the draws.

    >>> noisy_copies(torch.zeros(2, 3), 0.5, copies=4).shape
    torch.Size([8, 3])
    """
    require_counts(copies=copies)
    return add_noise(_batch(x).repeat(copies, *(1,) * (x.dim() - 1)), sigma, generator)


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

    Args:
        model: the network.
        x: a batch of floating-point inputs.
        y: labels.
        sigma: noise level.
        copies: noisy copies of every input.
        weight: factor of the consistency or penalty term.
        entropy: η.
        generator: source of the draws.

    >>> model = nn.Linear(4, 3)
    >>> consistency_loss(model, torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]), sigma=0.25).backward()
    """
    require_number(copies, "copies", least=2, whole=True)
    y = require_labels(y, len(_batch(x)))
    log_p = functional.log_softmax(model(noisy_copies(x, sigma, copies, generator)), dim=1)
    loss = functional.nll_loss(log_p, y.repeat(copies))
    log_p = log_p.reshape(copies, len(x), -1)
    log_mean = log_p.logsumexp(0) - math.log(copies)
    mean = log_mean.exp()
    divergence = (mean * (log_mean - log_p)).sum(-1).mean()
    return loss + weight * divergence - entropy * (mean * log_mean).sum(-1).mean()


def _batch(x: Any) -> Tensor:
    """A batch of floating-point inputs: integers would be rounded with the noise."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0:
        raise InputError(
            f"expected a batch of floating-point inputs (scale images first, x.float() / 255), got {describe(x)}"
        )
    return x


#: scores are kept this far from 0 and 1, where quantiles and logarithms are infinite
EDGE = 1e-4


def smoothed_scores(
    model: Model,
    x: Tensor,
    sigma: float,
    map: SimplexMap,
    copies: int,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """`mean_i τ(f(x + δ_i))` over noisy copies (N, c), and the logits of the first copy.

    Args:
        model: the network.
        x: a batch of floating-point inputs.
        sigma: noise level.
        map: from logits to the simplex.
        copies: noisy copies of every input.
        generator: source of the draws.

    >>> scores, _ = smoothed_scores(torch.nn.Linear(4, 3), torch.randn(5, 4), 0.25, SimplexMap("softmax"), copies=4)
    >>> bool((scores.sum(1) - 1).abs().max() < 1e-5)
    True
    """
    logits = model(noisy_copies(x, sigma, copies, generator)).reshape(copies, len(x), -1)
    return map(logits).mean(0), logits[0]


def soft_vote_loss(scores: Tensor, y: Tensor) -> Tensor:
    """`−log F̂_y`: the likelihood of the soft vote, not of single noisy copies.

    Args:
        scores: smoothed scores (N, c).
        y: labels.

    >>> round(float(soft_vote_loss(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))), 4)
    0.6931
    """
    return functional.nll_loss(scores.clamp_min(EDGE).log(), y)


class _Quantile(torch.autograd.Function):
    """`H_a⁻¹(p)` of `smoothing.ramp`, with slope `1/H_a'`: H_a' = (Φ(t + a/2) − Φ(t − a/2))/a."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, width: float) -> Tensor:
        low, up = ramp_quantile(p.detach().double().cpu().numpy(), width)
        t = torch.from_numpy(np.asarray((low + up) / 2)).to(p)
        ctx.save_for_backward(t)
        ctx.width = width
        return t

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (t,) = ctx.saved_tensors
        a = ctx.width
        slope = (torch.special.ndtr(t + a / 2) - torch.special.ndtr(t - a / 2)) / a
        return grad / slope.clamp_min(1e-6), None


def expected_radius(scores: Tensor, y: Tensor, sigma: float, lipschitz: float) -> Tensor:
    """`½(ψ(F̂_y) − max_k ψ(F̂_k))` (N,), differentiable: the Lipschitz-aware radius R_multiLip if the scores were exact.

    Negative where another class leads. An estimate: nothing is certified by it.

    Args:
        scores: smoothed scores (N, c) in [0, 1].
        y: labels (N,).
        sigma: noise level.
        lipschitz: of every component of `τ∘f` (`SimplexMap.component_lipschitz`).

    >>> round(float(expected_radius(torch.tensor([[0.9, 0.1]]), torch.tensor([0]), 0.5, 1.0)), 4)
    0.7431
    """
    require_positive(sigma=sigma, lipschitz=lipschitz)
    t = _Quantile.apply(scores.clamp(EDGE, 1 - EDGE), 1 / (lipschitz * sigma))
    return 0.5 * sigma * margin(t, y)


def input_gradient_penalty(
    model: Model,
    x: Tensor,
    y: Tensor | None = None,
    *,
    target: float = 0.0,
    two_sided: bool = False,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    weight: float = 1.0,
) -> Tensor:
    """`weight · mean_i max(‖∇_x g(x_i)‖₂ − γ, 0)²`, two-sided `weight · mean_i (‖∇_x g(x_i)‖₂ − γ)²`, with γ = `target`.

    g is the loss of each sample at its label `y`; without `y` the model's output, which must then be one number per sample (a
    critic). γ = 0 is double back-propagation, γ = 1 two-sided the WGAN penalty. It measures the slope at the data only: no
    bound of the Lipschitz constant. In training mode samples should not see each other: batch normalisation mixes them.

    References: Drucker and Le Cun 1991; Gulrajani et al. 2017; Petzka et al. 2018 (one-sided).

    Args:
        model: the network.
        x: a batch of floating-point inputs.
        y: labels.
        target: γ.
        two_sided: whether slopes below γ count too.
        loss: a mean over the samples.
        weight: factor of the consistency or penalty term.

    >>> critic = nn.Linear(2, 1, bias=False)
    >>> _ = critic.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> round(input_gradient_penalty(critic, torch.zeros(5, 2), target=1.0).item(), 4)
    16.0
    """
    require_number(target, "target", least=0)
    require_number(weight, "weight", least=0)
    with torch.enable_grad():
        x = fresh_strides(_batch(x).detach()).requires_grad_()
        output = model(x)
        if y is None:
            if output.numel() != len(x):
                raise InputError(
                    f"without labels the model must give one number per sample, got {tuple(output.shape)} for {len(x)} samples"
                )
            total = output.sum()
        else:
            # the loss is a mean over samples: the sum has the samples' own gradients
            total = loss(output, y) * len(x)
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        excess = safe_root(slope.flatten(1).square().sum(1)) - target
        if not two_sided:
            excess = excess.clamp_min(0)
        return weight * excess.square().mean()


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """While inside, batch normalisation normalises by the batch but does not move its running statistics.

    For the second pass of SAM (`pytorch_optimizer.SAM`).

    >>> model = nn.BatchNorm1d(2)
    >>> with frozen_statistics(model):
    ...     _ = model(torch.randn(8, 2))
    >>> int(model.num_batches_tracked)
    0
    """
    parts: Iterator[Any] = model.modules()
    tracked = [m for m in parts if m.training and getattr(m, "track_running_stats", False) is True]
    for module in tracked:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in tracked:
            module.track_running_stats = True
