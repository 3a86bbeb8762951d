"""Long dense layers without forming their weight: `F·W` is applied as F after W, with F from the Gram matrix of the short side.

A rescaled or orthogonalised `W (m, n)`, m ≤ n, is `F·W` with F a function of `G = WWᵀ`. Whatever F is, `‖FW‖² = ‖F·WWᵀ·Fᵀ‖`: the
proof needs G and no product of the size of W, nothing of that size is rounded, and a batch of b < n inputs pays 2·b·m² operations
for F instead of the 2·n·m² that `F·W` costs. The gradient for W of a function of G is `(g + gᵀ)·W`: one long product.

Matrices with more rows than columns are treated as their transposes: `W·F`, and F goes before W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.core.precision import gamma
from equipoise.norms.cholesky import gram_lower

#: products `m²·n` from which a layer is worth it
LARGE = 2**29
#: largest share of the row sums of orthonormal rows that the error of a Gram matrix in float32 may have
MOST = 1e-2
#: columns of one piece of a Gram matrix in float32
PIECE = 256
#: from this many rows a Gram matrix is computed as a block triangle
_BLOCKED = 256


def symmetric_gram(W: Tensor, piece: int | None = None) -> Tensor:
    """`WᵀW` of `(..., m, n)` as a sum of products of `piece` rows; of many columns the lower triangle of blocks only, mirrored.

    A product is finished before it is added: every entry goes through at most `piece + m/piece` roundings. Symmetric to the last
    bit.
    """
    n = W.shape[-1]
    step, rows = n if n < _BLOCKED else -(-n // 4), W.split(piece or max(1, W.shape[-2]), -2)
    G = W.new_empty(*W.shape[:-2], n, n)
    for first in range(0, n, step):
        last = min(n, first + step)
        products = (part[..., first:last].mT @ part[..., :last] for part in rows)
        block = next(products)
        for product in products:
            block.add_(product)
        own = block[..., first:]
        block[..., first:] = own.tril() + own.tril(-1).mT
        G[..., first:last, :last] = block
        if first:
            G[..., :first, first:last] = block[..., :first].mT
    return G


def row_gram(W: Tensor, wide: bool) -> Tensor:
    """`WWᵀ` in float32 by pieces, or (`wide`) in float64; symmetric to the last bit."""
    if not wide:
        return symmetric_gram(W.mT, PIECE)
    G = torch.tril(gram_lower(W.mT))
    return G + torch.tril(G, -1).mT


class Gram(torch.autograd.Function):
    """`row_gram`, with the gradient in W's dtype."""

    @staticmethod
    def forward(ctx: Any, W: Tensor, wide: bool) -> Tensor:
        """The Gram matrix."""
        ctx.save_for_backward(W)
        return row_gram(W, wide)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """`(g + gᵀ)·W`, in the layout of W."""
        (W,), g = ctx.saved_tensors, gradients[0]
        S = (g + g.mT).to(W.dtype)
        return (W.mT @ S).mT if W.stride(-2) == 1 else S @ W, None


class LinearGram(torch.autograd.Function):
    """`(xWᵀ, WWᵀ)`: both gradients for W in one matrix, where two would be added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, wide: bool) -> tuple[Tensor, Tensor]:
        """The product, and `row_gram`."""
        ctx.save_for_backward(x, W)
        return torch.nn.functional.linear(x, W), row_gram(W, wide)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        """`gW` for x; `gᵀx + (h + hᵀ)W` for W."""
        (x, W), (g, h) = ctx.saved_tensors, gradients
        S = (h + h.mT).to(W.dtype)
        product = g.reshape(-1, g.shape[-1]).mT @ x.reshape(-1, x.shape[-1])
        total = torch.addmm(product, S, W) if torch.is_grad_enabled() else product.addmm_(S, W)
        return g @ W if ctx.needs_input_grad[0] else None, total, None


def differentiable(
    values: Sequence[Tensor], given: Sequence[Tensor], *inputs: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients for the inputs that can be differentiated again, operator by operator; None for what needs none."""
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    found = dict(zip(map(id, wanted), torch.autograd.grad(values, wanted, given, create_graph=True), strict=True))
    return tuple(found.get(id(tensor)) for tensor in inputs)


def pays(m: int, n: int) -> bool:
    """Whether `row_sums` of a matrix (m, n) is worth it, and close enough."""
    return m * m * n >= LARGE and m * gram_spread(n) <= MOST


def gram_spread(n: int) -> float:
    """γ with `|WWᵀ − Ĝ|_ij ≤ γ‖w_i‖‖w_j‖` for rows of n numbers, products in float32 in pieces, without underflow."""
    return gamma(PIECE + n // PIECE + 8, torch.float32)


class Square(torch.autograd.Function):
    """`G²` of a symmetric G, its derivative by one product."""

    @staticmethod
    def forward(ctx: Any, G: Tensor) -> Tensor:
        """Symmetric to the last bit."""
        ctx.save_for_backward(G)
        return symmetric_gram(G)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """`NG + GN` with N the symmetric part."""
        (G,), g = ctx.saved_tensors, gradients[0]
        P = (0.5 * (g + g.mT)) @ G
        return P + P.mT


def row_sums(G: Tensor, n: int, t: int, log_q: Tensor | None) -> Tensor | None:
    """At least `Σ_j |(WWᵀ)^(2^(t−1))|_ij q_j/q_i` for `G = row_gram(W)` of `W (m, n)`, float32; (m,) in float64, differentiable.

    t is 1 or 2.

    None where float32 would not do: rows too many, too unequal, or too large or small.

    With `|WWᵀ − Ĝ| ≤ d·dᵀ`, `d_i² = γ‖w_i‖²` and what underflow may take, all sums non-negative,

        |G|q  ≤ a + d(dᵀq),                                     a = |Ĝ|q,
        |G²|q ≤ |Ŝ|q + γ_m·|Ĝ|a + (|Ĝ|d)(dᵀq) + d(dᵀa) + d(dᵀd)(dᵀq),      Ŝ = fl(Ĝ²),

    and products of a matrix and a vector in float32 are off by a factor `1 ± γ_m`.
    """
    m = len(G)
    g, short_g = gram_spread(n), gamma(m + 8, torch.float32)
    if log_q is not None and not bool(log_q.detach().abs().amax() <= 8):
        return None
    squares = G.detach().diagonal()
    least, largest = squares.amin(), squares.amax()
    if not bool((least >= 2.0**-30 * largest) & (largest > 2.0**-40) & (largest < 2.0**40)):
        return None
    q = torch.ones(m, dtype=G.dtype, device=G.device) if log_q is None else log_q.exp()
    tiny = 4 * (n + m) * torch.finfo(torch.float32).tiny
    d = ((g / (1 - g) * 1.01) * G.diagonal() + tiny).sqrt()
    size = G.abs()
    a = size @ q
    wide_q, wide_d, wide_a = q.double(), d.double(), a.double()
    dq = (wide_d * wide_q).sum()
    if t == 1:
        total = wide_a + wide_d * dq
    else:
        h = (size @ torch.stack([a, d], 1)).double()
        power = Square.apply(G).abs() @ q
        total = (
            power.double()
            + short_g * h[:, 0]
            + h[:, 1] * dq
            + wide_d * ((wide_d * wide_a).sum() + wide_d.square().sum() * dq)
        )
        total = total + m * tiny * wide_q.sum()
    return total / wide_q * (1 + 4 * short_g)
