"""Compact definitions of the networks an audit meets."""

# ruff: noqa: E501 - a table of networks, one to a line
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random batch-norm statistics and affine parameters, so that nothing is accidentally the identity; evaluation mode."""
    g = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.copy_(torch.randn(module.num_features, generator=g))
            module.running_var.copy_(torch.rand(module.num_features, generator=g) + 0.3)
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.LayerNorm):
            module.weight.data.copy_(torch.rand(module.weight.shape, generator=g) + 0.5)
            module.bias.data.copy_(torch.randn(module.bias.shape, generator=g) * 0.3)
    return model.eval().requires_grad_(False)


class Block(nn.Module):
    """A basic residual block; `shortcut` is identity, projection or A (subsample and pad channels)."""

    def __init__(self, i, o, stride=1, shortcut="identity"):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.bn2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.kind, self.extra = shortcut, o - i
        if shortcut == "projection":
            self.down = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.kind == "projection":
            x = self.down(x)
        elif self.kind == "A":
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))
        return F.relu(x + y, inplace=True)


class DenseBlock(nn.Module):
    def __init__(self, i, growth=3):
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(i), nn.Conv2d(i, growth, 3, padding=1)

    def forward(self, x):
        return torch.cat([x, self.conv(F.relu(self.bn(x)))], 1)


class MixerBlock(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width, eps=0.1), nn.LayerNorm(width, eps=0.1)
        self.t = nn.Sequential(nn.Linear(tokens, 6), nn.GELU(), nn.Linear(6, tokens))
        self.c = nn.Sequential(nn.Linear(width, 6), nn.GELU(), nn.Linear(6, width))

    def forward(self, x):
        x = x + self.t(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.c(self.n2(x))


class Patches(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 4, 4)

    def forward(self, x):
        return self.conv(x).flatten(2).transpose(1, 2)


class Pool(nn.Module):
    def forward(self, x):
        return x.mean(1)


class SqueezeExcite(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, 2, 1), nn.Conv2d(2, c, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.b(F.silu(self.a(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    def __init__(self, c=4, wide=8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c, wide, 1), nn.BatchNorm2d(wide), nn.SiLU(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.BatchNorm2d(wide), nn.SiLU(),
            SqueezeExcite(wide), nn.Conv2d(wide, c, 1), nn.BatchNorm2d(c),
        )  # fmt: skip

    def forward(self, x):
        return x + self.body(x)


class Encoder(nn.Module):
    def __init__(self, width=6, weights=False):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width, eps=0.1), nn.LayerNorm(width, eps=0.1)
        self.attention, self.weights = nn.MultiheadAttention(width, 2, batch_first=True), weights
        self.mlp = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))

    def forward(self, x):
        y = self.n1(x)
        x = x + self.attention(y, y, y, need_weights=self.weights)[0]
        return x + self.mlp(self.n2(x))


class RepVGG(nn.Module):
    def __init__(self, c=3):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.Conv2d(c, c, 1, bias=False)
        self.bn = nn.BatchNorm2d(c)

    def forward(self, x):
        return F.relu(self.a(x) + self.b(x) + self.bn(x))


class Normalised(nn.Module):
    """Input normalisation, then a network."""

    def __init__(self, net):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5, 0.4, 0.3]).reshape(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.25, 0.3]).reshape(1, 3, 1, 1))
        self.net = net

    def forward(self, x):
        return self.net((x - self.mean) / self.std)


class Op(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Twice(nn.Module):
    """One module called twice, and a tuple as output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = torch.tanh(self.layer(x))
        return y, {"again": F.gelu(self.layer(y))}


def hooked():
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    net[0].register_forward_hook(lambda module, args, output: output * 10)
    return net


def head(c, classes=4):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes))


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...], float | None]]:
    torch.manual_seed(0)
    image = (3, 8, 8)
    spectral = nn.utils.parametrizations.spectral_norm
    table = {
        "mlp": (nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3)), (6,), None),
        "gelu mlp": (nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 3)), (6,), None),
        "cnn": (nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ELU(), nn.Conv2d(6, 6, 3, groups=2), nn.Flatten(), nn.LazyLinear(4)), image, None),
        "vgg": (nn.Sequential(nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(32, 10), nn.Dropout(), nn.Linear(10, 4)), image, None),
        "resnet identity": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), Block(4, 4), Block(4, 4), head(4)), image, None),
        "resnet projection": (nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3), nn.MaxPool2d(3, 2, 1), Block(4, 6, 2, "projection"), head(6)), (3, 16, 16), None),
        "resnet option A": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), Block(4, 8, 2, "A"), head(8)), image, None),
        "densenet": (nn.Sequential(DenseBlock(3), DenseBlock(6), nn.Conv2d(9, 4, 1), nn.AvgPool2d(2), head(4)), image, None),
        "mixer": (nn.Sequential(Patches(), MixerBlock(4, 6), Pool(), nn.Linear(6, 3)), image, None),
        "efficientnet": (nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.SiLU(), Inverted(), head(4)), image, 2.0),
        "vit": (nn.Sequential(Patches(), Encoder(), Pool(), nn.Linear(6, 3)), image, 2.0),
        "vit weights": (nn.Sequential(Patches(), Encoder(weights=True), Pool(), nn.Linear(6, 3)), image, None),
        "repvgg": (nn.Sequential(RepVGG(), RepVGG(), head(3)), image, None),
        "normalised": (Normalised(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), head(4))), image, None),
        "reflect": (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU(), head(4)), image, None),
        "bottleneck linear": (nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), head(4)), image, None),
        "hook": (hooked(), (6,), None),
        "parametrised": (nn.Sequential(spectral(nn.Linear(6, 8)), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))), (6,), None),
        "shared, tuple": (Twice(), (6,), None),
        "autoencoder": (nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.Sigmoid()), image, None),
    }  # fmt: skip
    table["cnn"][0](torch.zeros(1, *image))
    return {name: (randomise(net, i), shape, ball) for i, (name, (net, shape, ball)) in enumerate(table.items())}
