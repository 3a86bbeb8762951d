"""The table of rules: layers, and operations written out, indexed, ordered, transformed, on bounded domains, recurrent.

A row is `at(module or function, shape, fraction of the bound an attack reaches, ball)`.
"""

import math

import torch
import torch.nn.functional as F
from lipschitz_nets import Op
from torch import nn


def at(operation, shape=(6,), reached=0.99, ball=None):
    return operation, shape, reached, ball


torch.manual_seed(1)
W = torch.randn(5, 6)
P = torch.rand(6) + 0.5
T = torch.randn(3, 5)
INDEX = torch.tensor([[0, 2, 2, 1]])
SPECTRUM = torch.randn(4, dtype=torch.complex128)
MIXING = torch.randn(2, 2, 3, dtype=torch.complex128) / 2


def _fourier_layer(x):
    z = torch.einsum("bik,iok->bok", torch.fft.rfft(x)[..., :3], MIXING.to(torch.fft.rfft(x).dtype))
    return torch.fft.irfft(z, n=6)


def _rms(x, weight=None):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)
    return y if weight is None else weight.to(x.dtype) * y


def _last(module):
    return Op(lambda m, x: m.inner(x)[0], inner=module)


WRITTEN_OUT = {
    "diff": at(lambda x: x.diff(dim=1), (6,), 0.9),
    "kron": at(lambda x: torch.kron(x, W[:1, :2].to(x.dtype))),
    "addcmul": at(lambda x: torch.addcmul(W[:1].to(x.dtype), x, W[1:2].to(x.dtype), value=2.0)),
    "addcdiv": at(lambda x: torch.addcdiv(x, -x, P.to(x.dtype), value=0.5), (6,), 0.3),
    "addmm factors": at(lambda x: torch.addmm(torch.ones(5, dtype=x.dtype), x, W.mT.to(x.dtype), alpha=2.0, beta=0.5)),
    "addmm of branches": at(lambda x: torch.addmm(x[:, :5], x, W.mT.to(x.dtype), alpha=-2.0), (6,), 0.8),
    "baddbmm": at(lambda x: torch.baddbmm(torch.ones(1, 3, 5, dtype=x.dtype), x,
        W.mT[None].to(x.dtype).expand(len(x), -1, -1), alpha=2.0), (3, 6)),
    "outer": at(lambda x: x[:, :, None] * W[0, None, None].to(x.dtype)),
    "einsum of one": at(lambda x: torch.einsum("bij->bj", x), (3, 4)),
    "einsum diagonal": at(lambda x: torch.einsum("bii->bi", x), (4, 4)),
    "einsum constant": at(lambda x: torch.einsum("bij,oj->bio", x, W.to(x.dtype)), (3, 6)),
    "einsum of three": at(lambda x: torch.einsum("bi,oi,po->bp", x, W.to(x.dtype), T.to(x.dtype)), (6,), 0.5),
    "broadcast tensors": at(lambda x: torch.broadcast_tensors(x[:, None], torch.ones(4, 1, dtype=x.dtype))[0]),
    "pairwise distance": at(lambda x: F.pairwise_distance(x, torch.ones(6, dtype=x.dtype))),
}  # fmt: skip

INDEXED = {
    "unfold": at(lambda x: x.unfold(1, 3, 1)),
    "patches": at(lambda x: F.unfold(x, 3, padding=1, stride=2), (2, 5, 5)),
    "gather": at(lambda x: x.gather(1, INDEX.expand(len(x), -1))),
    "select scatter": at(lambda x: torch.select_scatter(x, 2 * x[:, 0], 1, 3), (6,), 0.9),
    "slice scatter": at(lambda x: torch.slice_scatter(x, 2 * x[:, :2], 1, 2, 4), (6,), 0.9),
    "diagonal of a vector": at(lambda x: x.diag_embed(), (4,)),
}

