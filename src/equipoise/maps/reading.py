"""The one reader of torch's linear layers: what the forward pass of this very module does, or a refusal.

Torch keeps the padding of a convolution twice. With zero padding the forward pass reads `padding`, with the other modes a
private list made of it in the constructor; whoever writes to one does not change the other. This reader asks for the
one that the forward pass uses.
"""

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError, Refused
from equipoise.maps.geometry import Geometry, Integers, integers
from equipoise.maps.linear import Adjoint, Convolution, Matrix

CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[type[nn.Module], ...] = (
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
#: layers that are linear maps and have a `weight`
LINEAR_MAPS: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)


def module_kind(module: nn.Module) -> type[nn.Module]:
    """The plain class whose arithmetic this module really does; refused for hooks and overridden forwards.

    Parametrised modules pass: their forward is that of the plain class and `module.weight` is the effective weight.
    """
    name = type(module).__name__
    kind = next((k for k in LINEAR_MAPS if isinstance(module, k)), None)
    if kind is None:
        raise Refused(
            f"spectral_norm knows nn.Linear, nn.Conv1d/2d/3d and nn.ConvTranspose1d/2d/3d, not {name}; "
            "for a whole network use equipoise.lipschitz_bound"
        )
    methods = [m for m in ("forward", "_conv_forward", "_output_padding") if hasattr(kind, m)]
    if any(m in vars(module) or getattr(type(module), m) is not getattr(kind, m) for m in methods):
        raise Refused(
            f"{name} overrides the forward of {kind.__name__}: its weight says nothing about its norm"
        )
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or torch.nn.parameter.is_lazy(weight):
        raise InputError(f"{name} has no weight yet: run a forward pass of the lazy module first")
    if module._forward_hooks or module._forward_pre_hooks:
        raise Refused(
            f"{name} has forward hooks, which may change its output or weight; remove them, or use "
            "torch.nn.utils.parametrizations instead of the old weight_norm/spectral_norm"
        )
    if weight.is_meta:
        raise InputError(f"the weight of {name} is on the meta device: it has no values")
    return kind


def geometry_of(module: nn.Module, input_size: Integers | None = None) -> Geometry:
    """The geometry of a linear layer on inputs of this size; of a transposed convolution, that of its adjoint.

    Args:
        module: the layer.
        input_size: spatial size of its input; None: unknown.

    >>> geometry_of(nn.Conv2d(3, 8, 5, stride=2, padding=1, padding_mode="circular")).amount
    ((1, 1), (1, 1))
    """
    layer: Any = module  # the attributes read below are those of the plain class
    shape = tuple(layer.weight.shape)
    if isinstance(module, nn.Linear):
        return Geometry(shape)
    if isinstance(module, CONVOLUTIONS):
        return Geometry.of(
            shape,
            layer.padding_mode,
            layer.stride,
            layer.dilation,
            layer.groups,
            padding_of(module),
            input_size,
        )
    if not isinstance(module, TRANSPOSED):
        raise Refused(f"{type(module).__name__} is no linear layer that is known here")
    if layer.padding_mode != "zeros":
        raise Refused(
            f"torch runs transposed convolutions with zero padding only, not {layer.padding_mode!r}"
        )
    dims = len(shape) - 2
    amount = [(p, p) for p in integers(layer.padding, dims, "padding", 0)]
    plain = Geometry.of(shape, "zeros", layer.stride, layer.dilation, layer.groups, amount)
    if input_size is None:
        return plain
    return plain.giving(input_size, integers(layer.output_padding, dims, "output_padding", 0))


def padding_of(module: nn.Module) -> list[tuple[int, int]]:
    """(left, right) per axis that the forward pass of a convolution adds."""
    layer: Any = module
    dims = layer.weight.dim() - 2
    if layer.padding_mode != "zeros":
        twice = list(layer._reversed_padding_repeated_twice)
        if len(twice) != 2 * dims:
            raise Refused(f"{type(module).__name__} pads {twice}: {2 * dims} numbers were expected")
        return [(twice[2 * i], twice[2 * i + 1]) for i in range(dims)][::-1]
    if layer.padding == "valid":
        return [(0, 0)] * dims
    if layer.padding == "same":
        dilation = integers(layer.dilation, dims, "dilation")
        reach = [d * (k - 1) for d, k in zip(dilation, layer.weight.shape[2:], strict=True)]
        return [(r // 2, r - r // 2) for r in reach]
    return [(p, p) for p in integers(layer.padding, dims, "padding", 0)]


def read(module: nn.Module, input_size: Integers | None = None) -> Matrix | Convolution | Adjoint:
    """The linear part of a layer with its effective weight (parametrisations applied), detached.

    Args:
        module: the layer.
        input_size: spatial size of its input; None: unknown.

    >>> type(read(nn.ConvTranspose2d(2, 3, 3), input_size=4)).__name__
    'Adjoint'
    """
    module_kind(module)
    weight = module.weight
    assert isinstance(weight, Tensor)
    return linear_part(module, weight.detach(), input_size)


def linear_part(
    module: nn.Module, weight: Tensor, input_size: Integers | None = None
) -> Matrix | Convolution | Adjoint:
    """The linear part of a plain layer with a given weight in place of its own; differentiable in it.

    Args:
        module: the layer.
        weight: the weight.
        input_size: spatial size of its input; None: unknown.
    """
    if isinstance(module, nn.Linear):
        return Matrix(weight)
    conv = Convolution(weight, geometry_of(module, input_size))
    return Adjoint(conv) if isinstance(module, TRANSPOSED) else conv
