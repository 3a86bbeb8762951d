"""A proof of a convolution's norm that is carried from step to step while the layer trains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.core.precision import (
    down,
    frobenius,
    full_precision,
    gamma,
    require_finite,
    unit_roundoff,
    up,
    working_dtype,
)
from equipoise.maps.geometry import padding_norm
from equipoise.maps.linear import Convolution
from equipoise.maps.reading import read
from equipoise.norms.convolution import conv_bracket


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
        gamma(taps.shape[-1] + 8, taps.dtype) * up(lengths) ** 2
        + gamma(taps.shape[1] ** 2 + 8, torch.float64) * up(lengths) ** 2
    )
    return float(up((sums.abs().sum(-1) + 2 * error).sqrt()).max())


class CarriedConvolution:
    """The norm of one convolution while it trains, on the input size it sees or over all sizes; see `CarriedMatrix`.

    From the last proof, at the kernel S, Weyl's inequality with `‖A − κS‖ ≤ sup_ω ‖E_{A − κS}(ω)‖_F` times the norm of the
    padding map; where that is not enough, a new bracket by `spectral_norm`.
    """

    def __init__(self, layer: nn.Module, input_size: tuple[int, ...] | None = None) -> None:
        found = read(layer, input_size)
        conv = found if isinstance(found, Convolution) else found.adjoint()
        if not isinstance(conv, Convolution):
            raise InputError(f"expected a convolution, got {type(layer).__name__}")
        self.conv = conv
        self.shape = self.conv.weight.shape
        self.factor = _padding_factor(self.conv)
        self.rtol = 0.0
        self.used: Counter[str] = Counter()
        self.S: Tensor | None = None
        self.lower, self.upper, self.kappa = 0.0, math.inf, 1.0

    @torch.no_grad()
    def bracket(self, W: Tensor, enough: float = 0.0, rtol: float = 1e-3, what: str = "weight") -> tuple[float, float]:
        """`(lower, upper)` of the layer's norm, with `upper ≤ enough` or, where borders allow, `upper ≤ (1 + rtol)·lower`."""
        with full_precision():
            A = require_finite(W.detach().to(working_dtype(W.dtype)), what)
            lower, upper = 0.0, math.inf
            for rung, found in self._rungs(A, rtol):
                self.used[rung] += 1
                lower, upper = max(lower, found[0]), min(upper, found[1])
                if upper <= enough or upper <= (1 + rtol) * lower:
                    break
            return min(lower, upper), upper

    def _rungs(self, A: Tensor, rtol: float) -> Iterator[tuple[str, tuple[float, float]]]:
        if self.S is not None and self.S.shape == A.shape and self.S.dtype == A.dtype and self.S.device == A.device:
            kappa = float(torch.tensor(self.kappa, dtype=A.dtype))
            distance = self._distance(A, self.S, kappa)
            yield "weyl", (max(0.0, down(kappa * self.lower) - distance), up(up(kappa * self.upper) + distance))
        yield "direct", self._direct(A, rtol)

    def _distance(self, A: Tensor, S: Tensor, kappa: float) -> float:
        """`‖A − κS‖` as operators, with the rounding of the difference (its symbol is at most √taps times as large)."""
        difference = torch.sub(A, S, alpha=kappa)
        taps = math.prod(A.shape[2:])
        flat = tuple(range(A.dim()))
        lost = (
            2
            * unit_roundoff(A.dtype)
            * math.sqrt(taps)
            * float(frobenius(difference, flat) + kappa * frobenius(S, flat))
        )
        return up(self.factor * up(symbol_size(self.conv.geometry.grouped(difference)) + lost))

    def _direct(self, A: Tensor, rtol: float) -> tuple[float, float]:
        self.rtol = rtol / 2
        self.lower, self.upper = self._proved(A)
        self.S, self.kappa = A.clone(), 1.0
        return self.lower, self.upper

    def _proved(self, K: Tensor) -> tuple[float, float]:
        found = conv_bracket(self.conv.with_weight(K), self.rtol)
        return float(found.lower), float(found.upper)

    def scaled(self, factor: float) -> None:
        """The kernel was multiplied by `factor` (up to rounding, which the next bracket sees)."""
        self.kappa *= factor

    def state_dict(self) -> dict[str, Tensor]:
        """What exact resuming needs, as tensors."""
        if self.S is None:
            return {}
        numbers = torch.tensor([self.lower, self.upper, self.kappa, self.rtol], dtype=torch.float64)
        return {"S": self.S.clone(), "numbers": numbers}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`: its claims are proved again, and a claim that cannot be is dropped."""
        self.S = None
        if "S" not in state:
            return
        S = require_finite(state["S"], "stored weight").clone()
        if S.shape != self.shape or len(state["numbers"]) != 4:
            raise InputError(
                f"stored weight of shape {tuple(S.shape)} does not fit a layer of shape {tuple(self.shape)}"
            )
        lower, upper, kappa, rtol = (float(x) for x in state["numbers"])
        if not (0 <= lower <= upper < math.inf and 0 <= kappa < math.inf and 0 < rtol < 1):
            return
        with full_precision():
            self.rtol = rtol
            found = self._proved(S)
        if found[0] >= lower and found[1] <= upper:
            self.S, self.lower, self.upper, self.kappa = S, lower, upper, kappa


def _padding_factor(conv: Convolution) -> float:
    """How much the padding map can enlarge an input, rounded up; 1 for zeros."""
    return up(math.prod(padding_norm(axis, conv.padding) for axis in conv.axes))