ORDERED = {
    "mean in a named type": at(lambda x: F.linear(x.mean(-1, dtype=x.dtype), T.mT.to(x.dtype)), (3, 5), 0.9),
    "max min of halves": at(lambda x: torch.cat([torch.max(x[:, :3], x[:, 3:]), torch.min(x[:, :3], x[:, 3:])], 1)),
    "max min interleaved": at(
        lambda x: torch.stack([x[:, ::2].maximum(x[:, 1::2]), x[:, ::2].minimum(x[:, 1::2])], 2).flatten(1)),
    "max min of groups": at(lambda x: torch.cat([x.view(-1, 2, 3).amax(1), x.view(-1, 2, 3).amin(1)], 1)),
    "max min by values": at(lambda x: torch.stack([x.view(-1, 3, 2).max(-1)[0], x.view(-1, 3, 2).min(-1)[0]], 1)),
    "max and max": at(lambda x: torch.cat([x.amax(1, True), x.amax(1, True)], 1)),
    "max, min and the same max": at(
        lambda x: (lambda top, low: torch.cat([top, low, top], 1))(x.amax(1, True), x.amin(1, True)), (2,)),
    "max and min of one": at(lambda x: torch.cat([x[..., :1].amax(1), x[..., :1].amin(1)], 1), (1, 4)),
}  # fmt: skip

FOURIER = {
    "rfft": at(lambda x: torch.view_as_real(torch.fft.rfft(x))),
    "rfft longer": at(lambda x: torch.view_as_real(torch.fft.rfft(x, n=9, norm="ortho")), (6,), 0.7),
    "fft modulus": at(lambda x: torch.fft.fft2(x).abs(), (4, 4), 0.7),
    "fft real part": at(lambda x: torch.fft.fft(x, norm="forward").real, (6,), 0.9),
    "spectral filter": at(
        lambda x: torch.fft.irfft(torch.fft.rfft(x) * SPECTRUM.to(torch.fft.rfft(x).dtype), n=6), (6,), 0.5),
    "fourier layer": at(_fourier_layer, (2, 6), 0.4),
    "fft shift": at(lambda x: torch.fft.fftshift(x, (1, 2)), (3, 4)),
    "short-time transform": at(lambda x: torch.stft(x, 4, 2, window=torch.ones(4, dtype=x.dtype), center=False,
        return_complex=True).abs(), (8,), 0.4),
}  # fmt: skip

DOMAINS = {
    "reciprocal": at(lambda x: 1 / (2 + torch.sigmoid(x)), (6,), 0.5),
    "quotient": at(lambda x: torch.tanh(x) / (1 + torch.sigmoid(x.flip(1))), (6,), 0.5),
    "square root on ball": at(lambda x: torch.sqrt(x.square() + 1), (6,), 0.3, 2.0),
    "power 1.5 on ball": at(lambda x: x.abs() ** 1.5, (6,), 0.9, 2.0),
    "odd power on ball": at(lambda x: x**3, (6,), 0.9, 2.0),
    "negative power": at(lambda x: (1 + F.relu(x)) ** -0.5, (6,), 0.9),
    "logarithm on ball": at(lambda x: torch.log(1 + x.exp()), (6,), 0.1, 1.0),
    "sinc": at(torch.sinc, (6,), 0.9),
    "erfc": at(torch.erfc, (6,), 0.9),
    "normalize": at(lambda x: F.normalize(x, dim=1, eps=0.5)),
    "normalize plus": at(lambda x: x / (x.norm(dim=-1, keepdim=True) + 0.5), (6,), 0.9),
    "normalize copies": at(lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(0.5).expand(-1, 4, 6), (1, 6)),
    "cosine similarity": at(
        lambda x: F.cosine_similarity(x, torch.ones(6, dtype=x.dtype), dim=1, eps=1.0), (6,), 0.1, 2.0),
    "rms norm by hand": at(lambda x: _rms(x, P), (3, 6), 0.9),
    "rms norm by reciprocals": at(lambda x: x * (1 / torch.sqrt((x * x).mean(-1, True) + 0.3)), (6,), 0.9),
    "rms norm by a power": at(lambda x: x * (x.pow(2).mean(-1, True) + 0.3) ** -0.5, (6,), 0.9),
    "no rms norm": at(lambda x: x * torch.rsqrt(torch.add((x * x).mean(-1, True), 1e-6, alpha=0.2)), (6,), 0.1, 1e-3),
    "swish by hand": at(lambda x: x * torch.sigmoid(x)),
    "quick gelu": at(lambda x: torch.sigmoid(1.702 * x) * x),
    "swish of a negative": at(lambda x: 2 * x * torch.sigmoid(-x / 3)),
    "gelu by hand": at(lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))),
    "tanh gelu by hand": at(
        lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))),
    "tanh gelu by squares": at(lambda x: x * 0.5 * (torch.tanh(x * 0.79788456 * (1 + 0.044715 * x * x)) + 1)),
    "mish by hand": at(lambda x: x * torch.tanh(F.softplus(x))),
    "rms norm by division": at(lambda x: x / torch.sqrt((x * x).mean(-1, True) + 0.3), (6,), 0.9),
    "attention after rms norm": at(
        lambda x: F.scaled_dot_product_attention(_rms(x), 2 * _rms(x), _rms(x)), (3, 4), 0.0),
}  # fmt: skip

