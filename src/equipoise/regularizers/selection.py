"""Which layers a regularizer speaks of, by module type and name pattern; a layer as an operator on inputs of the size it sees."""

import re
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import InputError, Shape, evaluating, require_module
from equipoise.maps.reading import LINEAR_MAPS as LINEAR_MAPS
from equipoise.maps.reading import TRANSPOSED

Names = str | re.Pattern[str] | tuple[str | re.Pattern[str], ...] | None
Types = type[nn.Module] | tuple[type[nn.Module], ...]


def name_matches(name: str, names: Names) -> bool:
    """Whether a dotted module name is meant: a string is a glob over the whole name, a compiled pattern is searched for.

    Args:
        name: of the layer.
        names: glob, compiled pattern, several of them, or None for all.

    >>> name_matches("layer1.0.conv1", "layer*"), name_matches("fc", re.compile(r"^layer\\d")), name_matches("fc", None)
    (True, False, True)
    """
    if names is None:
        return True
    if isinstance(names, tuple | list):
        return any(name_matches(name, one) for one in names)
    return fnmatchcase(name, names) if isinstance(names, str) else names.search(name) is not None


def select_layers(
    model: nn.Module, only: Types = LINEAR_MAPS, names: Names = None
) -> dict[str, nn.Module]:
    """The layers of `model` by name, in module order; a shared layer is listed once; refused where nothing matches.

    Args:
        model: the network.
        only: module types.
        names: glob, compiled pattern, several of them, or None for all.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> list(select_layers(net)), list(select_layers(net, names="2"))
    (['0', '2'], ['2'])
    """
    require_module(model)
    kinds = only if isinstance(only, tuple) else (only,)
    unknown = [kind.__name__ for kind in kinds if not issubclass(kind, LINEAR_MAPS)]
    if unknown or not kinds:
        kinds_of_layers = ", ".join(kind.__name__ for kind in LINEAR_MAPS)
        raise InputError(
            f"only takes subclasses of {kinds_of_layers}; got {', '.join(unknown) or 'nothing'}"
        )
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kinds) and name_matches(name, names)
    }
    if not layers:
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise InputError(
            f"no {wanted} of this model has a name that matches {names!r}; see model.named_modules()"
        )
    return layers


def weight_of(module: nn.Module) -> Tensor:
    """The weight the forward pass uses, with its graph."""
    weight = getattr(require_module(module), "weight", None)
    if not isinstance(weight, Tensor):
        raise InputError(f"{type(module).__name__} has no weight")
    return weight


def plain_weight(name: str, module: nn.Module, attribute: str = "weight") -> nn.Parameter:
    """The weight as a parameter that can be written to; refused where it is computed from others.

    Args:
        name: of the layer, for the message.
        module: the layer.
        attribute: name of the parameter in the module.
    """
    weight = module._parameters.get(attribute)
    if weight is None:
        raise InputError(
            f"the {attribute} of {name!r} is computed by a parametrisation and cannot be changed in place"
        )
    return weight


def as_matrix(name: str, module: nn.Module) -> Tensor:
    """The weight as a matrix with one row per output; refused for grouped layers, which are several matrices.

    Args:
        name: of the layer.
        module: the layer.
    """
    weight = weight_of(module)
    if getattr(module, "groups", 1) != 1:
        raise InputError(
            f"{name!r} is a grouped convolution: its weight is several matrices, leave it out with names="
        )
    if isinstance(module, TRANSPOSED):
        weight = weight.transpose(0, 1)
    return weight.flatten(1)


def input_shapes(
    model: nn.Module, layers: dict[str, nn.Module], example: Tensor
) -> dict[str, Shape]:
    """Shape without batch of what every layer reads when the model sees `example`; mode and statistics are left as they are.

    Args:
        model: the network.
        layers: by name.
        example: an input with batch.
    """
    shapes: dict[str, Shape] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        shape = tuple(args[0].shape[1:])
        shape = shape[-1:] if isinstance(module, nn.Linear) else shape
        if shapes.setdefault(name, shape) != shape:
            raise InputError(
                f"{name!r} is used on inputs of two shapes, {shapes[name]} and {shape}; leave it out"
            )

    with ExitStack() as hooks, evaluating(model), torch.no_grad():
        for name, module in layers.items():
            hooks.callback(module.register_forward_pre_hook(partial(note, name)).remove)
        model(example)
    missing = [name for name in layers if name not in shapes]
    if missing:
        raise InputError(
            f"the forward pass does not use {', '.join(missing)}; leave them out with names="
        )
    return shapes


def spatial_sizes(
    model: nn.Module,
    kernels: dict[str, nn.Module],
    input_size: int | Shape | None,
    example: Tensor | None,
) -> dict[str, Shape | None]:
    """Spatial size of what every convolution reads, from one forward pass; None where neither size nor example is given.

    Args:
        model: the network.
        kernels: its convolutions by name.
        input_size: spatial size of the model's input, for a pass of zeros.
        example: an input with batch, where zeros would not do.
    """
    if not kernels or (example is None and input_size is None):
        return dict.fromkeys(kernels)
    if example is None:
        first: Any = next(m for m in model.modules() if isinstance(m, LINEAR_MAPS[1:]))
        weight = weight_of(first)
        dims = weight.dim() - 2
        size = (input_size,) * dims if isinstance(input_size, int) else tuple(input_size or ())
        if len(size) != dims or any(n < 1 for n in size):
            raise InputError(f"input_size must be {dims} positive number(s), got {input_size}")
        example = torch.zeros(1, first.in_channels, *size, device=weight.device, dtype=weight.dtype)
    return {name: shape[1:] for name, shape in input_shapes(model, kernels, example).items()}
