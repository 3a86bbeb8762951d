"""One multiplier per switching neuron: the best proved ℓ2 gain of `δf = J δx + G v`, `δz = C δx + D v`, `|v_j| ≤ |δz_j|`.

For any `s > 0` write S = diag(s) and stack the outputs below the neurons, `C̃ = [C; J]`, `D̃ = [D; G]`. If

    P = diag(s, τ) − D̃ S D̃ᵀ − C̃ C̃ᵀ ⪰ 0     then     ‖δf‖² ≤ τ‖δx‖².

*Proof.* `P ⪰ 0` says that `R = diag(s, τ)^(−1/2) [C̃, D̃ S^(1/2)]` has norm at most 1; apply it to `(δx, S^(−1/2) v)`:
`Σ δz_j²/s_j + ‖δf‖²/τ ≤ ‖δx‖² + Σ v_j²/s_j`, and `v_j² ≤ δz_j²`. ∎  (Multipliers t = 1/s of LipSDP-Neuron, restricted to
neurons that can switch, with the input's dimension gone: only `C̃C̃ᵀ` enters.)

The least τ is a convex problem, also in `u = log s`: `ρ·log τ − log det(I − RRᵀ)` is minimised by Newton's method for
growing ρ. With `X = (I − RRᵀ)⁻¹` the derivatives are entrywise: `tr(X ∂_iP X ∂_jP) = X_ij² − Y_ij² − Y_ji² + Z_ij²`, `Y = XA`,
`Z = AᵀXA`, `A = diag(s, τ)^(−1/2) D̃ S^(1/2)`; some thirty steps of a few n³ operations.

*Rounding.* Every s is a bound, so only the last one is proved: ‖R‖ < 1 for the stored numbers by a verified Cholesky
factorisation (`norms.cholesky`), less the distance of the stored R from the true one.

References: Fazlyab et al. 2019 (LipSDP); Rump 2006 (verified positive definiteness).

*The maps.* The network is one linear map and the neurons that may switch: `δz = C δx + D v`, `δf = J δx + G v`.
On a ball the secant slope of neuron j lies in `[a_j, b_j]`. Where both agree the neuron is linear and part of the maps.
For the others `δy_j = m_j δz_j + w_j v_j` with `|v_j| ≤ |δz_j|`, m and w middle and half-width. One backward walk per
row gives C, D (strictly lower triangular by layers), J and G. What rounding does to a row moves it by at most `slack·‖δx‖`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from equipoise.core.precision import float64, gamma, inflate
from equipoise.lipschitz.local.backward import ENTRIES, Ball, Slopes, difference_spread, walk
from equipoise.lipschitz.rules.registry import norm_of
from equipoise.norms.cholesky import below

_U = 2.0**-53
#: a multiplier never falls below this many times its row's rounding error
_NOISE = 1e8
#: relative gap of τ at which Newton's method stops
GAP = 1e-3
#: ρ over the problem's size at the start; its growth; Newton's decrement λ² at which it grows
FIRST, GROWTH, NEAR = 0.1, 6.0, 1.0
#: steps begin at this share of 1/(1 + λ), which keeps them in the cone most of the time
AHEAD = 1.4


@dataclass(frozen=True)
class Reduced:
    """`C` and `D` with the rows of the outputs (J and G) below those of the switching neurons; `counts` per activation."""

    C: Tensor
    D: Tensor
    slack: Tensor
    counts: tuple[int, ...]

    @property
    def switching(self) -> int:
        """Number of neurons that may switch."""
        return self.D.shape[1]

    def outputs(self, chosen: Tensor) -> Reduced:
        """The same neurons with only some of the outputs (indices)."""
        keep = torch.cat([torch.arange(self.switching), self.switching + chosen])
        return Reduced(self.C[keep], self.D[keep], self.slack[keep], self.counts)


def count_switching(slopes: Slopes) -> int:
    """Neurons whose slope is not a constant."""
    return sum(int((width > 0).sum()) for _, width in slopes.values())


def reduced_maps(ball: Ball, slopes: Slopes, outputs: Tensor) -> Reduced:
    """The maps of `outputs·f` for rows of outputs (p, size of the last node).

    Args:
        ball: with bounds of differences for all nodes.
        slopes: of its activations, as `slope_ranges` gives them.
        outputs: the rows.
    """
    network = ball.network
    index = {k: (width > 0).nonzero().flatten() for k, (_, width) in slopes.items()}
    starts, n = {}, 0
    for k, i in index.items():
        starts[k], n = n, n + len(i)
    spread = difference_spread(ball, slopes)
    p, d = len(outputs), network.sizes[0]
    C, D = torch.zeros(n + p, d, dtype=torch.float64), torch.zeros(n + p, n, dtype=torch.float64)
    slack = torch.zeros(n + p, dtype=torch.float64)

    def fill(at: int, node: int, rows: Tensor) -> None:
        place = slice(at, at + len(rows))

        def through(i: int, A: Tensor) -> tuple[Tensor, None]:
            middle, width = slopes[i]
            if len(index[i]):
                D[place, starts[i] : starts[i] + len(index[i])] = A[:, index[i]] * width[index[i]]
            return A * middle, None

        C[place], _, error = walk(network, node, rows, through, spread, offset=False)
        slack[place] = inflate(error * (1 + 1e-9))

    chunk = max(1, ENTRIES // network.widest)
    for k, i in index.items():
        source = network.activations[k].source
        for first, part in enumerate(i.split(chunk) if len(i) else ()):
            fill(starts[k] + first * chunk, source, one_hot(part, network.sizes[source]).double())
    fill(n, network.last, outputs.double())
    return Reduced(C, D, slack, tuple(len(i) for i in index.values()))


@dataclass(frozen=True)
class Multipliers:
    """A proved constant with the multipliers that prove it."""

    bound: float
    s: Tensor
    steps: int


@dataclass
class _Point:
    """A feasible point: `theta = (s, τ)`, the factor of `I − RRᵀ`, and `A`."""

    theta: Tensor
    factor: Tensor
    A: Tensor


@dataclass(frozen=True)
class _Problem:
    """`K = C̃C̃ᵀ` and `D̃` with n neurons and p outputs."""

    K: Tensor
    D: Tensor
    counts: tuple[int, ...]
    n: int
    p: int

    @classmethod
    def of(cls, maps: Reduced) -> _Problem:
        """The problem of some maps; rounding errors keep multipliers away from 0."""
        n, p = maps.switching, len(maps.slack) - maps.switching
        K = maps.C @ maps.C.mT
        K.diagonal().add_((_NOISE * maps.slack).square())
        return cls(K, maps.D, (*maps.counts, p), n, p)

    def is_finite(self) -> bool:
        """Whether all numbers are."""
        return bool(torch.isfinite(self.K).all() & torch.isfinite(self.D).all())

    def scales(self, theta: Tensor) -> Tensor:
        """`diag(s, τ)`."""
        return torch.cat([theta[: self.n], theta[self.n].expand(self.p)])

    def at(self, theta: Tensor) -> _Point | None:
        """The point, or None outside the cone."""
        root = self.scales(theta).rsqrt()
        A = self.D * (root[:, None] * theta[: self.n].sqrt())
        M = -(A @ A.mT) - self.K * (root[:, None] * root)
        M.diagonal().add_(1)
        factor, info = torch.linalg.cholesky_ex(M)
        return None if int(info) or not torch.isfinite(factor).all() else _Point(theta, factor, A)


def best_multipliers(
    maps: Reduced,
    *,
    steps: int = 200,
    gap: float = GAP,
    enough: float = 0.0,
    deadline: float = inf,
) -> Multipliers | None:
    """The least proved constant found; None where nothing could be proved (values beyond the floats).

    Args:
        maps: of the network on a ball.
        steps: of Newton's method at most.
        gap: relative gap of `τ = L²` at which to stop.
        enough: stop as soon as the constant is below this.
        deadline: of `time.process_time()`; the best so far is proved when it is reached.
    """
    problem = _Problem.of(maps)
    point = _cold(problem) if problem.is_finite() else None
    if point is None:
        return None
    points, taken = _descend(problem, point, steps, gap, enough, deadline)
    for theta in reversed(points):  # the last is the best, but the closest to the edge of the cone
        s = theta[: problem.n]
        bound = constant_by(maps, s)
        if bound < inf:
            return Multipliers(bound, s, taken)
    return None


def _cold(problem: _Problem) -> _Point | None:
    """Feasible by construction: for m layers with rows `B_k = [C_k, D_k S^(1/2)]`, `s_k > m·‖B_k‖²` in every metric does."""
    n, layers = problem.n, sum(count > 0 for count in problem.counts)
    s, at = torch.zeros(n + problem.p, dtype=torch.float64), 0
    for count in problem.counts:
        i = slice(at, at + count)
        at += count
        if count == 0:
            continue
        E = problem.K[i, i] + (problem.D[i] * s[:n]) @ problem.D[i].mT
        d = E.diagonal()
        d = d.clamp_min(float(d.max()) * 1e-6 + 1e-290) if at <= n else torch.ones_like(d)
        root = d.rsqrt()
        scaled = E * (root[:, None] * root)
        if not torch.isfinite(scaled).all():
            return None
        s[i] = 1.1 * layers * torch.linalg.eigvalsh(scaled)[-1].clamp_min(1e-290) * d
    return problem.at(s[: n + 1])


def _derivatives(problem: _Problem, point: _Point) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian of `−log det P` by `log theta`, without the share of `log theta` itself in the Hessian."""
    n = problem.n
    X = torch.cholesky_inverse(point.factor)
    Y = X @ point.A
    Z = point.A.mT @ Y
    out = slice(n, n + problem.p)
    g = torch.empty(n + 1, dtype=torch.float64)
    g[:n] = Z.diagonal() - X.diagonal()[:n]
    g[n] = -X.diagonal()[out].sum()
    H = torch.empty(n + 1, n + 1, dtype=torch.float64)
    square = Y[:n].square()
    H[:n, :n] = X[:n, :n].square() - square - square.mT + Z.square()
    H[:n, n] = X[:n, out].square().sum(1) - Y[out].square().sum(0)
    H[n, :n] = H[:n, n]
    H[n, n] = X[out, out].square().sum()
    return g, H


