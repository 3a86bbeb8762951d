"""Blocks that bound themselves, and the residual pattern: believed only where nothing came between, attacked everywhere."""

import pytest
import torch
import torch.nn.functional as F
from lipschitz_attacks import attack
from lipschitz_nets import Op
from torch import Tensor, nn

from equipoise.core import Bound, InputError, Kind, Refused
from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise.nn import SLLConv2d, SLLLinear

WIDTH = 6


def negative(x):
    return -x


class Potential(nn.Module):
    """x − t·W act(Wᵀx + b), t = 2/‖W‖²: 1-Lipschitz for slopes in [0, 1] only."""

    def __init__(self, act=torch.relu, drift=0.0, sign=-1.0, join=torch.add):
        super().__init__()
        self.join = join
        torch.manual_seed(0)
        W = torch.randn(WIDTH, 9)
        t = 2 / torch.linalg.matrix_norm(W.double(), 2).float() ** 2
        self.W, self.b = nn.Parameter(W), nn.Parameter(torch.randn(9))
        self.V = nn.Parameter(sign * t * W + drift * torch.randn(WIDTH, 9))
        self.act = act

    def forward(self, x):
        return self.join(x, F.linear(self.act(F.linear(x, self.W.mT, self.b)), self.V))


class ConvPotential(nn.Module):
    """The same with a strided, dilated or grouped convolution and its adjoint, scaled per channel."""

    def __init__(self, act=torch.relu, stride=1, groups=1, flipped=False):
        super().__init__()
        torch.manual_seed(0)
        self.K = nn.Parameter(torch.randn(6, 4 // groups, 3, 3) / 5)
        self.q, self.b = nn.Parameter(torch.rand(6) / 4), nn.Parameter(torch.randn(6))
        self.act, self.stride, self.groups, self.flipped = act, stride, groups, flipped

    def forward(self, x):
        z = self.act(F.conv2d(x, self.K, self.b, self.stride, 1, groups=self.groups)) * self.q.reshape(1, -1, 1, 1)
        if self.flipped:
            return x - F.conv2d(z, self.K.transpose(0, 1).flip(2, 3), padding=1)
        return x - F.conv_transpose2d(z, self.K, None, self.stride, 1, self.stride - 1, self.groups)


# name: (module, shape, whether the pattern must give 1 up to the tolerance)
PATTERNS = {
    "relu": (Potential(), (WIDTH,), True),
    "tanh on rows": (Potential(torch.tanh), (3, WIDTH), True),
    "leaky": (Potential(F.leaky_relu), (WIDTH,), True),
    "abs": (Potential(torch.abs), (WIDTH,), False),
    "gelu": (Potential(F.gelu), (WIDTH,), False),
    "silu": (Potential(F.silu), (WIDTH,), False),
    "negative": (Potential(negative), (WIDTH,), False),
    "steep elu": (Potential(lambda x: F.elu(x, 3.0)), (WIDTH,), False),
    "mismatch": (Potential(drift=0.3), (WIDTH,), False),
    "slight mismatch": (Potential(drift=1e-6), (WIDTH,), True),
    "plus": (Potential(sign=1.0), (WIDTH,), False),
    "sub": (Potential(join=lambda x, y: x - (-y)), (WIDTH,), True),
    "sub alpha": (Potential(join=lambda x, y: torch.sub(x, y, alpha=-1)), (WIDTH,), True),
    "add alpha": (Potential(join=lambda x, y: torch.add(y, x, alpha=-1)), (WIDTH,), False),
    "rsub": (Potential(join=lambda x, y: torch.rsub(y, x)), (WIDTH,), False),
    "wrong sign": (Potential(join=torch.sub), (WIDTH,), False),
    "convolution": (ConvPotential(), (4, 6, 6), True),
    "convolution flipped": (ConvPotential(flipped=True), (4, 6, 6), True),
    "convolution strided": (ConvPotential(stride=2), (4, 6, 6), True),
    "convolution grouped": (ConvPotential(groups=2), (4, 6, 6), True),
    "convolution abs": (ConvPotential(torch.abs), (4, 6, 6), False),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", PATTERNS)
def test_the_residual_pattern_holds_under_attack(name):
    module, shape, one = PATTERNS[name]
    report = lipschitz_bound(module.eval(), torch.zeros(1, *shape))
    found = attack(module, shape, steps=60)
    assert found <= report.upper * (1 + 1e-7)
    assert report.upper <= report.product * (1 + 1e-12)
    assert (report.upper < 1.01) == one
    local = local_lipschitz(module, torch.randn(1, *shape), 0.1, steps=3)
    assert float(local.upper) <= report.upper * (1 + 1e-6)
    program = torch.export.export(module, (torch.zeros(1, *shape),), strict=False)
    assert lipschitz_bound(program).upper == pytest.approx(report.upper)


class Claims(Potential):
    """The same map, with the method."""

    def forward(self, x):
        return super().forward(x)

    def lipschitz_upper(self, input_shape):
        assert input_shape[-1] == WIDTH
        return Bound(1.0, Kind.UPPER, "potential")


class Ten(Claims):
    """Another forward than the one the method speaks of."""

    def forward(self, x):
        return 10 * super().forward(x)


class Wraps(nn.Module):
    """A block that calls a child, so that the child can be tampered with."""

    def __init__(self, act=None):
        super().__init__()
        self.inner, self.act = nn.Linear(WIDTH, WIDTH), act or nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.inner(x)) - self.act(-self.inner(x))

    def lipschitz_upper(self, input_shape: tuple[int, ...]) -> Bound:
        size = torch.linalg.matrix_norm(self.inner.weight.double(), 2)
        return Bound(2.0 * size.item() * 1.0000001, Kind.UPPER, "by hand")


class TwoInputs(nn.Module):
    def forward(self, x, y):
        return x + 5 * y

    def lipschitz_upper(self, input_shape):
        return Bound(1.0, Kind.UPPER)


def _hooked(block, child=""):
    block.get_submodule(child).register_forward_hook(lambda module, args, output: 10 * output)
    return block


#: blocks of which the method no longer speaks the truth
TAMPERED = {
    "hook": lambda: _hooked(Claims()),
    "hook of a child": lambda: _hooked(Wraps(), "inner"),
    "another forward": Ten,
    "two inputs": lambda: Op(lambda m, x: m.block(x, x.relu()), block=TwoInputs()),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_blocks_get_the_bound_of_their_operations(name):
    net = nn.Sequential(TAMPERED[name](), nn.ReLU()).eval()
    report = lipschitz_bound(net, torch.zeros(1, WIDTH))
    assert attack(net, (WIDTH,)) <= report.upper * (1 + 1e-7)
    assert not any(row.method in ("potential", "by hand") for row in report.layers)


class SteepFarAway(SLLLinear):
    """Another map than its own bound speaks of, only where a short attack does not look."""

    def _linear(self, x, weight, bias=None):
        return super()._linear(x, weight, bias) + 100 * torch.relu(x - 50)


def test_a_subclass_that_changes_a_part_of_the_forward_is_not_believed():
    assert lipschitz_bound(SteepFarAway(WIDTH).eval(), torch.zeros(1, WIDTH)).upper >= 100


def test_an_image_without_a_batch_gets_the_bound_of_the_operations():
    assert lipschitz_bound(SLLConv2d(3).eval(), torch.zeros(3, 5, 5)).upper <= 1 + 1e-5


def test_a_block_is_one_row_with_its_own_bound():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Claims(), nn.ReLU(), Claims()).eval()
    report = lipschitz_bound(net, torch.zeros(1, WIDTH))
    assert [row.kind for row in report.layers] == ["linear", "Claims", "relu", "Claims"]
    assert report.product == pytest.approx(report.layers[0].upper)
    assert attack(net, (WIDTH,)) <= report.upper * (1 + 1e-7)


def test_a_block_called_twice_counts_twice():
    net = Op(lambda m, x: m.block(m.block(x)), block=Wraps()).eval()
    report = lipschitz_bound(net, torch.zeros(1, WIDTH))
    assert report.product == pytest.approx(float(net.parts.block.lipschitz_upper((WIDTH,))) ** 2)
    assert attack(net, (WIDTH,)) <= report.upper * (1 + 1e-7)


def test_operations_without_a_rule_may_hide_in_a_block():
    class Hidden(nn.Module):
        def forward(self, x):
            return torch.special.i0e(x) + torch.sinc(x)

        def lipschitz_upper(self, input_shape):
            return Bound(3.0, Kind.UPPER, "by hand")

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Hidden(), nn.ReLU()).eval()
    report = lipschitz_bound(net, torch.zeros(1, WIDTH))
    assert attack(net, (WIDTH,)) <= report.upper * (1 + 1e-7)
    assert float(local_lipschitz(net, torch.randn(2, WIDTH), 0.1).upper.max()) <= report.upper * 1.001
    Hidden.lipschitz_upper = lambda self, shape: Bound(float("inf"), Kind.UPPER)
    with pytest.raises(Refused, match="no Lipschitz rule"):
        lipschitz_bound(net, torch.zeros(1, WIDTH))


def _refuses(self, input_shape):
    raise Refused("not today")


def _claiming(method):
    return type("Another", (Claims,), {"forward": Claims.forward, "lipschitz_upper": method})().eval()


def test_a_loose_claim_or_none_leaves_the_bound_of_the_operations():
    plain = lipschitz_bound(Potential().eval(), torch.zeros(1, WIDTH)).upper
    for method in (_refuses, lambda self, shape: Bound(1e6, Kind.UPPER, "loose")):
        report = lipschitz_bound(_claiming(method), torch.zeros(1, WIDTH))
        assert report.upper == pytest.approx(plain)
        assert all(row.method != "loose" for row in report.layers)


@pytest.mark.parametrize(("bound", "error", "words"), [
    (Bound(0.5, Kind.UPPER), Refused, "attack reaches"),
    (Bound(1.0, Kind.ESTIMATE), InputError, "kind upper"),
    (1.0, InputError, "kind upper"),
    (Bound(float("nan"), Kind.UPPER), InputError, "non-negative"),
])  # fmt: skip
def test_false_claims_are_refused(bound, error, words):
    with pytest.raises(error, match=words):
        lipschitz_bound(_claiming(lambda self, shape: bound), torch.zeros(1, WIDTH))
