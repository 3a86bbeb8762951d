"""Activation decay: the statement it makes, where it is found, and the loops it works in."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import equipoise.regularizers as reg
from equipoise.core import InputError, Refused


def mlp(seed=0, classes=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, classes))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.01, 2.0), st.integers(2, 8), st.floats(0.1, 5.0))
def test_the_smoothed_loss_lies_below_both_bounds(seed, sigma, classes, scale):
    """Erratum 16: it is an upper bound by Jensen, so a gap above it may be Monte-Carlo noise only (4 standard errors)."""
    g = torch.Generator().manual_seed(seed)
    h = scale * torch.randn(20, 7, generator=g, dtype=torch.float64)
    W = torch.randn(classes, 7, generator=g, dtype=torch.float64)
    y = torch.randint(classes, (20,), generator=g)
    z = h @ W.mT
    mean, error = reg.smoothed_cross_entropy(h, z, y, sigma, 2000, generator=g)
    base = cross_entropy(z, y, reduction="none")
    sharp = base + reg.centred_penalty(h, sigma, classes)
    assert (mean - 6 * error <= sharp + 1e-9).all()
    assert (sharp <= base + reg.jensen_penalty(h, sigma)).all()


def test_drawing_logits_has_the_law_of_drawing_weights():
    g = torch.Generator().manual_seed(0)
    h, W = torch.randn(1, 4, generator=g).double(), torch.randn(3, 4, generator=g).double()
    y, sigma, n = torch.tensor([1]), 0.7, 40_000
    noisy = (W + sigma * torch.randn(n, 3, 4, generator=g).double()) @ h[0]
    losses = cross_entropy(noisy, y.expand(n), reduction="none")
    mean, error = reg.smoothed_cross_entropy(h, h @ W.mT, y, sigma, n, generator=g)
    direct_error = float(losses.std()) / math.sqrt(n)
    assert abs(float(mean[0]) - float(losses.mean())) < 4 * math.hypot(direct_error, float(error[0]))


def test_taylor_is_second_order():
    """The error of the second-order form falls like σ⁴: halving σ divides it by about 16."""
    g = torch.Generator().manual_seed(1)
    h, W = torch.randn(1, 4, generator=g).double(), torch.randn(3, 4, generator=g).double()
    z, y = h @ W.mT, torch.tensor([2])
    nodes, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(9))
    grid = torch.cartesian_prod(nodes, nodes, nodes)
    mass = torch.cartesian_prod(*[weights / weights.sum()] * 3).prod(1)

    def smoothed(sigma):
        moved = z + sigma * float(h.norm()) * grid
        return float(mass @ cross_entropy(moved, y.expand(len(grid)), reduction="none"))

    errors = [smoothed(s) - float(cross_entropy(z, y)) - float(reg.taylor_penalty(h, z, s)[0]) for s in (0.2, 0.1)]
    assert 12 < errors[0] / errors[1] < 20


@pytest.mark.parametrize("form", ["jensen", "centred", "taylor"])
def test_forms_in_a_plain_loop(form):
    net, x = mlp(), torch.randn(16, 6)
    ad = reg.ActivationDecay(net, 0.3, form=form)
    z, h = net(x), net[:4](x)
    net(x)
    ad_value = ad()
    expected = {
        "jensen": 0.045 * h.square().sum(1).mean(),
        "centred": 0.8 * 0.045 * h.square().sum(1).mean(),
        "taylor": (0.045 * h.square().sum(1) * (z.softmax(1) * (1 - z.softmax(1))).sum(1)).mean(),
    }[form]
    assert ad_value.item() == pytest.approx(expected.item(), rel=1e-5)
    ad_value.backward()
    assert net[0].weight.grad.abs().sum() > 0


class Odd(nn.Module):
    """The last linear layer to be called is not the last to be defined."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def test_the_last_layer_is_the_last_one_called_or_the_one_named():
    net, x = Odd(), torch.randn(2, 4)
    ad = reg.ActivationDecay(net, 1.0)
    net(x)
    assert ad().item() == pytest.approx(0.5 * torch.relu(net.body(x)).square().sum(1).mean().item(), rel=1e-5)
    assert ad.name == "head"
    named = reg.ActivationDecay(net, 1.0, layer="body")
    net(x)
    assert named().item() == pytest.approx(0.5 * x.square().sum(1).mean().item(), rel=1e-5)
    with pytest.raises(InputError, match="'tail'"):
        reg.ActivationDecay(net, 1.0, layer="tail")


