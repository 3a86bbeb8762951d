"""The floating-point ground: switches, roundoff constants, verified factorisation, refused precision."""

import math

import pytest
import torch

from equipoise import Refused
from equipoise.core import full_precision
from equipoise.core.precision import frobenius, gamma
from equipoise.norms import gram_norm_plain
from equipoise.norms.cholesky import below, cholesky_gamma, factor


def test_full_precision_switches_everything_and_restores_it() -> None:
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), full_precision():
            assert matmul.fp32_precision == "ieee"
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
            assert (torch.randn(4, 4) @ torch.randn(4, 4)).dtype is torch.float32
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before
    with pytest.raises(ZeroDivisionError), full_precision():
        raise ZeroDivisionError
    assert matmul.fp32_precision == before


def test_flushing_subnormals_is_switched_off_inside() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        with full_precision():
            assert float(torch.tensor(2.0**-1060, dtype=torch.float64) * 1) > 0
        assert float(torch.tensor(2.0**-1060, dtype=torch.float64) * 1) == 0
    finally:
        torch.set_flush_denormal(False)


def test_gamma_refuses_lengths_that_say_nothing() -> None:
    assert gamma(10, torch.float32) >= 10 * 2.0**-24
    with pytest.raises(Refused, match="float64"):
        gamma(2**24, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_frobenius_is_never_below(dtype: torch.dtype) -> None:
    for seed in range(50):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(7, 40, 33, generator=g, dtype=dtype) * torch.logspace(-24, 8, 7, dtype=dtype).reshape(-1, 1, 1)
        exact = [torch.linalg.vector_norm(part.double() * 2.0**20).item() * 2.0**-20 for part in x]
        assert all(e * (1 - 1e-15) <= float(f) <= e * (1 + 1e-5) for f, e in zip(frobenius(x), exact, strict=True))


def batch(kind: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Nine matrices, the last ones unlike the first: single precision guesses its loss from the first of a batch."""
    A = torch.randn(9, n + 3, n, dtype=dtype)
    if kind == "one direction":
        A[3:] = A[3:, :, :1] * torch.randn(n, dtype=dtype)
    if kind == "small diagonal":
        A[4:, :, 20:] *= 1e-3
    if kind == "zero":
        A[5:] = 0
    return A


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize(
    ("kind", "n"),
    [("flat", 1), ("flat", 5), ("flat", 60), *((k, 200) for k in ("flat", "one direction", "small diagonal", "zero"))],
)
def test_nothing_false_is_ever_proved(kind: str, n: int, dtype: torch.dtype) -> None:
    """`below` must say no as soon as tau < λ_max, however close, and yes with the loss it states."""
    torch.manual_seed(n)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    A = batch(kind, n, wide)
    G = (A.mH @ A / n).to(dtype)
    top = torch.linalg.eigvalsh(torch.tril(G.to(wide)) + torch.tril(G.to(wide), -1).mH)[:, -1].clamp_min(1e-3)
    zero = torch.zeros(9, dtype=torch.float64)
    for excess in (1e-15, 1e-12, 1e-9, 1e-7, 1e-6, 1e-4):
        assert not bool((below(G, top * (1 - excess), zero) & (top > 1e-3)).any())
    assert bool(below(G, top * 1.005, zero).all())
    assert not bool((below(G, top * 1.3, top * 0.31) & (top > 1e-3)).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_nothing_false_is_proved_where_products_underflow(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n, wide, tiny = 64, torch.complex128 if dtype.is_complex else torch.float64, torch.finfo(dtype).tiny
    A = torch.randn(6, n + 3, n, dtype=wide)
    for size in (1e-6, 1e-4, 1e-2, 1.0, 1e4):
        G = (A.mH @ A / n * size * 2.0**100 * (tiny * 2.0**-100)).to(dtype)
        top = torch.linalg.eigvalsh(G.to(wide) / tiny)[:, -1] * tiny
        for share in (0.5, 0.9, 0.99, 0.9999):
            assert not bool(below(G, top * share, torch.zeros(6, dtype=torch.float64)).any())


def graded(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Positive definite matrices with diagonals over six orders of magnitude: triangular solves are ill-conditioned."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    A = torch.randn(3, n, n, dtype=wide) * torch.logspace(0, -3, n, dtype=torch.float64)
    M = A.mH @ A + 1e-4 * torch.diag_embed(torch.logspace(0, -6, n, dtype=torch.float64)).to(wide)
    return M.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("n", [1, 7, 48, 72, 73, 96, 145, 200])
@pytest.mark.parametrize("kind", ["random", "graded"])
def test_factors_are_off_by_no_more_than_the_theorem_says(n: int, dtype: torch.dtype, kind: str) -> None:
    """`|L L* − M| ≤ γ'·|L||L|*` entry by entry, checked in float64: what the proofs by Cholesky rest on."""
    torch.manual_seed(n)
    M = graded(n, dtype)
    if kind == "random":
        A = torch.randn(3, n, n, dtype=dtype)
        M = A.mH @ A / n + 0.1 * torch.eye(n, dtype=dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = torch.tril(M.to(wide))
    upside = torch.triu(torch.full_like(M, math.nan), 1)  # what lies above the diagonal must not be read
    L, completed = factor(torch.where(upside.isnan(), upside, M))
    L = torch.tril(L).to(wide)
    off = torch.tril(L @ L.mH - exact).abs()
    allowed = cholesky_gamma(n, dtype) * torch.tril(L.abs() @ L.abs().mT)
    assert bool(((off <= allowed).flatten(1).all(1) | ~completed).all())
    assert bool(completed.any()) or kind == "graded"


def test_readouts_order_and_convergence() -> None:
    """Frobenius gains a factor (σ₂/σ₁)^(2^(t+1)); the sums converge only like 2^-t (the thesis' figure on read-outs)."""
    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64))[0] for _ in range(2))
    values = torch.linspace(0.6, 0.1, 59, dtype=torch.float64)
    W = U @ torch.diag(torch.cat([torch.ones(1, dtype=torch.float64), values])) @ V
    error = {r: [float(gram_norm_plain(W, t, r)) - 1 for t in range(7)] for r in ("fro", "one", "inf")}
    assert all(e > -1e-12 for row in error.values() for e in row)
    assert error["fro"][6] < 1e-12 < 1e-3 < error["one"][6]
    assert error["one"][6] == pytest.approx(error["one"][5] / 2, rel=0.1)
