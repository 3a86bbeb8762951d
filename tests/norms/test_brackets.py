"""`spectral_norm` against the materialised operator, on every operator of the table."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cases import OPERATORS, Operator, matrices
from equipoise import InputError, Refused, spectral_norm
from equipoise.core import Bracket
from equipoise.norms import dominant_pair, gram_norm_plain, reference_norm

pytestmark = pytest.mark.medium


def holds(bracket: Bracket, truth: float | Tensor) -> bool:
    """Whether the truth lies inside, up to the rounding of the reference's own SVD."""
    lower, upper = torch.as_tensor(bracket.lower), torch.as_tensor(bracket.upper)
    return bool(((lower <= truth * (1 + 1e-12)) & (upper >= truth * (1 - 1e-12))).all())


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.id)
def test_bracket_holds_and_is_tight(operator: Operator) -> None:
    truth = reference_norm(operator.layer, operator.input_shape)
    bracket = spectral_norm(operator.layer, input_size=operator.size, rtol=1e-3)
    assert holds(bracket, truth)
    assert bracket.reached, bracket


@pytest.mark.parametrize("grid", [True, False])
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.id)
def test_bracket_holds_without_materialising(operator: Operator, grid: bool, as_if_large) -> None:
    as_if_large(grid)
    truth = reference_norm(operator.layer, operator.input_shape)
    bracket = spectral_norm(operator.layer, input_size=operator.size, rtol=1e-2)
    assert holds(bracket, truth)
    assert bracket.reached or "gap" in bracket.note


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.id)
def test_unknown_size_bounds_every_size(operator: Operator) -> None:
    bracket = spectral_norm(operator.layer, rtol=1e-2)
    sizes = [operator.size, tuple(n + 1 for n in operator.size), tuple(n + 3 for n in operator.size)]
    for size in sizes[: 3 if len(operator.size) < 3 else 2]:
        assert bracket.upper >= reference_norm(operator.layer, (operator.layer.in_channels, *size)) * (1 - 1e-12), size


@pytest.mark.parametrize("seed", [0, 12, 13, 22])
def test_a_circle_has_no_frequencies_between_those_of_its_grid(seed: int, as_if_large) -> None:
    """The supremum over all frequencies, which is what is searched on large images, is met by none of these circles."""
    as_if_large(grid=False)
    torch.manual_seed(seed)
    size = (31 + seed % 4 * 2, 37)
    layer = nn.Conv2d(3, 3, 3 + seed % 3, padding="same", padding_mode="circular", bias=False).requires_grad_(False)
    symbol = torch.fft.fft2(layer.weight.double(), s=size).permute(2, 3, 0, 1)
    truth = float(torch.linalg.matrix_norm(symbol, 2).max())
    bracket = spectral_norm(layer, input_size=size, rtol=1e-3)
    assert holds(bracket, truth)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rtol", [1e300, 1e-6, 1e-8, 1e-10, 1e-13])
def test_coarse_and_fine_tolerances_end(rtol: float) -> None:
    torch.manual_seed(0)
    bracket = spectral_norm(nn.Conv2d(4, 4, 3, padding=1), rtol=rtol)
    assert bracket.upper <= (1 + max(rtol, 1e-9)) * bracket.lower


@pytest.mark.parametrize(("channels", "size", "rtol"), [(24, 7, 1e-4), (12, 12, 1e-5)])
def test_small_operators_are_tight_where_a_small_tolerance_asks_for_it(channels: int, size: int, rtol: float) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False).requires_grad_(False)
    bracket = spectral_norm(layer, input_size=size, rtol=rtol)
    assert bracket.reached
    assert holds(bracket, reference_norm(layer, (channels, size, size)))


def test_a_symbol_that_vanishes_on_the_circle() -> None:
    layer = nn.Conv2d(64, 64, (2, 3), padding="same", padding_mode="circular", bias=False).requires_grad_(False)
    layer.weight[:, :, 1] = -layer.weight[:, :, 0]
    assert spectral_norm(layer, input_size=(1, 2000)).lower == 0
    assert spectral_norm(layer, input_size=(1, 400)).upper < 1e-3


