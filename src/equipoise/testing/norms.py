"""Random matrices and convolutions of every kind the rounding analysis could get wrong, against a float64 SVD."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.norms.gram import wide
from equipoise.norms.reference import reference_norm
from equipoise.norms.spectral import spectral_norm
from equipoise.testing.runner import Batch

#: the largest side of a matrix for so many at once; small ones are cheap, which is how 100,000 fit in seconds
_SIDES = {2048: 10, 256: 40, 1: 260}
#: the reference materializes a convolution: at most about this many inputs
_MOST_INPUTS = 260

#: kinds of matrices, made of Gaussian ones `g(b, m, n)`
_MATRICES: dict[str, Callable[..., Tensor]] = {
    "gaussian": lambda g, b, m, n: g(b, m, n),
    # the Frobenius norm is the norm, so the upper end is as close as rounding allows
    "rank one": lambda g, b, m, n: g(b, m, 1) @ g(b, 1, n),
    # all singular values equal (up to 1e-7): Gram iteration is slowest here
    "flat": lambda g, b, m, n: (
        torch.linalg.qr(g(b, max(m, n), max(m, n)))[0][:, :m, :n] + 1e-7 * g(b, m, n)
    ),
    # entries of very different sizes: small ones are lost beside large ones
    "graded": lambda g, b, m, n: g(b, m, n) * torch.exp(-8 * g(b, m, n).abs()),
    # mostly zeros, some matrices entirely zero
    "sparse": lambda g, b, m, n: g(b, m, n) * (g(b, m, n).abs() < 0.25),
    # entries ±1: exact Gram matrices, many ties
    "signs": lambda g, b, m, n: g(b, m, n).sgn(),
}


@contextlib.contextmanager
def hostile_settings(on: bool, device: str = "cpu") -> Iterator[None]:
    """Inside, the process asks for reduced-precision products: guarantees must switch that off themselves.

    Args:
        on: whether it does.
        device: the type of the device.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if on else before)
    try:
        with torch.autocast(device, torch.bfloat16, on):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def bracket_of(batch: Batch, operator: Any, **options: Any) -> Any:
    """`spectral_norm` of a tensor or layer, in every second call under hostile settings of the process.

    Args:
        batch: whose generator chooses.
        operator: the tensor or layer.
        options: of `spectral_norm`.
    """
    with hostile_settings(batch.choose(True, False), batch.device.type):
        return spectral_norm(operator, **options)


def random_matrices(batch: Batch) -> None:
    """Matrices of one kind, size, dtype and scale: many small ones, or a larger one by the Cholesky route."""
    count = batch.choose(*[2048] * 6, 256, 1, 1)
    m, n = batch.integer(1, _SIDES[count]), batch.integer(1, _SIDES[count])
    kind = batch.choose(*_MATRICES)
    dtype = batch.dtype()
    scale = batch.choose(1.0, 1e30, 1e-30, 1e10, 1e-10)
    W = _MATRICES[kind](lambda *shape: batch.normal(*shape, dtype=dtype), count, m, n) * scale

    method = {"method": "cholesky" if count == 1 else "gram"}
    options = batch.choose({}, method, {"dtype": torch.float32})
    bracket = bracket_of(
        batch, W.squeeze(0).to(batch.device), rtol=batch.choose(1e-1, 1e-3, 1e-6), **options
    )
    what = f"{batch.label}: {kind} {m}×{n} {dtype} × {scale:g}, {options}"
    batch.tally.record(bracket.lower, bracket.upper, truth(W), what)


def truth(W: Tensor) -> Tensor:
    """The norm by SVD in float64, on the CPU, of matrices brought to the scale 1 by an exact power of two."""
    W = wide(W.cpu())
    exponent = torch.frexp(W.abs().amax((-2, -1)))[1]
    scale = torch.exp2(-exponent.double())
    return torch.ldexp(torch.linalg.svdvals(W * scale[..., None, None])[..., 0], exponent)


def random_convolutions(batch: Batch) -> None:
    """A random layer, with its input size known and unknown, against its dense float64 matrix."""
    layer, shape = _random_layer(batch)
    weight = batch.normal(*layer.weight.shape, dtype=batch.dtype())
    if batch.integer(0, 2) == 0:
        weight = weight.abs().to(weight.dtype)
    if batch.integer(0, 2) == 0:
        weight.flatten(2)[..., 1:] = 0  # one tap

    with warnings.catch_warnings():
        # converting one warns that they are new
        warnings.filterwarnings("ignore", message="Complex modules")
        norm = reference_norm(fill(layer, weight), shape)
        scale = 2.0 ** batch.choose(0, -100, 100)  # exact, beyond the range of the SVD's squares
        compare(batch, fill(layer, weight * scale).to(batch.device), shape, norm * scale)


def _random_layer(batch: Batch) -> tuple[Any, tuple[int, ...]]:
    """A random layer, any padding, stride, dilation and groups, and the shape of one input that it accepts."""
    dims = batch.choose(1, 2, 2, 2, 3)
    groups = batch.choose(1, 1, 1, 2, 3)
    channels = [groups * batch.integer(1, 2) for _ in range(2)]
    most = max(2, int((_MOST_INPUTS / channels[0]) ** (1 / dims)))

    def axes(*options: int) -> list[int]:
        return [batch.choose(*options) for _ in range(dims)]

    while True:  # until PyTorch takes the padding
        kind, options = batch.choose(
            *[
                ("Conv", {"padding_mode": mode})
                for mode in ("zeros", "zeros", "circular", "reflect", "replicate")
            ],
            ("ConvTranspose", {"output_padding": axes(0, 0, 1)}),
        )
        kernel = axes(1, 2, 3, 4, 5)
        options |= {
            "stride": axes(1, 1, 2, 3),
            "padding": axes(0, 0, 1, 2, 3),
            "dilation": axes(1, 1, 2),
        }
        layer = getattr(nn, f"{kind}{dims}d")(
            *channels, kernel, groups=groups, bias=False, **options
        )
        shape = (channels[0], *[batch.integer(1, most) for _ in range(dims)])
        with contextlib.suppress(RuntimeError, ValueError):
            if layer(torch.zeros(1, *shape)).numel():
                return layer, shape


def fill(layer: Any, weight: Tensor) -> Any:
    """The layer with this weight.

    Args:
        layer: a linear layer.
        weight: a tensor of its weight's shape.
    """
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def compare(batch: Batch, layer: Any, shape: tuple[int, ...], norm: float) -> None:
    """Record the brackets of a convolution, for this input size and for any, against its norm.

    Args:
        batch: where to count.
        layer: the convolution.
        shape: of one input.
        norm: its norm on such inputs.
    """
    rtol = batch.choose(1e-1, 1e-2, 1e-3)
    what = f"{batch.label}: {layer} on {shape}, {layer.weight.dtype}"
    sized = bracket_of(batch, layer, rtol=rtol, input_size=shape[1:])
    batch.tally.record(sized.lower, sized.upper, norm, what)
    unsized = bracket_of(batch, layer, rtol=rtol)
    batch.tally.record(None, unsized.upper, norm, f"{what}, size unknown")
