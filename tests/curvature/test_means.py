"""The mean over the data is one number: it does not depend on how the data is cut into batches, and labels are checked."""

import numpy as np
import pytest
import torch
from torch import nn

from equipoise import curvature
from equipoise.core import InputError, Refused
from equipoise.curvature import LossHessian
from equipoise.curvature.traces import _METHODS, TraceEstimate


def network(out=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, out)).double()


def inputs(n=23):
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def ignored():
    y = torch.arange(23) % 3
    y[[0, 1, 2, 3, 4, 11, 20]] = -100  # the first batch of five holds no label at all
    return y


def same(y):
    return lambda z: nn.functional.cross_entropy(z, y)


#: (network, loss, targets, the loss of all data at once as torch computes it)
MEANS = {
    "mse-flat-targets": (
        network(1), "mse", torch.linspace(-1, 2, 23).double(),
        lambda z: nn.functional.mse_loss(z[:, 0], torch.linspace(-1, 2, 23).double()),
    ),
    "mse-flat-outputs": (
        nn.Sequential(network(1), nn.Flatten(0)), "mse", torch.linspace(-1, 2, 23).double()[:, None],
        lambda z: nn.functional.mse_loss(z, torch.linspace(-1, 2, 23).double()),
    ),
    "ce-ignored": (network(), "ce", ignored(), same(ignored())),
    "ce-int32": (network(), "ce", (torch.arange(23) % 3).int(), same(torch.arange(23) % 3)),
    "ce-probabilities": (
        network(), "ce", torch.softmax(inputs()[:, :3], 1), same(torch.softmax(inputs()[:, :3], 1))
    ),
    "ce-pixels": (
        nn.Sequential(network(6), nn.Unflatten(1, (3, 2))), "ce", torch.arange(46).reshape(23, 2) % 3,
        same(torch.arange(46).reshape(23, 2) % 3),
    ),
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


def test_noise_is_in_the_value_the_gradient_and_the_sharpness():
    model, y = network(), torch.arange(23) % 3
    noisy = LossHessian(model, "ce", (inputs(), y), noise=(0.3, 4, 0))
    shifts = [{n: s for n, s in shift.items()} for shift in noisy.shifts]  # noqa: C416
    values = []
    for shift in shifts:
        moved = {n: p.detach() + shift[n] for n, p in model.named_parameters()}
        values.append(nn.functional.cross_entropy(torch.func.functional_call(model, moved, (inputs(),)), y).item())
    assert noisy.value() == pytest.approx(np.mean(values))
    assert noisy.value() != pytest.approx(LossHessian(model, "ce", (inputs(), y)).value(), rel=1e-3)
    step = 1e-5 * np.random.default_rng(0).standard_normal(noisy.size)
    slope = noisy.value(step) - noisy.value(-step)
    assert slope == pytest.approx(2 * float(noisy.gradient() @ step), rel=1e-5)
    sharp = curvature.sharpness_of(noisy, radius=0.05, steps=3)
    assert sharp.loss == pytest.approx(noisy.value())
    assert sharp.value > 0


LABELS = {
    "too large": (torch.full((23,), 3), "label 3 is none of the model's 3 classes"),
    "negative": (torch.full((23,), -1), "label -1 is none"),
    "of another shape": (torch.zeros(23, 1, dtype=torch.int64), "class numbers of shape"),
    "floats": (torch.zeros(23), "class numbers of shape"),
    "all ignored": (torch.full((23,), -100), "nothing to average"),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_that_are_none_are_refused(name):
    y, reason = LABELS[name]
    with pytest.raises(InputError, match=reason):
        LossHessian(network(), "ce", (inputs(), y)).matvec(np.zeros(43))


def test_targets_of_another_shape_are_refused():
    for out, shape in ((2, (23,)), (1, (23, 3)), (3, (23, 1))):
        with pytest.raises(InputError, match="targets of the outputs' shape"):
            LossHessian(network(out), "mse", (inputs(), torch.zeros(shape).double())).value()


def spectra(n=40):
    """Definite and indefinite, flat, decaying, a few large ones over a tail of the other sign."""
    i = np.arange(1, n + 1)
    yield i / n
    yield 1.0 / i
    yield 0.7**i
    yield np.where(i % 2, 1.0, -1.0)
    yield np.where(i % 2, 1.0, -1.0) / i
    yield np.r_[5.0, 3.0, 1.0, -0.02 * np.ones(n - 3)]
    yield np.r_[10 * 0.6 ** np.arange(10), 0.05 * np.random.default_rng(0).standard_normal(n - 10)]


@pytest.mark.parametrize("products", [6, 10])
def test_xtrace_interval_covers(products):
    """95 % asked: at least 93 % over all spectra, 90 % on each; the spread of the samples alone covers 83 … 94 %."""
    hits, tries = [], 150
    for values in spectra():
        rng, covered = np.random.default_rng(0), 0
        Q = np.linalg.qr(rng.standard_normal((len(values), len(values))))[0]
        A = (Q * values) @ Q.T
        for _ in range(tries):
            found, error, samples = _METHODS["xtrace"](lambda X, A=A: A @ X, len(values), products, rng)
            low, high = TraceEstimate(found, error, "xtrace", products, samples).interval()
            covered += low <= values.sum() <= high
        hits.append(covered / tries)
    assert min(hits) >= 0.9, hits
    assert np.mean(hits) >= 0.93, hits
