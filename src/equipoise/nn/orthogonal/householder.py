"""Products of reflections, through the operator that `torch.nn.utils.parametrizations.orthogonal` uses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.nn.layers import layers_of
from equipoise.nn.method import Method
from equipoise.nn.orthogonal.polar import settled


class Householder(Method):
    """`W = H_1 ⋯ H_r` (first columns), `H_i = I − τ_i v_i v_iᵀ` with v_i the i-th column of raw below the diagonal and 1 on it.

    Guarantee: norm at most 1 for every raw weight; orthonormal rows or columns always, since `τ = 2/‖v‖²` for any v.
    Entries beyond 1e3 are read as 1e3, so that τ does not vanish in float32.

    >>> W = HouseholderLinear(3, 5).weight
    >>> bool((W.mT @ W - torch.eye(3)).abs().max() < 1e-5)
    True
    """

    name = "householder"
    plain = (nn.Linear,)

    def forward(self, raw: Tensor) -> Tensor:
        """The effective weight."""
        tall = raw if raw.shape[0] >= raw.shape[1] else raw.mT
        below = tall.clamp(-1e3, 1e3).tril(-1)
        v = below + torch.eye(*tall.shape, dtype=raw.dtype, device=raw.device)
        tau = 2 / v.square().sum(-2)
        Q = torch.linalg.householder_product(v, tau)
        W = settled(Q.mT).mT
        return (W if raw.shape[0] >= raw.shape[1] else W.mT).to(raw.dtype)


(HouseholderLinear,) = layers_of(Householder)
