"""Dense matrices of every kind the rounding analysis could get wrong, against the float64 SVD.

Random operators hardly ever come near the worst case of a bound; gradient ascent goes there. The bracket itself has no
gradient, so the ascent follows a smooth stand-in for the upper end and every step is judged by the real bracket.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from equipoise.norms.gram import gram_norm_plain, wide
from equipoise.norms.reference import operator_matrix
from equipoise.norms.spectral import spectral_norm
from equipoise.testing.runner import Batch

#: matrices per batch; small ones are cheap, which is how 100,000 fit in seconds
COUNT = 2048

Maker = Callable[[Batch, tuple[int, int, int], torch.dtype], Tensor]


def gaussian(batch: Batch, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Independent Gaussian entries."""
    return torch.randn(shape, generator=batch.generator, dtype=dtype)


def rank_one(batch: Batch, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """`u vᵀ`: the Frobenius norm is the norm, so the upper end is as close as rounding allows."""
    b, m, n = shape
    return gaussian(batch, (b, m, 1), dtype) @ gaussian(batch, (b, 1, n), dtype)


def flat(batch: Batch, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """All singular values equal (up to 1e-7): Gram iteration is slowest here."""
    q = torch.linalg.qr(gaussian(batch, (shape[0], max(shape[1:]), max(shape[1:])), dtype))[0]
    return q[:, : shape[1], : shape[2]] + 1e-7 * gaussian(batch, shape, dtype)


def graded(batch: Batch, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Entries of very different sizes: small ones are lost beside large ones."""
    powers = torch.randint(-12, 4, shape, generator=batch.generator)
    return gaussian(batch, shape, dtype) * (10.0**powers).to(dtype)


def sparse(batch: Batch, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Mostly zeros, some matrices entirely zero."""
    keep = torch.rand(shape, generator=batch.generator) < 0.2
    return gaussian(batch, shape, dtype) * keep


def signs(batch: Batch, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Entries ±1: exact Gram matrices, many ties."""
    return (torch.randint(0, 2, shape, generator=batch.generator) * 2 - 1).to(dtype)


MAKERS: tuple[Maker, ...] = (gaussian, rank_one, flat, graded, sparse, signs)
SCALES = (1.0, 1e30, 1e-30, 1e10, 1e-10)
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def random_batch(batch: Batch) -> None:
    """One batch of small matrices of one kind, size, dtype and scale, by one of the routes."""
    m, n = batch.integer(1, 10), batch.integer(1, 10)
    if batch.integer(0, 9) == 0:
        m, n = batch.choose((1, 1), (1, 40), (40, 3), (32, 32))
    W, what = _draw(batch, (COUNT if m * n <= 100 else COUNT // 8, m, n))
    route = batch.choose("auto", "gram", "float32")
    rtol = batch.choose(1e-1, 1e-3, 1e-6)
    with hostile_settings(batch.integer(0, 1) == 1):
        bracket = spectral_norm(
            W.to(batch.device),
            rtol=rtol,
            method="gram" if route == "gram" else "auto",
            dtype=torch.float32 if route == "float32" else None,
        )
    batch.tally.record(bracket.lower, bracket.upper, truth(W), f"{batch.label}: {what}, {route}")


def single(batch: Batch) -> None:
    """One larger matrix by the Cholesky route, which small batches do not take."""
    m, n = batch.integer(1, 260), batch.integer(1, 260)
    W, what = _draw(batch, (1, m, n))
    method = batch.choose("auto", "cholesky")
    with hostile_settings(batch.integer(0, 1) == 1):
        bracket = spectral_norm(W[0].to(batch.device), rtol=batch.choose(1e-2, 1e-4), method=method)
    batch.tally.record(bracket.lower, bracket.upper, truth(W), f"{batch.label}: {what}, {method}")


def truth(W: Tensor) -> Tensor:
    """The norm by SVD in float64, on the CPU, of matrices brought to the scale 1 by an exact power of two."""
    W = wide(W.cpu())
    exponent = torch.frexp(W.abs().amax((-2, -1)))[1]
    scale = torch.exp2(-exponent.double())
    return torch.ldexp(torch.linalg.svdvals(W * scale[..., None, None])[..., 0], exponent)


def _draw(batch: Batch, shape: tuple[int, int, int]) -> tuple[Tensor, str]:
    maker, dtype, scale = batch.choose(*MAKERS), batch.choose(*DTYPES), batch.choose(*SCALES)
    if batch.device.type == "mps":  # no float64 there
        dtype = {torch.float64: torch.float32, torch.complex128: torch.complex64}.get(dtype, dtype)
    W = maker(batch, shape, dtype) * scale
    return W, f"{maker.__name__} {shape[1]}×{shape[2]} {str(dtype).removeprefix('torch.')} × {scale:g}"


@contextlib.contextmanager
def hostile_settings(on: bool) -> Iterator[None]:
    """Inside (where `on`), the process asks for reduced-precision products: guarantees must switch that off themselves."""
    if not on:
        yield
        return
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(device, dtype=torch.bfloat16))
        if torch.cuda.is_available():
            stack.callback(setattr, torch.backends.cuda.matmul, "allow_tf32", torch.backends.cuda.matmul.allow_tf32)
            torch.backends.cuda.matmul.allow_tf32 = True
        yield


STEPS = 30


def trained_matrices(batch: Batch) -> None:
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


def trained_kernels(batch: Batch) -> None:
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
    stored = copy.deepcopy(layer)
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
