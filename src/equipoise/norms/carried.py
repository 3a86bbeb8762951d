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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

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
from equipoise.norms.carried_single import single_bracket, single_loss
from equipoise.norms.deflated import (
    deflated_bracket,
    deflated_gram,
    orthonormal,
    orthonormality,
    proved_below,
    rest_bound,
    ritz_lower,
)
from equipoise.norms.dense import cholesky_bracket
from equipoise.norms.gram import gram_error, small_side
from equipoise.norms.half import gram_lower
from equipoise.norms.lanczos import mixed
from equipoise.norms.spectral import spectral_norm
from equipoise.norms.verify import serial

#: columns of the basis that is followed, at first and at most
FIRST, MOST = 8, 32
#: up to this many columns a new proof of the whole matrix costs less than to follow its top space
SMALL = 1024


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
        """‖S‖_F, rounded up; by `√n·σ₁` where it only scales the rounding of a difference in float32 or better."""
        return inflate(math.sqrt(self.S.shape[1]) * self.upper * (1 + 1e-15))


class CarriedMatrix:
    """The norm of one real matrix while it trains: `bracket(W)` is proved at every call, and mostly cheap.

    Five rungs, the first that is good enough is taken: Weyl from the last proof; the Schur complement on the followed basis; a
    proof in float32 (`single`), where what it gives away is allowed; a new proof off the basis; one in float64. `used` counts
    them. Weyl is not asked where the last steps were larger than the room, but every now and then.

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
        self.moved, self.skipped = 0.0, 0  # how far the last step measured went, and how many were not measured since
        self.used: Counter[str] = Counter()

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
        """`(lower, upper)` of σ₁(W), with `upper ≤ enough` or, where that is not true, `upper ≤ (1 + rtol)·lower`.

        With `renew=False` only the carried proof is asked, where there is one: cheap, true, and looser. Where `loose` is no
        smaller than rtol, a proof in float32 may take its place if it is that tight.
        """
        return bracket_all([Asked(self, W, enough, rtol, what, renew, loose)])[0]

    def _carried(self, A: Tensor, asked: Asked) -> Iterator[tuple[str, tuple[float, float] | None]]:
        """What the last proof says of A: by Weyl's inequality, then by the Schur complement; nothing where there is no hope."""
        r = self.reference if self._fits(A) else None
        if r is None or (asked.renew and self._hopeless(r, asked.enough)):
            return
        kappa, distance = _distance(A, r)
        if not math.isfinite(distance):
            require_finite(A, asked.what)
        self.moved, self.skipped = distance, 0
        yield "weyl", (max(0.0, deflate(kappa * r.lower) - distance), inflate(inflate(kappa * r.upper) + distance))
        rest = inflate(inflate(kappa * r.beta) + distance)
        if r.V.shape[0] == r.V.shape[1] or rest <= max(asked.enough, kappa * r.upper):
            yield "followed", deflated_bracket(A, r.V, r.defect, rest)

    def _anew(self, A: Tensor, asked: Asked) -> Iterator[tuple[str, tuple[float, float] | None]]:
        """New proofs, tight up to rtol."""
        require_finite(A, asked.what)
        if A.shape[1] > SMALL:
            yield "renewed", self._renew(A, asked.enough, asked.rtol)
        yield "direct", self._direct(A, asked.enough, asked.rtol)

    def _hopeless(self, r: Reference, enough: float) -> bool:
        """Whether a step like the last one measured would use up the room by far; then seven of eight are not measured."""
        if r.V.shape[1] > 1 or self.skipped >= 7 or r.kappa * r.upper + self.moved / 2 <= enough:
            return False
        self.skipped += 1
        return True

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
        pace = torch.tensor([self.moved, self.skipped], dtype=torch.float64)
        state = {"columns": torch.tensor(self.columns), "pace": pace}
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
        moved, skipped = state.get("pace", torch.zeros(2)).tolist()
        self.moved, self.skipped = (moved, int(skipped)) if moved >= 0 and 0 <= skipped <= 7 else (0.0, 0)
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
        defect = orthonormality(V)
        found = None if beta is None else deflated_bracket(A, V, defect, beta)
        if beta is not None and found is not None:
            self.reference = Reference(A.clone(), V, defect, beta, *found)
        return found

    def _start(self, A: Tensor) -> Tensor | None:
        """The vector near the top that is kept."""
        return self.reference.V[:, 0] if self.reference is not None and self._fits(A) else None

    def _single(self, A: Tensor, enough: float) -> Iterator[tuple[str, tuple[float, float] | None]]:
        found = single_bracket(A, self._start(A), enough)
        if found is not None:
            low, high, v = found
            known = inflate(high * (1 + 1e-9))  # room to prove it again when it is loaded
            self.reference = Reference(
                self._copied(A), v[:, None], _unit_defect(v), known, deflate(low * (1 - 1e-6)), known
            )
            yield "single", (low, high)

    def _copied(self, A: Tensor) -> Tensor:
        """A copy of the matrix, in the place of the one kept before."""
        return self.reference.S.copy_(A) if self.reference is not None and self._fits(A) else A.clone()

    def _direct(self, A: Tensor, enough: float, rtol: float) -> tuple[float, float]:
        n = A.shape[1]
        if n <= FIRST:
            found = spectral_norm(A, rtol=rtol / 2)
            low, high, V = float(found.lower), float(found.upper), torch.eye(n).to(A)
        else:
            start = self._start(A)
            low, high, v = cholesky_bracket(A, rtol / 2, start=None if start is None else mixed(start), enough=enough)
            # of a small matrix only the top vector is kept: a new proof costs less than to follow more of them
            more = [] if n <= SMALL else [self._basis(A, 0)[:, :-1]]
            V = orthonormal(torch.cat([v[:, None].to(A.dtype), *more], 1), A)
        upper = inflate(high * (1 + 1e-9))  # room to prove it again when it is loaded, as for the lower end
        self.reference = Reference(self._copied(A), V, orthonormality(V), upper, deflate(low * (1 - 1e-6)), upper)
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
        return orthonormal(V, A)


