"""Semidefinite programs for feed-forward chains: LipSDP-neuron and ECLipsE, whose answers are proved again before use.

With slopes in [α, β] and diagonal multipliers Λ_i ≥ 0 (one per hidden neuron), `L² ≤ ρ` if the block matrix

    P = diag(I, 0, …, 0) − Σ_i Q_i(Λ_i) − (1/ρ)·W_lᵀW_l ⪰ 0,
    Q_i = −αβ zᵀΛ_i z + (α + β) zᵀΛ_i x − xᵀΛ_i x,     z = W_i x_{i−1}.

A solver (cvxpy) proposes the Λ_i and is not trusted: its multipliers are clipped to be non-negative, mixed with those of
the closed form (which satisfy the inequality strictly), and ρ is raised until a Cholesky factorisation proves `P ⪰ 0` in
floating point (`norms.cholesky`). Weights are divided by their norms first, and W_1 is replaced by a Cholesky factor of
`W_1W_1ᵀ`, a little enlarged: what `{W_1x : |x| ≤ 1}` contains, its image contains too.

References: Fazlyab et al. 2019 (LipSDP); Xu & Sivaranjani 2024 (ECLipsE).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise.core.bounds import Bound, Kind
from equipoise.core.errors import InputError, Refused
from equipoise.core.precision import frobenius, full_precision, gamma, inflate
from equipoise.lipschitz.chains import Slopes, chain_bound, checked_chain, closed_multipliers
from equipoise.lipschitz.logs import exp_up, log_product, log_up
from equipoise.maps.linear import Matrix
from equipoise.norms import spectral_norm
from equipoise.norms.cholesky import below

Method = Literal["lipsdp", "eclipse"]
#: neurons of all layers together that a solver is asked for
LARGEST = 600
_MIXES = (0.0, 1e-5, 1e-3, 3e-2, 0.3, 1.0)


@dataclass(frozen=True)
class Chain:
    """Weights of norm about 1 in float64 with the logarithm of what they were divided by; `error` bounds what that lost."""

    weights: list[Tensor]
    slopes: list[tuple[float, float]]
    scale: float
    error: float


def sdp_bound(
    weights: Sequence[Tensor], slopes: Slopes = (0.0, 1.0), method: Method = "lipsdp", solver: str | None = None
) -> Bound:
    """Upper bound of the Lipschitz constant of `W_l φ(… φ(W_1 x))` by a semidefinite program, never above `chain_bound`.

    Guarantee: that of `chain_bound`; the solver's answer only says where to look for a proof.

    Args:
        weights: the matrices `(out, in)` from input to output.
        slopes: interval of slopes of the activation, one for all or one per hidden layer; ReLU by default.
        method: `lipsdp` (all layers in one program, tightest) or `eclipse` (one program per layer).
        solver: name of a cvxpy solver; by default cvxpy chooses.

    >>> _ = torch.manual_seed(0)
    >>> W = [torch.randn(5, 4), torch.randn(5, 5), torch.randn(2, 5)]
    >>> float(sdp_bound(W)) <= chain_bound(W)
    True
    """
    if method not in ("lipsdp", "eclipse"):
        raise InputError(f"method must be lipsdp or eclipse, got {method!r}")
    layers, each = checked_chain(weights, slopes)
    closed = chain_bound(weights, slopes)
    if len(layers) < 2:
        return Bound(closed, Kind.UPPER, "one matrix")
    for alpha, beta in each:
        if not (beta > 0 and -beta < alpha < beta):
            raise Refused(f"slopes ({alpha}, {beta}) have no such program: they must satisfy −β < α < β")
    found = sdp_log([Matrix(w) for w in layers], each, method, solver)
    value = closed if found is None else min(closed, exp_up(found))
    return Bound(value, Kind.UPPER, f"{method}, certified" if value < closed else "closed form")


def sdp_log(
    layers: Sequence[Matrix],
    slopes: Sequence[tuple[float, float]],
    method: Method = "lipsdp",
    solver: str | None = None,
) -> float | None:
    """Logarithm of the certified bound of a chain; None where nothing was proved."""
    with torch.no_grad(), full_precision():
        chain = normalised(layers, slopes)
        fast = closed_multipliers(chain.weights, slopes)
        if fast is None:
            return None
        found = certified(chain, (_lipsdp if method == "lipsdp" else _eclipse)(chain, solver), fast)
    return None if found is None else log_product(chain.scale, log_up(found) / 2)


def normalised(layers: Sequence[Matrix], slopes: Sequence[tuple[float, float]]) -> Chain:
    """Divide every matrix by (about) its norm, and replace the first by a square factor that is not smaller."""
    neurons = sum(layer.matrix.shape[0] for layer in layers)
    if neurons > LARGEST:
        raise Refused(
            f"a semidefinite program over {neurons} neurons is too large (at most {LARGEST}); "
            "use the closed form (chain_bound)"
        )
    scale, error, result = 0.0, 0.0, []
    for layer in layers:
        size = float(spectral_norm(layer.matrix).upper) or 1.0
        scale = log_product(scale, log_up(size))
        scaled = layer.matrix.double() / size
        error = inflate(error + 4 * 2.0**-53 * float(frobenius(scaled)) + inflate(layer.error / size))
        result.append(scaled)
    first = result[0]
    A = first @ first.mT
    n = len(A)
    rounding = inflate(gamma(first.shape[1] + n + 16, torch.float64) * float(frobenius(first)) ** 2)
    A = A + max(1e-11, 64 * (n + 8) * rounding + 4 * error) * torch.eye(n, dtype=torch.float64)
    result[0] = torch.linalg.cholesky(A)  # L Lᵀ ⪰ W Wᵀ, since the shift exceeds all rounding errors
    return Chain(result, list(slopes), scale, error)


def matrix(chain: Chain, multipliers: Sequence[Tensor]) -> Tensor:
    """`P` without its last term."""
    sizes = [chain.weights[0].shape[1], *(w.shape[0] for w in chain.weights[:-1])]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    P = torch.zeros(starts[-1], starts[-1], dtype=torch.float64)
    P[: sizes[0], : sizes[0]] = torch.eye(sizes[0], dtype=torch.float64)
    layers = zip(chain.weights[:-1], chain.slopes, multipliers, strict=True)
    for i, (W, (alpha, beta), lam) in enumerate(layers):
        here, there = slice(starts[i], starts[i + 1]), slice(starts[i + 1], starts[i + 2])
        LW = lam[:, None] * W
        P[here, here] += alpha * beta * (W.mT @ LW)
        P[there, here] -= (alpha + beta) / 2 * LW
        P[here, there] = P[there, here].mT
        P[there, there] += torch.diag(lam)
    return P


def certified(chain: Chain, proposed: Sequence[Tensor] | None, fast: Sequence[Tensor]) -> float | None:
    """The smallest ρ for which `P ⪰ 0` was proved, over mixtures of the proposed multipliers and the closed form's."""
    best: float | None = None
    for mix in _MIXES if proposed is not None else (1.0,):
        lam = [(1 - mix) * p.clamp_min(0) + mix * f for p, f in zip(proposed or fast, fast, strict=True)]
        rho = _smallest(chain, matrix(chain, lam), max(float(v.max()) for v in lam))
        if rho is not None and (best is None or rho < best):
            best = rho
        if best is not None and mix >= 1e-3 and proposed is not None:
            break
    return best


