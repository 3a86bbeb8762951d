"""Losses that ask for a margin, and certified accuracy.

`z` are logits (batch, classes), `y` labels, `L` a Lipschitz constant of the logit map.

`K_ij` bounds the Lipschitz constant of `z_i − z_j`: `√2·L` for any pair, `L_trunk·‖w_i − w_j‖₂` where the last layer
W is known. Both may be tensors with a graph; then the constants are trained as well.

Everything is computed in float64, whatever the logits: constants of pairs are rounded up, and logits near the end of
float32 do not overflow on the way.

Losses of optimal transport (`kr`, `hinge`, `hkr`): for 1-Lipschitz scores the difference of means is a
lower bound of a Wasserstein distance. Their scores are `(batch,)` or `(batch, 1)` with labels ±1 or 0 and 1 for two
distributions, or `(batch, classes)` with integer labels; `reduction` is that of `torch.nn` losses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import (
    InputError,
    certified_at,
    or_one,
    require_number,
    require_one_of,
    require_positive,
    safe_root,
)
from equipoise.smoothing.margins import margin_radius

Reduction = Literal["mean", "sum", "none"]
#: covers the rounding of a handful of float64 operations and of sums of squares over up to 2¹⁶ features
_ABOVE = 1 + 2.0**-36
#: 3/2·√2: the offset of the thesis, in units of the constant
OFFSET = 1.5 * sqrt(2)


def offset_cross_entropy(
    z: Tensor, y: Tensor, temperature: float = 0.25, offset: float = OFFSET, lipschitz: float = 1.0
) -> Tensor:
    """`t·CE((z − u·e_y)/t, y)` with temperature t and offset `u = offset·L`: the true logit has to win by u before
    the loss is small.

    Args:
        z: logits (batch, classes), or scores.
        y: labels.
        temperature: t.
        offset: u, in units of the constant.
        lipschitz: upper bound of the Lipschitz constant of the logits, or of what comes before the last layer.

    Reference: Prach, Lampert (2022), Almost-orthogonal layers for efficient general-purpose Lipschitz networks, §5
    (there u = √2, t = 1/4).

    >>> z = torch.tensor([[3.0, 0.0]])
    >>> float(offset_cross_entropy(z, torch.tensor([0]))) < float(offset_cross_entropy(z, torch.tensor([1])))
    True
    """
    wide = _checked(z, y)
    return _cooled(wide - offset * lipschitz * one_hot(wide, y), y, temperature).to(z.dtype)


def margin_hinge(
    z: Tensor, y: Tensor, epsilon: float = 1.0, lipschitz: Tensor | float = 1.0
) -> Tensor:
    """`mean max(0, √2·L·ε − (z_y − max_{k≠y} z_k))`: zero exactly where every input is certified at radius ε.

    Args:
        z: logits (batch, classes), or scores.
        y: labels.
        epsilon: the radius to certify.
        lipschitz: upper bound of the Lipschitz constant of the logits, or of what comes before the last layer.

    >>> float(margin_hinge(torch.tensor([[2.0, 0.0]]), torch.tensor([0])))
    0.0
    """
    needed = sqrt(2) * lipschitz * epsilon
    return functional.relu(needed - margin(z.double(), y)).mean().to(z.dtype)


def margin(z: Tensor, y: Tensor) -> Tensor:
    """`z_y − max_{k≠y} z_k`, differentiable.

    Args:
        z: logits (batch, classes), or scores.
        y: labels.

    >>> margin(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]))
    tensor([1.])
    """
    _checked(z, y)
    return _own(z, y) - z.masked_fill(one_hot(z, y).bool(), -inf).amax(1)


def pair_constants(
    y: Tensor,
    lipschitz: Tensor | float = 1.0,
    weight: Tensor | None = None,
    classes: int | None = None,
) -> Tensor:
    """`K_{y,k}` (batch, classes) with 0 at k = y: `√2·L`, or `L·‖w_y − w_k‖` with the last layer's weight.

    In float64, rounded up: never below the constant of the stored weights.

    Args:
        y: labels.
        lipschitz: upper bound of the Lipschitz constant of the logits, or of what comes before the last layer.
        weight: of the last layer, for constants of pairs.
        classes: how many, if there is no weight.

    >>> pair_constants(torch.tensor([1]), 2.0, torch.eye(2)).round(decimals=4)
    tensor([[2.8284, 0.0000]], dtype=torch.float64)
    """
    if isinstance(lipschitz, Tensor):
        lipschitz = lipschitz.double()
    if weight is not None:
        weight = weight.double()
        classes = len(weight)
        # a batch has fewer classes than examples: every pair once
        present, place = y.unique(return_inverse=True)
        distance = _lengths(weight[present][:, None, :] - weight[None])[place]
    elif classes is not None:
        distance = sqrt(2) * torch.ones(len(y), classes, dtype=torch.float64, device=y.device)
    else:
        raise InputError("pair_constants needs the number of classes or the last layer's weight")
    own = functional.one_hot(y, classes).bool()
    return (lipschitz * distance).masked_fill(own, 0.0) * _ABOVE


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

    Args:
        z: logits (batch, classes), or scores.
        y: labels.
        epsilon: the radius to certify.
        lipschitz: upper bound of the Lipschitz constant of the logits, or of what comes before the last layer.
        weight: of the last layer, for constants of pairs.
        temperature: t.

    Reference: Tsuzuku, Sato, Sugiyama (2018), Lipschitz-margin training, Algorithm 1.

    >>> z, y = torch.tensor([[3.0, 0.0]]), torch.tensor([0])
    >>> bool(lipschitz_margin(z, y, 0.5) > functional.cross_entropy(z, y))
    True
    """
    lifted = _checked(z, y) + epsilon * pair_constants(y, lipschitz, weight, z.shape[1])
    return _cooled(lifted, y, temperature).to(z.dtype)


