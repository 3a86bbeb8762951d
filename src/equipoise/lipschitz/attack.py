"""Pairs of inputs that a network stretches much: attacks on a claimed bound, and lower ends of local Lipschitz constants.

A pair `a ≠ b` of the ball proves `L ≥ ‖f(a) − f(b)‖/‖a − b‖`. Gradients only say where to look: at a kink automatic
differentiation returns a slope that the function may have nowhere, so a Jacobian is never a lower end. What counts are the
values at both inputs, evaluated in float64 with a bound of their rounding, which is subtracted.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import along, flat_outputs, inflate, one_line, require_module

#: outputs of a batch, one row per sample
Function = Callable[[Tensor], Tensor]
#: values of a batch, one row per sample, and a bound of their rounding, entry by entry
Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
Pair = tuple[Tensor, Tensor]

#: distances of the pairs along the direction that stretches most, as shares of the radius
_SHARES = (1.0, 1e-2, 1e-4)


@dataclass(frozen=True)
class Witness:
    """Two inputs (all tensors flat, one after the other) and the ratio of their distances after and before the network."""

    x: Tensor
    y: Tensor
    stretch: float


def attack(
    bound: Any,
    model: nn.Module,
    example_input: Any,
    *,
    ball: float | None = None,
    starts: int = 12,
    steps: int = 30,
    seed: int = 0,
) -> Witness | None:
    """Try to exceed a claimed Lipschitz bound in ℓ2: what to do with an own rule or layer before trusting it.

    A check, not a proof: None means that this attack met nothing. What is attacked is a float64 copy of the network.

    Args:
        bound: a number, or anything with an attribute `upper` (a report, a bracket).
        model: the network that the bound is about, in evaluation mode.
        example_input: one sample with its batch dimension, or a tuple of tensors; only shapes matter.
        ball: the bound holds for inputs of ℓ2 norm at most this; None: everywhere.
        starts: around how many points pairs are searched, near and far.
        steps: of the search around each.
        seed: of the points.

    Returns:
        The pair that exceeds the bound by most, beyond what rounding can explain, or None.

    >>> layer = nn.Linear(3, 3)
    >>> attack(100.0, layer, torch.zeros(1, 3)) is None, attack(1e-3, layer, torch.zeros(1, 3)) is None
    (True, False)
    """
    examples = example_input if isinstance(example_input, tuple | list) else (example_input,)
    network = copy.deepcopy(require_module(model)).double().requires_grad_(False)
    sizes = [x.numel() for x in examples]

    def run(row: Tensor) -> Tensor:
        parts = zip(row.split(sizes), examples, strict=True)
        outputs = flat_outputs(network(*(part.reshape(x.shape).clone() for part, x in parts)))
        return torch.cat([t.flatten() for t in outputs])

    def rows(x: Tensor) -> Tensor:
        return torch.stack([run(row) for row in x])

    generator = torch.Generator().manual_seed(seed)
    best = None
    largest = float(getattr(bound, "upper", bound))
    for start in range(starts):
        x = torch.randn(1, sum(sizes), generator=generator, dtype=torch.float64)
        x = x * (0.1, 1.0, 10.0)[start % 3]
        radius = (1e-3, 0.1, 1.0)[start // 3 % 3]
        if ball is not None:
            radius = min(radius, ball / 2)
            x = project(x, ball - radius)
        with torch.no_grad():
            for a, b in search_pairs(rows, x, radius, steps, seed + start)[0]:
                reached = float(stretch(rows, a, b))
                if reached > largest:
                    largest = reached
                    best = Witness(a[0], b[0], reached)
    return best


def lower_ends(
    f: Function, evaluate: Evaluate, x: Tensor, radius: float, steps: int, seed: int
) -> tuple[Tensor, str]:
    """Proved lower ends on the balls around every sample, and a note where the search failed.

    Args:
        f: the network in float64; its gradients say where to look.
        evaluate: values of the real function with bounds of their rounding.
        x: the centres.
        radius: of the balls, in ℓ2.
        steps: of the search.
        seed: of the starting points.
    """
    x = x.detach().double()
    pairs, note = search_pairs(f, x, radius, steps, seed)
    best = torch.zeros(len(x), dtype=torch.float64)
    with torch.no_grad():
        for a, b in pairs:
            best = torch.maximum(best, proved_stretch(evaluate, x, a, b, radius))
        reached = max(float(stretch(f, a, b).max()) for a, b in pairs)
    if reached and not (best > 0).all():
        note = (
            "no lower end for some inputs: the rounding of the values exceeds their differences, or is not bounded; pairs "
            f"stretch by {reached:.3g} (an estimate)"
        )
    return best, note


def proved_stretch(evaluate: Evaluate, x: Tensor, a: Tensor, b: Tensor, radius: float) -> Tensor:
    """`‖f(a) − f(b)‖/‖a − b‖` per sample, rounded down; 0 for pairs that leave the ball or are too close to tell.

    Args:
        evaluate: values with bounds of their rounding.
        x: centres of the balls.
        a: one input of every pair.
        b: the other.
        radius: of the balls.
    """
    # covers the rounding of norms of up to 10⁶ entries, and of differences of inputs
    slack = 1 + 1e-9
    gap = _length(a - b) * slack
    inside = (_length(a - x) * slack <= radius) & (_length(b - x) * slack <= radius)
    counts = inside & (gap > 1e-140)  # squares may vanish
    (fa, ea), (fb, eb) = evaluate(a), evaluate(b)
    rounding = _length(ea + eb) * slack + 2.0**-52 * (_length(fa) + _length(fb)) + 1e-140
    ratio = (_length(fa - fb) / slack - inflate(rounding)) / gap
    return torch.where(counts & torch.isfinite(ratio), ratio, 0.0).clamp_min(0)


def search_pairs(
    f: Function, x: Tensor, radius: float, steps: int, seed: int
) -> tuple[list[Pair], str]:
    """Pairs that stretch much: along the direction of the largest singular value, and climbed from there by gradients.

    Where the network has no gradient, along random directions; then a note says so.

    Args:
        f: the network.
        x: the centres.
        radius: of the balls.
        steps: of gradient ascent.
        seed: of the starting points.
    """
    generator = torch.Generator().manual_seed(seed)
    start, noise, *directions = torch.randn(
        steps + 2, *x.shape, generator=generator, dtype=torch.float64
    )
    pairs = []
    note = ""
    try:
        direction = _top_direction(f, x, start, steps)
        pairs.append(_climbed(f, x, direction, noise, radius, steps))
        directions = [share * direction for share in _SHARES]
    except Exception as error:  # noqa: BLE001 - an operation may lack a gradient in any way; the upper end holds without
        note = f"the lower end is from random pairs: no gradient ({type(error).__name__}: {one_line(error)})"
        directions = [unit(d) for d in directions]
    offsets = [project(radius * d, radius) for d in directions]
    return [*pairs, *((x + d, x - d) for d in offsets)], note


def _climbed(
    f: Function, x: Tensor, direction: Tensor, noise: Tensor, radius: float, steps: int
) -> Pair:
    """The best pair met by gradient ascent on the stretch."""
    a = project(0.5 * radius * direction, radius)
    moved = torch.cat([a, -a + project(0.1 * radius * unit(noise), radius)])
    centres = torch.cat([x, x])
    best, kept = torch.zeros(len(x), dtype=torch.float64), moved
    for step in range(steps + 1):
        moved = moved.detach().requires_grad_()
        with torch.enable_grad():
            ratio = stretch(f, *(centres + moved).chunk(2))
            (slope,) = torch.autograd.grad(ratio.sum(), moved)
        ratio, moved = ratio.detach(), moved.detach()
        kept = torch.where(along((ratio > best).repeat(2), x), moved, kept)
        best = torch.maximum(best, ratio.nan_to_num(nan=0.0, posinf=0.0))
        size = radius * 0.2 * (1 - step / (steps + 1))
        moved = project(moved + size * unit(slope), radius)
    a, b = (centres + kept).chunk(2)
    return a, b


def _length(v: Tensor) -> Tensor:
    """ℓ2 norm of every sample."""
    return torch.linalg.vector_norm(v.flatten(1), dim=1)


def unit(v: Tensor) -> Tensor:
    """Every sample divided by its norm."""
    return v / along(_length(v).clamp_min(1e-300), v)


def project(d: Tensor, radius: float) -> Tensor:
    """Every sample scaled into the ball, a little inside: adding it to an input rounds.

    Args:
        d: a batch of displacements.
        radius: of the ball around 0, in ℓ2.
    """
    return d * along(radius * (1 - 1e-6) / _length(d).clamp_min(radius), d)


def stretch(f: Function, a: Tensor, b: Tensor) -> Tensor:
    """`‖f(a) − f(b)‖/‖a − b‖` per sample, as evaluated; 0 for pairs too close to tell. Not a proof: see `proved_stretch`.

    Args:
        f: the network on a batch, with outputs of shape (batch, entries).
        a: a batch of inputs.
        b: the other input of every pair.
    """
    fa, fb = f(a), f(b)
    gap = _length(a - b)
    noise = 1e-11 * (fa.detach().abs().amax(1) + fb.detach().abs().amax(1)) * fa.shape[1] ** 0.5
    size = (_length(fa - fb) - noise).clamp_min(0)
    return torch.where(gap > 1e-9, size / gap.clamp_min(1e-9), 0.0)


def _top_direction(f: Function, x: Tensor, v: Tensor, steps: int) -> Tensor:
    """Power iteration on JᵀJ at every sample: a direction to look along, also where the Jacobian at x is no derivative."""
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        out = f(leaf)
        u = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        for _ in range(steps):
            (g,) = torch.autograd.grad(out, leaf, unit(u), retain_graph=True)
            v = torch.where(along(_length(g) > 0, x), g, v)
            with torch.no_grad():
                u = f(x + 1e-6 * unit(v)) - f(x - 1e-6 * unit(v))
    return unit(v)
