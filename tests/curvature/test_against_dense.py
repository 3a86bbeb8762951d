"""Every curvature number against the dense Hessian that autograd forms, on small networks; one row adds a network."""

import copy
import functools
import math

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator
from torch import nn

from equipoise import curvature
from equipoise.core import InputError, Refused
from equipoise.curvature import LossHessian

pytestmark = pytest.mark.medium

torch_loss = {"ce": nn.functional.cross_entropy, "mse": nn.functional.mse_loss}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = x.reshape(len(x), -1, 4)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def tied():
    first = nn.Linear(4, 4)
    return nn.Sequential(first, nn.Tanh(), first, nn.Tanh(), nn.Linear(4, 3))


def tied_parameters():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    net[2].weight = net[0].weight
    return net


NETWORKS = {
    "mlp-ce": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (5,), "ce"),
    "relu-ce": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), (5,), "ce"),
    "mse": (lambda: nn.Sequential(nn.Linear(4, 7), nn.Softplus(), nn.Linear(7, 2)), (4,), "mse"),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(12, 3)), (1, 4, 4), "ce"),
    "batch-norm-and-dropout": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5),
        nn.Linear(6, 3)), (4,), "ce"),
    "max-pool": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8, 3)), (1, 6, 6), "ce"),
    "layer-norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Sigmoid(), nn.Linear(6, 2)), (4,), "ce"),
    "attention": (Attention, (12,), "ce"),
    "tied": (tied, (4,), "ce"),
    "tied-parameters": (tied_parameters, (4,), "ce"),
}  # fmt: skip


def build(name, n=23):
    make, shape, loss = NETWORKS[name]
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(n, *shape, dtype=torch.float64)
    out = model.eval()(x)
    model.train()
    y = torch.randint(out.shape[1], (n,)) if loss == "ce" else torch.randn_like(out)
    return model, loss, (x, y.detach())


def dense(model, loss, data):
    """The slow reference: autograd's own Hessian of the mean loss, whole data at once, in evaluation mode."""
    names = [name for name, _ in model.named_parameters()]
    x, y = data
    copied = copy.deepcopy(model).eval()
    parameters = [p.detach() for p in model.parameters()]
    flat = torch.cat([p.flatten() for p in parameters])

    def value(v):
        parts = v.split([p.numel() for p in parameters])
        named = {n: part.reshape(p.shape) for n, part, p in zip(names, parts, parameters, strict=True)}
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch_loss[loss](torch.func.functional_call(copied, named, (x,)), y)

    H = torch.autograd.functional.hessian(value, flat).numpy()
    model.train()
    return H


@functools.cache
def prepared(name):
    model, loss, data = build(name)
    return model, loss, data, dense(model, loss, data)


@pytest.fixture(params=NETWORKS)
def case(request):
    return prepared(request.param)


class Matrix(LinearOperator):
    """A dense symmetric matrix that answers as a `LossHessian` does: the methods are tested on it, products by products."""

    def __init__(self, H):
        super().__init__(np.float64, H.shape)
        self.entries, self.size = (H + H.T) / 2, len(H)

    def _matvec(self, v):
        return self.entries @ v


def test_products_are_those_of_the_dense_hessian(case):
    model, loss, data, H = case
    operator = LossHessian(model, loss, data, batch_size=7)
    assert model.training
    for v in np.random.default_rng(0).standard_normal((3, operator.size)):
        assert np.allclose(operator.matvec(v), H @ v, atol=1e-10 * max(1, np.abs(H).max()))
    assert np.array_equal(operator.matvec(v), operator.matvec(v))  # to the bit
    uneven = iter([(data[0][:3], data[1][:3]), (data[0][3:], data[1][3:])])  # an iterator is kept, not used up
    assert np.allclose(LossHessian(model, loss, uneven).matvec(v), operator.matvec(v), atol=1e-10)
    assert model.training


@pytest.mark.parametrize("which", ["LA", "SA", "LM"])
def test_eigenvalue_with_its_residual(case, which):
    H = case[3]
    values = np.linalg.eigvalsh(H)
    e = curvature.top_eigenvalue(Matrix(H), which=which)
    expected = {"LA": values[-1], "SA": values[0], "LM": values[np.abs(values).argmax()]}[which]
    scale = np.abs(values).max()
    assert e.value == pytest.approx(expected, abs=2e-3 * scale)
    assert min(abs(values - e.value)) <= e.residual + 1e-9 * scale  # the interval contains an eigenvalue
    assert values[0] - 1e-9 * scale <= e.value <= values[-1] + 1e-9 * scale
    assert np.linalg.norm(H @ e.vector - e.value * e.vector) == pytest.approx(e.residual, abs=1e-9 * scale)


