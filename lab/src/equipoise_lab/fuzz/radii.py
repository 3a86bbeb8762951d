"""Certified radii and verdicts of random networks, attacked: no input of another class may be nearer than what was proved."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.testing.runner import Batch

#: starting points for each rival, and gradient steps
STARTS, STEPS = 6, 60
#: a margin counts as broken where it is negative by more than float64 rounds, relative to the logits
ROUNDING = 1e-9
#: attacks search balls of these sizes, as multiples of the radius that was proved
REACHES = (1.0, 1.5)

_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU)
_ORDERS = {"l2": 2.0, "linf": math.inf, "l1": 1.0}


def random_network(batch: Batch) -> tuple[nn.Module, Tensor]:
    """A dense or convolutional network in evaluation mode, and an input.

    Args:
        batch: with the generator.
    """
    torch.manual_seed(batch.integer(0, 2**31))
    activation = batch.choose(*_ACTIVATIONS)
    classes, width = batch.integer(2, 5), batch.integer(3, 24)
    if batch.integer(0, 3) == 0:
        channels = batch.integer(1, 4)
        conv = nn.Conv2d(1, channels, 3, stride=batch.integer(1, 2), padding=batch.integer(0, 1))
        x = torch.randn(1, 1, 6, 6)
        hidden = conv(x).numel()
        layers = [conv, activation(), nn.Flatten(), nn.Linear(hidden, width), activation()]
        return nn.Sequential(*layers, nn.Linear(width, classes)).eval(), x
    inputs = batch.integer(2, 12)
    sizes = [inputs, *([width] * batch.integer(1, 4))]
    layers = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    net = nn.Sequential(*layers, nn.Linear(width, classes)).eval()
    for parameter in net.parameters():
        parameter.data *= batch.choose(1.0, 2.0)
    return net, torch.randn(1, inputs)


def nearest_break(net: nn.Module, x: Tensor, label: int, norm: str, radius: float) -> float:
    """The distance of the nearest input within `radius` that an attack gives another label; infinite where it meets none.

    Args:
        net: the network.
        x: a batch of one input.
        label: its class.
        norm: of the ball.
        radius: of the ball.
    """
    net, order = net.double(), _ORDERS[norm]
    centre = x.double().flatten(1)
    rivals = [k for k in range(net(x.double()).shape[1]) if k != label]
    target = torch.tensor(rivals).repeat_interleave(STARTS)
    moved = _along(torch.randn(len(target), centre.shape[1], dtype=torch.float64), norm) * radius
    moved *= torch.rand(len(target), 1, dtype=torch.float64)
    nearest = math.inf
    for step in range(STEPS):
        moved = moved.detach().requires_grad_()
        with torch.enable_grad():
            values = net((centre + moved).reshape(-1, *x.shape[1:]))
            margins = values[:, label] - values.gather(1, target[:, None])[:, 0]
            (slope,) = torch.autograd.grad(margins.sum(), moved)
        moved = moved.detach()
        size = torch.linalg.vector_norm(moved, order, dim=1)
        broken = margins.detach() < -ROUNDING * values.detach().abs().amax(1)
        nearest = min([nearest, *size[broken & (size <= radius)].tolist()])
        moved = moved - 0.3 * (1 - step / STEPS) * radius * _along(slope, norm)
        size = torch.linalg.vector_norm(moved, order, dim=1, keepdim=True)
        moved = moved * (radius * (1 - 1e-12) / size.clamp_min(radius))
    net.float()
    return nearest


def _along(v: Tensor, norm: str) -> Tensor:
    """Every row's direction of steepest ascent, of size 1 in the norm."""
    if norm == "linf":
        return v.sign()
    if norm == "l1":
        return nn.functional.one_hot(v.abs().argmax(1), v.shape[1]) * v.sign()
    return v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(1e-300)


def attacked_radii(batch: Batch) -> None:
    """A radius and a verdict on one random network: inputs of another class that attacks meet lie beyond what was proved."""
    net, x = random_network(batch)
    norm = batch.choose("l2", "linf", "l1")
    radii = eq.certified_radius(net, x, norm=norm)
    radius, label = float(radii.radius), int(radii.labels)
    what = f"{batch.label}: {norm}, by {radii.methods[0]}"
    if not 0 < radius < 1e6:
        batch.tally.refused += 1
        return
    broken = [nearest_break(net, x, label, norm, radius * reach) for reach in REACHES]
    batch.tally.record(radius, math.inf, min(broken), what)

    asked = radius * batch.choose(1.05, 1.3)
    answer = eq.certified_radius(net, x, norm=norm, epsilon=asked, complete=True, seconds=1.0)
    if answer.verdicts[0] == "proved":
        batch.tally.record(asked, math.inf, nearest_break(net, x, label, norm, asked), what)
    for point in answer.broken.values():
        distance = float(torch.linalg.vector_norm((point - x[0]).double().flatten(), _ORDERS[norm]))
        values = net.double()(point[None].double())[0].detach()
        net.float()
        other = int(values.argmax())
        tie = float(values[label] - values.topk(2).values.min()) <= 0
        inside = distance <= asked * (1 + 1e-12) and (other != label or tie)
        # a claim to have broken the network that is wrong counts as a violation
        batch.tally.record(0.0 if inside else math.inf, math.inf, 1.0, f"{what}, broken at {asked}")
