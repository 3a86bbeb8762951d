"""The autocorrelation `C_b = Σ_a K_a* K_{a+b}` of a kernel, by the route with the fewest products of matrices.

Pair by pair that is n(n + 1)/2 products for n taps. The polynomial `E*E(ω) = Σ_b C_b e^{-ib·ω}` is also known by its values on
a grid of `N = Π(2k_j − 1)` frequencies, of which a real kernel needs half: `C_b = N⁻¹ Σ_ω E*E(ω) e^{ib·ω}`. With `E = B + iC`,
`Re E*E = BᵀB + CᵀC` is a rank-2m update (one product's work) and `Im E*E = BᵀC − CᵀB` another product: 80 instead of 325 for
5×5 taps, 169 instead of 1225 for 7×7. For 3×3 taps (24 instead of 45) the transforms eat up what is gained.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core.precision import gamma, unit_roundoff
from equipoise.norms.gram import adjoint
from equipoise.norms.half import PIECE, add_product, gram_lower

#: from this many columns one rank-k update per frequency beats a batch of full products
SYRK_FROM = 48
#: what the transforms cost beside their products
DETOUR = 2.2
#: bytes of symbols held at once
CHUNK_BYTES = 2**25


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


def products(lengths: tuple[int, ...], real: bool) -> float:
    """How much the autocorrelation costs, in products of an m×c with an m×c matrix.

    >>> products((3, 3), True), round(products((7, 7), True))
    (45.0, 371)
    """
    by_pairs = math.prod(lengths) * (math.prod(lengths) + 1) / 2
    by_frequency = 2.0 * len(half_lattice(lengths)) - 1.5
    return min(by_pairs, DETOUR * by_frequency) if real else by_pairs


@dataclass(frozen=True)
class Autocorrelation:
    """`matrices (g, B, c, c)` for the offsets of the half lattice, in float64 (or complex128, or float32).

    The norms of what they miss, summed over all offsets ±b, are at most `error·S²` with `S = ‖Σ_a|K_a|‖_F`.
    """

    matrices: Tensor
    error: float


def rounding(kernel: Tensor, dtype: torch.dtype) -> float:
    """The error of an autocorrelation pair by pair in float64 or float32, where no entry of the kernel is larger than 1."""
    rows = kernel.shape[1] * math.prod(kernel.shape[3:])
    if dtype is torch.float32:  # pieces of at most PIECE rows; what underflows is far below one rounding
        return 2 * gamma(PIECE + rows // PIECE + math.prod(kernel.shape[3:]) + 16, dtype)
    return 2 * gamma(2 * rows + 8, dtype)


def autocorrelation(kernel: Tensor, dtype: torch.dtype = torch.float64) -> Autocorrelation:
    """Of `kernel (g, m, c, *lengths)` in float64 or complex128; in float32 for a real one with entries of at most 1, about 1.

    >>> found = autocorrelation(torch.tensor([[[[1.0, 2.0]]]], dtype=torch.float64)).matrices.flatten()
    >>> [round(float(x), 12) for x in found]  # 1·1 + 2·2 and 1·2
    [5.0, 2.0]
    """
    lengths = tuple(kernel.shape[3:])
    taps = math.prod(lengths)
    if dtype is torch.float64 and products(lengths, not kernel.is_complex()) < taps * (taps + 1) / 2:
        return by_frequency(kernel)
    return Autocorrelation(_by_pair(kernel if dtype is torch.float64 else kernel.to(dtype)), rounding(kernel, dtype))


def by_frequency(kernel: Tensor) -> Autocorrelation:
    """By Parseval the errors δ(ω) of `E*E(ω)` become errors with `Σ_b‖δ_b‖_F ≤ √N·max‖δ(ω)‖_F`; sums over ω add their own."""
    groups, m, c = kernel.shape[:3]
    lengths = tuple(kernel.shape[3:])
    half = half_lattice(lengths)
    sizes = torch.tensor([2 * n - 1 for n in lengths])
    points = torch.tensor(half)  # frequencies 2πj/N, one of each pair ±ω as well
    count = int(sizes.prod())

    def angle(a: Tensor, b: Tensor) -> Tensor:  # reduced exactly before it is rounded
        return ((a[:, None] * b[None]) % sizes * (2 * math.pi / sizes.double())).sum(-1).to(kernel.device)

    phases = angle(points, tap_positions(lengths).long())
    waves = torch.stack([phases.cos(), -phases.sin()], 1)  # (H, 2, taps)
    turns = angle(torch.tensor(half), points)
    weights = torch.full((len(half),), 2 / count, dtype=torch.float64, device=kernel.device)
    weights[0] = 1 / count
    even, odd = turns.cos() * weights, -turns.sin() * weights  # (B, H)
    flat = kernel.flatten(3).movedim(3, 0).reshape(math.prod(lengths), -1).contiguous()
    sums = [torch.zeros(len(half), groups * c * c, dtype=torch.float64, device=kernel.device) for _ in range(2)]
    for rows in torch.arange(len(half)).split(max(1, CHUNK_BYTES // (16 * groups * m * c))):
        E = waves[rows].flatten(0, 1) @ flat
        for total, w, G in zip(sums, (even, odd), _squares(E.reshape(len(rows), 2, groups, m, c)), strict=True):
            total.addmm_(w[:, rows], G.reshape(len(rows), -1))
    X, Y = (total.reshape(len(half), groups, c, c) for total in sums)
    X.tril_().diagonal(dim1=-2, dim2=-1).mul_(0.5)
    X = (X + Y) + (X - Y).mT  # the lower half of BᵀB + CᵀC mirrored, and BᵀC − CᵀB
    u64, taps = torch.float64, math.prod(lengths)
    phase = 8 * unit_roundoff(u64) * (1 + 2 * math.pi * sum(lengths))
    values = 2 * gamma(2 * m + 8, u64) + 6 * (gamma(2 * taps + 8, u64) + phase)
    error = 1.1 * (math.sqrt(count) * values + 2 * count * (gamma(3 * len(half) + 16, u64) + phase))
    return Autocorrelation(X.transpose(0, 1), error)


def _squares(E: Tensor) -> tuple[Tensor, Tensor]:
    """Of `E (F, 2, g, m, c)`, real and imaginary part: `BᵀB + CᵀC`, of which only the lower triangles count, and `BᵀC`."""
    count, _, groups, m, c = E.shape
    if c < SYRK_FROM or groups > 1 or E.device.type != "cpu":
        both, (re, im) = E.transpose(1, 2).reshape(-1, 2 * m, c), E.unbind(1)
        return (both.mT @ both).reshape(count, groups, c, c), re.mT @ im
    X, Y = E.new_empty(count, c, c), E.new_empty(count, c, c)
    for part, x, y in zip(E, X, Y, strict=True):
        x.copy_(gram_lower(part.reshape(2 * m, c)))
        torch.mm(part[0, 0].mT, part[1, 0], out=y)
    return X, Y


def _by_pair(kernel: Tensor) -> Tensor:
    """Taps that lie side by side along the last axis meet side by side as well: each such run is one long product."""
    groups, m, c = kernel.shape[:3]
    lengths = tuple(kernel.shape[3:])
    rows, last = math.prod(lengths[:-1]), lengths[-1]
    strides = [math.prod(lengths[i + 1 : -1]) for i in range(len(lengths) - 1)]
    taps = kernel.flatten(3).movedim(3, 1).reshape(groups, rows, last * m, c)
    offsets = half_lattice(lengths)
    result = kernel.new_zeros(len(offsets), groups, c, c)
    whole_update = groups == 1 and c >= SYRK_FROM and not kernel.is_complex() and kernel.device.type == "cpu"
    for total, b in zip(result, offsets, strict=True):
        if whole_update and not any(b):  # all taps with themselves: half a product
            half = torch.tril(gram_lower(taps.reshape(-1, c), taps.dtype))
            total.copy_(half + torch.tril(half, -1).mT)
            continue
        here, there = max(0, -b[-1]), max(0, b[-1])
        long, whole = (last - abs(b[-1])) * m, b[-1] == 0
        spans = [range(max(0, -x), n - max(0, x)) for x, n in zip(b[:-1], lengths[:-1], strict=True)]
        shift = sum(x * s for x, s in zip(b[:-1], strides, strict=True))
        starts = [sum(i * s for i, s in zip(a, strides, strict=True)) for a in itertools.product(*spans)]
        for first, count in _runs(starts) if whole else [(a, 1) for a in starts]:
            left = taps[:, first : first + count].flatten(1, 2)[:, here * m : here * m + count * long]
            right = taps[:, first + shift : first + shift + count].flatten(1, 2)[
                :, there * m : there * m + count * long
            ]
            piece = PIECE if taps.dtype is torch.float32 else left.shape[1]
            for x, y in zip(left.split(piece, 1), right.split(piece, 1), strict=True):
                if whole_update:
                    add_product(total[0], x[0], y[0])
                else:
                    torch.baddbmm(total, adjoint(x), y, out=total)
    return result.transpose(0, 1)


def _runs(places: list[int]) -> list[tuple[int, int]]:
    """Start and length of every run of consecutive numbers.

    >>> _runs([0, 1, 3])
    [(0, 2), (3, 1)]
    """
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][0] + found[-1][1] == place:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((place, 1))
    return found
