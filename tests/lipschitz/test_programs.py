"""Programs that a bound once misread: in place and out of place, with hidden branches, broken numbers, and without batches."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from lipschitz_nets import Op
from torch import nn

from equipoise.conversion import make_lipschitz
from equipoise.core import InputError, Refused
from equipoise.lipschitz import certified_radius, lipschitz_bound, local_lipschitz
from equipoise_lab.fuzz.facts import check_facts

pytestmark = pytest.mark.medium

torch.manual_seed(0)
D = torch.float64
W = torch.randn(6, 4, dtype=D) / 2
K = torch.randn(3, 2, 3, 3, dtype=D) * 0.3
EYE = torch.eye(4, dtype=D)


def _residual(sign):
    """`h += sign·φ(hWᵀ)W` after an operation, in place."""

    def run(x):
        h = torch.relu(x)
        branch = torch.relu(h @ W.T) @ W
        return h.add_(branch) if sign > 0 else h.sub_(branch)

    return run


def _conv_residual(x):
    h = torch.relu(x)
    h += F.conv_transpose2d(torch.relu(F.conv2d(h, K, padding=1)), K, padding=1)
    return h


def _views(x):
    y = (x * 2).view(-1)
    y.add_(y, alpha=-4)
    return y.view(x.shape)


def _overwritten(x):
    y = x * 2
    y[:, 0] = 7.0
    return y


def _stale_view(x):
    y = x * 2
    z = y[:, :2]
    y.mul_(5)
    return torch.cat([z, y], 1)


def _mean_of_convolution(x):
    h = F.conv2d(x, K, padding=1)
    return h - h.mean((2, 3), keepdim=True)


# name: (function, shape, upper end at most)
BOUNDED = {
    "in-place residual": (_residual(1), (4,), math.inf),
    "in-place difference": (_residual(-1), (4,), math.inf),
    "in-place residual of convolutions": (_conv_residual, (2, 6, 6), math.inf),
    "in-place on a view": (_views, (4,), 10.001),
    "item assignment": (_overwritten, (4,), 2.001),
    "view of what is overwritten": (_stale_view, (4,), 14.143),
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
    "operation without a batching rule": (lambda x: torch.fft.fft(x).conj().imag, (4,), 2.001),
    "view of a contiguous copy": (lambda x: (2 * x.view(-1, 2, 2).mT.contiguous().view(-1, 4)).tanh(), (4,), 2.001),
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
    without_lower_end = ("item assignment", "operation without a batching rule")  # rounding is not bounded there
    assert bool((local.lower > 0).all()) or name in without_lower_end


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


# name: (function, example, the truth for the whole example, what the note or the refusal says)
WHOLE = {
    "vector": (lambda x: x.sum(), torch.zeros(10), math.sqrt(10), "no batch dimension"),
    "one sample, scalar output": (lambda x: x.sum(), torch.zeros(1, 4), 2.0, "batch of one"),
    "fixed batch": (lambda x: x.reshape(6).sum().reshape(1), torch.zeros(3, 2), math.sqrt(6), "batch of 3"),
    "mean of a batch": (lambda x: x.mean(), torch.zeros(2, 4), math.sqrt(0.125), "refused"),
    "constants per sample": (lambda x: x * torch.tensor([[3.0], [4.0]]), torch.zeros(2, 4), 4.0, "refused"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_example_is_bounded_as_what_it_is(name):
    function, x, truth, words = WHOLE[name]
    model = Op(function).eval()
    if words == "refused":  # neither one sample nor the batch is meant
        with pytest.raises(Refused, match="batch_dim=None"):
            lipschitz_bound(model, x)
    report = lipschitz_bound(model, x, batch_dim=None if words == "refused" else 0)
    assert report.upper == pytest.approx(truth, rel=1e-9)
    assert words == "refused" or words in report.notes[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused_by_name(value):
    names = {nn.PReLU(): ["weight"], nn.Linear(4, 4): ["bias"], nn.BatchNorm1d(4): ["running_mean", "running_var"]}
    for layer in names:
        for name in names[layer]:
            broken = copy.deepcopy(layer).eval()
            getattr(broken, name).data.view(-1)[0] = value
            with pytest.raises(Refused, match=name.removeprefix("running_")):
                lipschitz_bound(nn.Sequential(broken), torch.ones(1, 4))
    for function in (lambda x: x * value, lambda x: F.leaky_relu(x, value), lambda x: x + torch.full((4,), value)):
        with pytest.raises(Refused, match="non-finite"):
            lipschitz_bound(Op(function).eval(), torch.ones(1, 4))


def test_masks_before_a_softmax_are_fine():
    def masked(x):
        scores = x @ torch.ones(1, 4, 4) / 9 + torch.full((4, 4), -math.inf).triu(1)
        return scores.softmax(-1)

    assert lipschitz_bound(Op(masked).eval(), torch.randn(1, 4, 4)).upper < 10


@pytest.mark.parametrize("question", [torch.compiler.is_compiling, torch.compiler.is_exporting, torch.is_grad_enabled])
def test_a_forward_that_is_another_function_when_traced_is_refused(question):
    with pytest.raises(Refused, match="other values"):
        lipschitz_bound(Op(lambda x: (2 if question() else 3) * x).eval(), torch.randn(1, 4))


def test_a_capture_leaves_random_numbers_alone():
    before = torch.get_rng_state()
    with pytest.raises(Refused, match="draws random"):
        lipschitz_bound(Op(lambda x: x * torch.rand(4)).eval(), torch.zeros(1, 4))
    assert torch.equal(torch.get_rng_state(), before)


def _recurrent(kind):
    return Op(lambda m, x: m.cells(x)[0], cells=kind(3, 4))


def _causal(gap):
    return lambda x: torch.cat([x[:gap], x[gap:] + 5 * x[:-gap]]) if len(x) > gap else x


#: name: (model, example); the samples along dimension 0 mix, in one direction only
MIXING = {
    **{kind.__name__: (_recurrent(kind), torch.randn(5, 2, 3)) for kind in (nn.RNN, nn.GRU, nn.LSTM)},
    "backwards": (Op(lambda x: torch.ones(len(x), len(x), dtype=x.dtype).triu() @ x), torch.randn(6, 3)),
    "forwards": (Op(lambda x: torch.ones(len(x), len(x), dtype=x.dtype).tril() @ x), torch.randn(6, 3)),
    "causal": (Op(_causal(1)), torch.randn(6, 3)),
    "causal, dilated": (Op(_causal(8)), torch.randn(20, 3)),
    "mean": (Op(lambda x: x - x.mean(0, keepdim=True)), torch.randn(3, 4)),
}


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_mix_are_refused(name):
    model, x = MIXING[name]
    with pytest.raises(Refused, match="batch_dim"):
        lipschitz_bound(model.eval(), x, ball=1.0)
    if x.dim() == 2:
        with pytest.raises(Refused, match="other samples"):
            local_lipschitz(model, x, 0.1)
        with pytest.raises(Refused, match="other samples"):
            make_lipschitz(model.eval(), example_input=x)
        whole = lipschitz_bound(model, x, batch_dim=None).upper
        jacobian = torch.autograd.functional.jacobian(model, x).reshape(x.numel(), -1)
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= whole * (1 + 1e-6)


@pytest.mark.parametrize("distance", [1, 3, 4, 8])
def test_samples_that_mix_at_a_distance_are_refused_whatever_the_example_holds(distance):
    model, x = Op(lambda x: x + x.roll(distance, 0)).eval(), torch.randn(1, 5)
    with pytest.raises(Refused, match="other samples"):
        lipschitz_bound(model, x)
    with pytest.raises(Refused, match="other samples"):
        certified_radius(model, x, torch.zeros(1, dtype=torch.long))


def test_the_batch_dimension_can_be_stated():
    model, x = _recurrent(nn.RNN).eval(), torch.randn(5, 2, 3)
    bound = lipschitz_bound(model, x, batch_dim=1).upper
    jacobian = torch.autograd.functional.jacobian(model, x[:, :1]).reshape(20, 15)
    assert float(torch.linalg.matrix_norm(jacobian, 2)) <= bound
    with pytest.raises(InputError, match="batch_dim is 3"):
        lipschitz_bound(model, x, batch_dim=3)


def _unbound_attention(x):
    v = x.unbind(-1)[0]
    return torch.softmax(v, -1) @ v


def test_large_offsets_are_no_reason_to_refuse():
    """Offsets of 10⁶ that cancel: in float32 the samples of a batch seem to differ from the same ones alone."""
    net = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 4)).eval().requires_grad_(False)
    net[0].bias.fill_(1e6)
    net[1].bias.copy_(-net[1](net[0](torch.zeros(16))) + net[1].bias)
    assert lipschitz_bound(net, torch.randn(4, 16)).upper < 10
    assert float(certified_radius(net, torch.randn(2, 16), effort="fast").radius.min()) > 0


def _into_a_spectrum(x):
    z = torch.fft.fft(x)
    return torch.view_as_real(torch.slice_scatter(torch.full_like(z, 300j), z[:, :2], 1, 0, 2))


#: name: (function, shape, ball); every fact of every node is compared with values
FACTS = {
    "rows of pieces": (_unbound_attention, (20, 20, 2), 100.0),
    "in-place power": (lambda x: x.tanh().pow_(2), (4,), 2.0),
    "in-place float power": (lambda x: x.tanh().float_power_(2), (4,), 2.0),
    "spectrum in a constant": (_into_a_spectrum, (4,), 2.0),
    "lazy negation": (lambda x: torch.fft.fft(x).conj().imag, (4,), 2.0),
    "negated constant": (lambda x: x * torch.view_as_complex(torch.ones(4, 2, dtype=D)).conj().imag, (4,), 2.0),
    "index of the shape of the input": (lambda x: x.gather(1, torch.tensor([[0, 1, 0]]).expand_as(x)), (3,), 2.0),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_every_node_hold(name):
    function, shape, ball = FACTS[name]
    assert check_facts(Op(function).eval(), torch.zeros(1, *shape, dtype=D), ball=ball) == []


#: functions with numbers that float32 does not hold, whose constant is the number
SCALARS = {
    "factor": (lambda x: x * 1.7, 1.7), "divisor": (lambda x: x / 0.3, 0.3), "slope": (lambda x: F.leaky_relu(-x, -1.7), 1.7),
    "wide constant": (lambda x: x * torch.tensor(1.7, dtype=D), 1.7), "elu": (lambda x: F.elu(x - 1, 1.7), 1.7),
    "alpha": (lambda x: torch.add(torch.zeros(4), x, alpha=1.7), 1.7), "in place": (lambda x: x.clone().mul_(1.7), 1.7),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("name", SCALARS)
def test_numbers_are_read_in_the_dtype_of_the_tensor(name, dtype):
    """Rounded up or down by float32, the bound is that of what is computed: 3·10⁻⁸ apart from float64's."""
    function, number = SCALARS[name]
    truth = float(torch.tensor(number, dtype=dtype))
    truth = 1 / truth if name == "divisor" else truth
    bound = lipschitz_bound(Op(function).eval(), torch.randn(1, 4, dtype=dtype)).upper
    assert bound == pytest.approx(truth, rel=1e-12)
    assert bound >= truth


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_networks_in_half_precision_are_bounded_as_the_map_of_their_weights(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval().to(dtype)
    x = torch.randn(2, 4, dtype=dtype)
    report, radii = lipschitz_bound(net, x), certified_radius(net, x, effort="fast")
    local = local_lipschitz(net, x, 0.1, effort="fast", steps=2)
    wide = copy.deepcopy(net).float()
    assert report.upper == lipschitz_bound(wide, x.float()).upper
    assert "stored in" in report.notes[-1]
    assert torch.equal(radii.radius, certified_radius(wide, x.float(), effort="fast").radius)
    assert torch.equal(local.upper, local_lipschitz(wide, x.float(), 0.1, effort="fast", steps=2).upper)


def test_integers_are_refused_in_a_sentence():
    net = nn.Sequential(nn.Linear(4, 8)).eval()
    with pytest.raises(Refused, match="the one that was quantised"):
        lipschitz_bound(net, torch.zeros(1, 4, dtype=torch.int8))
    with pytest.raises(Refused, match="computes in integers"):
        lipschitz_bound(torch.ao.quantization.quantize_dynamic(net, {nn.Linear}), torch.randn(1, 4))
