"""What `local_lipschitz` and `certified_radius` are called with, checked once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from equipoise.core.errors import InputError


def checked_batch(model: Any, x: Any, what: str) -> Tensor:
    """The batch of inputs, as the one tensor it must be; everything else is refused in a sentence.

    Args:
        model: must be a module or an exported program.
        x: a float tensor with a batch dimension, or a tuple of one.
        what: the function that was called.
    """
    if not isinstance(model, nn.Module | ExportedProgram):
        raise InputError(f"{what} expects a model, an nn.Module or an ExportedProgram, got {type(model).__name__}")
    if isinstance(x, tuple | list):
        if len(x) != 1:
            raise InputError(
                f"{what} takes networks with one input, got {len(x)} tensors: fix the others inside the model, or use "
                "lipschitz_bound, which takes several"
            )
        x = x[0]
    if not isinstance(x, Tensor):
        raise InputError(f"{what} expects a batch of inputs as a tensor, got {type(x).__name__}")
    if x.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"{what} expects float32 or float64 inputs, got {x.dtype}: convert them first, e.g. x.float() / 255"
        )
    if x.dim() < 2 or x.numel() == 0:
        raise InputError(f"{what} expects inputs with a batch dimension, got shape {tuple(x.shape)}")
    if not bool(torch.isfinite(x).all()):
        raise InputError(f"{what} expects finite inputs, got NaN or infinity among them")
    return x


def checked_seconds(seconds: Any) -> None:
    """A budget is a positive number, or None."""
    if seconds is not None and not is_positive(seconds):
        raise InputError(f"seconds must be positive, got {seconds}")


def is_positive(value: Any) -> bool:
    """Whether a value is a positive, finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and math.isfinite(value)
