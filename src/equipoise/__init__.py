"""equipoise: the stability of PyTorch networks, measurable, trainable and certifiable.

A number that is called an upper bound is one, in floating point and for the padding, stride, groups and activation
really used; what cannot be guaranteed is refused with the reason, or labelled `lower` or `estimate`.

Names are loaded on first use, so that `equipoise --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise import (
        attacks,
        curvature,
        data,
        lipschitz,
        models,
        nn,
        optim,
        regularizers,
        report,
        runs,
        smoothing,
        train,
    )
    from equipoise.conversion import export, make_lipschitz
    from equipoise.core import Bound, Bracket, EquipoiseError, InputError, Kind, Refused
    from equipoise.lipschitz import certified_radius, lipschitz_bound, local_lipschitz
    from equipoise.norms import functional, spectral_norm
    from equipoise.regularizers import ActivationDecay
    from equipoise.runs import certify, open_run

__version__ = "0.1.0"
__all__ = [
    "ActivationDecay", "Bound", "Bracket", "EquipoiseError", "InputError", "Kind", "Refused", "attacks",
    "certified_radius", "certify", "curvature", "data", "export", "functional", "lipschitz", "lipschitz_bound",
    "local_lipschitz", "make_lipschitz", "models", "nn", "norms", "open_run", "optim", "regularizers", "report",
    "runs", "smoothing", "spectral_norm", "train",
]  # fmt: skip

#: where each public name lives; an empty attribute is the module itself
_HOME: dict[str, tuple[str, str]] = {
    **{
        name: ("equipoise.core", name)
        for name in ("Bound", "Bracket", "EquipoiseError", "InputError", "Kind", "Refused")
    },
    "ActivationDecay": ("equipoise.regularizers", "ActivationDecay"),
    "attacks": ("equipoise.attacks", ""),
    "certified_radius": ("equipoise.lipschitz", "certified_radius"),
    "certify": ("equipoise.runs", "certify"),
    "curvature": ("equipoise.curvature", ""),
    "data": ("equipoise.data", ""),
    "export": ("equipoise.conversion", "export"),
    "functional": ("equipoise.norms.functional", ""),
    "lipschitz": ("equipoise.lipschitz", ""),
    "lipschitz_bound": ("equipoise.lipschitz", "lipschitz_bound"),
    "local_lipschitz": ("equipoise.lipschitz", "local_lipschitz"),
    "make_lipschitz": ("equipoise.conversion", "make_lipschitz"),
    "models": ("equipoise.models", ""),
    "nn": ("equipoise.nn", ""),
    "norms": ("equipoise.norms", ""),
    "open_run": ("equipoise.runs", "open_run"),
    "optim": ("equipoise.optim", ""),
    "regularizers": ("equipoise.regularizers", ""),
    "report": ("equipoise.report", ""),
    "runs": ("equipoise.runs", ""),
    "smoothing": ("equipoise.smoothing", ""),
    "spectral_norm": ("equipoise.norms", "spectral_norm"),
    "train": ("equipoise.train", ""),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from equipoise.core.errors import near

        raise AttributeError(f"module 'equipoise' has no attribute {name!r}{near(name, _HOME)}")
    module, attribute = _HOME[name]
    value = importlib.import_module(module)
    return getattr(value, attribute) if attribute else value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
