import itertools
import math

import pytest
import torch
from torch.autograd import gradcheck

from equipoise.smoothing import SimplexMap
from equipoise.smoothing.simplex import hardmax

NAMES = ["softmax", "sparsemax", "hardmax"]


def _project(z: torch.Tensor, mass: float) -> torch.Tensor:
    """Projection on the simplex by trying every support."""
    best, answer = math.inf, None
    for size in range(1, len(z) + 1):
        for support in itertools.combinations(range(len(z)), size):
            index = list(support)
            p = torch.zeros_like(z)
            p[index] = z[index] - (z[index].sum() - mass) / size
            if (p >= -1e-12).all() and (p - z).norm() < best:
                best, answer = float((p - z).norm()), p
    return answer


@pytest.mark.parametrize("mass", [0.5, 1.0, 3.0])
def test_sparsemax_is_the_projection(mass):
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        z = 2 * torch.randn(5, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(SimplexMap("sparsemax", mass=mass)(z), _project(z, mass))
        torch.testing.assert_close(SimplexMap("sparsemax", 0.7, mass)(z), _project(z / 0.7, mass))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_on_the_simplex(name, scale):
    z = scale * torch.randn(50, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for mass, temperature in [(1.0, 1.0), (2.0, 0.1), (0.3, 20.0)]:
        p = SimplexMap(name, temperature, mass)(z)
        assert (p >= 0).all()
        torch.testing.assert_close(p.sum(-1), torch.full((50,), mass, dtype=torch.float64))
        assert (p.argmax(-1) == z.argmax(-1)).all()
        # mass r at temperature T is mass 1 at temperature rT, scaled
        torch.testing.assert_close(p / mass, SimplexMap(name, temperature * mass)(z))


def test_gradients_are_exact():
    z = torch.randn(6, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    assert gradcheck(SimplexMap("sparsemax", 0.7, 1.3), (z,), atol=1e-7)
    assert gradcheck(SimplexMap("softmax", 0.7, 1.3), (z,))
    assert not hardmax(z).requires_grad


@pytest.mark.parametrize("name", ["softmax", "sparsemax"])
def test_constants_hold_and_are_sharp(name):
    """Jacobians at many points: component and pair norms stay below the constants and reach them."""
    classes = 4
    generator = torch.Generator().manual_seed(3)
    function = SimplexMap(name)
    most = {"component": 0.0, "pair": 0.0}
    points = [torch.randn(classes, generator=generator, dtype=torch.float64) * s for s in [0.01, 0.1, 1, 3] * 40]
    points += [torch.tensor([0.0, 0.0, -50, -50], dtype=torch.float64), torch.zeros(classes, dtype=torch.float64)]
    for z in points:
        jacobian = torch.autograd.functional.jacobian(function, z)
        most["component"] = max(most["component"], float(jacobian.norm(dim=1).max()))
        most["pair"] = max(most["pair"], float((jacobian[0] - jacobian[1]).norm()))
    chosen = SimplexMap(name)
    bounds = (chosen.component_lipschitz(1.0, classes), chosen.pair_lipschitz(1.0))
    for bound, seen in zip(bounds, most.values(), strict=True):
        assert seen <= bound + 1e-12
        assert seen == pytest.approx(bound, rel=1e-6)


def test_constants_go_through_upper_bounds():
    assert SimplexMap("softmax", 2.0).component_lipschitz(3.0, 10) == pytest.approx(3 / (4 * math.sqrt(2)))
    assert SimplexMap("softmax", 2.0, 3.0).component_lipschitz(3.0, 10) == pytest.approx(1 / (4 * math.sqrt(2)))
    assert math.isinf(SimplexMap("hardmax").component_lipschitz(3.0, 10))
    assert SimplexMap("hardmax").component_lipschitz(0.0, 10) == 0.0
