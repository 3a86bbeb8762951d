"""Programs that a bound once misread: in place and out of place, with hidden branches, broken numbers, and without batches."""

from __future__ import annotations

import copy
import cProfile
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from lipschitz_nets import Op
from torch import nn
from torch.compiler import is_compiling

from equipoise import nn as own
from equipoise.conversion import make_lipschitz
from equipoise.core import Refused
from equipoise.lipschitz import lipschitz_bound, local_lipschitz

torch.manual_seed(0)
D = torch.float64
W = torch.randn(6, 4, dtype=D) / 2
K = torch.randn(3, 2, 3, 3, dtype=D) * 0.3
EYE = torch.eye(4, dtype=D)


class _Residual(nn.Module):
    """`h += sign·φ(hWᵀ)W` after an operation, in place."""

    def __init__(self, sign):
        super().__init__()
        self.sign = sign

    def forward(self, x):
        h = torch.relu(x)
        branch = torch.relu(h @ W.T) @ W
        if self.sign > 0:
            h += branch
        else:
            h -= branch
        return h


def _conv_residual(x):
    h = torch.relu(x)
    h += F.conv_transpose2d(torch.relu(F.conv2d(h, K, padding=1)), K, padding=1)
    return h


def _views(x):
    y = (x * 2).view(-1)
    y.add_(y, alpha=-4)
    return y.view(x.shape)


def _mean_of_convolution(x):
    h = F.conv2d(x, K, padding=1)
    return h - h.mean((2, 3), keepdim=True)


# name: (function, shape, upper end at most)
BOUNDED = {
    "in-place residual": (_Residual(1), (4,), math.inf),
    "in-place difference": (_Residual(-1), (4,), math.inf),
    "in-place residual of convolutions": (_conv_residual, (2, 6, 6), math.inf),
    "in-place on a view": (_views, (4,), 10.001),
    "in-place chain": (lambda x: x.clone().mul_(3).add_(x).sub_(x, alpha=-2).div_(0.5), (4,), 12.001),
    "sub with a negative alpha": (lambda x: torch.sub(x, torch.relu(x @ W.T) @ W, alpha=-1), (4,), math.inf),
    "rsub with a negative alpha": (lambda x: torch.rsub(x, torch.relu(x @ W.T) @ W, alpha=-1), (4,), math.inf),
    "addition into a constant": (lambda x: torch.zeros_like(x).add_(x, alpha=-7), (4,), 7.001),
    "detached branch": (lambda x: x + 5 * x.detach(), (4,), 6.001),
    "detached": (lambda x: 5 * x.detach(), (4,), 5.001),
    "in-place silu": (lambda x: F.silu(x @ EYE, inplace=True), (4,), 1.101),
    "in-place tanh": (lambda x: (x @ EYE).tanh_(), (4,), 1.001),
    "in-place leaky relu": (lambda x: F.leaky_relu(x @ EYE, -0.5, inplace=True), (4,), 1.001),
    "scalar output": (lambda x: x.sum(), (4,), 2.001),
    "single-precision constants": (lambda x: x * torch.ones(4), (4,), 1.001),
    "centring": (lambda x: x - x.mean(1, keepdim=True), (4,), 1.001),
    "centring without keepdim": (lambda x: x - x.mean(-1)[:, None], (4,), math.inf),
    "centring by unsqueeze": (lambda x: x - x.mean(-1).unsqueeze(-1), (4,), 1.001),
    "centring after a convolution": (_mean_of_convolution, (2, 6, 6), 2.6),
    "centring of other entries": (lambda x: x - x.mean(1), (4, 4), math.inf),
    "adding the mean": (lambda x: x + x.mean(1, keepdim=True), (4,), math.inf),
    "softplus": (lambda x: F.softplus(x + 20), (4,), 1.001),
}  # fmt: skip


