"""Differentiable bounds for training: `gram_norm` for matrices, `conv_norm` for convolutions.

Both return the plain Gram bound `s_t` (an upper bound in real arithmetic; its float32 value may fall below σ₁ by some 1e-6).
Whatever feeds a certificate uses `equipoise.spectral_norm` instead. The gradient is explicit,

    ∂s/∂W = W (W*W)^(2^t − 1) / s^(2^(t+1) − 1),

computed together with the value: no graph through the iterations is kept. Both are opaque operators to `torch.compile`, and stay
in float32 under autocast.

Reference: Delattre et al. 2023, §3 and appendix (gradient of the Gram iteration).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from equipoise.core.errors import InputError, Refused
from equipoise.core.precision import full_precision, rescaled, working_dtype
from equipoise.maps.geometry import Lattice, PaddingMode, circular_lattice, padding_norm, polyphase, zero_lattice
from equipoise.maps.linear import Convolution, convolution
from equipoise.norms.gram import adjoint, gram, gram_iterate, scaled, small_side
from equipoise.norms.supremum import Cells, grid_cells
from equipoise.norms.symbol import Symbol, tap_positions

#: bytes of Gram matrices held at once by `conv_norm`
CHUNK_BYTES = 64 * 2**20


def gram_norm(W: Tensor, iterations: int = 6) -> Tensor:
    """Differentiable `s_t = ‖W_t‖_F^(2^-t) ≥ σ₁` of matrices `(..., m, n)`, real or complex.

    `iterations = 0` is the Frobenius norm; each iteration squares the ratio σ₂/σ₁ that is left. The gradient of a zero matrix is
    zero. A second derivative is not available and raises.

    >>> W = torch.tensor([[3.0, 0.0], [0.0, 1.0]], requires_grad=True)
    >>> s = gram_norm(W)
    >>> s.backward()
    >>> round(s.item(), 4), W.grad.round(decimals=4).tolist()
    (3.0, [[1.0, 0.0], [0.0, 0.0]])
    """
    if W.dim() < 2 or W.numel() == 0:
        raise InputError(f"expected matrices of shape (..., m, n), got shape {tuple(W.shape)}")
    _check_iterations(iterations)
    W = W.to(working_dtype(W.dtype))
    want = torch.is_grad_enabled() and W.requires_grad
    return attach(W, *_gram_norm(W.detach(), iterations, want))


def conv_norm(
    K: Tensor,
    padding: PaddingMode = "zeros",
    stride: int | tuple[int, ...] = 1,
    input_size: int | tuple[int, ...] | None = None,
    iterations: int = 6,
    *,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    amount: list[tuple[int, int]] | None = None,
    grid: int = 32,
) -> Tensor:
    """Differentiable upper bound on the norm of the convolution with weight `K (out, in/groups, *k)`.

    `max_ω s_t(E(ω))` over the exact grid where the input size is known and small; else over `grid` points per unit of
    (k − 1)/2 times the factor `Π 1/cos(π(k_j − 1)/(2·n0_j))` that reaches the supremum over all frequencies (1.0 % for a 3×3
    kernel). Only the maximising frequency carries a gradient. Padding defaults to «same»; `amount` gives it per axis.

    >>> K = torch.randn(4, 4, 3, 3, requires_grad=True)
    >>> bound = conv_norm(K, input_size=16)
    >>> bound.backward()
    >>> K.grad.shape
    torch.Size([4, 4, 3, 3])
    """
    return map_norm(convolution(K, padding, stride, dilation, groups, amount, input_size), iterations, grid)


def map_norm(conv: Convolution, iterations: int = 6, grid: int = 32) -> Tensor:
    """`conv_norm` of a convolution with its geometry."""
    _check_iterations(iterations)
    if grid < 4:
        raise InputError(f"grid must be at least 4, got {grid}")
    conv, padding = conv.with_weight(conv.weight.to(working_dtype(conv.weight.dtype))), conv.padding
    factor = 1.0
    lattices: list[Lattice | None]
    if padding == "circular":
        found = [circular_lattice(axis) for axis in conv.axes]
        if any(f is None for f in found):
            raise Refused(
                f"circular padding with stride {conv.stride} on input size {conv.size}: outputs do not fall on a sublattice of "
                "the circle; use a size that the stride divides, or spectral_norm for a bound without gradient"
            )
        lattices = [f[0] for f in found if f is not None]
        factor = math.prod(f[1] for f in found if f is not None)
    else:
        if padding != "zeros":
            factor = math.prod(padding_norm(axis, padding) for axis in conv.axes)
            conv = conv.unpadded()
        lattices = [zero_lattice(axis) for axis in conv.axes]
    usable = [lattice for lattice in lattices if lattice is not None]
    if len(usable) < len(lattices):
        return conv.weight.sum() * 0.0
    kernel = polyphase(conv.kernel, usable)
    sizes = []
    for lattice, n in zip(usable, kernel.shape[3:], strict=True):
        coarse = max(1, math.ceil(grid * (n - 1) / 2))
        exact = lattice.size is not None and lattice.size <= 2 * coarse
        sizes.append(lattice.size if exact and lattice.size is not None else coarse)
        factor /= 1.0 if exact or n == 1 else math.cos(math.pi * (n - 1) / (2 * coarse))
    want = torch.is_grad_enabled() and kernel.requires_grad
    return attach(kernel, *_symbol_norm(kernel.detach(), sizes, iterations, want)) * factor


def _check_iterations(iterations: int) -> None:
    if not isinstance(iterations, int) or not 0 <= iterations <= 30:
        raise InputError(f"iterations must be a whole number from 0 to 30, got {iterations}")


def explicit_gradient(W: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """`(s, ∂s/∂W)` of `s = s_t(W)` for matrices `(..., m, n)`, in 2t − 1 products of the smaller side."""
    A, e = scaled(small_side(W.resolve_conj()))
    first, log2 = e.double(), e.double()
    power: Tensor | None = None  # Π_{i<t} (A*A)^(2^i) = (A*A)^(2^t − 1), rescaled
    shift = torch.zeros_like(first)
    last = A
    for i in range(iterations):
        last, e = scaled(gram(last))
        log2 = 2 * log2 + e
        if i == 0:
            power, shift = last, log2 - 2 * first
        else:
            assert power is not None
            power, e = scaled(power @ last)
            shift = shift + (log2 - 2.0 ** (i + 1) * first) + e
    norm = torch.linalg.matrix_norm(last).double()
    m = 2.0 ** (iterations + 1)
    log_s = (norm.clamp_min(1e-300).log2() + log2) * 2 / m
    zero = norm == 0
    s = torch.where(zero, torch.zeros_like(norm), torch.exp2(log_s))
    # W (W*W)^(2^t−1) / s^(m−1) with W = 2^first·A, so the exponents are (m−1)·first + shift − (m−1)·log2 s
    exponent = (m - 1) * (first - log_s) + shift
    direction = A if power is None else A @ power
    gradient = (
        direction * torch.where(zero, torch.zeros_like(norm), torch.exp2(exponent)).to(A.real.dtype)[..., None, None]
    )
    return s.to(A.real.dtype), adjoint(gradient) if W.shape[-2] < W.shape[-1] else gradient


def _value(W: Tensor, iterations: int) -> Tensor:
    A, log2 = gram_iterate(W.resolve_conj(), iterations)
    norm = torch.linalg.matrix_norm(A).double()
    s = torch.exp2((norm.clamp_min(1e-300).log2() + log2) * 2.0**-iterations)
    return torch.where(norm == 0, torch.zeros_like(s), s).to(A.real.dtype)


@torch.library.custom_op("equipoise::gram_norm", mutates_args=())
def _gram_norm(W: Tensor, iterations: int, want_gradient: bool) -> tuple[Tensor, Tensor]:
    with full_precision():
        if want_gradient:
            s, gradient = explicit_gradient(W, iterations)
            return s.clone(), gradient.contiguous()
        return _value(W, iterations).clone(), W.new_empty(0)


@_gram_norm.register_fake
def _(W: Tensor, iterations: int, want_gradient: bool) -> tuple[Tensor, Tensor]:
    s = W.new_empty(W.shape[:-2], dtype=W.dtype.to_real())
    return s, torch.empty_like(W, memory_format=torch.contiguous_format) if want_gradient else W.new_empty(0)


@torch.library.custom_op("equipoise::symbol_norm", mutates_args=())
def _symbol_norm(kernel: Tensor, sizes: list[int], iterations: int, want_gradient: bool) -> tuple[Tensor, Tensor]:
    """`max s_t(E(2πj/n))` over the grid and all groups, and its gradient with respect to the kernel.

    The kernel is brought near 1 by a power of two, so that no square overflows or vanishes; the gradient does not change.
    """
    with full_precision():
        kernel, e = rescaled(kernel)
        value, group, omega = _largest(kernel, sizes, iterations)
        if not want_gradient:
            return _back(value, e).to(kernel.real.dtype), kernel.new_empty(0)
        angle = tap_positions(kernel.shape[3:]).to(kernel.device) @ omega  # (taps,)
        complex_type = torch.complex128 if kernel.real.dtype is torch.float64 else torch.complex64
        phases = torch.complex(angle.cos(), -angle.sin()).to(complex_type)
        E = kernel[group].flatten(2).to(complex_type) @ phases
        s, dE = explicit_gradient(E, iterations)
        dK = dE[..., None] * phases.conj_physical()
        gradient = torch.zeros_like(kernel, memory_format=torch.contiguous_format)
        gradient[group] = (dK if kernel.is_complex() else dK.real).reshape(kernel.shape[1:])
        return _back(s, e).to(kernel.real.dtype), gradient


def _back(value: Tensor, e: int) -> Tensor:
    """`2^e·value` in float64, in two steps, since 2^e alone may overflow."""
    return value.double() * 2.0 ** (e // 2) * 2.0 ** (e - e // 2)


@_symbol_norm.register_fake
def _(kernel: Tensor, sizes: list[int], iterations: int, want_gradient: bool) -> tuple[Tensor, Tensor]:
    gradient = torch.empty_like(kernel, memory_format=torch.contiguous_format) if want_gradient else kernel.new_empty(0)
    return kernel.new_empty((), dtype=kernel.dtype.to_real()), gradient


def _largest(kernel: Tensor, sizes: list[int], iterations: int) -> tuple[Tensor, int, Tensor]:
    """The largest `s_t(E)` over grid and groups and where it is; `s_t` falls with t, so most frequencies need few products."""
    symbol = Symbol.of(kernel.detach(), math.prod(sizes) * kernel.shape[0])
    cells = grid_cells(symbol, tuple(sizes))
    if iterations == 0:
        sizes2 = torch.cat([_trace(symbol, cells.take(rows)) for rows in _chunks(cells.groups, symbol)])
        i = int(sizes2.argmax())
        return sizes2[i].sqrt(), int(cells.groups[i]), cells.omega[i]
    best, where = -math.inf, 0
    for rows in _chunks(cells.groups, symbol):
        part = cells.take(rows)
        X, Y = symbol.gram(part.groups, part.omega, kernel.real.dtype)
        log_s, index = _largest_of(X, Y, iterations, best)
        if log_s > best:
            best, where = log_s, int(rows[index])
    value = torch.tensor(best, dtype=torch.float64, device=kernel.device).exp2()
    return value, int(cells.groups[where]), cells.omega[where]


def _largest_of(X: Tensor, Y: Tensor, iterations: int, floor: float) -> tuple[float, int]:
    """Largest `log2 s_t` of a batch of Gram matrices `X + iY` and its index, as far as it exceeds `floor`."""
    log_s = _log_norm(X, Y) / 2
    some = log_s.topk(min(4, len(log_s))).indices
    final = _squared(X[some], Y[some], iterations, log_s[some], -math.inf)
    best, index = final.max(0)
    result, where = float(best), int(some[int(index)])
    rest = (log_s > max(result, floor)).nonzero()[:, 0]
    rest = rest[~torch.isin(rest, some)]
    if len(rest):
        final = _squared(X[rest], Y[rest], iterations, log_s[rest], max(result, floor))
        best, index = final.max(0)
        if float(best) > result:
            result, where = float(best), int(rest[int(index)])
    return result, where


def _squared(X: Tensor, Y: Tensor, iterations: int, log_s: Tensor, floor: float) -> Tensor:
    """`log2 s_t` after all iterations; a matrix whose bound falls to the floor is left there, it cannot be the largest."""
    result, rows = log_s.clone(), torch.arange(len(log_s), device=X.device)
    log2 = torch.zeros_like(log_s)
    for t in range(2, iterations + 1):
        size = torch.exp2(_log_norm(X, Y).nan_to_num(neginf=0.0).ceil())
        X, Y = (part / size.to(X.dtype)[:, None, None] for part in (X, Y))
        cross = X.mT @ Y
        X, Y = torch.baddbmm(X.mT @ X, Y.mT, Y), cross - cross.mT
        log2 = 2 * (log2 + size.log2())
        result[rows] = (_log_norm(X, Y) + log2) * 2.0**-t
        stay = result[rows] > floor
        if not bool(stay.any()):
            break
        X, Y, log2, rows = X[stay], Y[stay], log2[stay], rows[stay]
    return result


def _log_norm(X: Tensor, Y: Tensor) -> Tensor:
    total = torch.linalg.vector_norm(X, dim=-1).double().square().sum(-1)
    total = total + torch.linalg.vector_norm(Y, dim=-1).double().square().sum(-1)
    return total.log2() / 2


def _trace(symbol: Symbol, cells: Cells) -> Tensor:
    X, _ = symbol.gram(cells.groups, cells.omega, torch.float64)
    return torch.diagonal(X, dim1=-2, dim2=-1).sum(-1)


def _chunks(groups: Tensor, symbol: Symbol) -> tuple[Tensor, ...]:
    per = max(1, CHUNK_BYTES // symbol.bytes_per_frequency)
    return torch.arange(len(groups), device=groups.device).split(per)


class _Once(torch.autograd.Function):
    """`outer·gradient`; W is an argument so that a second derivative with respect to it is noticed, and refused."""

    generate_vmap_rule = True

    @staticmethod
    def forward(outer: Tensor, gradient: Tensor, W: Tensor) -> Tensor:
        return outer[(...,) + (None,) * (gradient.dim() - outer.dim())] * gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[None, None, None]:
        raise Refused(
            "gram_norm and conv_norm have an explicit first derivative only; for a second one run gram_norm_plain, "
            "which autograd differentiates through the iterations"
        )


class _Attached(torch.autograd.Function):
    """The value with its explicit gradient: forward hands the value through, backward scales the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(W: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[2])

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        W, gradient = ctx.saved_tensors
        return _Once.apply(outer[0], gradient, W), None, None


def attach(W: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """`value` as a function of W whose gradient is the given one; an empty gradient leaves the value as it is."""
    return _Attached.apply(W, value, gradient) if gradient.numel() else value
