import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from equipoise.attacks import inside_ball, pgd, smooth_pgd
from equipoise.core import InputError
from equipoise.smoothing import SimplexMap, SmoothedClassifier
from equipoise_lab.scoreboard.autoattack import autoattack


def _linear() -> nn.Module:
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor([[0.6, 0.8], [-0.6, -0.8]])
    return model.eval()


@pytest.mark.parametrize(("norm", "dual"), [("l2", 1.0), ("linf", 1.4), ("l1", 0.8)])
def test_finds_the_boundary_of_a_linear_model_to_one_percent(norm, dual):
    x = torch.tensor([[0.6, 0.8], [1.2, 1.6], [-0.6, -0.8]])
    y = torch.tensor([0, 0, 1])
    distance = torch.tensor([1.0, 2.0, 1.0]) / dual
    model = _linear()
    assert not pgd(model, x, y, 0.99 * distance, restarts=3, norm=norm).success.any()
    assert pgd(model, x, y, 1.01 * distance, steps=100, restarts=5, norm=norm).success.all()
    one, two = (pgd(model, x, y, 0.5, seed=3, norm=norm) for _ in range(2))
    assert torch.equal(one.adversarial, two.adversarial)
    assert model.weight.grad is None
    wrong = pgd(model, x, 1 - y, 0.0, norm=norm)
    assert wrong.success.all()
    assert torch.equal(wrong.adversarial, x)


@given(
    st.floats(0, 1e4),
    st.sampled_from([1e-6, 1e-3, 1.0, 1e3]),
    st.sampled_from([torch.float16, torch.float32, torch.float64]),
    st.integers(0, 10**6),
)
@settings(max_examples=200, deadline=None)
def test_projection_ends_inside_in_float64(radius, scale, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (scale * torch.randn(3, 50, generator=generator)).to(dtype)
    away = 10 ** float(torch.randn((), generator=generator))
    z = x.double() + away * torch.randn(3, 50, generator=generator, dtype=torch.float64)
    for norm, order in (("l2", 2), ("linf", float("inf")), ("l1", 1)):
        stored = inside_ball(x, z, torch.full((3,), radius, dtype=torch.float64), norm)
        assert stored.dtype == dtype
        assert ((stored.double() - x.double()).norm(dim=1, p=order) <= radius).all()


def test_restarts_help_and_never_leave_the_ball():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 3)).eval()
    x = torch.randn(64, 10)
    y = model(x).argmax(1)
    epsilon = torch.linspace(0.05, 1.0, 64)
    one, five = (pgd(model, x, y, epsilon, steps=10, restarts=k) for k in (1, 5))
    assert (five.distance <= epsilon.double()).all()
    assert five.success.sum() >= one.success.sum() > 0
    assert (model(five.adversarial).argmax(1) != y)[five.success].all()
    assert not (model(five.adversarial).argmax(1) != y)[~five.success].any()


@pytest.mark.parametrize("chosen", [SimplexMap("hardmax"), SimplexMap("softmax", 0.5)])
def test_smoothed_linear_model(chosen):
    """Smoothing does not move the boundary of a half-space: attacks beyond it succeed, attacks short of it do not."""
    smooth = SmoothedClassifier(_linear(), 0.5, 2, map=chosen)
    x, y = torch.tensor([[0.6, 0.8], [0.6, 0.8]]), torch.tensor([0, 0])
    result = smooth_pgd(smooth, x, y, torch.tensor([0.9, 1.3]), steps=15)
    assert result.success.tolist() == [False, True]
    assert (result.distance <= torch.tensor([0.9, 1.3], dtype=torch.float64)).all()


#: what stands in for the package: an attack that leaves the ball
STAND_IN = """
class AutoAttack:
    def __init__(self, model, **options): pass
    def __call__(self, x, y): return (x - 9.0).requires_grad_()
"""


def test_what_autoattack_finds_is_put_back_into_the_ball(install):
    install("torchattacks", STAND_IN, "none", {})
    model = nn.Sequential(nn.Flatten(), _linear(), nn.ConstantPad1d((0, 2), -9.0))
    x, y = torch.tensor([[[[0.6, 0.8]]], [[[0.1, 0.1]]]]), torch.tensor([0, 0])
    result = autoattack(model, x, y, 0.5, batch_size=1)
    for bad in ((model, x[:0], y), (model, x, y[:1]), (model, x, y + 9), (_linear(), x[:, 0, 0], y)):
        with pytest.raises(InputError):
            autoattack(*bad, 0.5)
    assert (result.distance <= 0.5).all()
    assert result.success.tolist() == [False, True]
    assert not result.adversarial.requires_grad


def test_bad_input_is_refused():
    x, y = torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)
    wrong = {"y": y[:1]}, {"epsilon": -0.1}, {"epsilon": float("nan")}, {"steps": 0}, {"restarts": 0}, {"norm": "l3"}
    for options in wrong:
        with pytest.raises(InputError):
            pgd(_linear(), x, **{"y": y, "epsilon": 0.1, **options})
