"""Constants by pairs of classes: never below what a pair of logits does, and the radii from them attacked by exact search."""

import pytest
import torch
from torch import nn

from equipoise.lipschitz import certified_radius, lipschitz_bound
from equipoise.nn import MaxMin, SNLinear
from equipoise.nn.models import build
from equipoise.nn.normalise import LastLayerNormalised
from equipoise.nn.wrappers import Lipschitz
from equipoise.smoothing import margin_radius
from equipoise.train.metrics import certified_bound


def plain_mlp():
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))


def two_linear_maps():
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3))


def unit_rows():
    return nn.Sequential(SNLinear(2, 8), MaxMin(), LastLayerNormalised(8, 5))


def scaled():
    return Lipschitz(3.0, nn.Sequential(SNLinear(2, 6), MaxMin(), SNLinear(6, 4)))


def linear():
    return nn.Sequential(nn.Linear(2, 3))


#: networks on the plane whose last layer is linear
ENDS_LINEAR = [plain_mlp, two_linear_maps, unit_rows, scaled, linear]


@pytest.mark.parametrize("make", ENDS_LINEAR)
def test_no_pair_of_logits_is_steeper_than_its_constant(make):
    torch.manual_seed(0)
    model = make().eval()
    pairs = lipschitz_bound(model, torch.zeros(1, 2)).pairs
    assert bool((pairs <= 2 * lipschitz_bound(model, torch.zeros(1, 2)).product * (1 + 1e-12)).all())
    x = 3 * torch.randn(60, 2)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: model(v[None])[0]))(x).double()
    steep = (jacobians[:, :, None] - jacobians[:, None]).norm(dim=-1).amax(0)
    assert bool((steep <= pairs * (1 + 1e-6)).all())


@pytest.mark.parametrize("make", ENDS_LINEAR)
def test_a_fine_search_inside_the_radius_finds_no_other_class(make):
    """All directions and many distances in the plane: what is certified stays, and the linear network is met exactly."""
    torch.manual_seed(1)
    model = make().eval().double()
    x = torch.randn(20, 2, dtype=torch.float64)
    with torch.no_grad():
        z = model(x)
        y = z.argmax(1)
        report = lipschitz_bound(model, x[:1])
        radius = margin_radius(z, y, report.pairs)
        angle = torch.linspace(0, 2 * torch.pi, 721, dtype=torch.float64)
        ring = torch.stack([angle.cos(), angle.sin()], 1)
        for share in (0.5, 0.9, 0.999):
            near = x[:, None] + share * radius[:, None, None] * ring
            assert bool((model(near.reshape(-1, 2)).argmax(1).reshape(20, -1) == y[:, None]).all())
        if make is linear:
            far = x[:, None] + 1.001 * radius[:, None, None] * ring
            assert bool((model(far.reshape(-1, 2)).argmax(1).reshape(20, -1) != y[:, None]).any(1).all())


def test_pairs_are_those_of_the_radius_by_sample():
    torch.manual_seed(2)
    model, x = plain_mlp().eval(), torch.randn(4, 2)
    found = certified_radius(model, x, effort="fast").radius
    with torch.no_grad():
        z = model(x)
    expected = margin_radius(z, z.argmax(1), lipschitz_bound(model, x[:1]).pairs)
    assert torch.allclose(found, expected, rtol=1e-3)  # norms are proved to that tolerance


def test_training_measures_by_pairs():
    """The rows of a LiResNet's last layer have norm 1: the constant of all logits is no use, that of pairs is at most 2."""
    torch.manual_seed(0)
    model = build("liresnet", in_channels=1, input_size=8, channels=8, depth=1, dense_depth=1, hidden=16).eval()
    found = certified_bound(model, (1, 8, 8), 1e-3)
    assert found.pairs.amax() <= 2.0001
    x = torch.rand(6, 1, 8, 8)
    with torch.no_grad():
        z = model(x)
    y = z.argmax(1)
    by_pairs = margin_radius(z, y, found.pairs)
    whole = margin_radius(z, y, found.upper)
    assert torch.equal(found.radii(z, y), by_pairs.maximum(whole))
    assert bool((by_pairs > whole).any())


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Sequential(nn.Linear(2, 3), nn.Softmax(1))],
    ids=["activation", "softmax"],
)
def test_what_does_not_end_in_a_linear_layer_has_no_pairs(model):
    assert lipschitz_bound(model.eval(), torch.zeros(1, 2)).pairs is None
