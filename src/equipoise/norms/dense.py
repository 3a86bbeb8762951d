"""Brackets of the norms of matrices: Gram iteration for small ones, Lanczos steps and verified factorisations for large ones."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from equipoise.core.precision import deflate, gamma, inflate, ldexp_down, ldexp_up, rescaled
from equipoise.norms.cholesky import (
    cholesky_gamma,
    expected_loss,
    is_below,
    lanczos,
    perturb,
    random_start,
    single_thread,
    syrk,
    syrk_error,
)
from equipoise.norms.deflation import deflated_gram_bracket
from equipoise.norms.gram import gram_bracket, rayleigh_lower, small_side

Result = tuple[float, float, Tensor]

#: below this many columns (of the smaller side) batched Gram iteration in float64 is faster than one factorisation
LARGE = 160
#: multiplications of a Gram matrix from which float32 saves more than splitting off a few directions costs
SINGLE_FROM = 2**25


def cholesky_bracket(
    W: Tensor,
    rtol: float,
    start: Tensor | None = None,
    enough: float = 0.0,
    single: Tensor | None = None,
) -> Result:
    """`(lower, upper, v)` of σ₁(W): Lanczos steps on `G = A*A` from below, one factorisation from above.

    Real matrices with a start, and large ones, are tried in float32 first.

    Args:
        W: one matrix, real or complex.
        rtol: relative gap to reach.
        start: a guess of the top vector of the smaller side.
        enough: an upper end that suffices; given with a start, it is tried first.
        single: `syrk(W, float32)`, if it is there already.

    Returns:
        Both ends, and a vector near the top of the smaller side.
    """
    A, e = rescaled(small_side(W.cpu()))
    if not bool(A.sum()) and not bool(A.any()):  # a sum is the faster of the two
        return 0.0, 0.0, A.new_ones(A.shape[1])
    limit = ldexp_down(enough, -e)
    with single_thread(A.numel() * A.shape[1]):
        result = None
        large = A.numel() * A.shape[1] >= SINGLE_FROM and rtol >= 1e-5
        if not A.is_complex() and (large or start is not None):
            G = syrk(A, torch.float32) if single is None or e else single
            error, size = syrk_error(A, G)
            if start is not None:
                result = bracket_of_gram(G, error, size, rtol, A, start, limit)
            elif math.isfinite(error):
                lower, upper, v = deflated_gram_bracket(A, G, error, size, rtol)
                start = perturb(v)
                result = (lower, upper, v) if upper <= (1 + rtol) * lower else None
        if result is None:
            G = syrk(A)
            result = bracket_of_gram(G, *syrk_error(A, G), rtol, A, start, limit)
        assert result is not None
        lower, upper, v = result
    return ldexp_down(lower, e), ldexp_up(upper, e), v


def bracket_of_gram(
    G: Tensor,
    error: float,
    size: float,
    rtol: float,
    A: Tensor | None = None,
    start: Tensor | None = None,
    enough: float = 0.0,
) -> Result | None:
    """`(lower, upper, v)` of σ₁(A) from its Gram matrix.

    The lower end is a Rayleigh quotient, the upper end a proof that `G ⪯ upper²·I`. A failed proof means that the Ritz
    vector had not converged: Lanczos goes on from it, and after six failures the target is widened instead, at most up to ‖A‖_F.
    None where float32 cannot reach the tolerance.

    Args:
        G: the Gram matrix, not zero.
        error: norm of what G may be off by.
        size: at least `‖A‖_F²`.
        rtol: relative gap to reach.
        A: the matrix, for lower ends `‖Av‖/‖v‖`; None: they are read off G, in float64.
        start: a guess of the top vector.
        enough: an upper end that suffices; given with a start, it is tried first.
    """
    n, dtype = len(G), G.dtype
    steering = G / torch.diagonal(G).real.amax()
    if (
        rtol >= 1e-5
    ):  # float32 steers well enough, unless it could not tell the top from its neighbours
        steering = steering.to(torch.complex64 if G.is_complex() else torch.float32)
    v = (
        random_start(n, steering)
        if start is None or not bool(start.any())
        else steering @ start.to(steering)
    )

    def rayleigh(v: Tensor) -> float:
        if A is not None:
            return float(rayleigh_lower(A, v))
        w = v.double() / torch.linalg.vector_norm(v.double())
        rounding = gamma(4 * n + 16, torch.float64) * float(torch.linalg.matrix_norm(G)) * 2
        return deflate(math.sqrt(max(0.0, float(w @ (G @ w)) - rounding - error)))

    best = torch.zeros_like(v)
    longest = int(torch.diagonal(G).real.argmax())
    best[longest] = 1  # the longest column: a lower end that is never 0
    lower = deflate(math.sqrt(max(0.0, float(G[longest, longest].real) - error)))

    if enough > 0 and start is not None:
        value = max(lower, rayleigh(v))
        tau = deflate(deflate(enough) ** 2)
        # a bound with a margin lasts for more steps
        aim = tau if value**2 > 0.8 * tau else value * math.sqrt(tau)
        if value**2 < aim and is_below(G, aim, error):
            return value, enough if aim == tau else inflate(math.sqrt(inflate(aim))), v

    loss = n * cholesky_gamma(n, torch.float64)  # of a proof in float64, at worst
    slack = 0.9 * max(rtol, 5 * loss)
    for attempt in itertools.count(1):
        v = lanczos(steering.matmul, v, steps=100, converged=slack / 2)
        value = rayleigh(v)
        if value > lower:
            best, lower = v, value
        tau = max(lower**2, error) * (1 + slack) ** 2
        # what rounding costs: the error of G twice, and the loss of the proof
        if (
            dtype is torch.float32
            and expected_loss(G, tau) / 2 + error / max(lower**2, 1e-300) > 0.75 * slack
        ):
            return None
        if tau >= size or is_below(G, tau, error):
            return lower, inflate(math.sqrt(inflate(min(tau, size)))), best
        if dtype is torch.float32:
            return None
        if attempt >= 6:
            slack *= 2
    return None


def dense_bracket(W: Tensor, rtol: float) -> tuple[Tensor, Tensor, Tensor]:
    """`(lower, upper, v)` of a batch of matrices in float64: Gram iteration for small ones, Cholesky proofs for large ones.

    Args:
        W: matrices `(..., m, n)`.
        rtol: relative gap to reach.
    """
    if W.dim() == 2 and min(W.shape) >= LARGE:
        lower, upper, v = cholesky_bracket(W, rtol)
        return torch.tensor(lower, dtype=torch.float64), torch.tensor(upper, dtype=torch.float64), v
    if W.dim() > 2 and min(W.shape[-2:]) >= LARGE:
        flat = [dense_bracket(w, rtol) for w in W.reshape(-1, *W.shape[-2:])]
        low, high, v = (torch.stack([f[i] for f in flat]) for i in range(3))
        return low.reshape(W.shape[:-2]), high.reshape(W.shape[:-2]), v.reshape(*W.shape[:-2], -1)
    return gram_bracket(W, rtol)
