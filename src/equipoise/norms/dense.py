"""The norm of one large matrix: Lanczos steps from below, and a proof from above by one Cholesky factorisation.

Gram iteration needs some ten products of n×n matrices; this needs half a product, some fifty products with vectors and a
factorisation. Both give the same contract: `lower ≤ σ₁ ≤ upper`, proved in floating point. There are two routes.

*In float32, off the top.* A Gram matrix `Ĝ ≈ AᵀA` in float32 is off by up to a per cent of σ₁², too much for σ₁ but not for what
is left of A beside its top space. With V the leading Ritz vectors of Ĝ, `‖Ax‖ ≤ β‖x‖` for all x ⟂ V is proved by a factorisation
in float32; two thin products with A in float64 then give σ₁ by a Schur complement (`norms.deflated`). It takes a spectrum that
falls by some per cent within a dozen singular values.

*In float64.* `AᵀA` and its factorisation in float64, for everything else.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from equipoise.core.precision import deflate, gamma, inflate, ldexp_down, ldexp_up
from equipoise.norms.deflated import deflated_bracket, orthonormal, orthonormality
from equipoise.norms.gram import scaled, small_side, wide
from equipoise.norms.half import gram_lower, lower_error, narrow, subtract_pair, symmetric_product
from equipoise.norms.lanczos import Krylov, krylov, lanczos, mixed, random_start
from equipoise.norms.verify import below, expected_loss, one_thread, verification_loss

#: below this many columns (of the smaller side) batched Gram iteration in float64 is faster
LARGE = 160
#: multiplications of the Gram matrix from which the route in float32 is tried, and the smallest tolerance it is good for
WORK, FINEST = 2**28, 1e-5
#: most vectors that are split off; the share that is left for what Ritz values miss, and largest residual of such that count
MOST, MARGIN, CONVERGED = 16, 5e-3, 3e-3
#: fewest Lanczos steps, and where they were too few
STEPS = (32, 88)


def cholesky_bracket(
    W: Tensor, rtol: float, rounds: int = 6, start: Tensor | None = None, enough: float = 0.0
) -> tuple[float, float, Tensor]:
    """`(lower, upper, v)` for one matrix, v a vector near the top of its smaller side.

    `start` is a guess of v; where it leaves `σ₁ ≤ enough` possible, that is tried first and will do. In float64 `rounds` failed
    proofs are answered by more Lanczos steps, later ones by a wider target, so that the function always ends with a proved bound.
    """
    A = W if W.is_complex() else small_side(W)
    if start is None and not W.is_complex() and A.numel() * A.shape[1] >= WORK and rtol >= FINEST:
        found = _off_the_top(A, rtol)
        if not isinstance(found, Tensor):
            return found
        start = mixed(found)
    return _in_double(W, rtol, rounds, start, enough)


def _off_the_top(A: Tensor, rtol: float) -> tuple[float, float, Tensor] | Tensor:
    """The route in float32, of A with no more columns than rows; where it does not lead there, the best vector found."""
    n = A.shape[1]
    G = gram_lower(A, torch.float32)
    trace, v = float(torch.diagonal(G).sum(dtype=torch.float64)), random_start(n, G)
    if not 1e-15 < trace < 1e15:
        return v
    with one_thread(n**3):
        return _from_gram(A, G, trace, v, rtol)


def _from_gram(A: Tensor, G: Tensor, trace: float, v: Tensor, rtol: float) -> tuple[float, float, Tensor] | Tensor:
    """The same, with `G ≈ AᵀA` in float32 and a start vector."""
    f32 = torch.float32
    error, product = lower_error(trace, A.shape, f32), symmetric_product(G)
    division = _Division(G, error, rtol)
    for fewest in STEPS:  # a Ritz vector may have been missed: once more with more steps
        space = krylov(product, v, 112, division.found(fewest))
        k, square, Y = division.of(space)
        if not k:
            return space.top()
        V = orthonormal(space.vectors(Y[:, :k]), G)
        Z = torch.stack([product(x.contiguous()) for x in V.mT], 1)
        B = Z - V @ (V.mT @ Z) / 2  # VBᵀ + BVᵀ vanishes off V, and takes the top out of G
        size = inflate(trace + 2 * error) + 2 * math.sqrt(k * float(B.double().square().sum())) * (1 + 1e-3)
        numbers = [[square], [inflate(error + gamma(2 * k + 4, f32) * size)]]
        if bool(below(subtract_pair(G, V, B)[None], *torch.tensor(numbers, dtype=torch.float64, device=A.device))):
            found = deflated_bracket(A, V, orthonormality(V), inflate(math.sqrt(inflate(square))))
            if found is not None and found[1] <= (1 + rtol) * found[0]:
                return *found, V[:, 0]
    return V[:, 0].contiguous()


class _Division:
    """How many Ritz vectors of Ĝ to split off, and what is to be proved of the rest."""

    def __init__(self, G: Tensor, error: float, rtol: float) -> None:
        self.G, self.error, self.rtol = G, error, rtol
        self.loss = 0.0  # what the factorisation will lose, of the norm

    def of(self, space: Krylov) -> tuple[int, float, np.ndarray]:
        """`(k, β², Y)`: k is 0 where no number will do; Y holds all Ritz vectors.

        For `τ = θ₁(1 + 1.5 rtol)` the Schur complement holds up to `β² = τ − Σ r_i²/(τ − θ_i)`; the rest has about θ_{k+1}.
        """
        theta, r, Y = space.ritz()
        self.loss = self.loss or expected_loss(self.G, float(theta[0]))
        tau = theta[0] * (1 + 1.5 * self.rtol)
        beta = tau - np.cumsum(r * r / (tau - theta))[: min(MOST, len(theta) - 1)]
        after = slice(1, len(beta) + 1)
        fits = theta[after] * (1 + MARGIN) + self.error <= beta * (1 - self.loss - MARGIN)
        good = fits & (r[after] <= CONVERGED * tau)
        k = int(good.argmax()) + 1 if good.any() else 0
        return k, float(beta[k - 1]) if k else 0.0, Y

    def found(self, fewest: int) -> Callable[[Krylov], bool]:
        """Whether there is such a number, after that many steps."""

        def stop(space: Krylov) -> bool:
            size = len(space.diagonal)
            return size >= fewest and size % 8 == 0 and self.of(space)[0] > 0

        return stop


def _quotient(multiply: Callable[[Tensor], Tensor], v: Tensor, size: float) -> float:
    """`v*Gv/v*v` for G ⪰ 0 of trace at most `size`, rounded down: `|v|ᵀ|G||v| ≤ ‖G‖_F‖v‖²` and `‖G‖_F ≤ tr G`."""
    v = v / v.abs().amax()
    g = gamma(4 * len(v) + 32, torch.float64)
    value = float(torch.vdot(v, multiply(v)).real) / float(torch.vdot(v, v).real)
    return deflate(value) - inflate(g * (2.0 * size + abs(value)))


def _in_double(W: Tensor, rtol: float, rounds: int, start: Tensor | None, enough: float) -> tuple[float, float, Tensor]:
    """The route in float64: Lanczos on `G = A*A`, then a proof that `G ⪯ upper²·I`.

    Everything is read off the one Gram matrix, which differs from the true one by at most `error` in norm: the lower end is
    `√(v*Gv/v*v − error)`, the upper end a verified factorisation. A failed proof means that the Ritz vector had not converged:
    Lanczos goes on from it, and after `rounds` failures the target is widened instead, at most up to the Frobenius norm.
    """
    A, e = W, 0
    G = gram_lower(A)
    trace = float(torch.diagonal(G).real.sum())
    if not 1e-15 < trace < 1e15:  # rescaling costs two passes: only where float32 squares might leave the range
        if not bool(A.any()):
            return 0.0, 0.0, A.new_ones(G.shape[-1])
        A, exponent = scaled(A)
        e = int(exponent)
        G = gram_lower(A)
        trace = float(torch.diagonal(G).real.sum())
    n, (rows, columns) = len(G), A.shape
    length = (2 if A.is_complex() else 1) * max(rows, columns) + 8
    g = gamma(length + n, torch.float64)
    size = inflate(trace * (1 + g))  # ‖A‖_F²
    error = inflate(gamma(length, torch.float64) * 1.4143 * size) + 4.0 * n * length * torch.finfo(torch.float64).tiny
    tolerance = max(rtol, 4 * verification_loss(n, G.dtype))
    exact = symmetric_product(G, double=True)
    fine = tolerance < 1e-5  # float32 would not tell the top from its neighbours
    quick = exact if fine else symmetric_product(G)
    slack = tolerance * 0.9
    v = random_start(n, G) if start is None or not bool(start.any()) else start.to(G)
    v = v if fine else narrow(v)
    best = torch.zeros_like(v)
    longest = int(torch.diagonal(G).real.argmax())
    best[longest] = 1  # the longest column: a lower end that is never 0
    lower = float(G[longest, longest].real) - error

    def proved(tau: float) -> bool:
        return bool(below(G[None], *(torch.tensor([x], dtype=torch.float64, device=G.device) for x in (tau, error))))

    if start is not None and enough > 0:
        v = quick(v)
        value, tau = _quotient(exact, wide(v), size) - error, deflate(deflate(ldexp_down(enough, -e)) ** 2)
        if value < tau < math.inf and proved(tau):
            return ldexp_down(deflate(math.sqrt(max(value, lower, 0.0))), e), enough, v
    while True:
        v = lanczos(quick, v, steps=100, settle=slack / 2)
        value = _quotient(exact, wide(v), size) - error
        if value > lower:
            best, lower = v, value
        low = deflate(math.sqrt(max(lower, 0.0)))
        tau = (low * (1 + slack)) ** 2
        if tau >= size or proved(tau):
            upper = inflate(math.sqrt(inflate(min(tau, size))))
            return ldexp_down(low, e), ldexp_up(upper, e), best
        rounds -= 1
        if rounds <= 0:
            slack *= 2
