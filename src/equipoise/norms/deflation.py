"""Upper bounds of a matrix whose few large directions are followed, and whose rest is bounded once.

One factorisation proves, for a matrix S and a matrix T of few rows,

    SᵀS ⪯ ρ²·I + TᵀT .                                                                                        (1)

For `W = κS + D`, any few directions Q with the orthogonal projector P onto their span, and x = Px + r:

    ‖Wx‖² ≤ a²‖Px‖² + 2c‖Px‖‖r‖ + b²‖r‖²,      hence      ‖W‖² ≤ λ_max [[a², c], [c, b²]]                      (2)
    a = ‖WP‖,   c = ‖(I − P)WᵀWP‖,   b = κ·√(ρ² + ‖T(I − P)‖²) + ‖D‖_F .

a and c are computed from the products `QWᵀ` and `QWᵀW`, at the price of a few vectors, for the weight as it is. Training raises
few singular values far above the others, so b may grow for many steps before (2) exceeds a by more than a little, where Weyl's
inequality alone would lose ‖D‖_F from the first step on.
"""

from __future__ import annotations

from math import hypot, inf, isfinite, sqrt

import torch
from torch import Tensor

from equipoise.core.precision import deflate, gamma, inflate
from equipoise.norms.cholesky import is_below, random_start

#: most directions that are followed: more of them let the rest grow for longer, and cost more in every step
DIRECTIONS = 8
#: the rest is proved that much above its estimated square, and only where that is less than this share of the largest
MARGIN, USEFUL = 1.1, 0.9


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


def improved(G: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """`(Q, values)`: directions after some steps of subspace iteration, with their Ritz values, the smallest first.

    Args:
        G: Gram matrix of S in float32 on the CPU.
        Q: directions to start from, as rows `(k, n)`.
    """
    Q = Q.to(G)
    for _ in range(4):
        Q = _orthonormal(Q @ G)
    values, X = torch.linalg.eigh(((Q @ G) @ Q.mT).double())
    return X.mT.to(Q) @ Q, values


def prove_rest(
    G: Tensor, error: float, size: float, Q: Tensor, values: Tensor
) -> tuple[Tensor, float] | None:
    """Inequality (1): `(T, ρ)`; None where no few directions are larger than the others.

    Args:
        G: Gram matrix of S in float32 on the CPU.
        error: norm of what G may be off by.
        size: at least `‖S‖_F²`, hence `‖G‖_F`.
        Q: improved directions, as rows `(k, n)`.
        values: their Ritz values.
    """
    top = float(values[-1])
    # the last direction tells the size of the rest, from below
    rho = max(MARGIN * float(values[0]), top / 16)
    if len(G) < 4 * DIRECTIONS or not 0 < rho < USEFUL * top:
        return None
    T = (1.05 * values - rho).clamp_min(0).sqrt().to(Q)[:, None] * Q
    H = torch.addmm(G, T.mT, T, alpha=-1)
    taken = float(torch.linalg.matrix_norm(T.double())) ** 2
    # every entry is a sum of products that is subtracted from one of G
    rounding = gamma(len(T) + 8, H.dtype) * (size + error + taken)
    if is_below(H, rho, inflate(error + inflate(2 * rounding))):
        return T.double(), sqrt(inflate(rho))
    return None


def deflated_bracket(
    A: Tensor,
    size: float,
    Q: Tensor,
    T: Tensor,
    rest: float,
    change: tuple[Tensor, float] | None = None,
) -> tuple[float, float, Tensor]:
    """`(lower, upper, Q')` of ‖A‖ by (2), with `Q'` the directions after a step of subspace iteration.

    Args:
        A: the matrix W `(m, n)`.
        size: at least `‖A‖_F`, and `‖κS‖_F + ‖W − κS‖_F`.
        Q: nearly orthonormal rows `(k, n)`, in the precision of A.
        T: `κT` in float64, as rows.
        rest: κρ.
        change: `D = W − κS` as computed, off by a rounding or two of W, and at least `‖W − κS‖_F`; None: W is S.
    """
    k = len(Q)
    images = Q @ A.mT
    back = (images @ A).double()
    Y, Q64 = images.double(), Q.double()
    H = Y @ Y.mT
    X = torch.linalg.eigh(H)[1]
    H = X.mT @ H @ X
    outside = torch.cat([back, T])
    outside = torch.addmm(outside, outside @ Q64.mT, Q64, alpha=-1)
    length = torch.linalg.vector_norm
    row, value, defect, y, c, away = torch.stack(
        [
            H.abs().sum(1).amax(),
            H[-1, -1],
            length(Q64 @ Q64.mT - torch.eye(k).to(Q64)),
            length(Y),
            length(outside[:k]),
            length(outside[k:]),
        ]
    ).tolist()

    # sums in float64 are covered by `slack`, the two products with A by γ‖A‖_F times the length of what is multiplied
    slack = gamma(32 * sum(A.shape) * k, torch.float64)
    g = gamma(max(A.shape) + 8, A.dtype)
    lost = sqrt(A.numel() * torch.finfo(A.dtype).tiny)
    first = 2 * g * size * sqrt(k) + lost
    second = 2 * g * size * y + size * first + lost + slack * size * size
    spread = 2 * (defect + slack)
    if not (spread < 0.5 and isfinite(c)):
        return 0.0, inf, Q
    a = inflate((sqrt(row * (1 + slack)) + first) / sqrt(1 - spread))
    cross = inflate((c * (1 + slack) + second) / sqrt(1 - spread))
    lower = max(0.0, deflate((sqrt(value) * (1 - slack) - first) / sqrt(1 + spread)))
    b = inflate(hypot(rest, away * (1 + slack) + slack * size))
    if change is not None:
        D, drift = change
        # what D does to the directions themselves does not count
        inside = float(length((Q @ D.mT).double())) * (1 - slack) - first
        inside = max(0.0, inside) / sqrt(1 + spread)
        b = inflate(b + sqrt(max(0.0, inflate(drift * drift) - deflate(inside * inside))))
    return lower, _largest(a, b, cross), _orthonormal(back).to(Q)


def _largest(a: float, b: float, cross: float) -> float:
    """`√λ_max [[a², cross], [cross, b²]]`, rounded up."""
    middle, half = (a * a + b * b) / 2, (a * a - b * b) / 2
    return inflate(sqrt(inflate(middle + hypot(half, cross))))
