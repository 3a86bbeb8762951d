"""The symbol of a convolution, `E(ω) = Σ_a K_a e^{-ia·ω}`, and its Gram matrices with a bound on every rounding.

`E*E(ω) = Σ_b C_b e^{-ib·ω}` with the autocorrelation `C_b = Σ_a K_a* K_{a+b}`: forming the few matrices C_b once (in float64)
and evaluating them where needed by one matrix product is far cheaper than a Gram product at every frequency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from equipoise.core.precision import frobenius, gamma, inflate, unit_roundoff, working_dtype
from equipoise.norms.autocorrelation import autocorrelation, half_lattice, products, rounding
from equipoise.norms.autocorrelation import tap_positions as tap_positions
from equipoise.norms.gram import small_side, wide
from equipoise.norms.lanczos import random_start

#: up to this many offsets real and imaginary part come from one product, zeros included
INTERLEAVED = 32
#: and up to this many columns, beyond which the zeros cost more than the passes they save
WHOLE_UP_TO = 160
#: from this many columns correlations in float32 are worth what they lose
NARROW_FROM = 128


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary part, contiguous."""
    return (x.real.contiguous(), x.imag.contiguous()) if x.is_complex() else (x, torch.zeros_like(x))


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
    formed: float = 0.0  # the norms of what the correlations miss, summed, are at most this times size²
    _cache: dict[torch.dtype, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _interleaved: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False)
    _inner: dict[torch.dtype, list[Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, kernel: Tensor, frequencies: int, share: float = 0.0) -> Symbol:
        """Build the symbol of `kernel (g, co, ci, *lengths)`; `frequencies` is roughly how many will be asked for.

        The correlations are formed in float32 where that moves `‖E‖²` by no more than this share of its maximum.
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
        needed = products(lengths, not kernel.is_complex())
        by_taps = 2 * needed * m * c * c + 4 * frequencies * len(half) * c * c
        by_frequency = frequencies * (4 * taps * m * c + 6 * m * c * c)
        offsets = torch.tensor(half, dtype=torch.float64, device=kernel.device)
        if by_taps > 2 * by_frequency:
            return cls(kernel, offsets, None, swapped)
        found = autocorrelation(kernel, torch.float32 if _narrow_enough(kernel, share) else torch.float64)
        return cls(kernel, offsets, found.matrices, swapped, found.error)

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
        E = phases.new_empty(len(groups), m, c)
        for g, rows in _by_group(groups, len(self.kernel)):
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
        return inflate((gamma(2 * self.taps + 8, torch.float64) + self.phase_error()) * 2 * self.size)

    def gram(
        self, groups: Tensor, omega: Tensor, dtype: torch.dtype, sign: int = 1, room: Room | None = None
    ) -> tuple[Tensor, Tensor]:
        """Real and imaginary part of `±E*E(ω)` `(F, c, c)` in a real `dtype`, each row for its own group."""
        if self.correlations is None:
            E = self.at(groups, omega)
            re, im = E.real, E.imag
            cross = re.mT @ im
            X, Y = (re.mT @ re + im.mT @ im).to(dtype), (cross - cross.mT).to(dtype)
            return (X, Y) if sign > 0 else (-X, -Y)
        c = self.kernel.shape[2]
        angle = omega @ self.offsets.mT  # (F, B)
        cos, sin = angle.cos().mul_(sign).to(dtype), angle.sin().mul_(sign).to(dtype)
        weights = (cos, sin) if not self.kernel.is_complex() else (torch.cat([cos, sin], 1),) * 2
        X, Y = (
            _combine(w, p, groups, None if room is None else room(i, (len(w), c * c), dtype))
            for i, (w, p) in enumerate(zip(weights, self._parts(dtype), strict=True))
        )
        return X.reshape(-1, c, c), Y.reshape(-1, c, c)

    def hermitian(
        self, groups: Tensor, omega: Tensor, dtype: torch.dtype, sign: int = 1, room: Room | None = None
    ) -> Tensor:
        """`±gram` as complex matrices, written in one pass where offsets and columns are few; with `room` into its tensors."""
        c = self.kernel.shape[2]
        if self.correlations is None or len(self.offsets) > INTERLEAVED or c > WHOLE_UP_TO:
            X, Y = self.gram(groups, omega, dtype, sign, room)
            return torch.complex(X, Y, out=None if room is None else room(2, X.shape, dtype.to_complex()))
        if dtype not in self._interleaved:
            real, imag = self._parts(dtype)
            if not self.kernel.is_complex():  # cosines make the real part, sines the imaginary one
                nothing = torch.zeros_like(real)
                real, imag = torch.cat([real, nothing], 1), torch.cat([nothing, imag], 1)
            self._interleaved[dtype] = torch.stack([real, imag], -1).flatten(2)  # (g, 2B, 2c²)
        angle = omega @ self.offsets.mT
        weights = torch.cat([angle.cos(), angle.sin()], 1).mul_(sign).to(dtype)
        out = None if room is None else room(0, (len(weights), 2 * c * c), dtype)
        return torch.view_as_complex(_combine(weights, self._interleaved[dtype], groups, out).reshape(-1, c, c, 2))

    def gram_sizes(self, groups: Tensor, omega: Tensor, dtype: torch.dtype) -> Tensor:
        """Bounds of `‖gram‖_F` (before the rounding that `gram_error` covers) without a Gram matrix: `Σ w_b w_b' ⟨P_b, P_b'⟩`."""
        assert self.correlations is not None
        angle = omega @ self.offsets.mT
        cos, sin = angle.cos(), angle.sin()
        weights = (cos, sin) if not self.kernel.is_complex() else (torch.cat([cos, sin], 1),) * 2
        c = self.kernel.shape[2]
        total = torch.zeros(len(omega), dtype=torch.float64, device=omega.device)
        if dtype not in self._inner:
            rows = (part.reshape(*part.shape[:2], c, c).transpose(1, 2) for part in self._parts(dtype))  # (g, c, B, c)
            self._inner[dtype] = [(r @ r.mT).double().sum(1) for r in rows]
        for w, inner in zip(weights, self._inner[dtype], strict=True):
            lengths = inflate(inner.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt())
            for g, here in _by_group(groups, len(self.kernel)):
                form = ((w[here] @ inner[g]) * w[here]).sum(-1)
                spread = (w[here].abs() @ lengths[g]).square()
                slack = (
                    2 * gamma(c + 8, dtype) + gamma(2 * c + 4 * len(inner[g]) + 8, torch.float64) + self.phase_error()
                )
                total[here] += inflate((form + 4 * slack * spread).clamp_min(0))
        tiny = c * float(torch.finfo(dtype).tiny) ** 0.5
        return inflate(total.sqrt()) + tiny

    def gram_error(self, dtype: torch.dtype) -> Tensor:
        """Bound per group on `‖E*E(ω) − gram‖₂`, over all frequencies."""
        u64, S = torch.float64, self.size
        m, taps = self.kernel.shape[1], self.taps
        cast = 4 * unit_roundoff(dtype)
        if self.correlations is None:
            inner = inflate(2 * gamma(2 * m + 8, u64) * S.square() + 3 * self.at_error() * S)
            return inflate(inner + (cast if dtype is not u64 else 0.0) * S.square()) + 1e-290
        formed = self.formed * S.square()
        total = self._correlation_size
        evaluated = 4 * (gamma(2 * len(self.offsets) + 8, dtype) + cast + self.phase_error()) * total
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


def _narrow_enough(kernel: Tensor, share: float) -> bool:
    """Whether correlations in float32 are off by at most that share of `‖E(0)‖²` in every group, which the maximum exceeds."""
    if kernel.shape[2] < NARROW_FROM or kernel.is_complex() or share <= rounding(kernel, torch.float32):
        return False
    if not 0.25 <= float(kernel.abs().max()) <= 1:  # the error is that of such entries
        return False
    size = frobenius(kernel.abs().flatten(3).sum(-1)).square()
    mean = kernel.flatten(3).sum(-1).float()
    v = random_start(mean.shape[-1], mean).expand(len(mean), -1)[..., None]
    for _ in range(8):  # an estimate
        v = mean.mT @ (mean @ (v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(1e-30)))
    return float(size.max()) * rounding(kernel, torch.float32) <= share * float(
        torch.linalg.vector_norm(v, dim=1).max()
    )


def _by_group(groups: Tensor, count: int) -> list[tuple[int, slice | Tensor]]:
    """Every group met and its rows; nothing is asked of the device where there is but one."""
    return [(0, slice(None))] if count == 1 else [(g, groups == g) for g in groups.unique().tolist()]


class Room:
    """Tensors that are written again and again: fresh memory would have to be cleared by the system every time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[int, Tensor] = {}

    def __call__(self, name: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of that shape, what it holds is what the last one of that name was given."""
        count = math.prod(shape)
        if name not in self._kept or self._kept[name].dtype is not dtype or self._kept[name].numel() < count:
            self._kept[name] = torch.empty(count, dtype=dtype, device=self.device)
        return self._kept[name][:count].view(*shape)


def _combine(weights: Tensor, parts: Tensor, groups: Tensor, out: Tensor | None = None) -> Tensor:
    """`Σ_b weights[f, b]·parts[groups[f], b]` for every row f; with one group into `out`, where it is given."""
    if parts.shape[0] == 1:
        return torch.mm(weights, parts[0], out=out)
    if parts.shape[-1] <= 64:
        return (weights[:, None] @ parts[groups])[:, 0]
    result = weights.new_empty(len(groups), parts.shape[-1])
    for g, rows in _by_group(groups, parts.shape[0]):
        result[rows] = weights[rows] @ parts[g]
    return result
