"""`norm="token"`: against the largest change of a token that power iterations on the Jacobian find, and at every length."""

import itertools
import math

import pytest
import torch
from lipschitz_nets import Op
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.core import InputError, Refused
from equipoise.lipschitz import lipschitz_bound
from equipoise.nn import ConvexAttention, L2Attention, SLLLinear

TOKENS, WIDTH = 4, 6
torch.manual_seed(0)
A, B, C = torch.randn(3, WIDTH, WIDTH, dtype=torch.float64) / 2
KERNEL = torch.randn(WIDTH, WIDTH, 3, dtype=torch.float64) / 2
MASK = torch.rand(TOKENS, WIDTH) > 0.5


def attention(x: Tensor, masked: bool = False) -> Tensor:
    q, k, v = ((x @ W).unflatten(-1, (2, -1)).transpose(1, 2) for W in (A, B, C))
    return F.scaled_dot_product_attention(q, k, v, is_causal=masked).transpose(1, 2).flatten(2)


#: name: (function, how many times the largest change found the bound may be)
CASES = {
    "dense": (lambda x: x @ A + 1, 1.01),
    "residual": (lambda x: x + F.gelu(x @ A) @ B, 4),
    "centred over tokens": (lambda x: x - x.mean(1, keepdim=True), 1.4),
    "a token before": (lambda x: torch.cat([x[..., :3], F.pad(x[..., 3:], (0, 0, 1, -1))], -1), 1.01),
    "tokens mixed by a matrix": (lambda x: (x.mT @ A[:TOKENS, :TOKENS]).mT, 3),
    "convolution over tokens": (lambda x: F.conv1d(x.mT, KERNEL, padding=1).mT, 4),
    "mask": (lambda x: torch.where(MASK, x, x.flip(1)), 1.5),
    "index": (lambda x: x[:, torch.tensor([0, 0, 1, 3])][..., torch.tensor([5, 5, 5, 1, 0, 2])], 1.5),
    "broadcast": (lambda x: x[:, :1] + x[..., :1] * A[0], 3),
    "mean of tokens": (lambda x: x.mean(1), 1.01),
    "softmax of tokens": (lambda x: (3 * x).softmax(1), 4),
    "log-softmax": (lambda x: x.log_softmax(-1), 3),
    "gate": (lambda x: torch.tanh(x @ A) * torch.sigmoid((x @ B)[..., :1]), 5),
    "gram matrix": (lambda x: torch.tanh(x) @ torch.tanh(x).mT, 5),
    "norms of rows": (lambda x: F.rms_norm(x, (WIDTH,), eps=0.1) @ A, 1.3),
    "attention": (lambda x: attention(F.layer_norm(x, (WIDTH,), eps=0.1)), 60),
    "causal attention": (lambda x: x + attention(F.normalize(x, dim=-1, eps=0.3), True), 40),
    "L2 attention": (L2Attention(WIDTH, 2, TOKENS), 12),
    "pairs": (ConvexAttention(WIDTH, heads=2), 1.6),
    "memory": (ConvexAttention(WIDTH, memory=True), 1.01),
    "causal pairs": (ConvexAttention(WIDTH, heads=2, window=3), 3),
    "residual that is a gradient": (SLLLinear(WIDTH, WIDTH), 1.1),
}  # fmt: skip


def largest_change(model: nn.Module, scale: float) -> float:
    """A lower bound of the constant: for every token of the output, alternating maximisation over both sides."""
    x = scale * torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    y = model(x)
    J = torch.autograd.functional.jacobian(model, x).reshape(-1, y.shape[-1], TOKENS, WIDTH)
    u = torch.randn(*J.shape[:2], dtype=torch.float64)
    for _ in range(25):
        v = F.normalize(torch.einsum("io,iojd->ijd", u, J), dim=-1)
        image = torch.einsum("iojd,ijd->io", J, v)
        u = F.normalize(image, dim=-1)
    return float(image.norm(dim=-1).max())


@pytest.mark.parametrize("name", CASES)
def test_no_token_changes_by_more(name):
    function, loose = CASES[name]
    model = (function if isinstance(function, nn.Module) else Op(function)).double().eval()
    for p in model.parameters():
        p.data = torch.randn(p.shape, dtype=torch.float64)
    x = torch.zeros(1, TOKENS, WIDTH, dtype=torch.float64)
    upper = lipschitz_bound(model, x, norm="token").upper
    lower = max(largest_change(model, scale) for scale in (0.01, 0.1, 0.5, 2.0))
    assert lower <= upper * (1 + 1e-9)
    assert upper <= loose * lower
    assert upper <= math.sqrt(TOKENS) * lipschitz_bound(model, x, chain="closed").upper * (1 + 1e-9)


def test_attention_costs_the_same_at_every_length():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True).eval()
    short, long = (lipschitz_bound(layer, torch.zeros(1, n, 8), norm="token") for n in (3, 48))
    assert long.upper == pytest.approx(short.upper, rel=1e-9)
    assert 3 * long.upper < lipschitz_bound(layer, torch.zeros(1, 48, 8)).upper
    assert "max over tokens" in str(long)
    assert long.to_dict()["norm"] == "token"
    assert long.fix_first()[0].kind == "layer norm"


def test_the_ball_is_one_of_tokens_and_other_inputs_are_refused():
    raw = Op(attention).eval()
    x = torch.zeros(1, TOKENS, WIDTH, dtype=torch.float64)
    with pytest.raises(Refused, match="ball"):
        lipschitz_bound(raw, x, norm="token")
    upper = lipschitz_bound(raw, x, norm="token", ball=1.0).upper
    assert all(largest_change(raw, 0.1 * s) <= upper for s in range(1, 4))
    for shape in ((1, 5), (1, 3, 5, 5)):
        with pytest.raises(InputError, match="tokens, features"):
            lipschitz_bound(nn.ReLU(), torch.zeros(shape), norm="token")


def test_written_out_dense_layers_are_bounded_as_well():
    """Core operations view the tokens as a matrix, multiply, and view back: slices of a packed layer keep norms of their own."""

    def packed(layer: nn.ModuleDict, x: Tensor) -> Tensor:
        q, k, v = layer["qkv"](layer["norm"](x)).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v

    def in_heads(layer: nn.ModuleDict, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in layer["qkv"](layer["norm"](x)).chunk(3, -1))
        return ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)

    for function, norm in itertools.product((packed, in_heads), ("l2", "token")):
        model = Op(function, norm=nn.LayerNorm(WIDTH), qkv=nn.Linear(WIDTH, 3 * WIDTH)).eval()
        program = torch.export.export(model, (torch.zeros(1, TOKENS, WIDTH),))
        both = [lipschitz_bound(p, norm=norm).upper for p in (program, program.run_decompositions())]
        assert both[1] == pytest.approx(both[0], rel=1e-3)
