"""`QKGuard`: no logit above its number on any rung, and none above the limit after a step; logs of updates."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.core import InputError


class Rotated(nn.Module):
    """Grouped keys and rotary embeddings, with the names of Llama."""

    def __init__(self):
        super().__init__()
        self.num_attention_heads = 4
        self.q_proj, self.k_proj = nn.Linear(16, 32, bias=False), nn.Linear(16, 16)

    def forward(self, x):
        q, k = self.q_proj(x).unflatten(-1, (4, 8)), self.k_proj(x).unflatten(-1, (2, 8)).repeat_interleave(2, -2)
        angle = torch.arange(x.shape[1])[:, None, None] * 10.0 ** -torch.arange(4)
        cos, sin = angle.cos(), angle.sin()

        def turn(v):
            a, b = v[..., :4], v[..., 4:]
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        return torch.einsum("bihd,bjhd->bhij", turn(q), turn(k)) / 8**0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(16), Rotated()

    def forward(self, x):
        return self.self_attn(self.input_layernorm(x))


class Plain(nn.Module):
    """Torch's attention behind a LayerNorm; returns its logits."""

    def __init__(self, bias=True):
        super().__init__()
        self.norm_first = True
        self.norm1, self.self_attn = nn.LayerNorm(16), nn.MultiheadAttention(16, 4, bias=bias, batch_first=True)

    def forward(self, x):
        h = self.norm1(x)
        self.self_attn(h, h, h, need_weights=False)
        W, b = self.self_attn.in_proj_weight, self.self_attn.in_proj_bias
        q, k, _ = nn.functional.linear(h, W, b).unflatten(-1, (3, 4, 4)).unbind(-3)
        return torch.einsum("bihd,bjhd->bhij", q, k) / 4**0.5


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=1, n_head=4)
    block = transformers.GPT2Model(config).h[0]

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            q, k, _ = self.block.attn.c_attn(self.block.ln_1(x)).unflatten(-1, (3, 4, 4)).unbind(-3)
            return torch.einsum("bihd,bjhd->bhij", q, k) / 4**0.5

    return Logits()


MODELS = {"torch": Plain, "no bias": lambda: Plain(False), "rotary": Block, "gpt2": gpt2}


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    return model.double()


@pytest.mark.parametrize("rung", ["weights", "batch"])
@pytest.mark.parametrize("name", MODELS)
def test_no_logit_exceeds_its_number_and_none_the_limit(name, rung):
    model = build(name)
    guard = eq.optim.QKGuard(model, limit=3.0, rung=rung)
    x = 100 * torch.randn(2, 9, 16, dtype=torch.float64)
    for _ in range(2):  # the second time with weights that were rescaled
        seen = model(x).abs().amax((0, 2, 3))
        (held,) = guard.logits().values()
        assert all(float(s) <= h * (1 + 1e-12) for s, h in zip(seen, held, strict=True))
        if name != "rotary":
            assert all(h <= (300 if rung == "weights" else 20) * float(s) for s, h in zip(seen, held, strict=True))
        guard.step()
    assert float(model(x).abs().max()) <= 3.0 * (1 + 1e-3)
    assert guard.rescaled > 0
    if rung == "weights":
        assert guard.scalars()["logits/largest"] <= 3.0 * (1 + 1e-6)


def test_the_ceiling_is_attained_up_to_the_mean():
    """One head, W_q = W_k = diag(5, 1, ...): the worst input is a multiple of the first unit vector."""
    model = Plain(bias=False).double()
    with torch.no_grad():
        model.self_attn.in_proj_weight.zero_()
        model.self_attn.in_proj_weight[0, 0] = model.self_attn.in_proj_weight[16, 0] = 5.0
    (ceilings,) = eq.optim.QKGuard(model, rung="weights").ceilings().values()
    x = torch.zeros(1, 1, 16, dtype=torch.float64)
    x[..., 0] = 1e6
    assert 0.9 * ceilings[0] <= float(model(x)[0, 0].detach()) <= ceilings[0] <= 25 * 16 / 2 * 1.001


def test_exact_numbers_and_refusals():
    model = Plain()
    guard = eq.optim.QKGuard(model, limit=1.0, rung="exact")
    before = model.self_attn.in_proj_weight.detach().clone()
    guard.record("self_attn", torch.tensor([0.5, 4.0, 0.5, 0.5]))
    guard.record("self_attn", torch.tensor([0.7, 1.0, 0.5, 0.5]))
    guard.step()
    share = (model.self_attn.in_proj_weight.detach() / before).unflatten(0, (3, 4, 4)).amax((2, 3))
    assert torch.allclose(share, torch.tensor([[1, 0.5, 1, 1], [1, 0.5, 1, 1], [1, 1, 1, 1]]))
    with pytest.raises(InputError, match="heads"):
        guard.record("self_attn", torch.ones(3))
    with pytest.raises(InputError, match="no attention layer"):
        eq.optim.QKGuard(nn.Linear(2, 2))
    model.norm_first = False
    with pytest.raises(InputError, match="nothing is known of the inputs"):
        eq.optim.QKGuard(model, rung="weights")

    class Shifted(nn.LayerNorm):
        """With the gain 1 + weight."""

    for norm in (nn.BatchNorm1d(16), Shifted(16), nn.LayerNorm((5, 16), elementwise_affine=False)):
        with pytest.raises(InputError, match="gain is known"):
            eq.optim.QKGuard(model, rung="weights", norms={"self_attn": norm}).ceilings()


