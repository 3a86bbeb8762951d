"""Operators trained to break the bound: gradient ascent on `truth / upper`, checked at every step.

Random operators hardly ever come near the worst case of a bound; gradient ascent goes there. The bracket itself has no
gradient, so the ascent follows a smooth stand-in for the upper end and every step is judged by the real bracket.
"""

import torch
from torch import Tensor, nn

from equipoise.lab.selfcheck.matrices import truth
from equipoise.lab.selfcheck.runner import Batch
from equipoise.norms.gram import gram_norm_plain
from equipoise.norms.reference import operator_matrix
from equipoise.norms.spectral import spectral_norm

STEPS = 30


def matrices_batch(batch: Batch) -> None:
    """Small matrices that raise `σ₁/‖W_t‖^(2^-t)`: they become nearly rank one, where only the rounding terms are left."""
    m, n = batch.integer(1, 6), batch.integer(1, 6)
    W = torch.randn(64, m, n, generator=batch.generator, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([W], lr=0.1)
    dtype = batch.choose(torch.float32, torch.float64)
    for step in range(STEPS):
        stored = W.detach().float() if batch.device.type == "mps" else W.detach()
        what, norm = f"{batch.label}: trained {m}×{n}, step {step}", truth(stored)
        for number, arithmetic in enumerate((None, dtype)):
            b = spectral_norm(stored.to(batch.device), rtol=1e-6, dtype=arithmetic)
            batch.tally.record(b.lower, b.upper, norm, what, again=number > 0)
        loss = (gram_norm_plain(W, 2).log() - torch.linalg.matrix_norm(W, ord=2).log()).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def kernels(batch: Batch) -> None:
    """One small kernel that raises the norm of its padded convolution towards the supremum of its symbol, or its grid."""
    co, ci, k = batch.integer(1, 2), batch.integer(1, 2), batch.integer(2, 3)
    n = batch.integer(k, 6)
    mode = batch.choose("zeros", "zeros", "circular", "reflect")
    layer = nn.Conv2d(ci, co, k, padding=k // 2, padding_mode=mode, bias=False, dtype=torch.float64)
    K = torch.randn(co, ci, k, k, generator=batch.generator, dtype=torch.float64).requires_grad_()
    spread = _placements(layer, n)
    optimizer = torch.optim.Adam([K], lr=0.05)
    grid = (n + k - 1, n + k - 1) if batch.integer(0, 1) else (24, 24)
    for step in range(STEPS):
        matrix = torch.tensordot(K.flatten(), spread, 1)
        norm = torch.linalg.matrix_norm(matrix, ord=2)
        if step % 3 == 0 or step == STEPS - 1:
            _judge(batch, layer, K, n, float(norm.detach()), step)
        symbol = torch.fft.fft2(K, s=grid).permute(2, 3, 0, 1)
        loss = torch.linalg.matrix_norm(symbol, ord=2).amax().log() - norm.log()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _judge(batch: Batch, layer: nn.Conv2d, K: Tensor, n: int, norm: float, step: int) -> None:
    stored = nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,  # type: ignore[arg-type]
        padding=layer.padding,  # type: ignore[arg-type]
        padding_mode=layer.padding_mode,
        bias=False,
        dtype=torch.float64,
    ).requires_grad_(False)
    stored.weight.copy_(K.detach())
    moved = stored if batch.device.type == "mps" else stored.to(batch.device)
    what = f"{batch.label}: trained {layer} on {n}×{n}, step {step}"
    known = spectral_norm(moved, rtol=1e-3, input_size=(n, n))
    batch.tally.record(known.lower, known.upper, norm, what)
    unknown = spectral_norm(moved, rtol=1e-3)
    batch.tally.record(None, unknown.upper, norm, f"{what}, size unknown", again=True)


def _placements(layer: nn.Conv2d, n: int) -> Tensor:
    """The operator is linear in the kernel: its matrix for every unit kernel `(taps, outputs, inputs)`."""
    layer = layer.requires_grad_(False)
    parts = []
    for i in range(layer.weight.numel()):
        layer.weight.zero_()
        layer.weight.view(-1)[i] = 1
        parts.append(operator_matrix(layer, (layer.in_channels, n, n)))
    return torch.stack(parts)
