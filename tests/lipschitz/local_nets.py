"""Random networks for local bounds: every kind of layer the readers know, and weights chosen to hurt."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

ACTIVATIONS = {
    "relu": nn.ReLU, "leaky": lambda: nn.LeakyReLU(0.2), "steep leaky": lambda: nn.LeakyReLU(1.5), "prelu": nn.PReLU,
    "elu": nn.ELU, "selu": nn.SELU, "celu": lambda: nn.CELU(0.7), "gelu": nn.GELU, "gelu tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU, "mish": nn.Mish, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "softplus": lambda: nn.Softplus(2.0),
    "softsign": nn.Softsign, "logsigmoid": nn.LogSigmoid, "hardtanh": nn.Hardtanh, "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish, "hardsigmoid": nn.Hardsigmoid, "softshrink": nn.Softshrink,
}  # fmt: skip


class Abs(nn.Module):
    def forward(self, x):
        return x.abs()


ACTIVATIONS["abs"] = Abs


class Residual(nn.Module):
    def __init__(self, width, act):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(width, width), act, nn.Linear(width, width)

    def forward(self, x):
        return x + self.b(self.act(self.a(x)))


class Concatenated(nn.Module):
    def __init__(self, width, act):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(width, 3), nn.Linear(width + 3, width), act

    def forward(self, x):
        return self.b(torch.cat([x, self.act(self.a(x))], 1))


class Picture(nn.Module):
    """A small residual convolutional network with batch norm, and max or average pooling."""

    def __init__(self, act, pool):
        super().__init__()
        self.first, self.norm, self.act = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), act
        self.inner, self.pool = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), pool
        self.last = nn.Linear(2 * 4, 3)
        g = torch.Generator().manual_seed(0)
        self.norm.running_mean.copy_(torch.randn(2, generator=g))
        self.norm.running_var.copy_(torch.rand(2, generator=g) + 0.3)

    def forward(self, x):
        x = self.act(self.norm(self.first(x)))
        x = x + F.relu(self.inner(x))
        return self.last(self.pool(x).flatten(1))


#: weights chosen to hurt: what each does to a dense layer
HARM = {
    "plain": lambda layer: None,
    "large": lambda layer: layer.weight.data.mul_(1e8),
    "small": lambda layer: layer.weight.data.mul_(1e-8),
    "twins": lambda layer: layer.weight.data.copy_(layer.weight.data[:1].expand_as(layer.weight)),
    "zero": lambda layer: layer.weight.data.zero_(),
    "dead": lambda layer: layer.bias.data.fill_(-100.0),
    "at the kink": lambda layer: layer.bias.data.zero_(),
}


def random_network(seed):
    """A network with its input shape; every seed another shape, activation, architecture and precision."""
    g = torch.Generator().manual_seed(seed)
    pick = lambda n: int(torch.randint(n, (1,), generator=g))  # noqa: E731
    torch.manual_seed(seed)
    names = list(ACTIVATIONS)
    act = lambda: ACTIVATIONS[names[pick(len(names))] if pick(2) else "relu"]()  # noqa: E731
    kind = pick(5)
    if kind == 0:
        pools = (nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(3, 2, 1))
        net, shape = Picture(act(), pools[pick(3)]), (1, 4, 4)
    else:
        width, depth = 3 + pick(10), 1 + pick(4)
        layers = [nn.Linear(4, width), act()]
        for _ in range(depth):
            layers += [
                nn.Sequential(nn.Linear(width, width), act()),
                Residual(width, act()),
                Concatenated(width, act()),
            ][pick(3) if kind > 2 else 0 : 3][:1]
        net, shape = nn.Sequential(*layers, nn.Linear(width, 3)), (4,)
        harm = HARM[list(HARM)[pick(len(HARM))] if pick(2) else "plain"]
        dense = [m for m in net.modules() if isinstance(m, nn.Linear)]
        harm(dense[pick(len(dense))])
    if pick(2):
        net = net.double()
    return net.eval().requires_grad_(False), shape
