"""Layers trained to break their constant, and random networks of ordinary building blocks: their bounds are attacked."""

import torch
from torch import Tensor, nn

import equipoise.nn as layers
from equipoise.certificates import describe
from equipoise.checker.check import Network
from equipoise.conversion import export
from equipoise.lipschitz import lipschitz_bound
from equipoise.lipschitz.attack import attack
from equipoise.testing.runner import Batch

_SQUARE = ("SLL", "CPL")
_KINDS = ("SN", "AOL", "SR", "BCOP", "RKO", "SOC", "Cayley", "Bjorck", "BRO", *_SQUARE)
_POINTWISE = (
    "ReLU", "LeakyReLU", "ELU", "GELU", "SiLU", "Tanh", "Sigmoid", "Softplus", "Hardswish", "Mish", "Softsign", "Hardtanh",
    "Identity", "Dropout",
)  # fmt: skip


def _attack_bound(
    batch: Batch, network: nn.Module, x: Tensor, what: str, ball: float | None = None
) -> float:
    """Record the bound of a network, everywhere or on a ball, against the stretch that gradient ascent on pairs reaches."""
    upper = float(lipschitz_bound(network, x, ball=ball).upper)
    # the promise is about the weights as stored, which a copy in float64 would compute anew
    witness = attack(
        0.0, export(network), x, ball=ball, starts=9, steps=12, seed=batch.integer(0, 2**31)
    )
    stretch = witness.stretch if witness else 0.0
    batch.tally.record(None, upper, stretch, what)
    return stretch


def random_layers(batch: Batch) -> None:
    """One random 1-Lipschitz layer, trained to break its constant: its bound, and that of the independent checker."""
    torch.manual_seed(batch.integer(0, 2**31))
    kind = batch.choose(*_KINDS)
    inputs = batch.integer(2, 8)
    outputs = inputs if kind in _SQUARE else batch.integer(2, 8)
    x, y = torch.randn(2, 8, inputs, 4, 4)
    if batch.choose(True, False):
        layer = getattr(layers, f"{kind}Linear")(inputs, outputs)
        x = x[..., 0, 0]
        y = y[..., 0, 0]
    else:
        layer = getattr(layers, f"{kind}Conv2d")(inputs, outputs, 3, padding=1)

    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, maximize=True)
    for _ in range(batch.integer(0, 20)):
        optimizer.zero_grad()
        (layer(x) - layer(y)).flatten(1).norm(dim=1).log().sum().backward()
        optimizer.step()

    what = f"{batch.label}, {type(layer).__name__}({inputs}, {outputs})"
    stretch = _attack_bound(batch, layer.eval(), x[:1], what)
    # refused: a layer that bundles have no operation for, or a norm that the checker does not prove
    constant = Network(*describe(layer, x[:1])).constant
    batch.tally.record(None, constant, stretch, f"{what}, checker")


def random_networks(batch: Batch) -> None:
    """One random composition: its bound everywhere or on a ball."""
    torch.manual_seed(batch.integer(0, 2**31))
    size = batch.choose(2, 4)
    image = batch.choose(True, False)
    blocks = _image_blocks(size) if image else _vector_blocks(size)
    pointwise = [nn.Softmax(1), *[getattr(nn, name)() for name in _POINTWISE]]
    parts = [batch.choose(*batch.choose(blocks, pointwise)) for _ in range(batch.integer(1, 5))]
    network = nn.Sequential(*parts, nn.Flatten(1))
    for module in network.eval().modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_var = torch.empty(size).uniform_(0.2, 3.0)
            module.running_mean = torch.randn(size)
    x = torch.randn(1, size, *([4, 4] if image else []))
    ball = batch.choose(None, 0.5, 3.0)
    _attack_bound(batch, network, x, f"{batch.label}, ball {ball}: {network}", ball)


def _image_blocks(c: int) -> list[nn.Module]:
    """From c channels of an image to c channels, of any size."""
    return [
        nn.Conv2d(c, c, 3, padding=1),
        nn.Conv2d(c, c, 2, stride=2, padding=1),
        nn.ConvTranspose2d(c, c, 2, stride=2),
        nn.BatchNorm2d(c),
        nn.GroupNorm(1, c),
        nn.AvgPool2d(2, padding=1),
        nn.MaxPool2d(2, padding=1),
        nn.Upsample(scale_factor=2),
        layers.SRConv2d(c, c, 3, padding=1),
        layers.MaxMin(),
    ]


def _vector_blocks(n: int) -> list[nn.Module]:
    """From n numbers to n numbers."""
    return [
        nn.Linear(n, n),
        nn.LayerNorm(n),
        nn.BatchNorm1d(n),
        layers.AOLLinear(n, n),
        layers.SLLLinear(n, n),
        nn.Sequential(nn.Linear(n, 3), nn.Linear(3, n)),
    ]
