"""Upper ends of convolutions for an audit: one verified Cholesky factorisation per frequency, shared with the batch norm.

An audit needs norms to a few per cent, and needs most of them twice: alone for the product, and with the batch norm that
follows for the fused total. With `G(ω) = E(ω)E(ω)*` on the output side, scaling the output channels by s turns `G` into `S G S`,
so the matrices `G` are formed once. Frequencies are the points of the grid of a circulant operator that contains the
convolution; where that grid is finer than needed, a coarse one with half-widths h per axis, and the cosine factor

    sup ‖E‖ ≤ max_grid ‖E‖ / cos(Σ_j D_j h_j),      D_j = (k_j − 1)/2   (see `norms.supremum`).

At every frequency `λ_max(G) ≤ τ` is proved by `norms.verify.below` in complex64, with the rounding of G as its error.
"""

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core.bounds import Bracket
from equipoise.core.precision import inflate, ldexp_down, ldexp_up, require_finite, rescaled
from equipoise.maps.geometry import Lattice, polyphase, zero_lattice
from equipoise.maps.linear import Convolution
from equipoise.norms.convolution import DENSE_ENTRIES, windowed_lower
from equipoise.norms.lanczos import lanczos, random_start
from equipoise.norms.supremum import grid_cells
from equipoise.norms.symbol import Symbol
from equipoise.norms.verify import below_formed, expected_loss

#: the tolerance from which this route is taken
COARSE = 0.02
#: bytes the Gram matrices of all frequencies may occupy
MOST_BYTES = 300_000_000
#: fewer channels than this are left to branch and bound
FEWEST = 32


@dataclass(frozen=True)
class Spectrum:
    """Gram matrices at every frequency `omega`, off by at most `error` in norm; true sup ≤ `factor`·max over them."""

    symbol: Symbol
    omega: Tensor
    error: float
    factor: float
    exponent: int
    windows: tuple[int, ...]
    sizes: Tensor  # Frobenius norms of the Gram matrices, rounded up

    def gram(self, rows: slice | Tensor, s: Tensor | None = None, sign: int = 1) -> Tensor:
        """`±S G S (F, c, c)` of some frequencies in complex64: they are formed when they are needed, and not kept."""
        omega = self.omega[rows]
        G = self.symbol.hermitian(torch.zeros(len(omega), dtype=torch.long), omega, torch.float32, sign)
        if s is not None:
            torch.view_as_real(G).mul_(torch.outer(s, s).float()[..., None])
        return G


def spectrum(conv: Convolution, rtol: float) -> Spectrum | None:
    """Gram matrices on the output side of a zero-padded, ungrouped convolution; None where that is not the cheap side."""
    if conv.padding != "zeros" or not conv.known or conv.groups != 1 or conv.weight.is_complex():
        return None
    if math.prod(conv.output_shape) * math.prod(conv.input_shape) <= DENSE_ENTRIES:
        return None  # small enough to be bounded as a matrix, borders included
    lattices = [zero_lattice(axis) for axis in conv.axes]
    known = [lattice for lattice in lattices if lattice is not None]
    if len(known) < len(lattices):
        return None
    kernel = polyphase(require_finite(conv.kernel), known)
    co, ci = kernel.shape[1:3]
    lengths = tuple(kernel.shape[3:])
    grid, factor = _grid(known, lengths, rtol * (0.7 if co <= 128 else 0.5))
    count = math.prod(grid) // 2 + 1
    if not FEWEST <= co <= ci or all(n == 1 for n in lengths) or count * co * co * 8 > MOST_BYTES:
        return None
    # the adjoint, taps first in memory: its input side is our output side
    taps, exponent = rescaled(kernel[0].flatten(2).flip(-1).permute(2, 1, 0).contiguous().double())
    taps = taps.reshape(*lengths, 1, ci, co).movedim((-3, -2, -1), (0, 1, 2))
    symbol = Symbol.of(taps, 4 * count, 2 / 3 * rtol)
    if symbol.correlations is None or symbol.adjoint:
        return None
    cells = grid_cells(symbol, grid).omega
    error = float(symbol.gram_error(torch.float32).max())
    windows = tuple(lattice.window_out for lattice in known)
    sizes = symbol.gram_sizes(torch.zeros(len(cells), dtype=torch.long), cells, torch.float32)
    return Spectrum(symbol, cells, error, factor, exponent, windows, sizes)


def _grid(lattices: list[Lattice], lengths: tuple[int, ...], share: float) -> tuple[tuple[int, ...], float]:
    """Points per axis and the cosine factor: coarse where the exact grid is finer than a loss of `share` needs."""
    degrees = [(n - 1) / 2 for n in lengths]
    turning = sum(d > 0 for d in degrees)
    allowed = math.acos(1 / (1 + share)) / max(1, turning)  # of one axis
    grid, turn = [], 0.0
    for lattice, degree in zip(lattices, degrees, strict=True):
        coarse = max(1, 2 * math.ceil(degree * math.pi / allowed / 2))
        assert lattice.size is not None
        if lattice.size <= coarse:
            grid.append(lattice.size)
        else:
            grid.append(coarse)
            turn += degree * math.pi / coarse
    return tuple(grid), inflate(1 / math.cos(turn * (1 + 1e-12))) if turn else 1.0


