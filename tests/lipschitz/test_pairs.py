"""Constants by pairs of classes: never below what a pair of logits does, and the radii from them attacked by exact search."""

import pytest
import torch
from torch import nn

from equipoise.lipschitz import lipschitz_bound
from equipoise.nn import LastLayerNormalised, Lipschitz, MaxMin, SNLinear
from equipoise.smoothing import margin_radius

#: networks on the plane whose last layer is linear
ENDS_LINEAR = {
    "dense": lambda: nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)),
    "two linear maps": lambda: nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3)),
    "unit rows": lambda: nn.Sequential(SNLinear(2, 8), MaxMin(), LastLayerNormalised(8, 5)),
    "scaled": lambda: Lipschitz(3.0, nn.Sequential(SNLinear(2, 6), MaxMin(), SNLinear(6, 4))),
    "linear": lambda: nn.Sequential(nn.Linear(2, 3)),
}


@pytest.mark.parametrize("name", ENDS_LINEAR)
def test_no_pair_of_logits_is_steeper_than_its_constant(name):
    torch.manual_seed(0)
    model = ENDS_LINEAR[name]().eval()
    pairs = lipschitz_bound(model, torch.zeros(1, 2)).pairs
    assert bool((pairs <= 2 * lipschitz_bound(model, torch.zeros(1, 2)).product * (1 + 1e-12)).all())
    x = 3 * torch.randn(60, 2)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: model(v[None])[0]))(x).double()
    steep = (jacobians[:, :, None] - jacobians[:, None]).norm(dim=-1).amax(0)
    assert bool((steep <= pairs * (1 + 1e-6)).all())
    for last in (nn.ReLU(), nn.Softmax(1)):
        assert lipschitz_bound(nn.Sequential(model, last).eval(), torch.zeros(1, 2)).pairs is None


@pytest.mark.parametrize("name", ENDS_LINEAR)
def test_a_fine_search_inside_the_radius_finds_no_other_class(name):
    """All directions and many distances in the plane: what is certified stays, and the linear network is met exactly."""
    torch.manual_seed(1)
    model = ENDS_LINEAR[name]().eval().double()
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
        if name == "linear":
            far = x[:, None] + 1.001 * radius[:, None, None] * ring
            assert bool((model(far.reshape(-1, 2)).argmax(1).reshape(20, -1) != y[:, None]).any(1).all())
