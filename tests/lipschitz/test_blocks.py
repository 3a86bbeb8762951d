"""Blocks that bound themselves, and the residual pattern: believed only where nothing came between, attacked everywhere."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from lipschitz_attacks import attack
from torch import Tensor, nn

from equipoise.core import Bound, InputError, Kind, Refused
from equipoise.lipschitz import lipschitz_bound, local_lipschitz
from equipoise.nn import SLLLinear

WIDTH = 6


def negative(x):
    return -x


class Potential(nn.Module):
    """x − t·W act(Wᵀx + b), t = 2/‖W‖²: 1-Lipschitz for slopes in [0, 1] only."""

    def __init__(self, act=torch.relu, drift=0.0, sign=-1.0):
        super().__init__()
        torch.manual_seed(0)
        W = torch.randn(WIDTH, 9)
        t = 2 / torch.linalg.matrix_norm(W.double(), 2).float() ** 2
        self.W, self.b = nn.Parameter(W), nn.Parameter(torch.randn(9))
        self.V = nn.Parameter(sign * t * W + drift * torch.randn(WIDTH, 9))
        self.act = act

    def forward(self, x):
        return x + F.linear(self.act(F.linear(x, self.W.mT, self.b)), self.V)


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


class Minus(Potential):
    """Other spellings of the same sum."""

    def __init__(self, spelling, act=torch.relu):
        super().__init__(act)
        self.spelling = spelling

    def forward(self, x):
        y = F.linear(self.act(F.linear(x, self.W.mT, self.b)), self.V)
        return {
            "sub": lambda: x - (-y),
            "sub alpha": lambda: torch.sub(x, y, alpha=-1),
            "add alpha": lambda: torch.add(y, x, alpha=-1),
            "rsub": lambda: torch.rsub(y, x),
            "wrong sign": lambda: torch.sub(x, y, alpha=1),
        }[self.spelling]()


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
    "sub": (Minus("sub"), (WIDTH,), True),
    "sub alpha": (Minus("sub alpha"), (WIDTH,), True),
    "add alpha": (Minus("add alpha"), (WIDTH,), False),
    "rsub": (Minus("rsub"), (WIDTH,), False),
    "wrong sign": (Minus("wrong sign"), (WIDTH,), False),
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


def test_the_pattern_works_on_a_saved_program():
    program = torch.export.export(Potential().eval(), (torch.zeros(1, WIDTH),), strict=False)
    assert lipschitz_bound(program).upper < 1.01


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


class Twice(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(self.block(x))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        return self.layer(x) + 5 * y

    def lipschitz_upper(self, input_shape):
        return Bound(1.0, Kind.UPPER)


class CallsTwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = TwoInputs()

    def forward(self, x):
        return self.block(x, x.relu())


def _ten_times(self, x):
    return 10 * type(self).forward(self, x)


def changed(block, change):
    change(block)
    return block


#: blocks of which the method no longer speaks the truth
TAMPERED = {
    "hook": lambda: changed(Claims(), lambda b: b.register_forward_hook(lambda module, args, output: 10 * output)),
    "pre-hook": lambda: changed(Claims(), lambda b: b.register_forward_pre_hook(lambda module, args: (10 * args[0],))),
    "hook of a child": lambda: changed(
        Wraps(), lambda b: b.inner.register_forward_hook(lambda module, args, output: 10 * output)
    ),
    "patch": lambda: changed(Claims(), lambda b: setattr(b, "forward", types.MethodType(_ten_times, b))),
    "patch of a child": lambda: changed(
        Wraps(), lambda b: setattr(b.inner, "forward", types.MethodType(_ten_times, b.inner))
    ),
    "lie": lambda: changed(
        Claims(), lambda b: setattr(b, "lipschitz_upper", lambda input_shape: Bound(1e-3, Kind.UPPER))
    ),
    "another forward": Ten,
    "two inputs": CallsTwoInputs,
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


def test_global_hooks_are_not_believed():
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: 10 * output if isinstance(module, Claims) else None
    )
    try:
        report = lipschitz_bound(nn.Sequential(Claims()).eval(), torch.zeros(1, WIDTH))
    finally:
        handle.remove()
    assert report.upper >= 9.9


def test_a_block_is_one_row_with_its_own_bound():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Claims(), nn.ReLU(), Claims()).eval()
    report = lipschitz_bound(net, torch.zeros(1, WIDTH))
    assert [row.kind for row in report.layers] == ["linear", "Claims", "relu", "Claims"]
    assert report.product == pytest.approx(report.layers[0].upper)
    assert attack(net, (WIDTH,)) <= report.upper * (1 + 1e-7)


def test_a_block_called_twice_counts_twice():
    net = Twice(Wraps()).eval()
    report = lipschitz_bound(net, torch.zeros(1, WIDTH))
    assert report.product == pytest.approx(float(net.block.lipschitz_upper((WIDTH,))) ** 2)
    assert attack(net, (WIDTH,)) <= report.upper * (1 + 1e-7)


def test_the_smaller_of_both_bounds_counts():
    class Loose(Wraps):
        def forward(self, x):
            return super().forward(x)

        def lipschitz_upper(self, input_shape):
            return Bound(1e6, Kind.UPPER, "loose")

    report = lipschitz_bound(Loose().eval(), torch.zeros(1, WIDTH))
    assert report.product < 100
    assert all(row.method != "loose" for row in report.layers)


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


def test_a_block_that_refuses_gets_the_bound_of_its_operations():
    block = Claims()
    type_of = type("Shy", (Claims,), {"forward": Claims.forward, "lipschitz_upper": _refuses})
    block.__class__ = type_of
    assert lipschitz_bound(block.eval(), torch.zeros(1, WIDTH)).product > 2.9


def _refuses(self, input_shape):
    raise Refused("not today")


@pytest.mark.parametrize(
    ("bound", "error", "words"),
    [
        (Bound(0.5, Kind.UPPER), Refused, "attack reaches"),
        (Bound(1.0, Kind.ESTIMATE), InputError, "kind upper"),
        (1.0, InputError, "kind upper"),
        (Bound(float("nan"), Kind.UPPER), InputError, "non-negative"),
    ],
)
def test_false_claims_are_refused(bound, error, words):
    class False_(Potential):
        def forward(self, x):
            return super().forward(x)

        def lipschitz_upper(self, input_shape):
            return bound

    with pytest.raises(error, match=words):
        lipschitz_bound(nn.Sequential(False_()).eval(), torch.zeros(1, WIDTH))


def test_the_method_reads_the_weights_of_now():
    block = Wraps().eval()
    first = lipschitz_bound(block, torch.zeros(1, WIDTH)).upper
    other = copy.deepcopy(block)
    other.inner.weight.data.mul_(3)
    assert lipschitz_bound(other, torch.zeros(1, WIDTH)).upper == pytest.approx(3 * first)
