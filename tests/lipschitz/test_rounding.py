"""Rounding of the forward pass: float32 evaluations, in several orders, stay within the bound; certificates survive it."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from lipschitz_nets import Op
from rule_rows import CASES as ROWS
from torch import nn

import equipoise as eq
from equipoise.core import InputError, Refused
from equipoise.lipschitz.capture import capture, run_program
from equipoise.lipschitz.nonlinear import known, near
from equipoise.lipschitz.propagate import propagate
from equipoise.lipschitz.rounding import Rounding, forward_error
from equipoise.lipschitz.values import exactly as run_exactly
from equipoise.nn import MaxMin
from equipoise.nn.convert import plain
from equipoise.nn.models import sll_tiny
from equipoise.norms.spectral import Cache


def _potentials(m, x):
    """Convex potential layers: 1-Lipschitz as blocks, 3 as sums of their branches."""
    for layer in m.layers:
        norm = torch.linalg.matrix_norm(layer.weight.detach().double(), 2).float()
        x = x - (2 / norm**2) * (torch.relu(layer(x)) @ layer.weight)
    return x


def _mixed(m, x):
    """Scalings, shifts, pieces, casts, concatenation, pooling."""
    a, b = ((x - 0.25) / 0.75).chunk(2, 1)
    pooled = nn.functional.max_pool1d(torch.cat([torch.abs(a), b.clamp(max=0.125)], 1), 2)
    mean = x.mean(2)
    parts = torch.cat([pooled.flatten(1), mean, (3 * mean).amax(1, keepdim=True)], 1)
    return m.last(parts.double()[:, :12].to(x.dtype))


CASES = {
    "dense": (nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 20), nn.GELU(), nn.Linear(20, 4)), (30,)),
    "curves": (nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus(), nn.LeakyReLU(0.1),
                             nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 3)), (9,)),
    "convolutions": (nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2),
                                   nn.Conv2d(5, 4, 2, stride=2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3)), (2, 8, 8)),
    "enlarged": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample((9, 11)),
                               nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(126, 3)), (2, 5, 5)),
    "sorting": (nn.Sequential(nn.Linear(8, 8), MaxMin(), nn.Linear(8, 3)), (8,)),
    "mixed": (Op(_mixed, last=nn.Linear(12, 3)), (4, 4)),
    "blocks": (Op(_potentials, layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(8))), (6,)),
    "1-Lipschitz": (plain(sll_tiny(rescaling="sr", in_channels=1, input_size=4, num_classes=3))[0], (1, 4, 4)),
}  # fmt: skip


def case(name: str):
    net, shape = CASES[name]
    torch.manual_seed(0)
    for part in net.modules() if name != "1-Lipschitz" else ():
        if isinstance(part, nn.Linear | nn.Conv2d):
            nn.init.normal_(part.weight, std=1 / part.weight[0].numel() ** 0.5)
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(std=3.0), part.running_var.uniform_(0.01, 2)
    return net.float().eval().requires_grad_(False), 3 * torch.randn(5, *shape)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "1-Lipschitz")) for n in CASES])
def test_evaluations_stay_within_the_bound(name):
    net, x = case(name)
    found = forward_error(net, x, radius=0.5)
    away = x + 0.5 * nn.functional.normalize(torch.randn_like(x).flatten(1), dim=1).reshape(x.shape) * (1 - 1e-6)
    single = [net(p) for p in (x, away)]
    alone = torch.cat([net(v[None]) for v in x])
    real = [net.double()(p.double()) for p in (x, away)]
    for got, wanted in ((single[0], real[0]), (alone, real[0]), (single[1], real[1])):
        assert ((got.double() - wanted).abs() <= found.deployed + 1e-9).all()
    assert ((found.values - real[0]).abs() <= found.error).all()
    assert (found.error < 1e-6 * found.deployed).all()
    assert (found.deployed < 1e-2).all(), "and it says something"
    assert (forward_error(net.float(), x).deployed <= found.deployed).all()


def exactly(net: nn.Sequential, x: torch.Tensor) -> list[Fraction]:
    """A network of dense layers and ReLUs in rational arithmetic."""
    v = [Fraction(float(t)) for t in x]
    for part in net:
        if isinstance(part, nn.ReLU):
            v = [max(t, Fraction(0)) for t in v]
        else:
            W, b = part.weight.tolist(), part.bias.tolist()
            v = [
                sum(Fraction(w) * t for w, t in zip(row, v, strict=True)) + Fraction(c)
                for row, c in zip(W, b, strict=True)
            ]
    return v


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_it_is_about_real_numbers(scale):
    """Against rational arithmetic, with weights that cancel and any order of summation."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)).requires_grad_(False)
    net[2].weight[:, 6:] = -net[2].weight[:, :6]
    net[0].weight[6:] = net[0].weight[:6] * (1 + 1e-6)
    for part in (net[0], net[2]):
        part.weight.mul_(scale)
    x = torch.rand(1, 12)
    found, real = forward_error(net, x), exactly(net, x[0])
    for order in (torch.arange(12), torch.arange(11, -1, -1), torch.randperm(12)):
        h = torch.zeros(12)
        for i in order:
            h = h + net[0].weight[:, i] * x[0, i]
        h = torch.relu(h + net[0].bias)
        z = torch.zeros(3)
        for i in order:
            z = z + net[2].weight[:, i] * h[i]
        got = (z + net[2].bias).tolist()
        off = [abs(Fraction(g) - r) for g, r in zip(got, real, strict=True)]
        assert all(o <= Fraction(float(d)) for o, d in zip(off, found.deployed[0], strict=True))
        assert max(off) > 0
    assert all(
        abs(Fraction(float(v)) - r) <= Fraction(float(e))
        for v, r, e in zip(found.values[0], real, found.error[0], strict=True)
    )


