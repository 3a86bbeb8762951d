"""Upper bounds of a matrix whose few large directions are followed, and whose rest is bounded once.

One factorisation proves, for a matrix S and a matrix T of few rows,

    SᵀS ⪯ ρ²·I + TᵀT .                                                                                        (1)

For `W = κS + D`, any few directions Q with the orthogonal projector P onto their span, and x = Px + r:

    ‖W‖² ≤ λ_max [[diag(h), c], [cᵀ, b²]] ,     that is, ‖W‖² ≤ τ  for every τ > h with  Σ_i c_i²/(τ − h_i) ≤ τ − b²      (2)
    h_i = row sums of |QWᵀWQᵀ|,   c_i = ‖(I − P)WᵀWq_i‖,   b = κ·√(ρ² + ‖T(I − P)‖²) + ‖D‖_F .

h and c are computed from the products `QWᵀ` and `QWᵀW`, at the price of a few vectors, for the weight as it is, after a rotation
of Q that makes h nearly the squares of the singular values of WP. Training raises few singular values far above the others,
so b may grow for many steps before (2) exceeds max h by more than a little, where Weyl's inequality alone would lose ‖D‖_F from
the first step on. And (1) leaves room for the rounding of float32 where a proof of ‖S‖ itself to four digits does not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.core.precision import deflate, gamma, inflate, unit_roundoff
from equipoise.norms.cholesky import expected_loss, is_below, krylov, random_start

#: most directions that are followed: more of them let the rest grow for longer, and cost more in every step
DIRECTIONS = 8
#: most directions that are split off a matrix that is bounded once
MOST = 16


def first_directions(A: Tensor) -> Tensor:
    """Orthonormal rows `(k, n)` to start from, the same every time.

    >>> first_directions(torch.zeros(30, 20)).shape
    torch.Size([4, 20])
    """
    n = A.shape[1]
    k = min(n, max(4, min(DIRECTIONS, n // 64)))
    return _orthonormal(random_start(n * k, A).reshape(-1, n))


def _orthonormal(Q: Tensor) -> Tensor:
    """Orthonormal rows of the same span, row by row in memory: products with few rows are far faster than with columns."""
    return torch.linalg.qr(Q.mT)[0].mT.contiguous()


def prove_rest(
    G: Tensor, error: float, size: float, Q: Tensor, values: Tensor, rho: float
) -> Tensor | None:
    """Inequality (1) for one ρ: T, or None where it is not proved.

    Args:
        G: Gram matrix of S in float32 on the CPU.
        error: norm of what G may be off by.
        size: at least `‖S‖_F²`.
        Q: directions, as rows `(k, n)`.
        values: their Ritz values, in float64.
        rho: ρ², the bound of the rest that is tried.
    """
    T = (1.05 * values - rho).clamp_min(0).sqrt().to(Q)[:, None] * Q
    H = torch.addmm(G, T.mT, T, alpha=-1)
    squares = float(T.double().square().sum()) * (1 + 1e-12)
    # every entry is a sum of products that is subtracted from one of G, whose entries are at most `size` together
    u = unit_roundoff(H.dtype)
    rounding = gamma(len(T) + 4, H.dtype) * squares + 2 * u * (size + error + squares)
    return T if is_below(H, rho, inflate(error + inflate(2 * rounding))) else None


def rest_of_directions(
    G: Tensor, error: float, size: float, Q: Tensor
) -> tuple[Tensor, Tensor, float] | None:
    """Inequality (1): `(Q, T, ρ)` with improved directions Q; None where no few directions are larger than the others.

    Args:
        G: Gram matrix of S in float32 on the CPU.
        error: norm of what G may be off by.
        size: at least `‖S‖_F²`.
        Q: directions to start from, as rows `(k, n)`.
    """
    if len(G) < 4 * DIRECTIONS or not math.isfinite(error):
        return None
    Q = Q.to(G)
    for _ in range(4):
        Q = _orthonormal(Q @ G)
    values, X = torch.linalg.eigh(((Q @ G) @ Q.mT).double())
    top = float(values[-1])
    Q = X.mT.to(Q) @ Q
    # the last direction tells the size of the rest, from below; less than a quarter of the norm would gain nothing
    for margin in (1.05, 1.3):
        rho = max(margin * float(values[0]), top / 16)
        if not 0 < rho < 0.95 * top:
            return None
        T = prove_rest(G, error, size, Q, values, rho)
        if T is not None:
            return Q, T.double(), math.sqrt(inflate(rho))
    return None


def deflated_gram_bracket(
    A: Tensor, G: Tensor, error: float, size: float, rtol: float
) -> tuple[float, float, Tensor]:
    """`(lower, upper, v)` of ‖A‖ from its Gram matrix in float32, by (1) and (2); an infinite upper end where that fails.

    Lanczos steps go on until k of their Ritz pairs `(θ_i, q_i)` with residuals c_i leave a rest that float32 can tell from the
    top: with `τ = θ₁(1 + 1.5·rtol)` the rest may have `ρ² = τ − Σ_{i≤k} c_i²/(τ − θ_i)` by (2), and it has about θ_{k+1}.

    Args:
        A: the matrix `(m, n)` with `m ≥ n`, not zero.
        G: `syrk(A, float32)`.
        error: norm of what G may be off by.
        size: at least `‖A‖_F²`.
        rtol: relative gap to reach.
    """
    loss: list[float] = []

    def division(values: Tensor, residuals: Tensor) -> tuple[int, float]:
        """k, or 0 where no number will do, and ρ²."""
        values, residuals = values[: MOST + 1], residuals[: MOST + 1]
        tau = values[0] * (1 + 1.5 * rtol)
        rho = tau - (residuals.square() / (tau - values)).cumsum(0)[:-1]
        if not loss:
            loss.append(expected_loss(G, float(tau)) + 0.01)  # what Ritz values miss included
        fits = (values[1:] + error < (1 - loss[0]) * rho) & (residuals[1:] < 3e-3 * tau)
        places = fits.nonzero()[:, 0].tolist()
        return (places[0] + 1, float(rho[places[0]])) if places else (0, 0.0)

    def enough(values: Tensor, residuals: Tensor) -> bool:
        return len(values) >= 24 and division(values, residuals)[0] > 0

    values, residuals, vectors = krylov(G.matmul, random_start(len(G), G), 112, enough, every=8)
    k, rho = division(values, residuals)
    Q = _orthonormal(vectors[: max(k, 1)])
    T = prove_rest(G, error, size, Q, values[:k], rho) if k else None
    if T is None:
        return 0.0, math.inf, Q[0]
    lower, upper, Q = deflated_bracket(
        A.double(), inflate(math.sqrt(size)), Q.double(), T.double(), math.sqrt(inflate(rho))
    )
    return lower, upper, Q[0]


def deflated_bracket(
    A: Tensor,
    size: float,
    Q: Tensor,
    T: Tensor,
    rest: float,
    change: tuple[Tensor, float] | None = None,
    enough: float = 0.0,
) -> tuple[float, float, Tensor]:
    """`(lower, upper, Q')` of ‖A‖ by (2), with `Q'` the directions after a step of subspace iteration.

    Args:
        A: the matrix W `(m, n)`.
        size: at least `‖A‖_F`, and `‖κS‖_F + ‖W − κS‖_F`.
        Q: nearly orthonormal rows `(k, n)`, in the precision of A.
        T: `κT` in float64, as rows.
        rest: κρ.
        change: `D = W − κS` as computed, off by a rounding or two of W, and at least `‖W − κS‖_F`; None: W is S.
        enough: an upper end that suffices.
    """
    k = len(Q)
    images = Q @ A.mT
    back = images @ A
    Y = images.double()
    X = torch.linalg.eigh(Y @ Y.mT)[1].mT.flip(0)
    Y, Q64, outside = X @ Y, X @ Q.double(), torch.cat([X @ back.double(), T])
    H = (Y @ Y.mT).abs()
    outside = torch.addmm(outside, outside @ Q64.mT, Q64, alpha=-1)
    one, length = torch.eye(k).to(Q64), torch.linalg.vector_norm
    numbers = [H.diagonal()[:1], length(Y)[None], length(outside[k:])[None]]
    numbers += [length(x @ x.mT - one)[None] for x in (Q64, X)]
    value, y, away, defect, turned, *rows = torch.cat(
        [*numbers, H.sum(1), length(outside[:k], dim=1)]
    ).tolist()

    # sums in float64 are covered by `slack`, the two products with A by γ‖A‖_F times the length of what is multiplied
    slack = gamma(32 * sum(A.shape) * k, torch.float64)
    g = gamma(max(A.shape) + 8, A.dtype)
    lost = math.sqrt(A.numel() * torch.finfo(A.dtype).tiny)
    first = 2 * g * size * math.sqrt(k) + lost
    second = 2 * g * size * y + size * first + lost + slack * size * size
    spread = 2 * (defect + slack)
    if not (spread < 0.5 and turned < 1e-3 and math.isfinite(sum(rows))):
        return 0.0, math.inf, Q
    stretch = inflate(1 / (1 - spread))
    # ‖(Y + E)ᵀz‖² ≤ Σ h_i z_i² + (2‖E‖√max h + ‖E‖²)‖z‖²
    widened = inflate(2 * first * math.sqrt(max(rows[:k])) + first**2 + 2 * slack * y * y)
    h = [inflate(stretch * inflate(x * (1 + slack) + widened)) for x in rows[:k]]
    c = [inflate(math.sqrt(stretch) * (x * (1 + slack) + second)) for x in rows[k:]]
    lower = max(0.0, deflate((math.sqrt(value) * (1 - slack) - first) / math.sqrt(1 + spread)))
    b = inflate(math.hypot(rest, away * (1 + slack) + slack * size))
    Q_next = _orthonormal(back).to(Q)
    if change is None:
        return lower, _largest(h, c, b), Q_next
    D, drift = change
    upper = _largest(h, c, inflate(b + drift))
    if upper > enough:  # what D does to the directions themselves does not count
        inside = float(length((Q @ D.mT).double())) * (1 - slack) - first
        inside = max(0.0, inside) / math.sqrt(1 + spread)
        drift = math.sqrt(max(0.0, inflate(drift * drift) - deflate(inside * inside)))
        upper = _largest(h, c, inflate(b + drift))
    return lower, upper, Q_next


def _largest(h: list[float], c: list[float], b: float) -> float:
    """A root of some τ that satisfies (2), nearly the smallest."""
    square = inflate(b * b)
    arrow = torch.diag(torch.tensor([*h, square], dtype=torch.float64))
    arrow[-1, :-1] = torch.tensor(c, dtype=torch.float64)
    tau = float(torch.linalg.eigvalsh(arrow)[-1])  # reads the lower triangle; an estimate
    for attempt in range(64):
        tau = max(tau, *h) * (1 + 2.0 ** (attempt - 33))
        needed = sum(x * x / (tau - y) for x, y in zip(c, h, strict=True) if x)
        if tau > max(h) and needed * (1 + 1e-12) <= deflate(tau) - square:
            return inflate(math.sqrt(tau))
    return math.inf
