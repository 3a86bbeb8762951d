"""equipoise: the stability of PyTorch networks, measurable, trainable and certifiable.

A number that is called an upper bound is one, in floating point and for the padding, stride, groups and activation
really used; what cannot be guaranteed is refused with the reason, or labelled `lower` or `estimate`.

Names are loaded on first use, so that `equipoise --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise import attacks, lipschitz, smoothing
    from equipoise.core import Bound, Bracket, EquipoiseError, InputError, Kind, Refused
    from equipoise.lipschitz import lipschitz_bound, local_lipschitz
    from equipoise.norms import functional, spectral_norm

__version__ = "0.1.0"
__all__ = [
    "Bound",
    "Bracket",
    "EquipoiseError",
    "InputError",
    "Kind",
    "Refused",
    "attacks",
    "functional",
    "lipschitz",
    "lipschitz_bound",
    "local_lipschitz",
    "smoothing",
    "spectral_norm",
]

#: where each public name lives; an empty attribute is the module itself
_HOME: dict[str, tuple[str, str]] = {
    **{
        name: ("equipoise.core", name)
        for name in ("Bound", "Bracket", "EquipoiseError", "InputError", "Kind", "Refused")
    },
    "attacks": ("equipoise.attacks", ""),
    "functional": ("equipoise.norms.functional", ""),
    "lipschitz": ("equipoise.lipschitz", ""),
    "lipschitz_bound": ("equipoise.lipschitz", "lipschitz_bound"),
    "local_lipschitz": ("equipoise.lipschitz", "local_lipschitz"),
    "smoothing": ("equipoise.smoothing", ""),
    "spectral_norm": ("equipoise.norms", "spectral_norm"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'equipoise' has no attribute {name!r}")
    module, attribute = _HOME[name]
    value = importlib.import_module(module)
    return getattr(value, attribute) if attribute else value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
