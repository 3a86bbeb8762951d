"""A layer as a linear operator on inputs of the size it really sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.core.modules import evaluating
from equipoise.maps.linear import Linear
from equipoise.maps.reading import linear_part
from equipoise.regularizers.selection import LINEAR_MAPS, weight_of


def linear_map(module: nn.Module, shape: tuple[int, ...]) -> Linear:
    """The linear part of a layer as it is now, on inputs of this shape (without batch); differentiable in its weights."""
    return linear_part(module, weight_of(module), None if isinstance(module, nn.Linear) else tuple(shape[1:]))


def input_shapes(model: nn.Module, layers: dict[str, nn.Module], example: Tensor) -> dict[str, tuple[int, ...]]:
    """Shape without batch of what every layer reads when the model sees `example`; mode and statistics are left as they are."""
    shapes: dict[str, tuple[int, ...]] = {}
    with recording(layers, shapes), evaluating(model), torch.no_grad():
        model(example)
    missing = [name for name in layers if name not in shapes]
    if missing:
        raise InputError(f"the forward pass does not use {', '.join(missing)}; leave them out with names=")
    return shapes


def zero_image(model: nn.Module, input_size: int | tuple[int, ...]) -> Tensor:
    """One image of zeros for the first convolution of the model."""
    first = next(
        module for module in model.modules() if isinstance(module, LINEAR_MAPS) and not isinstance(module, nn.Linear)
    )
    weight = weight_of(first)
    dims = weight.dim() - 2
    size = (input_size,) * dims if isinstance(input_size, int) else tuple(input_size)
    if len(size) != dims or any(n < 1 for n in size):
        raise InputError(f"input_size must be {dims} positive number(s), got {input_size}")
    channels = getattr(first, "in_channels", 1)
    return torch.zeros(1, int(channels), *size, device=weight.device, dtype=weight.dtype)


@contextmanager
def recording(layers: dict[str, nn.Module], shapes: dict[str, tuple[int, ...]]) -> Iterator[None]:
    """While inside, note the input shape of every layer that is called."""
    handles = [module.register_forward_pre_hook(_note(name, shapes)) for name, module in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(name: str, shapes: dict[str, tuple[int, ...]]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        shape = tuple(args[0].shape[1:])
        shape = shape[-1:] if isinstance(module, nn.Linear) else shape
        if shapes.setdefault(name, shape) != shape:
            raise InputError(f"{name!r} is used on inputs of two shapes, {shapes[name]} and {shape}; leave it out")

    return hook
