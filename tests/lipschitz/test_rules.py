"""Every rule against every attack: a row is an operation, its input shape, whether the constant is attained, and a ball."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from lipschitz_attacks import attack
from lipschitz_nets import Op
from rule_rows import ROWS, at
from torch import nn

from equipoise.core import Refused
from equipoise.lipschitz import lipschitz_bound, local_lipschitz

torch.manual_seed(0)
W = torch.randn(5, 6)
V = torch.randn(4)
U = F.normalize(torch.randn(1, 5, dtype=torch.float64))
PLANE = (2, 7, 7)
INDEX = torch.tensor([0, 2, 2, 1])
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
    "index": at(lambda x: x[:, INDEX], (4,)),
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
        lambda x: _outer(torch.sin(3 * x) @ torch.ones(3, dtype=x.dtype)), (4, 3), 0.2
    ),
    "vector, then matrix": at(lambda x: F.linear(F.relu(x @ V.to(x.dtype)), W[:, :3].to(x.dtype)), (3, 4), 0.8),
    "padding that cuts": at(lambda x: (lambda y: y * y.flip(1))(F.pad(x, (-2, 2), value=5.0)), (4,), 0.3, 1.0),
    "one bias for all": at(
        _scores(lambda x: F.linear(x, W.to(x.dtype), torch.full((1,), 5.0, dtype=x.dtype))), (1, 6), 0.3, 1.0
    ),
    "addmm, one bias": at(
        lambda x: _outer(torch.addmm(torch.full((1, 1), 5.0, dtype=x.dtype), x, W.mT.to(x.dtype))), (6,), 0.3, 1.0
    ),
    "upsampling 1-d": at(lambda x: F.interpolate(x, scale_factor=1.6, mode="linear"), (2, 5), 0.9),
    "pooling without a batch": at(
        lambda x: F.adaptive_avg_pool2d(x.flatten(0, 1), (3, 9)).unflatten(0, x.shape[:2]), PLANE, 0.9
    ),
    **ROWS,
    "nothing": at(lambda x: x[:, :0].reshape(1, -1) * 2, (6,), 0.0),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", CASES)
def test_the_rule_holds_under_attack(name):
    op, shape, fraction, ball = CASES[name]
    module = (op if isinstance(op, nn.Module) else Op(op)).eval()
    report = lipschitz_bound(module, torch.zeros(1, *shape), ball=ball)
    found = attack(module, shape, ball, steps=60)
    assert report.upper <= report.product
    assert found <= report.upper * (1 + 1e-7)
    assert found >= fraction * report.upper, f"attack reaches {found}, bound {report.upper}"


#: rows that are always tried in a ball, too; all of them with the slow tests
LOCALLY = ("max min of groups", "max min interleaved", "mean in a named type", "nothing")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in LOCALLY else pytest.mark.slow) for n in CASES])
def test_the_rule_holds_in_a_ball(name):
    """`local_lipschitz` fails by itself where its own attack exceeds the bound."""
    op, shape, _, _ = CASES[name]
    module = (op if isinstance(op, nn.Module) else Op(op)).eval()
    try:
        found = local_lipschitz(module, torch.linspace(0.5, 1.5, math.prod(shape)).reshape(1, *shape), 0.1, steps=6)
    except Refused:
        return
    assert found.lower <= found.upper


@pytest.mark.parametrize(
    ("k", "s", "d", "n"), [(3, 2, 1, 9), (3, 1, 1, 9), (5, 2, 1, 11), (3, 2, 2, 13), (4, 6, 4, 40)]
)
def test_max_pooling_constant_is_attained_by_a_spike(k, s, d, n):
    pool = nn.MaxPool1d(k, s, dilation=d)
    bound = lipschitz_bound(pool, torch.zeros(1, 1, n)).upper
    assert float(pool(torch.eye(n).reshape(n, 1, n)).norm(dim=(1, 2)).max()) == pytest.approx(bound)


def test_a_factor_along_a_new_dimension_does_not_scale_channels():
    kernel = torch.diag(torch.tensor([1.0, 0.0, 0.0])).reshape(3, 3, 1, 1)
    factor = torch.tensor([0.01, 1.0, 1.0]).reshape(1, 3, 1, 1, 1)
    module = Op(lambda x: F.conv2d(x.view(3, 3, 2, 2), kernel) * factor).eval()
    assert lipschitz_bound(module, torch.zeros(1, 36)).upper >= 1


def _written_out(q, k, v):
    return torch.bmm(F.softmax(torch.bmm(q[0], k[0].mT) / 2, -1), v[0])


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, _written_out])
def test_attention_counts_the_rows_of_its_values(attend):
    """With τ = 1/√d and rows of length √d: 2·√n for the queries, as much for the keys, √n for the values."""

    def heads(x):
        rows = F.rms_norm(x.view(1, 16, 2, 4).transpose(1, 2), (4,), eps=1.0)
        return attend(rows, rows, rows)

    assert lipschitz_bound(Op(heads).eval(), torch.zeros(1, 16, 8)).upper <= 5 * 4 * (1 + 1e-9)


def test_factors_whose_product_vanishes_count():
    module = Op(lambda x: x * 1e-200 * 1e-200 * 1e200 * 1e199).eval()
    assert lipschitz_bound(module, torch.zeros(1, 2, dtype=torch.float64)).upper == pytest.approx(0.1)
    assert lipschitz_bound(Op(lambda x: x * 1e-200 * 1e-200).eval(), torch.zeros(1, 2, dtype=torch.float64)).upper > 0
