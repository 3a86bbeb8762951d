"""Types for bounds, errors, and floating-point arithmetic with error terms."""

from equipoise.core.bounds import Bound, Bracket, Kind, as_upper, format_down, format_up
from equipoise.core.errors import EquipoiseError, InputError, Refused
from equipoise.core.modules import fresh_strides
from equipoise.core.precision import full_precision

__all__ = [
    "Bound",
    "Bracket",
    "EquipoiseError",
    "InputError",
    "Kind",
    "Refused",
    "as_upper",
    "format_down",
    "format_up",
    "fresh_strides",
    "full_precision",
]  # fmt: skip