def _smallest(chain: Chain, P: Tensor, largest: float) -> float | None:
    """Raise ρ from the generalised eigenvalue until the proof succeeds."""
    last = chain.weights[-1]
    n = last.shape[1]
    LL, info = torch.linalg.cholesky_ex(P)
    if int(info) != 0:
        return None
    V = torch.linalg.solve_triangular(LL, torch.cat([P.new_zeros(len(P) - n, len(last)), last.mT]), upper=False)
    rho = float(torch.linalg.matrix_norm(V, 2)) ** 2
    slack = 1e-9
    while slack < 10:
        trial = rho * (1 + slack)
        if _proved(chain, P, trial, largest):
            return inflate(trial)
        slack *= 4
    return None


def _proved(chain: Chain, P: Tensor, rho: float, largest: float) -> bool:
    last = chain.weights[-1]
    n = last.shape[1]
    Q = P.clone()
    Q[-n:, -n:] -= last.mT @ last / rho
    top = float(frobenius(Q))
    steep = max(b * b for _, b in chain.slopes)
    mass = sum(float(frobenius(w)) ** 2 for w in chain.weights) + len(Q)
    rounding = gamma(4 * max(w.shape[0] + w.shape[1] for w in chain.weights) + 64, torch.float64)
    error = inflate((rounding * mass + 4 * chain.error) * (1 + (1 + steep) * 2 * largest + 1 / rho))
    G = top * torch.eye(len(Q), dtype=torch.float64) - (Q + Q.mT) / 2
    limit = torch.tensor([top], dtype=torch.float64)
    return bool(below(G[None], limit, torch.tensor([inflate(error + 4 * 2.0**-53 * top)], dtype=torch.float64)))


