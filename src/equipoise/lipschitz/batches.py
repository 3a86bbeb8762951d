"""What a model makes of a batch: its outputs one by one, and whether samples stay apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import Refused


def batch_note(model: nn.Module, single: tuple[Tensor, ...]) -> tuple[str, ...]:
    """Does a batch of two give what its samples give alone? Refused if samples mix; noted where it cannot be run.

    A NaN in one sample must not reach the other, and the values must agree. This is a check, not a proof: what is proved
    is the bound of the program for a batch of one.
    """
    if any(x.dim() < 2 for x in single):
        return ("the input has no batch dimension: the bound is for the input as a whole",)
    generator = torch.Generator().manual_seed(0)
    other = tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device) for x in single)
    with torch.no_grad():
        alone = flat_outputs(model(*single))
        try:
            together = flat_outputs(model(*(torch.cat([a, b]) for a, b in zip(single, other, strict=True))))
            poisoned = flat_outputs(model(*(torch.cat([a, a * float("nan")]) for a in single)))
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return ("the model runs on a batch of one only: the bound is for that",)
    if any(t.dim() < 1 or t.shape[0] != 2 * a.shape[0] for t, a in zip(together, alone, strict=True) if a.dim()):
        return ("an output has no batch dimension: the bound is for a batch of one",)
    for a, t, p in zip(alone, together, poisoned, strict=True):
        if a.dim() == 0:
            return ("an output has no batch dimension: the bound is for a batch of one",)
        if a.numel() == 0:
            continue
        scale = 1e-3 * (1 + float(a.abs().nan_to_num().max()))
        leak = bool((p[: a.shape[0]].isnan() & ~a.isnan()).any())
        if leak or bool(((t[: a.shape[0]] - a).abs() > scale).any()):
            raise Refused(
                "the output of one sample depends on the other samples of its batch (a mean or reshape over dimension 0?); "
                "a Lipschitz bound per sample does not exist: make the model treat dimension 0 as the batch"
            )
    return ()


def flat_outputs(output: Any) -> list[Tensor]:
    """The floating tensors of a nested output, in order."""
    leaves, _ = torch.utils._pytree.tree_flatten(output)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
