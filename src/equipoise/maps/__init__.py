"""What a layer is: linear maps, their geometry, and the one reader of torch's modules."""

from equipoise.maps.algebra import add, compose
from equipoise.maps.geometry import Geometry
from equipoise.maps.linear import Convolution, Diagonal, Linear, Matrix, Padding, convolution
from equipoise.maps.reading import read

__all__ = [
    "Convolution", "Diagonal", "Geometry", "Linear", "Matrix", "Padding", "add", "compose", "convolution", "read",
]  # fmt: skip
