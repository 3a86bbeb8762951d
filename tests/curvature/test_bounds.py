"""The layer-wise report and the smoothed-loss bound: true where they say so, and the thesis' versions shown to fail."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from equipoise.core import InputError, Kind, Refused
from equipoise.curvature import LossHessian, hessian_bound_report, last_layer_constants, smoothed_loss_bound

CHAINS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "no-bias": (lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)), (4,)),
    "gelu": (lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Dropout(0.5), nn.Linear(6, 3)), (4,)),
    "leaky": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(2.0), nn.Linear(6, 3)), (4,)),
    "image": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Sigmoid(), nn.Dropout(), nn.Linear(6, 3)),
        (2, 2),
    ),
}


def dense(hessian):
    return hessian @ np.eye(hessian.size)


def smoothed(model, loss, data, sigma, draws):
    """The norm of the mean Hessian over Gaussian noise on the weight of a linear layer."""
    matrices, center = [], model.weight.detach().clone()
    for _ in range(draws):
        model.weight.data = center + sigma * torch.randn_like(center)
        matrices.append(dense(LossHessian(model, loss, data)))
    model.weight.data = center
    return np.linalg.norm(np.mean(matrices, axis=0), 2)


def gauss_newton(model, loss, data):
    """The slow reference: `mean JᵀBJ`, with dense Jacobians of the logits."""
    names = [n for n, _ in model.named_parameters()]
    values = {n: p.detach() for n, p in model.named_parameters()}
    total = 0
    for x in data[0]:
        J = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x[None],))[0])(values)  # noqa: B023
        J = torch.cat([J[n].flatten(1) for n in names], 1)
        z = model(x[None])[0].detach()
        p = z.softmax(0)
        B = torch.diag(p) - torch.outer(p, p) if loss == "ce" else 2 / len(z) * torch.eye(len(z)).double()
        total = total + J.mT @ B @ J / len(data[0])
    return total.numpy()


@pytest.mark.medium
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("loss", ["ce", "mse"])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_the_report_bounds_the_gauss_newton_matrix(chain, loss, scale):
    make, shape = CHAINS[chain]
    torch.manual_seed(0)
    model = make().double().eval()
    for p in model.parameters():
        p.data *= scale
    x = torch.randn(5, *shape).double()
    y = torch.randint(3, (5,)) if loss == "ce" else torch.randn(5, 3).double()
    report = hessian_bound_report(model, loss, (x, y))
    assert np.linalg.norm(gauss_newton(model, loss, (x, y)), 2) <= report.gauss_newton
    assert report.logit_gradient > 0
    assert not report.bounds_hessian
    assert sum(row.share for row in report.rows) == pytest.approx(1)
    assert "is not a bound of the Hessian" in str(report)


def test_at_stationary_logits_it_bounds_the_hessian_and_the_printed_one_does_not():
    """`a = w₂·relu(w₁x)` fits exactly; the curvature in w₂ is 2h², which the printed bound (via h only) does not contain."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    model[0].weight.data.fill_(8.0)
    model[2].weight.data.fill_(0.125)
    x = torch.full((1, 1), 0.125).double()
    y = model(x).detach()
    report = hessian_bound_report(model, "mse", (x, y))
    hessian = np.linalg.norm(dense(LossHessian(model, "mse", (x, y))), 2)
    assert report.bounds_hessian
    assert hessian <= report.gauss_newton
    printed = x.item() ** 2 * 2 * model[2].weight.item() ** 2  # ‖∂h/∂θ‖²·‖∇²_h L‖
    assert printed < 1e-3 * hessian