def _newton(g: Tensor, H: Tensor) -> Tensor:
    """`−H⁻¹g`, damped until H is positive definite."""
    damping, own = 1e-12, H.diagonal().abs().clamp_min(1e-300)
    while damping < 1e6:
        factor, info = torch.linalg.cholesky_ex(H + torch.diag(damping * own))
        if not int(info):
            return -torch.cholesky_solve(g[:, None], factor)[:, 0]
        damping = max(30 * damping, 1e-8)
    return -g / own


def _descend(
    problem: _Problem, point: _Point, steps: int, gap: float, enough: float, deadline: float
) -> tuple[list[Tensor], int]:
    """Newton's method on `ρ·log τ − log det(I − RRᵀ)` in log theta, ρ growing whenever a step lands near its minimum.

    Returns the points at which ρ grew, the best of all last, and the number of steps.
    """
    n, size = problem.n, problem.n + problem.p
    weight, least, taken = FIRST * size, inf, 0
    best, path = point.theta, [point.theta]
    while n:
        # the least τ for these multipliers, by the outputs' Schur complement
        last = point.factor[n:, n:]
        own = float(point.theta[n]) * (1 - float(torch.linalg.eigvalsh(last @ last.mT)[0]))
        if own < least:
            best, least = point.theta, own
        stop = least <= enough * enough * (1 - 1e-6) or weight > GROWTH * size / gap
        if stop or taken == steps or time.process_time() > deadline:
            break
        g, H = _derivatives(problem, point)
        H.diagonal().add_(g)
        g[:n] += 1
        g[n] += problem.p + weight
        d = _newton(g, H)
        decrement = float(-g @ d)
        if not isfinite(decrement):
            break
        better, a = _line(problem, point, d, decrement, weight)
        if better is None:
            break
        point, taken = better, taken + 1
        if decrement < NEAR and a == 1:
            path.append(point.theta)
            weight *= GROWTH
    return [*path, best], taken