def pair(spec: Spectrum, rows: Tensor | None, rtol: float) -> tuple[Bracket, Bracket | None]:
    """Brackets of the convolution, and of it with the output channels multiplied by `rows`.

    One proof serves both where that costs little: if `λ_max(R G R) ≤ κ` for a diagonal R > 0, then `‖E‖² ≤ κ/min R²` and
    `‖S E‖² ≤ κ·max (s/R)²`. With a, b estimates of the two norms, `R = max(1/a, s/b)` makes both right up to √κ.
    """
    if rows is None:
        return _alone(spec, None, rtol), None
    size = rows.detach().double().abs()
    if not bool(torch.isfinite(size).all()) or float(size.max()) == 0:
        return _alone(spec, None, rtol), None
    s = size / float(size.max())
    near = spec.sizes.topk(min(2, len(spec.sizes))).indices
    a, b = (math.sqrt(_seen(spec, near, scale)[0]) for scale in (None, s))
    R = torch.maximum(torch.full_like(s, 1 / a), s / b)
    R = R / float(R.max())
    both = torch.stack([1 / R, s / R]).amax(1) / torch.tensor([a, b], dtype=torch.float64)
    start = _seen(spec, near, R)
    if math.sqrt(start[0]) * float(both.max()) > 1 + rtol / 2:
        return _alone(spec, None, rtol), _alone(spec, size, rtol)
    kappa, index, v = _scaled_proof(spec, R, rtol, start)
    found = []
    for rows_, spread in ((None, (1 / R).amax()), (s, (s / R).amax())):
        upper = inflate(inflate(math.sqrt(kappa)) * inflate(float(spread)))
        lower = _lower(spec, index, v, rows_)
        found.append(_bracket(spec, lower, upper, 1.0 if rows_ is None else float(size.max()), rtol, "shared proof"))
    return found[0], found[1]


def _alone(spec: Spectrum, rows: Tensor | None, rtol: float) -> Bracket:
    top = 1.0 if rows is None else float(rows.max())
    s = None if rows is None else rows / top
    tau, index, v = _scaled_proof(spec, s, rtol)
    return _bracket(spec, _lower(spec, index, v, s), inflate(math.sqrt(tau)), top, rtol, "Cholesky")


def _lower(spec: Spectrum, index: int, v: Tensor, scale: Tensor | None) -> float:
    return windowed_lower(spec.symbol, 0, spec.omega[index], v, spec.windows, scale)


def _bracket(spec: Spectrum, lower: float, upper: float, top: float, rtol: float, how: str) -> Bracket:
    upper = inflate(ldexp_up(inflate(upper * spec.factor), spec.exponent) * top)
    lower = min(ldexp_down(lower, spec.exponent) * top * (1 - 1e-12), sys.float_info.max)
    note = "" if upper <= (1 + rtol) * lower else "upper end for an audit; a smaller rtol closes the bracket"
    return Bracket(min(lower, upper), upper, rtol, f"symbol, {how}", note)


def _scaled_proof(
    spec: Spectrum, s: Tensor | None, rtol: float, start: tuple[float, int, Tensor] | None = None
) -> tuple[float, int, Tensor]:
    """`(τ, i, v)` with `λ_max(S G S) ≤ τ` proved at every frequency, for 0 ≤ s ≤ 1; `start` is the largest seen so far."""
    if start is None:
        start = _seen(spec, spec.sizes.topk(min(2, len(spec.sizes))).indices, s)
    s = s if s is not None and float(s.min()) < 1 else None
    error = torch.full((len(spec.omega),), spec.error, dtype=torch.float64)
    if s is not None:
        error = error + inflate(8 * 2.0**-24 * spec.sizes)  # entries off by a few roundings, none larger than before
    return _proved(spec, s, error, rtol / 2 if spec.factor > 1 else rtol, start)


def _proved(
    spec: Spectrum, s: Tensor | None, error: Tensor, rtol: float, start: tuple[float, int, Tensor]
) -> tuple[float, int, Tensor]:
    """`(τ, i, v)`: every `λ_max ≤ τ` is proved; matrix i was seen to be largest, with top vector v."""
    best, where, vector = start
    columns = spec.symbol.kernel.shape[2]
    loss = expected_loss(spec.gram(torch.tensor([where]), s)[0], best)
    slack, open_ = (
        max((1 + rtol) ** 2 - 1, 1.5 * loss + 0.01 + float(error.max()) / best),
        torch.arange(len(spec.omega)),
    )
    tau = best * (1 + slack)
    while len(open_):
        limit = torch.full((len(open_),), tau, dtype=torch.float64)
        rows = open_

        def negative(part: slice | Tensor, rows: Tensor = rows) -> Tensor:
            return spec.gram(rows[part], s, -1)

        open_ = rows[~below_formed(negative, columns, limit, error[rows], torch.complex64)]
        if not len(open_):
            break
        value, i, v = _seen(spec, open_[spec.sizes[open_].topk(min(3, len(open_))).indices], s)
        if value > best:
            best, where, vector = value, i, v
        tau = max(tau * (1 + slack / 4), best * (1 + slack))
    # frequencies proved below an earlier, smaller target lie below the last one as well
    return tau, where, vector


def _seen(spec: Spectrum, indices: Tensor, s: Tensor | None = None) -> tuple[float, int, Tensor]:
    """The largest eigenvalue of `S G S` met by short Lanczos runs at some frequencies: an estimate that steers."""
    matrices = spec.gram(indices, s)
    best, where, vector = 0.0, int(indices[0]), random_start(matrices.shape[-1], matrices)
    for i, G in zip(indices.tolist(), matrices, strict=True):
        v = lanczos(G.matmul, random_start(len(G), G), steps=12)
        v = v / torch.linalg.vector_norm(v)
        value = float(torch.linalg.vector_norm(G @ v))
        if value > best:
            best, where, vector = value, i, v
    return max(best, 1e-30), where, vector