@pytest.mark.parametrize("seed", [256, 316, 327, 331])
def test_taps_that_matter_may_be_far_smaller_than_others(seed: int, as_if_large) -> None:
    """The largest taps write nothing but what is cut off; the others vanish in float32, or their squares do."""
    as_if_large()
    torch.manual_seed(seed)
    kind = nn.ConvTranspose3d(1, 2, (3, 2, 3), (4, 1, 2), (0, 0, 2), (2, 0, 0), bias=False)
    layer = kind.double().requires_grad_(False)
    weight = torch.randn_like(layer.weight) * 10.0 ** (30 * torch.randn_like(layer.weight))
    layer.weight.copy_(weight / weight.abs().max())
    truth = reference_norm(layer, (1, 1, 3, 2))
    assert holds(spectral_norm(layer, input_size=(1, 3, 2), rtol=1e-2), truth)


def test_a_kernel_that_only_reads_padding() -> None:
    conv = nn.Conv3d(9, 9, 2, (3, 4, 1), (3, 6, 6), (1, 1, 2), 3, bias=False).double()
    for index in range(8):
        conv.weight.data.zero_()
        conv.weight.data.flatten()[index] = 1.0
        bracket = spectral_norm(conv, input_size=(3, 2, 1))
        assert 0 <= float(bracket.lower) <= float(bracket.upper)


def _truth(W: Tensor) -> float:
    W = W.to(torch.complex128 if W.is_complex() else torch.float64)
    scale = W.abs().max()
    if scale == 0:
        return 0.0
    if scale < 1e-300:
        return float(torch.linalg.matrix_norm(W * 2.0**1000, ord=2)) * 2.0**-1000
    return float(torch.linalg.matrix_norm(W / scale, ord=2) * scale)


#: options, and whether they reach a gap of 1e-4
OPTIONS = {"auto": ({}, True), "gram": ({"method": "gram"}, True), "cholesky": ({"method": "cholesky"}, True),
           "float32": ({"dtype": torch.float32}, False)}  # fmt: skip


@pytest.mark.parametrize(("name", "W"), matrices(), ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("options", OPTIONS)
def test_matrices(name: str, W: Tensor, options: str) -> None:
    given, tight = OPTIONS[options]
    bracket = spectral_norm(W, rtol=1e-4 if tight else 1e-2, **given)
    assert holds(bracket, _truth(W))
    assert bracket.reached or not tight or name == "subnormal", bracket
    assert bracket.upper == 0 or not tight or not name.endswith("zero")


def test_plain_float32_iteration_is_not_a_bound_but_ours_is() -> None:
    """The check has power: without the error terms the float32 read-out falls below σ₁."""
    below = 0
    for seed in range(20):
        W = torch.randn(300, 200, generator=torch.Generator().manual_seed(seed))
        truth = float(torch.linalg.matrix_norm(W.double(), ord=2))
        below += float(gram_norm_plain(W, 12).double()) < truth
        assert spectral_norm(W, rtol=1e-3, dtype=torch.float32).upper >= truth
    assert below > 0


def test_batches_keep_their_shape_and_their_own_scale() -> None:
    torch.manual_seed(0)
    W = torch.randn(2, 3, 5, 4).double() * torch.logspace(-90, 90, 6, dtype=torch.float64).reshape(2, 3, 1, 1)
    bracket = spectral_norm(W, rtol=1e-6)
    truth = torch.linalg.matrix_norm(W, ord=2)
    assert bracket.lower.shape == (2, 3)
    assert holds(bracket, truth)
    assert bracket.reached


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31), st.integers(-300, 300))
def test_scaling_by_a_power_of_two_is_exact(m: int, n: int, seed: int, power: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rank = 1 + seed % min(m, n)
    left, right = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((m, rank), (rank, n)))
    W = left @ right * 10.0 ** (seed % 21 - 10)
    a, b = spectral_norm(W), spectral_norm(W * 2.0**power)
    assert (b.lower, b.upper) == (a.lower * 2.0**power, a.upper * 2.0**power)


def test_singular_vectors() -> None:
    torch.manual_seed(0)
    for shape in ((6, 9), (9, 6), (200, 170)):
        W = torch.randn(*shape, dtype=torch.complex128)
        bracket = spectral_norm(W, rtol=1e-9, vectors=True)
        u, v = bracket.vectors
        assert torch.allclose(W @ v, u * bracket.lower, atol=1e-3 * bracket.upper)
        sigma, u, v = dominant_pair(W.real, 1e-10)
        assert torch.allclose(W.real @ v, u * sigma, atol=1e-3)
        assert float(sigma) == pytest.approx(float(torch.linalg.matrix_norm(W.real, 2)), rel=1e-8)


