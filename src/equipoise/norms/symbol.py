"""The symbol of a convolution, `E(ω) = Σ_a K_a e^{-ia·ω}`, and its Gram matrices with a bound on every rounding.

`E*E(ω) = Σ_b C_b e^{-ib·ω}` with the autocorrelation `C_b = Σ_a K_a* K_{a+b}`: forming the few matrices C_b once (in float64)
and evaluating them where needed by one matrix product is far cheaper than a Gram product at every frequency.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from equipoise.core.precision import frobenius, gamma, inflate, unit_roundoff


def tap_positions(lengths: tuple[int, ...]) -> Tensor:
    """`(taps, dims)`: the position of every tap, the last axis fastest."""
    return torch.tensor(list(itertools.product(*map(range, lengths))), dtype=torch.float64)


@lru_cache(maxsize=16)
def grid_frequencies(sizes: tuple[int, ...]) -> Tensor:
    """The points 2πj/n of a grid in float64, one of each pair ±ω, whose symbols are conjugate.

    Args:
        sizes: points per axis.
    """
    grid = torch.tensor(sizes)
    points = torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, len(sizes))
    place = torch.tensor([math.prod(sizes[j + 1 :]) for j in range(len(sizes))])
    points = points[(points * place).sum(1) <= ((-points % grid) * place).sum(1)]
    return points * (2 * math.pi / grid.double())


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
        result.append(left.mT @ right)
    return torch.stack(result, 1)


def correlation_error(kernel: Tensor) -> float:
    """Norm of the sum over all ±b of what the entries of `autocorrelation` may be off by, as a multiple of `‖Σ_a|K_a|‖_F²`."""
    return 2 * gamma(2 * kernel.shape[1] * math.prod(kernel.shape[3:]) + 8, torch.float64)


def combining_pays(kernel: Sequence[int], frequencies: int) -> bool:
    """Whether Gram matrices are cheaper to combine from the autocorrelation than to form at every frequency.

    Args:
        kernel: the shape `(g, co, ci, *lengths)`.
        frequencies: how many there are.
    """
    m, c, taps = max(kernel[1:3]), min(kernel[1:3]), math.prod(kernel[3:])
    offsets = (math.prod(2 * k - 1 for k in kernel[3:]) + 1) // 2
    combined = taps * (taps + 1) * m * c * c + 4 * frequencies * offsets * c * c
    return combined < frequencies * (4 * taps * m * c + 6 * m * c * c)


def symbol_energy(kernel: Tensor) -> Tensor:
    """`sup_ω ‖E(ω)‖_F` per group, rounded up: a bound on the norm of the convolution with `kernel (g, co, ci, *k)`, zeros around.

    `‖E(ω)‖_F² = Σ_b c_b e^{ib·ω}` with `c_b = Σ_a ⟨K_a, K_{a+b}⟩` the autocorrelation of the taps, so `Σ_b |c_b|` bounds it for
    all frequencies at the price of one small Gram matrix; strides and borders can only lower the norm.

    >>> float(symbol_energy(torch.ones(1, 1, 1, 3))) >= 3
    True
    """
    sizes = kernel.shape[3:]
    taps = kernel.flatten(3).flatten(1, 2).mT.contiguous()  # groups, taps, co·ci
    # long sums round too much in the arithmetic of the kernel, and squares of small entries underflow in single precision
    if taps.shape[-1] * unit_roundoff(taps.dtype) > 1e-2 or taps.abs().max() < 1e-9:
        taps = taps.double()
    products = (taps @ taps.mT).double()

    # the offset of every pair of taps, as one number
    strides = [math.prod(2 * n - 1 for n in sizes[j + 1 :]) for j in range(len(sizes))]
    places = (tap_positions(sizes).long() * torch.tensor(strides)).sum(1)
    offsets = (places[:, None] - places + places.max()).flatten().to(kernel.device)
    sums = products.new_zeros(len(products), int(offsets.max()) + 1).index_add_(
        1, offsets, products.flatten(1)
    )

    # every product of taps is off by γ times the product of their lengths, and by what underflows
    lengths = inflate(frobenius(taps[:, :, None]).sum(-1))
    rounding = gamma(taps.shape[-1] + 8, taps.dtype) + gamma(taps.shape[1] ** 2 + 8, torch.float64)
    lost = 4 * taps[0].numel() * taps.shape[1] * torch.finfo(taps.dtype).tiny
    return inflate((sums.abs().sum(-1) + 2 * rounding * lengths**2 + lost).sqrt())


@dataclass
class Symbol:
    """Frequency view of `kernel (g, m, c, *lengths)` in float64 with c ≤ m.

    `gram(groups, omega, dtype)` gives `E*E`, and `gram_error(dtype)` bounds the spectral norm of what it misses, for every
    frequency.
    """

    kernel: Tensor
    offsets: Tensor  # (B, dims) half lattice of autocorrelation offsets, the first is 0
    # (g, B, c, c); None: Gram products are formed at every frequency instead
    correlations: Tensor | None
    adjoint: bool = False  # the kernel is that of the adjoint operator (fewer columns)
    _split: dict[torch.dtype, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, kernel: Tensor, frequencies: int) -> Symbol:
        """Build the symbol.

        Args:
            kernel: `(g, co, ci, *lengths)`.
            frequencies: roughly at how many of them every group will be evaluated.
        """
        kernel = kernel.double()
        swapped = kernel.shape[1] < kernel.shape[2]
        if swapped:  # same norm at every frequency
            kernel = kernel.transpose(1, 2).flip(tuple(range(3, kernel.dim())))
        offsets = torch.tensor(
            half_lattice(tuple(kernel.shape[3:])), dtype=torch.float64, device=kernel.device
        )
        correlations = (
            autocorrelation(kernel) if combining_pays(kernel.shape, frequencies) else None
        )
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
        return inflate(
            frobenius(self.kernel.abs().flatten(3).sum(-1))
            * (1 + gamma(self.taps + 4, torch.float64))
        )

    def phase_error(self) -> float:
        """Bound on the error of a computed `e^{-ib·ω}` in float64, `|ω_j| ≤ 2π`, argument and function together."""
        u = unit_roundoff(torch.float64)
        return 8 * u * (1 + 2 * math.pi * sum(self.lengths))

    @cached_property
    def energy(self) -> Tensor:
        """Bound of `‖E(ω)‖_F` per group, over all frequencies."""
        return symbol_energy(self.kernel)

    def at(self, groups: Tensor, omega: Tensor) -> Tensor:
        """`E(ω)` itself as complex128 `(F, m, c)`, for few frequencies; off by at most `at_error`.

        Args:
            groups: one group per row `(F,)`.
            omega: one frequency per row `(F, dims)`.
        """
        return torch.complex(*self._parts(groups, omega, torch.float64))

    def at_error(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Bound per group on the Frobenius error of E formed in `dtype`."""
        return inflate((gamma(2 * self.taps + 12, dtype) + self.phase_error()) * 2 * self.size)

    def _parts(self, groups: Tensor, omega: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Real and imaginary part of `E(ω)`, formed in `dtype`."""
        m, c = self.kernel.shape[1:3]
        angle = omega @ tap_positions(self.lengths).to(omega.device).mT  # (F, taps)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        taps = self.kernel.flatten(3).movedim(3, 1).flatten(2)  # (g, taps, m·c)
        re, im = (_combine(wave, taps.to(dtype), groups).reshape(-1, m, c) for wave in (cos, -sin))
        return re, im

    @property
    def bytes_per_frequency(self) -> int:
        """Roughly what one frequency occupies while its Gram matrix is formed and read (float32)."""
        m, c = self.kernel.shape[1:3]
        direct = 4 * (self.taps + m * c) if self.correlations is None else 2 * len(self.offsets)
        return 8 * (c * c + direct)

    def gram(self, groups: Tensor, omega: Tensor, dtype: torch.dtype) -> Tensor:
        """`E*E(ω)` `(F, c, c)`, each row for its own group, in the complex type of a real `dtype`.

        Args:
            groups: one group per row `(F,)`.
            omega: one frequency per row `(F, dims)`.
            dtype: float32 or float64.
        """
        if self.correlations is None:
            re, im = self._parts(groups, omega, dtype)
            cross = re.mT @ im
            return torch.complex(torch.baddbmm(re.mT @ re, im.mT, im), cross - cross.mT)
        c = self.kernel.shape[2]
        angle = omega @ self.offsets.mT  # (F, B)
        weights = [w.to(dtype) for w in (angle.cos(), angle.sin())]
        X, Y = (
            _combine(w, part, groups)
            for w, part in zip(weights, self._coefficients(dtype), strict=True)
        )
        return torch.complex(X, Y).reshape(-1, c, c)

    def gram_error(self, dtype: torch.dtype) -> Tensor:
        """Bound per group on `‖E*E(ω) − gram‖₂`, over all frequencies."""
        m = self.kernel.shape[1]
        lost = 1e-290 + 1e3 * float(torch.finfo(dtype).tiny) * m * self.taps
        if self.correlations is None:
            energy = self.energy + self.at_error(dtype)  # of what is formed
            return (
                inflate(
                    2 * gamma(2 * m + 8, dtype) * energy.square()
                    + 3 * self.at_error(dtype) * energy
                )
                + lost
            )
        formed = correlation_error(self.kernel) * self.size.square()
        rounding = (
            gamma(2 * len(self.offsets) + 8, dtype) + 4 * unit_roundoff(dtype) + self.phase_error()
        )
        return inflate(formed + 4 * rounding * self._correlation_size) + lost

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

    def _coefficients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Coefficients `(g, B, c²)` of the real and the imaginary part. With θ = b·ω:

        `Re E*E = Σ (C_b + C_bᵀ) cos θ`, `Im E*E = Σ (C_bᵀ − C_b) sin θ`.
        """
        assert self.correlations is not None
        if dtype in self._split:
            return self._split[dtype]
        C = self.correlations.to(dtype)
        even, odd = C + C.mT, C.mT - C
        even[:, 0] = C[:, 0]  # the offset 0 stands once, not twice
        self._split[dtype] = (even.flatten(2), odd.flatten(2))
        return self._split[dtype]


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
