"""L2 attention and attention from a convex potential: their constants are attacked."""

import math

import pytest
import torch

from equipoise.core import InputError
from equipoise.lipschitz import lipschitz_bound
from equipoise.nn import ConvexAttention, L2Attention
from equipoise.nn.attention import attention_gain

pytestmark = pytest.mark.medium


def mixed(Q, causal):
    scores = -(Q[:, None] - Q[None]).square().sum(-1)
    if causal:
        scores = scores.masked_fill(torch.ones(len(Q), len(Q)).triu(1).bool(), -math.inf)
    return scores.softmax(-1) @ Q


def worst(function, x, steps, parameters=()):
    """The largest singular value of the Jacobian that gradient ascent on tokens and parameters meets."""
    ascent, best = torch.optim.Adam([x.requires_grad_(), *parameters], lr=0.05), 0.0
    for _ in range(steps):
        J = torch.autograd.functional.jacobian(function, x, create_graph=True).reshape(x.numel(), -1)
        u, s, v = torch.linalg.svd(J.detach())
        best = max(best, float(s[0]))
        ascent.zero_grad()
        (-(u[:, 0] @ J @ v[0])).backward()
        ascent.step()
    return best


def star(tokens, distance):
    """One token in the middle, the others at the same distance from it and far from each other."""
    return torch.cat([torch.zeros(1, tokens - 1), distance * torch.eye(tokens - 1)]).double()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 4, 6])
def test_no_tokens_found_exceed_the_gain(tokens, causal):
    generator = torch.Generator().manual_seed(tokens)
    starts = [scale * torch.randn(tokens, 2, generator=generator).double() for scale in (0.5, 2.0)]
    starts += [star(tokens, 1.0)] if tokens > 1 else []
    found = max(worst(lambda q: mixed(q, causal), Q, 15) for Q in starts)
    assert found <= attention_gain(tokens) * (1 + 1e-12)
    assert found >= 0.25 * attention_gain(tokens)  # and the bound is no idle one


@pytest.mark.parametrize("causal", [False, True])
def test_the_layer_stays_below_its_bound(causal):
    torch.manual_seed(0)
    layer = L2Attention(6, heads=2, context=8, causal=causal).double().eval()
    with torch.no_grad():
        layer.log_temperature.copy_(torch.tensor([-1.0, 2.0]))
    limit = float(layer.lipschitz_upper((5, 6)))
    report = lipschitz_bound(layer, torch.zeros(1, 5, 6, dtype=torch.float64))
    assert report.upper == pytest.approx(limit)
    for scale in (0.1, 1.0, 5.0):
        x, y = scale * torch.randn(2, 200, 5, 6).double()
        y = x + 10 ** torch.linspace(-3, 0.5, 200, dtype=torch.float64)[:, None, None] * y / scale
        stretched = (layer(x) - layer(y)).flatten(1).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
        assert float(stretched.detach().max()) <= limit


def test_the_future_is_not_read():
    layer = L2Attention(4, heads=1, context=6).eval()
    x = torch.randn(1, 6, 4)
    y = x.clone()
    y[:, 4:] += 1
    assert torch.equal(layer(x)[:, :4], layer(y)[:, :4])
    with pytest.raises(InputError, match="at most 6 tokens"):
        layer(torch.zeros(1, 7, 4))


FORMS = [{}, {"memory": True, "hidden": 6}, {"window": 1}, {"window": 3}]
forms = pytest.mark.parametrize("form", FORMS, ids=str)


def by_definition(layer, x):
    """The printed formulas, token by token."""
    U, threshold, weights = layer.effective()
    y = x.clone()
    for h, (block, delta) in enumerate(zip(U.chunk(layer.heads), threshold, strict=True)):
        q = x @ block.mT
        for i in range(len(x)):
            if layer.memory:
                y[i] -= 4 * delta * block.mT @ (q[i] / delta).softmax(0)
                continue
            for j in range(len(x)) if not layer.window else range(max(0, i - layer.window), i):
                z = q[i] - q[j]
                step = weights[h, i - j - 1] if layer.window else 2 / len(x)
                y[i] -= step * block.mT @ (z * min(1.0, float(delta / z.norm().clamp_min(1e-30))))
    return y / math.sqrt(2) if layer.window else y


@forms
def test_convex_attention_is_the_printed_formula(form):
    torch.manual_seed(0)
    layer = ConvexAttention(4, heads=2, dtype=torch.float64, **form).eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.log_threshold.copy_(torch.tensor([-0.5, 0.3]))
        layer.logits.normal_()
        torch.testing.assert_close(layer(x), by_definition(layer, x))


@forms
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_training_weights_and_tokens_to_break_it(form, scale):
    torch.manual_seed(1)
    layer = ConvexAttention(2, heads=2, dtype=torch.float64, **form)
    x = scale * torch.randn(4, 2, dtype=torch.float64)
    assert 0.9 <= worst(layer, x, 40, layer.parameters()) <= 1 + 1e-12  # no idle bound
    layer = layer.float().eval()
    example = torch.zeros(1, 4, 2)
    for network in (layer, layer.export()):
        assert lipschitz_bound(network, example).upper <= 1 + 1e-5
    J = torch.autograd.functional.jacobian(layer, x.detach().float()).reshape(x.numel(), -1)
    assert float(torch.linalg.matrix_norm(J, 2)) <= 1 + 1e-5


def test_a_window_reads_no_future_and_nothing_beyond():
    block, x = ConvexAttention(4, heads=2, window=2).eval(), torch.randn(1, 6, 4)
    y = x.clone()
    y[:, 3] += 1
    same = (block(x) == block(y)).all(-1)[0].tolist()
    assert same == [True, True, True, False, False, False]
    y = x.clone()
    y[:, 0] += 1
    assert torch.equal(block(x)[:, 3:], block(y)[:, 3:])


@pytest.mark.parametrize("options", [{"heads": 3}, {"heads": 0}, {"window": -1}, {"window": 2, "memory": True}])
def test_what_no_attention_is_made_of(options):
    with pytest.raises(InputError, match=r"heads|window"):
        ConvexAttention(4, **options)