@dataclass(frozen=True)
class Asked:
    """A question to a carried norm: the arguments of its `bracket`."""

    carried: CarriedMatrix
    W: Tensor
    enough: float
    rtol: float
    what: str
    renew: bool
    loose: float


class _Answer:
    """What is known so far of one question, and whether it is good enough."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.A = asked, _tall(asked.W, asked.what)
        self.lower, self.upper, self.done = 0.0, math.inf, False

    def take(self, rungs: Iterable[tuple[str, tuple[float, float] | None]], slack: float) -> None:
        """Go up some rungs until one will do."""
        for rung, found in rungs:
            if found is None:
                continue
            self.asked.carried.used[rung] += 1
            self.lower, self.upper = max(self.lower, found[0]), min(self.upper, found[1])
            if self.upper <= self.asked.enough or self.upper <= (1 + slack) * self.lower:
                self.done = True
                return

    def renew(self) -> None:
        """New proofs: in float32 where that is allowed and may be tight enough, then as tight as asked."""
        a, A = self.asked, self.A
        fits = a.rtol <= a.loose and A.dtype is torch.float32 and A.device.type == "cpu"
        if fits and single_loss(A.shape[1]) < a.loose:
            self.take(a.carried._single(A, a.enough), a.loose)
        if not self.done:
            self.take(a.carried._anew(A, a), a.rtol)


@torch.no_grad()
def bracket_all(questions: Sequence[Asked]) -> list[tuple[float, float]]:
    """`bracket` for many matrices at once."""
    with full_precision():
        answers = [_Answer(asked) for asked in questions]
        for one in answers:
            one.take(one.asked.carried._carried(one.A, one.asked), one.asked.rtol)
        open_ = [x for x in answers if not x.done and (x.asked.renew or not x.asked.carried._fits(x.A))]
        work = max((x.A.numel() * x.A.shape[1] for x in open_), default=0)
        with serial(work):
            for one in open_:
                one.renew()
        return [(min(x.lower, x.upper), x.upper) for x in answers]


def _rows(x: Tensor) -> Tensor:
    """The matrix or its transpose, whichever lies row by row in memory: sums over it are several times faster."""
    return x.mT if x.mT.is_contiguous() else x


def _tall(W: Tensor, what: str) -> Tensor:
    """The matrix on its smaller side, in the precision it is followed in; refused where it is not a finite real matrix."""
    if W.dim() != 2 or W.is_complex():
        raise InputError(f"expected a real matrix, got {what} of shape {tuple(W.shape)} in {W.dtype}")
    A = W.detach().to(working_dtype(W.dtype))
    if A.numel() == 0:
        return require_finite(A, what)
    return small_side(A.cpu() if A.device.type == "mps" else A)


def _distance(A: Tensor, r: Reference) -> tuple[float, float]:
    """`(κ, d)` with κ a number of the precision of A and `d ≥ ‖A − κS‖_F`, rounding of the difference included."""
    kappa = float(torch.tensor(r.kappa, dtype=A.dtype))
    difference = torch.sub(A, r.S, alpha=kappa)
    d = float(frobenius(_rows(difference)))
    u, lost = 2 * unit_roundoff(A.dtype), 4 * math.sqrt(A.numel()) * torch.finfo(A.dtype).tiny  # by underflow
    return kappa, inflate(d * (1 + u) + u * (d + abs(kappa) * r.size) + lost)


def _unit_defect(v: Tensor) -> float:
    """`orthonormality` of a single column."""
    return inflate(abs(float(v.double() @ v.double()) - 1) + gamma(2 * len(v) + 8, torch.float64) * 1.1)


def _holds(r: Reference) -> bool:
    """Whether everything a stored reference claims can be proved again."""
    claims = (r.defect, r.beta, r.lower, r.upper, r.kappa)
    if r.S.shape[0] < r.S.shape[1] or not all(0 <= x < math.inf for x in claims):
        return False
    if orthonormality(r.V) > r.defect or r.defect > 0.5 or ritz_lower(r.S, r.V, r.defect) < r.lower:
        return False
    S64 = r.S.double()
    below_upper = proved_below(gram_lower(S64), r.upper, gram_error(S64).reshape(1))
    whole = r.V.shape[0] == r.V.shape[1]
    if not whole and not (below_upper and r.beta >= r.upper):
        G, error, lost = deflated_gram(r.S, r.V, r.S @ r.V)
        if not proved_below(G, r.beta - lost, error):
            return False
    found = None if below_upper else deflated_bracket(r.S, r.V, r.defect, r.beta)
    return below_upper or (found is not None and found[1] <= r.upper)
