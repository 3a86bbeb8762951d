"""Differentiable bounds for training and for layers: `gram_norm` for matrices, `conv_norm` for convolutions.

Both return the plain Gram bound `s_t` (an upper bound in real arithmetic; its float32 value may fall below σ₁ by some 1e-6).
Whatever feeds a certificate uses `equipoise.spectral_norm`, or `symbol_norm`, which says how far rounding may have moved it.
The gradient is explicit,

    ∂s/∂W = W (W*W)^(2^t − 1) / s^(2^(t+1) − 1),

computed together with the value: no graph through the iterations is kept. Both are opaque operators to `torch.compile`, and stay
in float32 under autocast.

For a convolution it is the largest of `s_t(ω) = ‖(E*E)^(2^(t−1))‖_F^(2^−t) ≥ ‖E(ω)‖` over a grid. `s_t(ω)` falls with t, so a
frequency whose bound has fallen to the final value of another one is left there; most are left before, because one Cholesky
factorisation shows that they lie below that value.

Reference: Delattre et al. 2023, §3 and appendix (gradient of the Gram iteration).
"""

from collections.abc import Sequence
from math import ceil, cos, inf, nan, pi, prod, sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise.core.errors import InputError, Refused
from equipoise.core.precision import full_precision, gamma, rescaled, unit_roundoff, working_dtype
from equipoise.maps.geometry import (
    PADDINGS,
    Lattice,
    PaddingMode,
    circular_lattice,
    integers,
    padding_norm,
    polyphase,
    zero_lattice,
)
from equipoise.maps.linear import Convolution, convolution
from equipoise.norms.cholesky import below
from equipoise.norms.gram import adjoint, entries_norm, iterated_norm, near_one, scaled, small_side
from equipoise.norms.symbol import Symbol, combining_pays, grid_frequencies, tap_positions

#: relative rounding error up to which `symbol_norm` computes in float32
MOST_ROUNDING = 8e-3
#: bytes of a batch of Gram matrices
CHUNK_BYTES = 2**23


