"""Layers that promise a constant, trained for a few steps to break it, then measured in float64."""

import torch
from torch import nn

import equipoise.nn as layers
from equipoise.conversion import export
from equipoise.core.attack import attack
from equipoise.lipschitz import lipschitz_bound
from equipoise.testing.runner import Batch

DENSE = ("SN", "AOL", "SR", "BCOP", "RKO", "SOC", "Cayley", "Bjorck", "Householder", "Sandwich", "SLL", "CPL", "RLB")
CONVOLUTIONS = ("SN", "AOL", "SR", "BCOP", "RKO", "SOC", "Cayley", "Bjorck", "Sandwich", "SLL", "CPL", "RLB")
SQUARE = ("SLL", "CPL", "RLB")


def random_layers(batch: Batch) -> None:
    """One random layer: its bound against the largest stretch that training and attacks reach."""
    torch.manual_seed(batch.integer(0, 2**31))
    dense = batch.choose(True, False)
    name = batch.choose(*(DENSE if dense else CONVOLUTIONS))
    inputs = batch.integer(2, 8)
    outputs = inputs if name in SQUARE else batch.integer(2, 8)
    if dense:
        layer = getattr(layers, f"{name}Linear")(inputs, outputs)
        shape: tuple[int, ...] = (1, inputs)
    else:
        layer = getattr(layers, f"{name}Conv2d")(inputs, outputs, 3, padding=1)
        shape = (1, inputs, 4, 4)
    break_constant(layer, shape, steps=batch.integer(0, 20))
    attack_bound(layer.eval(), shape, batch, f"{batch.label}, {type(layer).__name__}({inputs}, {outputs})")


def break_constant(layer: nn.Module, shape: tuple[int, ...], steps: int) -> None:
    """Gradient ascent on the stretch between two batches, over all parameters of the layer."""
    x, y = torch.randn(8, *shape[1:]), torch.randn(8, *shape[1:])
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(steps):
        change = (layer(x) - layer(y)).flatten(1).norm(dim=1)
        optimizer.zero_grad()
        (-change.log().sum()).backward()
        optimizer.step()


def attack_bound(
    network: nn.Module, shape: tuple[int, ...], batch: Batch, what: str, ball: float | None = None
) -> None:
    """Record `lipschitz_bound` of a network against the stretch that pairs, Jacobians and gradient ascent reach.

    Args:
        network: in evaluation mode.
        shape: of its input, batch of one.
        batch: where the result is counted.
        what: names the network in a message.
        ball: the bound is asked for inputs of at most this norm; None: everywhere.
    """
    upper = float(lipschitz_bound(network, torch.randn(shape), ball=ball).upper)
    # the promise is about the weights as stored, which a copy in float64 would compute anew
    seed = batch.integer(0, 2**31)
    witness = attack(0.0, export(network), torch.zeros(shape), ball=ball, starts=9, steps=12, seed=seed)
    batch.tally.record(None, upper, 0.0 if witness is None else witness.stretch, what)
