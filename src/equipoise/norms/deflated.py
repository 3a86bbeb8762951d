"""The norm of a matrix from a basis near its top and a bound off it: the Schur complement of `carried`, and its pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core.precision import deflate, frobenius, gamma, inflate, unit_roundoff
from equipoise.norms.half import gram_lower, lower_error
from equipoise.norms.verify import below

#: numbers of a piece that stays in the cache
_CACHED = 2**17
#: where β is tried between the Ritz value of the last column and the target
PLACES = (0.08, 0.25, 0.5, 0.8, 0.97)


def rest_bound(A: Tensor, V: Tensor, T: Tensor, start: float, target: float) -> float | None:
    """A proved `β ≥ sup ‖A x‖` over unit `x ⟂ V`, between `start` and `target`; None where nothing there could be proved.

    `(A − TVᵀ)x = Ax` for every such x, whatever T; so the norm of the deflated matrix will do, and `λ_max` of its Gram matrix
    is proved below β² by a Cholesky factorisation in the precision of A.
    """
    if V.shape[0] == V.shape[1]:
        return 0.0
    G, error, lost = deflated_gram(A, V, T)
    for place in PLACES:
        beta = start + place * (target - start)
        if proved_below(G, beta - lost, error):
            return beta
    return None


def deflated_gram(A: Tensor, V: Tensor, T: Tensor) -> tuple[Tensor, Tensor, float]:
    """Gram matrix of `A − TVᵀ` with its error, and what the subtraction itself lost."""
    rest = torch.addmm(A, T, V.mT, alpha=-1)
    lost = inflate(gamma(V.shape[1] + 4, A.dtype) * float(inflate(frobenius(A) + frobenius(T) * frobenius(V))))
    G = gram_lower(rest, rest.dtype)
    error = lower_error(float(torch.diagonal(G).sum(dtype=torch.float64)), rest.shape, rest.dtype)
    return G, torch.tensor([error], dtype=torch.float64, device=G.device), lost


def proved_below(G: Tensor, sigma: float, error: Tensor) -> bool:
    """Whether `√λ_max ≤ sigma` is proved for the matrix whose Gram matrix G is, up to `error`."""
    if not sigma > 0:
        return False
    tau = torch.tensor([deflate(sigma * sigma)], dtype=torch.float64, device=G.device)
    return bool(below(G[None], tau, error))


def orthonormal(V: Tensor, like: Tensor) -> Tensor:
    """An orthonormal basis of the columns, up to the rounding of the dtype of `like`."""
    return torch.linalg.qr(V.double())[0].to(like.dtype).contiguous()


def orthonormality(V: Tensor) -> float:
    """`ε ≥ ‖VᵀV − I‖₂`."""
    V64 = V.double()
    gap = V64.mT @ V64 - torch.eye(V.shape[1], dtype=torch.float64, device=V.device)
    return inflate(float(frobenius(gap)) + gamma(2 * V.shape[0] + 8, torch.float64) * float(frobenius(V64)) ** 2)


@dataclass(frozen=True)
class _Thin:
    """`P = VᵀAᵀAV` and `Z = AᵀAV` in float64, with `‖P − VᵀAᵀAV‖₂ ≤ error`; N and v bound ‖A‖_F and ‖V‖_F."""

    P: Tensor
    Z: Tensor
    N: float
    v: float
    g: float
    error: float

    @staticmethod
    def of(A: Tensor, V: Tensor) -> _Thin:
        """By pieces that stay in the cache: A is read once."""
        k, rows = V.shape[1], V.double().mT.contiguous()  # thin matrices as rows: products with columns are far slower
        P, Z, squares = rows.new_zeros(k, k), torch.zeros_like(rows), rows.new_zeros(())
        for piece in A.split(max(1, _CACHED // A.shape[1])):
            wide = piece.double()
            Y = rows @ wide.mT
            P.addmm_(Y, Y.mT)
            Z.addmm_(Y, wide)
            squares += torch.linalg.vector_norm(wide).square()
        g = gamma(sum(A.shape) + k + 16, torch.float64)
        N = inflate(math.sqrt(float(squares)) * (1 + gamma(A.numel() + 8, torch.float64)) + 1e-140)
        v = _length(rows)
        return _Thin(P, Z.mT, N, v, g, 8 * g * N * N * v * v)

    def lower(self, defect: float) -> float:
        """`‖AVy‖/‖Vy‖` for the best y, rounded down."""
        y = torch.linalg.eigh(self.P)[1][:, -1]
        y = y / torch.linalg.vector_norm(y)
        return deflate(math.sqrt(max(0.0, float(y @ self.P @ y) * (1 - 1e-12) - self.error) / (1 + defect)))


def _length(x: Tensor) -> float:
    """‖x‖_F of a float64 tensor, rounded up; one pass."""
    return inflate(float(torch.linalg.vector_norm(x)) * (1 + gamma(x.numel() + 8, torch.float64)) + 1e-140)


def ritz_lower(A: Tensor, V: Tensor, defect: float) -> float:
    """The largest Ritz value of A on V: a lower bound of σ₁."""
    return _Thin.of(A, V).lower(defect)


def deflated_bracket(A: Tensor, V: Tensor, defect: float, rest: float) -> tuple[float, float] | None:
    """`(lower, upper)` of σ₁(A) from `rest ≥ sup ‖Ax‖` over unit `x ⟂ V`, by the Schur complement of the module's text."""
    V64, thin = V.double(), _Thin.of(A, V)
    if thin.N < 1e-130 and not bool(A.any()):
        return 0.0, 0.0
    if not (1e-60 < thin.N < 1e60 and rest < 1e60):
        return None  # squares of squares would leave the range
    off = thin.Z - V64 @ (V64.mT @ thin.Z)
    spread = _length(off)
    lost = thin.g * thin.N**2 * thin.v * (5 + 2 * thin.v**2)
    R, error_r = off.mT @ off, 2 * ((2 * spread + lost) * lost + thin.g * spread * spread)
    square = inflate(rest * rest)
    if V.shape[0] == V.shape[1]:
        R, square, error_r, spread = torch.zeros_like(R), 0.0, 0.0, 0.0
    tau = _smallest(thin.P, R, square)
    for widen in (1e-9, 1e-6):
        tau *= (1 + widen) * (1 + 2 * defect)
        room = deflate(tau - square)
        if room <= 0:
            return None
        error = inflate(thin.error + error_r / room + 16 * unit_roundoff(torch.float64) * spread**2 / room)
        numbers = torch.tensor([[deflate(tau * (1 - defect))], [error]], dtype=torch.float64, device=A.device)
        if bool(below((thin.P + R / room)[None], *numbers)):
            return thin.lower(defect), inflate(inflate(tau) ** 0.5)
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
