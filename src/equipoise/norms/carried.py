"""A proof of a matrix's norm that is carried from step to step while the matrix trains.

Kept from the last full proof, at `S`: a basis `V` (k columns) near the top right singular space, and β with
`‖S x‖ ≤ β‖x‖` for all `x ⟂ V`. For the matrix `A` of today and the factor κ by which it was scaled since,

    b = κβ + ‖A − κS‖_F   ≥   sup ‖A x‖ over unit x ⟂ V                                    (Weyl, off the top space only)

and with `Y = AV`, `R = (AᵀY − VM)ᵀ(AᵀY − VM)` for any M, a Schur complement gives, for every τ > b²,

    YᵀY + R/(τ − b²)  ⪯  τ·VᵀV        ⟹        σ₁(A)² ≤ τ.

So a drift in Frobenius norm eats the room between σ_{k+1} and the target instead of that between σ₁ and the target. The k×k
condition is checked by a Cholesky factorisation with all rounding in its error term; the two thin products are in float64. β is
proved by one Cholesky factorisation of the deflated `S − TVᵀ` (which agrees with S off V for every T), in the precision of
the weights: what is lost there is room, never truth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

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
from equipoise.norms.dense import cholesky_bracket, gram_lower
from equipoise.norms.gram import gram_error, small_side
from equipoise.norms.spectral import spectral_norm
from equipoise.norms.verify import below

#: columns of the basis that is followed, at first and at most
FIRST, MOST = 8, 32
#: up to this many columns a new proof of the whole matrix costs less than to follow its top space
SMALL = 1024
#: where β is tried between the Ritz value of the last column and the target
PLACES = (0.08, 0.25, 0.5, 0.8, 0.97)


@dataclass
class Reference:
    """What was proved at one moment: `‖S x‖ ≤ β‖x‖` for x ⟂ V, and `lower ≤ σ₁(S) ≤ upper`."""

    S: Tensor
    V: Tensor
    defect: float
    beta: float
    lower: float
    upper: float
    kappa: float = 1.0

    @cached_property
    def size(self) -> float:
        """‖S‖_F, rounded up."""
        return float(frobenius(_rows(self.S)))


class CarriedMatrix:
    """The norm of one real matrix while it trains: `bracket(W)` is proved at every call, and mostly cheap.

    Four rungs, the first that is good enough is taken: Weyl from the last proof; the Schur complement on the followed basis;
    a new proof off the basis; `spectral_norm`. `used` counts them.

    >>> W = torch.diag(torch.tensor([3.0, 1.0, 0.5]))
    >>> carried = CarriedMatrix()
    >>> lower, upper = carried.bracket(W)
    >>> lower <= 3 <= upper <= 3.003
    True
    >>> carried.bracket(W + 1e-3, enough=3.1)[1] >= 3
    True
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.reference: Reference | None = None
        self.columns = FIRST
        self.used: Counter[str] = Counter()

    @torch.no_grad()
    def bracket(
        self, W: Tensor, enough: float = 0.0, rtol: float = 1e-3, what: str = "weight", renew: bool = True
    ) -> tuple[float, float]:
        """`(lower, upper)` of σ₁(W), with `upper ≤ enough` or, where that is not true, `upper ≤ (1 + rtol)·lower`.

        With `renew=False` only the carried proof is asked, where there is one: cheap, true, and looser.
        """
        with full_precision():
            A = _tall(W, what)
            lower, upper = 0.0, math.inf
            for rung, found in self._rungs(A, enough, rtol, renew):
                if found is None:
                    continue
                self.used[rung] += 1
                lower, upper = max(lower, found[0]), min(upper, found[1])
                if upper <= enough or upper <= (1 + rtol) * lower:
                    break
            return min(lower, upper), upper

    def _rungs(
        self, A: Tensor, enough: float, rtol: float, renew: bool
    ) -> Iterator[tuple[str, tuple[float, float] | None]]:
        """Brackets of σ₁(A), each dearer and tighter than the one before; None where a rung has nothing to say."""
        r = self.reference if self._fits(A) else None
        if r is not None:
            kappa, distance = _distance(A, r)
            yield "weyl", (max(0.0, down(kappa * r.lower) - distance), up(up(kappa * r.upper) + distance))
            rest = up(up(kappa * r.beta) + distance)
            if r.V.shape[0] == r.V.shape[1] or rest <= max(enough, kappa * r.upper):
                yield "followed", deflated_bracket(A, r.V, r.defect, rest)
        if renew or r is None:
            if A.shape[1] > SMALL:
                yield "renewed", self._renew(A, enough, rtol)
            yield "direct", self._direct(A, enough, rtol)

    def scaled(self, factor: float) -> None:
        """The matrix was multiplied by `factor` (up to rounding, which the next bracket sees)."""
        if self.reference is not None:
            self.reference.kappa *= factor

    def top(self, W: Tensor, rounds: int = 8) -> tuple[Tensor, Tensor, Tensor]:
        """`(U, s, V)` of the followed space of W in float64, `W V ≈ U diag(s)`, largest first; estimates, no bounds."""
        A = _tall(W, "weight")
        V = self._basis(A, rounds).double()
        left, s, right = torch.linalg.svd(A.double() @ V, full_matrices=False)
        V = V @ right.mT
        return (V, s, left) if W.shape[0] < W.shape[1] else (left, s, V)

    def state_dict(self) -> dict[str, Tensor]:
        """What exact resuming needs, as tensors."""
        state = {"columns": torch.tensor(self.columns)}
        if self.reference is not None:
            r = self.reference
            numbers = [r.defect, r.beta, r.lower, r.upper, r.kappa]
            state |= {"S": r.S.clone(), "V": r.V.clone(), "numbers": torch.tensor(numbers, dtype=torch.float64)}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`: its claims are proved again, and a claim that cannot be is dropped."""
        if "columns" not in state:
            raise InputError("this state belongs to no carried norm: it has no 'columns'")
        self.columns, self.reference = int(state["columns"]), None
        if "S" not in state:
            return
        S, V = require_finite(state["S"], "stored weight").clone(), require_finite(state["V"], "stored basis").clone()
        if S.dim() != 2 or V.dim() != 2 or S.shape[1] != V.shape[0] or S.dtype != V.dtype or len(state["numbers"]) != 5:
            raise InputError(f"stored weight {tuple(S.shape)} and basis {tuple(V.shape)} do not belong together")
        defect, beta, lower, upper, kappa = (float(x) for x in state["numbers"])
        with torch.no_grad(), full_precision():
            reference = Reference(S, V, defect, beta, lower, upper, kappa)
            if _holds(reference):
                self.reference = reference

    def _renew(self, A: Tensor, enough: float, rtol: float) -> tuple[float, float] | None:
        V = self._basis(A, 2 if self._fits(A) else 6)
        T = A @ V
        ritz = torch.linalg.eigvalsh((T.mT @ T).double()).clamp_min(0).sqrt()
        last, first = float(ritz[0]), float(ritz[-1])
        target = enough if first <= enough else first * (1 + rtol)
        if last > 0.8 * target and self.columns < MOST:
            self.columns *= 2
        beta = rest_bound(A, V, T, last, target)
        defect = _defect(V)
        found = None if beta is None else deflated_bracket(A, V, defect, beta)
        if beta is not None and found is not None:
            self.reference = Reference(A.clone(), V, defect, beta, *found)
        return found

    def _direct(self, A: Tensor, enough: float, rtol: float) -> tuple[float, float]:
        n = A.shape[1]
        if n <= FIRST:
            found = spectral_norm(A, rtol=rtol / 2)
            low, high, V = float(found.lower), float(found.upper), torch.eye(n).to(A)
        else:
            start = self.reference.V[:, 0] if self.reference is not None and self._fits(A) else None
            low, high, v = cholesky_bracket(A, rtol / 2, start=start, enough=enough)
            # of a small matrix only the top vector is kept: a new proof costs less than to follow more of them
            more = [] if n <= SMALL else [self._basis(A, 0)[:, :-1]]
            V = _orthonormal(torch.cat([v[:, None].to(A.dtype), *more], 1), A)
        upper = up(high * (1 + 1e-9))  # room to prove it again when it is loaded, as for the lower end
        self.reference = Reference(A.clone(), V, _defect(V), upper, down(low * (1 - 1e-6)), upper)
        return low, high

    def _fits(self, A: Tensor) -> bool:
        r = self.reference
        return r is not None and r.S.shape == A.shape and r.S.dtype == A.dtype and r.S.device == A.device

    def _basis(self, A: Tensor, rounds: int) -> Tensor:
        """`V ← orth(AᵀA V)`, `rounds` times from the last basis; the whole space for a small matrix."""
        n = A.shape[1]
        if n <= FIRST:
            return torch.eye(n, dtype=A.dtype, device=A.device)
        k = min(self.columns, n)
        V = self.reference.V if self.reference is not None and self._fits(A) else A.new_zeros(n, 0)
        if V.shape[1] != k:
            draw = torch.randn(n, k, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
            V = torch.cat([V, draw.to(A.device, A.dtype)], 1)[:, :k]
        scale = float(A.abs().amax()) or 1.0
        for _ in range(rounds):
            V = torch.linalg.qr(A.mT @ (A @ V / scale) / scale)[0]
        return _orthonormal(V, A)


def _orthonormal(V: Tensor, like: Tensor) -> Tensor:
    return torch.linalg.qr(V.double())[0].to(like.dtype).contiguous()


def rest_bound(A: Tensor, V: Tensor, T: Tensor, start: float, target: float) -> float | None:
    """A proved `β ≥ sup ‖A x‖` over unit `x ⟂ V`, between `start` and `target`; None where nothing there could be proved.

    `(A − TVᵀ)x = Ax` for every such x, whatever T; so the norm of the deflated matrix will do, and `λ_max` of its Gram matrix
    is proved below β² by a Cholesky factorisation in the precision of A.
    """
    if V.shape[0] == V.shape[1]:
        return 0.0
    G, error, lost = _deflated_gram(A, V, T)
    for place in PLACES:
        beta = start + place * (target - start)
        if _below(G, beta - lost, error):
            return beta
    return None


def _deflated_gram(A: Tensor, V: Tensor, T: Tensor) -> tuple[Tensor, Tensor, float]:
    """Gram matrix of `A − TVᵀ` with its error, and what the subtraction itself lost."""
    rest = torch.addmm(A, T, V.mT, alpha=-1)
    lost = up(gamma(V.shape[1] + 4, A.dtype) * float(up(frobenius(A) + frobenius(T) * frobenius(V))))
    return gram_lower(rest, rest.dtype), gram_error(rest).reshape(1), lost


def _below(G: Tensor, sigma: float, error: Tensor) -> bool:
    """Whether `√λ_max ≤ sigma` is proved for the matrix whose Gram matrix G is, up to `error`."""
    if not sigma > 0:
        return False
    tau = torch.tensor([down(sigma * sigma)], dtype=torch.float64, device=G.device)
    return bool(below(G[None], tau, error))


@dataclass(frozen=True)
class _Thin:
    """`Y = AV` and `P = YᵀY` in float64, with `‖P − VᵀAᵀAV‖₂ ≤ error`; N and v bound ‖A‖_F and ‖V‖_F."""

    Y: Tensor
    P: Tensor
    N: float
    v: float
    g: float
    error: float

    @staticmethod
    def of(A64: Tensor, V64: Tensor) -> _Thin:
        N, v = _length(A64), _length(V64)
        Y = A64 @ V64
        g = gamma(sum(A64.shape) + V64.shape[1] + 16, torch.float64)
        return _Thin(Y, Y.mT @ Y, N, v, g, 8 * g * N * N * v * v)

    def lower(self, defect: float) -> float:
        """`‖AVy‖/‖Vy‖` for the best y, rounded down."""
        y = torch.linalg.eigh(self.P)[1][:, -1]
        y = y / torch.linalg.vector_norm(y)
        return down(math.sqrt(max(0.0, float(y @ self.P @ y) * (1 - 1e-12) - self.error) / (1 + defect)))


def _length(x: Tensor) -> float:
    """‖x‖_F of a float64 tensor, rounded up; one pass."""
    return up(float(torch.linalg.vector_norm(x)) * (1 + gamma(x.numel() + 8, torch.float64)) + 1e-140)


def ritz_lower(A: Tensor, V: Tensor, defect: float) -> float:
    """The largest Ritz value of A on V: a lower bound of σ₁."""
    return _Thin.of(A.double(), V.double()).lower(defect)


def deflated_bracket(A: Tensor, V: Tensor, defect: float, rest: float) -> tuple[float, float] | None:
    """`(lower, upper)` of σ₁(A) from `rest ≥ sup ‖Ax‖` over unit `x ⟂ V`, by the Schur complement of the module's text."""
    A64, V64 = A.double(), V.double()
    thin = _Thin.of(A64, V64)
    if not bool(A.any()):
        return 0.0, 0.0
    if not (1e-60 < thin.N < 1e60 and rest < 1e60):
        return None  # squares of squares would leave the range
    Z = A64.mT @ thin.Y
    off = Z - V64 @ (V64.mT @ Z)
    spread = _length(off)
    lost = thin.g * thin.N**2 * thin.v * (5 + 2 * thin.v**2)
    R, error_r = off.mT @ off, 2 * ((2 * spread + lost) * lost + thin.g * spread * spread)
    square = up(rest * rest)
    if V.shape[0] == V.shape[1]:
        R, square, error_r, spread = torch.zeros_like(R), 0.0, 0.0, 0.0
    tau = _smallest(thin.P, R, square)
    for widen in (1e-9, 1e-6):
        tau *= (1 + widen) * (1 + 2 * defect)
        room = down(tau - square)
        if room <= 0:
            return None
        error = up(thin.error + error_r / room + 16 * unit_roundoff(torch.float64) * spread**2 / room)
        numbers = torch.tensor([[down(tau * (1 - defect))], [error]], dtype=torch.float64, device=A.device)
        if bool(below((thin.P + R / room)[None], *numbers)):
            return thin.lower(defect), up(up(tau) ** 0.5)
    return None


def _smallest(P: Tensor, R: Tensor, square: float, rounds: int = 24) -> float:
    """Where `λ_max(P + R/(τ − square))`, which falls with τ, meets τ: from above, up to some 1e-5; an estimate."""

    def f(tau: float) -> float:
        return float(torch.linalg.eigvalsh(P + R / (tau - square))[-1])

    low = max(float(torch.linalg.eigvalsh(P)[-1]), square) * (1 + 1e-9)
    high = f(low)
    for _ in range(rounds):
        if high <= low * (1 + 1e-5):
            break
        middle = (low * high) ** 0.5
        value = f(middle)
        low, high = (max(low, value), middle) if value <= middle else (middle, min(high, value))
    return max(low, high)


def _rows(x: Tensor) -> Tensor:
    """The matrix or its transpose, whichever lies row by row in memory: sums over it are several times faster."""
    return x.mT if x.mT.is_contiguous() else x


def _tall(W: Tensor, what: str) -> Tensor:
    """The matrix on its smaller side, in the precision it is followed in; refused where it is not a finite real matrix."""
    if W.dim() != 2 or W.is_complex():
        raise InputError(f"expected a real matrix, got {what} of shape {tuple(W.shape)} in {W.dtype}")
    A = W.detach().to(working_dtype(W.dtype))
    return small_side(require_finite(A.cpu() if A.device.type == "mps" else A, what))


def _distance(A: Tensor, r: Reference) -> tuple[float, float]:
    """`(κ, d)` with κ a number of the precision of A and `d ≥ ‖A − κS‖_F`, rounding of the difference included."""
    kappa = float(torch.tensor(r.kappa, dtype=A.dtype))
    difference = torch.sub(A, r.S, alpha=kappa)
    d = float(frobenius(_rows(difference)))
    u = 2 * unit_roundoff(A.dtype)
    return kappa, up(d * (1 + u) + u * (d + abs(kappa) * r.size))


def _defect(V: Tensor) -> float:
    """`ε ≥ ‖VᵀV − I‖₂`."""
    V64 = V.double()
    gap = V64.mT @ V64 - torch.eye(V.shape[1], dtype=torch.float64, device=V.device)
    return up(float(frobenius(gap)) + gamma(2 * V.shape[0] + 8, torch.float64) * float(frobenius(V64)) ** 2)


def _holds(r: Reference) -> bool:
    """Whether everything a stored reference claims can be proved again."""
    claims = (r.defect, r.beta, r.lower, r.upper, r.kappa)
    if r.S.shape[0] < r.S.shape[1] or not all(0 <= x < math.inf for x in claims):
        return False
    if _defect(r.V) > r.defect or r.defect > 0.5 or ritz_lower(r.S, r.V, r.defect) < r.lower:
        return False
    S64 = r.S.double()
    below_upper = _below(gram_lower(S64), r.upper, gram_error(S64).reshape(1))
    whole = r.V.shape[0] == r.V.shape[1]
    if not whole and not (below_upper and r.beta >= r.upper):
        G, error, lost = _deflated_gram(r.S, r.V, r.S @ r.V)
        if not _below(G, r.beta - lost, error):
            return False
    found = None if below_upper else deflated_bracket(r.S, r.V, r.defect, r.beta)
    return below_upper or (found is not None and found[1] <= r.upper)
