"""equipoise: the stability of PyTorch networks, measurable, trainable and certifiable.

A number that is called an upper bound is one, in floating point and for the padding, stride, groups and activation
really used; what cannot be guaranteed is refused with the reason, or labelled `lower` or `estimate`.
"""

from equipoise.core import Bound, Bracket, EquipoiseError, InputError, Kind, Refused
from equipoise.norms import functional, spectral_norm

__version__ = "0.1.0"
__all__ = ["Bound", "Bracket", "EquipoiseError", "InputError", "Kind", "Refused", "functional", "spectral_norm"]