def _cvxpy() -> Any:
    try:
        import cvxpy
    except ImportError as missing:
        raise InputError("semidefinite programs need cvxpy: pip install 'equipoise[sdp]'") from missing
    return cvxpy


def _solve(cp: Any, problem: Any, solver: str | None) -> bool:
    """Whether the solver came back with something; what it is worth is for the proof to say."""
    if solver is not None and solver not in cp.installed_solvers():
        raise InputError(f"solver {solver!r} is not installed; cvxpy has {', '.join(cp.installed_solvers())}")
    try:
        problem.solve(solver=solver)
    except cp.error.SolverError:
        return False
    return problem.status in ("optimal", "optimal_inaccurate")


def _lipsdp(chain: Chain, solver: str | None) -> list[Tensor] | None:
    """LipSDP-neuron: `max 1/ρ` over all multipliers at once."""
    cp = _cvxpy()
    W = [w.numpy() for w in chain.weights]
    sizes = [W[0].shape[1], *(w.shape[0] for w in W[:-1])]
    lam = [cp.Variable(n, nonneg=True) for n in sizes[1:]]
    theta = cp.Variable(nonneg=True)
    blocks: list[list[Any]] = [[_zeros(a, b) for b in sizes] for a in sizes]
    blocks[0][0] = _eye(sizes[0])
    for i, (alpha, beta) in enumerate(chain.slopes):
        LW = cp.diag(lam[i]) @ W[i]
        if alpha:
            blocks[i][i] = blocks[i][i] + alpha * beta * (W[i].T @ LW)
        blocks[i + 1][i] = -(alpha + beta) / 2 * LW
        blocks[i][i + 1] = blocks[i + 1][i].T
        blocks[i + 1][i + 1] = cp.diag(lam[i])
    blocks[-1][-1] = blocks[-1][-1] - theta * (W[-1].T @ W[-1])
    P = cp.bmat(blocks)
    if not _solve(cp, cp.Problem(cp.Maximize(theta), [(P + P.T) / 2 >> 0]), solver):
        return None
    return [torch.from_numpy(v.value).double() for v in lam]


def _eclipse(chain: Chain, solver: str | None) -> list[Tensor] | None:
    """ECLipsE: layer by layer, `max c` such that the next layer's Gram matrix fits c times below what is left."""
    cp = _cvxpy()
    W = [w.numpy() for w in chain.weights]
    X = _eye(W[0].shape[1])
    found = []
    for i, (alpha, beta) in enumerate(chain.slopes):
        n, m = W[i].shape[0], (alpha + beta) / 2
        lam, c = cp.Variable(n, nonneg=True), cp.Variable(nonneg=True)
        LW = cp.diag(lam) @ W[i]
        inner = X + alpha * beta * (W[i].T @ LW) if alpha else X
        M = cp.bmat([[cp.diag(lam) - c * (W[i + 1].T @ W[i + 1]), m * LW], [m * LW.T, inner]])
        if not _solve(cp, cp.Problem(cp.Maximize(c), [(M + M.T) / 2 >> 0]), solver):
            return None
        value = lam.value.clip(min=0)
        LW = value[:, None] * W[i]
        inside = torch.from_numpy(X + alpha * beta * W[i].T @ LW)
        step = torch.linalg.solve(inside, torch.from_numpy(LW.T.copy())).numpy()
        X = torch.diag(torch.from_numpy(value)).numpy() - m * m * LW @ step
        X = (X + X.T) / 2
        found.append(torch.from_numpy(value).double())
    return found


def _eye(n: int) -> Any:
    return torch.eye(n, dtype=torch.float64).numpy()


def _zeros(n: int, m: int) -> Any:
    return torch.zeros(n, m, dtype=torch.float64).numpy()
