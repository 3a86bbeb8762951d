"""Random matrices and convolutions, whose brackets are compared with a float64 SVD."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.norms.gram import wide
from equipoise.norms.reference import reference_norm
from equipoise.norms.spectral import spectral_norm
from equipoise.testing.runner import Batch


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
    """Many small matrices or a larger one, of any rank and scale: at rank one the upper end is as close as rounding allows."""
    count = batch.choose(2048, 2048, 256, 1)
    largest = {2048: 10, 256: 40, 1: 260}[count]  # small ones are cheap: 100,000 take seconds
    m, n, rank = (batch.integer(1, largest) for _ in range(3))
    dtype = batch.dtype()
    scale = batch.choose(1.0, 1e30, 1e-30)
    W = (
        batch.normal(count, m, rank, dtype=dtype)
        @ batch.normal(count, rank, n, dtype=dtype)
        * scale
    )
    bracket = bracket_of(batch, W.squeeze(0).to(batch.device), rtol=batch.choose(1e-1, 1e-3, 1e-6))
    what = f"{batch.label}: {m}×{n} of rank {rank}, {dtype} × {scale:g}"
    batch.tally.record(bracket.lower, bracket.upper, truth(W), what)


def truth(W: Tensor) -> Tensor:
    """The norm by SVD in float64, on the CPU, of matrices brought to the scale 1 by an exact power of two."""
    W = wide(W.cpu())
    exponent = torch.frexp(W.abs().amax((-2, -1)))[1]
    scale = torch.exp2(-exponent.double())
    return torch.ldexp(torch.linalg.svdvals(W * scale[..., None, None])[..., 0], exponent)


def random_convolutions(batch: Batch) -> None:
    """A random layer, with its input size known and unknown, against its dense float64 matrix."""
    layer = nn.Conv2d(
        batch.integer(1, 4),
        batch.integer(1, 4),
        batch.integer(1, 4),
        stride=batch.integer(1, 2),
        padding=batch.integer(0, 3),
        padding_mode=batch.choose("zeros", "circular", "reflect"),
        bias=False,
    )
    shape = (layer.in_channels, batch.integer(4, 8), batch.integer(4, 8))
    weight = batch.normal(*layer.weight.shape, dtype=batch.choose(torch.float32, torch.float64))
    norm = reference_norm(fill(layer, weight), shape)
    compare(batch, layer.to(batch.device), shape, norm)


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
