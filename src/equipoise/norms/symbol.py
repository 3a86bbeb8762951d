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

from equipoise.core.precision import frobenius, gamma, unit_roundoff, up, working_dtype
from equipoise.norms.gram import adjoint, small_side, wide


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary part, contiguous."""
    return (x.real.contiguous(), x.imag.contiguous()) if x.is_complex() else (x, torch.zeros_like(x))


def tap_positions(lengths: tuple[int, ...]) -> Tensor:
    """`(taps, dims)`: the position of every tap, the last axis fastest."""
    return torch.tensor(list(itertools.product(*map(range, lengths))), dtype=torch.float64)


@dataclass
class Symbol:
    """Frequency view of `kernel (g, m, c, *lengths)` in float64 or complex128 with c ≤ m.

    `gram(groups, omega, dtype)` gives real and imaginary part of `E*E`, and `gram_error[dtype]` bounds the spectral norm of
    what they miss, for every frequency.
    """

    kernel: Tensor
    offsets: Tensor  # (B, dims) half lattice of autocorrelation offsets, the first is 0
    correlations: Tensor | None  # (g, B, c, c); None: Gram products are formed at every frequency instead
    adjoint: bool = False  # the kernel is that of the adjoint operator (fewer columns)
    _cache: dict[torch.dtype, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, kernel: Tensor, frequencies: int) -> Symbol:
        """Build the symbol of `kernel (g, co, ci, *lengths)`; `frequencies` is roughly how many will be asked for."""
        kernel = wide(kernel)
        swapped = kernel.shape[1] < kernel.shape[2]
        if swapped:  # same norm at every frequency
            kernel = small_side(kernel.movedim((1, 2), (-2, -1))).movedim((-2, -1), (1, 2))
            kernel = kernel.flip(tuple(range(3, kernel.dim())))
        lengths = kernel.shape[3:]
        m, c = kernel.shape[1:3]
        spans = [range(-(n - 1), n) for n in lengths]
        half = [b for b in itertools.product(*spans) if b >= (0,) * len(lengths)]
        taps = math.prod(lengths)
        by_taps = m * c * c * taps * (taps + 1) + 4 * frequencies * len(half) * c * c
        by_frequency = frequencies * (4 * taps * m * c + 6 * m * c * c)
        offsets = torch.tensor(half, dtype=torch.float64, device=kernel.device)
        correlations = _correlate(kernel, half) if by_taps <= 2 * by_frequency else None
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
        return up(frobenius(self.kernel.abs().flatten(3).sum(-1)) * (1 + gamma(self.taps + 4, torch.float64)))

    def phase_error(self) -> float:
        """Bound on the error of a computed `e^{-ib·ω}` in float64, `|ω_j| ≤ 2π`, argument and function together."""
        u = unit_roundoff(torch.float64)
        return 8 * u * (1 + 2 * math.pi * sum(self.lengths))

    def at(self, groups: Tensor, omega: Tensor) -> Tensor:
        """`E(ω)` itself as complex128 `(F, m, c)`, for few frequencies; off by at most `at_error`."""
        angle = omega @ tap_positions(self.lengths).to(omega.device).mT  # (F, taps)
        phases = torch.complex(angle.cos(), -angle.sin())
        m, c = self.kernel.shape[1:3]
        E = phases.new_empty(len(groups), m, c)
        for g in groups.unique():
            rows = groups == g
            E[rows] = (phases[rows] @ self.kernel[g].flatten(2).permute(2, 0, 1).flatten(1).to(phases.dtype)).reshape(
                -1, m, c
            )
        return E

    @property
    def bytes_per_frequency(self) -> int:
        """Roughly what one frequency occupies while its Gram matrix is formed and read (float32)."""
        m, c = self.kernel.shape[1:3]
        direct = 4 * (self.taps + m * c) if self.correlations is None else 2 * len(self.offsets)
        return 8 * (c * c + direct)

    def at_error(self) -> Tensor:
        """Bound per group on the Frobenius error of `at`."""
        return up((gamma(2 * self.taps + 8, torch.float64) + self.phase_error()) * 2 * self.size)

    def gram(self, groups: Tensor, omega: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Real and imaginary part of `E*E(ω)` `(F, c, c)` in a real `dtype`, each row for its own group."""
        if self.correlations is None:
            E = self.at(groups, omega)
            re, im = E.real, E.imag
            cross = re.mT @ im
            return (re.mT @ re + im.mT @ im).to(dtype), (cross - cross.mT).to(dtype)
        c = self.kernel.shape[2]
        angle = omega @ self.offsets.mT  # (F, B)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        weights = (cos, sin) if not self.kernel.is_complex() else (torch.cat([cos, sin], 1),) * 2
        X, Y = (_combine(w, p, groups) for w, p in zip(weights, self._parts(dtype), strict=True))
        return X.reshape(-1, c, c), Y.reshape(-1, c, c)

    def gram_error(self, dtype: torch.dtype) -> Tensor:
        """Bound per group on `‖E*E(ω) − gram‖₂`, over all frequencies."""
        u64, S = torch.float64, self.size
        m, taps = self.kernel.shape[1], self.taps
        cast = 4 * unit_roundoff(dtype)
        if self.correlations is None:
            inner = up(2 * gamma(2 * m + 8, u64) * S.square() + 3 * self.at_error() * S)
            return up(inner + (cast if dtype is not u64 else 0.0) * S.square()) + 1e-290
        formed = 2 * gamma(2 * m * taps + 8, u64) * S.square()
        total = self._correlation_size
        evaluated = 4 * (gamma(2 * len(self.offsets) + 8, dtype) + cast + self.phase_error()) * total
        return up(formed + evaluated) + 1e-290 + 1e3 * float(torch.finfo(dtype).tiny) * m * taps

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
        return up(norms)

    def _parts(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Coefficients `(g, B, c²)` of the real and the imaginary part. With `C_b = P + iQ` and θ = b·ω:

        `Re E*E = Σ (P + Pᵀ) cos θ + (Q + Qᵀ) sin θ`, `Im E*E = Σ (Pᵀ − P) sin θ + (Q − Qᵀ) cos θ`.
        """
        assert self.correlations is not None
        if dtype not in self._cache:
            narrow = self.correlations.to(working_dtype(self.correlations.dtype, dtype))
            P, Q = split(narrow)
            even, odd = P + P.mT, P.mT - P
            even[:, 0] = P[:, 0]  # the offset 0 stands once, not twice
            if self.kernel.is_complex():
                mixed, skew = Q + Q.mT, Q - Q.mT
                mixed[:, 0], skew[:, 0] = 0, Q[:, 0]
                even, odd = torch.cat([even, mixed], 1), torch.cat([skew, odd], 1)
            self._cache[dtype] = (even.flatten(2), odd.flatten(2))
        return self._cache[dtype]


def _combine(weights: Tensor, parts: Tensor, groups: Tensor) -> Tensor:
    """`Σ_b weights[f, b]·parts[groups[f], b]` for every row f."""
    if parts.shape[0] == 1:
        return weights @ parts[0]
    if parts.shape[-1] <= 64:
        return (weights[:, None] @ parts[groups])[:, 0]
    result = weights.new_empty(len(groups), parts.shape[-1])
    for g in groups.unique():
        rows = groups == g
        result[rows] = weights[rows] @ parts[g]
    return result


#: up to this many taps every pair is one product of contiguous matrices; beyond, one product per offset saves calls
_PAIRED_TAPS = 49


def _correlate(kernel: Tensor, offsets: list[tuple[int, ...]]) -> Tensor:
    """`C_b = Σ_a K_a* K_{a+b}` for each offset of the half lattice."""
    lengths = kernel.shape[3:]
    if math.prod(lengths) > _PAIRED_TAPS:
        return _correlate_by_offset(kernel, offsets)
    places = list(itertools.product(*map(range, lengths)))
    taps = dict(zip(places, kernel.flatten(3).movedim(3, 0).contiguous(), strict=True))  # each (g, m, c)
    result = kernel.new_zeros(len(offsets), kernel.shape[0], kernel.shape[2], kernel.shape[2])
    for total, b in zip(result, offsets, strict=True):
        for a in places:
            other = taps.get(tuple(i + j for i, j in zip(a, b, strict=True)))
            if other is not None:
                torch.baddbmm(total, adjoint(taps[a]), other, out=total)
    return result.transpose(0, 1)


def _correlate_by_offset(kernel: Tensor, offsets: list[tuple[int, ...]]) -> Tensor:
    result = []
    lengths = kernel.shape[3:]
    for b in offsets:
        here = tuple(slice(max(0, -x), n - max(0, x)) for x, n in zip(b, lengths, strict=True))
        there = tuple(slice(max(0, x), n - max(0, -x)) for x, n in zip(b, lengths, strict=True))
        left, right = (_shifted(kernel, part) for part in (here, there))  # (g, taps·m, c)
        result.append(adjoint(left) @ right)
    return torch.stack(result, 1)


def _shifted(kernel: Tensor, part: tuple[slice, ...]) -> Tensor:
    for i, piece in enumerate(part):
        kernel = kernel.narrow(3 + i, piece.start, piece.stop - piece.start)
    return kernel.flatten(3).movedim(3, 1).flatten(1, 2)
