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

from equipoise.core import Bracket, InputError, Refused, gamma, inflate
from equipoise.norms.cholesky import bracket_of_gram, cholesky_bracket, syrk, syrk_error
from equipoise.norms.tracking import TrackedNorm, frobenius_norm

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
                upper = inflate(math.sqrt(error))
                if bool(G.any()):
                    result = bracket_of_gram(G.cpu(), error, inflate(total), rtol)
                    assert result is not None
                    ends[0], upper, _ = result
                ends[1] = upper
        dist.broadcast(ends, root, group=self.group)
        return ends


class TrackedShards(TrackedNorm):
    """The norm of a sharded matrix while it trains: the distance of Weyl's inequality costs one exchange of a number.

    Args:
        W: the sharded parameter.
        owner: which process factorises.
    """

    def __init__(self, W: Any, owner: int = 0) -> None:
        super().__init__()
        self.shards, self.owner = Shards(W), owner

    def _require_finite(self, A: Tensor, what: str) -> None:
        self.shards.require_finite(A, what)

    def _size(self, A: Tensor) -> float:
        own = frobenius_norm(A) if A.numel() else 0.0
        return inflate(math.sqrt(inflate(self.shards.sums(own**2)[0])))

    def _count(self, A: Tensor) -> int:
        return math.prod(self.shards.shape)

    def _direct(self, A: Tensor, enough: float, rtol: float) -> tuple[float, float]:
        return self.shards.bracket(A, min(rtol, 1e-3), self.owner)


def sharded_norm(W: Any, rtol: float) -> Bracket:
    """The bracket of a sharded matrix, the same on every process; to be called by all of them.

    Args:
        W: the matrix.
        rtol: relative gap to reach.
    """
    lower, upper = Shards(W).bracket(W.detach().to_local(), rtol)
    return Bracket(lower, upper, rtol, "sharded")