torch.manual_seed(1)  # rows above may change without changing these
RECURRENT = {
    "rnn": at(_last(nn.RNN(2, 2, batch_first=True)), (3, 2), 0.2),
    "rnn relu two layers": at(_last(nn.RNN(2, 2, 2, nonlinearity="relu", batch_first=True)), (2, 2), 0.05),
    "lstm": at(_last(nn.LSTM(2, 2, batch_first=True)), (2, 2), 0.01),
    "lstm both ways": at(_last(nn.LSTM(2, 1, batch_first=True, bidirectional=True)), (2, 2), 0.01),
    "gru": at(_last(nn.GRU(2, 2, batch_first=True)), (2, 2), 0.05),
    "rnn cell": at(nn.RNNCell(4, 3), (4,), 0.9),
    "lstm cell": at(nn.LSTMCell(4, 3), (4,), 0.15),
    "gru cell": at(nn.GRUCell(4, 3), (4,), 0.3),
}

V = torch.randn(4)
U = F.normalize(torch.randn(1, 5, dtype=torch.float64))
PLANE = (2, 7, 7)
MASK = torch.tensor([True, False, True, False, True, True])
_bn = nn.BatchNorm2d(2).eval()
_bn.running_var.copy_(torch.tensor([0.2, 3.0]))
_bn.weight.data.copy_(torch.tensor([-1.5, 0.3]))
_prelu = nn.PReLU(2)
_prelu.weight.data.copy_(torch.tensor([-1.7, 0.2]))


def _parametrised():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))
    layer.parametrizations.weight.original0.data.mul_(3)
    return layer


def _scores(function):
    return lambda x: function(x) @ function(x).transpose(1, 2)


def _outer(y):
    return y.unsqueeze(2) @ y.unsqueeze(1)


