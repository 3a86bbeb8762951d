"""The proof of a convolution's norm carried frequency by frequency: what `carried` does for a matrix, for a whole symbol.

On an input of known size the convolution is a submatrix of a circulant operator, which falls apart into its symbol `E(ω_j)` on
a grid. Kept from the last proof, at the kernel S, are for every frequency a basis `V_j` of a few top right singular vectors,
`β_j` with `‖E_S(ω_j)x‖ ≤ β_j‖x‖` for `x ⟂ V_j`, and a bound `u_j ≥ ‖E_S(ω_j)‖`. For the kernel A of today, with
`d_j = ‖E_{A−κS}(ω_j)‖_F` (one small Gram matrix of the taps gives all of them),

    ‖E_A(ω_j)‖ ≤ κu_j + d_j,          and off V_j          ‖E_A(ω_j)x‖ ≤ (κβ_j + d_j)‖x‖,

so only the frequencies whose first bound is too large are looked at, by the Schur complement of `carried`, in complex128.
Everything kept follows from S alone, so that a stored proof is a stored S, and is made again when it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from equipoise.core.precision import deflate, frobenius, gamma, inflate, unit_roundoff
from equipoise.maps.geometry import Lattice, circular_lattice, is_whole_circle, polyphase, zero_lattice
from equipoise.maps.linear import Convolution
from equipoise.norms.convolution import windowed_lower
from equipoise.norms.lanczos import lanczos, random_start
from equipoise.norms.supremum import Search, grid_cells
from equipoise.norms.symbol import Symbol, tap_positions
from equipoise.norms.verify import below, verification_loss

#: numbers whose products are summed in the precision of the kernel
PIECE = 1024
#: columns followed at every frequency
COLUMNS = 8
#: from this many channels on, Cholesky factors of the rest are in double precision: the a-priori error grows with their square
WIDE = 200
#: bytes of matrices held at once
CHUNK_BYTES = 64 * 2**20
#: operators with fewer entries are bounded whole, borders included; grids with more points are left to branch and bound
FEWEST, MOST_POINTS = 1_500_000, 6000


@dataclass(frozen=True)
class Grid:
    """How a convolution of known size sits in a circulant: `‖conv‖ ≤ factor·max_j ‖E(ω_j)‖`."""

    lattices: tuple[Lattice, ...]
    factor: float
    exact: bool  # the circulant is the convolution itself

    @staticmethod
    def of(conv: Convolution, fewest: int = FEWEST) -> Grid | None:
        """None where the grid is no good way: unknown size, copying padding, tiny operators, huge grids, complex kernels."""
        if not conv.known or conv.padding not in ("zeros", "circular") or conv.kernel.is_complex():
            return None
        entries = math.prod(conv.input_shape) * conv.kernel.shape[0] * conv.kernel.shape[1]
        if entries * math.prod(axis.out or 0 for axis in conv.axes) <= fewest:
            return None
        if conv.padding == "circular":
            found = [circular_lattice(axis) for axis in conv.axes]
            lattices = tuple(f[0] for f in found if f is not None)
            factor, exact = math.prod(f[1] for f in found if f is not None), all(map(is_whole_circle, conv.axes))
        else:
            lattices = tuple(x for x in map(zero_lattice, conv.axes) if x is not None)
            factor, exact = 1.0, False
        if len(lattices) < len(conv.axes) or any(x.size is None for x in lattices):
            return None
        points = math.prod(x.size or 1 for x in lattices) * conv.kernel.shape[0]
        return Grid(lattices, inflate(factor) if factor > 1 else 1.0, exact) if points <= MOST_POINTS else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Points per axis."""
        return tuple(x.size or 1 for x in self.lattices)

    def symbol(self, conv: Convolution, weight: Tensor, correlated: bool) -> Symbol:
        """The symbol of this weight in float64."""
        kernel = polyphase(conv.geometry.grouped(weight.double()), list(self.lattices))
        return Symbol.of(kernel, math.prod(self.sizes) * kernel.shape[0] if correlated else 0)


@dataclass(frozen=True)
class SymbolReference:
    """What was proved at S: `V (F, c, k)`, its defect, `β` and `u` per frequency, and a lower bound of the operator."""

    V: Tensor
    defect: float
    beta: Tensor
    peaks: Tensor
    lower: float


