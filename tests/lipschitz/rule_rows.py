"""Rows for the table of rules: operations written out, indexed, ordered, transformed, on bounded domains, and recurrent.

A row is `at(module or function, shape, fraction of the bound an attack reaches, ball)`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
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
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return self.inner(x)[0]

    return Last()


WRITTEN_OUT = {
    "diff": at(lambda x: x.diff(dim=1), (6,), 0.9),
    "kron": at(lambda x: torch.kron(x, W[:1, :2].to(x.dtype))),
    "addcmul": at(lambda x: torch.addcmul(W[:1].to(x.dtype), x, W[1:2].to(x.dtype), value=2.0)),
    "addcdiv": at(lambda x: torch.addcdiv(x, -x, P.to(x.dtype), value=0.5), (6,), 0.3),
    "addmm factors": at(lambda x: torch.addmm(torch.ones(5, dtype=x.dtype), x, W.mT.to(x.dtype), alpha=2.0, beta=0.5)),
    "addmm of branches": at(lambda x: torch.addmm(x[:, :5], x, W.mT.to(x.dtype), alpha=-2.0), (6,), 0.8),
    "baddbmm": at(
        lambda x: torch.baddbmm(
            torch.ones(1, 3, 5, dtype=x.dtype), x, W.mT[None].to(x.dtype).expand(len(x), -1, -1), alpha=2.0
        ),
        (3, 6),
    ),
    "outer": at(lambda x: x[:, :, None] * W[0, None, None].to(x.dtype)),
    "einsum of one": at(lambda x: torch.einsum("bij->bj", x), (3, 4)),
    "einsum diagonal": at(lambda x: torch.einsum("bii->bi", x), (4, 4)),
    "einsum constant": at(lambda x: torch.einsum("bij,oj->bio", x, W.to(x.dtype)), (3, 6)),
    "einsum of three": at(lambda x: torch.einsum("bi,oi,po->bp", x, W.to(x.dtype), T.to(x.dtype)), (6,), 0.5),
    "broadcast tensors": at(lambda x: torch.broadcast_tensors(x[:, None], torch.ones(4, 1, dtype=x.dtype))[0]),
    "pairwise distance": at(lambda x: F.pairwise_distance(x, torch.ones(6, dtype=x.dtype))),
}

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
        lambda x: torch.stack([x[:, ::2].maximum(x[:, 1::2]), x[:, ::2].minimum(x[:, 1::2])], 2).flatten(1)
    ),
    "max min of groups": at(lambda x: torch.cat([x.view(-1, 2, 3).amax(1), x.view(-1, 2, 3).amin(1)], 1)),
    "max min by values": at(lambda x: torch.stack([x.view(-1, 3, 2).max(-1)[0], x.view(-1, 3, 2).min(-1)[0]], 1)),
    "max and max": at(lambda x: torch.cat([x.amax(1, True), x.amax(1, True)], 1)),
    "max, min and the same max": at(
        lambda x: (lambda top, low: torch.cat([top, low, top], 1))(x.amax(1, True), x.amin(1, True)), (2,)
    ),
    "max and min of one": at(lambda x: torch.cat([x[..., :1].amax(1), x[..., :1].amin(1)], 1), (1, 4)),
}

FOURIER = {
    "rfft": at(lambda x: torch.view_as_real(torch.fft.rfft(x))),
    "rfft longer": at(lambda x: torch.view_as_real(torch.fft.rfft(x, n=9, norm="ortho")), (6,), 0.7),
    "fft modulus": at(lambda x: torch.fft.fft2(x).abs(), (4, 4), 0.7),
    "fft real part": at(lambda x: torch.fft.fft(x, norm="forward").real, (6,), 0.9),
    "spectral filter": at(
        lambda x: torch.fft.irfft(torch.fft.rfft(x) * SPECTRUM.to(torch.fft.rfft(x).dtype), n=6), (6,), 0.5
    ),
    "fourier layer": at(_fourier_layer, (2, 6), 0.4),
    "fft shift": at(lambda x: torch.fft.fftshift(x, (1, 2)), (3, 4)),
    "short-time transform": at(
        lambda x: torch.stft(x, 4, 2, window=torch.ones(4, dtype=x.dtype), center=False, return_complex=True).abs(),
        (8,),
        0.4,
    ),
}

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
        lambda x: F.cosine_similarity(x, torch.ones(6, dtype=x.dtype), dim=1, eps=1.0), (6,), 0.1, 2.0
    ),
    "rms norm by hand": at(lambda x: _rms(x, P), (3, 6), 0.9),
    "rms norm by reciprocals": at(lambda x: x * (1 / torch.sqrt((x * x).mean(-1, True) + 0.3)), (6,), 0.9),
    "rms norm by a power": at(lambda x: x * (x.pow(2).mean(-1, True) + 0.3) ** -0.5, (6,), 0.9),
    "swish by hand": at(lambda x: x * torch.sigmoid(x)),
    "quick gelu": at(lambda x: torch.sigmoid(1.702 * x) * x),
    "swish of a negative": at(lambda x: 2 * x * torch.sigmoid(-x / 3)),
    "gelu by hand": at(lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))),
    "tanh gelu by hand": at(
        lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
    "tanh gelu by squares": at(lambda x: x * 0.5 * (torch.tanh(x * 0.79788456 * (1 + 0.044715 * x * x)) + 1)),
    "mish by hand": at(lambda x: x * torch.tanh(F.softplus(x))),
    "rms norm by division": at(lambda x: x / torch.sqrt((x * x).mean(-1, True) + 0.3), (6,), 0.9),
    "attention after rms norm": at(
        lambda x: F.scaled_dot_product_attention(_rms(x), 2 * _rms(x), _rms(x)), (3, 4), 0.0
    ),
}

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

ROWS = {**WRITTEN_OUT, **INDEXED, **ORDERED, **FOURIER, **DOMAINS, **RECURRENT}