def _reached(function, shape, x, radius):
    """The largest stretch of random pairs and of the Jacobian's columns near x, in float64."""
    best = 0.0
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        a, b = (x + radius * F.normalize(torch.randn(1, *shape, generator=g, dtype=D).flatten(1)).reshape(x.shape) * s
                for s in (1.0, -0.5))  # fmt: skip
        best = max(best, float((function(a.clone()) - function(b.clone())).norm() / (a - b).norm()))
    h = 1e-4 * min(radius, 1.0)
    columns = [
        (function(x + h * e) - function(x - h * e)).flatten() / (2 * h)
        for e in torch.eye(x.numel(), dtype=D).reshape(-1, *x.shape)
    ]
    return max(best, float(torch.linalg.matrix_norm(torch.stack(columns), 2)))


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_of_programs_hold(name):
    function, shape, limit = BOUNDED[name]
    model = Op(function).eval()
    x = torch.randn(1, *shape, dtype=D, generator=torch.Generator().manual_seed(3))
    report = lipschitz_bound(model, x)
    local = local_lipschitz(model, torch.cat([x, -x]), 0.1, steps=6)
    for point, radius in ((x, 0.1), (-x, 0.1), (x.abs(), 0.1), (x, 10.0)):
        assert _reached(function, shape, point, radius) <= report.upper * (1 + 1e-6)
    for i, point in enumerate((x, -x)):
        assert _reached(function, shape, point, 0.1) <= float(local.upper[i]) * (1 + 1e-6)
    assert report.upper <= limit
    assert bool((local.upper <= report.upper * (1 + 1e-6)).all())
    assert bool((local.lower > 0).all())


def test_softplus_is_bounded_as_the_real_function_and_says_so():
    """PyTorch's own jumps where it turns into x: no constant covers that, and no lower end is taken from it."""
    net = nn.Sequential(nn.Linear(1, 1), nn.Softplus()).double().eval().requires_grad_(False)
    net[0].weight.fill_(1.0)
    net[0].bias.fill_(0.0)
    x = torch.full((1, 1), 20.0, dtype=D)
    found = local_lipschitz(net, x, 1e-7, steps=20)
    assert float(found.lower) <= 1.0
    assert float(found.upper) <= 1.0 + 1e-12
    assert any("PyTorch's own jumps" in row.note for row in lipschitz_bound(net, x).layers)
    with pytest.raises(Refused, match="threshold below 20"):
        lipschitz_bound(Op(lambda x: F.softplus(x, threshold=15)).eval(), x)


