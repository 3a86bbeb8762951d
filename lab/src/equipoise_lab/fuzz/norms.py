"""Operators of every kind, or trained to break their bracket, and both ends for an unknown input size.

Random operators hardly ever come near the worst case of a bound; gradient ascent goes there. The bracket itself has no
gradient, so the ascent follows a smooth stand-in for the upper end and every step is compared with the real bracket.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.norms.gram import gram_norm_plain
from equipoise.norms.reference import reference_norm
from equipoise.testing.norms import bracket_of, compare, fill, truth
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


def any_matrices(batch: Batch) -> None:
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


def any_convolutions(batch: Batch) -> None:
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


def _ascend(parameter: Tensor, objective: Callable[[], Tensor], steps: int = 30) -> Iterator[int]:
    """Gradient ascent on an objective of the parameter; yields the number of each step before it is taken."""
    optimizer = torch.optim.Adam([parameter], lr=0.1, maximize=True)
    for step in range(steps):
        yield step
        optimizer.zero_grad()
        objective().backward()
        optimizer.step()


def trained_matrices(batch: Batch) -> None:
    """Small matrices that raise `σ₁/‖W_t‖^(2^-t)`: they become nearly rank one, where only the rounding terms are left."""
    W = batch.normal(64, batch.integer(1, 6), batch.integer(1, 6)).requires_grad_()
    dtype = batch.choose(torch.float32, torch.float64)
    for step in _ascend(
        W, lambda: (torch.linalg.matrix_norm(W, ord=2).log() - gram_norm_plain(W, 2).log()).sum()
    ):
        for arithmetic in (None, dtype):
            bracket = bracket_of(batch, W.detach().to(batch.device), rtol=1e-6, dtype=arithmetic)
            what = f"{batch.label}: trained {tuple(W.shape)}, step {step}"
            batch.tally.record(bracket.lower, bracket.upper, truth(W.detach()), what)


def trained_kernels(batch: Batch) -> None:
    """One small kernel that raises the norm of its padded convolution towards the supremum of its symbol, or its grid."""
    k = batch.integer(2, 3)
    n = batch.integer(k, 6)
    mode = batch.choose("zeros", "zeros", "circular", "reflect")
    layer = nn.Conv2d(
        batch.integer(1, 2), batch.integer(1, 2), k, padding=k // 2, padding_mode=mode, bias=False
    )
    shape = (layer.in_channels, n, n)
    units = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    grid = batch.choose((n + k - 1, n + k - 1), (24, 24))
    K = batch.normal(*layer.weight.shape).requires_grad_()

    def norm() -> Tensor:
        matrix = torch.func.functional_call(layer, {"weight": K}, (units,)).flatten(1)
        return torch.linalg.matrix_norm(matrix, ord=2)

    def objective() -> Tensor:
        symbol = torch.fft.fft2(K, s=grid).permute(2, 3, 0, 1)
        return norm().log() - torch.linalg.matrix_norm(symbol, ord=2).amax().log()

    for step in _ascend(K, objective):
        if step % 3 == 0:
            compare(
                batch,
                fill(layer, K.detach().clone()).to(batch.device),
                shape,
                float(norm().detach()),
            )


def any_size(batch: Batch) -> None:
    """Both ends for an unknown input size, against a fine grid of the symbol and the factor from there to the supremum.

    `max_grid ‖E‖ ≤ sup ‖E‖ ≤ max_grid ‖E‖·Π 1/cos(π(k_j − 1)/(2·n_j))`: the upper end must not lie below the first, nor the
    lower end above the last. Stride 1 and zero padding, where the supremum is that of the symbol whatever the dilation.
    """
    kernel = batch.integer(1, 5), batch.integer(1, 5)
    inputs, outputs = batch.integer(1, 6), batch.integer(1, 6)
    layer = nn.Conv2d(
        inputs,
        outputs,
        kernel,
        padding=batch.integer(0, 2),
        dilation=batch.integer(1, 2),
        bias=False,
    )
    fill(layer, batch.normal(*layer.weight.shape, dtype=torch.float32))
    sizes = [16 * max(1, k - 1) for k in kernel]
    symbol = torch.fft.fft2(layer.weight.double(), s=sizes).permute(2, 3, 0, 1)
    grid = float(torch.linalg.matrix_norm(symbol, ord=2).max())
    factor = math.prod(
        1 / math.cos(math.pi * (k - 1) / (2 * n)) for k, n in zip(kernel, sizes, strict=True)
    )
    bracket = bracket_of(batch, layer.to(batch.device), rtol=batch.choose(1e-1, 1e-2, 1e-3))
    what = f"{batch.label}: {layer}, any size"
    batch.tally.record(None, bracket.upper, grid, what)
    batch.tally.record(bracket.lower, math.inf, grid * factor, what)
