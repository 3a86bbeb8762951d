"""A layer as a linear operator on inputs of the size it really sees, and its largest singular vector, followed as it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError
from equipoise.core.strides import fresh_strides
from equipoise.regularizers.selection import LINEAR_MAPS, weight_of


def apply_linear(module: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    """The linear part of the layer: its forward without the bias."""
    layer: Any = module
    if isinstance(module, nn.Linear):
        return torch.nn.functional.linear(x, weight)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return layer._conv_forward(x, weight, None)
    function = {3: torch.conv_transpose1d, 4: torch.conv_transpose2d, 5: torch.conv_transpose3d}[weight.dim()]
    return function(x, weight, None, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)


def input_shapes(model: nn.Module, layers: dict[str, nn.Module], example: Tensor) -> dict[str, tuple[int, ...]]:
    """Shape without batch of what every layer reads when the model sees `example`; mode and statistics are left as they are."""
    shapes: dict[str, tuple[int, ...]] = {}
    with recording(layers, shapes), _evaluating(model), torch.no_grad():
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


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class SingularVectors:
    """Subspace iteration on `AᵀA`, warm-started: a few right singular vectors of a layer that follow it while it trains.

    `σ = ‖Av‖ ≤ σ₁` for any unit v, so the value is a lower bound that is tight once the vectors have settled; its gradient
    with v held fixed is the gradient of σ₁ there. One call costs `steps` forward and backward passes of `vectors` inputs.
    """

    def __init__(self, module: nn.Module, shape: tuple[int, ...], vectors: int = 2, seed: int = 0) -> None:
        weight = weight_of(module)
        generator = torch.Generator().manual_seed(seed)
        size = min(vectors, max(1, int(torch.tensor(shape).prod())))
        self.module, self.shape = module, shape
        V = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
        self.V = _orthonormal(V).to(device=weight.device, dtype=weight.dtype)

    @torch.no_grad()
    def iterate(self, steps: int) -> None:
        """`V ← orth(AᵀA V)`, `steps` times."""
        weight = weight_of(self.module).detach()
        self.V = self.V.to(device=weight.device, dtype=weight.dtype)
        for _ in range(steps):
            V = self._gram(weight)
            if bool((torch.linalg.vector_norm(V.flatten(1), dim=1) > 0).all()) and bool(V.isfinite().all()):
                self.V = _orthonormal(V)

    def _gram(self, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            V = self.V.detach().requires_grad_()
            AV = apply_linear(self.module, weight, V)
            (back,) = torch.autograd.grad(AV, V, AV.detach())
        return back

    def norm(self) -> Tensor:
        """`‖A v‖` for the best vector of the subspace, differentiable in the weight."""
        weight = weight_of(self.module)
        with torch.no_grad():
            AV = apply_linear(self.module, weight, self.V).flatten(1)
            _, vectors = torch.linalg.eigh(AV @ AV.mT)
            v = torch.tensordot(vectors[:, -1], self.V, 1)[None]
            v = v / torch.linalg.vector_norm(v)
        return torch.linalg.vector_norm(apply_linear(self.module, weight, v))


def _orthonormal(V: Tensor) -> Tensor:
    if len(V) == 1:
        return V / torch.linalg.vector_norm(V)
    Q, _ = torch.linalg.qr(V.flatten(1).mT)
    return fresh_strides(Q.mT.reshape(V.shape))
