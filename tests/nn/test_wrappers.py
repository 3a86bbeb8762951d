"""A chosen constant reaches the whole network, also one that was built before, and skip connections stay at 1."""

import pytest
import torch
from nn_parts import jacobian_norm
from torch import nn
from torch.nn.utils import parametrize

from equipoise.conversion import make_lipschitz
from equipoise.core import Bound, InputError, Kind, Refused
from equipoise.core.modules import by_construction
from equipoise.lipschitz import lipschitz_bound
from equipoise.maps import Geometry
from equipoise.nn import ConvexResidual, Lipschitz, MaxMin, MaxPool2d, SpaceToDepth, SRConv2d, SRLinear, known_constant
from equipoise.nn.activations import Contracted, HouseholderActivation
from equipoise.nn.parametrize import Parametrization
from equipoise.nn.pooling import ScaledAvgPool2d


@pytest.mark.parametrize("k", [0.1, 1.0, 7.0])
def test_the_constant_reaches_a_network_that_was_built_before(k):
    """Regression: a peer hands the constant of a whole Sequential down to layers that were built already; it never arrives."""
    torch.manual_seed(0)
    built = nn.Sequential(SpaceToDepth(2), nn.Flatten(), MaxMin())  # an isometry: the constant is attained
    net = Lipschitz(k, built).eval()
    x = torch.randn(1, 4, 4, dtype=torch.float64)
    assert jacobian_norm(net, x) == pytest.approx(k)
    bound = lipschitz_bound(net, x[None]).upper
    assert k * (1 - 1e-6) <= bound <= k * (1 + 1e-6)
    assert known_constant(net) == k
    assert torch.allclose(net(x[None]), k * built(x[None]))


def test_nesting_does_not_multiply():
    f = nn.Sequential(nn.Flatten(), MaxMin())
    net = Lipschitz(2.0, nn.Sequential(Lipschitz(3.0, f), Lipschitz(5.0, MaxMin())))
    assert jacobian_norm(net, torch.randn(4, dtype=torch.float64)) == pytest.approx(2.0)


def hooked():
    net = MaxMin()
    net.register_forward_hook(lambda module, args, output: 10 * output)
    return net


def ten_times_a(kind, *args):
    return type("Ten", (kind,), {"forward": lambda self, x: 10 * kind.forward(self, x)})(*args)


def patched():
    layer = SRLinear(2, 2)
    layer.forward = lambda x: 10 * x
    return layer


def other_stride():
    layer = SRConv2d(2, 8, 3, stride=2, padding=1)
    layer.stride = (1, 1)  # a weight made for stride 2 has norm 1.46 at stride 1
    return layer


def unsound():
    """Regression: a construction of the user's was given the constant 1, and printed as proved."""
    layer = nn.Linear(2, 2)
    kind = type("Unsound", (Parametrization,), {"construct": ten_times})
    return parametrize.register_parametrization(layer, "weight", kind(Geometry((2, 2))))


def ten_times(self, raw):
    return 10 * raw


#: modules of which nothing is known, or another forward pass than the one the claim is about
UNKNOWN = {
    "plain weights": lambda: nn.Linear(2, 2),
    "batch norm": lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2)),
    "hook": hooked,
    "subclass of torch's": lambda: ten_times_a(nn.ReLU),
    "subclass of ours": lambda: ten_times_a(MaxMin),
    "subclass of a layer": lambda: ten_times_a(SRLinear, 2, 2),
    "patched": patched,
    "other stride": other_stride,
    "unsound construction": unsound,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_constants_are_refused(name):
    module = UNKNOWN[name]()
    assert known_constant(module) is None
    assert known_constant(nn.Sequential(MaxMin(), module)) is None
    with pytest.raises(Refused, match="by_construction"):
        Lipschitz(1.0, module)


class Half(nn.Module):
    lipschitz_upper = by_construction(0.5)

    def forward(self, x):
        return x / 2


class Both(Half):
    """A claim by construction and a measured one, on one attribute."""

    def forward(self, x):
        return x / 4

    @by_construction(lambda self: None if self.training else 0.25)
    def lipschitz_upper(self, input_shape):
        """A quarter."""
        return Bound(0.25, Kind.UPPER, "measured")


def test_one_attribute_states_both_claims():
    assert known_constant(Half()) == 0.5
    assert not hasattr(Half(), "lipschitz_upper")  # nothing is known of the weights it has now
    both = Both()
    assert known_constant(both) is None
    assert known_constant(both.eval()) == 0.25
    assert both.lipschitz_upper((3,)).value == 0.25
    assert lipschitz_bound(nn.Sequential(both, nn.ReLU()).eval(), torch.zeros(1, 3)).layers[0].kind == "Both"


@pytest.mark.parametrize("value", [float("nan"), -1.0, Bound(1.0, Kind.LOWER), Bound(1.0, Kind.ESTIMATE)])
def test_a_constant_by_construction_is_an_upper_bound(value):
    module = type("Odd", (nn.Module,), {"forward": lambda self, x: x, "lipschitz_upper": by_construction(value)})()
    with pytest.raises((InputError, Refused)):
        known_constant(module)


