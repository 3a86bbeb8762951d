"""equipoise: the stability of PyTorch networks, measurable, trainable and certifiable.

Every reported upper bound is rigorous, rounding included, for the padding, stride, groups and activation in use; what
cannot be guaranteed is refused with the reason, or labelled `lower` or `estimate`.

Names are loaded on first use, so that `equipoise --help` does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise import (
        attacks,
        certificates,
        curvature,
        data,
        functional,
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
    from equipoise.norms import spectral_norm
    from equipoise.runs import certify, open_run

__version__ = "1.0.0"
__all__ = [
    "Bound", "Bracket", "EquipoiseError", "InputError", "Kind", "Refused", "attacks",
    "certificates", "certified_radius", "certify", "curvature", "data", "export", "functional", "lipschitz", "lipschitz_bound",
    "local_lipschitz", "make_lipschitz", "models", "nn", "norms", "open_run", "optim", "regularizers", "report",
    "runs", "smoothing", "spectral_norm", "train",
]  # fmt: skip

#: where the names live that are no modules themselves
_NAMES = {
    "conversion": ("export", "make_lipschitz"),
    "core": ("Bound", "Bracket", "EquipoiseError", "InputError", "Kind", "Refused"),
    "lipschitz": ("certified_radius", "lipschitz_bound", "local_lipschitz"),
    "norms": ("spectral_norm",),
    "runs": ("certify", "open_run"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"equipoise.{_HOME[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"equipoise.{name}")
    from equipoise.core.errors import did_you_mean

    raise AttributeError(
        f"module 'equipoise' has no attribute {name!r}{did_you_mean(name, __all__)}"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