def _line(
    problem: _Problem, point: _Point, d: Tensor, decrement: float, weight: float
) -> tuple[_Point | None, float]:
    """A step along d that pays, and its length: `AHEAD/(1 + λ)`, halved until it does."""
    n, value = problem.n, -2 * float(point.factor.diagonal().log().sum())
    guess = AHEAD / (1 + sqrt(max(decrement, 0.0)))
    a = min(1.0, 4.0 / max(float(d.abs().max()), 1e-300), guess)
    while a > 1e-6:
        found = problem.at(point.theta * torch.exp(a * d))
        if found is not None:
            new = weight * a * float(d[n]) - 2 * float(found.factor.diagonal().log().sum())
            if new < value - 0.1 * a * decrement:
                return found, a
        a /= 2
    return None, 0.0


def constant_by(maps: Reduced, s: Tensor) -> float:
    """A proved constant with these multipliers, just above the least one; infinite where none is proved.

    With `N = diag(s) − D S Dᵀ − C Cᵀ` and `M = J Cᵀ + G S Dᵀ` the least τ is `λ_max(JJᵀ + GSGᵀ + M N⁻¹ Mᵀ)`.

    Args:
        maps: of the network on a ball.
        s: multipliers, one per neuron.
    """
    problem = _Problem.of(maps)
    n = problem.n
    E = problem.K + (problem.D * s) @ problem.D.mT
    factor, info = torch.linalg.cholesky_ex(torch.diag(s) - E[:n, :n])
    Y = torch.linalg.solve_triangular(factor, E[:n, n:], upper=False)
    E = E[n:, n:] + Y.mT @ Y
    if int(info) or not torch.isfinite(E).all():
        return inf
    least = max(float(torch.linalg.eigvalsh(E)[-1]), 0.0)
    floor = _NOISE * norm_of(maps.slack[n:]) + 1e-290
    for more in (1e-9, 1e-7, 1e-5, 1e-3, 1e-1):
        L = max(sqrt(least) * (1 + more), floor)
        if proves(maps, s.sqrt(), L):
            return L
    return inf


def proves(maps: Reduced, sigma: Tensor, L: float) -> bool:
    """Whether `‖δf‖ ≤ L‖δx‖` is proved with `s = sigma²` for all maps within `slack` of the stored ones.

    Args:
        maps: of the network on a ball.
        sigma: roots of the multipliers, one per neuron.
        L: the constant.
    """
    n, p = maps.switching, len(maps.slack) - maps.switching
    d = maps.C.shape[1]
    inverse = 1 / torch.cat([sigma, sigma.new_full((p,), L)])
    C, A = maps.C * inverse[:, None], maps.D * (inverse[:, None] * sigma)
    G = C @ C.mT + A @ A.mT
    trace = float(G.diagonal().sum())
    if not isfinite(trace):
        return False
    trace = inflate(trace * (1 + gamma(d + n + 64, torch.float64)))
    error = gamma(d + n + 64, torch.float64) * trace + 1e-290
    apart = inflate(norm_of(maps.slack * inverse) * (1 + 1e-9) + 16 * _U * sqrt(trace) + 1e-290)
    if apart >= 0.5:
        return False
    tau = float64([(1 - apart) ** 2 * (1 - 8 * _U)])
    return bool(below(G[None], tau, float64([error])))