class Cancels(nn.Sequential):
    """The real logits are (½, 0) everywhere; in float32 the 1 is lost beside 10⁸ and the logits are (−½, 0)."""

    def __init__(self):
        super().__init__(nn.Linear(1, 2), nn.Linear(2, 2))
        self[0].weight.data, self[0].bias.data = torch.tensor([[1e8], [1e8]]), torch.tensor([1.0, 0.0])
        self[1].weight.data, self[1].bias.data = torch.tensor([[1.0, -1.0], [0.0, 0.0]]), torch.tensor([-0.5, 0.0])


def test_a_margin_that_rounding_turns_is_not_certified():
    net, x = Cancels().eval(), torch.tensor([[1.0]])
    assert int(net(x).argmax()) == 1
    real = eq.certified_radius(net, x)
    assert int(real.labels) == 0
    assert float(real.radius) > 1, "a true statement about the real function, and false about the network that runs"
    assert real.deployed is None
    assert "float64" in real.note
    for labels in (None, torch.tensor([1])):
        found = eq.certified_radius(net, x, labels, deployed="float32")
        assert float(found.deployed) == 0
        assert "float32" in found.note
    with pytest.raises(Refused, match="float64"):
        eq.certified_radius(net.double(), x.double(), deployed="float32")


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_certified_networks_keep_their_decision_as_they_run(norm):
    """Margins near the size of float32's rounding: what is certified is decided so by float32 passes inside the ball."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3)).requires_grad_(False)
    net[0].bias.add_(2e4)
    x = torch.randn(4, 20)
    net[2].bias.sub_(net.double()(x[:1].double())[0].float() - torch.tensor([0.5, 0.0, -1.0]))
    net.float()
    found = eq.certified_radius(net, x, norm=norm, effort="relaxation", deployed="float32")
    assert (found.deployed <= found.radius).all()
    assert (found.radius > 0).all()
    for v, y, r in zip(x, found.labels, found.deployed, strict=True):
        step = torch.randn(500, 20, dtype=torch.float64)
        size = step.norm(dim=1, keepdim=True) if norm == "l2" else step.abs().amax(1, keepdim=True)
        near = (v + step / size * float(r) * (1 - 1e-6)).float()
        inside = (near.double() - v).norm(dim=1) < r if norm == "l2" else (near.double() - v).abs().amax(1) < r
        assert (net(near[inside]).argmax(1) == y).all()


#: rows of the table of rules with products, softmax, normalisations, steep functions, masks and positions
NONLINEAR = (
    "quotient", "square root on ball", "negative power", "logarithm on ball", "layer norm steep", "rms norm", "group norm",
    "instance norm", "softmax temperature", "log softmax", "logsumexp", "gate on ball", "scores on ball", "gru cell", "norm",
    "attention by hand", "mask", "index", "select scatter", "softmax component", "rms norm by hand", "normalize plus",
)  # fmt: skip


@pytest.mark.parametrize("name", NONLINEAR)
def test_operands_within_their_errors_give_results_within_theirs(name):
    """At every node, for errors of rounding's size and of a ball's."""
    operation, shape, _, ball = ROWS[name]
    net = operation if isinstance(operation, nn.Module) else Op(operation)
    torch.manual_seed(0)
    program = capture(net.eval(), torch.randn(1, *shape))
    run = propagate(program, ball)
    values = {program.inputs[0]: 2 * torch.randn(1, *shape, dtype=torch.float64)}
    seen = 0
    for node in program.nodes:
        call = run.call(node, Cache())
        values[node] = value = run_exactly(node, values, call.lookup)
        for size in (1e-9, 0.1, 1.0) if known(call) else ():
            errors = {n: size * torch.rand(v.shape, dtype=torch.float64) for n, v in values.items()}
            found, error = near(call, values, errors)
            assert torch.allclose(found, value, rtol=1e-12, atol=1e-12)
            for _ in range(8):
                share = {n: torch.randn(v.shape).sign() * (torch.rand(v.shape) < 0.7) for n, v in values.items()}
                moved = run_exactly(node, {n: v + errors[n] * share[n] for n, v in values.items()}, call.lookup)
                off = (moved - value).abs().nan_to_num(nan=0.0)  # outside of its domain
                assert bool((off <= error * (1 + 1e-6) + 1e-14 * value.abs()).logical_or(error.isnan()).all()), node
                seen += 1
    assert seen


@pytest.mark.parametrize("name", ["softmax", "log softmax", "layer norm", "rms norm", "product"])
def test_the_rounding_of_nonlinear_operations_is_covered(name):
    """Against 64 bits of mantissa, on numbers that cancel."""
    function = {
        "softmax": lambda x: torch.softmax(x, -1),
        "log softmax": lambda x: torch.log_softmax(x, -1),
        "layer norm": lambda x: torch.nn.functional.layer_norm(x, (7,), eps=1e-5),
        "rms norm": lambda x: torch.nn.functional.rms_norm(x, (7,), eps=1e-5),
        "product": lambda x: torch.softmax(x, -1) @ torch.softmax(x, -1).mT,
    }[name]
    torch.manual_seed(0)
    for shift, scale in ((0.0, 1.0), (1e6, 1.0), (-1e3, 1e-4), (3.0, 300.0)):
        x = shift + scale * torch.randn(3, 4, 7, dtype=torch.float64)
        found = forward_values(Op(function).double().eval(), x)
        v = x.numpy().astype(np.longdouble)
        lowered = np.exp(v - v.max(-1, keepdims=True))
        p = lowered / lowered.sum(-1, keepdims=True)
        c = v - v.mean(-1, keepdims=True) if name == "layer norm" else v
        real = {
            "softmax": p,
            "log softmax": v - v.max(-1, keepdims=True) - np.log(lowered.sum(-1, keepdims=True)),
            "product": p @ p.swapaxes(1, 2),
        }.get(name, c / np.sqrt((c * c).mean(-1, keepdims=True) + np.longdouble(1e-5)))
        off = np.abs(found[0].numpy() - real.reshape(3, -1))
        assert (off <= found[1].numpy()).all()
        assert float(found[1].max()) < 1e-6


def test_an_rms_norm_without_eps_has_that_of_its_type_in_float64_too():
    net, x = nn.RMSNorm(4).eval(), 1e-4 * torch.randn(2, 4)
    (value,) = run_program(capture(net, x[:1]), [x[:1].double()], exact=True)
    assert torch.allclose(value.float(), net(x[:1]), rtol=1e-5)


def forward_values(net, x):
    cache = Cache()
    return Rounding(propagate(capture(net, x[:1]), None, cache=cache), cache).evaluate(x)


@pytest.mark.parametrize("kind", ["transformer", "1-Lipschitz"])
def test_attention_and_normalisation_have_radii(kind):
    """They had none: the rounding of their forward pass was not bounded."""
    torch.manual_seed(0)
    plain = kind == "transformer"
    block = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, norm_first=True)
    own = nn.Sequential(eq.nn.ConvexAttention(6, heads=2), eq.nn.ConvexAttention(6, heads=2))
    layers = nn.Unflatten(1, (5, 6)), block if plain else own, nn.Flatten(), nn.Linear(30, 3)
    net, x = nn.Sequential(*layers).eval(), torch.randn(4, 30)
    found = eq.certified_radius(net, x)
    assert set(found.methods) == {"boxes" if plain else "pairs"}
    assert (found.radius > 1e-4).all()
    assert "no relaxation" in found.note
    for v, y, r in zip(x.double(), found.labels, found.radius, strict=True):
        steps = torch.nn.functional.normalize(torch.randn(200, 30, dtype=torch.float64), dim=1) * float(r) * (1 - 1e-9)
        assert (net.double()(v + steps).argmax(1) == y).all()
    net.float()
    one = eq.certified_radius(net, x[:1], epsilon=float(found.radius[0]) / 2)
    assert one.verdicts == ("proved",)
    far = eq.certified_radius(net, x, epsilon=10.0, complete=True)
    assert far.broken
    for n, point in far.broken.items():
        assert int(net(point[None]).argmax()) != int(far.labels[n])
        assert float((point - x[n]).norm()) <= 10.0


def test_what_is_not_known_is_refused_or_said():
    norm = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).eval()
    with pytest.raises(Refused, match=r"rounding of .*layer_norm"):
        forward_error(norm, torch.randn(1, 4))
    assert float(eq.certified_radius(norm, torch.randn(2, 4), effort="fast").radius.min()) > 0
    with pytest.raises(Refused, match=r"float32: .*layer_norm"):
        eq.certified_radius(norm, torch.randn(2, 4), effort="fast", deployed="float32")
    with pytest.raises(InputError, match="radius"):
        forward_error(nn.Linear(4, 2), torch.randn(1, 4), radius=-1.0)
    norm[0].weight.data.fill_(1e38)
    assert forward_error(nn.Sequential(norm[0], norm[2]), torch.ones(1, 4)).deployed.isinf().all()
    transform = nn.Sequential(Op(lambda x: torch.fft.fft(x).real), nn.Linear(4, 2)).eval()
    found = eq.certified_radius(transform, torch.randn(2, 4))
    assert float(found.radius.max()) == 0
    assert "nothing is proved: node" in found.note
    assert "_fft_r2c" in found.note
