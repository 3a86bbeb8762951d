"""Attacks: certificates seen from the other side. An attack that succeeds inside a certified radius is a bug.

Projected gradient attacks in the ℓ2, ℓ∞ or ℓ1 ball on a network, in the ℓ2 ball on its smoothed version. The ball is kept in
float64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core import (
    InputError,
    along,
    describe,
    explained,
    fresh_strides,
    guarded,
    or_one,
    require_images,
    require_labels,
    require_one_of,
    require_type,
)
from equipoise.smoothing import SimplexMap, SmoothedClassifier, Stream, empirical_bernstein
from equipoise.smoothing.simplex import apply_map

__all__ = ["AttackResult", "pgd", "smooth_pgd"]

Norm = Literal["l2", "linf", "l1"]
_ORDER = {"l2": 2.0, "linf": math.inf, "l1": 1.0}


def unit(g: Tensor, norm: Norm = "l2") -> Tensor:
    """The direction of a step, of norm 1 in the norm of the ball, in float64; gradients that are not finite count as 0.

    `g/‖g‖₂` per input; in ℓ∞ the signs of g; in ℓ1 the signs of its largest hundredth (Tramèr and Boneh 2019).

    Args:
        g: gradients (N, ...).
        norm: of the ball that the step is taken in.

    >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).round(decimals=6).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    g = torch.nan_to_num(g.double(), 0.0, 0.0, 0.0)
    if norm == "linf":
        return g.sign()
    if norm == "l1":
        sizes = g.flatten(1).abs()
        least = sizes.topk(max(1, sizes.shape[1] // 100)).values[:, -1]
        g = torch.where(g.abs() >= along(least, g), g.sign(), 0.0)
    length = _length(g, norm)
    return g / along(or_one(length), g)


def _length(delta: Tensor, norm: Norm) -> Tensor:
    """The norm of every perturbation (N,)."""
    return torch.linalg.vector_norm(delta.flatten(1), ord=_ORDER[norm], dim=1)


def _nearest(delta: Tensor, radius: Tensor, norm: Norm) -> Tensor:
    """Perturbations of at most this size, up to rounding: entries are clipped in ℓ∞, the whole is scaled elsewhere."""
    if norm == "linf":
        limit = along(radius, delta)
        return delta.clamp(-limit, limit)
    scale = radius / _length(delta, norm).clamp(min=1e-300)
    return delta * along(scale.clamp(max=1.0), delta)


def inside_ball(x: Tensor, z: Tensor, radius: Tensor, norm: Norm = "l2") -> Tensor:
    """Project the float64 point z on the ball around x, in the dtype of x: `‖z − x‖ ≤ radius` for what is returned.

    Rounding to x's dtype may step over the sphere, so the perturbation is shrunk until the float64 norm of the stored
    difference, enlarged by its own rounding, is within the radius; if that fails, the point is x itself.

    Args:
        x: the centres (N, ...).
        z: points in float64, of the same shape.
        radius: of every ball (N,), in float64.
        norm: of the balls.

    >>> x = torch.zeros(1, 3)
    >>> z = inside_ball(x, torch.full((1, 3), 5.0, dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64))
    >>> bool((z.double() - x.double()).norm() <= 1.0), bool(z.norm() > 0.9999)
    (True, True)
    """
    centre = x.double()
    delta = _nearest(z - centre, radius, norm)
    rounding = 1 + (delta[0].numel() + 4) * 2.0**-52
    scale = torch.ones_like(radius)
    for attempt in range(12):
        stored = (centre + along(scale, x) * delta).to(x.dtype)
        outside = _length(stored.double() - centre, norm) * rounding > radius
        if not outside.any():
            return stored
        scale = torch.where(outside, scale * (1 - 1e-7 * 4.0**attempt), scale).clamp(min=0.0)
    return torch.where(along(outside, x), x, stored)


@dataclass(frozen=True)
class AttackResult:
    """The result of an attack: `‖adversarial − x‖ ≤ epsilon` holds in float64 for the tensors as stored.

    `success` says where the answer at `adversarial` is not the label; where it failed, `adversarial` is the point of
    largest loss. `distance` is the float64 norm of the perturbation.
    """

    adversarial: Tensor
    success: Tensor
    distance: Tensor


def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    epsilon: float | Tensor,
    steps: int = 40,
    restarts: int = 1,
    *,
    norm: Norm = "l2",
    seed: int = 0,
) -> AttackResult:
    """Projected gradient ascent of the cross-entropy, batched, best of several random starts.

    `δ₀ = ε·u`, u a random direction; `δ ← δ + α·g/‖g‖₂`, α = 2.5·ε/steps (in ℓ∞ and ℓ1: `unit`), then δ is projected on the
    ball. Every iterate is looked at, not only the last one, and a start that has succeeded is kept. Reference: Madry et al.
    (2018); thesis, algorithm of the ℓ2 attack.

    Args:
        model: in evaluation mode (the mode is left as it is); gradients of its parameters are not touched.
        x: inputs (N, ...).
        y: the answers to break (N,): labels, or the model's own predictions.
        epsilon: radius, one for all or (N,).
        steps: gradient steps per start.
        restarts: number of random starts.
        norm: of the ball and of the distances: `l2`, `linf` or `l1`.
        seed: of the starts.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.eye(2))
    >>> x, y = torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 0])
    >>> result = pgd(model, x, y, epsilon=1.0, steps=20)  # the boundary is at distance 1/√2 and 3/√2
    >>> result.success.tolist()
    [True, False]
    """
    require_one_of(tuple(_ORDER), norm=norm)
    y = checked_labels(x, y)

    def loss(z: Tensor) -> Tensor:
        return functional.cross_entropy(checked_logits(model, z, y), y, reduction="none")

    def broken(z: Tensor) -> Tensor:
        return checked_logits(model, z).argmax(dim=1) != y

    return _ascend(loss, broken, x, epsilon, steps, restarts, seed, norm=norm)


def smooth_pgd(
    classifier: SmoothedClassifier,
    x: Tensor,
    y: Tensor,
    epsilon: float | Tensor,
    steps: int = 20,
    restarts: int = 1,
    *,
    draws: int = 16,
    check_draws: int = 1000,
    alpha: float = 1e-3,
    seed: int = 0,
) -> AttackResult:
    """The same on the smoothed classifier: ascend `−ln (1/M)Σ τ_y(f(x + δ + η_i))` over fresh noise η in every step.

    The hardmax has no gradient, so its votes pass softmax's (straight-through). Success is decided on the last iterate of
    each start, on `check_draws` fresh draws of the classifier's own map: a binomial test of the votes, or for soft scores
    an interval of each margin. "Success" is wrong with probability at most alpha; an undecided test is no success.
    Reference: Salman et al. (2019), SmoothAdv.

    Args:
        classifier: its noise, map and network are attacked.
        x: inputs (N, ...).
        y: the answers to break (N,).
        epsilon: radius, one for all or (N,).
        steps: gradient steps per start.
        restarts: number of random starts.
        draws: M, noise per step.
        check_draws: fresh draws that decide about success.
        alpha: risk of a wrong "success".
        seed: of starts and noise.
    """
    require_type(classifier, SmoothedClassifier, "classifier")
    y = checked_labels(x, y)
    generator = torch.Generator(device=x.device).manual_seed(seed + 1)
    simplex = classifier.map or SimplexMap("hardmax")

    def loss(z: Tensor) -> Tensor:
        total = torch.zeros(len(z), dtype=z.dtype, device=z.device)
        scale = classifier.levels.scale(z[0])
        for _ in range(draws):
            noise = torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device)
            votes = soft_votes(checked_logits(classifier.model, z + scale * noise, y), simplex)
            total = total + votes.gather(1, y[:, None])[:, 0]
        return -(total / draws).clamp(min=1e-12).log()

    voter = classifier.like(SmoothedClassifier, seed=seed + 2)
    voter.noise_spec(x)  # fixes the law of the noise by the inputs, not by the attacked points

    def broken(z: Tensor) -> Tensor:
        return misclassified(voter, z, y, check_draws, alpha)

    def finish(z: Tensor) -> Tensor:
        """On the grid of the classifier, if it lives on one; rounded towards x so as to stay in the ball."""
        cells = voter.cells
        if cells is None:
            return z
        moved = ((z.double() - x.double()) * cells).trunc()
        return (((x.double() * cells).round() + moved).to(x.dtype) / cells).to(x.dtype)

    return _ascend(loss, broken, x, epsilon, steps, restarts, seed, finish)


