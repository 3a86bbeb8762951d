"""What a guard holds: the weights with the layers that use them, their radii, and the proofs carried along with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from equipoise.core.errors import InputError, Refused
from equipoise.maps.geometry import Geometry
from equipoise.maps.reading import geometry_of, module_kind
from equipoise.norms.carried import CarriedMatrix
from equipoise.norms.carried_convolution import CarriedConvolution
from equipoise.regularizers.selection import input_shapes, name_matches, plain_weight, zero_image

Radius = float | Mapping[str, float]


class Carried(Protocol):
    """A norm that is carried along: what the guard asks of a matrix and of a convolution."""

    used: Counter[str]

    def bracket(
        self, W: Tensor, enough: float = ..., rtol: float = ..., what: str = ..., renew: bool = ..., loose: float = ...
    ) -> tuple[float, float]:
        """Proved `(lower, upper)`."""

    def scaled(self, factor: float) -> None:
        """The weight was multiplied by `factor`."""

    def state_dict(self) -> dict[str, Tensor]:
        """What resuming needs."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue."""


@dataclass
class Guarded:
    """One weight under guard, with the layers that use it, by name."""

    modules: dict[str, nn.Module]
    weight: nn.Parameter
    radius: float
    carried: Carried
    geometry: Geometry
    lower: float = 0.0
    upper: float = math.inf
    seen: tuple[int, int, torch.dtype] | None = None
    restored: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the layers that use it."""
        return tuple(self.modules)

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def mark(self) -> tuple[int, int, torch.dtype]:
        """What changes when the weight is written to; refused where a layer has another weight or geometry by now."""
        for name, module in self.modules.items():
            if plain_weight(name, module) is not self.weight:
                raise Refused(
                    f"the weight of {name!r} is another parameter than when the guard was made (assigned, or loaded with "
                    "assign=True), so its proof is about a weight that is not used: make a new guard"
                )
            if geometry_of(module) != self.geometry:
                raise Refused(
                    f"{name!r} has another padding, stride, dilation or groups than when the guard was made, so its proof is "
                    "about another map: make a new guard"
                )
        return self.weight._version, self.weight.data_ptr(), self.weight.dtype


def radii_of(layers: Mapping[str, nn.Module], radius: Radius) -> dict[str, float]:
    """The radius of every layer that has one."""
    if not isinstance(radius, Mapping):
        radius = {"*": radius}
    for pattern, value in radius.items():
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise InputError(f"a radius must be a positive number, got {value!r} for {pattern!r}")
    found = {}
    for name in layers:
        matching = [value for pattern, value in radius.items() if name_matches(name, pattern)]
        if matching:
            found[name] = float(matching[0])
    unused = [pattern for pattern in radius if not any(name_matches(name, pattern) for name in layers)]
    if unused or not found:
        raise InputError(f"no layer has a name that matches {unused[0]!r}; there are {', '.join(list(layers)[:8])}")
    return found


def sizes_of(
    model: nn.Module, spatial: dict[str, nn.Module], input_size: int | tuple[int, ...] | None, example: Tensor | None
) -> dict[str, tuple[int, ...] | None]:
    """Spatial size of what every convolution reads; None where it is not known."""
    if not spatial or (input_size is None and example is None):
        return dict.fromkeys(spatial)
    image = zero_image(model, input_size) if example is None and input_size is not None else example
    assert image is not None
    return {name: shape[1:] for name, shape in input_shapes(model, spatial, image).items()}


def guarded(
    layers: dict[str, nn.Module], radii: dict[str, float], sizes: dict[str, tuple[int, ...] | None]
) -> list[Guarded]:
    """One entry per weight; layers that share theirs are one entry, with the smallest of their radii."""
    users: dict[int, list[str]] = {}
    for name, module in layers.items():
        weight = plain_weight(name, module)
        if hasattr(weight, "placements"):
            raise Refused(
                f"the weight of {name!r} is sharded (DTensor): no rank holds the matrix whose norm is asked for"
            )
        users.setdefault(id(weight), []).append(name)
    found: list[Guarded] = []
    for names in users.values():
        module = layers[names[0]]
        matrix = module_kind(module) is nn.Linear
        if len(names) > 1 and not matrix:
            raise Refused(
                f"{' and '.join(map(repr, names))} share one kernel: their norms may differ; leave all but one out"
            )
        carried: Carried = CarriedMatrix(len(found)) if matrix else CarriedConvolution(module, sizes[names[0]])
        radius = min(radii[name] for name in names)
        users_of = {name: layers[name] for name in names}
        found.append(Guarded(users_of, plain_weight(names[0], module), radius, carried, geometry_of(module)))
    return found
