"""A proof of a convolution's norm that is carried from step to step while the layer trains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.core.precision import (
    deflate,
    frobenius,
    full_precision,
    gamma,
    inflate,
    require_finite,
    unit_roundoff,
    working_dtype,
)
from equipoise.maps.geometry import padding_norm
from equipoise.maps.linear import Convolution
from equipoise.maps.reading import read
from equipoise.norms.carried_symbol import Grid, SymbolReference, drifts, flat_bracket, refer, symbol_bracket
from equipoise.norms.convolution import conv_bracket
from equipoise.norms.symbol import Symbol


def symbol_size(kernel: Tensor) -> float:
    """`sup_ω ‖E(ω)‖_F`, rounded up: a bound on the norm of the convolution with `kernel (groups, co, ci, *k)`, zeros around it.

    `‖E(ω)‖_F² = Σ_b c_b e^{ib·ω}` with `c_b = Σ_a ⟨K_a, K_{a+b}⟩` the autocorrelation of the taps, so `Σ_b |c_b|` bounds it for
    all frequencies at the price of one small Gram matrix; strides and borders can only lower the norm.

    >>> symbol_size(torch.ones(1, 1, 1, 3)) >= 3
    True
    """
    sizes = kernel.shape[3:]
    taps = kernel.flatten(3).flatten(1, 2).mT  # groups, taps, co·ci
    if taps.shape[-1] * unit_roundoff(taps.dtype) > 1e-2:
        taps = taps.double()
    products = (taps @ taps.mT).double()
    where = torch.cartesian_prod(*(torch.arange(n) for n in sizes)).reshape(-1, len(sizes))
    steps = torch.zeros(len(where), dtype=torch.long)
    for axis, n in enumerate(sizes):
        steps = steps * (2 * n - 1) + where[:, axis]
    offsets = (steps[:, None] - steps + int(steps.max())).flatten().to(kernel.device)
    sums = products.new_zeros(len(products), int(offsets.max()) + 1).index_add_(1, offsets, products.flatten(1))
    lengths = frobenius(taps[:, :, None]).sum(-1)
    error = (
        gamma(taps.shape[-1] + 8, taps.dtype) * inflate(lengths) ** 2
        + gamma(taps.shape[1] ** 2 + 8, torch.float64) * inflate(lengths) ** 2
    )
    return float(inflate((sums.abs().sum(-1) + 2 * error).sqrt()).max())


class CarriedConvolution:
    """The norm of one convolution while it trains, on the input size it sees or over all sizes; see `CarriedMatrix`.

    On a known size with zero or circular padding the proof is carried frequency by frequency (`carried_symbol`): `weyl` from
    the bounds of all frequencies, `followed` where some have to be looked at, `renewed` where the drift has used up the room.
    Where a symbol turned out too flat for that, all its frequencies are proved below one number from then on (`flat`): nothing
    is followed, and a proof is one factorisation per frequency. Elsewhere Weyl's inequality with
    `‖A − κS‖ ≤ sup_ω ‖E_{A − κS}(ω)‖_F` times the norm of the padding map, and `direct` brackets.
    """

    def __init__(self, layer: nn.Module, input_size: tuple[int, ...] | None = None) -> None:
        found = read(layer, input_size)
        conv = found if isinstance(found, Convolution) else found.adjoint()
        if not isinstance(conv, Convolution):
            raise InputError(f"expected a convolution, got {type(layer).__name__}")
        self.conv = conv
        self.shape = self.conv.weight.shape
        self.factor = _padding_factor(self.conv)
        self.grid = Grid.of(conv)
        self.rtol = 0.0
        self.used: Counter[str] = Counter()
        self.S: Tensor | None = None
        self.reference: SymbolReference | None = None
        self.lower, self.upper, self.kappa = 0.0, math.inf, 1.0
        self.flat: float | None = None  # what was enough at S, once a symbol was too flat to be followed

    @torch.no_grad()
    def bracket(
        self,
        W: Tensor,
        enough: float = 0.0,
        rtol: float = 1e-3,
        what: str = "weight",
        renew: bool = True,
        loose: float = 0.0,
    ) -> tuple[float, float]:
        """`(lower, upper)` of the layer's norm, with `upper ≤ enough` or, where borders allow, `upper ≤ (1 + rtol)·lower`.

        With `renew=False` only the carried proof is asked, where there is one: cheap, true, and looser.
        """
        with full_precision():
            A = require_finite(W.detach().to(working_dtype(W.dtype)), what)
            lower, upper = 0.0, math.inf
            for rung, found in self._rungs(A, enough, rtol, renew):
                self.used[rung] += 1
                lower, upper = max(lower, found[0]), min(upper, found[1])
                if upper <= enough or upper <= (1 + rtol) * max(lower, found[2]):
                    break
            return min(lower, upper), upper

    def _rungs(
        self, A: Tensor, enough: float, rtol: float, renew: bool
    ) -> Iterator[tuple[str, tuple[float, float, float]]]:
        """`(lower, upper, value)`: the value is reached by what the upper end is about (the circulant, where there is a grid)."""
        grid = self.grid if 1e-15 < float(frobenius(A.reshape(1, -1))) < 1e15 else None
        same = self.S is not None and self.S.dtype == A.dtype and self.S.device == A.device
        if grid is not None and self.flat is not None:
            if same:
                yield "weyl", self._weyl(A, grid)
                if not renew:
                    return
            yield "flat", self._flat(grid, A, enough, rtol)
        elif grid is not None:
            if same and self.reference is not None:
                yield from self._carried(grid, A, self.reference, enough, rtol)
                if not renew:
                    return
            symbol = grid.symbol(self.conv, A, correlated=True)
            self.reference = refer(grid, self.conv, A, symbol)
            self.S, self.kappa = A.clone(), 1.0
            still = torch.zeros_like(self.reference.peaks)
            found = symbol_bracket(grid, self.conv, A, self.reference, 1.0, still, enough, rtol)
            if found is not None and found[1] <= max(enough, (1 + rtol) * found[0]):
                yield "renewed", (min(self.reference.lower, found[1]), found[1], found[0])
            else:
                yield "flat", self._flat(grid, A, enough, rtol, symbol)
        elif same and self.reference is None:
            yield "weyl", self._weyl(A)
            if not renew:
                return
        yield "direct", self._direct(A, rtol)

    def _weyl(self, A: Tensor, grid: Grid | None = None) -> tuple[float, float, float]:
        assert self.S is not None
        kappa = float(torch.tensor(self.kappa, dtype=A.dtype))
        distance = (
            self._distance(A, self.S, kappa)
            if grid is None
            else inflate(float(self._drift(grid, A, self.S, kappa).max()) * grid.factor)
        )
        return max(0.0, deflate(kappa * self.lower) - distance), inflate(inflate(kappa * self.upper) + distance), 0.0

    def _flat(
        self, grid: Grid, A: Tensor, enough: float, rtol: float, symbol: Symbol | None = None
    ) -> tuple[float, float, float]:
        symbol = grid.symbol(self.conv, A, correlated=True) if symbol is None else symbol
        self.flat, self.rtol = enough, rtol
        self.lower, self.upper, value = flat_bracket(grid, self.conv, symbol, enough, rtol)
        self.S, self.kappa, self.reference = A.clone(), 1.0, None
        return self.lower, self.upper, value

    def _carried(
        self, grid: Grid, A: Tensor, reference: SymbolReference, enough: float, rtol: float
    ) -> Iterator[tuple[str, tuple[float, float, float]]]:
        assert self.S is not None
        kappa = float(torch.tensor(self.kappa, dtype=A.dtype))
        drift = self._drift(grid, A, self.S, kappa)
        lower = max(0.0, deflate(kappa * reference.lower) - inflate(float(drift.max()) * grid.factor))
        upper = inflate(float(inflate(inflate(kappa * reference.peaks) + drift).max()) * grid.factor)
        yield "weyl", (min(lower, upper), upper, 0.0)
        found = symbol_bracket(grid, self.conv, A, reference, kappa, drift, enough, rtol)
        if found is not None:
            yield "followed", (min(lower, found[1]), found[1], found[0])

    def _drift(self, grid: Grid, A: Tensor, S: Tensor, kappa: float) -> Tensor:
        """`‖E_{A − κS}(ω_j)‖_F` at every frequency, with the rounding of the difference."""
        return inflate(drifts(grid, self.conv, torch.sub(A, S, alpha=kappa)) + self._lost(A, S, kappa))

    def _lost(self, A: Tensor, S: Tensor, kappa: float) -> float:
        """What rounding the difference `A − κS` may have changed of its symbol."""
        rows = (x.reshape(len(x), -1) for x in (A, S))  # long rows: sums over them are many times faster
        a, s = (float(frobenius(x)) for x in rows)
        size = 2 * a + 4 * kappa * s
        lost = 4 * math.sqrt(A.numel()) * torch.finfo(A.dtype).tiny  # by underflow
        return inflate(math.sqrt(math.prod(A.shape[2:])) * (unit_roundoff(A.dtype) * size + lost))

    def _distance(self, A: Tensor, S: Tensor, kappa: float) -> float:
        """`‖A − κS‖` as operators, with the rounding of the difference."""
        difference = torch.sub(A, S, alpha=kappa)
        size = symbol_size(self.conv.geometry.grouped(difference))
        return inflate(self.factor * inflate(size + self._lost(A, S, kappa)))

    def _direct(self, A: Tensor, rtol: float) -> tuple[float, float, float]:
        self.rtol = rtol / 2
        self.lower, self.upper = self._proved(A)
        self.S, self.kappa, self.reference = A.clone(), 1.0, None
        return self.lower, self.upper, self.lower

    def _proved(self, K: Tensor) -> tuple[float, float]:
        found = conv_bracket(self.conv.with_weight(K), self.rtol)
        return float(found.lower), float(found.upper)

    def scaled(self, factor: float) -> None:
        """The kernel was multiplied by `factor` (up to rounding, which the next bracket sees)."""
        self.kappa *= factor

    def state_dict(self) -> dict[str, Tensor]:
        """What exact resuming needs, as tensors; a symbol's proof follows from the kernel it was made at."""
        if self.S is None:
            return {}
        claims = [self.lower, self.upper, self.rtol] if self.reference is None else []
        claims += [self.flat] if self.flat is not None else []
        return {"S": self.S.clone(), "numbers": torch.tensor([self.kappa, *claims], dtype=torch.float64)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`: its claims are proved again, and a claim that cannot be is dropped."""
        self.S = self.reference = self.flat = None
        if "S" not in state:
            return
        S = require_finite(state["S"], "stored weight").clone()
        kappa, *claims = (float(x) for x in state["numbers"])
        if S.shape != self.shape or len(claims) not in (0, 3, 4):
            raise InputError(
                f"stored weight of shape {tuple(S.shape)} does not fit a layer of shape {tuple(self.shape)}"
            )
        if not 0 <= kappa < math.inf:
            return
        with full_precision():
            if not claims:
                if self.grid is not None:
                    self.S, self.kappa, self.reference = S, kappa, refer(self.grid, self.conv, S)
                return
            lower, upper, self.rtol, *flat = claims
            if not (0 <= lower <= upper < math.inf and 0 < self.rtol < 1 and all(0 <= x < math.inf for x in flat)):
                return
            if flat and self.grid is not None:
                self.flat = flat[0]
                symbol = self.grid.symbol(self.conv, S, correlated=True)
                found = flat_bracket(self.grid, self.conv, symbol, self.flat, self.rtol)[:2]
            else:
                found = self._proved(S)
        if found[0] >= lower and found[1] <= upper:
            self.S, self.lower, self.upper, self.kappa = S, lower, upper, kappa


def _padding_factor(conv: Convolution) -> float:
    """How much the padding map can enlarge an input, rounded up; 1 for zeros."""
    return inflate(math.prod(padding_norm(axis, conv.padding) for axis in conv.axes))
