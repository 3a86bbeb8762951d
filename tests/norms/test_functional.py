"""The differentiable bounds: gradients, edge cases, compile, autocast, functional transforms."""

import pytest
import torch
from torch.autograd import gradcheck

from equipoise import InputError, Refused, functional, spectral_norm
from equipoise.norms import gram_norm_plain


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(3, 3), (5, 2), (2, 5), (2, 4, 3), (1, 1), (1, 4)])
@pytest.mark.parametrize("iterations", [0, 1, 2, 5])
def test_gradient_of_gram_norm(iterations: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    W = torch.randn(shape, dtype=dtype, requires_grad=True)
    assert gradcheck(lambda w: functional.gram_norm(w, iterations), (W,))


def test_gradient_of_rank_one_and_zero() -> None:
    torch.manual_seed(0)
    R = (torch.randn(5, 1, dtype=torch.float64) @ torch.randn(1, 4, dtype=torch.float64)).requires_grad_()
    assert gradcheck(lambda w: functional.gram_norm(w, 4), (R,))
    Z = torch.zeros(3, 2, requires_grad=True)
    functional.gram_norm(Z).backward()
    assert bool((Z.grad == 0).all())
    K = torch.zeros(2, 2, 3, 3, requires_grad=True)
    functional.conv_norm(K, input_size=6).backward()
    assert bool((K.grad == 0).all())


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-60, 2.0**60, 2.0**120])
def test_conv_norm_survives_extreme_scales(scale: float) -> None:
    K = torch.randn(3, 2, 3, 3)
    assert float(functional.conv_norm(K * scale)) / scale == pytest.approx(float(functional.conv_norm(K)))
    a, b = (w.flatten(1).clone().requires_grad_() for w in (K, K * scale))
    functional.gram_norm(a).backward()
    functional.gram_norm(b).backward()
    assert torch.allclose(a.grad, b.grad, rtol=1e-4)


@pytest.mark.medium
@pytest.mark.parametrize("size", [6, None])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", ["zeros", "circular", "reflect", "replicate"])
def test_gradient_of_conv_norm(padding: str, stride: int, size: int | None) -> None:
    torch.manual_seed(0)
    K = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    if padding == "circular" and stride == 2 and size is None:
        with pytest.raises(Refused, match="sublattice"):
            functional.conv_norm(K, padding, stride, size)
        return
    every = padding == "zeros" and size is not None  # every entry; the other rows along random directions
    assert gradcheck(lambda k: functional.conv_norm(k, padding, stride, size, 4), (K,), fast_mode=not every)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("options", [{"groups": 2}, {"dilation": 2}, {"amount": [(0, 0), (2, 1)]}, {"stride": (2, 1)}])
def test_gradient_of_conv_norm_with_options(options, dtype) -> None:
    torch.manual_seed(0)
    K = torch.randn((4, 2, 3, 3), dtype=dtype, requires_grad=True)
    assert gradcheck(lambda k: functional.conv_norm(k, input_size=9, iterations=3, **options), (K,), fast_mode=True)
    assert gradcheck(lambda k: functional.conv_norm(k[..., 0], input_size=9, iterations=3), (K,), fast_mode=True)


def test_value_is_the_exact_grid_maximum_and_above_the_bracket() -> None:
    torch.manual_seed(0)
    K = torch.randn(5, 4, 3, 3)
    layer = torch.nn.Conv2d(4, 5, 3, padding=1)
    layer.weight.data = K
    for size, above in ((8, 1.1), (None, 1.02)):  # borders keep the operator below the grid at small sizes
        bracket = spectral_norm(layer, input_size=size, rtol=1e-3)
        value = float(functional.conv_norm(K, input_size=size, iterations=9))
        assert value >= bracket.lower
        assert value <= above * bracket.upper


def test_second_derivative_raises_even_inside_a_larger_loss() -> None:
    W = torch.randn(4, 4, requires_grad=True)
    (g,) = torch.autograd.grad(functional.gram_norm(W), W, create_graph=True)
    with pytest.raises(Refused, match="first derivative only"):
        (g.square().sum() + W.sum()).backward()


def test_inside_torch_compile_without_graph_breaks() -> None:
    torch.manual_seed(0)
    W, K = torch.randn(8, 6, requires_grad=True), torch.randn(4, 4, 3, 3, requires_grad=True)

    def loss(w: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return functional.gram_norm(w).square() + functional.conv_norm(k, input_size=16)

    eager = torch.autograd.grad(loss(W, K), (W, K))
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(W, K), (W, K))
    for a, b in zip(eager, compiled, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_autocast_does_not_lower_the_precision() -> None:
    torch.manual_seed(0)
    W = torch.randn(64, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, half = functional.gram_norm(W), functional.gram_norm(W.bfloat16())
    assert inside.dtype is torch.float32
    assert half.dtype is torch.float32
    assert float(inside) == float(functional.gram_norm(W))


def test_functional_transforms() -> None:
    torch.manual_seed(0)
    W = torch.randn(5, 4)
    expected = torch.func.grad(lambda w: gram_norm_plain(w, 6))(W)
    assert torch.allclose(torch.func.grad(functional.gram_norm)(W), expected, atol=1e-5)


@pytest.mark.parametrize("iterations", [-1, 31, 1.5])
def test_iterations_are_checked(iterations: object) -> None:
    with pytest.raises(InputError, match="iterations"):
        functional.gram_norm(torch.eye(2), iterations)


def test_the_names_of_the_thesis():
    K = torch.randn(2, 2, 3, 3)
    assert torch.equal(functional.gram_iteration(K[:, :, 0, 0], 4), functional.gram_norm(K[:, :, 0, 0], 4))
    assert torch.equal(functional.norm2_circ(K, 8, 5), functional.conv_norm(K, "circular", input_size=8, iterations=5))
    for channels, iterations in ((1, 7), (1, 30), (64, 6)):
        with pytest.raises(Refused, match="fewer"):
            functional.norm2_toep(torch.ones(channels, channels, 3, 3), iterations)


def test_nothing_waits_for_a_device() -> None:
    """The device `meta` has no numbers, so any question there fails."""
    assert functional.conv_norm(torch.empty(6, 5, 3, 3, device="meta"), input_size=8).shape == ()
    assert functional.gram_norm(torch.empty(4, 6, 5, device="meta")).shape == (4,)
