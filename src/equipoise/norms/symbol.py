"""The symbol of a convolution, `E(ω) = Σ_a K_a e^{-ia·ω}`, and its Gram matrices with a bound on every rounding.

`E*E(ω) = Σ_b C_b e^{-ib·ω}` with the autocorrelation `C_b = Σ_a K_a* K_{a+b}`: forming the few matrices C_b once (in float64)
and evaluating them where needed by one matrix product is far cheaper than a Gram product at every frequency.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from equipoise.core.precision import frobenius, gamma, inflate, unit_roundoff, working_dtype
from equipoise.norms.gram import adjoint, small_side, wide


def tap_positions(lengths: tuple[int, ...]) -> Tensor:
    """`(taps, dims)`: the position of every tap, the last axis fastest."""
    return torch.tensor(list(itertools.product(*map(range, lengths))), dtype=torch.float64)


def half_lattice(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """One offset b of each pair ±b, the first is 0.

    >>> half_lattice((2,)), len(half_lattice((3, 3)))
    ([(0,), (1,)], 13)
    """
    spans = [range(-(n - 1), n) for n in lengths]
    return [b for b in itertools.product(*spans) if b >= (0,) * len(lengths)]


def autocorrelation(kernel: Tensor) -> Tensor:
    """`C_b (g, B, c, c)` of `kernel (g, m, c, *lengths)` in its own arithmetic, for the offsets of the half lattice.

    Taps that lie side by side along the last axis meet side by side as well, so each offset is one long product. Every entry
    of C_b is a sum of at most m·taps products in some order, so it is off by at most `γ·Σ_a|K_a|ᵀ|K_{a+b}|`; summed over all ±b
    that is `γ·SᵀS` with `S = Σ_a|K_a|`, whose norm is at most `γ‖S‖_F²` (`correlation_error`).

    >>> autocorrelation(torch.tensor([[[[1.0, 2.0]]]], dtype=torch.float64)).flatten().tolist()  # 1·1 + 2·2 and 1·2
    [5.0, 2.0]
    """
    groups, m, c = kernel.shape[:3]
    lengths = tuple(kernel.shape[3:])
    last = lengths[-1]
    taps = kernel.movedim((1, 2), (-2, -1)).reshape(groups, *lengths[:-1], last * m, c)
    result = []
    for b in half_lattice(lengths):
        left, right = taps, taps
        for axis, shift in enumerate(b[:-1], start=1):
            count = lengths[axis - 1] - abs(shift)
            left = left.narrow(axis, max(0, -shift), count)
            right = right.narrow(axis, max(0, shift), count)
        count = (last - abs(b[-1])) * m
        left = left.narrow(-2, max(0, -b[-1]) * m, count).reshape(groups, -1, c)
        right = right.narrow(-2, max(0, b[-1]) * m, count).reshape(groups, -1, c)
        result.append(adjoint(left) @ right)
    return torch.stack(result, 1)


def correlation_error(kernel: Tensor) -> float:
    """Norm of the sum over all ±b of what the entries of `autocorrelation` may be off by, as a multiple of `‖Σ_a|K_a|‖_F²`."""
    return 2 * gamma(2 * kernel.shape[1] * math.prod(kernel.shape[3:]) + 8, torch.float64)


@dataclass
class Symbol:
    """Frequency view of `kernel (g, m, c, *lengths)` in float64 or complex128 with c ≤ m.

    `gram(groups, omega, dtype)` gives `E*E`, and `gram_error(dtype)` bounds the spectral norm of what it misses, for every
    frequency.
    """

    kernel: Tensor
    offsets: Tensor  # (B, dims) half lattice of autocorrelation offsets, the first is 0
    correlations: Tensor | None  # (g, B, c, c); None: Gram products are formed at every frequency instead
    adjoint: bool = False  # the kernel is that of the adjoint operator (fewer columns)
    _parts: dict[torch.dtype, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _inner: dict[torch.dtype, list[Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, kernel: Tensor, frequencies: int) -> Symbol:
        """Build the symbol.

        Args:
            kernel: `(g, co, ci, *lengths)`.
            frequencies: roughly at how many it will be evaluated.
        """
        kernel = wide(kernel)
        swapped = kernel.shape[1] < kernel.shape[2]
        if swapped:  # same norm at every frequency
            kernel = small_side(kernel.movedim((1, 2), (-2, -1))).movedim((-2, -1), (1, 2))
            kernel = kernel.flip(tuple(range(3, kernel.dim())))
        lengths = tuple(kernel.shape[3:])
        m, c = kernel.shape[1:3]
        half = half_lattice(lengths)
        taps = math.prod(lengths)
        by_taps = taps * (taps + 1) * m * c * c + 4 * frequencies * len(half) * c * c
        by_frequency = frequencies * (4 * taps * m * c + 6 * m * c * c)
        offsets = torch.tensor(half, dtype=torch.float64, device=kernel.device)
        correlations = None if by_taps > 2 * by_frequency else autocorrelation(kernel)
        return cls(kernel, offsets, correlations, swapped)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Kernel size per axis on the lattice."""
        return tuple(self.kernel.shape[3:])

    @property
    def taps(self) -> int:
        """Number of taps."""
        return math.prod(self.lengths)

    @cached_property
    def size(self) -> Tensor:
        """`‖Σ_a|K_a|‖_F` per group: bounds ‖E(ω)‖_F for every ω, and scales every rounding error."""
        return inflate(frobenius(self.kernel.abs().flatten(3).sum(-1)) * (1 + gamma(self.taps + 4, torch.float64)))

    def phase_error(self) -> float:
        """Bound on the error of a computed `e^{-ib·ω}` in float64, `|ω_j| ≤ 2π`, argument and function together."""
        u = unit_roundoff(torch.float64)
        return 8 * u * (1 + 2 * math.pi * sum(self.lengths))

    def at(self, groups: Tensor, omega: Tensor) -> Tensor:
        """`E(ω)` itself as complex128 `(F, m, c)`, for few frequencies; off by at most `at_error`."""
        angle = omega @ tap_positions(self.lengths).to(omega.device).mT  # (F, taps)
        phases = torch.complex(angle.cos(), -angle.sin())
        m, c = self.kernel.shape[1:3]
        taps = self.kernel.flatten(3).movedim(3, 1).flatten(2).to(phases.dtype)  # (g, taps, m·c)
        return _combine(phases, taps, groups).reshape(-1, m, c)

    def at_error(self) -> Tensor:
        """Bound per group on the Frobenius error of `at`."""
        return inflate((gamma(2 * self.taps + 8, torch.float64) + self.phase_error()) * 2 * self.size)

    @property
    def bytes_per_frequency(self) -> int:
        """Roughly what one frequency occupies while its Gram matrix is formed and read (float32)."""
        m, c = self.kernel.shape[1:3]
        direct = 4 * (self.taps + m * c) if self.correlations is None else 2 * len(self.offsets)
        return 8 * (c * c + direct)

    def gram(self, groups: Tensor, omega: Tensor, dtype: torch.dtype) -> Tensor:
        """`E*E(ω)` `(F, c, c)`, each row for its own group, in the complex type of a real `dtype`."""
        if self.correlations is None:
            E = self.at(groups, omega)
            re, im = E.real, E.imag
            cross = re.mT @ im
            X, Y = re.mT @ re + im.mT @ im, cross - cross.mT
            return torch.complex(X.to(dtype), Y.to(dtype))
        c = self.kernel.shape[2]
        weights = [w.to(dtype) for w in self._weights(omega)]
        X, Y = (_combine(w, part, groups) for w, part in zip(weights, self._coefficients(dtype), strict=True))
        return torch.complex(X, Y).reshape(-1, c, c)

    def gram_sizes(self, groups: Tensor, omega: Tensor, dtype: torch.dtype) -> Tensor:
        """Bounds of `‖gram‖_F` (before the rounding that `gram_error` covers) without a Gram matrix: `Σ w_b w_b' ⟨P_b, P_b'⟩`.

        Each inner product of coefficients of length c² is off by at most γ times the product of their lengths.
        """
        if self.correlations is None:
            return frobenius(self.gram(groups, omega, dtype))
        c = self.kernel.shape[2]
        total = torch.zeros(len(omega), dtype=torch.float64, device=omega.device)
        for w, inner in zip(self._weights(omega), self._inner_products(dtype), strict=True):
            lengths = inflate(inner.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt())
            form = (_combine(w, inner, groups) * w).sum(-1)
            spread = _combine(w.abs(), lengths[..., None], groups)[:, 0].square()
            slack = 2 * gamma(c + 8, dtype) + gamma(2 * c + 4 * inner.shape[-1] + 16, torch.float64)
            total += inflate((form + 4 * (slack + self.phase_error()) * spread).clamp_min(0))
        return inflate(total.sqrt()) + c * float(torch.finfo(dtype).tiny) ** 0.5

    def gram_error(self, dtype: torch.dtype) -> Tensor:
        """Bound per group on `‖E*E(ω) − gram‖₂`, over all frequencies."""
        u64, S = torch.float64, self.size
        m, taps = self.kernel.shape[1], self.taps
        cast = 4 * unit_roundoff(dtype)
        if self.correlations is None:
            inner = inflate(2 * gamma(2 * m + 8, u64) * S.square() + 3 * self.at_error() * S)
            return inflate(inner + (cast if dtype is not u64 else 0.0) * S.square()) + 1e-290
        formed = correlation_error(self.kernel) * S.square()
        evaluated = 4 * (gamma(2 * len(self.offsets) + 8, dtype) + cast + self.phase_error()) * self._correlation_size
        return inflate(formed + evaluated) + 1e-290 + 1e3 * float(torch.finfo(dtype).tiny) * m * taps

    @cached_property
    def _correlation_size(self) -> Tensor:
        assert self.correlations is not None
        return frobenius(self.correlations.abs().sum(1)) * 2

    @cached_property
    def variation(self) -> Tensor | None:
        """`(g, B)` of `2‖C_b‖_F`: how much `E*E` can vary with the frequency; None where not formed."""
        if self.correlations is None:
            return None
        norms = 2 * frobenius(self.correlations)
        norms[:, 0] = 0
        return inflate(norms)

    def _weights(self, omega: Tensor) -> tuple[Tensor, Tensor]:
        """What the coefficients of the real and of the imaginary part are multiplied by."""
        angle = omega @ self.offsets.mT  # (F, B)
        cos, sin = angle.cos(), angle.sin()
        if not self.kernel.is_complex():
            return cos, sin
        both = torch.cat([cos, sin], 1)
        return both, both

    def _coefficients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Coefficients `(g, B, c²)` of the real and the imaginary part. With `C_b = P + iQ` and θ = b·ω:

        `Re E*E = Σ (P + Pᵀ) cos θ + (Q + Qᵀ) sin θ`, `Im E*E = Σ (Pᵀ − P) sin θ + (Q − Qᵀ) cos θ`.
        """
        assert self.correlations is not None
        if dtype in self._parts:
            return self._parts[dtype]
        C = self.correlations.to(working_dtype(self.correlations.dtype, dtype))
        P = C.real if C.is_complex() else C
        even, odd = P + P.mT, P.mT - P
        even[:, 0] = P[:, 0]  # the offset 0 stands once, not twice
        if C.is_complex():
            Q = C.imag
            mixed, skew = Q + Q.mT, Q - Q.mT
            mixed[:, 0], skew[:, 0] = 0, Q[:, 0]
            even, odd = torch.cat([even, mixed], 1), torch.cat([skew, odd], 1)
        self._parts[dtype] = (even.flatten(2), odd.flatten(2))
        return self._parts[dtype]

    def _inner_products(self, dtype: torch.dtype) -> list[Tensor]:
        """`(g, B, B)`: inner products of the coefficients of the real and of the imaginary part.

        They are summed over rows of c numbers in `dtype`, and over the rows in float64.
        """
        if dtype not in self._inner:
            c = self.kernel.shape[2]
            rows = (part.unflatten(2, (c, c)).transpose(1, 2) for part in self._coefficients(dtype))  # (g, c, B, c)
            self._inner[dtype] = [(r @ r.mT).double().sum(1) for r in rows]
        return self._inner[dtype]


def _combine(weights: Tensor, parts: Tensor, groups: Tensor) -> Tensor:
    """`Σ_b weights[f, b]·parts[groups[f], b]` for every row f; nothing is asked of the device where there is one group."""
    if parts.shape[0] == 1:
        return weights @ parts[0]
    if parts.shape[-1] <= 64:
        return (weights[:, None] @ parts[groups])[:, 0]
    result = weights.new_empty(len(groups), parts.shape[-1])
    for g in groups.unique().tolist():
        rows = groups == g
        result[rows] = weights[rows] @ parts[g]
    return result