def test_trace_within_its_error(case):
    H = case[3]
    t = curvature.trace(Matrix(H), products=30, seed=1)
    assert abs(t.value - np.trace(H)) <= 5 * t.standard_error + 1e-9 * np.abs(H).max()
    exact = curvature.trace(Matrix(H), products=1000)
    assert exact.value == pytest.approx(np.trace(H), rel=1e-9)
    assert exact.standard_error == 0


def test_density_has_the_moments_and_the_ends(case):
    H = case[3]
    values = np.linalg.eigvalsh(H)
    d = curvature.spectral_density(Matrix(H), steps=60, vectors=30)
    assert d.weights.sum() == pytest.approx(1)
    assert d.weights @ d.nodes == pytest.approx(np.trace(H) / len(H), abs=0.2 * np.sqrt((H**2).sum() / len(H)))
    scale = np.abs(values).max()
    assert d.nodes.min() >= values[0] - 1e-8 * scale
    assert d.nodes.max() <= values[-1] + 1e-8 * scale
    assert d.nodes.max() == pytest.approx(values[-1], rel=1e-3)
    middle = (values[-1] + values[-2]) / 2
    assert d.weights[d.nodes <= middle].sum() == pytest.approx((values <= middle).mean(), abs=0.05)


def test_sharpness_is_the_slope_to_first_order(case):
    model, loss, data, _ = case
    s = curvature.sharpness(LossHessian(model, loss, data), radius=1e-3, steps=2)
    operator = LossHessian(model, loss, data)
    slope = np.linalg.norm(operator.gradient())
    expected = 1e-3 * slope / (1 + operator.value())  # to first order
    assert s.value == pytest.approx(expected, rel=0.05)
    assert torch.equal(operator.theta, LossHessian(model, loss, data).theta)  # parameters are not touched


def test_adaptive_sharpness_does_not_see_rescaled_neurons():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    data = torch.randn(40, 3).double(), torch.randint(2, (40,))

    def measured(**options):
        hessian = LossHessian(model, "ce", data)
        return curvature.sharpness(hessian, radius=0.1, steps=4, restarts=1, **options).value

    before = measured(), measured(adaptive=True)
    with torch.no_grad():
        scale = torch.logspace(-1, 1, 8).double()
        for parameter in (model[0].weight, model[0].bias):
            parameter.mul_(scale.view(-1, *[1] * (parameter.dim() - 1)))
        model[2].weight.div_(scale)
    assert measured(adaptive=True) == pytest.approx(before[1], rel=1e-9)
    assert abs(measured() / before[0] - 1) > 0.1


def test_one_layer_only():
    model, loss, data = build("mlp-ce")
    H = dense(model, loss, data)
    sizes = [p.numel() for p in model.parameters()]
    start = sizes[0] + sizes[1]
    block = H[start:, start:]
    v = np.arange(len(block), dtype=float)
    for layer in ("2", "2.*"):
        assert np.allclose(LossHessian(model, loss, data, layer).matvec(v), block @ v, atol=1e-12)
    weight = H[start : start + sizes[2], start : start + sizes[2]]
    e = curvature.top_eigenvalue(LossHessian(model, loss, data, "2.weight"))
    assert e.value == pytest.approx(np.linalg.eigvalsh(weight)[-1], rel=1e-6)
    with pytest.raises(InputError, match="no parameter"):
        LossHessian(model, loss, data, "fc")


def test_float64_arithmetic_for_a_float32_model():
    model, loss, data = build("mlp-ce")
    H = dense(model, loss, data)
    small = model.float()
    data32 = (data[0].float(), data[1])
    v = np.random.default_rng(0).standard_normal(len(H))
    rough = LossHessian(small, loss, data32).matvec(v)
    fine = LossHessian(small, loss, data32, dtype=torch.float64).matvec(v)
    exact = LossHessian(copy.deepcopy(small).double(), loss, (data32[0].double(), data32[1])).matvec(v)
    assert np.abs(fine - exact).max() < 1e-13 < np.abs(rough - exact).max()
    assert np.allclose(rough, H @ v, atol=1e-4)
    assert next(small.parameters()).dtype is torch.float32