WHOLE = {
    "vector": (lambda x: x.sum(), torch.zeros(10), math.sqrt(10), "no batch dimension"),
    "matrix, scalar output": (lambda x: x.sum(), torch.zeros(3, 4), math.sqrt(12), "batch of 3"),
    "one sample, scalar output": (lambda x: x.sum(), torch.zeros(1, 4), 2.0, "batch of one"),
    "mean of everything": (lambda x: x.mean(), torch.zeros(3, 4), 0.5, "larger"),
    "constants per sample": (lambda x: x * torch.tensor([[3.0], [4.0]]), torch.zeros(2, 4), 5.0, "larger"),
    "fixed batch": (lambda x: x.reshape(6).sum().reshape(1), torch.zeros(3, 2), math.sqrt(6), "batch of 3"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_example_is_bounded_as_what_it_is(name):
    function, x, truth, words = WHOLE[name]
    report = lipschitz_bound(Op(function).eval(), x)
    assert report.upper == pytest.approx(truth, rel=1e-9)
    assert words in report.notes[0]


def _nan(layer, name, value):
    getattr(layer, name).data.view(-1)[0] = value
    return layer.eval()


def _masked_attention(x):
    scores = x @ torch.ones(1, 4, 4) / 9 + torch.full((4, 4), -math.inf).triu(1)
    return scores.softmax(-1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (lambda: nn.PReLU(), ["weight"]),
        (lambda: nn.Linear(4, 4), ["bias", "weight"]),
        (lambda: nn.BatchNorm1d(4), ["running_mean", "running_var", "bias"]),
        (lambda: nn.LayerNorm(4), ["weight", "bias"]),
    ],
)
def test_numbers_that_are_none_are_refused_by_name(layer, names, value):
    for name in names:
        with pytest.raises(Refused, match=name.removeprefix("running_")):
            lipschitz_bound(nn.Sequential(_nan(layer(), name, value)), torch.ones(1, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.leaky_relu(x, math.nan),
        lambda x: x * math.inf,
        lambda x: x + math.nan,
        lambda x: x + torch.full((4,), -math.inf),
        lambda x: torch.add(x, x, alpha=math.nan),
        lambda x: torch.where(torch.tensor([True, False, True, True]), x, -math.inf),
    ],
)
def test_constants_that_are_none_are_refused(function):
    with pytest.raises(Refused, match="non-finite"):
        lipschitz_bound(Op(function).eval(), torch.ones(1, 4))


def test_masks_before_a_softmax_are_fine():
    assert lipschitz_bound(Op(_masked_attention).eval(), torch.randn(1, 4, 4)).upper < 10


def _far(question):
    """Another network for who asks, far from where programs and models are compared."""
    return lambda x: x if question() else x + 1e3 * F.relu(x - 1e5)


QUESTIONS = {
    "compiling": torch.compiler.is_compiling,
    "imported": is_compiling,
    "dynamo": torch._dynamo.is_compiling,
    "exporting": torch.compiler.is_exporting,
    "tracing": torch.jit.is_tracing,
    "wrapped": lambda: (lambda: torch.compiler.is_exporting())(),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_network_that_runs_is_captured_not_one_made_for_capture(name):
    report = lipschitz_bound(Op(_far(QUESTIONS[name])).eval(), torch.randn(1, 4))
    assert report.upper >= 1001
    torch.export.export(Op(lambda x: x * (2 if torch.compiler.is_exporting() else 1 / 0)), (torch.ones(1),))


def _kept(x):
    return x * nn.Parameter(torch.ones(1))


#: two networks for two ways to run them, told apart far from where programs and models are compared
MODES = {
    "gradients": _far(torch.is_grad_enabled),
    "inference": _far(torch.is_inference_mode_enabled),
    "requires_grad": lambda x: x if _kept(x).requires_grad else x + 1e3 * F.relu(x - 1e5),
    "input": lambda x: x if x.requires_grad else x + 1e3 * F.relu(x - 1e5),
    "leaf": lambda x: x if (x + 0).is_leaf else x + 1e3 * F.relu(x - 1e5),
    "grad_fn": lambda x: x if _kept(x).grad_fn is None else x + 1e3 * F.relu(x - 1e5),
    "is_inference": lambda x: x if x.is_inference() else x + 1e3 * F.relu(x - 1e5),
    "constant": lambda x: x + torch.tensor(1e3 if torch.is_grad_enabled() else 1.0) * F.relu(x - 1e5),
}


@pytest.mark.parametrize("name", MODES)
def test_two_networks_for_two_ways_to_run_them_are_refused(name):
    with pytest.raises(Refused, match="the forward asks"):
        lipschitz_bound(Op(MODES[name]).eval(), torch.randn(1, 4))


def test_a_network_of_the_dtype_is_bounded_and_attacked_as_it_was_captured():
    found = local_lipschitz(Op(lambda x: x if x.dtype == torch.float32 else 10 * x).eval(), torch.randn(1, 4), 0.5)
    assert float(found.upper) == pytest.approx(1)
    assert float(found.lower) == pytest.approx(1, rel=1e-3)


def test_one_network_with_and_without_gradients_is_bounded():
    same = Op(lambda x: (2 if torch.is_grad_enabled() is not None else 3) * x).eval()
    assert lipschitz_bound(same, torch.randn(1, 4)).upper == pytest.approx(2)


def test_the_largest_and_the_smallest_entry_have_a_local_bound():
    model = Op(lambda x: torch.cat([x.amax(-1, True), x.amin(-1, True)], -1)).eval()
    assert float(local_lipschitz(model, torch.randn(1, 6), 0.3, steps=2).upper) == pytest.approx(1)


def test_a_bound_can_be_profiled():
    with cProfile.Profile() as profile:
        lipschitz_bound(nn.Linear(2, 2), torch.zeros(1, 2))
    assert "propagate" in {entry.code.co_name for entry in profile.getstats() if hasattr(entry.code, "co_name")}


class _Noting(nn.Module):
    """Writes a buffer in evaluation and draws numbers that it does not use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        torch.rand(3)
        self.seen = self.seen + 1
        return 2 * x


def test_a_capture_leaves_buffers_and_random_numbers_alone():
    model = _Noting().eval()
    before = torch.get_rng_state()
    with pytest.raises(Refused, match=r"the map differs|other values|draws random"):
        lipschitz_bound(model, torch.randn(1, 4, generator=torch.Generator().manual_seed(0)))
    assert float(model.seen) == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_that_mix_are_refused_on_a_ball_too():
    with pytest.raises(Refused, match="other samples"):
        local_lipschitz(Op(lambda x: x - x.mean(0, keepdim=True)).eval(), torch.randn(3, 4), 0.1)


IMAGE, ROW, LINE = (4, 6, 6), (4,), (4, 6)
LAYERS = {
    **{
        f"{name}{suffix}": (functools.partial(getattr(own, f"{name}{suffix}"), *arguments), shape)
        for suffix, arguments, shape in (
            ("Linear", (4, 4), ROW), ("Conv1d", (4, 4, 3), LINE), ("Conv2d", (4, 4, 3), IMAGE),
            ("ConvTranspose2d", (4, 4, 3), IMAGE),
        )
        for name in ("AOL", "SN", "SR", "RLB", "BCOP", "RKO", "SOC", "Bjorck", "Cayley", "Householder", "Sandwich", "CPL", "SLL")
        if hasattr(own, f"{name}{suffix}")
    },
    "LayerCentering": (own.LayerCentering, IMAGE),
    "BatchCentering": (lambda: own.BatchCentering(4), IMAGE),
    "GroupSort": (lambda: own.GroupSort(2), IMAGE),
    "MaxMin": (own.MaxMin, IMAGE),
    "HouseholderActivation": (lambda: own.HouseholderActivation(4), IMAGE),
    "MaxPool2d": (lambda: own.MaxPool2d(2), IMAGE),
    "ScaledAvgPool2d": (lambda: own.ScaledAvgPool2d(2), IMAGE),
    "ScaledGlobalAvgPool2d": (own.ScaledGlobalAvgPool2d, IMAGE),
    "SpaceToDepth": (lambda: own.SpaceToDepth(2), IMAGE),
    "DepthToSpace": (lambda: own.DepthToSpace(2), IMAGE),
    "FirstFeatures": (lambda: own.FirstFeatures(2), IMAGE),
    "PadChannels": (lambda: own.PadChannels(8), IMAGE),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_our_own_layers_are_one_to_our_own_auditor(name):
    """Trained for a step, in evaluation, and exported to plain modules."""
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make().train()
    x = torch.randn(2, *shape)
    layer(x).square().mean().backward() if any(p.requires_grad for p in layer.parameters()) else layer(x)
    layer.eval()
    assert lipschitz_bound(copy.deepcopy(layer), x).upper <= 1 + 1e-3
    plain = layer.export() if hasattr(layer, "export") else None
    if isinstance(plain, nn.Module):
        assert lipschitz_bound(plain.eval(), x).upper <= 1 + 1e-3


@pytest.mark.parametrize("method", ["cayley"])
def test_converted_networks_are_audited(method):
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 4))
    found = make_lipschitz(net, method=method, example_input=torch.zeros(1, 3, 4, 4))
    assert lipschitz_bound(found.eval(), torch.randn(1, 3, 4, 4)).upper <= 1 + 1e-3