def gram_norm(W: Tensor, iterations: int = 6) -> Tensor:
    """Differentiable `s_t = ‖W_t‖_F^(2^-t) ≥ σ₁` of matrices `(..., m, n)`, real or complex.

    `iterations = 0` is the Frobenius norm; each iteration squares the ratio σ₂/σ₁ that is left. The gradient of a zero matrix is
    zero. A second derivative is not available and raises.

    Args:
        W: matrices `(..., m, n)`, real or complex.
        iterations: Gram iterations.

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
    return attach(W, *_gram_norm(W.detach(), iterations, _differentiated(W)))


def conv_norm(
    K: Tensor,
    padding: PaddingMode | Literal["same", "valid"] | int | tuple[int, ...] = "same",
    stride: int | tuple[int, ...] = 1,
    input_size: int | tuple[int, ...] | None = None,
    iterations: int = 6,
    *,
    padding_mode: PaddingMode | None = None,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    amount: list[tuple[int, int]] | None = None,
    grid: int = 32,
) -> Tensor:
    """Differentiable upper bound on the norm of the convolution with weight `K (out, in/groups, *k)`.

    `max_ω s_t(E(ω))` over the exact grid where the input size is known and small; else over `grid` points per unit of
    (k − 1)/2 times the factor `Π 1/cos(π(k_j − 1)/(2·n0_j))` that reaches the supremum over all frequencies (1.0 % for a 3×3
    kernel). Only the maximising frequency carries a gradient.

    Padding as in `nn.Conv2d`: `padding` is a number of pixels (per axis), "same" (the default) or "valid", `padding_mode` says
    what it holds; the name of a mode in place of `padding` means «same» in that mode. `amount` gives both sides of each axis.

    Args:
        K: the weight.
        padding: a number of pixels (per axis), `same`, `valid`, or the name of a padding mode, which means `same` in that mode.
        stride: as in `nn.Conv2d`.
        input_size: spatial size of the input; None: the supremum over all sizes.
        iterations: Gram iterations.
        padding_mode: what the padding holds.
        dilation: as in `nn.Conv2d`.
        groups: as in `nn.Conv2d`.
        amount: pixels on both sides of each axis, in place of `padding`.
        grid: points per axis and unit of (k − 1)/2, where the exact grid is finer.

    >>> K = torch.randn(4, 4, 3, 3, requires_grad=True)
    >>> bound = conv_norm(K, input_size=16)
    >>> bound.backward()
    >>> K.grad.shape
    torch.Size([4, 4, 3, 3])
    >>> bool(conv_norm(K, padding=1, padding_mode="circular", input_size=16) <= bound * 1.02)
    True
    """
    mode = padding_mode or "zeros"
    if isinstance(padding, str) and padding in PADDINGS:
        if padding_mode not in (None, padding):
            raise InputError(
                f"padding={padding!r} and padding_mode={padding_mode!r} contradict each other; give one of them"
            )
        mode, padding = padding, "same"
    if padding != "same":
        if amount is not None:
            raise InputError(
                f"padding={padding!r} and amount= both say how much is padded; give one of them"
            )
        if isinstance(padding, str) and padding != "valid":
            raise InputError(
                f'padding must be a number of pixels, "same", "valid" or one of {PADDINGS}, got {padding!r}'
            )
        pixels = 0 if isinstance(padding, str) else padding
        amount = [(p, p) for p in integers(pixels, K.dim() - 2, "padding", 0)]
    return map_norm(
        convolution(K, mode, stride, dilation, groups, amount, input_size), iterations, grid
    )


def map_norm(conv: Convolution, iterations: int = 6, grid: int = 32) -> Tensor:
    """`conv_norm` of a convolution with its geometry.

    Args:
        conv: the convolution.
        iterations: Gram iterations.
        grid: points per axis and unit of (k − 1)/2.
    """
    _check_iterations(iterations)
    if grid < 4:
        raise InputError(f"grid must be at least 4, got {grid}")
    conv = conv.with_weight(conv.weight.to(working_dtype(conv.weight.dtype))).real_form()
    padding = conv.padding
    factor = 1.0
    lattices: list[Lattice | None]
    if padding == "circular":
        pairs = [circular_lattice(axis) for axis in conv.axes]
        if any(pair is None for pair in pairs):
            raise Refused(
                f"circular padding with stride {conv.stride} on input size {conv.size}: outputs do not fall on a sublattice of "
                "the circle; use a size that the stride divides, or spectral_norm for a bound without gradient"
            )
        lattices = [pair[0] for pair in pairs if pair is not None]
        factor = prod(pair[1] for pair in pairs if pair is not None)
    else:
        if padding != "zeros":
            factor = prod(padding_norm(axis, padding) for axis in conv.axes)
            conv = conv.unpadded()
        lattices = [zero_lattice(axis) for axis in conv.axes]
    usable = [lattice for lattice in lattices if lattice is not None]
    if len(usable) < len(lattices):
        return conv.weight.sum() * 0.0
    kernel = polyphase(conv.kernel, usable)
    sizes, reach = _points(kernel, grid, [lattice.size for lattice in usable])
    return _peak_of(kernel, sizes, iterations).to(kernel.dtype) * (factor * reach)


def symbol_norm(K: Tensor, iterations: int, grid: int) -> tuple[Tensor, float]:
    """`(s, δ)` with `sup_ω ‖E(ω)‖ ≤ s·(1 + δ)` for real kernels `K (g, co, ci, *taps)`: s float64, with its explicit gradient.

    `grid` is the number of points per axis and unit of (k − 1)/2. Products run in float32 where `rounding` is small.

    Args:
        K: real kernels.
        iterations: Gram iterations.
        grid: points per axis and unit of (k − 1)/2.

    >>> s, delta = symbol_norm(torch.ones(1, 1, 1, 3, 3), 6, 16)
    >>> bool(9 <= s * (1 + delta) <= 9.5)
    True
    """
    K = K.cpu() if K.device.type == "mps" else K
    sizes, factor = _points(K, grid, [None] * (K.dim() - 3))
    dtype, delta = _working(tuple(K.shape), tuple(sizes), K.dtype)
    return _peak_of(K.to(dtype), sizes, iterations) * factor, delta


def _working(
    shape: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.dtype, float]:
    """The dtype that products run in, and the δ of `rounding` in it."""
    points = len(grid_frequencies(sizes))
    wide = dtype is torch.float64 or rounding(shape, points, torch.float32) > MOST_ROUNDING
    chosen = torch.float64 if wide else torch.float32
    return chosen, rounding(shape, points, chosen)


#: shapes are constants to a compiler (what `torch.compiler.assume_constant_result` says)
vars(_working)["_dynamo_marked_constant"] = True


def rounding(kernel: Sequence[int], frequencies: int, dtype: torch.dtype) -> float:
    """δ for a real kernel of shape `(g, co, ci, *taps)`: the computed value times 1 + δ is an upper bound.

    With M = sup‖E‖, c the smaller and m the larger number of channels, and relative to M²:

    * E formed at the frequency is off by `γ·Σ‖K_a‖_F ≤ γ·√(taps·c)·M` (Parseval) in each of two parts, its Gram matrix by `γ·c`;
    * correlations C_b, where they are formed, are off by at most `8γ·taps·c` in float64, a Gram matrix combined from B of
      them by `8·(γ + 4u)·Σ‖C_b‖_F ≤ 8·(γ + 4u)·√(B·c)` (Parseval, see `Symbol`);
    * a product of the iteration is off by at most `γ·c`, and the error of level i counts `2^−i`.

    A root halves all of it; 1.5 stands where 1/2 would do.

    Args:
        kernel: the shape.
        frequencies: how many there are.
        dtype: arithmetic of the products.
    """
    m, c, taps = max(kernel[1:3]), min(kernel[1:3]), prod(kernel[3:])
    if combining_pays(kernel, frequencies):
        offsets = (prod(2 * k - 1 for k in kernel[3:]) + 1) // 2
        first = 8 * taps * c * (gamma(2 * m * taps + 8, torch.float64) + 1e-13 * sum(kernel[3:]))
        first += 8 * (gamma(2 * offsets + 8, dtype) + 4 * unit_roundoff(dtype)) * sqrt(offsets * c)
    else:
        first = 4 * gamma(taps + 8, dtype) * sqrt(taps * c) + c * gamma(2 * m + 8, dtype)
    return 1.5 * (first + c * gamma(2 * c + 8, dtype))


def _points(kernel: Tensor, grid: int, known: Sequence[int | None]) -> tuple[list[int], float]:
    """Points per axis and the factor from them to the supremum: the exact grid where it is known and not much finer."""
    sizes, factor = [], 1.0
    for n, size in zip(kernel.shape[3:], known, strict=True):
        coarse = max(1, ceil(grid * (n - 1) / 2))
        exact = size is not None and size <= 2 * coarse
        sizes.append(size if exact and size is not None else coarse)
        factor /= 1.0 if exact or n == 1 else cos(pi * (n - 1) / (2 * coarse))
    return sizes, factor


def _peak_of(kernel: Tensor, sizes: list[int], iterations: int) -> Tensor:
    """`max s_t` over the grid and the groups in float64, with its explicit gradient."""
    return attach(
        kernel, *_symbol_norm(kernel.detach(), sizes, iterations, _differentiated(kernel))
    )


def _differentiated(W: Tensor) -> bool:
    """Whether a derivative is wanted."""
    return torch.is_grad_enabled() and W.requires_grad


def _check_iterations(iterations: int) -> None:
    if not isinstance(iterations, int) or not 0 <= iterations <= 30:
        raise InputError(f"iterations must be a whole number from 0 to 30, got {iterations}")


def explicit_gradient(W: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """`(s, ∂s/∂W)` of `s = s_t(W)` for matrices `(..., m, n)`, in 2t − 1 products of the smaller side.

    Args:
        W: matrices `(..., m, n)`.
        iterations: Gram iterations.
    """
    A, e = scaled(small_side(W.resolve_conj()))
    first, log2 = e.double(), e.double()
    power: Tensor | None = None  # Π_{i<t} (A*A)^(2^i) = (A*A)^(2^t − 1), rescaled
    shift = torch.zeros_like(first)
    last = A
    for i in range(iterations):
        last, e = near_one(adjoint(last) @ last)  # of few matrices faster than `gram`'s real ones
        log2 = 2 * log2 + e
        if i == 0:
            power, shift = last, log2 - 2 * first
        else:
            assert power is not None
            power, e = near_one(power @ last)
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
        direction
        * torch.where(zero, torch.zeros_like(norm), torch.exp2(exponent)).to(A.real.dtype)[
            ..., None, None
        ]
    )
    return s.to(A.real.dtype), adjoint(gradient) if W.shape[-2] < W.shape[-1] else gradient


@torch.library.custom_op("equipoise::gram_norm", mutates_args=())
def _gram_norm(W: Tensor, iterations: int, want_gradient: bool) -> tuple[Tensor, Tensor]:
    with full_precision():
        if want_gradient:
            s, gradient = explicit_gradient(W, iterations)
            return s.clone(), gradient.contiguous()
        return iterated_norm(W.resolve_conj(), iterations).clone(), W.new_empty(0)


@_gram_norm.register_fake
def _(W: Tensor, iterations: int, want_gradient: bool) -> tuple[Tensor, Tensor]:
    s = W.new_empty(W.shape[:-2], dtype=W.dtype.to_real())
    return s, torch.empty_like(
        W, memory_format=torch.contiguous_format
    ) if want_gradient else W.new_empty(0)


@torch.library.custom_op("equipoise::symbol_norm", mutates_args=())
def _symbol_norm(
    kernel: Tensor, sizes: list[int], iterations: int, want_gradient: bool
) -> tuple[Tensor, Tensor]:
    """`max s_t(E(2πj/n))` over the grid and all groups in float64, and its gradient with respect to the kernel.

    The kernel is brought near 1 by a power of two, so that no square overflows or vanishes; the gradient does not change.
    """
    with full_precision(), torch.no_grad():
        if not bool(torch.isfinite(kernel).all()):
            nothing = torch.full_like(kernel, nan) if want_gradient else kernel.new_empty(0)
            return torch.full((), nan, dtype=torch.float64, device=kernel.device), nothing
        kernel, e = rescaled(kernel)
        omega = grid_frequencies(tuple(sizes)).to(kernel.device)
        value, group, row = _largest(kernel, omega, iterations)
        if not want_gradient:
            return _back(value, e), kernel.new_empty(0)
        angle = tap_positions(kernel.shape[3:]).to(kernel.device) @ omega[row]  # (taps,)
        complex_type = kernel.dtype.to_complex()
        phases = torch.complex(angle.cos(), -angle.sin()).to(complex_type)
        s, dE = explicit_gradient(kernel[group].flatten(2).to(complex_type) @ phases, iterations)
        dK = dE[..., None] * phases.conj_physical()
        gradient = torch.zeros_like(kernel, memory_format=torch.contiguous_format)
        gradient[group] = dK.real.reshape(kernel.shape[1:])
        return _back(torch.maximum(value, s.double()), e), gradient


@_symbol_norm.register_fake
def _(
    kernel: Tensor, sizes: list[int], iterations: int, want_gradient: bool
) -> tuple[Tensor, Tensor]:
    gradient = (
        torch.empty_like(kernel, memory_format=torch.contiguous_format)
        if want_gradient
        else kernel.new_empty(0)
    )
    return kernel.new_empty((), dtype=torch.float64), gradient


def _back(value: Tensor, e: int) -> Tensor:
    """`2^e·value` in float64, in two steps, since 2^e alone may overflow."""
    return value.double() * 2.0 ** (e // 2) * 2.0 ** (e - e // 2)


def _largest(kernel: Tensor, omega: Tensor, iterations: int) -> tuple[Tensor, int, int]:
    """The largest `s_t` in float64, its group and its frequency; `s_t` falls with t, so most frequencies need few products."""
    groups = kernel.shape[0]
    entries = max(kernel.shape[1] * kernel.shape[2], min(kernel.shape[1:3]) ** 2)
    symbol = Symbol.of(kernel, len(omega))
    per = max(1, CHUNK_BYTES // (2 * kernel.element_size() * groups * entries))
    best, where = -inf, 0
    for first in range(0, len(omega), per):
        part = omega[first : first + per].repeat_interleave(groups, 0)
        G = symbol.gram(torch.arange(len(part), device=part.device) % groups, part, kernel.dtype)
        if iterations:
            log_s = entries_norm(G).double().log2() / 2
        else:
            log_s = torch.diagonal(G, dim1=-2, dim2=-1).real.double().sum(-1).log2() / 2
        if first == 0:  # a first value to leave others behind
            best, where = _square(G, log_s, log_s.argmax()[None], iterations, best, where)
        log_value, row = _square(G, log_s, _unproved(G, log_s, best), iterations, best, -1)
        best, where = (log_value, first * groups + row) if row >= 0 else (best, where)
    value = torch.tensor(best, dtype=torch.float64, device=kernel.device).exp2()
    return value, where % groups, where // groups


def _unproved(G: Tensor, log_s: Tensor, best: float) -> Tensor:
    """Which of the Gram matrices are not proved to lie below `2^(2·best)`."""
    left = (log_s > best).nonzero()[:, 0]
    if not len(left) or best == -inf or left.device.type != "cpu":  # proofs run on the CPU
        return left
    tau = torch.full((len(left),), 2.0 ** (2 * best), dtype=torch.float64)
    return left[~below(G[left], tau)]


def _square(
    G: Tensor, log_s: Tensor, rows: Tensor, iterations: int, best: float, where: int
) -> tuple[float, int]:
    """`log2 s_t` of some rows as long as it exceeds `best`; the largest and its row, or `best` and `where`."""
    G, log_s = G[rows], log_s[rows]
    log2, norm = torch.zeros_like(log_s), 2 * log_s
    for t in range(1, max(1, iterations) + 1):
        if t > 1:
            size = norm.nan_to_num(neginf=0.0).ceil()
            G = G * torch.exp2(-size).to(G.real.dtype)[:, None, None]
            G = G @ G  # Hermitian
            log2, norm = 2 * (log2 + size), entries_norm(G).double().log2()
            log_s = (norm + log2) * 2.0**-t
        stay = (log_s > best).nonzero()[:, 0]
        if not len(stay):
            return best, where
        if 4 * len(stay) < 3 * len(rows):
            G, log2, norm, log_s, rows = G[stay], log2[stay], norm[stay], log_s[stay], rows[stay]
    top = int(log_s.argmax())
    return float(log_s[top]), int(rows[top])


class _Attached(torch.autograd.Function):
    """The value with its explicit gradient: forward hands the value through, backward scales the gradient.

    What backward returns is attached to W without a gradient, so that a second derivative is noticed, and refused.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(W: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        """The value.

        Args:
            W: the argument.
            value: of the function there.
            gradient: its gradient.
        """

        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the gradient.

        Args:
            ctx: autograd's context.
            inputs: those of `forward`.
            output: that of `forward`.
        """

        ctx.save_for_backward(inputs[0], inputs[2])

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        W, gradient = ctx.saved_tensors
        if not gradient.numel():
            raise Refused(
                "gram_norm and conv_norm have an explicit first derivative only; for a second one run gram_norm_plain, "
                "which autograd differentiates through the iterations"
            )
        factor = outer[0][(...,) + (None,) * (gradient.dim() - outer[0].dim())]
        scaled = factor.to(gradient.real.dtype) * gradient
        return _Attached.apply(W, scaled, gradient.new_empty(0)), None, None


def attach(W: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """`value` as a function of W whose gradient is the given one; an empty gradient leaves the value as it is.

    Args:
        W: the argument.
        value: the value of the function there.
        gradient: its gradient, or an empty tensor.
    """
    if not gradient.numel():
        return value
    result: Tensor = _Attached.apply(W, value, gradient)
    return result
