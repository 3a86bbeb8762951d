"""Losses of optimal transport: for 1-Lipschitz scores the difference of means is a lower bound of a Wasserstein distance.

Scores are `(batch,)` or `(batch, 1)` with labels ±1 or 0 and 1 for two distributions, or `(batch, classes)` with integer labels.
`reduction` is that of `torch.nn` losses: "mean", "sum" or "none".
"""

from typing import Literal

from torch import Tensor
from torch.nn import functional

from equipoise.core.errors import InputError

Reduction = Literal["mean", "sum", "none"]


def kr(z: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Kantorovich–Rubinstein: `E[z | y = 1] − E[z | y = −1]`, for classes the mean of `z_y − mean_{k≠y} z_k`; **maximise** it.

    For 1-Lipschitz z it is at most the distance W₁ of the two empirical distributions. With "none" every example has its part,
    and the mean over the batch is the difference (or 0 where one side is missing).

    >>> import torch
    >>> float(kr(torch.tensor([3.0, 1.0, -1.0]), torch.tensor([1, 1, -1])))
    3.0

    Reference: Arjovsky, Chintala & Bottou (2017); Serrurier et al. (2021).
    """
    if _one_score(z):
        signs, score = _signs(z, y), widened(z).flatten()
        up, down = signs > 0, signs < 0
        share = up.double() / up.sum().clamp_min(1) - down.double() / down.sum().clamp_min(1)
        parts = score * share.to(score) * len(score) * (up.any() & down.any())
    else:
        own, score = _classes(z, y)
        right = (score * own).sum(1)
        parts = right - (score.sum(1) - right) / (z.shape[1] - 1)
    return _reduced(parts, reduction).to(z.dtype)


def hinge(z: Tensor, y: Tensor, margin: float = 1.0, reduction: Reduction = "mean") -> Tensor:
    """`max(0, margin/2 − s·z)` with s = ±1; for classes the mean over k with s_y = 1 and s_k = −1 else.

    >>> import torch
    >>> float(hinge(torch.tensor([0.25, -2.0]), torch.tensor([1, 0])))
    0.125
    """
    _positive(margin)
    if _one_score(z):
        parts = functional.relu(margin / 2 - _signs(z, y) * widened(z).flatten())
    else:
        own, score = _classes(z, y)
        parts = functional.relu(margin / 2 - (2 * own - 1) * score).mean(1)
    return _reduced(parts, reduction).to(z.dtype)


def hkr(z: Tensor, y: Tensor, alpha: float = 0.9, margin: float = 1.0, reduction: Reduction = "mean") -> Tensor:
    """Hinge–Kantorovich–Rubinstein, `α·hinge − (1 − α)·KR`: class against the rest, uniform prior.

    For classes both are means over examples, so that parts of a batch add up.

    Reference: Serrurier et al. (2021), Achieving robustness in classification using optimal transport with hinge
    regularization.

    >>> import torch
    >>> z, y = torch.tensor([[2.0, -2.0]]), torch.tensor([0])
    >>> round(float(hkr(z, y, alpha=0.5)), 4), round(float(hkr(-z, y, alpha=0.5)), 4)
    (-2.0, 3.25)
    """
    _share(alpha)
    return alpha * hinge(z, y, margin, reduction) - (1 - alpha) * kr(z, y, reduction)


def soft_hkr(
    z: Tensor,
    y: Tensor,
    alpha: float = 0.9,
    margin: float = 1.0,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`hkr` of the right class against its rivals, each weighted by how close it is: `π = softmax_{k≠y}(z/t)`, a constant.

        α(max(0, m/2 − z_y) + Σ_k π_k·max(0, m/2 + z_k)) − (1 − α)(z_y − Σ_k π_k·z_k)

    With many classes the mean over rivals hardly sees the one that matters. t → ∞ is the mean, t → 0 the closest rival.

    >>> import torch
    >>> z, y = torch.tensor([[1.0, 0.0, -5.0]]), torch.tensor([0])
    >>> round(float(soft_hkr(z, y, alpha=0.0, temperature=0.01)), 4)
    -1.0

    Reference: Béthune et al. (2022), Pay attention to your loss; the soft variant is deel-torchlip's.
    """
    _share(alpha)
    _positive(margin)
    _positive(temperature, "temperature")
    own, score = _classes(z, y)
    rivals = (score.detach() / temperature).masked_fill(own.bool(), -float("inf")).softmax(1)
    right = (score * own).sum(1)
    hinges = functional.relu(margin / 2 - right) + (rivals * functional.relu(margin / 2 + score)).sum(1)
    parts = alpha * hinges - (1 - alpha) * (right - (rivals * score).sum(1))
    return _reduced(parts, reduction).to(z.dtype)


def tau_bce(z: Tensor, y: Tensor, tau: float = 1.0, reduction: Reduction = "mean") -> Tensor:
    """Binary cross-entropy at the scale of a Lipschitz score, `log(1 + e^(−τ·s·z))/τ`: large τ makes small margins worth having.

    >>> import torch
    >>> round(float(tau_bce(torch.tensor([0.0]), torch.tensor([1]), tau=10.0)), 4)
    0.0693

    Reference: Béthune et al. (2022), Pay attention to your loss.
    """
    _positive(tau, "tau")
    if not _one_score(z):
        raise InputError(f"tau_bce takes one score per example, got {tuple(z.shape)}; cross-entropy is for classes")
    return _reduced(functional.softplus(-tau * _signs(z, y) * widened(z).flatten()) / tau, reduction).to(z.dtype)


def _one_score(z: Tensor) -> bool:
    return z.dim() == 1 or (z.dim() == 2 and z.shape[1] == 1)


def _signs(z: Tensor, y: Tensor) -> Tensor:
    """Labels as ±1."""
    if y.numel() != len(z) or not len(z):
        raise InputError(f"expected one label per score, got scores {tuple(z.shape)} and labels {tuple(y.shape)}")
    labels = y.flatten().to(widened(z).dtype)
    if not bool(((labels == 1) | (labels == 0) | (labels == -1)).all()) or bool(
        (labels == 0).any() & (labels == -1).any()
    ):
        raise InputError("labels of two distributions must be ±1, or 0 and 1")
    return labels.masked_fill(labels == 0, -1)


def check_logits(z: Tensor, y: Tensor) -> None:
    """Refuse what is not one row of logits and one label for each example."""
    if z.dim() != 2 or z.shape[1] < 2 or y.shape != z.shape[:1] or y.is_floating_point():
        raise InputError(
            f"expected logits (batch, classes ≥ 2) and integer labels (batch,), got {tuple(z.shape)} and "
            f"{tuple(y.shape)} {y.dtype}"
        )


def one_hot(z: Tensor, y: Tensor) -> Tensor:
    """The labels as rows like those of z."""
    return functional.one_hot(y, z.shape[1]).to(z.dtype)


def widened(x: Tensor) -> Tensor:
    """In float64, where the device has it."""
    return x if x.device.type == "mps" else x.double()


def _classes(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The labels as one-hot rows, and the scores."""
    check_logits(z, y)
    score = widened(z)
    return one_hot(score, y), score


def _positive(value: float, name: str = "margin") -> None:
    if not value > 0:
        raise InputError(f"{name} must be positive, got {value}")


def _share(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha must lie in [0, 1], got {alpha}")


def _reduced(parts: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return parts
    if reduction not in ("mean", "sum"):
        raise InputError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    return parts.mean() if reduction == "mean" else parts.sum()