def test_far_from_stationary_logits_the_hessian_exceeds_the_bound():
    """Why the report says Gauss–Newton: with a large residual the other term rules."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity(), nn.Linear(1, 1, bias=False)).double()
    for p in model.parameters():
        p.data.fill_(1e-2)
    data = (torch.ones(1, 1).double(), torch.full((1, 1), 10.0).double())
    report = hessian_bound_report(model, "mse", data)
    assert np.linalg.norm(dense(LossHessian(model, "mse", data)), 2) > 10 * report.gauss_newton
    assert not report.bounds_hessian


@pytest.mark.parametrize("loss", ["ce", "mse"])
@pytest.mark.parametrize("row", [[1e20, 1.0, -1e20], [1.0, 1e20, -1e20], [1e20, -1e20, 1.0]])
def test_what_a_float64_pass_loses_to_cancellation_counts(row, loss):
    """The hidden value is 1, and a sum in float64 may give 0."""
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Identity(), nn.Linear(1, 2, bias=False))
    model[0].weight.data = torch.tensor([row])
    model[2].weight.data = torch.tensor([[1e-3], [-1e-3]])
    y = torch.zeros(1, dtype=torch.long) if loss == "ce" else torch.zeros(1, 2)
    report = hessian_bound_report(model, loss, (torch.ones(1, 3), y))
    assert report.gauss_newton >= (0.49 if loss == "ce" else 1)
    assert not report.bounds_hessian


class Tenfold(nn.Sequential):
    def forward(self, x):
        return 10 * super().forward(x)


def tied():
    """`w²x`: the derivative 2wx is twice what either layer contributes, and the sum of squares half of its square."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    return model


def hooked(part):
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    (model if part is None else model[part]).register_forward_hook(lambda module, args, output: 10 * output)
    return model


@pytest.mark.parametrize(("H", "e", "sigma"), [(1e200, 1.0, 1e200), (1e-300, 1e-300, 1e-300), (1e300, 1e-10, 1e10)])
def test_smoothed_bound_at_extreme_constants(H, e, sigma):
    with pytest.raises(InputError):
        smoothed_loss_bound(math.nan, e, sigma, everywhere=True)
    truth = min(H, math.sqrt(2 / math.pi) * (e / sigma))  # equal to the bound to all digits on both ends
    assert truth <= float(smoothed_loss_bound(H, e, sigma, everywhere=True)) <= truth * (1 + 1e-12)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten(), nn.Linear(4, 2)),
        tied(),
        Tenfold(nn.Linear(2, 2)),
        nn.Sequential(Tenfold(nn.Linear(2, 2)), nn.Linear(2, 2)),
        hooked(0),
        hooked(None),
    ],
)
def test_what_the_report_refuses(model):
    with pytest.raises(Refused):
        hessian_bound_report(model, "ce", (torch.zeros(2, 2), torch.tensor([0, 1])))


@pytest.mark.medium
@settings(max_examples=3, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.05, 5.0), st.floats(0.1, 4.0))
def test_smoothed_bound_holds_for_softmax_regression(seed, sigma, scale):
    """Constants that hold for all weights, so the bound must hold: against a Monte-Carlo mean of dense Hessians."""
    torch.manual_seed(seed)
    h = scale * torch.randn(6, 2).double()
    y = torch.randint(3, (6,))
    model = nn.Linear(2, 3, bias=False).double()
    H, epsilon = last_layer_constants(h)
    bound = smoothed_loss_bound(float(H), float(epsilon), sigma, everywhere=True)
    assert bound.kind is Kind.UPPER
    measured = smoothed(model, "ce", (h, y), sigma, draws=20)
    plain = np.linalg.norm(dense(LossHessian(model, "ce", (h, y))), 2)
    gradient = np.linalg.norm(LossHessian(model, "ce", (h, y)).gradient())
    assert plain <= float(H)
    assert gradient <= float(epsilon)
    assert measured <= float(bound) * 1.5  # 20 draws


def test_a_gradient_that_is_small_at_one_point_only_is_no_bound():
    """`L = ½Hθ²` at its minimum: gradient 0 gives the «bound» 0, the smoothed curvature stays H."""
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.zero_()
    data = (torch.ones(1, 1).double(), torch.zeros(1, 1).double())
    slope = float(np.linalg.norm(LossHessian(model, "mse", data).gradient()))
    at_minimum = smoothed_loss_bound(2.0, slope, 1.0, everywhere=False)
    assert at_minimum.kind is Kind.ESTIMATE
    assert smoothed(model, "mse", data, sigma=1.0, draws=8) == pytest.approx(2.0)
    assert float(at_minimum) < 1e-6
