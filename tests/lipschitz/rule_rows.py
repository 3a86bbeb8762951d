"""Rows for the table of rules: operations written out, indexed, ordered, transformed, on bounded domains, and recurrent.

name: (module or function, shape, fraction of the bound an attack reaches, ball)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1)
W = torch.randn(5, 6)
P = torch.rand(6) + 0.5
T = torch.randn(3, 5)
BILINEAR = torch.randn(4, 3, 3)
INDEX = torch.tensor([[0, 2, 2, 1]])
APART = torch.tensor([[3, 0, 1]])
KEPT = torch.arange(24).reshape(4, 6) % 5 == 0
GRID = torch.rand(1, 4, 4, 2) * 2 - 1
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


def _small(module, scale):
    for p in module.parameters():
        p.data.mul_(scale)
    return module


WRITTEN_OUT = {
    "diff": (lambda x: x.diff(dim=1), (6,), 0.9, None),
    "rot90": (lambda x: x.rot90(1, (1, 2)), (3, 4), 0.99, None),
    "kron": (lambda x: torch.kron(x, W[:1, :2].to(x.dtype)), (6,), 0.99, None),
    "addcmul": (lambda x: torch.addcmul(W[:1].to(x.dtype), x, W[1:2].to(x.dtype), value=2.0), (6,), 0.99, None),
    "addcmul of constants": (lambda x: torch.addcmul(x, W[:1].to(x.dtype), W[1:2].to(x.dtype)), (6,), 0.99, None),
    "addcdiv": (lambda x: torch.addcdiv(x, -x, P.to(x.dtype), value=0.5), (6,), 0.3, None),
    "addmm factors": (
        lambda x: torch.addmm(torch.ones(5, dtype=x.dtype), x, W.mT.to(x.dtype), alpha=2.0, beta=0.5),
        (6,),
        0.99,
        None,
    ),
    "addmm of branches": (lambda x: torch.addmm(x[:, :5], x, W.mT.to(x.dtype), alpha=-2.0), (6,), 0.8, None),
    "baddbmm": (
        lambda x: torch.baddbmm(
            torch.ones(1, 3, 5, dtype=x.dtype), x, W.mT[None].to(x.dtype).expand(len(x), -1, -1), alpha=2.0
        ),
        (3, 6),
        0.99,
        None,
    ),
    "outer": (lambda x: x[:, :, None] * W[0, None, None].to(x.dtype), (6,), 0.99, None),
    "einsum of one": (lambda x: torch.einsum("bij->bj", x), (3, 4), 0.99, None),
    "einsum diagonal": (lambda x: torch.einsum("bii->bi", x), (4, 4), 0.99, None),
    "einsum constant": (lambda x: torch.einsum("bij,oj->bio", x, W.to(x.dtype)), (3, 6), 0.99, None),
    "einsum of three": (lambda x: torch.einsum("bi,oi,po->bp", x, W.to(x.dtype), T.to(x.dtype)), (6,), 0.5, None),
    "einsum dots": (lambda x: torch.einsum("...i,oi->...o", x, W.to(x.dtype)), (3, 6), 0.99, None),
    "tensordot": (lambda x: torch.tensordot(x, W.mT.to(x.dtype), 1), (6,), 0.99, None),
    "broadcast tensors": (
        lambda x: torch.broadcast_tensors(x[:, None], torch.ones(4, 1, dtype=x.dtype))[0],
        (6,),
        0.99,
        None,
    ),
    "pairwise distance": (lambda x: F.pairwise_distance(x, torch.ones(6, dtype=x.dtype)), (6,), 0.99, None),
    "cdist": (lambda x: torch.cdist(x, torch.ones(2, 4, dtype=x.dtype)), (3, 4), 0.9, None),
    "cdist 1": (lambda x: torch.cdist(x, torch.ones(2, 4, dtype=x.dtype), p=1.0), (3, 4), 0.9, None),
    "lerp by a tensor": (lambda x: torch.lerp(x, x.flip(1), W[:1].to(x.dtype)), (6,), 0.3, None),
    "bilinear on ball": (lambda x: F.bilinear(x[:, :3], x[:, 3:], BILINEAR.to(x.dtype)), (6,), 0.2, 2.0),
    "bilinear with a constant": (
        lambda x: F.bilinear(x, T[:1, :3].to(x.dtype).expand(len(x), -1), BILINEAR.to(x.dtype)),
        (3,),
        0.3,
        None,
    ),
    "batched product summed": (
        lambda x: torch.stack(
            [torch.addbmm(s[0, :, :2], s, W[None, :4, :2].to(x.dtype).expand(2, 4, 2), alpha=2.0, beta=0.5) for s in x]
        ),
        (2, 3, 4),
        0.4,
        None,
    ),
    "cross": (lambda x: torch.linalg.cross(x, torch.ones(1, 3, dtype=x.dtype)), (3,), 0.8, None),
}

INDEXED = {
    "unfold": (lambda x: x.unfold(1, 3, 1), (6,), 0.99, None),
    "patches": (lambda x: F.unfold(x, 3, padding=1, stride=2), (2, 5, 5), 0.99, None),
    "fold": (lambda x: F.fold(x, (5, 5), 3, padding=1), (18, 25), 0.99, None),
    "gather": (lambda x: x.gather(1, INDEX.expand(len(x), -1)), (6,), 0.99, None),
    "take along": (lambda x: x.take_along_dim(INDEX, 1), (6,), 0.99, None),
    "scatter": (
        lambda x: torch.ones(len(x), 6, dtype=x.dtype).scatter(1, APART.expand(len(x), -1), x),
        (3,),
        0.99,
        None,
    ),
    "scatter a number": (lambda x: x.scatter(1, INDEX.expand(len(x), -1), 2.0), (6,), 0.99, None),
    "scatter itself": (lambda x: x.scatter(1, APART.expand(len(x), -1), 2 * x[:, :3]), (6,), 0.9, None),
    "scatter add": (
        lambda x: torch.zeros(len(x), 6, dtype=x.dtype).scatter_add(1, INDEX.expand(len(x), -1), x),
        (4,),
        0.99,
        None,
    ),
    "scatter maximum": (
        lambda x: x.scatter_reduce(1, INDEX.expand(len(x), -1), 3 * x[:, :4], "amax"),
        (6,),
        0.9,
        None,
    ),
    "index add": (lambda x: x.index_add(1, INDEX[0], x[:, :4], alpha=2.0), (6,), 0.6, None),
    "index copy": (lambda x: x.index_copy(1, APART[0], 2 * x[:, :3]), (6,), 0.9, None),
    "index fill": (lambda x: x.index_fill(1, INDEX[0], 3.0), (6,), 0.99, None),
    "select scatter": (lambda x: torch.select_scatter(x, 2 * x[:, 0], 1, 3), (6,), 0.9, None),
    "slice scatter": (lambda x: torch.slice_scatter(x, 2 * x[:, :2], 1, 2, 4), (6,), 0.9, None),
    "masked scatter of copies": (
        lambda x: torch.masked_scatter(x[:, None], KEPT, torch.ones(len(x), 24, dtype=x.dtype)),
        (6,),
        0.7,
        None,
    ),
    "diagonal of a vector": (lambda x: x.diag_embed(), (4,), 0.99, None),
    "power pooling": (lambda x: F.lp_pool2d(x, 2.0, (3, 2), stride=1), (1, 4, 4), 0.6, None),
    "power pooling apart": (lambda x: F.lp_pool1d(x, 4, 2, ceil_mode=True), (2, 6), 0.9, None),
    "sum pooling": (lambda x: F.lp_pool2d(x, 1.0, 2, stride=1), (1, 4, 4), 0.6, None),
    "sampling": (
        lambda x: F.grid_sample(x, GRID.to(x.dtype).expand(len(x), -1, -1, -1), align_corners=False),
        (2, 5, 5),
        0.99,
        None,
    ),
    "sampling nearest": (
        lambda x: F.grid_sample(x, GRID.to(x.dtype).expand(len(x), -1, -1, -1), "nearest", "border", False),
        (2, 5, 5),
        0.99,
        None,
    ),
    "sampling bicubic": (
        lambda x: F.grid_sample(x, GRID.to(x.dtype).expand(len(x), -1, -1, -1), "bicubic", "reflection", True),
        (1, 5, 5),
        0.99,
        None,
    ),
}

ORDERED = {
    "mean in a named type": (
        lambda x: F.linear(x.mean(-1, dtype=x.dtype), T.mT.to(x.dtype)),
        (3, 5),
        0.9,
        None,
    ),
    "running sum": (lambda x: x.cumsum(1), (6,), 0.999, None),
    "running sum of rows": (lambda x: x.cumsum(-1), (3, 5), 0.999, None),
    "running maximum": (lambda x: x.cummax(1)[0], (6,), 0.5, None),
    "running logsumexp": (lambda x: x.logcumsumexp(1), (6,), 0.5, None),
    "topk": (lambda x: x.topk(3, 1)[0], (6,), 0.99, None),
    "median": (lambda x: x.median(1)[0], (3, 5), 0.99, None),
    "kth value": (lambda x: x.kthvalue(2, 1)[0], (6,), 0.99, None),
    "quantile": (lambda x: x.quantile(0.3, dim=1), (6,), 0.7, None),
    "logaddexp": (lambda x: torch.logaddexp(x[:, :3], x[:, 3:]), (6,), 0.9, None),
    "hypot": (lambda x: torch.hypot(x[:, :3], x[:, 3:]), (6,), 0.99, None),
    "hypot constant": (lambda x: torch.hypot(x, torch.ones(6, dtype=x.dtype)), (6,), 0.9, None),
    "max min of halves": (
        lambda x: torch.cat([torch.max(x[:, :3], x[:, 3:]), torch.min(x[:, :3], x[:, 3:])], 1),
        (6,),
        0.99,
        None,
    ),
    "max min interleaved": (
        lambda x: torch.stack([x[:, ::2].maximum(x[:, 1::2]), x[:, ::2].minimum(x[:, 1::2])], 2).flatten(1),
        (6,),
        0.99,
        None,
    ),
    "max min of groups": (
        lambda x: torch.cat([x.view(-1, 2, 3).amax(1), x.view(-1, 2, 3).amin(1)], 1),
        (6,),
        0.99,
        None,
    ),
    "max min by values": (
        lambda x: torch.stack([x.view(-1, 3, 2).max(-1)[0], x.view(-1, 3, 2).min(-1)[0]], 1),
        (6,),
        0.99,
        None,
    ),
    "max and max": (lambda x: torch.cat([x.amax(1, True), x.amax(1, True)], 1), (6,), 0.99, None),
    "max, min and the same max": (
        lambda x: (lambda top, low: torch.cat([top, low, top], 1))(x.amax(1, True), x.amin(1, True)),
        (2,),
        0.99,
        None,
    ),
    "max and min of one": (lambda x: torch.cat([x[..., :1].amax(1), x[..., :1].amin(1)], 1), (1, 4), 0.99, None),
}

FOURIER = {
    "rfft": (lambda x: torch.view_as_real(torch.fft.rfft(x)), (6,), 0.99, None),
    "rfft longer": (lambda x: torch.view_as_real(torch.fft.rfft(x, n=9, norm="ortho")), (6,), 0.7, None),
    "fft modulus": (lambda x: torch.fft.fft2(x).abs(), (4, 4), 0.7, None),
    "fft real part": (lambda x: torch.fft.fft(x, norm="forward").real, (6,), 0.9, None),
    "spectral filter": (
        lambda x: torch.fft.irfft(torch.fft.rfft(x) * SPECTRUM.to(torch.fft.rfft(x).dtype), n=6),
        (6,),
        0.5,
        None,
    ),
    "fourier layer": (_fourier_layer, (2, 6), 0.4, None),
    "fft shift": (lambda x: torch.fft.fftshift(x, (1, 2)), (3, 4), 0.99, None),
    "short-time transform": (
        lambda x: torch.stft(x, 4, 2, window=torch.ones(4, dtype=x.dtype), center=False, return_complex=True).abs(),
        (8,),
        0.4,
        None,
    ),
}

DOMAINS = {
    "log1p": (lambda x: torch.log1p(x.abs()), (6,), 0.9, None),
    "reciprocal": (lambda x: 1 / (2 + torch.sigmoid(x)), (6,), 0.5, None),
    "quotient": (lambda x: torch.tanh(x) / (1 + torch.sigmoid(x.flip(1))), (6,), 0.5, None),
    "square root on ball": (lambda x: torch.sqrt(x.square() + 1), (6,), 0.3, 2.0),
    "power 1.5 on ball": (lambda x: x.abs() ** 1.5, (6,), 0.9, 2.0),
    "odd power on ball": (lambda x: x**3, (6,), 0.9, 2.0),
    "negative power": (lambda x: (1 + F.relu(x)) ** -0.5, (6,), 0.9, None),
    "logarithm on ball": (lambda x: torch.log(1 + x.exp()), (6,), 0.1, 1.0),
    "exponential of what is not positive": (lambda x: torch.exp(-3 * F.relu(x)), (6,), 0.9, None),
    "Gaussian of a distance": (lambda x: torch.exp(-0.5 * (1 + x.abs())), (6,), 0.9, None),
    "power of 2": (lambda x: 2.0 ** torch.tanh(x), (6,), 0.3, None),
    "power of a half": (lambda x: 0.5 ** F.relu(x), (6,), 0.9, None),
    "exp2 on ball": (torch.exp2, (6,), 0.9, 2.0),
    "sinh on ball": (torch.sinh, (6,), 0.9, 2.0),
    "cosh on ball": (torch.cosh, (6,), 0.9, 2.0),
    "tangent": (lambda x: torch.tan(torch.tanh(x)), (6,), 0.2, None),
    "arcsine": (lambda x: torch.asin(0.9 * torch.tanh(x)), (6,), 0.3, None),
    "arccosine": (lambda x: torch.acos(0.9 * torch.tanh(x)), (6,), 0.3, None),
    "artanh": (lambda x: torch.atanh(x.clamp(-0.9, 0.9)), (6,), 0.2, None),
    "logit": (lambda x: torch.logit(x, eps=0.1), (6,), 0.7, None),
    "log2": (lambda x: torch.log2(x.abs() + 0.5), (6,), 0.8, None),
    "log10": (lambda x: torch.log10(x.abs() + 0.5), (6,), 0.8, None),
    "sinc": (torch.sinc, (6,), 0.9, None),
    "erfc": (torch.erfc, (6,), 0.9, None),
    "angle to the right": (lambda x: torch.atan2(x[:, :3], 0.5 + x[:, 3:].abs()), (6,), 0.5, None),
    "angle above": (lambda x: torch.atan2(0.5 + x[:, :3].abs(), x[:, 3:]), (6,), 0.5, None),
    "angle below a constant": (lambda x: torch.atan2(-P.to(x.dtype), x), (6,), 0.8, None),
    "angle repeated": (lambda x: torch.atan2(x[:, :1], torch.ones_like(x)), (6,), 0.8, None),
    "product on ball": (lambda x: x.prod(1), (4,), 0.7, 2.0),
    "product of bounded entries": (lambda x: torch.sigmoid(x).prod(-1), (2, 3), 0.1, None),
    "product of all rows": (
        lambda x: torch.stack([F.normalize(s, dim=-1, eps=0.5).prod() for s in x]),
        (2, 3),
        0.01,
        None,
    ),
    "product of one": (lambda x: x[:, :1].prod(1), (4,), 0.99, None),
    "running product on ball": (lambda x: x.cumprod(1), (4,), 0.5, 2.0),
    "expm1 on ball": (torch.expm1, (6,), 0.9, 1.0),
    "variance on ball": (lambda x: x.var(1), (6,), 0.8, 2.0),
    "normalize": (lambda x: F.normalize(x, dim=1, eps=0.5), (6,), 0.99, None),
    "normalize plus": (lambda x: x / (x.norm(dim=-1, keepdim=True) + 0.5), (6,), 0.9, None),
    "normalize copies": (
        lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(0.5).expand(-1, 4, 6),
        (1, 6),
        0.99,
        None,
    ),
    "cosine similarity": (
        lambda x: F.cosine_similarity(x, torch.ones(6, dtype=x.dtype), dim=1, eps=1.0),
        (6,),
        0.1,
        2.0,
    ),
    "rms norm by hand": (lambda x: _rms(x, P), (3, 6), 0.9, None),
    "rms norm by reciprocals": (lambda x: x * (1 / torch.sqrt((x * x).mean(-1, True) + 0.3)), (6,), 0.9, None),
    "rms norm by a power": (lambda x: x * (x.pow(2).mean(-1, True) + 0.3) ** -0.5, (6,), 0.9, None),
    "swish by hand": (lambda x: x * torch.sigmoid(x), (6,), 0.99, None),
    "quick gelu": (lambda x: torch.sigmoid(1.702 * x) * x, (6,), 0.99, None),
    "swish of a negative": (lambda x: 2 * x * torch.sigmoid(-x / 3), (6,), 0.99, None),
    "gelu by hand": (lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), (6,), 0.99, None),
    "tanh gelu by hand": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
        (6,),
        0.99,
        None,
    ),
    "tanh gelu by squares": (
        lambda x: x * 0.5 * (torch.tanh(x * 0.79788456 * (1 + 0.044715 * x * x)) + 1),
        (6,),
        0.99,
        None,
    ),
    "gelu of another width": (lambda x: x * (0.5 * (1.0 + torch.erf(3 * x))), (6,), 0.99, None),
    "mish by hand": (lambda x: x * torch.tanh(F.softplus(x)), (6,), 0.99, None),
    "softplus by hand": (lambda x: torch.where(x > 20, x, F.softplus(x)), (6,), 0.9, None),
    "log of a sigmoid": (lambda x: torch.log(torch.sigmoid(x)), (6,), 0.9, None),
    "log of a softmax": (lambda x: torch.log(torch.softmax(x, -1)), (6,), 0.3, None),
    "rms norm by division": (lambda x: x / torch.sqrt((x * x).mean(-1, True) + 0.3), (6,), 0.9, None),
    "attention after rms norm": (
        lambda x: F.scaled_dot_product_attention(_rms(x), 2 * _rms(x), _rms(x)),
        (3, 4),
        0.0,
        None,
    ),
}

torch.manual_seed(1)  # rows above may change without changing these
RECURRENT = {
    "rnn": (_last(nn.RNN(2, 2, batch_first=True)), (3, 2), 0.2, None),
    "rnn relu two layers": (_last(nn.RNN(2, 2, 2, nonlinearity="relu", batch_first=True)), (2, 2), 0.05, None),
    "lstm": (_last(nn.LSTM(2, 2, batch_first=True)), (2, 2), 0.01, None),
    "lstm both ways": (_last(nn.LSTM(2, 1, batch_first=True, bidirectional=True)), (2, 2), 0.01, None),
    "gru": (_last(nn.GRU(2, 2, batch_first=True)), (2, 2), 0.05, None),
    "rnn cell": (nn.RNNCell(4, 3), (4,), 0.9, None),
    "lstm cell": (nn.LSTMCell(4, 3), (4,), 0.15, None),
    "gru cell": (nn.GRUCell(4, 3), (4,), 0.3, None),
}

ROWS = {**WRITTEN_OUT, **INDEXED, **ORDERED, **FOURIER, **DOMAINS, **RECURRENT}
