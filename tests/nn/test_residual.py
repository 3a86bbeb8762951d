"""CPL and SLL: the definition, the slopes they need, and what is exported."""

import pytest
import torch
from nn_parts import jacobian_norm
from torch import nn
from torch.nn import functional

import equipoise as eq
import equipoise.nn as eqn
from equipoise.core import InputError, Kind, Refused
from equipoise.nn.rescaling import rescaling_pair


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


#: activations whose slopes lie in [0, 1]
UNIT = [
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.Tanh, nn.Tanhshrink, nn.Sigmoid, nn.LogSigmoid,
    nn.Hardtanh, nn.Hardsigmoid, nn.Softsign, nn.Softshrink, nn.Softplus,
]  # fmt: skip


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.Softplus(), nn.LeakyReLU(0.2)])
@pytest.mark.parametrize(("rescaling", "t"), [("aol", 1), ("sr", 3)])
def test_dense_is_the_printed_formula(activation, rescaling, t):
    """`x − 2W·diag(Σ_j |(WᵀW)^(2^(t−1))|_ij q_j/q_i)^(−2^(1−t))·act(Wᵀx + b)`; Araujo et al. 2023 for t = 1."""
    block = eqn.SLLLinear(5, hidden=7, rescaling=rescaling, t=t, activation=activation, dtype=torch.float64)
    with torch.no_grad():
        block.log_q.normal_()
    x = torch.randn(6, 5, dtype=torch.float64)
    W, q = block.raw.mT, block.log_q[0].exp()
    power = torch.linalg.matrix_power(W.mT @ W, 2 ** (t - 1))
    T = (power.abs() @ q / q) ** (-(2.0 ** (1 - t)))
    expected = x - 2 * activation(x @ W + block.bias) @ torch.diag(T) @ W.mT
    torch.testing.assert_close(block(x), expected, rtol=1e-6, atol=1e-8)
    assert torch.autograd.grad(block(x).pow(3).sum(), block.log_q)[0].abs().max() > 1e-3


def test_cpl_is_the_definition():
    block = eqn.CPLLinear(5, hidden=3, activation=nn.Tanh(), dtype=torch.float64)
    x = torch.randn(6, 5, dtype=torch.float64)
    W, s = block.raw.mT, torch.linalg.matrix_norm(block.raw, 2)
    expected = x - 2 / s**2 * torch.tanh(x @ W + block.bias) @ W.mT
    torch.testing.assert_close(block(x), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 5)])
def test_convolution_and_its_adjoint(mode, groups, kernel):
    """With the identity as activation the block is I − 2UUᵀ: symmetric, with eigenvalues in [−1, 1]."""
    block = eqn.SLLConv2d(
        4, 4, kernel, padding_mode=mode, groups=groups, hidden=6, activation=nn.Identity(), bias=False, rescaling="sr"
    )  # fmt: skip
    M = eq.norms.operator_matrix(block.export(), (4, 5, 6))
    torch.testing.assert_close(M, M.mT, rtol=0, atol=1e-6)
    values = torch.linalg.eigvalsh(M)
    assert values.min() >= -1 - 1e-6
    assert values.max() <= 1 + 1e-6
    assert values.min() < 0.5


def test_convolution_is_the_definition():
    block = eqn.SLLConv2d(3, 3, 3, hidden=4, dtype=torch.float64)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    R = rescaling_pair(block.raw.transpose(0, 1)[None])[1][0]
    hidden = torch.relu(functional.conv2d(x, block.raw, block.bias, padding=1)) * R[:, None, None] ** 2
    expected = x - 2 * functional.conv_transpose2d(hidden, block.raw, padding=1)
    torch.testing.assert_close(block(x), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("activation", UNIT, ids=lambda c: c.__name__)
def test_every_accepted_activation_has_unit_slopes(activation):
    """The slopes themselves are attacked in `maps/test_pointwise.py`."""
    block = eqn.SLLLinear(4, activation=activation(), dtype=torch.float64)
    for scale in (0.1, 1, 5, 25):
        assert jacobian_norm(block, scale * torch.randn(4, dtype=torch.float64)) <= 1 + 1e-9


class Abs(nn.Module):
    def forward(self, x):
        return x.abs()


class SlyReLU(nn.ReLU):
    def forward(self, x):
        return -x


def test_other_activations_are_refused():
    steep = [nn.GELU(), nn.SiLU(), nn.Mish(), nn.SELU(), nn.Hardswish(), nn.PReLU(), nn.ELU(1.5), nn.Dropout()]
    steep += [nn.LeakyReLU(-0.1), nn.LeakyReLU(2.0), Abs(), SlyReLU(), torch.abs, torch.relu]
    jumping = [nn.Softplus(threshold=1), nn.Hardshrink(), nn.Threshold(0.1, 20)]
    for activation in steep + jumping:
        for build in (eqn.SLLLinear, eqn.CPLConv2d):
            with pytest.raises(Refused, match="jumps" if activation in jumping else ""):
                build(4, 4, activation=activation)


def test_an_activation_changed_later_is_refused():
    block = eqn.SLLLinear(4)
    exported = block.export()
    block.activation = nn.GELU()
    with pytest.raises(Refused, match="GELU"):
        block(torch.zeros(1, 4))
    exported.activation = Abs()
    with pytest.raises(Refused, match="Abs"):
        exported.lipschitz_upper((4,))


def test_abs_would_reach_three():
    """Errata 6: why slopes are checked at all."""
    U = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    x = -U.sum(1)  # Uᵀx < 0 everywhere
    J = torch.autograd.functional.jacobian(lambda v: v - 2 * U @ (U.mT @ v).abs(), x)
    assert float(torch.linalg.matrix_norm(J, 2)) == pytest.approx(3)


@pytest.mark.parametrize(("options", "reason"), [
    ({"stride": 2}, "stride"),
    ({"stride": 2, "padding": 1}, "stride"),
    ({"padding": 0}, "image size"),
    ({"kernel_size": 2}, "even"),
    ({"out_channels": 5}, "as many outputs"),
    ({"padding_mode": "reflect"}, "reflect"),
    ({"padding_mode": "replicate", "padding": 1}, "replicate"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["CPLConv2d", "SLLConv2d"])
def test_unsound_geometry_is_refused(name, options, reason):
    with pytest.raises(Refused, match=reason):
        getattr(eqn, name)(4, **options)


def test_bad_options_are_named():
    with pytest.raises(InputError, match="rescaling"):
        eqn.SLLLinear(4, rescaling="qr")
    with pytest.raises(Refused, match="as many outputs"):
        eqn.SLLLinear(4, 5)
    for kind in (eqn.SLLConv2d, eqn.CPLConv2d, eqn.BROConv2d, eqn.SRConv2d):
        with pytest.raises(TypeError, match="pading"):
            kind(4, 4, 3, pading=1)


def test_bound_is_measured_on_the_weights_used():
    block = eqn.SLLConv2d(3, kernel_size=3).eval().export()
    assert block.lipschitz_upper((3, 8, 8)).kind is Kind.UPPER
    assert block.lipschitz_upper((3, 8, 8)).value == 1.0
    with torch.no_grad():
        block.effective_0.mul_(2)
    norm = float(eq.spectral_norm(block.inner(block.effective_0), input_size=(8, 8)).lower)
    bound = block.lipschitz_upper((3, 8, 8)).value
    assert bound >= max(1, 2 * norm**2 - 1)
    assert jacobian_norm(block, torch.randn(1, 3, 8, 8)[0]) <= bound
