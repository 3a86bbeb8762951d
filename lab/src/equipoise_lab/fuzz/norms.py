"""Operators trained to break their bracket, and both ends for an unknown input size.

Random operators hardly ever come near the worst case of a bound; gradient ascent goes there. The bracket itself has no
gradient, so the ascent follows a smooth stand-in for the upper end and every step is compared with the real bracket.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from equipoise.norms.gram import gram_norm_plain
from equipoise.testing.norms import bracket_of, compare, fill, truth
from equipoise.testing.runner import Batch


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
