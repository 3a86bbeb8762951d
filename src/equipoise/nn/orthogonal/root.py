"""`(WWᵀ)^(−1/2)` on the short side of a dense layer, proved: what makes `W (m, n)` orthonormal without forming the result.

With `G = WWᵀ` in float64, c its mean eigenvalue and `G = c(I + A)`, a matrix near the identity has the root

    (I + A)^(−1/2) = I − A/2 + (3/8)A² − …,        |remainder| ≤ (3/8)ε²(1 − ε)^(−5/2)  or  (5/16)ε³(1 − ε)^(−7/2),       ε ≥ ‖A‖.

So `F = α(I − X)` with X from one or two terms has `‖FW‖ ≤ 1` for α a little below `1/√c` (`corrected`): errors of X in float32
are small beside A. A matrix that is not near the identity is brought there by a first factor T from its eigenvectors in float32,
`A = T(G/c)T − I` in float64; then `F = α(I − X)T`. Nothing is assumed of the eigenvectors.

Reference: Higham 2008, chapters 6 and 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.core.precision import gamma, unit_roundoff
from equipoise.nn.factored import differentiable, row_gram, symmetric_gram
from equipoise.nn.orthogonal.polar import COARSE, FEW_ROWS
from equipoise.norms.cholesky import gram_lower_error

#: largest ratio of singular values: beyond it the factor would enlarge what rounding does to `Wx`
CONDITION = 20.0
#: from this ‖A‖ a term more is taken in the root (its square is lost) and in its derivative
NEAR = 1e-3


@dataclass(frozen=True)
class Root:
    """`F = α(I − X)T ≈ G^(−1/2)` with `‖FW‖ ≤ 1`; for the derivative c, A, or (`far`) eigenvectors and roots of eigenvalues."""

    alpha: float
    c: float
    X: Tensor
    A: Tensor
    far: bool
    T: Tensor
    U: Tensor
    s: Tensor

    def times(self, v: Tensor, turned: bool) -> Tensor:
        """`v·Fᵀ`, or `v·F` (turned)."""
        if self.far and not turned:
            v = v @ self.T
        v = v - v @ self.X
        if self.far and turned:
            v = v @ self.T
        return v * self.alpha

    def gradient(self, g: Tensor) -> Tensor:
        """Twice the gradient for G of a function of `G^(−1/2)` with the gradient g: symmetric, as is all that depends on G."""
        N = g + g.mT
        if self.far:  # Daleckii & Krein: (1/s_i − 1/s_j)/(s_i² − s_j²) = −1/(s_i·s_j·(s_i + s_j))
            U, s = self.U, self.s
            C = (U.mT @ N @ U) / (s[:, None] * s[None, :] * (s[:, None] + s[None, :]))
            return (U @ C @ U.mT) * -(self.c**-1.5)
        A = self.A
        P = N @ A
        X = 0.375 * P
        if not bool(A.norm() <= NEAR):
            X = X.addmm_(P, A, alpha=-0.3125).addmm_(A, P, alpha=-0.15625)
        return (X + X.mT - 0.5 * N) * self.c**-1.5


def corrected(A: Tensor, eta: float) -> tuple[Tensor, Tensor, float] | None:
    """`(X, A, τ)` in float32 with `‖(I − X)(I + A + D)^(1/2)‖ ≤ 1 + τ` for every `‖D‖ ≤ eta`; None where τ is not small.

    For |a| ≤ ε ≤ 1/20 the polynomial times `(1 + a)^(1/2)` is at most 1 plus the remainder; D adds `‖p(A)‖²·eta/2`; an error Δ of
    X adds ‖Δ‖ times `(1 + ε + eta)^(1/2)`.
    """
    m, u = len(A), unit_roundoff(torch.float32)
    narrow, lost = A.to(torch.float32), 8 * m * torch.finfo(torch.float32).tiny
    size = 1.01 * float(A.norm())
    eta += 1.01 * u * size + lost
    if size <= NEAR:
        X, error, remainder = 0.5 * narrow, lost, 0.4 * size**2
    elif size <= 1:
        square = symmetric_gram(narrow)
        off = 1.01 * gamma(m + 8, torch.float32) * size**2 + lost
        epsilon = min(size, math.sqrt(1.01 * float(square.norm()) + off))
        X = 0.5 * narrow - 0.375 * square
        error, remainder = 0.375 * off + 4 * u * size + lost, 0.4 * epsilon**3
        if epsilon > 0.05:
            return None
    else:
        return None
    tau = 1.01 * (remainder + eta + 1.1 * error)
    return (X, narrow, tau) if tau <= COARSE else None


def inverse_root(G: Tensor, columns: int) -> Root | None:
    """The factor for rows of that many columns whose Gram matrix was computed as the symmetric G in float64.

    None where rows are too dependent, too large or too small, or not numbers.
    """
    m = len(G)
    trace = float(G.diagonal().sum())
    c = trace / m
    if not 2.0**-60 < c < 2.0**60:
        return None
    S = G / c
    A = S.clone()
    A.diagonal().sub_(1)
    wrong = 1.01 * (gram_lower_error(trace, (columns, m), torch.float64) / c)
    tiny = 4 * unit_roundoff(torch.float64)
    found, none, far = corrected(A, wrong + tiny * float(S.norm())), A.new_empty(0), False
    T = U = s = none
    if found is None:
        squares, U = torch.linalg.eigh(S.float())
        if not bool(squares[0] * CONDITION**2 > squares[-1]):
            return None
        s, far = squares.sqrt(), True
        T = ((U / s) @ U.mT).tril()
        T = T + T.tril(-1).mT
        wide = T.double()
        TS = wide @ S
        A = (TS @ wide).tril()
        A = A + A.tril(-1).mT
        A.diagonal().sub_(1)
        t, ts, size = (1.01 * float(x.norm()) for x in (wide, TS, S))
        products = 1.5 * gamma(m + 2, torch.float64) * t * (ts + 1.01 * t * size) + tiny * (t * t * size + m)
        found = corrected(A, products + t * t * wrong)
    if found is None:
        return None
    X, narrow, tau = found
    alpha = (1 - tau - 4 * unit_roundoff(torch.float32)) / math.sqrt(c)
    return Root(alpha, c, X, narrow, far, T, U, s)


class Rooted(torch.autograd.Function):
    """`x·(FW)ᵀ` with F the root of `WWᵀ`, or `x·(WFᵀ)ᵀ` with that of `WᵀW` where W has more rows than columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, root: Root) -> Tensor:
        """Both products; what lies between them is kept."""
        tall, linear = W.shape[0] > W.shape[1], torch.nn.functional.linear
        between = root.times(x, True) if tall else linear(x, W)
        ctx.save_for_backward(x, W, between)
        ctx.root, ctx.tall = root, tall
        return linear(between, W) if tall else root.times(between, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x and W: that for `WWᵀ` adds `2·g·W`."""
        (x, W, between), root, g = ctx.saved_tensors, ctx.root, gradients[0]
        if torch.is_grad_enabled():  # somebody will differentiate again
            wide = (W.mT if ctx.tall else W).double()
            F = by_iteration(wide @ wide.mT).to(W.dtype)
            y = x @ F @ W.mT if ctx.tall else x @ W.mT @ F
            return *differentiable([y], [g], x, W), None
        flat, v, g = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, between, g))
        if ctx.tall:
            h = g @ W
            own = (g.mT @ v).addmm_(W, root.gradient(h.mT @ flat))
            return root.times(h, False).view_as(x), own, None
        h = root.times(g, True)
        own = (h.mT @ flat).addmm_(root.gradient(g.mT @ v), W)
        return (h @ W).view_as(x) if ctx.needs_input_grad[0] else None, own, None


def by_iteration(G: Tensor) -> Tensor:
    """`G^(−1/2)` by the coupled iteration of Newton and Schulz, every operation differentiable."""
    c = torch.linalg.matrix_norm(G.detach())
    identity = torch.eye(len(G), dtype=G.dtype, device=G.device)
    Y, Z = G / c, identity
    for _ in range(40):
        P = 1.5 * identity - 0.5 * (Z @ Y)
        Y, Z = Y @ P, P @ Z
        if bool(torch.linalg.matrix_norm(P.detach() - identity) < 1e-12):
            break
    return Z * c.rsqrt()


def orthonormal_linear(x: Tensor, raw: Tensor) -> Tensor | None:
    """`x·Qᵀ` with Q the float32 matrix raw, its rows or columns (the fewer) made orthonormal; None where that is not proved.

    Guarantee: Q has norm at most 1.
    """
    if raw.dtype is not torch.float32 or raw.device.type != "cpu" or min(raw.shape) <= FEW_ROWS:
        return None
    short = raw.detach() if raw.shape[0] <= raw.shape[1] else raw.detach().mT
    root = inverse_root(row_gram(short, True), short.shape[1])
    return None if root is None else Rooted.apply(x, raw, root)