@pytest.mark.parametrize(
    ("make", "name", "value", "least"),
    [
        (lambda: Lipschitz(2.0, MaxMin()), "scale", 50.0, 50.0),
        (lambda: Lipschitz(2.0, MaxMin()), "scale", -50.0, 50.0),
        (lambda: ConvexResidual(nn.ReLU(), 0.5), "alpha", 9.0, 17.0),
        (lambda: MaxPool2d(2), "stride", 1, 2.0),
    ],
)
def test_an_attribute_that_is_changed_later_is_seen(make, name, value, least):
    module = make()
    setattr(module, name, value)
    assert least <= known_constant(module) <= least * (1 + 1e-12)


def test_a_wrapped_module_that_is_replaced_later_voids_the_constant():
    net = Lipschitz(2.0, nn.Sequential(MaxMin(), MaxMin()))
    net.module[1] = nn.Linear(4, 4)
    assert known_constant(net) is None
    net.module[1] = Lipschitz(3.0, MaxMin())
    assert known_constant(net) == pytest.approx(6.0)


def _reflecting(theta):
    layer = HouseholderActivation(2)
    layer.theta.data.fill_(theta)
    return layer


#: maps with one slope, and where it is seen: numbers of Python are rounded to the type of the tensor
STEEPEST = {
    "residual": (lambda: ConvexResidual(nn.Identity(), 0.4), torch.ones(1, 1)),
    "constant": (lambda: Lipschitz(0.1, nn.Identity()), torch.ones(1, 1)),
    "contracted": (lambda: Contracted(nn.LeakyReLU(1.1)), -torch.ones(1, 1)),
    "leaky": (lambda: nn.LeakyReLU(1.1), -torch.ones(1, 1)),
    "reflection": (lambda: _reflecting(4.7061), torch.zeros(1, 2)),
    "pooling": (lambda: ScaledAvgPool2d((2, 3)), torch.full((1, 1, 2, 3), 6**-0.5)),
}


@pytest.mark.parametrize("name", STEEPEST)
def test_constants_hold_with_numbers_read_in_single_and_in_double_precision(name):
    make, x = STEEPEST[name]
    module = make().eval()
    assert float(module(x.double()).norm().detach()) <= known_constant(module) * (1 + 1e-15)
    # single precision: the bound of the operations themselves, which reads numbers as they do
    assert lipschitz_bound(module, x).upper <= known_constant(module) * (1 + 1e-12)


def test_the_factor_of_a_converted_network_holds_in_single_precision():
    net = make_lipschitz(nn.Sequential(MaxMin()), 0.1).eval()
    assert lipschitz_bound(net, torch.zeros(1, 2)).upper <= 0.1


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_convex_residual(alpha):
    torch.manual_seed(0)
    block = ConvexResidual(MaxMin(), alpha).eval()
    x = torch.randn(6, dtype=torch.float64)
    assert jacobian_norm(block, x) <= 1 + 1e-12
    assert lipschitz_bound(block, x[None]).upper <= 1 + 1e-12
    assert known_constant(block) == 1.0
    assert torch.allclose(block(x[None]), alpha * x + (1 - alpha) * MaxMin()(x[None]))


def test_other_residuals_and_constants():
    for constant in (0, float("inf")):
        with pytest.raises(InputError):
            Lipschitz(constant, MaxMin())
    for alpha in (1.2, -0.1):
        with pytest.raises(InputError, match="alpha"):
            ConvexResidual(MaxMin(), alpha)
    with pytest.raises(InputError, match="equal shapes"):
        ConvexResidual(nn.Flatten())(torch.zeros(1, 2, 2))
    assert known_constant(ConvexResidual(nn.Linear(2, 2))) is None
    assert known_constant(ConvexResidual(Lipschitz(3.0, MaxMin()), 0.5)) == pytest.approx(2.0)


def test_constants_of_plain_modules():
    rows = [
        (nn.MaxPool2d(3, 2, 1), 2.0), (nn.MaxPool2d(2), 1.0), (nn.MaxPool2d(3, 1, 1), 3.0), (nn.MaxPool1d(2, 1), 2**0.5),
        (nn.AvgPool2d(3, 1, 1), 1.0), (nn.AvgPool2d(3, 1, 1, count_include_pad=False), None),
        (nn.AdaptiveAvgPool2d(1), 1.0),
        (nn.AdaptiveAvgPool2d(3), None), (nn.Dropout(0.5), 1.0), (nn.Hardswish(), 1.5),
        (nn.LeakyReLU(3.0), 3.0), (nn.PReLU(), None),
    ]  # fmt: skip
    for module, constant in rows:
        assert known_constant(module) == (None if constant is None else pytest.approx(constant, rel=1e-6)), module