def test_own_losses_and_refusals():
    model, _, (x, y) = build("mlp-ce")
    smooth = lambda z, t: nn.functional.cross_entropy(z, t, label_smoothing=0.1)  # noqa: E731 - a one-line loss
    assert curvature.top_eigenvalue(LossHessian(model, smooth, (x, y))).value > 0
    for wrong in (
        lambda: LossHessian(model, "hinge", (x, y)),
        lambda: LossHessian(model, "ce", (x, y[:3])),
        lambda: LossHessian(model, "ce", []),
        lambda: LossHessian(model, lambda z, t: z, (x, y)).value(),
        lambda: LossHessian(model, "ce", (x, y - 100)).value(),  # torch would leave negative labels out of the mean
        lambda: LossHessian(model, "mse", (x, y.double())).value(),  # three outputs, one target
        lambda: LossHessian(model, "mse", (x, y.double()[:, None])).value(),
        lambda: curvature.trace(LossHessian(model, "ce", (x, y)), products=1),
        lambda: curvature.sharpness(LossHessian(model, "ce", (x, y)), radius=-1.0),
        lambda: curvature.top_eigenvalue(LossHessian(model, "ce", (x, y)), which="top"),
    ):
        with pytest.raises(InputError):
            wrong()


def test_too_few_products_are_refused_not_reported():
    flat = Matrix(np.diag(np.linspace(0.99, 1, 400)))
    with pytest.raises(Refused, match="max_products"):
        curvature.top_eigenvalue(flat, max_products=25, tol=1e-12)
    assert curvature.top_eigenvalue(flat, max_products=20_000, tol=1e-12).value == pytest.approx(1)


@pytest.mark.parametrize("size", [0.0, 1e-200])
def test_flat_losses(size):
    """ARPACK takes no zero matrix, and squares of small residuals vanish."""
    spectrum = size * np.linspace(0, 1, 60)
    for which in ("LA", "SA", "LM"):
        found = curvature.top_eigenvalue(Matrix(np.diag(spectrum)), which=which, tol=1e-2)
        assert np.abs(spectrum - found.value).min() <= found.residual + 1e-14 * size
    found = curvature.trace(Matrix(np.diag(spectrum)), products=30)
    assert abs(found.value - spectrum.sum()) <= 6 * found.standard_error + 1e-12 * size


def test_infinite_losses_are_refused():
    model = nn.Linear(2, 2).double()
    model.weight.data.fill_(math.inf)
    for number in (curvature.top_eigenvalue, curvature.trace, curvature.spectral_density, curvature.sharpness):
        with pytest.raises(Refused, match="not finite"):
            number(LossHessian(model, "ce", (torch.ones(2, 2).double(), torch.tensor([0, 1]))))


def network(out=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, out)).double()


def inputs(n=23):
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def same(y):
    return lambda z: nn.functional.cross_entropy(z, y)


#: (network, loss, targets, the loss of all data at once as torch computes it)
MEANS = {
    "mse-flat-targets": (network(1), "mse", torch.linspace(-1, 2, 23).double(),
        lambda z: nn.functional.mse_loss(z[:, 0], torch.linspace(-1, 2, 23).double())),
    "mse-flat-outputs": (nn.Sequential(network(1), nn.Flatten(0)), "mse", torch.linspace(-1, 2, 23).double()[:, None],
        lambda z: nn.functional.mse_loss(z, torch.linspace(-1, 2, 23).double())),
    "ce-int32": (network(), "ce", (torch.arange(23) % 3).int(), same(torch.arange(23) % 3)),
    "ce-probabilities": (network(), "ce", torch.softmax(inputs()[:, :3], 1), same(torch.softmax(inputs()[:, :3], 1))),
    "ce-pixels": (nn.Sequential(network(6), nn.Unflatten(1, (3, 2))), "ce", torch.arange(46).reshape(23, 2) % 3,
        same(torch.arange(46).reshape(23, 2) % 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("batch", [1, 5, 23])
def test_the_mean_does_not_depend_on_the_batches(name, batch):
    model, loss, y, whole = MEANS[name]
    operator = LossHessian(model, loss, (inputs(), y), batch_size=batch)
    value = whole(model(inputs()))
    gradient = torch.autograd.grad(value, list(model.parameters()))
    assert operator.value() == pytest.approx(value.item(), rel=1e-12)
    assert np.allclose(operator.gradient(), torch.cat([g.flatten() for g in gradient]).numpy(), atol=1e-12)


def test_batch_norm_without_running_statistics_needs_one_batch():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3)).double()
    y = torch.arange(23) % 3
    with pytest.raises(Refused, match="batch_size=23"):
        LossHessian(model, "ce", (inputs(), y), batch_size=5)
    value = LossHessian(model, "ce", (inputs(), y)).value()
    assert value == pytest.approx(nn.functional.cross_entropy(model(inputs()), y).item())
