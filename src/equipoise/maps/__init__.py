"""What a layer is: linear maps, their geometry, and the one reader of torch's modules."""

from equipoise.maps.algebra import add, compose
from equipoise.maps.geometry import Axis, Geometry, PaddingMode
from equipoise.maps.linear import (
    Adjoint,
    Convolution,
    Diagonal,
    Linear,
    Matrix,
    Padding,
    convolution,
)
from equipoise.maps.reading import geometry_of, module_kind, read

__all__ = [
    "Adjoint", "Axis", "Convolution", "Diagonal", "Geometry", "Linear", "Matrix", "Padding", "PaddingMode", "add",
    "compose", "convolution", "geometry_of", "module_kind", "read",
]  # fmt: skip
