"""Attack a claimed Lipschitz bound: pairs of inputs that climb their own stretch, in float64."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.checks import require_module
from equipoise.core.modules import flat_tensors

#: what rounding may add to a difference of outputs, relative to the outputs
ROUNDING = 1e-12


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

    A check, not a proof: None means that this attack found nothing. What is attacked is a float64 copy of the network.

    Args:
        bound: a number, or anything with an attribute `upper` (a report, a bracket).
        model: the network that the bound is about, in evaluation mode.
        example_input: one sample with its batch dimension, or a tuple of tensors; only shapes matter.
        ball: the bound holds for inputs of ℓ2 norm at most this; None: everywhere.
        starts: how many pairs are drawn, near and far.
        steps: of gradient ascent from each.
        seed: of the pairs.

    Returns:
        The pair that exceeds the bound by most, beyond what rounding can explain, or None.

    >>> layer = nn.Linear(3, 3)
    >>> attack(100.0, layer, torch.zeros(1, 3)) is None, attack(1e-3, layer, torch.zeros(1, 3)) is None
    (True, False)
    """
    examples = example_input if isinstance(example_input, tuple | list) else (example_input,)
    network = copy.deepcopy(require_module(model)).double().requires_grad_(False)
    sizes = [x.numel() for x in examples]
    limit = math.inf if ball is None else ball * (1 - 1e-12)

    def inside(row: Tensor) -> Tensor:
        return row * min(1.0, limit / max(float(row.detach().norm()), 1e-300))

    def run(row: Tensor) -> Tensor:
        parts = zip(row.split(sizes), examples, strict=True)
        outputs = flat_tensors(network(*(part.reshape(x.shape).clone() for part, x in parts)))
        return torch.cat([t.flatten() for t in outputs if t.is_floating_point()])

    generator = torch.Generator().manual_seed(seed)
    best = None
    largest = float(getattr(bound, "upper", bound))
    for start in range(starts):
        x, offset = torch.randn(2, sum(sizes), generator=generator, dtype=torch.float64)
        x = x * (0.1, 1.0, 10.0)[start % 3]
        pair = torch.stack([x, x + offset * (1e-3, 0.1, 1.0)[start // 3 % 3]]).requires_grad_()
        optimizer = torch.optim.Adam([pair], lr=0.05)
        for _ in range(steps):
            a, b = inside(pair[0]), inside(pair[1])
            try:
                first, second = run(a), run(b)
                change = (first - second).norm()
                gap = (a - b).norm()
                rounding = ROUNDING * float(first.detach().norm() + second.detach().norm())
                stretch = (float(change.detach()) - rounding) / max(float(gap.detach()), 1e-300)
                if stretch > largest:
                    largest = stretch
                    best = Witness(a.detach(), b.detach(), stretch)
                optimizer.zero_grad()
                (gap.clamp_min(1e-9).log() - change.clamp_min(1e-30).log()).backward()
            except RuntimeError:  # an operation without a gradient, or one overwritten in place
                break
            if pair.grad is None or not bool(torch.isfinite(pair.grad).all()):
                break
            optimizer.step()
    return best
