"""Losses that ask for a margin: `z` are logits (batch, classes), `y` labels, `L` a Lipschitz constant of the logit map.

`K_ij` bounds the Lipschitz constant of `z_i − z_j`: `√2·L` for any pair, `L_trunk·‖w_i − w_j‖₂` where the last layer
W is known. Both may be tensors with a graph; then the constants are trained as well.

Everything is computed in float64, whatever the logits: constants of pairs are rounded up, and logits near the end of
float32 do not overflow on the way.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.errors import InputError
from equipoise.core.precision import safe_root
from equipoise.nn.transport import check_logits, hkr, one_hot, soft_hkr, widened

#: covers the rounding of a handful of float64 operations and of sums of squares over up to 2¹⁶ features
_ABOVE = 1 + 2.0**-36
#: 3/2·√2: the offset of the thesis, in units of the constant
OFFSET = 1.5 * math.sqrt(2)


def offset_cross_entropy(
    z: Tensor, y: Tensor, temperature: float = 0.25, offset: float = OFFSET, lipschitz: float = 1.0
) -> Tensor:
    """`t·CE((z − u·e_y)/t, y)` with temperature t and offset `u = offset·L`: the true logit has to win by u before
    the loss is small.

    Reference: Prach, Lampert (2022), Almost-orthogonal layers for efficient general-purpose Lipschitz networks, §5
    (there u = √2, t = 1/4).

    >>> z = torch.tensor([[3.0, 0.0]])
    >>> float(offset_cross_entropy(z, torch.tensor([0]))) < float(offset_cross_entropy(z, torch.tensor([1])))
    True
    """
    check_logits(z, y)
    wide = widened(z)
    return _cooled(wide - offset * lipschitz * one_hot(wide, y), y, temperature).to(z.dtype)


def margin_hinge(z: Tensor, y: Tensor, epsilon: float = 1.0, lipschitz: Tensor | float = 1.0) -> Tensor:
    """`mean max(0, √2·L·ε − (z_y − max_{k≠y} z_k))`: zero exactly where every input is certified at radius ε.

    >>> float(margin_hinge(torch.tensor([[2.0, 0.0]]), torch.tensor([0])))
    0.0
    """
    check_logits(z, y)
    return functional.relu(math.sqrt(2) * lipschitz * epsilon - margin(widened(z), y)).mean().to(z.dtype)


def margin(z: Tensor, y: Tensor) -> Tensor:
    """`z_y − max_{k≠y} z_k`, differentiable.

    >>> margin(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]))
    tensor([1.])
    """
    check_logits(z, y)
    own = one_hot(z, y).bool()
    return z.gather(1, y[:, None])[:, 0] - z.masked_fill(own, -math.inf).amax(1)


def pair_constants(
    y: Tensor, lipschitz: Tensor | float = 1.0, weight: Tensor | None = None, classes: int | None = None
) -> Tensor:
    """`K_{y,k}` (batch, classes) with 0 at k = y: `√2·L`, or `L·‖w_y − w_k‖` where the last layer's weight is given.

    In float64, rounded up: never below the constant of the stored weights.

    >>> pair_constants(torch.tensor([1]), 2.0, torch.eye(2)).round(decimals=4)
    tensor([[2.8284, 0.0000]], dtype=torch.float64)
    """
    if isinstance(lipschitz, Tensor):
        lipschitz = widened(lipschitz)
    if weight is not None:
        weight = widened(weight)
        own = functional.one_hot(y, len(weight)).bool()
        seen, place = y.unique(return_inverse=True)  # a batch has fewer classes than examples: every pair once
        distance = _lengths(weight[seen][:, None, :] - weight[None])[place]
        return (lipschitz * distance).masked_fill(own, 0.0) * _ABOVE
    if classes is None:
        raise InputError("pair_constants needs the number of classes or the last layer's weight")
    own = functional.one_hot(y, classes).bool()
    every = math.sqrt(2) * (
        lipschitz if isinstance(lipschitz, Tensor) else widened(torch.ones(1, device=y.device)) * lipschitz
    )
    return every.expand(len(y), classes).masked_fill(own, 0.0) * _ABOVE


def lipschitz_margin(
    z: Tensor,
    y: Tensor,
    epsilon: float,
    lipschitz: Tensor | float = 1.0,
    weight: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """`t·CE((z + ε·K_y)/t, y)`: every wrong logit is lifted by what an attacker of radius ε could win against the true one
    (LMT).

    Reference: Tsuzuku, Sato, Sugiyama (2018), Lipschitz-margin training, Algorithm 1.

    >>> z, y = torch.tensor([[3.0, 0.0]]), torch.tensor([0])
    >>> bool(lipschitz_margin(z, y, 0.5) > functional.cross_entropy(z, y))
    True
    """
    check_logits(z, y)
    lifted = widened(z) + epsilon * pair_constants(y, lipschitz, weight, z.shape[1])
    return _cooled(lifted, y, temperature).to(z.dtype)


def gloro_logits(z: Tensor, epsilon: float, lipschitz: Tensor | float = 1.0, weight: Tensor | None = None) -> Tensor:
    """`(z, z_⊥)` with `z_⊥ = max_{k≠j} (z_k + ε·K_{jk})`, j the predicted class, rounded up: where ⊥ does not win, radius ε
    is certified.

    Reference: Leino, Wang, Fredrikson (2021), Globally-robust neural networks, §3.

    >>> gloro_logits(torch.tensor([[3.0, 0.0]]), 1.0).argmax(1), gloro_logits(torch.tensor([[1.0, 0.0]]), 1.0).argmax(1)
    (tensor([0]), tensor([2]))
    """
    return _rounded_up(_with_bottom(widened(z), epsilon, lipschitz, weight), z.dtype)


def _with_bottom(z: Tensor, epsilon: float, lipschitz: Tensor | float, weight: Tensor | None) -> Tensor:
    j = z.argmax(1)
    lifted = z + epsilon * pair_constants(j, lipschitz, weight, z.shape[1])
    bottom = lifted.masked_fill(one_hot(z, j).bool(), -math.inf).amax(1, keepdim=True)
    above = torch.nextafter(bottom.detach(), bottom.new_tensor(math.inf))  # the sum was rounded, perhaps down
    return torch.cat([z, bottom + (above - bottom.detach())], 1)


def gloro(
    z: Tensor, y: Tensor, epsilon: float, lipschitz: Tensor | float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """Cross-entropy with the extra class ⊥ of `gloro_logits`: the loss is small only where y wins by a certified
    margin.

    >>> float(gloro(torch.tensor([[9.0, 0.0]]), torch.tensor([0]), 1.0)) < 0.01
    True
    """
    check_logits(z, y)
    return functional.cross_entropy(_with_bottom(widened(z), epsilon, lipschitz, weight), y).to(z.dtype)


def gloro_trades(
    z: Tensor,
    y: Tensor,
    epsilon: float,
    lipschitz: Tensor | float = 1.0,
    weight: Tensor | None = None,
    beta: float = 1.2,
) -> Tensor:
    """`CE(z, y) + β·KL(p ‖ p_⊥)`: accuracy, plus what the class ⊥ takes from the prediction (p has probability 0 at ⊥).

    Reference: Leino, Wang, Fredrikson (2021), appendix (the TRADES-like variant).

    >>> z, y = torch.tensor([[3.0, 0.0]]), torch.tensor([0])
    >>> bool(gloro_trades(z, y, 0.5) > functional.cross_entropy(z, y))
    True
    """
    check_logits(z, y)
    wide = widened(z)
    log_p = wide.log_softmax(1)
    log_q = _with_bottom(wide, epsilon, lipschitz, weight).log_softmax(1)[:, :-1]
    divergence = (log_p.exp() * (log_p - log_q)).sum(1).mean()
    return (functional.cross_entropy(wide, y) + beta * divergence).to(z.dtype)


def emma(
    z: Tensor,
    y: Tensor,
    epsilon: float,
    lipschitz: Tensor | float = 1.0,
    weight: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """`t·CE((z_k + ε_k·K_{yk})/t, y)` with `ε_k = clip((z_y − z_k)/K_{yk}, 0, ε)`, no gradient through ε_k.

    Every wrong class is lifted only as far as the margin reached so far, at most to radius ε: efficient margin
    maximisation.

    Reference: Hu, Zou, Wang, Leino, Fredrikson (2023), Unlocking deterministic robustness certification on ImageNet,
    §4.

    >>> z, y = torch.tensor([[0.0, 3.0]]), torch.tensor([0])
    >>> torch.allclose(emma(z, y, 1.0), functional.cross_entropy(z, y))  # a wrong class that wins is not lifted
    True
    """
    check_logits(z, y)
    K, wide = pair_constants(y, lipschitz, weight, z.shape[1]), widened(z)
    with torch.no_grad():
        reached = (wide.gather(1, y[:, None]) - wide) / K.clamp_min(torch.finfo(K.dtype).tiny)
        radius = reached.clamp(0, epsilon)
    return _cooled(wide + radius * K, y, temperature).to(z.dtype)


def logit_annealing(
    z: Tensor,
    y: Tensor,
    epsilon: float = 0.0,
    lipschitz: Tensor | float = 1.0,
    weight: Tensor | None = None,
    temperature: float = 0.75,
    offset: float = 2.0,
    gamma: float = 5.0,
) -> Tensor:
    """`−t·mean (1 − p)^γ·log p` with `p = softmax((z_k + u·[k ≠ y] + ε·K_{yk})/t)_y`: focal, on lifted logits (LA).

    The factor `(1 − p)^γ` lets go of inputs whose margin is large, so that a network of little capacity spends it on the
    others; the offset u and ε·K ask for a margin.

    Reference: Lai, Huang, Kung, Chen (2025), Enhancing certified robustness via block reflector orthogonal layers and
    logit annealing loss (there t = 0.75, γ = 5).

    >>> z, y = torch.tensor([[9.0, 0.0]]), torch.tensor([0])
    >>> bool(logit_annealing(z, y) < 1e-3 * logit_annealing(-z, y))
    True
    """
    check_logits(z, y)
    _positive_temperature(temperature)
    if not gamma >= 0:
        raise InputError(f"gamma must not be negative, got {gamma}")
    wide = widened(z)
    lifted = wide + offset * (1 - one_hot(wide, y))
    lifted = lifted + epsilon * pair_constants(y, lipschitz, weight, z.shape[1]) if epsilon else lifted
    log_p = (lifted / temperature).log_softmax(1).gather(1, y[:, None])[:, 0]
    return (-temperature * (-torch.expm1(log_p)).clamp_min(0).pow(gamma) * log_p).mean().to(z.dtype)


def _cooled(lifted: Tensor, y: Tensor, temperature: float) -> Tensor:
    """`t·CE(z/t, y)`."""
    _positive_temperature(temperature)
    return temperature * functional.cross_entropy(lifted / temperature, y)


def _positive_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise InputError(f"the temperature must be positive, got {temperature}")


class OffsetCrossEntropy(nn.Module):
    """`offset_cross_entropy` as a module.

    >>> OffsetCrossEntropy()(torch.zeros(2, 3), torch.tensor([0, 1])).shape
    torch.Size([])
    """

    def __init__(self, temperature: float = 0.25, offset: float = OFFSET, lipschitz: float = 1.0) -> None:
        super().__init__()
        _positive_temperature(temperature)
        self.temperature, self.offset, self.lipschitz = temperature, offset, lipschitz

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        return offset_cross_entropy(z, y, self.temperature, self.offset, self.lipschitz)

    def extra_repr(self) -> str:
        """The constants."""
        return f"temperature={self.temperature}, offset={self.offset:.6g}, lipschitz={self.lipschitz}"


def _lengths(x: Tensor) -> Tensor:
    """‖x‖₂ over the last axis, scaled so that no square vanishes or overflows; the gradient at equal rows is 0."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    unit = x / torch.where(largest > 0, largest, torch.ones_like(largest))
    return largest[..., 0] * safe_root(unit.square().sum(-1))


def _rounded_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype, the last column not below what it was; the gradient is that of the cast."""
    y = x.to(dtype)
    last = y.detach()[:, -1:]
    short = (last.to(x.dtype) < x.detach()[:, -1:]) & torch.isfinite(last)
    step = torch.nextafter(last, last.new_tensor(math.inf)) - last
    return torch.cat([y[:, :-1], y[:, -1:] + torch.where(short, step, torch.zeros_like(step))], 1)


#: losses by the name that recipes use; those in MARGIN_LOSSES take `epsilon`, `lipschitz` and `weight`
LOSSES = {
    "cross_entropy": functional.cross_entropy,
    "offset_cross_entropy": offset_cross_entropy,
    "margin_hinge": margin_hinge,
    "lmt": lipschitz_margin,
    "gloro": gloro,
    "gloro_trades": gloro_trades,
    "emma": emma,
    "la": logit_annealing,
    "hkr": hkr,
    "soft_hkr": soft_hkr,
}
MARGIN_LOSSES = ("lmt", "gloro", "gloro_trades", "emma", "la")
