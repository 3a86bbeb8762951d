"""SN, AOL and SR against slow references, and the failures of peers as regressions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_parts import exported, method, raw
from torch import nn
from torch.nn import functional

import equipoise as eq
import equipoise.nn as eqn
from equipoise.core import InputError, Refused
from equipoise.nn import rescaling
from equipoise.nn.rescaling import rescaling_pair
from equipoise.norms import reference_norm, spectral_norm


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def reference_rescaling(W, t, q):
    """`R_ii = (Σ_j |(WᵀW)^(2^(t−1))|_ij q_j/q_i)^(−2^−t)` by a matrix power."""
    G = torch.linalg.matrix_power(W.mT @ W, 2 ** (t - 1))
    return W * (G.abs() * q / q[:, None]).sum(1).pow(-(2.0**-t))


def reference_kernel_rescaling(K, t, q):
    """The same for a kernel (co, ci, k, k), by convolving the table of its Gram operator with itself."""
    A = functional.conv2d(K.transpose(0, 1), K.transpose(0, 1), padding=[k - 1 for k in K.shape[2:]])
    for _ in range(t - 1):
        A = functional.conv2d(A, A.transpose(0, 1).flip((2, 3)), padding=[k - 1 for k in A.shape[2:]])
    rows = (A.abs().sum((2, 3)) * q / q[:, None]).sum(1)
    return K * rows.pow(-(2.0**-t))[:, None, None]


MATRICES = [(7, 5), (5, 7), (6, 6), (1, 4), (4, 1)]
KERNELS = [(5, 4, 3, 3), (3, 6, 2, 3), (2, 2, 1, 5), (4, 3, 1, 1)]


@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("shape", MATRICES + KERNELS)
def test_the_weight_is_the_formula(shape, t):
    W, log_q = torch.randn(shape, dtype=torch.float64), torch.randn(shape[1], dtype=torch.float64)
    reference = reference_rescaling if shape in MATRICES else reference_kernel_rescaling
    found = rescaling_pair(W[None], t, log_q[None])[0][0]
    torch.testing.assert_close(found, reference(W, t, log_q.exp()), rtol=1e-7, atol=1e-9)


def test_one_step_without_q_is_aol():
    plain = nn.Conv2d(4, 6, 3, stride=2, padding=1)
    a, s = eqn.AOLConv2d.from_plain(plain), eqn.SRConv2d.from_plain(plain, t=1)
    assert torch.equal(a.weight, s.weight)


def test_more_steps_approach_spectral_normalisation():
    W = torch.randn(1, 20, 20, dtype=torch.float64)
    norms = [float(torch.linalg.matrix_norm(rescaling_pair(W, t)[0][0], 2)) for t in (1, 2, 4, 8)]
    assert norms == sorted(norms)
    expected = W[0] / torch.linalg.matrix_norm(W[0], 2)
    torch.testing.assert_close(rescaling_pair(W, 10)[0][0], expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("kind", ["Linear", "Conv2d"])
def test_q_acts_and_learns(kind):
    extra = {} if kind == "Linear" else {"kernel_size": 3, "padding": 1}
    layer = getattr(eqn, f"SR{kind}")(5, 5, t=2, **extra)
    x = torch.randn(4, 5, *[] if kind == "Linear" else [6, 6])
    layer(x).square().sum().backward()
    assert method(layer).log_q.grad.abs().min() > 1e-7  # a peer's q is dead
    before = layer.weight.detach().clone()
    with torch.no_grad():
        method(layer).log_q.copy_(torch.randn_like(method(layer).log_q))
    assert (layer.weight - before).abs().max() > 1e-2
    assert reference_norm(exported(layer), tuple(x.shape[1:])) <= 1
    best = torch.optim.Adam([method(layer).log_q], lr=0.05)
    start = float(layer.weight.detach().square().sum())
    for _ in range(60):
        best.zero_grad()
        (-layer.weight.square().sum()).backward()
        best.step()
    assert float(layer.weight.detach().square().sum()) > start * 1.01


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(-30, 30), st.randoms(use_true_random=False))
def test_any_weight_any_q(m, n, t, exponent, random):
    torch.manual_seed(random.randrange(2**31))
    W = torch.randn(1, m, n) * 10.0 ** torch.randint(-8, 9, (1, 1, n)) * 2.0**exponent
    W = torch.where(torch.rand_like(W) < 0.3, torch.zeros(()), W).requires_grad_()
    log_q = (30 * torch.randn(1, n)).requires_grad_()
    result = rescaling_pair(W, t, log_q)[0]
    assert float(torch.linalg.matrix_norm(result[0].detach().double(), 2)) <= 1 + 1e-12
    assert not result[W == 0].any()
    assert bool((W == 0).all()) or result.any()  # channels of zeros leave the others alone
    result.sum().backward()
    assert W.grad.isfinite().all()
    assert log_q.grad.isfinite().all()


def test_weights_at_the_ends_of_float64():
    W = torch.randn(1, 4, 4, dtype=torch.float64)
    for scale in (1e-300, 1e300):
        torch.testing.assert_close(rescaling_pair(W * scale, 4)[0], rescaling_pair(W, 4)[0], rtol=1e-9, atol=1e-12)


def test_too_few_and_too_many_steps_are_refused():
    for t in (0, -1, 13, 1.5):
        with pytest.raises(InputError, match="steps t"):
            eqn.SRLinear(3, 3, t=t)
    with pytest.raises(Refused, match="fewer steps"):
        eqn.SRConv3d(2, 2, 3, t=5)(torch.zeros(1, 2, 4, 4, 4))


def test_patches_of_an_orthogonal_matrix_stay():
    """Stride = kernel size: a dense layer on patches, so AOL must leave an isometry alone."""
    Q = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))[0]
    plain = nn.Conv2d(3, 12, 2, stride=2, bias=False, dtype=torch.float64)
    plain.weight.data.copy_(Q.reshape(12, 3, 2, 2))
    torch.testing.assert_close(eqn.AOLConv2d.from_plain(plain).weight, plain.weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["SN", "AOL", "SR"])
def test_grouped_norm_is_the_largest_not_the_product(name):
    """A peer multiplies the norms of the groups: 0.095 for 0.644."""
    layer = getattr(eqn, f"{name}Conv2d")(4, 4, 3, padding=1, groups=4, bias=False)
    with torch.no_grad():
        raw(layer)[1:] *= 1e-3
    assert 0.4 < reference_norm(exported(layer), (4, 8, 8)) <= 1 + 1e-5


def test_over_padding_on_the_circle_is_refused_and_zeros_allowed():
    with pytest.raises(Refused, match="circular padding of 2"):
        eqn.SRConv2d(4, 4, 3, padding=2, padding_mode="circular")
    assert reference_norm(exported(eqn.SRConv2d(2, 2, 3, padding=4, t=4)), (2, 5, 5)) <= 1 + 1e-6


def test_circular_stride_that_does_not_divide_the_size():
    """The phases of the kernel bound only sizes the stride divides; 3 pixels at stride 2 would reach 1.3."""
    layer = eqn.AOLConv1d(1, 1, 3, stride=2, padding=1, padding_mode="circular", bias=False)
    with torch.no_grad():
        raw(layer).copy_(torch.tensor([[[0.3, 0.8, 0.3]]]))
    for n in range(2, 9):
        assert reference_norm(exported(layer), (1, n)) <= 1 + 1e-6


def test_float32_is_certified_at_real_sizes():
    for layer in (eqn.AOLConv2d(32, 32, 3, padding=1), eqn.SRConv2d(32, 48, 3, stride=2, padding=1, t=3)):
        with torch.no_grad():
            raw(layer).copy_(raw(layer).abs() if raw(layer).shape[0] == 32 else raw(layer))  # |W| makes AOL attain 1
        assert spectral_norm(exported(layer), input_size=(32, 32), rtol=1e-5).upper <= 1 + 1e-5


def test_from_plain_keeps_settings_and_bias():
    plain = nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2)
    layer = eqn.SRConv2d.from_plain(plain)
    back = exported(layer)
    for name in ("stride", "padding", "dilation", "groups", "kernel_size", "padding_mode"):
        assert getattr(back, name) == getattr(plain, name) == getattr(layer, name)
    assert torch.equal(back.bias, plain.bias)
    with pytest.raises(InputError, match="BatchNorm2d"):
        eqn.SRConv2d.from_plain(nn.BatchNorm2d(3))


@pytest.mark.parametrize("layer", [eqn.AOLLinear, eqn.SRLinear])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (6, 6)])
def test_the_smaller_side_is_the_transpose_of_the_other_layer(layer, shape):
    """`R·W` of a wide layer is `(Wᵀ·R)ᵀ` of the tall one; a tall layer rescales its inputs as ever."""
    torch.manual_seed(0)
    ins, out = shape
    one, other = layer(ins, out), layer(out, ins, side="input") if ins > out else layer(ins, out, side="input")
    with torch.no_grad():
        raw(other).copy_(raw(one).mT if ins > out else raw(one))
    expected = other.weight.mT if ins > out else other.weight
    torch.testing.assert_close(one.weight, expected)
    assert float(torch.linalg.matrix_norm(one.weight.double(), 2)) <= 1


@pytest.mark.parametrize("kind", [eqn.AOLConv2d, eqn.SRConv2d])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"stride": 2, "padding_mode": "circular"}, {"groups": 2, "dilation": 2}]
)
def test_the_outputs_of_convolutions_are_rescaled_where_they_are_fewer(kind, options):
    torch.manual_seed(0)
    layer = kind(8, 4, 3, padding=1, **options).double()
    assert method(layer).transposed
    assert not method(kind(4, 8, 3)).transposed
    assert 0.05 < reference_norm(exported(layer), (8, 6, 8)) <= 1
    ratio = layer.weight / raw(layer)  # one factor for every output channel, the same for all inputs and taps
    torch.testing.assert_close(ratio, ratio[:, :1, :1, :1].expand_as(ratio))


CLOSED = {
    "one axis": (1, 6, 6, 3), "groups": (2, 5, 4, 3, 3), "even": (1, 3, 5, 2, 4), "three axes": (1, 3, 2, 2, 2, 2),
    "matrix": (2, 9, 5),
}  # fmt: skip


@pytest.mark.parametrize("case", CLOSED)
@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("learned", [False, True])
def test_the_closed_form_is_that_of_the_operators(case, t, learned):
    """Weight, factors, and their first and second derivatives."""
    shape = CLOSED[case]
    K = (3 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    log_q = torch.randn(shape[0], shape[2], dtype=torch.float64).requires_grad_() if learned else None
    wanted = [K] if log_q is None else [K, log_q]
    expected, found = rescaling._by_operators(K, t, log_q), rescaling._Rescaled.apply(K, log_q, t)
    given = [torch.randn_like(value) for value in expected]
    for chosen in ((0,), (1,), (0, 1)):
        one, other = (
            torch.autograd.grad([value[i] for i in chosen], wanted, [given[i] for i in chosen], create_graph=True)
            for value in (found, expected)
        )
        closed = torch.autograd.grad([found[i] for i in chosen], wanted, [given[i] for i in chosen], retain_graph=True)
        for a, b, c in zip(closed, one, other, strict=True):
            torch.testing.assert_close(a, c, rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(b, c, rtol=1e-7, atol=1e-9)
        sums = [sum(v.square().sum() for v in first) for first in (one, other)]
        twice = [torch.autograd.grad(total, wanted, retain_graph=True) for total in sums]
        for a, b in zip(*twice, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["SNLinear", "AOLLinear", "SRLinear", "CPLLinear", "RKOLinear"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_seen(name, value):
    """It is neither read as zero nor bounded."""
    layer = getattr(eq.nn, name)(6, 6).eval()
    with torch.no_grad():
        max(layer.parameters(), key=torch.numel).view(-1)[0] = value
    x = torch.ones(1, 6)
    assert not torch.isfinite(layer(x)).all()
    with pytest.raises((eq.InputError, eq.Refused), match="non-finite"):
        eq.lipschitz_bound(layer, x)