def misclassified(
    classifier: SmoothedClassifier, x: Tensor, y: Tensor, draws: int, alpha: float
) -> Tensor:
    """Where the smoothed classifier answers with another class than y, shown at level alpha.

    Votes: a binomial test of the two largest counts. Soft scores: some class's score is above that of y, shown by an interval
    of each margin.

    Args:
        classifier: its noise and map.
        x: inputs (N, ...).
        y: labels (N,).
        draws: per input.
        alpha: risk of a wrong "misclassified", per input.
    """
    simplex = classifier.map or SimplexMap("hardmax")
    if simplex.votes:
        answer = torch.from_numpy(classifier.predict(x, draws, alpha)).to(y.device)
        return (answer >= 0) & (answer != y)
    scores = apply_map(simplex, classifier.selection(x, draws, None, Stream.PREDICTION))
    own = np.take_along_axis(scores, y.cpu().numpy()[:, None, None], axis=2)
    margin = (1 + scores - own) / 2  # above ½ on average: the class has overtaken y
    risk = alpha / (scores.shape[2] - 1)
    low = empirical_bernstein(
        margin.mean(axis=1).clip(0, 1), margin.var(axis=1, ddof=1), draws, risk, "lower"
    )
    return torch.from_numpy((low > 0.5).any(axis=1)).to(y.device)