def _parametrised() -> nn.Module:
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1))
    layer.parametrizations.weight.original0.data.mul_(5)
    return layer


@pytest.mark.parametrize(
    "make", [_parametrised, *(lambda t=t: nn.Conv2d(3, 3, 3, padding=1, dtype=t) for t in (torch.half, torch.bfloat16))]
)
def test_the_weight_that_is_used_is_read(make) -> None:
    torch.manual_seed(0)
    layer = make()
    assert reference_norm(layer, (3, 7, 7)) in spectral_norm(layer, input_size=7, rtol=1e-3)


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _Shifted(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return 2 * super()._conv_forward(input, weight, bias)


def _changed(layer: nn.Module, **attributes: object) -> nn.Module:
    vars(layer).update(attributes)
    return layer


def _hooked() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda m, i, o: 10 * o)
    return layer


NAN = torch.eye(3).index_put((torch.tensor([1]), torch.tensor([2])), torch.tensor(float("nan")))
#: operator, options, error, a part of its sentence
REFUSED = [
    (lambda: _Doubled(3, 3), {}, Refused, "overrides the forward"),
    (lambda: _Shifted(2, 3, 3), {}, Refused, "overrides the forward"),
    (_hooked, {}, Refused, "hooks"),
    (lambda: _changed(nn.Linear(3, 3), forward=lambda x: x * 7), {}, Refused, "overrides the forward"),
    (lambda: nn.utils.weight_norm(nn.Linear(3, 3)), {}, Refused, "hooks"),
    (lambda: nn.BatchNorm2d(3), {}, Refused, "BatchNorm2d"),
    (lambda: nn.LazyConv2d(3, 3), {}, InputError, "lazy"),
    (lambda: nn.Linear(3, 3, device="meta"), {}, InputError, "meta"),
    (lambda: NAN, {}, InputError, r"non-finite .* \(1, 2\)"),
    (lambda: torch.full((2, 2), float("inf")), {}, InputError, "non-finite"),
    (lambda: torch.zeros(0, 3), {}, InputError, "empty"),
    (lambda: torch.zeros(3), {}, InputError, "shape"),
    (lambda: torch.eye(2).long(), {}, InputError, "floating-point"),
    (lambda: torch.eye(2).to_sparse(), {}, InputError, "to_dense"),
    (lambda: torch.empty(2, 2, device="meta"), {}, InputError, "meta"),
    (lambda: torch.nested.nested_tensor([torch.eye(2)]), {}, InputError, "nested"),
    (lambda: torch.eye(2), {"rtol": 0}, InputError, "rtol"),
    (lambda: torch.eye(2), {"method": "power"}, InputError, "method"),
    (lambda: [[1.0]], {}, InputError, "tensor or a layer"),
    (lambda: nn.Conv2d(1, 1, 5), {"input_size": 3}, InputError, "no output"),
    (lambda: nn.Conv2d(1, 1, 3), {"input_size": (3,)}, InputError, "input_size"),
    (lambda: nn.Conv2d(1, 1, 3, padding=2, padding_mode="reflect"), {"input_size": 2}, InputError, "reflect"),
]


@pytest.mark.parametrize(("make", "options", "error", "match"), REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_refusals_say_why(make, options, error, match) -> None:
    with pytest.raises(error, match=match):
        spectral_norm(make(), **options)


@pytest.mark.parametrize("method", ["auto", "gram", "cholesky"])
def test_a_norm_beyond_all_floats_has_a_finite_lower_end(method):
    found = spectral_norm(torch.full((4, 4), 1e308, dtype=torch.float64), method=method)  # the norm is 4·10³⁰⁸
    assert found.lower <= torch.finfo(torch.float64).max < found.upper
    kernel = nn.Conv2d(1, 1, 3, bias=False).double()
    nn.init.constant_(kernel.weight, 1e308)
    assert spectral_norm(kernel).lower <= torch.finfo(torch.float64).max < spectral_norm(kernel).upper