def test_one_penalty_per_forward_pass_and_hooks_go():
    net, x = mlp(), torch.randn(2, 6)
    with pytest.raises(InputError, match="call the model first"):
        reg.ActivationDecay(net, 0.1)()
    with reg.ActivationDecay(net, 0.1) as ad:
        net(x)
        ad()
        with pytest.raises(InputError, match="once per pass"):
            ad()
        reg.SpectralPenalty(net)  # between passes no layer carries a hook, so other tools are not disturbed
    fresh = mlp()
    with reg.ActivationDecay(fresh, 0.1):
        pass
    assert not fresh._forward_hooks
    assert not fresh._forward_pre_hooks
    for wrong in (-1.0, math.nan):
        with pytest.raises(InputError, match="sigma"):
            reg.ActivationDecay(net, wrong)
    with pytest.raises(InputError, match="form"):
        reg.ActivationDecay(net, form="exact")


def test_a_failing_forward_pass_leaves_no_hooks_on_layers():
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    ad = reg.ActivationDecay(net, 0.1)
    weight = net[1].weight
    net[1].weight = nn.Parameter(torch.zeros(3, 5))  # fails after the first layer was called
    with pytest.raises(RuntimeError):
        net(torch.randn(2, 6))
    assert all(not layer._forward_hooks for layer in net)
    net[1].weight = weight
    net(torch.randn(2, 6))
    assert ad.name == "2", "a pass that failed does not choose the layer"


def test_mask_counts_only_what_it_marks():
    net = nn.Linear(4, 3)
    ad = reg.ActivationDecay(net, 1.0)
    x = torch.randn(2, 5, 4)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    x[mask == 0] = 1e6  # padding must not be seen
    net(x)
    kept = torch.cat([x[0, :3], x[1, :1]])
    assert ad(mask=mask).item() == pytest.approx(0.5 * kept.square().sum(1).mean().item(), rel=1e-5)
    net(x)
    with pytest.raises(InputError, match="mask"):
        ad(mask=mask[:1])


def test_smoothed_loss_report_has_its_error():
    net, x = mlp(), torch.randn(10, 6)
    y = torch.randint(5, (10,))
    ad = reg.ActivationDecay(net, 0.2)
    base = cross_entropy(net(x), y)
    mean, error = ad.smoothed_loss(y, 2000, torch.Generator().manual_seed(0))
    assert float(mean.detach()) - 4 * float(error) <= float((base + ad()).detach())


def test_layerwise_variant_has_the_printed_coefficients():
    """Thesis, comparison with Baek et al.: 1e−3 for the inner activations and 1e−2 for the last layer, as coefficients."""
    default = reg.LayerwiseDecay(mlp())
    assert (default.activations, default.last_weight) == (1e-3, 1e-2)
    net, x = mlp(), torch.randn(8, 6)
    decay = reg.LayerwiseDecay(net, 0.2, 0.3)
    net(x)
    h1, h2 = net[:2](x), net[:4](x)
    expected = 0.2 * (h1.square().sum(1).mean() + h2.square().sum(1).mean()) + 0.3 * net[4].weight.square().sum()
    net(x)
    assert decay().item() == pytest.approx(expected.item(), rel=1e-5)
    decay.remove()
    assert not net._forward_hooks


both = pytest.mark.parametrize("make", [reg.ActivationDecay, reg.LayerwiseDecay], ids=lambda make: make.__name__)


class Checkpointed(nn.Module):
    """The head runs inside a checkpoint, or gets its input by name."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.fc, self.how = nn.Linear(4, 6), nn.Linear(6, 3), how

    def forward(self, x):
        h = self.trunk(x).tanh()
        if self.how == "named":
            return self.fc(input=h)
        return torch.utils.checkpoint.checkpoint(self.fc, h, use_reentrant=self.how == "reentrant")


@both
@pytest.mark.parametrize("how", ["named", "checkpoint"])
def test_heads_that_are_called_otherwise_have_the_same_gradient(make, how):
    gradients = []
    for way in (how, "plain"):
        model = Checkpointed(way)
        if way == "plain":
            model.forward = lambda x, model=model: model.fc(model.trunk(x).tanh())
        decay = make(model, 0.3)
        loss = model(torch.ones(2, 4)).square().mean() + decay()
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-7)


@both
def test_a_reentrant_checkpoint_is_refused_and_evaluation_is_not(make):
    model = Checkpointed("reentrant")
    decay = make(model, 0.3)
    with pytest.raises(Refused, match="use_reentrant=False"):
        model(torch.ones(2, 4))
    with torch.no_grad():
        model(torch.ones(2, 4))
        assert decay().item() > 0


@both
def test_copies_may_be_made_while_a_pass_is_pending(make):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    decay = make(model, 0.3)
    model(torch.ones(2, 4))
    copied, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    value = decay()
    for other in (copied, stored):
        other(torch.zeros(2, 4))
    with pytest.raises(InputError, match="latest forward pass"):
        decay()  # the copies' passes are their own
    model(torch.ones(2, 4))
    assert torch.equal(decay(), value)
