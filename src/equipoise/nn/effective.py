"""Layers whose weight is a function of raw parameters: computed when needed, cached without ever being stale."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from equipoise.core.errors import Refused
from equipoise.core.precision import full_precision
from equipoise.nn.method import SetOnce

Tensors = tuple[Tensor, ...]


class Effective(SetOnce):
    """A layer with effective tensors `e = g(θ)`: subclasses write `compute`, and read `effective` in their forward.

    `effective` hands out copies: whoever writes into them, also through `.data` or NumPy, does not change the layer.

    * Training mode: `g` is computed in every forward pass, with its graph.
    * Evaluation mode: `g` is computed once and kept with a copy of θ. The copy is compared bit for bit before each
      use, so that no way of changing θ (an optimizer, `load_state_dict`, `.data`, a file, a transfer) leaves a stale value.
      Gradients flow all the same: the backward pass computes `g` again with its graph.
    * Inside `torch.compile`, `torch.export`, `torch.func` and forward differentiation `g` is traced like any other code.

    `g` runs in the parameters' dtype with full-precision products and without autocast, and so does the forward pass
    (use `uncast`): rounding weights to half precision would break the guarantee.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: tuple[Tensors, Tensors] | None = None

    def compute(self) -> Tensors:
        """The effective tensors as a differentiable, traceable function of this module's parameters and buffers."""
        raise TypeError(f"{type(self).__name__} must say how its effective tensors are computed")

    def effective(self) -> Tensors:
        """The effective tensors for the parameters as they are now, differentiable: copies of what the layer keeps."""
        return tuple(value.clone() for value in self._current())

    def _current(self) -> Tensors:
        """The effective tensors for the parameters as they are now, possibly those that are kept: never handed out."""
        raw = tuple(self.parameters()) + tuple(self.buffers())
        for tensor in raw:
            if tensor.dtype in (torch.float16, torch.bfloat16):
                raise Refused(
                    f"{type(self).__name__} holds {tensor.dtype} parameters: a rounded weight has no guarantee; "
                    "keep it in float32 (under autocast it stays there) or call export() and convert that"
                )
        if self.training or not all(map(plainly_called, raw)):
            return self._computed()
        kept = self._kept
        if kept is None or not _same(kept[0], raw):
            with torch.inference_mode(False), torch.no_grad():
                copies = tuple(tensor.detach().clone() for tensor in raw)
                values = tuple(value.detach() for value in self._computed())
            if any(tensor.is_inference() for tensor in (*copies, *values)):
                return values
            self._kept = kept = copies, values
        parameters = tuple(p for p in self.parameters() if p.requires_grad)
        if torch.is_grad_enabled() and parameters:
            return _Recomputed.apply(self, kept[1], *parameters)
        return kept[1]

    def constructions(self) -> tuple[Effective, ...]:
        """The modules whose effective tensors a training step computes for this layer, as far as it was called: itself."""
        return (self,)

    def _computed(self) -> Tensors:
        """`g(θ)` in full precision, with its graph and nothing kept."""
        with self._exactly():
            return self.compute()

    @contextlib.contextmanager
    def _exactly(self) -> Iterator[None]:
        """Full-precision products, and no autocast."""
        device = next(iter(self.parameters()), torch.zeros(())).device.type
        with uncast(device), _full_precision():
            yield

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}  # a copy or a pickle computes its own


def _same(kept: Tensors, raw: Tensors) -> bool:
    return len(kept) == len(raw) and all(
        a.dtype == b.dtype and a.device == b.device and torch.equal(a, b) for a, b in zip(kept, raw, strict=True)
    )


class _Recomputed(torch.autograd.Function):
    """Kept values forward, `g` computed again backward."""

    @staticmethod
    def forward(ctx: Any, layer: Effective, values: Tensors, *parameters: Tensor) -> Tensors:
        ctx.layer = layer
        ctx.names = [name for name, p in layer.named_parameters() if p.requires_grad]
        ctx.rest = {name: p for name, p in layer.named_parameters() if not p.requires_grad} | dict(
            layer.named_buffers()
        )
        ctx.save_for_backward(*parameters)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        parameters = ctx.saved_tensors  # raises if they were changed in between
        higher = torch.is_grad_enabled()
        with torch.enable_grad():
            values = _computed_with(ctx.layer, {**dict(zip(ctx.names, parameters, strict=True)), **ctx.rest})
            pairs = [(v, g) for v, g in zip(values, gradients, strict=True) if v.requires_grad]
            found = torch.autograd.grad(
                [v for v, _ in pairs], parameters, [g for _, g in pairs], create_graph=higher, allow_unused=True
            )
        return (None, None, *found)


def _computed_with(layer: Effective, tensors: dict[str, Tensor]) -> Tensors:
    """`g` of given parameters and buffers: `torch.func.functional_call` has put the module's own back by now."""
    own = dict(layer.named_parameters()) | dict(layer.named_buffers())
    if all(own[name] is tensor for name, tensor in tensors.items()):
        return layer._computed()
    found: Tensors = torch.func.functional_call(
        _Computing(layer), {f"layer.{name}": tensor for name, tensor in tensors.items()}, ()
    )
    return found


class _Computing(nn.Module):
    """`g` as a forward pass, for `functional_call`."""

    def __init__(self, layer: Effective) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> Tensors:
        """The effective tensors."""
        return self.layer._computed()


def uncast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Leave autocast for the certified part; nothing at all when autocast is off, so that graphs stay plain."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    if torch.compiler.is_compiling():  # backend switches cannot be traced; the compiled graph follows the global ones
        yield
    else:
        with full_precision():
            yield


def plainly_called(raw: Tensor) -> bool:
    """Neither compiled nor inside `torch.func` or forward differentiation: those need operators that they know."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return forward_ad.unpack_dual(raw).tangent is None


def as_weight(x: Tensor, weight: Tensor) -> Tensor:
    """The input in the weight's dtype under autocast; elsewhere a wrong dtype stays the error it is in `nn.Linear`."""
    return x.to(weight.dtype) if torch.is_autocast_enabled(x.device.type) else x
