"""Large matrices by Cholesky proofs against float64 SVD, and the lower triangle of a Gram matrix against the exact one."""

import math

import pytest
import torch

from equipoise.core.precision import full_precision, gamma
from equipoise.norms.cholesky import (
    PIECE,
    bracket_of_gram,
    cholesky_bracket,
    random_start,
    syrk,
    syrk_error,
)
from equipoise.norms.gram import small_side


def spectrum(m, n, values):
    U, V = (torch.linalg.qr(torch.randn(k, n, dtype=torch.float64))[0] for k in (m, n))
    return U * values(torch.arange(n, dtype=torch.float64)) @ V.mT


def deaf(m, n):
    """A top vector that the start of Lanczos does not see."""
    q = random_start(n, torch.zeros(1, dtype=torch.float64))
    x = torch.randn(n, dtype=torch.float64)
    x -= q * (q @ x) / (q @ q)
    unseen = torch.outer(torch.randn(m, dtype=torch.float64), x / x.norm()) / m**0.5
    return 0.3 * spectrum(m, n, lambda i: (1 + i) ** -0.5) + unseen


#: (m, n) → a matrix with n ≤ m columns
MATRICES = {
    "random": lambda m, n: torch.randn(m, n, dtype=torch.float64),
    "positive": lambda m, n: torch.rand(m, n, dtype=torch.float64),
    "flat": lambda m, n: spectrum(m, n, lambda i: 1 + 0 * i),
    "power law": lambda m, n: spectrum(m, n, lambda i: (1 + i) ** -0.5),
    "slow": lambda m, n: spectrum(m, n, lambda i: 0.9995**i),
    "cluster": lambda m, n: spectrum(m, n, lambda i: torch.where(i < 12, 1 - 1e-7 * i, 0.5 + 0 * i)),
    "wide cluster": lambda m, n: spectrum(m, n, lambda i: torch.where(i < 30, 1 - 1e-6 * i, 0.5 + 0 * i)),
    "deaf start": deaf,
    "one entry": lambda m, n: (
        torch.zeros(m, n, dtype=torch.float64).index_fill_(1, torch.tensor([n // 2]), 3.0)
        * (torch.arange(m) == 5)[:, None]
    ),
    "ones": lambda m, n: torch.ones(m, n, dtype=torch.float64),
    "columns of zeros": lambda m, n: torch.randn(m, n, dtype=torch.float64) * (torch.arange(n) < 3),
    "one column": lambda m, n: torch.randn(m, 1, dtype=torch.float64),
    "pieces": lambda m, n: torch.randn(2 * PIECE + 37, 64, dtype=torch.float64),
    "unequal columns": lambda m, n: torch.randn(m, n, dtype=torch.float64) * torch.logspace(-8, 0, n),
    "unequal rows": lambda m, n: torch.randn(m, n, dtype=torch.float64) * torch.logspace(-8, 0, m)[:, None],
}
FORMS = {
    "tall": lambda A: A,
    "wide": lambda A: A.mT.contiguous(),
    "wide in memory": lambda A: A.mT.contiguous().mT,
    "float32": lambda A: A.float(),
    "float32, wide": lambda A: A.float().mT.contiguous(),
    "tiny": lambda A: 1e-30 * A,
    "huge, float32": lambda A: (1e30 * A).float(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MATRICES)
def test_brackets_hold_and_are_tight(name, form):
    torch.manual_seed(0)
    W = FORMS[form](MATRICES[name](260, 170))
    largest = float(W.abs().max())
    sigma = float(torch.linalg.svdvals(W.double() / largest)[0]) * largest
    with torch.no_grad(), full_precision():
        for rtol in (1e-2, 1e-4, 1e-5):
            lower, upper, v = cholesky_bracket(W, rtol)
            assert lower <= sigma * (1 + 1e-13)
            assert sigma * (1 - 1e-13) <= upper <= (1 + rtol) * lower * (1 + 1e-13)
            assert len(v) == min(W.shape)
        unit = 2.0 ** round(math.log2(largest))  # exact
        A = small_side(W) / unit
        single = not W.is_complex()
        sigma /= unit
        for enough in (0.5 * sigma, sigma * (1 - 1e-9), sigma * (1 + 1e-9), 1.1 * sigma):
            G = syrk(A, torch.float32 if single else torch.float64)
            sizes = syrk_error(A, G)
            start = (1e-3, A if single else None, v, enough)
            lower, upper, _ = bracket_of_gram(G, *sizes, *start) or cholesky_bracket(A, 1e-3)
            assert lower <= sigma * (1 + 1e-13)
            assert sigma * (1 - 1e-13) <= upper <= max(enough, sigma * 1.002)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3 * PIECE + 5, 70), (700, 500), (400, 150), (90, 90), (40, 1), (66, 65)])
def test_the_triangle_of_a_gram_matrix_is_as_near_as_it_says(shape, stored, dtype):
    torch.manual_seed(0)
    W = torch.randn(shape, dtype=stored)
    for X in (W, W.mT.contiguous().mT):
        A = X.double()
        G = syrk(X, dtype)
        lower = torch.tril(G).double()
        whole = lower + torch.tril(lower, -1).mT
        off = float(torch.linalg.matrix_norm(whole - A.mT @ A, 2))
        allowed, most = syrk_error(X, G)
        size = float(A.square().sum())
        assert size <= most * (1 + 1e-13)
        assert off <= allowed + 1e-13 * size  # of the reference
        assert allowed <= 2 * gamma(PIECE + 20 if dtype is torch.float32 else len(A) + 20, dtype) * size