def refer(grid: Grid, conv: Convolution, S: Tensor, symbol: Symbol | None = None) -> SymbolReference:
    """The proof at S, from S alone: Gram matrices in float32, deflated by their top spaces, Cholesky for the rest."""
    symbol = grid.symbol(conv, S, correlated=True) if symbol is None else symbol
    cells = grid_cells(symbol, grid.sizes)
    slack = symbol.gram_error(torch.float64)
    parts = []
    for rows in _chunks(len(cells), 48 * symbol.kernel.shape[2] ** 2):
        part = cells.take(rows)
        G = torch.complex(*symbol.gram(part.groups, part.omega, torch.float64))
        parts.append(_deflated(G, slack[part.groups]))
    V, defects, beta, peaks = (torch.cat(x) for x in zip(*parts, strict=True))
    top = int(peaks.argmax())
    group, omega, v = int(cells.groups[top]), cells.omega[top], V[top, :, -1].to(torch.complex128)
    if grid.exact:
        E = symbol.at(cells.groups[top : top + 1], omega[None])[0]
        y = E @ v
        g = gamma(4 * sum(E.shape) + 32, torch.float64)
        size = float(inflate(symbol.size[group]))
        lower = float(torch.linalg.vector_norm(y) / torch.linalg.vector_norm(v)) * (1 - g) - 4 * g * size
        lower = max(0.0, deflate(lower - float(symbol.at_error()[group])))
    else:
        sides = [x.window_out if symbol.adjoint else x.window for x in grid.lattices]
        lower = windowed_lower(symbol, group, omega, v, sides) if conv.padding == "zeros" else 0.0
    return SymbolReference(V, float(defects.max()), beta, peaks, lower)