def soft_votes(logits: Tensor, simplex: SimplexMap) -> Tensor:
    """Scores of the map; for the hardmax its votes forward and the softmax's gradient backward.

    Args:
        logits: (N, classes).
        simplex: the map.

    >>> z = torch.tensor([[2.0, 0.0]], requires_grad=True)
    >>> votes = soft_votes(z, SimplexMap("hardmax"))
    >>> votes.tolist(), torch.autograd.grad(votes[0, 0], z)[0].abs().sum().item() > 0
    ([[1.0, 0.0]], True)
    """
    scores = simplex(logits) / simplex.mass
    soft = torch.softmax(logits, dim=-1)
    return scores + soft - soft.detach() if simplex.votes else scores


def _ascend(
    loss: Callable[[Tensor], Tensor],
    broken: Callable[[Tensor], Tensor],
    x: Tensor,
    epsilon: float | Tensor,
    steps: int,
    restarts: int,
    seed: int,
    finish: Callable[[Tensor], Tensor] | None = None,
    norm: Norm = "l2",
) -> AttackResult:
    """Gradient ascent of the loss from random starts in the ball; `broken` decides which points count as successes.

    Args:
        loss: per input, differentiable.
        broken: where the answer is not the label.
        x: the inputs.
        epsilon: radius, one or one per input.
        steps: per start.
        restarts: number of starts.
        seed: of the starts.
        finish: applied to the last iterate, which alone is judged; by default every iterate is judged as it is.
        norm: of the balls.
    """
    x = fresh_strides(x)
    radius = checked_radius(x, epsilon)
    if steps < 1 or restarts < 1:
        raise InputError(f"need at least one step and one start, got {steps} and {restarts}")
    length = 2.5 * radius / steps
    generator = torch.Generator(device=x.device).manual_seed(seed)
    best = x.clone()
    value = torch.full_like(radius, -torch.inf)
    success = torch.zeros_like(radius, dtype=torch.bool)

    @torch.no_grad()
    def keep(z: Tensor, score: Tensor, judge: bool) -> None:
        """Keep the point of every input that succeeds first, until then the one of largest loss.

        Args:
            z: the points.
            score: their losses.
            judge: whether success is decided.
        """
        nonlocal best, value, success
        hit = broken(z) if judge else torch.zeros_like(success)
        better = ~success & (hit | (score > value))
        best = torch.where(along(better, x), z, best)
        value = torch.where(better, score, value)
        success = success | hit

    for _ in range(restarts):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64, device=x.device)
        z = inside_ball(x, x.double() + along(radius, x) * unit(noise, norm), radius, norm)
        for _ in range(steps):
            moving = fresh_strides(z.detach()).requires_grad_(True)
            score = loss(moving)
            (gradient,) = torch.autograd.grad(score.sum(), moving)
            keep(z, score.detach().double(), finish is None)
            z = inside_ball(x, z.double() + along(length, x) * unit(gradient, norm), radius, norm)
        z = z if finish is None else finish(z)
        with torch.no_grad():
            score = loss(z).double()
        keep(z, score, True)
        if success.all():
            break
    distance = _length(best.double() - x.double(), norm)
    return AttackResult(best, success & (distance <= radius), distance)


def checked_labels(x: Tensor, y: Tensor) -> Tensor:
    """The labels as int64; inputs and labels that do not belong together are refused.

    Args:
        x: inputs (N, ...).
        y: labels (N,).
    """
    return require_labels(y, len(require_images(x)))


def checked_logits(model: nn.Module, z: Tensor, y: Tensor | None = None) -> Tensor:
    """The model's logits at z; a shape it does not take and a label it has no logit for are refused.

    Args:
        model: the network.
        z: inputs (N, ...).
        y: labels, if they are to be checked.
    """
    logits = guarded(lambda: model(z), f"the model on inputs of shape {tuple(z.shape)}")
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(z):
        raise InputError(
            f"expected logits of shape ({len(z)}, classes) from the model, got {describe(logits)}"
        )
    if y is not None:
        require_labels(y, len(z), logits.shape[1])
    return logits


def checked_radius(x: Tensor, epsilon: float | Tensor) -> Tensor:
    """The radius of every input; what is no number, negative or not finite is refused.

    Args:
        x: inputs (N, ...).
        epsilon: one radius, or one for every input.
    """
    wanted = f"epsilon is one number, or one for each of the {len(x)} inputs"
    with explained(f"{wanted}; got {describe(epsilon)}"):
        radius = torch.as_tensor(epsilon, dtype=torch.float64, device=x.device)
        radius = radius.broadcast_to(len(x)).clone()
    if not (torch.isfinite(radius) & (radius >= 0)).all():
        raise InputError("epsilon must be finite and non-negative")
    return radius
