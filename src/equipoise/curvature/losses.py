"""Losses that are means over the data, whatever the batches: each knows how many terms of the mean a batch holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError

Loss = Literal["ce", "mse"] | Callable[[Tensor, Tensor], Tensor]

#: the label that cross-entropy leaves out
IGNORED = -100


@dataclass(frozen=True)
class MeanLoss:
    """`mean(output, y)` is the mean over the terms of a batch, `terms(y)` their number (its weight in the whole mean)."""

    mean: Callable[[Tensor, Tensor], Tensor]
    terms: Callable[[Tensor], float]


def mean_loss(loss: Loss) -> MeanLoss:
    """A loss by name, or a user's function, which is taken for a mean over the samples of the batch.

    >>> mean_loss("ce").terms(torch.tensor([0, 2, -100]))
    2.0
    """
    if isinstance(loss, str):
        if loss not in _LOSSES:
            raise InputError(f"loss must be one of {', '.join(_LOSSES)} or a function, got {loss!r}")
        return _LOSSES[loss]
    return MeanLoss(loss, lambda y: float(len(y)))


def _cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """The mean over the labels that are not ignored; 0 where all are."""
    _check_classes(z, y)
    y = y if y.is_floating_point() else y.long()
    total = nn.functional.cross_entropy(z, y, ignore_index=IGNORED, reduction="sum")
    return total / max(_labelled(y), 1.0)


def _check_classes(z: Tensor, y: Tensor) -> None:
    if z.dim() < 2:
        raise InputError(f"cross-entropy needs outputs (batch, classes, …), got shape {tuple(z.shape)}")
    wanted = (z.shape[0], *z.shape[2:])
    if y.is_floating_point() and y.shape == z.shape:
        return
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or tuple(y.shape) != wanted:
        raise InputError(
            f"cross-entropy of outputs {tuple(z.shape)} needs class numbers of shape {wanted}, or probabilities of the "
            f"outputs' shape; got {y.dtype} of shape {tuple(y.shape)}"
        )
    outside = y[(y != IGNORED) & ((y < 0) | (y >= z.shape[1]))]
    if len(outside):
        raise InputError(
            f"label {int(outside[0])} is none of the model's {z.shape[1]} classes, counted from 0 ({IGNORED} is left out)"
        )


def _labelled(y: Tensor) -> float:
    if y.is_floating_point():
        return y.numel() / (y.shape[1] if y.dim() > 1 else 1)
    return float((y != IGNORED).sum())


def _mean_square(z: Tensor, y: Tensor) -> Tensor:
    """Entry by entry; (N,) and (N, 1) are the same numbers, anything else of another shape is refused."""
    if y.shape != z.shape:
        if z.numel() != y.numel() or sorted((z.shape[1:], y.shape[1:]), key=len) != [(), (1,)]:
            raise InputError(f"expected targets of the outputs' shape {tuple(z.shape)}, got {tuple(y.shape)}")
        y = y.reshape(z.shape)
    return (z - y).square().mean()  # torch's own has no working forward derivative


_LOSSES = {
    "ce": MeanLoss(_cross_entropy, _labelled),
    "mse": MeanLoss(_mean_square, lambda y: float(y.numel())),
}