def _deflated(G: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(V, defect, β, u)` per frequency from Gram matrices `G (F, c, c)` in complex128, off by at most `error`.

    For `x ⟂ V`, `x*Gx = x*(G − VZ* − ZV* + VMV*)x` whatever Z and M, and the matrix in brackets is small.
    """
    F, c = G.shape[0], G.shape[-1]
    k = min(COLUMNS, c)
    if c <= COLUMNS:
        V = torch.eye(c, dtype=torch.complex64, device=G.device).expand(F, c, c).contiguous()
    else:
        start = torch.randn(c, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        quick = G.to(torch.complex64)
        V = start.to(G.device, quick.dtype).expand(F, c, k)
        for _ in range(3):
            V = torch.linalg.qr(quick @ (quick @ V))[0]
        V = V @ torch.linalg.eigh((V.mH @ (quick @ V)).to(torch.complex128))[1].to(V.dtype)
    V = torch.where(torch.isfinite(torch.view_as_real(V)).flatten(1).all(1)[:, None, None], V, torch.zeros_like(V))
    V128 = V.to(torch.complex128)
    gap = V128.mH @ V128 - torch.eye(k, dtype=torch.complex128, device=G.device)
    defect = inflate(frobenius(gap) + gamma(4 * c + 16, torch.float64) * frobenius(V128).square())
    Z = G @ V128
    P = V128.mH @ Z
    sizes = frobenius(G) + 2 * frobenius(V128) * frobenius(Z) + frobenius(V128).square() * frobenius(P)
    beta = torch.zeros(F, dtype=torch.float64, device=G.device)
    if c > COLUMNS:
        H = G - V128 @ Z.mH - Z @ V128.mH + V128 @ (P @ V128.mH)
        rounding = 2 * gamma(4 * k + 32, torch.float64)
        if c < WIDE:
            H, rounding = H.to(torch.complex64), rounding + 4 * unit_roundoff(torch.float32)
        beta = _rest(H, inflate(error + rounding * sizes), torch.linalg.eigvalsh(P)[:, 0].clamp_min(0))
    off = frobenius(Z - V128 @ P) if c > COLUMNS else torch.zeros_like(beta)
    lost = inflate(1.01 * error + gamma(8 * c + 64, torch.float64) * 8 * frobenius(V128).square() * frobenius(G))
    p = _top(P, lost, defect)
    off = inflate((off + 2 * lost) / (1 - defect).clamp_min(0.5).sqrt())
    middle, half = (p + beta.square()) / 2, (p - beta.square()) / 2
    peaks = inflate(inflate(middle + inflate((half.square() + off.square()).sqrt())).sqrt())
    return V, defect, beta, torch.where(defect < 0.5, peaks, inflate((frobenius(G) + error).sqrt()))


def _top(P: Tensor, lost: Tensor, defect: Tensor) -> Tensor:
    """A proved bound of the largest eigenvalue of `P` against V*V, per frequency; its Frobenius norm where no proof was found."""
    P = (P + P.mH) / 2
    guess = torch.linalg.eigvalsh(P)[:, -1].clamp_min(0)
    tau = inflate(guess * (1 + 1e-9) + 2 * lost)
    proved = below(P, tau, lost)
    return inflate(torch.where(proved, tau, inflate(frobenius(P) + lost)) / (1 - defect).clamp_min(0.5))


def _rest(H: Tensor, error: Tensor, guess: Tensor) -> Tensor:
    """`β` per frequency with `λ_max(H) ≤ β²` proved, from the least Ritz value taken out, widened until Cholesky agrees."""
    tau = inflate(frobenius(H) + error)  # always true
    open_ = torch.arange(len(H), device=H.device)
    loss = verification_loss(H.shape[-1], H.dtype)
    for widen in (1.02, 1.08, 1.16, 1.4):
        tried = ((guess[open_] * widen + error[open_]) * (1 + 2 * loss)).clamp_max(1e30)
        useful = tried < tau[open_]
        proved = below(H[open_], tried, error[open_]) & useful
        tau[open_[proved]] = tried[proved]
        open_ = open_[~proved & useful]
        if not len(open_):
            break
    return inflate(inflate(tau).sqrt())


@lru_cache(maxsize=64)
def _waves(sizes: tuple[int, ...], lengths: tuple[int, ...], groups: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Group of every cell of a grid, cosines and sines of its angles at every tap, and what their rounding may cost."""
    symbol = Symbol.of(torch.zeros(groups, 1, 1, *lengths), 0)
    cells = grid_cells(symbol, sizes)
    angle = cells.omega @ tap_positions(lengths).mT
    return cells.groups, angle.cos(), angle.sin(), symbol.phase_error()


def drifts(grid: Grid, conv: Convolution, difference: Tensor) -> Tensor:
    """`‖E_D(ω_j)‖_F` for every frequency (and group), rounded up, from the Gram matrix of the taps of D.

    The inner products of the taps are formed in the precision of D over pieces of `PIECE` numbers and added in float64.
    """
    kernel = polyphase(conv.geometry.grouped(difference), list(grid.lattices))
    G, lengths = kernel.shape[0], tuple(kernel.shape[3:])
    rows = kernel.flatten(3).flatten(1, 2)  # groups, m·c, taps
    whole = rows.shape[1] // PIECE * PIECE
    pieces = rows[:, :whole].unflatten(1, (-1, PIECE))
    rest = rows[:, whole:]
    products = (pieces.mT @ pieces).sum(1, dtype=torch.float64) + (rest.mT @ rest).double()
    groups, cos, sin, phase = _waves(grid.sizes, lengths, G)
    groups, cos, sin = (x.to(kernel.device) for x in (groups, cos, sin))
    g, count = gamma(PIECE + 8, kernel.dtype), rows.shape[1]
    tiny = count * torch.finfo(kernel.dtype).tiny
    lengths_of = inflate((torch.diagonal(products, dim1=-2, dim2=-1) * (1 + 4 * g) + tiny).sqrt())
    size = inflate(lengths_of.sum(-1)).square()
    lost = (g + gamma(count + 2 * rows.shape[2] + 32, torch.float64) + 4 * phase) * size + rows.shape[2] ** 2 * tiny
    quadratic = sum(((x[:, None] @ products[groups])[:, 0] * x).sum(1) for x in (cos, sin))
    return inflate((quadratic + 4 * lost[groups]).clamp_min(0).sqrt())


def symbol_bracket(
    grid: Grid,
    conv: Convolution,
    A: Tensor,
    reference: SymbolReference,
    kappa: float,
    drift: Tensor,
    enough: float,
    rtol: float,
) -> tuple[float, float] | None:
    """`(value, upper)`: a proved upper bound of `factor·max_j ‖E_A(ω_j)‖`, and a value that this maximum reaches at least.

    The value says how tight the upper end is; it is no bound of the convolution itself where borders keep that below.
    None where the drift leaves no room.
    """
    carried = inflate(inflate(kappa * reference.peaks) + drift)
    rest = inflate(inflate(kappa * reference.beta) + drift)
    symbol = grid.symbol(conv, A, correlated=False)
    cells = grid_cells(symbol, grid.sizes)
    error = float(symbol.at_error().max())
    top = carried.topk(min(8, len(carried))).indices
    thin = _thin(symbol, cells.groups[top], cells.omega[top], reference.V[top])
    value = max(0.0, float(torch.linalg.eigvalsh(thin[0])[:, -1].max())) ** 0.5 * (1 - 1e-9)
    aim = max(enough / grid.factor, value * (1 + rtol / 2))
    if float(rest.max()) >= aim:
        return None
    active = (carried > aim).nonzero()[:, 0]
    upper = float(carried[carried <= aim].max()) if len(active) < len(carried) else 0.0
    if len(active):
        shape = symbol.kernel.shape
        pieces = [
            _thin(symbol, cells.groups[rows], cells.omega[rows], reference.V[rows])
            for rows in (active[chunk] for chunk in _chunks(len(active), 64 * shape[1] * shape[2]))
        ]
        P, R, errors, spreads = (torch.cat(x) for x in zip(*pieces, strict=True))
        value = max(value, max(0.0, float(torch.linalg.eigvalsh(P)[:, -1].max())) ** 0.5 * (1 - 1e-9))
        squares = inflate((rest[active] + error).square())
        found = _proved(P, R, errors, spreads, squares, reference.defect, symbol.kernel.shape[2] <= COLUMNS)
        if found is None:
            return None
        upper = max(upper, inflate(found + error))
    return value * grid.factor, inflate(upper * grid.factor)


def flat_bracket(
    grid: Grid, conv: Convolution, symbol: Symbol, enough: float, rtol: float
) -> tuple[float, float, float]:
    """`(lower, upper, value)` without a basis: every frequency by one factorisation, for symbols too flat for anything cheaper.

    `upper` is `enough` where that holds, else at most a factor `1 + rtol` above the value that the symbol reaches.
    """
    aim = deflate(enough / grid.factor)
    search = Search(symbol, 0.8 * rtol, math.prod(grid.sizes))
    found = search.over_grid(grid.sizes, aim)
    value = math.sqrt(search.best) * (1 - 1e-6)
    upper = enough if 0 < search.target <= deflate(aim * aim) else inflate(found.upper * grid.factor)
    lower = 0.0
    if conv.padding == "zeros":
        G = torch.complex(*symbol.gram(torch.tensor([found.group]), found.omega[None], torch.float32))[0]
        sides = [x.window_out if symbol.adjoint else x.window for x in grid.lattices]
        v = lanczos(G.matmul, random_start(G.shape[-1], G), steps=24, settle=rtol)
        lower = windowed_lower(symbol, found.group, found.omega, v, sides)
    return min(lower, upper), upper, value * grid.factor


def _thin(symbol: Symbol, groups: Tensor, omega: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`P = Y*Y`, `R = off*off` per frequency in complex128, with the error of P and that of R, as in `carried`."""
    E, V128 = symbol.at(groups, omega), V.to(torch.complex128)
    Y = E @ V128
    Z = E.mH @ Y
    off = Z - V128 @ (V128.mH @ Z)
    P, R = Y.mH @ Y, off.mH @ off
    N, v, spread = frobenius(E), frobenius(V128), frobenius(off)
    g = 4 * gamma(2 * (sum(E.shape[1:]) + V.shape[-1]) + 32, torch.float64)
    lost = g * N.square() * v * (5 + 2 * v.square())
    error_r = 2 * ((2 * spread + lost) * lost + (g + 16 * unit_roundoff(torch.float64)) * spread.square())
    return (P + P.mH) / 2, (R + R.mH) / 2, inflate(8 * g * N.square() * v.square()), inflate(error_r)


def _proved(
    P: Tensor, R: Tensor, error_p: Tensor, error_r: Tensor, squares: Tensor, defect: float, whole: bool
) -> float | None:
    """√τ with `P + R/(τ − b²) ⪯ τ(1 − ε)` proved at every frequency; the smallest such τ up to some 1e-6."""
    if whole:
        R, error_r, squares = torch.zeros_like(R), torch.zeros_like(error_r), torch.zeros_like(squares)

    def f(tau: float) -> float:
        return float(torch.linalg.eigvalsh(P + R / (tau - squares)[:, None, None])[:, -1].max())

    low = max(float(torch.linalg.eigvalsh(P)[:, -1].max()), float(squares.max())) * (1 + 1e-9) + 1e-300
    high = f(low)
    for _ in range(16):
        if high <= low * (1 + 1e-6):
            break
        middle = (low * high) ** 0.5
        reached = f(middle)
        low, high = (max(low, reached), middle) if reached <= middle else (middle, min(high, reached))
    tau = max(low, high)
    for widen in (1e-9, 1e-6, 1e-5):
        tau *= (1 + widen) * (1 + 2 * defect)
        room = (tau - squares) * (1 - 1e-14)
        if not bool((room > 0).all()):
            return None
        limit = torch.full_like(squares, deflate(tau * (1 - defect)))
        if bool(below(P + R / room[:, None, None], limit, inflate(error_p + error_r / room)).all()):
            return inflate(inflate(tau) ** 0.5)
    return None


def _chunks(count: int, bytes_each: int) -> Iterator[Tensor]:
    per = max(1, CHUNK_BYTES // bytes_each)
    yield from torch.arange(count).split(per)