def bert(**parts):
    """Queries and keys with the names of BERT, and more parts."""
    module = nn.Module()
    module.num_attention_heads = 4
    for name, part in {"query": nn.Linear(16, 16), "key": nn.Linear(16, 16), **parts}.items():
        setattr(module, name, part)
    return nn.ModuleDict({"self_attn": module})


#: (model, whether its attention is read off, whether queries and keys may be turned, whether its inputs are known)
READ = {
    "plain": (bert, True, False, False),
    "turned": (lambda: bert(rotary_value=False), True, True, False),
    "normalised queries": (lambda: bert(q_layernorm=nn.LayerNorm(4)), False, False, False),
    "another layer": (
        lambda: bert(query=type("Quantised", (nn.Linear,), {"forward": None})(16, 16)),
        False,
        False,
        False,
    ),
    "learned key": (lambda: nn.Sequential(nn.MultiheadAttention(16, 4, add_bias_kv=True)), False, False, False),
    "packed by heads": (lambda: bert(query=nn.Identity(), c_attn=nn.Linear(16, 48)), False, False, False),
    "self-attention": (lambda: nn.TransformerEncoderLayer(16, 4, 8, norm_first=True), True, False, True),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_off_a_model(name):
    make, read, rotary, known = READ[name]
    if not read:
        with pytest.raises(InputError, match="no attention layer"):
            eq.optim.QKGuard(make())
        return
    layer = eq.optim.QKGuard(make()).attentions["self_attn"]
    assert (layer.rotary, layer.norm is not None) == (rotary, known)


def test_keys_of_cross_attention_are_not_bounded_by_the_norm_of_the_queries():
    layer = nn.TransformerDecoderLayer(16, 4, 8, norm_first=True)
    ceilings = eq.optim.QKGuard(layer).ceilings()
    assert max(ceilings["self_attn"]) < math.inf == min(ceilings["multihead_attn"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_norms_of_updates_and_weights_per_matrix_and_head(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3)).to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    log = eq.optim.norms(optimizer, net, heads={"0.*": 4}, every=2)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for step in range(4):
        before = [p.detach().to(wide, copy=True) for p in net.parameters()]
        net(torch.randn(5, 12, dtype=dtype)).abs().square().sum().backward()
        optimizer.step()
        if step % 2:
            continue  # nothing is measured, the last numbers stay
        rows = log()
        assert list(rows) == ["0.weight", "1.weight"]
        for (name, p), old in zip(net.named_parameters(), before, strict=True):
            if p.dim() < 2:
                continue
            found, now = rows[name], p.detach().to(wide)
            for bracket, truth in ((found.weight, now), (found.update, now - old)):
                blocks = truth.unflatten(0, (4, -1)) if name == "0.weight" else truth
                sigma = torch.linalg.matrix_norm(blocks, 2)
                assert bool((torch.as_tensor(bracket.lower) <= sigma * (1 + 1e-6)).all())
                assert bool((sigma <= torch.as_tensor(bracket.upper) * (1 + 1e-6)).all())
    assert log.scalars()["update/1.weight/upper"] > 0
    assert "weight/0.weight[3]/lower" in log.scalars()
    log.detach()


def test_a_bias_that_cancels_the_shift_leaves_its_rounding():
    """Computed is a = 0, true is the rounding of W·β: the ceiling covers it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 1, 16, norm_first=True).double().eval()
    attention, norm = layer.self_attn, layer.norm1
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.normal_().mul_(1e8)
        attention.in_proj_bias.copy_(-(attention.in_proj_weight @ norm.bias))
    beta = [Fraction(v) for v in norm.bias.tolist()]
    rows = zip(attention.in_proj_weight.tolist(), attention.in_proj_bias.tolist(), strict=True)
    exact = [sum((Fraction(w) * v for w, v in zip(row, beta, strict=True)), Fraction(bias)) for row, bias in rows]
    product = float(sum(q * k for q, k in zip(exact[:8], exact[8:16], strict=True)))
    (ceiling,) = eq.optim.QKGuard(layer, limit=1.0, rung="weights").ceilings()["self_attn"]
    assert 0 < abs(product) / 8**0.5 <= ceiling
