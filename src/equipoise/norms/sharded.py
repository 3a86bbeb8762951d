"""Norms of matrices whose rows or columns are spread over processes (`DTensor`: FSDP2, tensor parallel), proved on the shards.

For row shards `WᵀW = Σ W_iᵀW_i`, for column shards `WWᵀ = Σ W_jW_jᵀ`. Every process forms the Gram matrix of its shard in
float64, off by at most `ε_i` in norm (`syrk_error`); one reduction brings the sum G to an owner, off by at most `γ_p·Σ‖G_i‖_F`
more, in whatever order p terms are added; the owner proves `G ⪯ τ·I` by one factorisation and sends two numbers to the others.
The matrix itself is gathered only where its sharded side is the shorter one, and the Gram matrix would be the larger of the two.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.core.bounds import Bracket
from equipoise.core.errors import InputError, Refused
from equipoise.core.precision import (
    deflate,
    frobenius,
    gamma,
    inflate,
    require_finite,
    working_dtype,
)
from equipoise.norms.cholesky import (
    cholesky_bracket,
    is_below,
    lanczos,
    random_start,
    syrk,
    syrk_error,
)
from equipoise.norms.deflation import Change
from equipoise.norms.tracking import Proof, TrackedNorm

#: entries must be smaller: sums of their squares are finite then
LARGEST = 1e150


def is_sharded(W: Any) -> bool:
    """Whether a tensor is spread over processes."""
    return hasattr(W, "placements")


class Shards:
    """How one matrix is spread: which of its sides, over which processes.

    Args:
        W: a real matrix, a `DTensor` sharded along one dimension of its mesh (or none) and replicated along the others.
    """

    def __init__(self, W: Any) -> None:
        split = [i for i, placement in enumerate(W.placements) if placement.is_shard()]
        if W.dim() != 2 or len(split) > 1 or any(p.is_partial() for p in W.placements):
            raise Refused(
                f"norms of a DTensor of shape {tuple(W.shape)} with placements {tuple(W.placements)} are not supported: "
                "expected a matrix sharded by rows or columns along one dimension of the mesh"
            )
        self.shape = tuple(W.shape)
        self.dim: int | None = W.placements[split[0]].dim if split else None
        self.group: Any = W.device_mesh.get_group(split[0]) if split else None
        self.device = W.device_mesh.device_type  # where its processes exchange tensors
        others = [i for i in range(W.device_mesh.ndim) if i not in split]
        self.replicas = [W.device_mesh.get_group(i) for i in others]

    def sums(self, *values: float) -> list[float]:
        """Sums over all shards, the same on every process; terms are gathered and added in their order."""
        if self.group is None:
            return list(values)
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, mine, group=self.group)
        return torch.stack(parts).sum(0).tolist()

    def require_finite(self, local: Tensor, what: str = "weight") -> None:
        """Refuse NaN, infinities and numbers whose squares overflow, on all processes: one that left would let the others wait.

        Args:
            local: this process's shard.
            what: how to call the weight in an error.
        """
        (bad,) = self.sums(float((~(local.abs() < LARGEST)).sum()))
        if bad:
            raise InputError(
                f"the {what} has {bad:g} non-finite or too large value(s), counted over all shards"
            )

    def bracket(self, local: Tensor, rtol: float, owner: int = 0) -> tuple[float, float]:
        """`(lower, upper)` of the norm of the whole matrix; to be called by all processes.

        Args:
            local: this process's shard.
            rtol: relative gap to reach.
            owner: which of the processes factorises.
        """
        local = local.detach().cpu()
        self.require_finite(local)
        if self.dim is None:
            lower, upper, _ = cholesky_bracket(local, rtol)
            ends = torch.tensor([lower, upper], dtype=torch.float64, device=self.device)
        else:
            ends = self._reduced(local.double(), rtol, owner)
        for group in self.replicas:  # replicas may have added in another order
            dist.all_reduce(ends[:1], dist.ReduceOp.MIN, group=group)
            dist.all_reduce(ends[1:], dist.ReduceOp.MAX, group=group)
        return float(ends[0]), float(ends[1])

    def _reduced(self, local: Tensor, rtol: float, owner: int) -> Tensor:
        count = dist.get_world_size(self.group)
        root = dist.get_global_rank(self.group, owner % count)
        ends = torch.zeros(2, dtype=torch.float64, device=self.device)
        # entries of the sharded side first: the Gram matrix lives on the other one
        A = local if self.dim == 0 else local.mT.contiguous()
        assert self.dim is not None
        if self.shape[1 - self.dim] > self.shape[self.dim]:
            parts: list[Any] | None = [None] * count if dist.get_rank() == root else None
            dist.gather_object(A, parts, root, group=self.group)
            if parts is not None:
                lower, upper, _ = cholesky_bracket(torch.cat(parts), rtol)
                ends[0], ends[1] = lower, upper
        else:
            G = syrk(A) if A.numel() else A.new_zeros(A.shape[1], A.shape[1])
            error, size = syrk_error(A, G) if A.numel() else (0.0, 0.0)
            error, total, norms = self.sums(error, size, float(torch.linalg.matrix_norm(G)))
            G = G.to(self.device)
            dist.reduce(G, root, group=self.group)
            if dist.get_rank() == root:
                error = inflate(inflate(error) + gamma(count + 4, torch.float64) * norms * 1.01)
                ends[0], ends[1] = gram_ends(G.cpu(), error, inflate(total), rtol)
        dist.broadcast(ends, root, group=self.group)
        return ends


def gram_ends(G: Tensor, error: float, total: float, rtol: float) -> tuple[float, float]:
    """`(lower, upper)` of σ₁ from its Gram matrix alone.

    Args:
        G: the Gram matrix in float64, off by at most `error` in norm.
        error: see above.
        total: at least the square of the Frobenius norm.
        rtol: relative gap to reach.
    """
    require_finite(G, "Gram matrix of a sharded weight")
    if not bool(G.any()):
        return 0.0, inflate(math.sqrt(error))
    n = len(G)
    v = lanczos(G.matmul, random_start(n, G), 200, rtol / 50)
    quotient = float(v @ (G @ v)) / float(v @ v)
    rounding = gamma(4 * n + 16, torch.float64) * float(torch.linalg.matrix_norm(G)) * 2
    lower = deflate(math.sqrt(max(0.0, quotient - rounding - error)))
    slack = 0.9 * rtol
    while True:
        tau = inflate(max(lower**2, error) * (1 + slack) ** 2)
        if tau >= total or is_below(G, tau, error):
            return lower, inflate(math.sqrt(inflate(min(tau, total))))
        slack *= 2


class TrackedShards(TrackedNorm):
    """The norm of a sharded matrix while it trains: the distance of Weyl's inequality costs one exchange of a number.

    Args:
        W: the sharded parameter.
        owner: which process factorises.
    """

    def __init__(self, W: Any, owner: int = 0) -> None:
        super().__init__()
        self.shards, self.owner = Shards(W), owner

    def _prepared(self, W: Tensor, what: str) -> Tensor:
        return W.detach().to(working_dtype(W.dtype))

    def _require_finite(self, A: Tensor, what: str) -> None:
        self.shards.require_finite(A, what)

    def _extent(self, A: Tensor, size: float | None = None) -> tuple[float, int]:
        if size is None:
            own = float(frobenius(A)) if A.numel() else 0.0
            size = inflate(math.sqrt(inflate(self.shards.sums(own**2)[0])))
        return size, math.prod(self.shards.shape)

    def _carried(self, A: Tensor, proof: Proof) -> tuple[float, float, float, Change]:
        own = super()._carried(A, proof) if A.numel() else (0.0, 0.0, 0.0, Change(A, 0.0, 0.0))
        size, change = own[2], own[3]
        distance = inflate(change.size + change.rounding)
        squares, sizes = self.shards.sums(distance**2, size**2)
        distance = inflate(math.sqrt(inflate(squares)))
        lower = max(0.0, deflate(self.kappa * proof.lower) - distance)
        upper = inflate(inflate(self.kappa * proof.upper) + distance)
        return lower, upper, inflate(math.sqrt(inflate(sizes))), change

    def _direct(self, A: Tensor, enough: float, rtol: float) -> tuple[float, float]:
        lower, upper = self.shards.bracket(A, min(rtol, 1e-3), self.owner)
        self.proof = Proof(A.clone(), lower, upper, (min(rtol, 1e-3),))
        return lower, upper

    def _holds(self, claim: Proof) -> bool:
        if len(claim.settings) != 1:
            raise InputError("a stored proof of a sharded weight has one setting, its tolerance")
        lower, upper = self.shards.bracket(claim.S, claim.settings[0], self.owner)
        return lower >= claim.lower and upper <= claim.upper


def sharded_norm(W: Any, rtol: float) -> Bracket:
    """The bracket of a sharded matrix, the same on every process; to be called by all of them.

    Args:
        W: the matrix.
        rtol: relative gap to reach.
    """
    lower, upper = Shards(W).bracket(W.detach().to_local(), rtol)
    return Bracket(lower, upper, rtol, "sharded")
