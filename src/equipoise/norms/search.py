"""`max ‖E(ω)‖₂` over a grid or over all frequencies: proved from above, at the cost of the frequencies that matter.

Over all frequencies the torus is cut into cells. For fixed unit u, v the function `Re e^{iφ}u*E(ω)v` is, along each axis and
after centring, of exponential type `D_j = (k_j − 1)/2`, so with M its supremum `arccos(f/M)` is D_j-Lipschitz along axis j
(Bernstein–Szegő; Duffin–Schaeffer for half-integer D_j). Hence if the supremum M of ‖E‖₂ is attained in a cell of half-widths h,

    ‖E(centre)‖₂ ≥ M·cos(Σ_j D_j h_j).

Contrapositive: a cell whose centre is proved below `T·cos(Σ D_j h_j)` cannot hold a maximum above T. Where the symbol hardly
varies (orthogonal convolutions) `‖E*E(ω) − E*E(centre)‖ ≤ Σ_b 2‖C_b‖·2|sin(b·(ω − centre)/2)|` is sharper; either may prove a
cell. Cells that are not proved are split along every axis that matters.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from math import ceil, cos, floor, inf, pi, sqrt

import torch
from torch import Tensor

from equipoise.core.precision import deflate, inflate
from equipoise.norms.cholesky import below, random_start
from equipoise.norms.symbol import Symbol, grid_frequencies

#: bytes the Gram matrices of all first cells may have together
MOST_BYTES = 2**32
#: bytes of matrices held at once: they should stay in the cache, and forming several at once is cheaper
CHUNK_BYTES = 2**21
#: points per group at which the search looks first, before it goes uphill
SCOUTS = 64


@dataclass
class Cells:
    """Cells of one level: group and centre of each, common half-widths (all zero: a grid of points)."""

    groups: Tensor  # (F,)
    omega: Tensor  # (F, dims)
    half: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def index(self) -> Tensor:
        """All of them."""
        return torch.arange(len(self))

    def take(self, index: Tensor) -> Cells:
        """The cells of an index or mask."""
        return Cells(self.groups[index], self.omega[index], self.half)


@dataclass(frozen=True)
class SymbolBound:
    """`upper` bounds the maximum asked for; the maximiser is `(group, omega)`."""

    upper: float
    group: int
    omega: Tensor
    proved: bool


def grid_cells(symbol: Symbol, sizes: tuple[int, ...], points: bool = True) -> Cells:
    """All points `2πj/n` of a grid, half of them by symmetry, for every group.

    As `points` one of each pair ±ω is left out everywhere; cells that will be split, of which only children in the upper half
    are kept, need the planes that are their own mirror image whole.

    Args:
        symbol: the symbol.
        sizes: points per axis.
        points: whether the cells are points.
    """
    dims, omega = len(sizes), grid_frequencies(sizes)
    if not points:
        counts = [sizes[0] // 2 + 1, *sizes[1:]]
        index = torch.cartesian_prod(*map(torch.arange, counts)).reshape(-1, dims)
        omega = index * (2 * pi / torch.tensor(sizes).double())
    groups = symbol.kernel.shape[0]
    return Cells(
        torch.arange(groups).repeat_interleave(len(omega)), omega.repeat(groups, 1), (0.0,) * dims
    )


class Search:
    """Branch and bound for `max ‖E(ω)‖₂`.

    Args:
        symbol: the symbol E.
        tol: relative excess allowed over the best value met.
        budget: how many frequencies may be evaluated; beyond that the bound is widened.
        enough: an upper bound that suffices, where it is true.
    """

    def __init__(self, symbol: Symbol, tol: float, budget: int, enough: float = 0.0) -> None:
        self.symbol, self.budget = symbol, budget
        self.tol = min(tol, 1e100)  # its square is a float
        self.enough = enough
        self.c = symbol.kernel.shape[2]
        self.degrees = [(n - 1) / 2 for n in symbol.lengths]
        self.evaluated = 0
        self.best = 0.0  # largest ‖E‖₂² met, an estimate that only steers
        self.target = deflate(enough * enough)  # T²: what is proved so far is proved below this
        self.where: tuple[int, Tensor] = (0, symbol.offsets.new_zeros(len(symbol.lengths)))
        self.dtype = torch.float32
        self.steps = 6 if tol > 5e-3 else 12 if tol > 1e-4 else 48

    def over_grid(self, sizes: tuple[int, ...]) -> SymbolBound:
        """Maximum over the points of a grid."""
        cells = grid_cells(self.symbol, sizes)
        stride = 1 + len(cells) // (SCOUTS * self.symbol.kernel.shape[0])
        self._scout(cells.take(cells.index[::stride]))
        self._choose_dtype()
        step = tuple(3 * pi / n if n > 1 else 0.0 for n in sizes)
        before = 0.0
        # uphill on the grid: a good first target saves proving everything twice
        while stride > 1 and self.best > before * (1 + self.tol / 4):
            before = self.best
            self._probe(_split(self._here(step), halved=False))
        return self._finish(cells)

    def near(self, sizes: tuple[int, ...]) -> tuple[float, Tensor]:
        """An estimate of the maximum over a grid, and where it is: at the best of its points around the maximiser found."""
        step = [2 * pi / n for n in sizes]
        nearest = [
            [floor(float(w) / h), ceil(float(w) / h)]
            for w, h in zip(self.where[1], step, strict=True)
        ]
        points = [
            [j * h for j, h in zip(index, step, strict=True)]
            for index in itertools.product(*nearest)
        ]
        omega = torch.tensor(points, dtype=torch.float64)
        groups = torch.full((len(points),), self.where[0])
        best = self._values(Cells(groups, omega, (0.0,) * len(sizes))).max(0)
        return max(best.values.item(), 0.0) ** 0.5, omega[best.indices]

    def over_all(self) -> SymbolBound:
        """Supremum over all frequencies."""
        reach = 0.8 / max(1, sum(d > 0 for d in self.degrees))
        sizes = tuple(max(1, 2 * ceil(pi * d / reach / 2)) for d in self.degrees)
        cells = grid_cells(self.symbol, sizes, points=False)
        cells.half = tuple(pi / n if n > 1 else 0.0 for n in sizes)
        if len(cells) * self.c**2 * 8 > MOST_BYTES or len(cells) > 8 * self.budget:
            return SymbolBound(inf, 0, self.where[1], False)
        self._scout(cells)
        self._choose_dtype()
        self._climb(cells.half)
        while True:
            left = self._prove(cells, self._threshold(cells))
            if not len(left) or not any(left.half):
                return self._finish(left)
            # three parts keep the centre, which often is the maximum; two are cheaper where many cells are left
            children = _split(left, True, 3 if len(left) <= 12 else 2)
            if self.evaluated + len(children) > self.budget:
                return self._finish(left, proved=False)
            cells = children

    def _choose_dtype(self) -> None:
        """Float32 where its rounding costs less than a third of the tolerance, else float64."""
        # halfway to what is enough: a bound with room lasts for more steps
        if 0 < self.best < self.target:
            self.target = max(self.best * (1 + self.tol) ** 2, sqrt(self.best) * sqrt(self.target))
        best = max(self.best, 1e-300)
        error = float(self.symbol.gram_error(torch.float32).max()) / best
        if error >= self.tol * 2 / 3:
            self.dtype, self.best, self.target = (
                torch.float64,
                0.0,
                deflate(self.enough * self.enough),
            )
            self._probe(self._here(()))  # what float32 saw may be nothing but rounding
            self._in_double()

    def _in_double(self) -> None:
        """Compute in float64 from now on, with a target and a tolerance above its rounding: below that nothing is proved."""
        self.dtype = torch.float64
        error = float(self.symbol.gram_error(torch.float64).max())
        self.tol = max(self.tol, min(1.0, error / max(self.best, 1e-300)))
        self.target = max(self.target, self.best * (1 + self.tol) ** 2, 4 * error)

    def _chunks(self, rows: Tensor) -> tuple[Tensor, ...]:
        width = 1 if self.dtype is torch.float32 else 2
        return rows.split(max(1, CHUNK_BYTES // (width * self.symbol.bytes_per_frequency)))

    def _threshold(self, cells: Cells) -> Tensor:
        """What the centre of each cell must be proved below (squared) so that the cell is proved for the target."""
        turn = sum(d * h for d, h in zip(self.degrees, cells.half, strict=True))
        by_angle = self.target * cos(min(turn * (1 + 1e-12), pi / 2)) ** 2 * (1 - 1e-14)
        thresholds = torch.full((len(cells),), by_angle, dtype=torch.float64)
        variation = self.symbol.variation
        if variation is not None and any(cells.half):
            half = torch.tensor(cells.half, dtype=torch.float64)
            angle = (self.symbol.offsets.abs() @ half / 2).clamp_max(pi / 2)
            moved = inflate(variation @ (2 * angle.sin() * (1 + 1e-12)))[cells.groups]
            thresholds = torch.maximum(thresholds, (self.target - moved) * (1 - 1e-14))
        return thresholds

    def _scout(self, cells: Cells) -> None:
        """Raise the best value at the cells that a few steps find largest."""
        chunks = (cells.take(rows) for rows in self._chunks(cells.index))
        values = torch.cat([self._values(x, 8) for x in chunks])
        self._probe(cells.take(values.topk(min(4, len(cells))).indices))

    def _here(self, half: tuple[float, ...]) -> Cells:
        """One cell around the best point."""
        return Cells(torch.tensor([self.where[0]]), self.where[1][None], half)

    def _climb(self, half: tuple[float, ...]) -> None:
        """Raise the best value by looking around it at finer and finer scales."""
        for _ in range(5):
            around = _split(self._here(half), halved=False)
            self._probe(around)
            half = around.half

    def _probe(self, cells: Cells) -> None:
        """Raise the best value by the values at the given centres."""
        values = self._values(cells)
        i = int(values.argmax())
        value = float(values[i]) * (1 - min(1e-6, self.tol / 8))
        if value > self.best:
            self.best, self.where = value, (int(cells.groups[i]), cells.omega[i].clone())
        self.target = max(self.target, self.best * (1 + self.tol) ** 2)

    def _values(self, cells: Cells, steps: int = 0) -> Tensor:
        """‖E‖₂² at the given centres: estimates that only steer."""
        return _ritz_values(
            self.symbol.gram(cells.groups, cells.omega, self.dtype), steps or self.steps
        )

    def _prove(self, cells: Cells, threshold: Tensor) -> Cells:
        """Prove as many centres as possible below their thresholds; the others are returned."""
        self.evaluated += len(cells)
        tau = threshold - self.symbol.gram_error(self.dtype)[cells.groups]
        left, scores = [cells.index[:0]], [tau[:0]]
        for rows in self._chunks(cells.index):
            part, limit = cells.take(rows), tau[rows]
            G = self.symbol.gram(part.groups, part.omega, self.dtype)
            rest = (~below(G, limit)).nonzero()[:, 0]
            if not len(rest):
                continue
            values = _ritz_values(G[rest], 8)
            # some lack only what a proof in single precision loses
            close = values < limit[rest]
            again = rest[close]
            close[close.clone()] = below(G[again], limit[again], dtype=torch.complex128)
            rest, values = rest[~close], values[~close]
            left.append(rows[rest])
            scores.append(values)
        index = torch.cat(left)
        if len(index):  # a centre that could not be proved may be higher than the best value so far
            top = torch.cat(scores).topk(min(12, len(index))).indices
            before = self.best
            self._probe(cells.take(index[top]))
            if any(cells.half) and self.best > before:
                self._climb(cells.half)
        return cells.take(index)

    def _finish(self, cells: Cells, proved: bool = True) -> SymbolBound:
        """Raise the target until every given centre is proved (with its cell), switching to float64 if that is needed."""
        stubborn = 0
        while len(cells):
            if stubborn:
                if self.dtype is torch.float32:
                    self._in_double()
                else:
                    self.target *= 1 + min(self.tol * 2.0**stubborn, max(32 * self.tol, 0.05))
            if not proved:  # out of budget: widen the target to what the centres allow
                turn = sum(d * h for d, h in zip(self.degrees, cells.half, strict=True))
                self.target = max(
                    self.target, self.best * (1 + self.tol) / cos(min(turn, 1.5)) ** 2
                )
            before = self.target
            cells = self._prove(cells, self._threshold(cells))
            stubborn = 0 if self.target > before else stubborn + 1
        reached = 0 < self.target <= deflate(self.enough * self.enough)
        upper = self.enough if reached else inflate(inflate(self.target) ** 0.5)
        return SymbolBound(upper, self.where[0], self.where[1], proved)


def _ritz_values(G: Tensor, steps: int) -> Tensor:
    """Estimates of `λ_max(G)` of Hermitian matrices `(F, n, n)` by a few Lanczos steps on all at once.

    Args:
        G: the matrices.
        steps: how many steps.
    """
    steps = min(steps, G.shape[-1])
    length = functools.partial(torch.linalg.vector_norm, dim=-1, keepdim=True)
    # rows: batched products like them better
    q = random_start(G.shape[-1], G).expand(len(G), 1, -1)
    before, beta = torch.zeros_like(q), length(q)
    T = torch.zeros(len(G), steps, steps, dtype=torch.float64)
    for j in range(steps):
        q = q / beta.clamp_min(1e-30)
        w = q @ G
        if j:
            w = w - beta * before
        alpha = torch.linalg.vecdot(q, w)[..., None].real
        T[:, j, j] = alpha[:, 0, 0]
        before, q = q, w - alpha * q
        beta = length(q)
        T[:, j + 1 : j + 2, j] = beta[:, 0]
    return torch.linalg.eigvalsh(T)[:, -1]  # reads the lower triangles


def _split(cells: Cells, halved: bool, parts: int = 3) -> Cells:
    """Two or three children along every axis with a width; only one of each pair ±ω where they are `halved`."""
    places = [(2 * i + 1) / parts - 1 for i in range(parts)]
    steps = [[x * h for x in places] if h else [0.0] for h in cells.half]
    moves = torch.tensor(list(itertools.product(*steps)), dtype=torch.float64)
    omega = (cells.omega[:, None] + moves).flatten(0, 1)
    groups = cells.groups.repeat_interleave(len(moves))
    if halved:
        keep = (omega[:, 0] >= -1e-9) & (omega[:, 0] <= pi + 1e-9)
        omega, groups = omega[keep], groups[keep]
    slack = 1 + 1e-9  # cells overlap a little, so that rounding of the centres leaves no gap
    return Cells(groups, omega, tuple(h / parts * slack for h in cells.half))