ACTIVATIONS = (
    "relu", "relu6", "tanh", "sigmoid", "silu", "gelu", "mish", "selu", "celu", "elu", "softplus", "softsign",
    "logsigmoid", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "softshrink",
)  # fmt: skip
CASES = {
    **{name: at(getattr(F, name), (6,), 0.9) for name in ACTIVATIONS},
    "gelu tanh": at(lambda x: F.gelu(x, approximate="tanh")),
    "leaky relu steep": at(lambda x: F.leaky_relu(x, -1.6)),
    "elu 2": at(lambda x: F.elu(x, 2.0), (6,), 0.9),
    "prelu": at(_prelu, PLANE),
    "abs": at(torch.abs),
    "clamp": at(lambda x: x.clamp(-0.3, 2)),
    "square on ball": at(lambda x: x**2, (6,), 0.5, 2.0),
    "exp on ball": at(torch.exp, (6,), 0.3, 2.0),
    "linear on rows": at(nn.Linear(6, 5), (3, 6)),
    "weight norm": at(_parametrised()),
    "matmul": at(lambda x: x @ W.to(x.dtype).mT),
    "vector by vector": at(lambda x: x.squeeze(0) @ W[0].to(x.dtype)),
    "matmul left": at(lambda x: W.to(x.dtype) @ x, (6, 3)),
    "conv1d": at(nn.Conv1d(2, 3, 3, padding=1), (2, 9), 0.9),
    "conv same": at(nn.Conv2d(2, 3, 4, padding="same"), PLANE, 0.9),
    "conv stride dilation": at(nn.Conv2d(2, 3, 3, stride=2, dilation=2, padding=2), PLANE, 0.9),
    "conv grouped": at(nn.Conv2d(4, 6, 3, groups=2), (4, 6, 6), 0.9),
    "conv depthwise": at(nn.Conv2d(2, 4, 3, groups=2, padding=1), PLANE, 0.9),
    "conv3d": at(nn.Conv3d(1, 2, 2), (1, 4, 4, 4), 0.9),
    "conv reflect": at(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), PLANE, 0.7),
    "conv circular": at(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), PLANE, 0.7),
    "conv replicate": at(nn.Conv2d(2, 3, 3, padding=2, padding_mode="replicate"), PLANE, 0.7),
    "conv transpose": at(nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), PLANE, 0.9),
    "conv transpose grouped": at(nn.ConvTranspose1d(4, 4, 4, stride=3, groups=2, dilation=2), (4, 6), 0.9),
    "batch norm": at(_bn, PLANE),
    "layer norm": at(nn.LayerNorm(6), (6,), 0.9),
    "layer norm steep": at(nn.LayerNorm(6, eps=0.3), (3, 6), 0.9),
    "rms norm": at(nn.RMSNorm(6, eps=0.1), (6,), 0.9),
    "group norm": at(nn.GroupNorm(2, 4, eps=0.1), (4, 3, 3), 0.9),
    "instance norm": at(nn.InstanceNorm2d(2, eps=0.1), PLANE, 0.9),
    "softmax": at(lambda x: F.softmax(x, -1), (6,), 0.9),
    "softmax component": at(lambda x: F.softmax(x, -1)[:, 2], (6,), 0.95),
    "softmax component of rows": at(lambda x: F.softmax(x, 1)[:, 1:2], (3, 4), 0.9),
    "softmax of another dimension": at(lambda x: F.softmax(x, 1)[:, :, 1], (3, 4), 0.7),
    "softmax two components": at(lambda x: F.softmax(x, -1)[:, 1:3], (6,), 0.6),
    "householder": at(lambda x: x + 2 * F.relu(-(x @ U.to(x.dtype).mT)) @ U.to(x.dtype), (5,)),
    "softmax temperature": at(lambda x: F.softmax(x / 0.1, 1), (3, 4), 0.9),
    "log softmax": at(lambda x: F.log_softmax(x, -1), (6,), 0.9),
    "logsumexp": at(lambda x: x.logsumexp(-1), (3, 6), 0.9),
    "max pool 3 2": at(nn.MaxPool2d(3, 2), (1, 7, 7), 0.6),
    "max pool 3 1": at(nn.MaxPool2d(3, 1, 1), (1, 7, 7), 0.5),
    "max pool disjoint": at(nn.MaxPool2d(2), (1, 6, 6), 0.9),
    "max pool dilated": at(nn.MaxPool1d(3, 2, 1, dilation=2), (1, 9), 0.6),
    "max pool ceil": at(nn.MaxPool2d(3, 2, ceil_mode=True), (1, 6, 6), 0.6),
    "adaptive max pool": at(nn.AdaptiveMaxPool2d(3), (1, 7, 7), 0.5),
    "avg pool overlap": at(nn.AvgPool2d(3, 1, 1), (1, 6, 6)),
    "avg pool ceil": at(nn.AvgPool2d(3, 2, 1, ceil_mode=True), (1, 6, 6)),
    "avg pool exclude pad": at(nn.AvgPool2d(3, 2, 1, count_include_pad=False), (1, 7, 7)),
    "avg pool ceil exclude": at(nn.AvgPool1d(3, 2, 1, ceil_mode=True, count_include_pad=False), (1, 8)),
    "avg pool 3d": at(nn.AvgPool3d(2, 1), (1, 4, 4, 4), 0.95),
    "adaptive avg pool": at(nn.AdaptiveAvgPool2d((3, 2)), (1, 7, 5)),
    "upsample nearest odd": at(nn.Upsample(size=(7, 5)), (1, 4, 4)),
    "upsample doubled": at(nn.Upsample(scale_factor=2, mode="bilinear"), (1, 5, 3)),
    "upsample bilinear": at(nn.Upsample(scale_factor=1.7, mode="bilinear"), (1, 5, 5)),
    "upsample aligned": at(nn.Upsample(size=(9, 3), mode="bilinear", align_corners=True), (1, 5, 5)),
    "upsample bicubic": at(nn.Upsample(scale_factor=2, mode="bicubic"), (1, 5, 5)),
    "pad zero": at(lambda x: F.pad(x, (1, 2, 0, 1)), (1, 4, 4)),
    "pad value": at(lambda x: F.pad(x, (1, 2), value=3.0), (4,)),
    "pad reflect": at(lambda x: F.pad(x, (2, 2, 1, 1), mode="reflect"), (1, 4, 4)),
    "pad circular": at(lambda x: F.pad(x, (2, 2, 1, 1), mode="circular"), (1, 4, 4)),
    "pad replicate": at(lambda x: F.pad(x, (3, 0, 1, 1), mode="replicate"), (1, 4, 4)),
    "mean": at(lambda x: x.mean((1, 2)), (3, 4)),
    "sum": at(lambda x: x.sum(-1), (3, 4)),
    "amax": at(lambda x: x.amax(1), (3, 4)),
    "max values": at(lambda x: x.max(1)[0], (3, 4)),
    "norm": at(lambda x: x.norm(dim=-1), (5,)),
    "cat": at(lambda x: torch.cat([x, 2 * x, x.relu()], 1), (4,), 0.9),
    "stack constant": at(lambda x: torch.stack([x, torch.ones_like(x)], 1), (4,)),
    "group sort": at(lambda x: x.reshape(-1, 2, 3).sort(-1)[0].flatten(1)),
    "residual": at(lambda x: x + F.relu(x) * 0.5, (4,)),
    "difference": at(lambda x: x - 2 * x.flip(1), (4,)),
    "tanhshrink": at(F.tanhshrink, (4,), 0.4),
    "reverse sub": at(lambda x: 1 - 3 * x, (4,)),
    "scale vector": at(lambda x: x * V.to(x.dtype) / 0.7, (4,)),
    "expand": at(lambda x: x.unsqueeze(2).expand(-1, -1, 5), (4,)),
    "repeat": at(lambda x: x.repeat(1, 3), (4,)),
    "index": at(lambda x: x[:, INDEX[0]], (4,)),
    "mask": at(lambda x: torch.where(MASK, x, 3.0)),
    "maximum": at(lambda x: torch.maximum(x, 1 - x), (4,), 0.6),
    "pixel shuffle": at(nn.PixelShuffle(2), (4, 3, 3)),
    "permute": at(lambda x: x.permute(0, 2, 1).reshape(-1, 12), (3, 4)),
    "dropout": at(nn.Dropout(0.5)),
    "product on ball": at(lambda x: x * x.flip(1), (4,), 0.4, 2.0),
    "gate on ball": at(lambda x: F.glu(x, 1), (6,), 0.3, 3.0),
    "swish gate on ball": at(lambda x: x[:, :3] * torch.sigmoid(x[:, 3:]), (6,), 0.3, 3.0),
    "channel gate on ball": at(lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)), (2, 3, 3), 0.3, 3.0),
    "scores on ball": at(lambda x: x @ x.transpose(1, 2), (3, 4), 0.2, 2.0),
    "attention on ball": at(lambda x: F.scaled_dot_product_attention(x, 2 * x, x), (3, 4), 0.03, 2.0),
    "attention by hand": at(lambda x: F.softmax(x @ x.transpose(1, 2) / 2, -1) @ x, (3, 4), 0.03, 2.0),
    "einsum on ball": at(lambda x: torch.einsum("bij,bkj->bik", x, 2 * x), (3, 4), 0.2, 2.0),
    "rows of copies": at(_scores(lambda x: torch.sin(x) * torch.ones(64, dtype=x.dtype)), (4, 1), 0.4),
    "rows of a product with a vector": at(
        lambda x: _outer(torch.sin(3 * x) @ torch.ones(3, dtype=x.dtype)), (4, 3), 0.2),
    "vector, then matrix": at(lambda x: F.linear(F.relu(x @ V.to(x.dtype)), W[:, :3].to(x.dtype)), (3, 4), 0.8),
    "padding that cuts": at(lambda x: (lambda y: y * y.flip(1))(F.pad(x, (-2, 2), value=5.0)), (4,), 0.3, 1.0),
    "one bias for all": at(
        _scores(lambda x: F.linear(x, W.to(x.dtype), torch.full((1,), 5.0, dtype=x.dtype))), (1, 6), 0.3, 1.0),
    "addmm, one bias": at(
        lambda x: _outer(torch.addmm(torch.full((1, 1), 5.0, dtype=x.dtype), x, W.mT.to(x.dtype))), (6,), 0.3, 1.0),
    "upsampling 1-d": at(lambda x: F.interpolate(x, scale_factor=1.6, mode="linear"), (2, 5), 0.9),
    "pooling without a batch": at(
        lambda x: F.adaptive_avg_pool2d(x.flatten(0, 1), (3, 9)).unflatten(0, x.shape[:2]), PLANE, 0.9),
    **(WRITTEN_OUT | INDEXED | ORDERED | FOURIER | DOMAINS | RECURRENT),
    "nothing": at(lambda x: x[:, :0].reshape(1, -1) * 2, (6,), 0.0),
}  # fmt: skip
