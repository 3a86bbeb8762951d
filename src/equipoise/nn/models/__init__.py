"""Networks by name: every builder takes keyword arguments that JSON can hold, so that a checkpoint can rebuild its model."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from equipoise.core import InputError, Shape
from equipoise.nn.models.lipschitz import (
    bronet,
    lipschitz_cnn,
    liresnet,
    sll,
    sll_large,
    sll_medium,
    sll_small,
    sll_tiny,
    sll_xlarge,
)
from equipoise.nn.models.plain import cnn, mlp

Builder = Callable[..., nn.Module]

#: networks without a constraint
PLAIN: dict[str, Builder] = {"mlp": mlp, "cnn": cnn}
#: networks whose constant is 1, or the argument `constant`
LIPSCHITZ: dict[str, Builder] = {
    "sll": sll,
    "sll_tiny": sll_tiny,
    "sll_small": sll_small,
    "sll_medium": sll_medium,
    "sll_large": sll_large,
    "sll_xlarge": sll_xlarge,
    "bronet": bronet,
    "liresnet": liresnet,
    "lipschitz_cnn": lipschitz_cnn,
}
#: all builders by name
MODELS: dict[str, Builder] = {**PLAIN, **LIPSCHITZ}


def build(name: str, **arguments: Any) -> nn.Module:
    """The network of that name; unknown names and arguments are refused with what there is.

    >>> build("mlp", widths=[8]).__class__.__name__
    'Sequential'
    """
    builder = _builder(name)
    preset = getattr(builder, "keywords", {})  # what makes a preset the network of its name
    names = [key for key in inspect.signature(builder).parameters if key not in preset]
    unknown = [key for key in arguments if key not in names]
    if unknown:
        raise InputError(f"{name} takes no argument {unknown[0]!r}; it takes {', '.join(names)}")
    return builder(**arguments)


def _builder(name: str) -> Builder:
    if name not in MODELS:
        raise InputError(f"there is no model {name!r}; there are {', '.join(sorted(MODELS))}")
    return MODELS[name]


def factory(name: str) -> str:
    """What a checkpoint's `config.json` calls the builder.

    >>> factory("mlp")
    'equipoise.nn.models:mlp'
    """
    _builder(name)
    return f"{__name__}:{name}"


def input_shape(name: str, **arguments: Any) -> Shape:
    """The shape of one input of the model built with these arguments.

    >>> input_shape("cnn"), input_shape("mlp", in_channels=1, input_size=[4, 6])
    ((3, 32, 32), (1, 4, 6))
    """
    defaults = {k: p.default for k, p in inspect.signature(_builder(name)).parameters.items()}
    values = {**defaults, **arguments}
    if values.get("in_features") is not None:
        return (int(values["in_features"]),)
    size = values["input_size"]
    height, width = (size, size) if isinstance(size, int) else size
    return int(values["in_channels"]), int(height), int(width)


__all__ = ["LIPSCHITZ", "MODELS", "PLAIN", "build", "factory", "input_shape", *MODELS]
