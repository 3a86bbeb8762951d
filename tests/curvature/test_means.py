"""The mean over the data is one number: it does not depend on how the data is cut into batches, and labels are checked."""

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.core import InputError, Refused
from equipoise.curvature import LossHessian

pytestmark = pytest.mark.medium


def network(out=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, out)).double()


def inputs(n=23):
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


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


def test_negative_labels_are_refused():
    """Torch would leave them out of the mean, and the batches would be weighted wrongly."""
    with pytest.raises(InputError, match="not be negative"):
        LossHessian(network(), "ce", (inputs(), torch.full((23,), -100))).matvec(np.zeros(43))


def test_targets_of_another_shape_are_refused():
    for out, shape in ((2, (23,)), (1, (23, 3)), (3, (23, 1))):
        with pytest.raises(InputError, match="targets of the outputs' shape"):
            LossHessian(network(out), "mse", (inputs(), torch.zeros(shape).double())).value()
