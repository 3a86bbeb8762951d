"""Dense matrices of every kind the rounding analysis could get wrong, against the float64 SVD."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from equipoise.lab.selfcheck.runner import Batch
from equipoise.norms.gram import wide
from equipoise.norms.spectral import spectral_norm

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
