"""Penalties on the weights alone: Frobenius weight decay and orthogonality."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.regularizers.selection import LINEAR_MAPS, Names, Types, as_matrix, select_layers, weight_of


class FrobeniusPenalty:
    """`weight · Σ_l ‖W_l‖_F²`: weight decay of chosen layers, inside the loss.

    >>> net = nn.Linear(2, 2, bias=False)
    >>> _ = net.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    >>> FrobeniusPenalty(net, weight=0.1)().item()
    2.5
    """

    def __init__(self, model: nn.Module, only: Types = LINEAR_MAPS, names: Names = None, weight: float = 1.0) -> None:
        self.layers, self.weight = select_layers(model, only, names), _factor(weight)

    def __call__(self) -> Tensor:
        """The penalty, to be added to the loss."""
        return self.weight * torch.stack([weight_of(m).square().sum() for m in self.layers.values()]).sum()


class OrthogonalityPenalty:
    """`weight · Σ_l ‖W_l W_lᵀ − I‖_F²` with W_l as a matrix `(outputs, rest)`, or its transpose where that is the smaller side.

    For a convolution that is orthogonality of the flattened filters, which does not make the convolution orthogonal.
    Grouped convolutions are refused. Reference: Cisse et al. 2017; Bansal et al. 2018.

    >>> net = nn.Linear(2, 2, bias=False)
    >>> _ = torch.nn.init.eye_(net.weight)
    >>> OrthogonalityPenalty(net)().item()
    0.0
    """

    def __init__(self, model: nn.Module, only: Types = LINEAR_MAPS, names: Names = None, weight: float = 1.0) -> None:
        self.layers, self.weight = select_layers(model, only, names), _factor(weight)
        for name, module in self.layers.items():
            as_matrix(name, module)

    def __call__(self) -> Tensor:
        """The penalty, to be added to the loss."""
        return self.weight * torch.stack([_deviation(as_matrix(n, m)) for n, m in self.layers.items()]).sum()


def _deviation(W: Tensor) -> Tensor:
    W = W if W.shape[0] <= W.shape[1] else W.mT
    return (W @ W.mT - torch.eye(len(W), dtype=W.dtype, device=W.device)).square().sum()


def _factor(weight: float) -> float:
    if not (math.isfinite(weight) and weight >= 0):
        raise InputError(f"weight must be a non-negative number, got {weight}")
    return weight
