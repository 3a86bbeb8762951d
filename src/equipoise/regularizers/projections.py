"""Penalties on the weights alone, and what is done to them after a step: projection onto norm balls, clipping, normalisation."""

from math import inf, isfinite
from typing import Literal

import torch
from torch import Tensor, nn

from equipoise.core import Bound, InputError, Kind, Refused, Shape, require_number, require_positive
from equipoise.norms.induced import induced_norm
from equipoise.norms.spectral import spectral_norm
from equipoise.regularizers.selection import (
    LINEAR_MAPS,
    Names,
    Types,
    as_matrix,
    plain_weight,
    select_layers,
    weight_of,
)


class _WeightPenalty:
    """A penalty on the weights of chosen layers: the sum over them of what `_term` gives."""

    def __init__(
        self, model: nn.Module, only: Types = LINEAR_MAPS, names: Names = None, weight: float = 1.0
    ) -> None:
        self.layers = select_layers(model, only, names)
        self.weight = require_number(weight, "weight", least=0)

    def __call__(self) -> Tensor:
        """The penalty, to be added to the loss."""
        terms = [self._term(name, module) for name, module in self.layers.items()]
        return self.weight * torch.stack(terms).sum()

    def _term(self, name: str, module: nn.Module) -> Tensor:
        raise NotImplementedError


class FrobeniusPenalty(_WeightPenalty):
    """`weight · Σ_l ‖W_l‖_F²`: weight decay of chosen layers, inside the loss.

    >>> net = nn.Linear(2, 2, bias=False)
    >>> _ = net.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    >>> FrobeniusPenalty(net, weight=0.1)().item()
    2.5
    """

    def _term(self, name: str, module: nn.Module) -> Tensor:
        return weight_of(module).square().sum()


class OrthogonalityPenalty(_WeightPenalty):
    """`weight · Σ_l ‖W_l W_lᵀ − I‖_F²` with W_l as a matrix `(outputs, rest)`, or its transpose where that is the smaller side.

    For a convolution that is orthogonality of the flattened filters, which does not make the convolution orthogonal.
    Grouped convolutions are refused. Reference: Cisse et al. 2017; Bansal et al. 2018.

    >>> net = nn.Linear(2, 2, bias=False)
    >>> _ = torch.nn.init.eye_(net.weight)
    >>> OrthogonalityPenalty(net)().item()
    0.0
    """

    def _term(self, name: str, module: nn.Module) -> Tensor:
        W = as_matrix(name, module)
        W = W if W.shape[0] <= W.shape[1] else W.mT
        return (W @ W.mT - torch.eye(len(W), dtype=W.dtype, device=W.device)).square().sum()


Exponent = Literal[1, 2] | float


def operator_norm(
    module: nn.Module, p: Exponent = 2, input_size: int | Shape | None = None
) -> Bound:
    """Upper bound of `‖A‖_{p→p}` of a layer's linear part, p ∈ {1, 2, ∞}, rounding included.

    p = 1 is the largest column sum of |A|, p = ∞ the largest row sum (`norms.induced`).
    p = 2 is the upper end of `equipoise.spectral_norm`.

    Args:
        module: the layer.
        p: 1, 2 or ∞ (`math.inf`).
        input_size: spatial size of its input; without it the bound holds for every size.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, -2.0], [0.0, 4.0]]))
    >>> [round(float(operator_norm(layer, p)), 3) for p in (1, inf)]
    [6.0, 4.0]
    """
    if p == 2:
        return Bound(
            float(spectral_norm(module, input_size=input_size).upper), Kind.UPPER, "spectral_norm"
        )
    if p not in (1, inf):
        raise InputError(f"p must be 1, 2 or ∞ (math.inf), got {p}")
    bracket = induced_norm(module, "l1" if p == 1 else "linf", input_size=input_size)
    return Bound(bracket.upper, Kind.UPPER, bracket.method)


def project_(
    model: nn.Module,
    p: Exponent = 2,
    radius: float = 1.0,
    only: Types = LINEAR_MAPS,
    names: Names = None,
) -> dict[str, Bound]:
    """`W ← W / max(1, ‖W‖_p / λ)` for chosen layers, after an optimizer step (λ = `radius`); returns the norms it leaves.

    Guarantee: every bound returned is at most λ, for the weights as stored after rounding. It is the radial projection, not
    the nearest matrix. The bounds of convolutions hold for every input size. Reference: Gouk et al. 2021, algorithm 1.

    Args:
        model: the network.
        p: 1, 2 or ∞ (`math.inf`).
        radius: λ.
        only: module types.
        names: glob or compiled pattern over module names, or several.

    >>> net = nn.Linear(2, 2, bias=False)
    >>> _ = net.weight.data.copy_(torch.diag(torch.tensor([3.0, 1.0])))
    >>> bounds = project_(net, p=2, radius=1.5)
    >>> float(bounds[""]) <= 1.5, round(net.weight[1, 1].item(), 3)
    (True, 0.5)
    """
    require_positive(radius=radius)
    layers = select_layers(model, only, names)
    # refuse before touching any
    weights = {name: plain_weight(name, module) for name, module in layers.items()}
    return {name: _shrink(module, weights[name], p, radius) for name, module in layers.items()}


@torch.no_grad()
def _shrink(module: nn.Module, W: nn.Parameter, p: Exponent, radius: float) -> Bound:
    bound = operator_norm(module, p)
    margin = 0.0
    for _ in range(60):
        if float(bound) <= radius:
            return bound
        if not isfinite(float(bound)):
            break
        W.mul_(radius / float(bound) * (1 - margin))
        # rounding of the scaled weights may leave it just above
        margin = max(2 * margin, 2.0 * torch.finfo(W.dtype).eps)
        bound = operator_norm(module, p)
    raise Refused(
        f"could not bring the norm of the layer below {radius}: its bound stays at {float(bound)}"
    )


@torch.no_grad()
def clip_weights_(
    model: nn.Module, limit: float, only: Types = LINEAR_MAPS, names: Names = None
) -> None:
    """`W ← clamp(W, −c, c)` elementwise for chosen layers (Arjovsky et al. 2017).

    Args:
        model: the network.
        limit: c.
        only: module types.
        names: glob or compiled pattern over module names, or several.

    >>> net = nn.Linear(3, 3)
    >>> clip_weights_(net, 0.01)
    >>> net.weight.abs().max().item() <= 0.01
    True
    """
    require_positive(limit=limit)
    for name, module in select_layers(model, only, names).items():
        W = plain_weight(name, module)
        W.copy_(W.clamp(-limit, limit))
        # the limit itself may not be representable in the dtype of the weights
        over = W.abs().double() > limit
        W[over] = torch.nextafter(W[over], torch.zeros_like(W[over]))
