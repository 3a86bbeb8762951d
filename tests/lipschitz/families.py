"""One small network per family: what the table of families in the docs says is tried on these."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from equipoise import nn as own


class Op(nn.Module):
    """A function of the input, with modules that it uses."""

    def __init__(self, function, **modules):
        super().__init__()
        self.parts = nn.ModuleDict(modules)
        self.function = function

    def forward(self, x):
        return self.function(self.parts, x)


def _residual(m, x):
    return x + m["b"](F.relu(m["n"](m["a"](x))))


def _u_net(m, x):
    low = F.max_pool2d(m["a"](x), 2)
    return m["b"](torch.cat([F.interpolate(F.relu(low), scale_factor=2), x], 1))


def _attention(norm):
    def run(m, x):
        y = norm(x)
        return F.scaled_dot_product_attention(m["q"](y), m["k"](y), m["v"](y))

    return run


def _attends():
    return {name: nn.Linear(4, 4) for name in "qkv"}


def _rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2)


def _operator(m, x):
    z = torch.fft.rfft(x)
    return torch.fft.irfft(z * torch.tensor([1.0, 0.5, 0.25, 0.0]), n=6) + x


def _coupling(m, x):
    a, b = x.chunk(2, 1)
    return torch.cat([a, b * torch.exp(torch.tanh(m["s"](a)))], 1)


def _mixture(m, x):
    weights = torch.softmax(m["g"](x), -1)
    return weights[:, :1] * m["a"](x) + weights[:, 1:] * m["b"](x)


ADJACENCY = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.5, 0.5]])
IMAGE = (2, 8, 8)
torch.manual_seed(0)
# family: (network, shape of a sample, ball it needs or None)
BOUNDED = {
    "dense networks": (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (4,), None),
    "convolutional networks": (
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(48, 3)), IMAGE, None),
    "residual networks": (
        Op(_residual, a=nn.Conv2d(2, 2, 3, padding=1), n=nn.BatchNorm2d(2), b=nn.Conv2d(2, 2, 3, padding=1)), IMAGE, None),
    "autoencoders": (nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.ELU(), nn.ConvTranspose2d(3, 2, 4, 2, 1)), IMAGE, None),
    "U-Nets": (Op(_u_net, a=nn.Conv2d(2, 2, 3, padding=1), b=nn.Conv2d(4, 1, 3, padding=1)), IMAGE, None),
    "1-Lipschitz layers": (nn.Sequential(own.AOLLinear(4, 4), own.GroupSort(2), own.BjorckLinear(4, 3)), (4,), None),
    "activations written out": (
        nn.Sequential(nn.Linear(4, 5), Op(lambda m, x: x * torch.sigmoid(x)), nn.Linear(5, 3)), (4,), None),
    "MaxMin written by hand": (
        Op(lambda m, x: torch.cat([torch.max(*x.chunk(2, 1)), torch.min(*x.chunk(2, 1))], 1)), (6,), None),
    "sets and point clouds": (Op(lambda m, x: F.relu(m["a"](x)).amax(1), a=nn.Linear(3, 4)), (5, 3), None),
    "graph convolutions": (Op(lambda m, x: F.relu(ADJACENCY @ m["a"](x)), a=nn.Linear(4, 4)), (3, 4), None),
    "RNNs": (Op(lambda m, x: m["r"](x)[0], r=nn.RNN(2, 3, batch_first=True)), (3, 2), None),
    "LSTMs": (Op(lambda m, x: m["r"](x)[0], r=nn.LSTM(2, 2, batch_first=True)), (2, 2), None),
    "GRUs": (Op(lambda m, x: m["r"](x)[0], r=nn.GRU(2, 2, batch_first=True)), (2, 2), None),
    "Fourier operators": (Op(_operator), (6,), None),
    "attention after a layer norm": (
        Op(_attention(lambda x: F.layer_norm(x, (4,), eps=1e-2)), **_attends()), (3, 4), None),
    "attention after an RMS norm": (Op(_attention(_rms), **_attends()), (3, 4), None),
    "attention on raw inputs": (Op(_attention(lambda x: x), **_attends()), (3, 4), 1.0),
    "L2 attention": (own.L2Attention(4, 2, 3), (3, 4), None),
    "attention from a convex potential": (own.ConvexAttention(4, heads=2), (3, 4), None),
    "normalized embeddings": (Op(lambda m, x: F.normalize(m["a"](x), eps=0.1), a=nn.Linear(4, 4)), (4,), None),
    "squeeze and excitation": (
        Op(lambda m, x: x * torch.sigmoid(m["a"](x.mean((2, 3))))[..., None, None], a=nn.Linear(2, 2)), IMAGE, 1.0),
    "gated units": (Op(lambda m, x: F.glu(m["a"](x), -1), a=nn.Linear(4, 6)), (4,), 1.0),
    "mixtures of experts, soft": (Op(_mixture, g=nn.Linear(4, 2), a=nn.Linear(4, 3), b=nn.Linear(4, 3)), (4,), 1.0),
    "coupling flows": (Op(_coupling, s=nn.Linear(2, 2)), (4,), 1.0),
}  # fmt: skip
# family: (network, example, words of the refusal)
REFUSED = {
    "tokens": (nn.Embedding(5, 3), torch.zeros(1, 4, dtype=torch.int64), "real-valued"),
    "quantized networks": (Op(lambda m, x: torch.round(x * 8) / 8), torch.zeros(1, 4), "discontinuous"),
    "hard attention": (Op(lambda m, x: x.argmax(1).to(x.dtype)), torch.zeros(1, 4), "narrow|jumps|no Lipschitz rule"),
    "branches on the data": (Op(lambda m, x: x if x.sum() > 0 else 2 * x), torch.zeros(1, 4), "depends on the data"),
    "training mode": (nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train(), torch.zeros(1, 4), "training mode"),
    "random layers": (Op(lambda m, x: x + torch.randn(4)), torch.zeros(1, 4), "random"),
    "half precision": (Op(lambda m, x: x.half().float()), torch.zeros(1, 4), "narrow"),
    "division by a norm without ε": (Op(lambda m, x: x / x.norm(dim=1, keepdim=True)), torch.zeros(1, 4), "near 0"),
    "samples that mix": (Op(lambda m, x: x - x.mean(0)), torch.zeros(2, 4), "other samples"),
}