def gloro_logits(
    z: Tensor, epsilon: float, lipschitz: Tensor | float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """`(z, z_⊥)` in float64 with `z_⊥ = max_{k≠j} (z_k + ε·K_{jk})`, j the predicted class, rounded up: where ⊥ does not win,
    radius ε is certified.

    Args:
        z: logits (batch, classes), or scores.
        epsilon: the radius to certify.
        lipschitz: upper bound of the Lipschitz constant of the logits, or of what comes before the last layer.
        weight: of the last layer, for constants of pairs.

    Reference: Leino, Wang, Fredrikson (2021), Globally-robust neural networks, §3.

    >>> gloro_logits(torch.tensor([[3.0, 0.0]]), 1.0).argmax(1), gloro_logits(torch.tensor([[1.0, 0.0]]), 1.0).argmax(1)
    (tensor([0]), tensor([2]))
    """
    z = z.double()
    j = z.argmax(1)
    lifted = z + epsilon * pair_constants(j, lipschitz, weight, z.shape[1])
    bottom = lifted.masked_fill(one_hot(z, j).bool(), -inf).amax(1, keepdim=True)
    # the sum was rounded, perhaps down
    above = torch.nextafter(bottom.detach(), bottom.new_tensor(inf))
    return torch.cat([z, bottom + (above - bottom.detach())], 1)


def gloro(
    z: Tensor,
    y: Tensor,
    epsilon: float,
    lipschitz: Tensor | float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Cross-entropy with the extra class ⊥ of `gloro_logits`: the loss is small only where y wins by a certified
    margin.

    Args:
        z: logits (batch, classes), or scores.
        y: labels.
        epsilon: the radius to certify.
        lipschitz: upper bound of the Lipschitz constant of the logits, or of what comes before the last layer.
        weight: of the last layer, for constants of pairs.

    >>> float(gloro(torch.tensor([[9.0, 0.0]]), torch.tensor([0]), 1.0)) < 0.01
    True
    """
    lifted = gloro_logits(_checked(z, y), epsilon, lipschitz, weight)
    return functional.cross_entropy(lifted, y).to(z.dtype)


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

    Args:
        z: logits (batch, classes), or scores.
        y: labels.
        epsilon: the radius to certify.
        lipschitz: upper bound of the Lipschitz constant of the logits, or of what comes before the last layer.
        weight: of the last layer, for constants of pairs.
        temperature: t.

    Reference: Hu, Zou, Wang, Leino, Fredrikson (2023), Unlocking deterministic robustness certification on ImageNet,
    §4.

    >>> z, y = torch.tensor([[0.0, 3.0]]), torch.tensor([0])
    >>> torch.allclose(emma(z, y, 1.0), functional.cross_entropy(z, y))  # a wrong class that wins is not lifted
    True
    """
    wide = _checked(z, y)
    K = pair_constants(y, lipschitz, weight, z.shape[1])
    with torch.no_grad():
        reached = (_own(wide, y)[:, None] - wide) / K.clamp_min(torch.finfo(K.dtype).tiny)
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

    Args:
        z: logits (batch, classes), or scores.
        y: labels.
        epsilon: the radius to certify.
        lipschitz: upper bound of the Lipschitz constant of the logits, or of what comes before the last layer.
        weight: of the last layer, for constants of pairs.
        temperature: t.
        offset: u, in units of the constant.
        gamma: exponent of the focal factor.

    Reference: Lai, Huang, Kung, Chen (2025), Enhancing certified robustness via block reflector orthogonal layers and
    logit annealing loss (there t = 0.75, γ = 5).

    >>> z, y = torch.tensor([[9.0, 0.0]]), torch.tensor([0])
    >>> bool(logit_annealing(z, y) < 1e-3 * logit_annealing(-z, y))
    True
    """
    require_positive(temperature=temperature)
    require_number(gamma, "gamma", least=0)
    wide = _checked(z, y)
    lifted = (
        wide
        + offset * (1 - one_hot(wide, y))
        + epsilon * pair_constants(y, lipschitz, weight, z.shape[1])
    )
    log_p = _own((lifted / temperature).log_softmax(1), y)
    return (-temperature * (-torch.expm1(log_p)).clamp_min(0).pow(gamma) * log_p).mean().to(z.dtype)


def _cooled(lifted: Tensor, y: Tensor, temperature: float) -> Tensor:
    """`t·CE(z/t, y)`."""
    require_positive(temperature=temperature)
    return temperature * functional.cross_entropy(lifted / temperature, y)


def kr(z: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Kantorovich–Rubinstein: `E[z | y = 1] − E[z | y = −1]`, for classes the mean of `z_y − mean_{k≠y} z_k`; **maximise** it.

    For 1-Lipschitz z it is at most the distance W₁ of the two empirical distributions. With "none" every example has its part,
    and the mean over the batch is the difference (or 0 where one side is missing).

    Args:
        z: logits (batch, classes), or scores.
        y: labels.
        reduction: "mean", "sum" or "none".

    >>> float(kr(torch.tensor([3.0, 1.0, -1.0]), torch.tensor([1, 1, -1])))
    3.0

    Reference: Arjovsky, Chintala & Bottou (2017); Serrurier et al. (2021).
    """
    if _one_score(z):
        signs = _signs(z, y)
        score = z.double().flatten()
        up = signs > 0
        down = signs < 0
        share = up.double() / up.sum().clamp_min(1) - down.double() / down.sum().clamp_min(1)
        parts = score * share.to(score) * len(score) * (up.any() & down.any())
    else:
        score = _checked(z, y)
        right = _own(score, y)
        parts = right - (score.sum(1) - right) / (z.shape[1] - 1)
    return _reduced(parts, reduction).to(z.dtype)


def hinge(z: Tensor, y: Tensor, margin: float = 1.0, reduction: Reduction = "mean") -> Tensor:
    """`max(0, margin/2 − s·z)` with s = ±1; for classes the mean over k with s_y = 1 and s_k = −1 else.

    Args:
        z: logits (batch, classes), or scores.
        y: labels.
        margin: of the hinge.
        reduction: "mean", "sum" or "none".

    >>> float(hinge(torch.tensor([0.25, -2.0]), torch.tensor([1, 0])))
    0.125
    """
    require_positive(margin=margin)
    if _one_score(z):
        parts = functional.relu(margin / 2 - _signs(z, y) * z.double().flatten())
    else:
        score = _checked(z, y)
        parts = functional.relu(margin / 2 - (2 * one_hot(score, y) - 1) * score).mean(1)
    return _reduced(parts, reduction).to(z.dtype)


def hkr(
    z: Tensor, y: Tensor, alpha: float = 0.9, margin: float = 1.0, reduction: Reduction = "mean"
) -> Tensor:
    """Hinge–Kantorovich–Rubinstein, `α·hinge − (1 − α)·KR`: class against the rest, uniform prior.

    For classes both are means over examples, so that parts of a batch add up.

    Args:
        z: logits (batch, classes), or scores.
        y: labels.
        alpha: share of the hinge, in [0, 1].
        margin: of the hinge.
        reduction: "mean", "sum" or "none".

    Reference: Serrurier et al. (2021), Achieving robustness in classification using optimal transport with hinge
    regularization.

    >>> z, y = torch.tensor([[2.0, -2.0]]), torch.tensor([0])
    >>> round(float(hkr(z, y, alpha=0.5)), 4), round(float(hkr(-z, y, alpha=0.5)), 4)
    (-2.0, 3.25)
    """
    require_number(alpha, "alpha", least=0, most=1)
    return alpha * hinge(z, y, margin, reduction) - (1 - alpha) * kr(z, y, reduction)


def _one_score(z: Tensor) -> bool:
    return z.dim() == 1 or (z.dim() == 2 and z.shape[1] == 1)


def _signs(z: Tensor, y: Tensor) -> Tensor:
    """Labels as ±1."""
    if y.numel() != len(z) or not len(z):
        raise InputError(
            f"expected one label per score, got scores {tuple(z.shape)} and labels {tuple(y.shape)}"
        )
    labels = y.flatten().to(z.double().dtype)
    if set(labels.tolist()) <= {0.0, 1.0}:
        return 2 * labels - 1
    if not set(labels.tolist()) <= {-1.0, 1.0}:
        raise InputError("labels of two distributions must be ±1, or 0 and 1")
    return labels


def _checked(z: Tensor, y: Tensor) -> Tensor:
    """The logits in float64, refused unless there is one label for each row."""
    if z.dim() != 2 or z.shape[1] < 2 or y.shape != z.shape[:1] or y.is_floating_point():
        raise InputError(
            f"expected logits (batch, classes ≥ 2) and integer labels (batch,), got {tuple(z.shape)} and "
            f"{tuple(y.shape)} {y.dtype}"
        )
    return z.double()


def one_hot(z: Tensor, y: Tensor) -> Tensor:
    """The labels as rows like those of z.

    Args:
        z: logits (batch, classes), or scores.
        y: labels.
    """
    return functional.one_hot(y, z.shape[1]).to(z.dtype)


def _own(z: Tensor, y: Tensor) -> Tensor:
    """`z_y` of every row."""
    return z.gather(1, y[:, None])[:, 0]


def _reduced(parts: Tensor, reduction: Reduction) -> Tensor:
    require_one_of(Reduction, reduction=reduction)
    return parts if reduction == "none" else getattr(parts, reduction)()


def _lengths(x: Tensor) -> Tensor:
    """‖x‖₂ over the last axis, scaled so that no square vanishes or overflows; the gradient at equal rows is 0."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    unit = x / or_one(largest)
    return largest[..., 0] * safe_root(unit.square().sum(-1))


@dataclass
class CertifiedAccuracy:
    """Accuracy and certified accuracy at several radii: sums only, so that parts of a dataset can be merged.

    Radii are `margin_radius`, about the real-number map: the rounding of the network's own forward pass is not covered.

    Args:
        radii: at which to count.

    >>> import torch
    >>> metric = CertifiedAccuracy((0.0, 0.5))
    >>> metric.update(torch.tensor([[3.0, 1.0], [0.0, 0.1]]), torch.tensor([0, 1]))
    >>> metric.compute()
    {'accuracy': 1.0, 'certified': {0.0: 1.0, 0.5: 0.5}, 'samples': 2}
    """

    radii: Sequence[float] = (36 / 255, 72 / 255, 108 / 255, 1.0)
    samples: int = 0
    correct: int = 0
    certified: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not len(self.radii) or not all(r >= 0 for r in self.radii):
            raise InputError(f"radii must be non-negative numbers, got {tuple(self.radii)}")
        self.certified = self.certified or [0] * len(self.radii)

    def update(
        self, logits: Tensor, labels: Tensor, lipschitz: Any = 1.0, weight: Tensor | None = None
    ) -> None:
        """Count a batch: certified at ε means that the label wins (`R > 0`) and `R ≥ ε`.

        Args:
            logits: (batch, classes).
            labels: (batch,).
            lipschitz: as in `smoothing.margins.margin_radius`.
            weight: that of the last layer; `lipschitz` is then about what comes before it.
        """
        radius = margin_radius(logits, labels, lipschitz, weight=weight)
        self.samples += len(labels)
        self.correct += int((logits.argmax(1) == labels).sum())
        for i, r in enumerate(self.radii):
            self.certified[i] += int(certified_at(radius, radius > 0, r).sum())

    def compute(self) -> dict[str, Any]:
        """The fractions."""
        if not self.samples:
            raise InputError("no sample was counted yet")
        counts = zip(self.radii, self.certified, strict=True)
        shares = {float(radius): count / self.samples for radius, count in counts}
        accuracy = self.correct / self.samples
        return {"accuracy": accuracy, "certified": shares, "samples": self.samples}
